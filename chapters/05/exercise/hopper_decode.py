# Chapter 05, given: pagedattn/kernels/hopper_decode.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 be8c6afadf0393727be982e8d9258cb47acd4e6833f76b06beaaa5126d37afad

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_ring import fetch, new_ring
from .hopper_sideways import load_queries, sideways_layout, softmax, store_item


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
    FETCHERS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """One share, one KV head. ``FETCHERS`` warps fetch K, and as many V. ``EARLY``: launched as a
    programmatic dependent, which begins before the kernel before it has ended."""
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    PIECE: gl.constexpr = k_desc.block_shape[1]
    dtype: gl.constexpr = q.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16, 2))
    weights = gl.allocate_shared_memory(
        dtype, [KEYS, ROWS], gl.NVMMASharedLayout(min(128, 2 * ROWS), 16, 2)
    )
    k_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 1)
    v_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 1)
    if EARLY:  # until here nothing was read that the kernel before may write
        gdc_wait()
        gdc_launch_dependents()
    first_item = gl.load(share_start + gl.program_id(1))
    last_item = gl.load(share_start + gl.program_id(1) + 1)
    if first_item >= last_item:
        return
    first = first_item * num_kv_heads + kv_head
    last = last_item * num_kv_heads
    share = items, first, last, num_kv_heads
    table = block_table, table_stride
    outputs = (
        out, lse, partial_out, partial_lse, arrivals, shared_out, shared_lse, shared_parts, sinks,
        out_strides, lse_strides,
    )  # fmt: skip
    if FETCHERS == 1:
        gl.warp_specialize(
            [
                (_attend, (
                    share, queries, weights, k_ring, v_ring, q, q_strides, outputs, SCALE, window,
                    GROUP, PIECE,
                )),
                (_fetch, (share, table, k_desc, k_ring, BLOCK_SIZE, 0, 1)),
                (_fetch, (share, table, v_desc, v_ring, BLOCK_SIZE, 0, 1)),
            ],
            [1, 1],
            [72, 72],
        )  # fmt: skip
    else:
        gl.static_assert(FETCHERS == 2)
        gl.warp_specialize(
            [
                (_attend, (
                    share, queries, weights, k_ring, v_ring, q, q_strides, outputs, SCALE, window,
                    GROUP, PIECE,
                )),
                (_fetch, (share, table, k_desc, k_ring, BLOCK_SIZE, 0, 2)),
                (_fetch, (share, table, v_desc, v_ring, BLOCK_SIZE, 0, 2)),
                (_fetch, (share, table, k_desc, k_ring, BLOCK_SIZE, 1, 2)),
                (_fetch, (share, table, v_desc, v_ring, BLOCK_SIZE, 1, 2)),
            ],
            [1, 1, 1, 1],
            [72, 72, 72, 72],
        )  # fmt: skip


@gluon.jit
def _fetch(
    share, table, desc, ring, BLOCK_SIZE: gl.constexpr, TURN: gl.constexpr, TURNS: gl.constexpr
):
    """One warp fetches a share's tiles, or each second one."""
    items, first, last, num_kv_heads = share
    block_table, table_stride = table
    fetch(
        desc, ring, block_table, table_stride, items, first, last, num_kv_heads, num_kv_heads, 8, 4,
        BLOCK_SIZE, TURN, TURNS,
    )  # fmt: skip


@gluon.jit
def _attend(
    share,
    queries,
    weights,
    k_ring,
    v_ring,
    q,
    q_strides,
    outputs,
    scale,
    window,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
):
    """One warp group walks the items of a share."""
    items, first, last, num_kv_heads = share
    (
        out, lse, partial_out, partial_lse, arrivals, shared_out, shared_lse, shared_parts, sinks,
        out_strides, lse_strides,
    ) = outputs  # fmt: skip
    ROWS: gl.constexpr = queries.shape[0]
    HEAD_DIM: gl.constexpr = queries.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, sideways_layout(ROWS))
    kv_head = first % num_kv_heads
    rows = gl.arange(0, ROWS, columns)
    count = 0
    for number in range(first, last, num_kv_heads):
        item = items + number // num_kv_heads * 8
        first_token = gl.load(item + 1)
        num_queries = gl.load(item + 2)
        first_position = gl.load(item + 3)
        begin = gl.load(item + 4) // PIECE * PIECE
        end = gl.load(item + 5)
        queries.store(
            load_queries(q, q_strides, first_token, num_queries, kv_head, GROUP, ROWS, HEAD_DIM)
        )
        fence_async_shared()
        scales = gl.full([ROWS], 1.0, gl.float32, columns) * scale
        acc, row_max, row_sum, count = _walk(
            queries, weights, k_ring, v_ring, count, begin, end, first_position,
            first_position + rows // GROUP, num_queries, scales, window, PIECE,
        )  # fmt: skip
        store_item(
            acc, row_max, row_sum, out, lse, partial_out, partial_lse, arrivals, shared_out,
            shared_lse, shared_parts, item, sinks, out_strides, lse_strides, number, num_kv_heads,
            GROUP,
        )  # fmt: skip


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
    layout: gl.constexpr = sideways_layout(ROWS)
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
    found, row_max, _ = softmax(
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
        found, row_max, shrink = softmax(
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
