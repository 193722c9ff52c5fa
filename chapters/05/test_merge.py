"""Attention over two sets of keys, merged, is attention over all of them."""

import math

import pytest
import torch

from pagedattn.course.witness import DEVICE

COMPILED = DEVICE == "cuda"
INF = float("inf")


def attend(q, k, v):
    """Every query to every key, in float64: output and log-sum-exp."""
    scores = torch.einsum("thd,shd->ths", q, k)
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def random_qkv(num_tokens, num_keys, num_heads, head_dim, scale=1.0):
    q = torch.randn(num_tokens, num_heads, head_dim, dtype=torch.float64, device=DEVICE)
    k, v = torch.randn(2, num_keys, num_heads, head_dim, dtype=torch.float64, device=DEVICE)
    return q * scale / math.sqrt(head_dim), k, v


def of(numbers):
    return torch.tensor(numbers, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"), [(5, 3, 80), (1, 7, 96), (9, 2, 64), (70, 3, 5)]
)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_two_parts_are_the_whole(stage, num_tokens, num_heads, head_dim, scale):
    torch.manual_seed(num_tokens)
    q, k, v = random_qkv(num_tokens, 9, num_heads, head_dim, scale)
    parts = [
        part.float() for keys in (slice(0, 4), slice(4, 9)) for part in attend(q, k[keys], v[keys])
    ]
    out, lse = stage.merge_attention_states(*parts)
    expected, expected_lse = attend(q, k, v)
    # Rounded to float32: outputs around 1, and weights from lse of up to 100, where float32 knows
    # eight digits: 1e-5 in the exponent.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 * scale)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=3e-7, atol=1e-6)


