"""Windows, caps, slopes, sinks, low scores and scales: each as dense attention in float64 has it.

A score appears in two results: in the output, where what all keys have in common cancels out, and
in the log-sum-exp, where it does not. Both are compared. One KV head makes several splits likely.
"""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

COMPILED = DEVICE == "cuda"
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * COMPILED
KINDS = {
    "decode": ([9, 1, 40], [1, 1, 1]),
    "splits": ([300, 7], [1, 1]),
    "few queries in splits": ([130, 190], [6, 5]),
    "prefill": ([75], [75]),
    "chunk": ([110, 10], [40, 1]),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def batch_of(make_batch):
    def make(kind, **options):
        return make_batch(*KINDS[kind], **{"num_heads": 2, "num_kv_heads": 1} | options)

    return make


def slopes_of(num_heads):
    return tuple(2.0 ** -(head + 1) for head in range(num_heads))


@each_dtype
@each_kind
@pytest.mark.parametrize("window", [1, 5, 64])
def test_windows(stage, batch_of, kind, window, dtype):
    """A window of W covers W keys, the query's own among them (vllm-project/vllm#3385); small ones
    hide whole tiles (vllm-project/vllm#4405)."""
    batch_of(kind, dtype=dtype).check(stage, AttentionSpec(window=window))


@each_dtype
@pytest.mark.parametrize(
    ("length", "num_queries", "window"), [(200, 16, 60), (300, 150, 3)], ids=["splits", "prefill"]
)
def test_rows_that_see_nothing_of_a_tile(stage, make_batch, length, num_queries, window, dtype):
    """Of 75 keys the second split has the last 11: the first five queries see none of them. And the
    last queries of a prefill tile see none of its first keys (vllm-project/vllm#4405)."""
    batch = make_batch([length], [num_queries], num_heads=1, num_kv_heads=1, dtype=dtype)
    batch.check(stage, AttentionSpec(window=window))


@pytest.mark.parametrize(
    ("length", "num_queries"), [(100, 1), (100, 5), (90, 20)], ids=["decode", "few", "chunk"]
)
@pytest.mark.parametrize("window", [1, 7, 66])
def test_keys_that_have_left_the_window_are_not_read(
    stage, make_batch, length, num_queries, window
):
    """No query of the step sees them. Their blocks may be somebody else's by now: here NaN."""
    batch = make_batch([length], [num_queries], num_heads=2, num_kv_heads=1)
    for position in range(length - num_queries - window + 1):
        block, offset = batch.block_table[0, position // 4].long(), position % 4
        batch.k_cache[block, offset] = batch.v_cache[block, offset] = math.nan
    batch.check(stage, AttentionSpec(window=window))


@pytest.mark.parametrize("query_len", [1, 10, 40], ids=["decode", "few queries", "prefill"])
@pytest.mark.parametrize(("window", "first"), [(4, 36), (1, 39), (100, 0)])
def test_which_keys_a_window_covers(stage, make_batch, query_len, window, first):
    """The last query of 40, at position 39. V of each position is its number, all scores are equal:
    so the output is the mean of the positions seen, and the log-sum-exp the log of how many."""
    batch = make_batch([40], [query_len], num_heads=1, num_kv_heads=1)
    batch.q.zero_()
    for position in range(40):
        batch.v_cache[batch.block_table[0, position // 4].long(), position % 4] = position
    out, lse = batch.run(stage, AttentionSpec(window=window))
    assert out[-1].flatten().tolist() == pytest.approx([(first + 39) / 2] * 16), (
        f"with a window of {window} the query at position 39 sees {first} to 39"
    )
    assert lse[-1].item() == pytest.approx(math.log(40 - first))


@pytest.mark.parametrize("kind", ["splits", "chunk"])
def test_a_wide_window_hides_nothing(stage, batch_of, kind):
    batch = batch_of(kind)
    for found, expected in zip(
        batch.run(stage, AttentionSpec(window=1000)), batch.run(stage), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


@each_dtype
@each_kind
def test_soft_cap(stage, batch_of, kind, dtype):
    """Of scores around 5, many lie behind the cap."""
    spec = AttentionSpec(soft_cap=5.0, scale=1.3)
    batch_of(kind, dtype=dtype).check(stage, spec)


@each_dtype
@pytest.mark.parametrize("score, capped", [(100, 48.2014), (1000, 50), (5000, 50), (-10000, -50)])
def test_a_cap_by_hand(stage, by_hand, score, capped, dtype):
    """tanh of large numbers is 1, not infinity by infinity (vllm-project/vllm#56578)."""
    batch = by_hand([[1.0]], [[float(score)]], [[3.0]], dtype=dtype)
    out, lse = batch.run(stage, AttentionSpec(soft_cap=50.0))
    assert out.item() == 3.0
    assert lse.item() == pytest.approx(capped, abs=1e-4)


@each_dtype
@each_kind
def test_alibi(stage, batch_of, kind, dtype):
    batch = batch_of(kind, num_heads=4, num_kv_heads=2, dtype=dtype)
    batch.check(stage, AttentionSpec(alibi_slopes=slopes_of(4)))


@pytest.mark.parametrize("num_queries", [1, 3])
def test_alibi_by_hand(stage, by_hand, num_queries):
    """Six keys of score 0, slope 1/4: the newest one has no bias (vllm-project/vllm#945). A
    distance measured from the length instead would shift every score by the slope: the output does
    not notice, the log-sum-exp does, and with a sink the output, too."""
    batch = by_hand([[0.0]] * num_queries, [[1.0]] * 6, [[v] for v in (6.0, 5, 4, 3, 2, 1)])
    weights = [math.exp(-distance / 4) for distance in (5, 4, 3, 2, 1, 0)]
    mean = sum(w * v for w, v in zip(weights, (6, 5, 4, 3, 2, 1), strict=True))
    out, lse = batch.run(stage, AttentionSpec(alibi_slopes=(0.25,)))
    assert out[-1].item() == pytest.approx(mean / sum(weights), abs=1e-5)
    assert lse[-1].item() == pytest.approx(math.log(sum(weights)), abs=1e-5)
    out, lse = batch.run(stage, AttentionSpec(alibi_slopes=(0.25,), sinks=(0.0,)))
    assert out[-1].item() == pytest.approx(mean / (sum(weights) + 1), abs=1e-5)
    assert lse[-1].item() == pytest.approx(math.log(sum(weights) + 1), abs=1e-5)


@each_dtype
@each_kind
def test_sinks(stage, batch_of, kind, dtype):
    batch_of(kind, dtype=dtype).check(stage, AttentionSpec(sinks=(0.5, -2.0)))


@pytest.mark.parametrize("length", [1, 130, 300])
def test_a_sink_counts_once(stage, make_batch, length):
    """One key has score 0 and value 3, all others weigh nothing; a sink of 0 takes half, however
    many splits find nothing (ROCm/rocm-libraries#12227)."""
    batch = make_batch([length], [1], num_heads=1, num_kv_heads=1)
    batch.q.fill_(1.0)
    batch.k_cache[~batch.k_cache.isnan()] = -1000.0
    last = batch.block_table[0, (length - 1) // 4].long(), (length - 1) % 4
    batch.k_cache[last] = 0.0
    batch.v_cache[last] = 3.0
    out, lse = batch.run(stage, AttentionSpec(sinks=(0.0,)))
    assert out.flatten().tolist() == pytest.approx([1.5] * 16)
    assert lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("num_queries", [2, 20], ids=["decode", "prefill"])
def test_only_the_sink_is_seen(stage, make_batch, num_queries):
    batch = make_batch([0], [num_queries], num_heads=2, num_kv_heads=1)
    out, lse = batch.run(stage, AttentionSpec(sinks=(0.5, -2.0)))
    assert not out.any()
    assert lse.tolist() == [pytest.approx([0.5, -2.0])] * num_queries


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(window=7, sinks=(0.5, -1.0, 2.0, 0.0)),
        AttentionSpec(window=40, soft_cap=3.0, scale=0.7),
        AttentionSpec(alibi_slopes=slopes_of(4), sinks=(0.5, -1.0, 2.0, 0.0), window=70),
        AttentionSpec(alibi_slopes=slopes_of(4), soft_cap=2.0, sinks=(0.5, -1.0, 2.0, 0.0)),
    ],
    ids=["window and sinks", "window and cap", "slopes, sinks and window", "slopes, cap, sinks"],
)
@pytest.mark.parametrize("kind", ["few queries in splits", "chunk"])
def test_several_at_once(stage, batch_of, kind, spec):
    batch_of(kind, num_heads=4, num_kv_heads=2).check(stage, spec)


@each_dtype
@pytest.mark.parametrize("num_queries", [1, 20], ids=["decode", "prefill"])
def test_scores_far_below_zero(stage, by_hand, num_queries, dtype):
    """Four keys of score -60000: a weight of 0.25 each. What is masked lies below every number
    (flashinfer-ai/flashinfer#4267)."""
    q = [[0.0]] * (num_queries - 1) + [[-300.0]]
    k = [[0.0]] * 20 + [[200.0]] * 4
    batch = by_hand(q, k, [[float(v)] for v in range(24)], dtype=dtype)
    out, lse = batch.run(stage, AttentionSpec(window=4))
    assert out[-1].item() == 21.5, "the mean of 20, 21, 22 and 23"
    assert lse[-1].item() == pytest.approx(-60000 + math.log(4), abs=0.01)


@pytest.mark.parametrize("scale", [0.1, 100.0])
@pytest.mark.parametrize("kind", ["few queries in splits", "chunk"])
def test_inputs_of_other_sizes(stage, batch_of, kind, scale):
    """Scores of up to 10^5: one key takes all. Errors are relative to outputs of this size."""
    batch = batch_of(kind, scale=scale)
    out, lse = batch.run(stage)
    expected, expected_lse = batch.dense()
    # A score s is known to about 1e-6 * |s|, and so is the exponent of a weight.
    size = float(expected_lse.abs().max().clamp(min=1))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 * size * scale)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("scaled", "per_head"), [("both", True), ("K", False), ("V", True), ("neither", False)]
)
@pytest.mark.parametrize("kind", ["splits", "chunk"])
def test_fp8_cache(stage, batch_of, kind, scaled, per_head):
    """Equal to dense attention over the numbers that the cache stands for: a stored number times
    its scale (flashinfer-ai/flashinfer#1023, #4979)."""
    dtype = torch.bfloat16 if COMPILED else torch.float32
    batch = batch_of(kind, num_heads=4, num_kv_heads=2, dtype=dtype)
    scales = {}
    for name in ("k", "v"):
        if scaled in ("both", name.upper()):
            numbers = ([0.25, 0.75] if per_head else [0.25]) if name == "k" else [0.5]
            scales[f"{name}_scale"] = torch.tensor(numbers, device=DEVICE)
    for name, rows in (("k", batch.keys), ("v", batch.values)):
        scale = scales.get(f"{name}_scale", torch.ones(1, device=DEVICE))
        if scale.numel() == 2:
            scale = scale[:, None]
        stored = (getattr(batch, f"{name}_cache").float() / scale).to(FP8)
        setattr(batch, f"{name}_cache", stored)
        rows[:] = [(row.float() / scale).to(FP8).double() * scale.double() for row in rows]
    batch.check(stage, AttentionSpec(sinks=(0.5, -1.0, 2.0, 0.0)), **scales)
    with_lse, _ = batch.run(stage, **scales)
    without = stage.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc, **scales,
    )  # fmt: skip
    assert torch.equal(without, with_lse), "the same with and without log-sum-exp"
