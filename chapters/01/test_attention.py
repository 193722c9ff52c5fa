"""Attention with no cache, the reference of the whole book, against sums written out by hand.

What attention should be is computed here key by key with Python's own floating point, from the
formulas of the chapter. No stage takes part.
"""

import math
import re

import pytest
import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE, TOLERANCE

PLAIN = AttentionSpec()


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = PLAIN, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one query head and one key at a time."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    keys, values = k.double().tolist(), v.double().tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(num_queries, num_heads, dtype=torch.float64)
    for i in range(num_queries):
        position = num_keys - num_queries + i
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            query = q[i, head].double().tolist()
            scores = {}
            for j in range(num_keys):
                if causal and j > position:
                    continue
                if spec.window is not None and j <= position - spec.window:
                    continue
                score = math.fsum(a * b for a, b in zip(query, keys[j][kv_head], strict=True))
                score *= spec.scale if spec.scale is not None else 1 / math.sqrt(head_dim)
                if spec.soft_cap is not None:
                    score = spec.soft_cap * math.tanh(score / spec.soft_cap)
                if spec.alibi_slopes is not None:
                    score -= spec.alibi_slopes[head] * (position - j)
                scores[j] = score
            sink = () if spec.sinks is None else (spec.sinks[head],)
            if not scores and not sink:
                lse[i, head] = -math.inf
                continue
            top = max(*scores.values(), *sink, -math.inf)
            total = math.fsum(math.exp(s - top) for s in (*scores.values(), *sink))
            lse[i, head] = top + math.log(total)
            for d in range(head_dim):
                out[i, head, d] = math.fsum(
                    math.exp(s - top) / total * values[j][kv_head][d] for j, s in scores.items()
                )
    return out, lse


def random_qkv(
    num_queries: int,
    num_keys: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads)]
    q, k, v = (
        torch.randn(*shape, head_dim, generator=random, dtype=torch.float64).to(DEVICE, dtype)
        for shape in shapes
    )
    return q, k, v


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Equal up to ``tolerance``, relative where numbers exceed 1; infinities are the same ones."""
    found, expected = found.double().cpu(), expected.double()
    error = torch.where(found == expected, 0, (found - expected) / expected.abs().clamp(min=1))
    worst = error.abs().max().item()
    assert worst <= tolerance, f"{what} differs by {worst:.3g} (allowed: {tolerance:g})"


def check(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = PLAIN, causal: bool = True
) -> None:
    out, lse = attention(q, k, v, spec, causal=causal, return_lse=True)
    expected_out, expected_lse = by_hand(q, k, v, spec, causal)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert_close(out, expected_out, TOLERANCE[q.dtype], "the output")
    assert_close(lse, expected_lse, TOLERANCE[q.dtype], "the log-sum-exp")
    assert torch.equal(out, attention(q, k, v, spec, causal=causal))


def column(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One head of one number: [len(numbers), 1, 1]."""
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)[:, None, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 7), (7, 7), (3, 8)])
def test_lengths(num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype) -> None:
    """A first token, a decode step, a prompt, a later chunk of a prompt."""
    check(*random_qkv(num_queries, num_keys, dtype=dtype), causal=causal)


@pytest.mark.parametrize("head_dim", [1, 3, 64, 80, 96, 128])
@pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(10, 2), (9, 3), (24, 4), (28, 4), (14, 2), (8, 8), (8, 1)]
)
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(*random_qkv(2, 5, num_heads, num_kv_heads, head_dim))


def test_neighbouring_query_heads_share_a_kv_head() -> None:
    """Of 6 query heads and 3 KV heads, heads 0 and 1 read KV head 0, heads 4 and 5 KV head 2."""
    q, k, v = random_qkv(1, 4, num_heads=6, num_kv_heads=3)
    other = v.clone()
    other[:, 2] += 1
    before, after = attention(q, k, v), attention(q, k, other)
    changed = [head for head in range(6) if not torch.equal(before[:, head], after[:, head])]
    assert changed == [4, 5], f"KV head 2 changed, and with it query heads {changed}"


def test_agrees_with_torch() -> None:
    q, k, v = random_qkv(6, 6, num_heads=4, num_kv_heads=2)
    queries, keys, values = (t.transpose(0, 1) for t in (q, k, v))  # torch wants heads first
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    assert_close(attention(q, k, v), expected.transpose(0, 1).cpu(), 1e-12, "the output")


def test_no_token_sees_a_later_one() -> None:
    """The first 4 of 7 outputs are those of the first 4 tokens alone."""
    q, k, v = random_qkv(7, 7)
    assert_close(attention(q, k, v)[:4], attention(q[:4], k[:4], v[:4]).cpu(), 1e-12, "a prefix")


def test_queries_stand_at_the_end() -> None:
    """The last 2 queries alone see what they saw among all 7."""
    q, k, v = random_qkv(7, 7)
    assert_close(attention(q[-2:], k, v), attention(q, k, v)[-2:].cpu(), 1e-12, "the last queries")


