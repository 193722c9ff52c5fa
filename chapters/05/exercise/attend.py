# Chapter 05, given: pagedattn/kernels/attend.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 4a9a57f38d79cb81384c11e684f1dc838400bf1c6a1e3a6635f390fa0a007948

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

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


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
    k_strides,
    v_strides,
    scale,
    window,
    MASKED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to the keys at positions begin .. end - 1. Unmasked, all of them are seen by every
    row, and they are a whole number of tiles."""
    dims = tl.arange(0, PADDED_DIM)
    lanes = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        keys = start + lanes
        # A key past the end lies in no block of the sequence: it must not be read, for its V may be
        # NaN, and 0 times NaN is NaN.
        live = keys < end
        if MASKED:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=live, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        blocks = blocks.to(tl.int64)  # times a stride, all of these may exceed 32 bits
        slots = (keys % BLOCK_SIZE).to(tl.int64)
        k_at = k_head + blocks * k_strides[0] + slots * k_strides[1]
        v_at = v_head + blocks * v_strides[0] + slots * v_strides[1]
        k_at = k_at[:, None] + dims.to(tl.int64)[None, :] * k_strides[3]
        v_at = v_at[:, None] + dims.to(tl.int64)[None, :] * v_strides[3]
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
        scores = scores * scale
        if SOFT_CAP is not None:
            scores = SOFT_CAP * _tanh(scores / SOFT_CAP)
        if ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None])
        if MASKED:
            seen = live[None, :] & (keys[None, :] <= positions[:, None])
            if window is not None:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet: its maximum is minus infinity, minus which is no number.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - base[:, None])
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
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


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
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    table_stride,
    window,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One item, one KV head. ``KIND`` 0 are decode items, 1 prefill items."""
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
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows % GROUP
    real = rows < num_queries * GROUP
    tokens = (first_token + rows // GROUP).to(tl.int64)
    positions = first_position + rows // GROUP
    at = tokens[:, None] * q_strides[0] + heads[:, None] * q_strides[1]
    here = real[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + at + dims[None, :] * q_strides[2], mask=here, other=0.0)
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
    k_head = k_cache + kv_head.to(tl.int64) * k_strides[2]
    v_head = v_cache + kv_head.to(tl.int64) * v_strides[2]
    table = block_table + row.to(tl.int64) * table_stride
    # Tiles that every row sees whole need no mask: those up to the first query's position, unless
    # a window cuts them off.
    full_end = begin
    if window is None:
        all_see = tl.minimum(first_position + 1, end)
        full_end = begin + tl.maximum(all_see - begin, 0) // KEYS * KEYS
    acc, row_sum, row_max = _walk(
        acc, row_sum, row_max, q_tile, k_head, v_head, table, begin, full_end, positions, slopes,
        k_strides, v_strides, scale, window, False, alibi_slopes is not None, SOFT_CAP,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS,
    )  # fmt: skip
    acc, row_sum, row_max = _walk(
        acc, row_sum, row_max, q_tile, k_head, v_head, table, full_end, end, positions, slopes,
        k_strides, v_strides, scale, window, True, alibi_slopes is not None, SOFT_CAP,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, min(KEYS, 64),
    )  # fmt: skip

    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head * v_scale_stride)
    if KIND == 0 and num_splits > 1:
        num_kv_heads = tl.num_programs(0)
        slot = (number * num_kv_heads + kv_head).to(tl.int64) * ROWS + rows
        divisor = tl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing here gives 0
        acc = acc / divisor[:, None]
        tl.store(partial_lse + slot, row_max + tl.log2(divisor), mask=real)
        tl.store(partial_out + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=here)
        # The last split of a row to arrive finds all others in memory, and merges them.
        tl.debug_barrier()
        counter = arrivals + row * num_kv_heads + kv_head
        if tl.atomic_add(counter, 1) == num_splits - 1:
            tl.store(counter, 0)
            for query in range(num_queries):
                _merge_splits(
                    out, lse, partial_out, partial_lse, sinks, out_strides, lse_strides,
                    first_token + query, query, kv_head, first_split, num_splits, num_kv_heads,
                    GROUP, HEAD_DIM, PADDED_DIM, ROWS,
                )  # fmt: skip
    else:
        _store_rows(
            acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides, tokens, heads, real,
            HEAD_DIM, PADDED_DIM,
        )  # fmt: skip


@triton.jit
def _merge_splits(
    out,
    lse,
    partial_out,
    partial_lse,
    sinks,
    out_strides,
    lse_strides,
    token,
    query,
    kv_head,
    first_split,
    num_splits,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The weighted mean of what the splits of one query found, for the heads of one KV head. A
    split weighs the sum of its exponentials. Many splits are fetched at a time."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: tl.constexpr = max(1, 8192 // (HEADS * PADDED_DIM))
    lanes = tl.arange(0, SPLITS)
    members = tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_DIM)
    SUM: tl.constexpr = partial_lse.dtype.element_ty
    row_max = tl.full((HEADS,), float("-inf"), SUM)
    row_sum = tl.zeros((HEADS,), SUM)
    acc = tl.zeros((HEADS, PADDED_DIM), SUM)
    for begin in range(0, num_splits, SPLITS):
        split = begin + lanes
        slot = ((first_split + split).to(tl.int64) * num_kv_heads + kv_head) * ROWS + query * GROUP
        slot = slot[:, None] + members[None, :]  # [SPLITS, HEADS]
        here = (split < num_splits)[:, None] & (members < GROUP)[None, :]
        part = tl.load(partial_lse + slot, mask=here, other=float("-inf"))
        found = tl.load(
            partial_out + slot[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=here[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(part, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(part - base[None, :])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(found * weights[:, :, None], 0)
        row_max = new_max
    tokens = token.to(tl.int64) + tl.zeros((HEADS,), tl.int64)
    heads = kv_head * GROUP + members
    _store_rows(
        acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides, tokens, heads,
        members < GROUP, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit
def _store_rows(
    acc,
    row_sum,
    row_max,
    out,
    lse,
    sinks,
    out_strides,
    lse_strides,
    tokens,
    heads,
    real,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Add the sink, which is a score without a value, divide, and store: once for each row."""
    dims = tl.arange(0, PADDED_DIM)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2E
        new_max = tl.maximum(row_max, sink)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.exp2(sink - new_max)
        acc *= shrink[:, None]
        row_max = new_max
    divisor = tl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing gives 0
    at = tokens[:, None] * out_strides[0] + heads[:, None] * out_strides[1]
    tl.store(
        out + at + dims[None, :] * out_strides[2],
        (acc / divisor[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )
    if lse is not None:
        log_sum = tl.where(row_sum > 0, (row_max + tl.log2(divisor)) * LN2, float("-inf"))
        at = tokens * lse_strides[0] + heads * lse_strides[1]
        tl.store(lse + at, log_sum.to(lse.dtype.element_ty), mask=real)
