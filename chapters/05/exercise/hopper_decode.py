# Chapter 05, given: pagedattn/kernels/hopper_decode.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 06180d4eb84ce2910ae78a2743d6a07d20b6253b03595ed9e20e20dc4471a55e

"""Decode items on a Hopper GPU: few queries, and all the time goes into reading.

The tile stands on its side. A warp group's matrix product has 64 rows at least, and a decode has
not as many queries; so the keys are the rows of the scores, [keys, queries], and the output is
[head_dim, queries]. K and V go from shared memory into the matrix units as they were fetched. Only
the weights, which are few, go back there.

A program has a share of the keys of all rows, as long as any other's: ``shares``. It walks its
items one after the other while the ring stays full.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_parts import merge_parts, store_rows
from .hopper_ring import fetch, key_positions, new_ring, wide, widen

# gluon calls it so since Triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def decode_kernel(
    q,
    k_desc,
    v_desc,
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
    share_start,
    sinks,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    q_strides,
    out_strides,
    lse_strides,
    table_stride,
    window,
    SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW_STAGES: gl.constexpr,
):
    """One share, one KV head. ``NARROW_STAGES`` are tiles of an fp8 cache before they are widened;
    0 if the cache is not fp8."""
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    first_item = gl.load(share_start + gl.program_id(1))
    last_item = gl.load(share_start + gl.program_id(1) + 1)
    if first_item >= last_item:
        return
    first = first_item * num_kv_heads + kv_head
    last = last_item * num_kv_heads
    FP8: gl.constexpr = NARROW_STAGES > 0
    PIECE: gl.constexpr = k_desc.block_shape[1]
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16, 2))
    weights = gl.allocate_shared_memory(
        dtype, [KEYS, ROWS], gl.NVMMASharedLayout(min(128, 2 * ROWS), 16, 2)
    )
    k_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 1)
    v_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 1)
    if FP8:
        k_narrow = new_ring(k_desc.dtype, NARROW_STAGES, KEYS, HEAD_DIM, 1, 1)
        v_narrow = new_ring(k_desc.dtype, NARROW_STAGES, KEYS, HEAD_DIM, 1, 1)
        gl.warp_specialize(
            [
                (_attend, (
                    queries, weights, k_ring, v_ring, q, out, lse, partial_out, partial_lse,
                    arrivals, shared_out, shared_lse, shared_parts, items, sinks, k_scale, v_scale,
                    k_scale_stride, v_scale_stride, q_strides, out_strides, lse_strides,
                    first, last, num_kv_heads, SCALE, window, GROUP, PIECE,
                )),
                (widen, (k_narrow, k_ring, items, first, last, num_kv_heads, num_kv_heads, PIECE)),
                (widen, (v_narrow, v_ring, items, first, last, num_kv_heads, num_kv_heads, PIECE)),
                (fetch, (
                    k_desc, k_narrow, block_table, table_stride, items, first, last, num_kv_heads,
                    num_kv_heads, 8, 4, BLOCK_SIZE,
                )),
                (fetch, (
                    v_desc, v_narrow, block_table, table_stride, items, first, last, num_kv_heads,
                    num_kv_heads, 8, 4, BLOCK_SIZE,
                )),
            ],
            [4, 4, 1, 1],
            [128, 128, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    queries, weights, k_ring, v_ring, q, out, lse, partial_out, partial_lse,
                    arrivals, shared_out, shared_lse, shared_parts, items, sinks, k_scale, v_scale,
                    k_scale_stride, v_scale_stride, q_strides, out_strides, lse_strides,
                    first, last, num_kv_heads, SCALE, window, GROUP, PIECE,
                )),
                (fetch, (
                    k_desc, k_ring, block_table, table_stride, items, first, last, num_kv_heads,
                    num_kv_heads, 8, 4, BLOCK_SIZE,
                )),
                (fetch, (
                    v_desc, v_ring, block_table, table_stride, items, first, last, num_kv_heads,
                    num_kv_heads, 8, 4, BLOCK_SIZE,
                )),
            ],
            [1, 1],
            [40, 40],
        )  # fmt: skip


@gluon.constexpr_function
def _layout(rows):
    """Of scores, [keys, rows], and of the output, [head_dim, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def _attend(
    queries,
    weights,
    k_ring,
    v_ring,
    q,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    shared_out,
    shared_lse,
    shared_parts,
    items,
    sinks,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    q_strides,
    out_strides,
    lse_strides,
    first,
    last,
    num_kv_heads,
    scale,
    window,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
):
    """One warp group walks the items of a share."""
    ROWS: gl.constexpr = queries.shape[0]
    HEAD_DIM: gl.constexpr = queries.shape[1]
    layout: gl.constexpr = _layout(ROWS)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    kv_head = first % num_kv_heads
    rows = gl.arange(0, ROWS, columns)
    heads = kv_head * GROUP + rows % GROUP
    count = 0
    for number in range(first, last, num_kv_heads):
        item = items + number // num_kv_heads * 8
        row = gl.load(item)
        first_token = gl.load(item + 1)
        num_queries = gl.load(item + 2)
        first_position = gl.load(item + 3)
        begin = gl.load(item + 4) // PIECE * PIECE
        end = gl.load(item + 5)
        num_splits = gl.load(item + 6)
        first_split = gl.load(item + 7)
        scales = _load_queries(
            queries, q, q_strides, first_token, num_queries, kv_head, scale, GROUP
        )
        if k_scale is not None:
            scales = scales * gl.load(k_scale + kv_head * k_scale_stride)
        acc, row_max, row_sum, count = _walk(
            queries, weights, k_ring, v_ring, count, begin, end, first_position,
            first_position + rows // GROUP, num_queries, scales, window, PIECE,
        )  # fmt: skip
        if v_scale is not None:
            acc = acc * gl.load(v_scale + kv_head * v_scale_stride)

        real = rows < num_queries * GROUP
        num_shared = 0
        first_shared = 0
        if shared_parts is not None:
            first_shared = gl.load(shared_parts + row * 2)
            num_shared = gl.load(shared_parts + row * 2 + 1)
        if num_splits + num_shared > 1:
            dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
            slot = gl.to_tensor(number).to(gl.int64) * ROWS + rows
            divisor = gl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing here gives 0
            found = acc / divisor[None, :]
            gl.store(partial_lse + slot, row_max + gl.log2(divisor), mask=real)
            gl.store(
                partial_out + slot[None, :] * HEAD_DIM + dims[:, None], found, mask=real[None, :]
            )
            # The last split of a row to arrive finds all others in memory, and merges them.
            barrier()
            counter = arrivals + row * num_kv_heads + kv_head
            arrived = 0
            if num_splits > 1:
                arrived = gl.atomic_add(counter, 1)
            if arrived == num_splits - 1:
                gl.store(counter, 0)
                for query in range(num_queries):
                    merge_parts(
                        out, lse, partial_out, partial_lse, shared_out, shared_lse, sinks,
                        out_strides, lse_strides, first_token + query, query, kv_head,
                        num_kv_heads, first_split, num_splits, first_shared, num_shared,
                        GROUP, HEAD_DIM, ROWS,
                    )  # fmt: skip
        else:
            store_rows(
                acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides,
                first_token + rows // GROUP, heads, real, 1,
            )  # fmt: skip


@gluon.jit
def _load_queries(
    queries, q, q_strides, first_token, num_queries, kv_head, scale, GROUP: gl.constexpr
):
    """Into shared memory. Returns what the scores of each row are to be multiplied by.

    Beside an fp8 cache queries become float16, which is more exact than bfloat16 but has a smaller
    range: so each row is brought to it by a power of 2.
    """
    ROWS: gl.constexpr = queries.shape[0]
    HEAD_DIM: gl.constexpr = queries.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    columns: gl.constexpr = gl.SliceLayout(0, _layout(ROWS))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    tokens = (first_token + rows // GROUP).to(gl.int64)
    heads = (kv_head * GROUP + rows % GROUP).to(gl.int64)
    at = tokens * wide(q_strides[0]) + heads * wide(q_strides[1])
    real = rows < num_queries * GROUP
    numbers = gl.load(q + at[:, None] + dims[None, :], mask=real[:, None], other=0.0)
    scales = gl.full([ROWS], 1.0, gl.float32, columns) * scale
    if queries.dtype != q.dtype.element_ty:
        numbers = numbers.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(numbers), 1), 1e-30)
        exponent = gl.floor(gl.log2(largest))
        numbers = numbers * gl.exp2(-exponent)[:, None]
        scales = scales * gl.exp2(gl.convert_layout(exponent, columns))
    queries.store(numbers.to(queries.dtype))
    fence_async_shared()
    return scales


