# Chapter 05, given: pagedattn/kernels/attend.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 9705da72b74073b42aa9f064be02ddcdeb15e2c0da1efe75399e45aa6a809f4d

"""The attention kernel.

The query heads that share a KV head are rows of one tile, for each query of the tile: so K and V
are read once for all of them. A program walks the keys of its item a tile at a time, looks up in
the block table where each key lies, and keeps a running maximum, a running sum and a running
output, so that no score is ever stored (online softmax). Scores are kept in units of log 2, because
a power of 2 is one instruction.

Sources: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Dao et al., "Flash-Decoding"
(2023) for the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import LOG2E, merge_parts, store_rows


@triton.jit
def _walk(
    acc,
    row_sum,
    row_max,
    q,
    k_head,
    v_head,
    table,
    begin,
    end,
    positions,
    slopes,
    scale,
    window,
    MASKED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to the keys at positions begin .. end - 1. Unmasked, all of them are seen by every
    row, and they are a whole number of tiles."""
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED_DIM).to(tl.int64)
    k_dims = (k_head + dims * K_STRIDES[3])[None, :]  # the same for all tiles
    v_dims = (v_head + dims * V_STRIDES[3])[None, :]
    # A score is multiplied where it becomes an exponent: that and the subtraction there are one
    # instruction. A cap and a slope must find it multiplied.
    SCALED: tl.constexpr = SOFT_CAP is not None or ALIBI
    for start in range(begin, end, KEYS):
        keys = start + lanes
        # A key past the end lies in no block of the sequence: it must not be read, for its V may be
        # NaN, and 0 times NaN is NaN.
        live = keys < end
        places = keys.to(tl.uint32)  # without a sign to care for, they are divided by a shift
        if MASKED:
            blocks = tl.load(table + places // BLOCK_SIZE, mask=live, other=0)
        else:
            blocks = tl.load(table + places // BLOCK_SIZE)
        blocks = blocks.to(tl.int64)  # times a stride, all of these may exceed 32 bits
        slots = (places % BLOCK_SIZE).to(tl.int64)
        k_at = k_dims + (slots * K_STRIDES[1])[:, None] + (blocks * K_STRIDES[0])[:, None]
        v_at = v_dims + (slots * V_STRIDES[1])[:, None] + (blocks * V_STRIDES[0])[:, None]
        if HEAD_DIM < PADDED_DIM:
            here = live[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_at, mask=here, other=0.0)
            v = tl.load(v_at, mask=here, other=0.0)
        elif MASKED:
            k = tl.load(k_at, mask=live[:, None], other=0.0)
            v = tl.load(v_at, mask=live[:, None], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)

        # For 16-bit numbers "ieee" says nothing; for float32 it forbids the shorter tf32.
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee", out_dtype=acc.dtype)
        factor = scale
        if SCALED:
            scores = scores * scale
            factor = 1.0
        if SOFT_CAP is not None:
            scores = SOFT_CAP * _tanh(scores / SOFT_CAP)
        if ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None])
        if MASKED:
            seen = live[None, :] & (keys[None, :] <= positions[:, None])
            if window is not None:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # A row that has seen no key yet: its maximum is minus infinity, minus which is no number.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(
            weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee", out_dtype=acc.dtype
        )
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _tanh(x):
    """Without overflow: the exponential is that of a number that is not positive."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    t = (1.0 - e) / (1.0 + e)
    # Where 1 - e would lose digits, the first terms of the series.
    square = x * x
    rest = 62 / 2835 - square * (1382 / 155925)
    series = 1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * rest)))
    return tl.where(size < 0.0625, x * series, tl.where(x < 0, -t, t))


@triton.jit
def attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    shared_out,
    shared_lse,
    shared_parts,
    block_table,
    items,
    num_items,
    sinks,
    alibi_slopes,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    q_strides,
    out_strides,
    lse_strides,
    table_stride,
    window,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One item, one KV head. ``KIND`` 0 are decode items, 1 prefill items. What ``attend_shared``
    has found for a row's prefixes is merged with what its splits find. A cache keeps its
    strides, so they are compiled in: then they take no registers."""
    kv_head = tl.program_id(0)
    number = tl.program_id(1)
    # All of these are asked for at once, before it is known whether there is such an item.
    count = tl.load(num_items + KIND)
    item = items + number * 8
    row = tl.load(item)
    first_token = tl.load(item + 1)
    num_queries = tl.load(item + 2)
    first_position = tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    num_splits = tl.load(item + 6)
    first_split = tl.load(item + 7)
    if number >= count:
        return
    first_shared = 0
    num_shared = 0
    if KIND == 0 and shared_parts is not None:
        first_shared = tl.load(shared_parts + row * 2)
        num_shared = tl.load(shared_parts + row * 2 + 1)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows % GROUP
    real = rows < num_queries * GROUP
    tokens = (first_token + rows // GROUP).to(tl.int64)
    positions = first_position + rows // GROUP
    at = tokens[:, None] * q_strides[0] + heads.to(tl.int64)[:, None] * q_strides[1]
    here = real[:, None] & (dims < HEAD_DIM)[None, :]
    at += dims.to(tl.int64)[None, :] * q_strides[2]
    q_tile = tl.load(q + at, mask=here, other=0.0)
    SUM: tl.constexpr = partial_lse.dtype.element_ty
    slopes = tl.zeros((ROWS,), SUM)
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=real, other=0.0) * LOG2E
    scale = tl.full((), SCALE, SUM)  # a plain float would become a float32
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * k_scale_stride)

    row_max = tl.full((ROWS,), float("-inf"), SUM)
    row_sum = tl.zeros((ROWS,), SUM)
    acc = tl.zeros((ROWS, PADDED_DIM), SUM)
    k_head = k_cache + kv_head.to(tl.int64) * K_STRIDES[2]
    v_head = v_cache + kv_head.to(tl.int64) * V_STRIDES[2]
    table = block_table + row.to(tl.int64) * table_stride
    # A shorter tile hides less of what it reads, and leaves registers for fp8 to be unpacked into.
    MASKED_KEYS: tl.constexpr = min(KEYS, 64 if k_cache.dtype == q.dtype else 32)
    # Tiles that every row sees whole need no mask: those up to the first query's position, unless
    # a window cuts them off.
    full_end = begin
    if window is None:
        all_see = tl.minimum(first_position + 1, end)
        full_end = begin + tl.maximum(all_see - begin, 0) // KEYS * KEYS
    acc, row_sum, row_max = _walk(
        acc, row_sum, row_max, q_tile, k_head, v_head, table, begin, full_end, positions, slopes,
        scale, window, False, alibi_slopes is not None, SOFT_CAP,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, K_STRIDES, V_STRIDES, KEYS,
    )  # fmt: skip
    acc, row_sum, row_max = _walk(
        acc, row_sum, row_max, q_tile, k_head, v_head, table, full_end, end, positions, slopes,
        scale, window, True, alibi_slopes is not None, SOFT_CAP,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, K_STRIDES, V_STRIDES, MASKED_KEYS,
    )  # fmt: skip

    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head * v_scale_stride)
    if KIND == 0 and num_splits + num_shared > 1:
        num_kv_heads = tl.num_programs(0)
        slot = (number * num_kv_heads + kv_head).to(tl.int64) * ROWS + rows
        divisor = tl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing here gives 0
        acc = acc / divisor[:, None]
        tl.store(partial_lse + slot, row_max + tl.log2(divisor), mask=real)
        tl.store(partial_out + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=here)
        # The last split of a row to arrive finds all other parts in memory, and merges them.
        tl.debug_barrier()
        counter = arrivals + row * num_kv_heads + kv_head
        if tl.atomic_add(counter, 1) == num_splits - 1:
            tl.store(counter, 0)
            for query in range(num_queries):
                merge_parts(
                    out, lse, partial_out, partial_lse, shared_out, shared_lse, sinks,
                    out_strides, lse_strides, first_token + query, query, kv_head, num_kv_heads,
                    first_split, num_splits, first_shared, num_shared,
                    GROUP, HEAD_DIM, PADDED_DIM, ROWS,
                )  # fmt: skip
    else:
        # The walk needs all registers: what only this needs is read again rather than kept in some.
        first_token = tl.load(item + 1, volatile=True)
        num_queries = tl.load(item + 2, volatile=True)
        tokens = (first_token + rows // GROUP).to(tl.int64)
        real = rows < num_queries * GROUP
        store_rows(
            acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides, tokens, heads, real,
            HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
