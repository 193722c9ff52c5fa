"""Attention through block tables equals dense attention in float64, whatever the shapes.

Every comparison is of output and log-sum-exp, with NaN in every slot that holds no token.
"""

import math

import pytest
import torch

from pagedattn import paged
from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

COMPILED = DEVICE == "cuda"
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers
# (triton-lang/triton#4972), and float16 is slow there.
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * COMPILED
MIXED = ([9, 50, 7, 90], [1, 50, 3, 1])  # decodes, whole prompts, chunks
KINDS = {
    "decode": ([11, 1, 33], [1, 1, 1]),
    "decode of several splits": ([200, 5], [1, 1]),
    "prefill": ([40], [40]),
    "chunk over a cached context": ([75], [19]),
    "few queries": ([75, 130], [6, 5]),  # speculated tokens: several queries, cut along the keys
    "mixed": MIXED,
    "rows without queries": ([9, 30, 6, 50], [0, 1, 0, 20]),
    "rows of length 0": ([0, 5, 0], [0, 5, 0]),
    "nothing at all": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch(stage, make_batch, kind, dtype):
    make_batch(*KINDS[kind], dtype=dtype).check(stage)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_in_float64(stage, make_batch, kind):
    """No number on the way to the output is a float32."""
    make_batch(*KINDS[kind], dtype=torch.float64).check(stage)


@pytest.mark.parametrize("num_queries", [3, 20], ids=["decode", "prefill"])
def test_wherever_the_first_query_stands(stage, make_batch, num_queries):
    """Tiles that every query sees whole end at or before the first query, which may stand just
    before the end of a tile, at it, or just behind it."""
    firsts = [30, 31, 32, 33, 62, 63, 64, 65]
    lengths = [first + num_queries for first in firsts]
    make_batch(lengths, [num_queries] * 8, num_heads=2, num_kv_heads=1).check(stage)


@pytest.mark.parametrize("kind", ["rows without queries", "nothing at all"])
def test_padding_is_not_touched(stage, make_batch, kind):
    """Tokens that belong to no row hold NaN, and their places in the output keep what they had."""
    make_batch(*KINDS[kind], num_padding=3).check(stage)


def test_a_new_output_has_zeros_for_padding(stage, make_batch):
    batch = make_batch([9, 12], [1, 3], num_padding=2)
    out = stage.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc,
    )  # fmt: skip
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert torch.equal(out[:4], batch.run(stage)[0][:4])


@pytest.mark.parametrize("kind", ["decode", "chunk over a cached context"])
def test_agrees_with_chapter_02(stage, make_batch, kind):
    batch = make_batch(*KINDS[kind])
    expected = paged.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc, AttentionSpec(),
    )  # fmt: skip
    out, _ = batch.run(stage)
    # Each of the two is within 4e-6 of float64.
    torch.testing.assert_close(out, expected, rtol=0, atol=8e-6)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 2), (40, 3), (2, 0), (20, 0)])
def test_more_queries_than_keys(stage, make_batch, num_queries, num_keys):
    """The first queries stand before the first key and see nothing: output 0, log-sum-exp minus
    infinity (flashinfer-ai/flashinfer#4452, Dao-AILab/flash-attention#1778)."""
    batch = make_batch([num_keys, 9], [num_queries, 1])
    batch.check(stage)
    out, lse = batch.run(stage)
    blind = num_queries - num_keys
    assert not out[:blind].any() and (lse[:blind] == -math.inf).all()
    assert lse[blind:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(10, 2), (9, 3), (24, 4), (28, 4), (14, 2), (8, 8), (8, 1), (20, 1)],
)
def test_groups(stage, make_batch, num_heads, num_kv_heads, dtype):
    """A tile has a power of two of rows, whatever the group (vllm-project/vllm#18100); also one
    with more heads than the 16 rows that a matrix product has at least."""
    make_batch(
        [9, 66, 5], [1, 4, 5], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype
    ).check(stage)


HEAD_DIMS = [64, 80, 96, 128, 192, 256] if COMPILED else [5, 64, 80, 192]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(stage, make_batch, head_dim, dtype):
    """Ranges are powers of two, and the numbers behind a head are somebody else's: here NaN
    (vllm-project/vllm#4127, triton-lang/triton#621)."""
    lens = ([70, 34, 66], [1, 34, 2])
    make_batch(*lens, head_dim=head_dim, gaps=8, num_heads=4, dtype=dtype).check(stage)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 20])
def test_block_sizes(stage, make_batch, block_size, dtype):
    make_batch([41, 37, 66], [1, 20, 1], block_size=block_size, dtype=dtype).check(stage)


@pytest.mark.parametrize(("block_size", "length"), [(544, 560), (544, 1001), (2048, 2060)])
def test_large_blocks(stage, make_batch, block_size, length):
    """Block size, tile size and powers of two are three things (vllm-project/vllm#31380, #41339).

    With blocks of 544, position 1000 lies in block 1 at offset 456. A window keeps it short.
    """
    batch = make_batch(
        [length, length], [1, 20], block_size=block_size, num_heads=2, num_kv_heads=1
    )
    batch.check(stage, AttentionSpec(window=40))


