# Chapter 05, given: pagedattn/kernels/hopper_fp8.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 f4673bae42605dcacc586d7aa7d110a0d04c7039e952b699cffeeaa30fc6e5fd

"""Decode items over an fp8 cache on a Hopper GPU: a tile is read from shared memory once.

The matrix units have no product of 16-bit queries and 8-bit keys, so K and V must become float16,
which holds every fp8 number (e4m3). Their tiles stay as they are in shared memory: since the tile
stands on its side (``hopper_sideways``), K and V^T are first factors, and a warp group may have its
first factor in registers. A thread loads 8-bit numbers, widens them, and multiplies:
``hopper_factors``.

To widen takes so long that one warp group cannot keep up with memory. Two take turns at the tiles:
the number of a tile, counted from the beginning of the share, tells whose it is. The ring has an
even number of places, so all that ever comes into one place is for one warp group. Nobody can take
a tile for the next but one in its place, which a barrier, that knows only even and odd rounds,
would let happen.

The group that has an item's first tile also stores the item. The other one hands it what it found.
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

from .hopper_factors import load_keys, load_values, put_in_order, rename_dims
from .hopper_meeting import hand_over, new_meeting, take_over
from .hopper_ring import fetch, new_ring
from .hopper_sideways import load_queries, sideways_layout, softmax, store_item


@gluon.jit
def fp8_decode_kernel(
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
):
    """One share, one KV head."""
    gl.static_assert(STAGES % 2 == 0)
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    first_item = gl.load(share_start + gl.program_id(1))
    last_item = gl.load(share_start + gl.program_id(1) + 1)
    if first_item >= last_item:
        return
    first = first_item * num_kv_heads + kv_head
    last = last_item * num_kv_heads
    PIECE: gl.constexpr = k_desc.block_shape[1]
    k_ring = new_ring(k_desc.dtype, STAGES, KEYS, HEAD_DIM, 1, 1)
    # K and V of a tile are given back together.
    v_ring = new_ring(v_desc.dtype, STAGES, KEYS, HEAD_DIM, 1, 1, k_ring[2])
    inputs = (
        q, items, first, last, num_kv_heads, q_strides, k_scale, v_scale, k_scale_stride,
        v_scale_stride, window,
    )  # fmt: skip
    outputs = (
        out, lse, partial_out, partial_lse, arrivals, shared_out, shared_lse, shared_parts, sinks,
        out_strides, lse_strides,
    )  # fmt: skip
    meeting = new_meeting(HEAD_DIM, ROWS)
    gl.warp_specialize(
        [
            (_attend, (inputs, outputs, k_ring, v_ring, meeting, SCALE, GROUP, PIECE, 0)),
            (_attend, (inputs, outputs, k_ring, v_ring, meeting, SCALE, GROUP, PIECE, 1)),
            (fetch, (
                k_desc, k_ring, block_table, table_stride, items, first, last, num_kv_heads,
                num_kv_heads, 8, 4, BLOCK_SIZE,
            )),
            (fetch, (
                v_desc, v_ring, block_table, table_stride, items, first, last, num_kv_heads,
                num_kv_heads, 8, 4, BLOCK_SIZE,
            )),
        ],
        [4, 1, 1],
        [216, 72, 72],
    )  # fmt: skip


@gluon.jit
def _attend(
    inputs,
    outputs,
    k_ring,
    v_ring,
    meeting,
    scale,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
    TURN: gl.constexpr,
):
    """A warp group walks the items of a share. Tiles with even numbers are those of ``TURN`` 0."""
    (
        q, items, first, last, num_kv_heads, q_strides, k_scale, v_scale, k_scale_stride,
        v_scale_stride, window,
    ) = inputs  # fmt: skip
    (
        out, lse, partial_out, partial_lse, arrivals, shared_out, shared_lse, shared_parts, sinks,
        out_strides, lse_strides,
    ) = outputs  # fmt: skip
    KEYS: gl.constexpr = k_ring[0].shape[1]
    HEAD_DIM: gl.constexpr = k_ring[0].shape[2]
    ROWS: gl.constexpr = meeting[0].shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, sideways_layout(ROWS))
    queries = gl.allocate_shared_memory(
        gl.float16, [ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16, 2)
    )
    weights = gl.allocate_shared_memory(
        gl.float16, [KEYS, ROWS], gl.NVMMASharedLayout(min(128, 2 * ROWS), 16, 2)
    )
    maxima = gl.allocate_shared_memory(
        gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    kv_head = first % num_kv_heads
    rows = gl.arange(0, ROWS, columns)
    count = 0
    meetings = 0
    for number in range(first, last, num_kv_heads):
        item = items + number // num_kv_heads * 8
        first_token = gl.load(item + 1)
        num_queries = gl.load(item + 2)
        first_position = gl.load(item + 3)
        begin = gl.load(item + 4) // PIECE * PIECE
        end = gl.load(item + 5)
        turn = (TURN - count) & 1
        both = begin + KEYS < end
        if both | (turn == 0):
            scales = _store_queries(
                queries,
                load_queries(
                    q, q_strides, first_token, num_queries, kv_head, GROUP, ROWS, HEAD_DIM
                ),
                columns,
            )
            scales = scales * scale
            if k_scale is not None:
                scales = scales * gl.load(k_scale + kv_head * k_scale_stride)
            acc, row_max, row_sum = _walk(
                queries, weights, maxima, k_ring, v_ring, count + turn, begin + turn * KEYS, end,
                first_position, first_position + rows // GROUP, num_queries, scales, window, PIECE,
            )  # fmt: skip
            if turn == 1:
                hand_over(meeting, acc, row_max, row_sum, meetings)
            else:
                if both:
                    acc, row_max, row_sum = take_over(meeting, acc, row_max, row_sum, meetings)
                if v_scale is not None:
                    acc = acc * gl.load(v_scale + kv_head * v_scale_stride)
                found, found_max, found_sum = put_in_order(acc, row_max, row_sum)
                store_item(
                    found, found_max, found_sum, out, lse, partial_out, partial_lse, arrivals,
                    shared_out, shared_lse, shared_parts, item, sinks, out_strides, lse_strides,
                    number, num_kv_heads, GROUP,
                )  # fmt: skip
        count += gl.maximum(gl.cdiv(end - begin, KEYS), 1)
        meetings += gl.where(both, 1, 0)


@gluon.jit
def _store_queries(queries, numbers, columns: gl.constexpr):
    """Into shared memory, as float16, which is more exact than bfloat16 but has a smaller range: so
    each row is brought to it by a power of 2. Returns these powers."""
    numbers = numbers.to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(numbers), 1), 1e-30)
    exponent = gl.floor(gl.log2(largest))
    numbers = numbers * gl.exp2(-exponent)[:, None]
    queries.store(rename_dims(numbers.to(gl.float16)))
    fence_async_shared()
    return gl.exp2(gl.convert_layout(exponent, columns))


@gluon.jit
def _walk(
    queries,
    weights,
    maxima,
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
    """Attend to every second tile of an item from ``begin`` on, which is number ``count``. Returns
    the output [head_dim, rows], and each row's maximum and sum."""
    k_tiles, k_ready, free = k_ring
    v_tiles, v_ready, _ = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    ROWS: gl.constexpr = queries.shape[0]
    layout: gl.constexpr = sideways_layout(ROWS)
    lanes = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    sums = gl.zeros([KEYS, ROWS], gl.float32, layout)  # added up over the keys in the end
    acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout)
    highest = first_position + num_queries - 1
    queries = queries.permute((1, 0))
    for start in range(begin, gl.maximum(end, begin + 1), 2 * KEYS):
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        keys = load_keys(k_tiles.index(stage), layout)
        scores = warpgroup_mma(keys, queries, no_scores, use_acc=False, is_async=True)
        # While this goes on, and the softmax, the values are widened.
        mbarrier.wait(v_ready.index(stage), phase)
        values = load_values(v_tiles.index(stage), layout)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        found, row_max, shrink = softmax(
            scores, row_max, start, end, lanes, first_position, highest, positions, scales, window,
            PIECE, maxima,
        )  # fmt: skip
        sums = sums * shrink[None, :] + found
        weights.store(found.to(weights.dtype))
        fence_async_shared()
        acc = warpgroup_mma(values, weights, acc * shrink[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(stage))  # all of it was in registers for these products
        count += 2
    return acc, row_max * scales, gl.sum(sums, 0)