@pytest.mark.parametrize("window, first", [(4, 6), (1, 9), (9, 1), (10, 0), (11, 0), (1000, 0)])
def test_window(window: int, first: int) -> None:
    """With a window of 4 the query at position 9 sees the keys 6 .. 9: four of them."""
    q, k, v = random_qkv(1, 10)
    seen = []
    for j in range(10):
        moved = v.clone()
        moved[j] += 1
        spec = AttentionSpec(window=window)
        if not torch.equal(attention(q, k, v, spec), attention(q, k, moved, spec)):
            seen.append(j)
    assert seen == list(range(first, 10)), f"window {window}: position 9 sees the keys {seen}"


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(window=3),
        AttentionSpec(soft_cap=1.5),
        AttentionSpec(scale=0.25),
        AttentionSpec(scale=1.0),
        AttentionSpec(scale=3.0, window=2, soft_cap=4.0),
        AttentionSpec(alibi_slopes=(0.5, 0.25, 0.125, 2.0)),
        AttentionSpec(sinks=(0.5, -1.0, 3.0, -40.0)),
        AttentionSpec(
            window=2, soft_cap=2.0, alibi_slopes=(1.0, 0.5, 0.1, 0.0), sinks=(1, 2, 0, 4)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_queries, num_keys", [(1, 9), (8, 8), (4, 9)])
def test_specs(spec: AttentionSpec, num_queries: int, num_keys: int) -> None:
    check(*random_qkv(num_queries, num_keys), spec)
    check(*random_qkv(num_queries, num_keys, dtype=torch.float32), spec, causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(
    "score, capped", [(100, 48.2014), (1000, 50.0), (5000, 50.0), (-10000, -50.0)]
)
def test_soft_cap_of_large_scores(score: float, capped: float, dtype: torch.dtype) -> None:
    """vllm-project/vllm#56578: a tanh that overflows gives NaN. With one key lse is its score."""
    spec = AttentionSpec(scale=1.0, soft_cap=50.0)
    q, k, v = (column(x, dtype=dtype) for x in (1.0, score, 3.0))
    out, lse = attention(q, k, v, spec, return_lse=True)
    assert out.item() == 3.0
    assert lse.item() == pytest.approx(capped, abs=5e-5)


def test_very_low_scores_count() -> None:
    """flashinfer-ai/flashinfer#4267: all scores are -60000, lower than a finite mask might be."""
    q, k = column(1.0, 1.0), column(-60000.0, -60000.0, -60000.0, -60000.0, 0.0)
    v = column(1.0, 2.0, 3.0, 6.0, 1e9)
    out, lse = attention(q, k, v, AttentionSpec(scale=1.0), return_lse=True)
    assert out[0].item() == pytest.approx(3.0, abs=1e-2)  # float32 near 60000: steps of 1/256
    assert lse[0].item() == pytest.approx(-59998.614, abs=4e-3)


def test_very_high_scores_do_not_overflow() -> None:
    q, k, v = random_qkv(5, 5)
    out, lse = attention(q * 1e4, k, v, return_lse=True)
    expected_out, expected_lse = by_hand(q * 1e4, k, v)
    # Scores near 1e5 have steps of 1e-11, and a weight follows its score.
    assert_close(out, expected_out, 1e-9, "the output")
    assert_close(lse, expected_lse, 1e-12, "the log-sum-exp")


def test_more_queries_than_keys() -> None:
    """flashinfer-ai/flashinfer#4452: 4 queries, 2 keys. Rows 0 and 1 see nothing."""
    q, k, v = random_qkv(4, 2)
    check(q, k, v)
    out, lse = attention(q, k, v, return_lse=True)
    assert not out[:2].any(), "a query that sees nothing gives 0"
    assert (lse[:2] == -math.inf).all(), "a query that sees nothing has the log-sum -inf"
    assert lse[2:].isfinite().all()


def test_no_keys() -> None:
    """Dao-AILab/flash-attention#2470: a sequence of length 0."""
    q, k, v = random_qkv(3, 0)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (3, 4, 8) and not out.any()
    assert lse.shape == (3, 4) and (lse == -math.inf).all()


def test_no_queries() -> None:
    q, k, v = random_qkv(0, 5)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_are_summed_in_32(dtype: torch.dtype) -> None:
    """Only the result is rounded: half a unit in the last place of numbers below 4."""
    q, k, v = random_qkv(4, 40, dtype=dtype)
    out = attention(q, k, v)
    expected, _ = by_hand(q, k, v)
    assert out.dtype == dtype
    assert_close(out, expected, torch.finfo(dtype).eps, "the output")


@pytest.mark.parametrize(
    "words, q_shape, k_shape, v_shape",
    [
        ("got [3, 8] and [5, 2, 8]", (3, 8), (5, 2, 8), (5, 2, 8)),
        ("got [3, 4, 8] and [5, 8]", (3, 4, 8), (5, 8), (5, 8)),
        ("k is [5, 2, 8] but v is [4, 2, 8]", (3, 4, 8), (5, 2, 8), (4, 2, 8)),
        ("k is [5, 2, 8] but v is [5, 4, 8]", (3, 4, 8), (5, 2, 8), (5, 4, 8)),
        ("q has head_dim 8 but k has 6", (3, 4, 8), (5, 2, 6), (5, 2, 6)),
        ("4 query heads cannot share 3 KV heads", (3, 4, 8), (5, 3, 8), (5, 3, 8)),
        ("4 query heads cannot share 0 KV heads", (3, 4, 8), (5, 0, 8), (5, 0, 8)),
    ],
)
def test_shapes_that_do_not_fit(
    words: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        attention(torch.rand(q_shape), torch.rand(k_shape), torch.rand(v_shape))


@pytest.mark.parametrize(
    "words, fields",
    [
        ("scale is 0", {"scale": 0.0}),
        ("scale is -1.0", {"scale": -1.0}),
        ("scale is nan", {"scale": math.nan}),
        ("soft_cap is 0", {"soft_cap": 0.0}),
        ("soft_cap is inf", {"soft_cap": math.inf}),
        ("window is 0", {"window": 0}),
        ("window is -3", {"window": -3}),
        ("window is 2.5", {"window": 2.5}),
        ("sinks is [1.0]", {"sinks": [1.0]}),
        ("alibi_slopes is (inf,)", {"alibi_slopes": (math.inf,)}),
    ],
)
def test_specs_that_mean_nothing(words: str, fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        AttentionSpec(**fields)  # type: ignore[arg-type]