@gluon.jit
def _walk(
    queries,
    weights,
    k_ring,
    v_ring,
    count,
    begin,
    end,
    first_position,
    positions,
    num_queries,
    scales,
    window,
    PIECE: gl.constexpr,
):
    """Attend to the tiles of one item; ``count`` tiles were fetched before. Returns the output
    [head_dim, rows], each row's maximum and sum, and the tiles fetched now."""
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    ROWS: gl.constexpr = queries.shape[0]
    layout: gl.constexpr = _layout(ROWS)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    lanes = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, columns)
    sums = gl.zeros([KEYS, ROWS], gl.float32, layout)  # added up over the keys in the end
    acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout)
    highest = first_position + num_queries - 1
    queries = queries.permute((1, 0))

    stage = count % STAGES
    phase = count // STAGES & 1
    mbarrier.wait(k_ready.index(stage), phase)
    scores = warpgroup_mma(k_tiles.index(stage), queries, no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(stage))
    found, row_max, _ = _softmax(
        scores, row_max, begin, end, lanes, first_position, highest, positions, scales, window,
        PIECE,
    )  # fmt: skip
    sums = found
    weights.store(found.to(weights.dtype))
    fence_async_shared()
    for start in range(begin + KEYS, end, KEYS):
        before = stage
        phase_before = phase
        count += 1
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        scores = warpgroup_mma(
            k_tiles.index(stage), queries, no_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(before), phase_before)
        values = v_tiles.index(before).permute((1, 0))
        acc = warpgroup_mma(values, weights, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_free.index(stage))
        found, row_max, shrink = _softmax(
            scores, row_max, start, end, lanes, first_position, highest, positions, scales, window,
            PIECE,
        )  # fmt: skip
        sums = sums * shrink[None, :] + found
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(before))
        acc = acc * shrink[None, :]
        weights.store(found.to(weights.dtype))
        fence_async_shared()
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), weights, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(stage))
    return acc, row_max * scales, gl.sum(sums, 0), count + 1


@gluon.jit
def _softmax(
    scores,
    row_max,
    start,
    end,
    lanes,
    lowest,
    highest,
    positions,
    scales,
    window,
    PIECE: gl.constexpr,
):
    """Scores become weights."""
    cut = start + scores.shape[0] > lowest + 1
    if window is not None:
        cut = cut | (start <= highest - window)
    if cut:
        keys = key_positions(start, end, lanes, PIECE)
        seen = keys[:, None] <= positions[None, :]
        if window is not None:
            seen = seen & (keys[:, None] > positions[None, :] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 0))
    base = gl.where(new_max == float("-inf"), 0.0, new_max * scales)
    found = gl.exp2(scores * scales[None, :] - base[None, :])
    return found, new_max, gl.exp2(row_max * scales - base)