def test_by_hand(stage):
    """Weights 1 and 3; weights 2 and 2 behind a large common factor."""
    out, lse = stage.merge_attention_states(
        of([[[8.0]], [[1.0]]]),
        of([[0.0], [90.0]]),
        of([[[4.0]], [[3.0]]]),
        of([[math.log(3)], [90.0]]),
    )
    torch.testing.assert_close(out.flatten(), of([5.0, 2.0]))  # (8 + 3 * 4) / 4, (1 + 3) / 2
    torch.testing.assert_close(lse.flatten(), of([math.log(4), 90 + math.log(2)]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_three_parts_in_any_order(stage, order):
    torch.manual_seed(1)
    q, k, v = random_qkv(4, 12, 2, 16)
    cuts = [slice(0, 1), slice(1, 7), slice(7, 12)]
    a, b, c = ([part.float() for part in attend(q, k[cuts[i]], v[cuts[i]])] for i in order)
    out, lse = stage.merge_attention_states(*stage.merge_attention_states(*a, *b), *c)
    expected, expected_lse = attend(q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("junk", [7.0, float("nan"), INF])
def test_a_part_that_saw_nothing_weighs_nothing(stage, junk):
    """Whatever stands in its output (Dao-AILab/flash-attention#1778)."""
    torch.manual_seed(2)
    q, k, v = random_qkv(4, 6, 2, 80)
    out, lse = (part.float() for part in attend(q, k, v))
    nothing, no_lse = torch.full_like(out, junk), torch.full_like(lse, -INF)
    nothing[3], no_lse[3] = out[3], lse[3]  # the last token saw all with either part
    for parts in ((out, lse, nothing, no_lse), (nothing, no_lse, out, lse)):
        merged, merged_lse = stage.merge_attention_states(*parts)
        torch.testing.assert_close(merged, out, rtol=0, atol=1e-6)
        assert torch.equal(merged_lse[:3], lse[:3])
        torch.testing.assert_close(merged_lse[3], lse[3] + math.log(2))


@pytest.mark.parametrize("junk", [7.0, float("nan")])
def test_neither_part_saw_a_key(stage, junk):
    torch.manual_seed(3)
    out, lse = torch.randn(3, 2, 8, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    out[1], lse[1] = junk, -INF
    merged, merged_lse = stage.merge_attention_states(out, lse, out, lse)
    assert torch.equal(merged[1], torch.zeros(2, 8, device=DEVICE))
    assert torch.equal(merged_lse[1], torch.full((2,), -INF, device=DEVICE))
    assert merged.isfinite().all() and merged_lse[[0, 2]].isfinite().all()


def test_scores_far_below_zero(stage):
    """Minus infinity is below every score: -60000 still counts (flashinfer-ai/flashinfer#4267)."""
    out_a, out_b = of([[[1.0]], [[1.0]]]), of([[[3.0]], [[3.0]]])
    merged, lse = stage.merge_attention_states(
        out_a, of([[-60000.0], [-60000.0]]), out_b, of([[-60000.0], [20.0]])
    )
    assert merged.flatten().tolist() == [2.0, 3.0], "half and half; all of b"
    torch.testing.assert_close(lse.flatten(), of([-60000 + math.log(2), 20.0]))


def test_any_strides(stage):
    torch.manual_seed(4)
    q, k, v = random_qkv(3, 7, 4, 16)
    a, b = (
        [part.float() for part in attend(q, k[keys], v[keys])] for keys in (slice(3), slice(3, 7))
    )
    heads_first = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in a]
    gaps = [part.repeat_interleave(2, dim=-1)[..., ::2] for part in b]
    expected = stage.merge_attention_states(*a, *b)
    for found, want in zip(
        stage.merge_attention_states(*heads_first, *gaps), expected, strict=True
    ):
        assert found.is_contiguous()
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6)  # strides may change the order


@pytest.mark.parametrize("far", ["tokens", "heads", "dims"])
def test_further_apart_than_32_bits(stage, far, far_apart):
    torch.manual_seed(6)
    which = ["tokens", "heads", "dims"].index(far)
    near = iter((1, 3))
    strides = [2**30 if i == which else next(near) for i in range(3)]
    a, b = torch.randn(2, 3, 3, 3, device=DEVICE).half()
    lse_a, lse_b = torch.randn(2, 3, 3, device=DEVICE)
    parts = []
    for part, start in ((a, 0), (b, 16)):
        parts.append(far_apart((3, 3, 3), strides, start))
        parts[-1].copy_(part)
    found = stage.merge_attention_states(parts[0], lse_a, parts[1], lse_b)
    for one, want in zip(found, stage.merge_attention_states(a, lse_a, b, lse_b), strict=True):
        assert torch.equal(one, want), f"the {far} lie 2^30 numbers apart"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.skipif(not COMPILED, reason="Triton's interpreter cannot compute with 16 bits")
def test_sixteen_bits_are_rounded_once(stage, dtype):
    torch.manual_seed(5)
    q, k, v = random_qkv(200, 9, 8, 128)
    (out_a, lse_a), (out_b, lse_b) = attend(q, k[:4], v[:4]), attend(q, k[4:], v[4:])
    out_a, out_b, lse_a, lse_b = out_a.to(dtype), out_b.to(dtype), lse_a.float(), lse_b.float()
    out, _ = stage.merge_attention_states(out_a, lse_a, out_b, lse_b)
    weight = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    expected = out_a.double() * weight + out_b.double() * (1 - weight)
    assert out.dtype == dtype
    half_a_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected, rtol=1.01 * half_a_unit, atol=1e-6)


def test_no_tokens(stage):
    none, no_lse = torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    out, lse = stage.merge_attention_states(none, no_lse, none, no_lse)
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


OUT, LSE = torch.zeros(3, 2, 8, device=DEVICE), torch.zeros(3, 2, device=DEVICE)
REFUSED = [
    ({"out_a": OUT[0]}, r"out_a has shape \[2, 8\]"),
    ({"out_b": OUT[:2]}, r"out_b has shape \[2, 2, 8\]; it must be \[3, 2, 8\]"),
    ({"lse_a": LSE.T}, r"lse_a has shape \[2, 3\]; it must be \[3, 2\]"),
    ({"lse_b": LSE[..., None]}, r"lse_b has shape \[3, 2, 1\]"),
    ({"lse_a": LSE.half()}, "lse_a is torch.float16; it must be torch.float32"),
    ({"lse_b": LSE.half()}, "lse_b is torch.float16; it must be torch.float32"),
    ({"out_b": OUT.half()}, "out_b is torch.float16; it must be torch.float32"),
    ({"out_a": OUT.long(), "out_b": OUT.long()}, "out_a is torch.int64"),
    ({"lse_b": LSE.to("meta")}, "lse_b is on meta"),
    ({"out_a": OUT[..., :0], "out_b": OUT[..., :0]}, "head_dim must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE}
    with pytest.raises(ValueError, match=message):
        stage.merge_attention_states(**good | change)