@pytest.mark.parametrize("poisoned", ["K", "V"])
@pytest.mark.parametrize("query_len", [1, 30], ids=["decode", "prefill"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9], ids=str)
def test_unused_slots_never_matter(stage, make_batch, poisoned, query_len, value):
    """Length 38 in blocks of 4: two slots of the last block, block 0, and blocks of nobody hold
    what may not be used (vllm-project/vllm#641, Dao-AILab/flash-attention#1745)."""
    batch = make_batch([38], [query_len])
    for name, cache in (("K", batch.k_cache), ("V", batch.v_cache)):
        cache[cache.isnan()] = value if name == poisoned else 0.0
    batch.check(stage)


@pytest.mark.parametrize("query_len", [1, 30], ids=["decode", "prefill"])
def test_the_end_of_the_table_is_not_read(stage, make_batch, query_len):
    """Behind a row's own blocks stand those of a request that had the row before
    (tenstorrent/vllm-tt-plugin#103): here they hold NaN."""
    batch = make_batch([38], [query_len], gaps=0)
    stale = torch.zeros(1, 64, dtype=torch.int32, device=DEVICE)
    stale[:, :10] = batch.block_table[:, :10]
    batch.block_table = stale
    batch.check(stage)
    nowhere = stale.clone()
    nowhere[:, 10:] = 2**31 - 1  # a block so far away that to read it is a fault
    batch.block_table = nowhere
    batch.check(stage)


@pytest.mark.parametrize("kind", ["mixed", "decode of several splits"])
def test_a_table_may_be_part_of_a_wider_one(stage, make_batch, kind):
    """The first columns of a buffer for the longest sequences; no block stands behind them."""
    batch = make_batch(*KINDS[kind])
    num_rows, width = batch.block_table.shape
    buffer = torch.full((num_rows, width + 9), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    buffer[:, :width] = batch.block_table
    batch.block_table = buffer[:, :width]
    batch.check(stage)


@pytest.mark.parametrize("kind", ["decode of several splits", "chunk over a cached context"])
def test_gaps_between_slots_heads_and_numbers(stage, make_batch, kind):
    make_batch(*KINDS[kind], gaps=3).check(stage)


@pytest.mark.parametrize("kind", ["decode of several splits", "chunk over a cached context"])
def test_k_and_v_lie_differently(stage, make_batch, kind):
    """K: slots before heads, with gaps. V: numbers before heads before slots, without."""
    batch = make_batch(*KINDS[kind], gaps=2)
    batch.v_cache = batch.v_cache.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    batch.check(stage)


def test_any_strides_of_q_and_out(stage, make_batch):
    """Q as part of one matrix with K and V; an output with its heads first."""
    batch = make_batch([70, 34], [1, 20])
    expected, _ = batch.run(stage)
    num_tokens, num_heads, head_dim = batch.q.shape
    qkv = torch.full((num_tokens, num_heads + 4, head_dim), math.nan, device=DEVICE)
    qkv[:, :num_heads] = batch.q
    batch.q = qkv[:, :num_heads]
    heads_first = torch.zeros(num_heads, num_tokens, head_dim, device=DEVICE).transpose(0, 1)
    lse = torch.zeros(num_heads, num_tokens, device=DEVICE).T
    stage.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc, out=heads_first, lse=lse,
    )  # fmt: skip
    assert torch.equal(heads_first, expected)
    assert torch.equal(lse, batch.run(stage)[1])


@pytest.mark.parametrize("far", ["tokens"])
@pytest.mark.parametrize(("length", "num_queries"), [(70, 3), (40, 20)], ids=["splits", "prefill"])
def test_queries_and_outputs_further_apart_than_32_bits(
    stage, make_batch, far, far_apart, length, num_queries
):
    batch = make_batch(
        [length], [num_queries], num_heads=3, num_kv_heads=1, head_dim=3, dtype=torch.float16
    )
    expected, _ = batch.run(stage)
    which = ["tokens", "heads", "dims"].index(far)
    gap = 2**31 // (batch.q.shape[which] - 1)
    near = iter((1, 20))
    strides = [gap if i == which else next(near) for i in range(3)]
    out = far_apart(batch.q.shape, strides, 128)
    batch.q = far_apart(batch.q.shape, strides, 0).copy_(batch.q)
    stage.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc, out=out,
    )  # fmt: skip
    assert torch.equal(out, expected), f"the {far} lie {gap} numbers apart"


@pytest.mark.parametrize("far", ["blocks", "slots", "heads", "dims"])
@pytest.mark.parametrize("query_len", [1, 10], ids=["decode", "prefill"])
def test_further_apart_than_32_bits(stage, make_batch, far, far_apart, query_len):
    """The last block, slot, head or number begins 2^31 numbers behind the first
    (vllm-project/vllm#1486)."""
    batch = make_batch(
        [6], [query_len], block_size=3, num_heads=6, num_kv_heads=3, head_dim=3,
        dtype=torch.float16,
    )  # fmt: skip
    which = ["blocks", "slots", "heads", "dims"].index(far)
    batch.block_table[0, :2] = torch.tensor([2, 1])
    near = iter((1, 3, 9))
    strides = [2**30 if i == which else next(near) for i in range(4)]
    for start, name, rows in ((0, "k_cache", batch.keys), (128, "v_cache", batch.values)):
        cache = far_apart((3, 3, 3, 3), strides, start)
        cache[0] = math.nan
        cache[2], cache[1] = rows[0].split(3)
        setattr(batch, name, cache)
    batch.check(stage)
