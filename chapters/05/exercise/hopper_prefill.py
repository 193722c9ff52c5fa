# Chapter 05, given: pagedattn/kernels/hopper_prefill.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 97771e77005ea7a7f68eabc6423e110f2c1e836a47221f66cbf75d9257472f2a

"""Prefill items on a Hopper GPU, and shared prefixes: many queries a tile.

As many programs as there are multiprocessors take turns at the items, each with the whole of one:
two warp groups compute, two warps fetch K and V. These run ahead into the next item while the last
one's results are still being stored, and its queries are asked for as soon as the last scores are
done.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .hopper_parts import store_rows
from .hopper_ring import fetch, new_ring
from .hopper_walk import (
    GROUP_ROWS,
    await_queries,
    fetch_queries,
    finish,
    out_layout,
    queries_layout,
    scores_layout,
    walk,
)


@gluon.jit
def prefill_kernel(
    q,
    k_desc,
    v_desc,
    out,
    lse,
    block_table,
    items,
    num_items,
    sinks,
    q_strides,
    out_strides,
    lse_strides,
    table_stride,
    window,
    num_kv_heads,
    num_programs,
    SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    first = gl.program_id(0)
    last = gl.load(num_items) * num_kv_heads
    if first >= last:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, HEAD_DIM], layout)
    k_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 2)
    v_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 2)
    PIECE: gl.constexpr = k_desc.block_shape[1]
    gl.warp_specialize(
        [
            (_attend, (
                queries.index(0), k_ring, v_ring, q, out, lse, sinks, items, first, last, q_strides,
                out_strides, lse_strides, num_kv_heads, num_programs, SCALE, window,
                0, GROUP, PIECE,
            )),
            (_attend, (
                queries.index(1), k_ring, v_ring, q, out, lse, sinks, items, first, last, q_strides,
                out_strides, lse_strides, num_kv_heads, num_programs, SCALE, window,
                GROUP_ROWS, GROUP, PIECE,
            )),
            (fetch, (
                k_desc, k_ring, block_table, table_stride, items, first, last, num_programs,
                num_kv_heads, 8, 4, BLOCK_SIZE,
            )),
            (fetch, (
                v_desc, v_ring, block_table, table_stride, items, first, last, num_programs,
                num_kv_heads, 8, 4, BLOCK_SIZE,
            )),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip


@gluon.jit
def _attend(
    queries,
    k_ring,
    v_ring,
    q,
    out,
    lse,
    sinks,
    items,
    first,
    last,
    q_strides,
    out_strides,
    lse_strides,
    num_kv_heads,
    num_programs,
    scale,
    window,
    FIRST_ROW: gl.constexpr,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
):
    """One warp group: the rows of each tile from ``FIRST_ROW`` on."""
    KEYS: gl.constexpr = k_ring[0].shape[1]
    HEAD_DIM: gl.constexpr = k_ring[0].shape[2]
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout(KEYS))
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout(HEAD_DIM))
    count = 0
    _ask(queries, q, q_strides, items, first, num_kv_heads, FIRST_ROW, GROUP)
    for number in range(first, last, num_programs):
        item = items + number // num_kv_heads * 8
        num_queries = gl.load(item + 2)
        first_position = gl.load(item + 3)
        begin = gl.load(item + 4) // PIECE * PIECE
        end = gl.load(item + 5)
        await_queries()
        rows = FIRST_ROW + gl.arange(0, GROUP_ROWS, row_layout)
        last_row = gl.minimum(FIRST_ROW + GROUP_ROWS - 1, num_queries * GROUP - 1)
        acc, weights, row_max, row_sum, count = walk(
            queries, k_ring, v_ring, count, begin, end, first_position + rows // GROUP,
            first_position + FIRST_ROW // GROUP, first_position + last_row // GROUP,
            scale, window, True, PIECE,
        )  # fmt: skip
        if number + num_programs < last:
            _ask(
                queries, q, q_strides, items, number + num_programs, num_kv_heads, FIRST_ROW, GROUP
            )
        acc = finish(acc, weights, v_ring, count)
        count += 1

        first_token = gl.load(item + 1)
        num_queries = gl.load(item + 2)  # once more: no register holds it through the walk
        rows = FIRST_ROW + gl.arange(0, GROUP_ROWS, out_rows)
        store_rows(
            acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides,
            first_token + rows // GROUP, number % num_kv_heads * GROUP + rows % GROUP,
            rows < num_queries * GROUP, 0,
        )  # fmt: skip


@gluon.jit
def _ask(
    queries, q, q_strides, items, number, num_kv_heads, FIRST_ROW: gl.constexpr, GROUP: gl.constexpr
):
    """For the queries of an item. Rows behind its last are another's, and are not stored."""
    item = items + number // num_kv_heads * 8
    first_token = gl.load(item + 1)
    num_queries = gl.load(item + 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, queries_layout(queries.shape[1]))
    rows = FIRST_ROW + gl.arange(0, GROUP_ROWS, row_layout)
    rows = gl.minimum(rows, num_queries * GROUP - 1)
    tokens = first_token + rows // GROUP
    fetch_queries(queries, q, q_strides, tokens, number % num_kv_heads * GROUP + rows % GROUP)


@gluon.jit
def shared_kernel(
    q,
    k_desc,
    v_desc,
    partial_out,
    partial_lse,
    block_table,
    items,
    num_items,
    members,
    q_strides,
    table_stride,
    num_kv_heads,
    num_programs,
    SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As the kernel above, for shared prefixes: ``attend_shared`` says what they are."""
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    last = gl.load(num_items) * num_kv_heads
    first = gl.program_id(0)
    if first >= last:  # as in most steps
        return
    queries = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, HEAD_DIM], layout)
    k_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 2)
    v_ring = new_ring(dtype, STAGES, KEYS, HEAD_DIM, 1, 2)
    gl.warp_specialize(
        [
            (_attend_shared, (
                queries.index(0), k_ring, v_ring, q, partial_out, partial_lse, items, members,
                q_strides, first, last, num_kv_heads, num_programs, SCALE, 0, GROUP,
            )),
            (_attend_shared, (
                queries.index(1), k_ring, v_ring, q, partial_out, partial_lse, items, members,
                q_strides, first, last, num_kv_heads, num_programs, SCALE, GROUP_ROWS, GROUP,
            )),
            (fetch, (
                k_desc, k_ring, block_table, table_stride, items, first, last, num_programs,
                num_kv_heads, 6, 1, BLOCK_SIZE,
            )),
            (fetch, (
                v_desc, v_ring, block_table, table_stride, items, first, last, num_programs,
                num_kv_heads, 6, 1, BLOCK_SIZE,
            )),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip


@gluon.jit
def _attend_shared(
    queries,
    k_ring,
    v_ring,
    q,
    partial_out,
    partial_lse,
    items,
    members,
    q_strides,
    first,
    last,
    num_kv_heads,
    num_programs,
    scale,
    FIRST_ROW: gl.constexpr,
    GROUP: gl.constexpr,
):
    """One warp group: the rows of each tile from ``FIRST_ROW`` on. Every row sees every key."""
    HEAD_DIM: gl.constexpr = k_ring[0].shape[2]
    ask_rows: gl.constexpr = gl.SliceLayout(1, queries_layout(HEAD_DIM))
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout(HEAD_DIM))
    count = 0
    for number in range(first, last, num_programs):
        item = items + number // num_kv_heads * 6
        kv_head = number % num_kv_heads
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        first_member = gl.load(item + 3)
        num_members = gl.load(item + 4)
        part = gl.load(item + 5)
        rows = FIRST_ROW + gl.arange(0, GROUP_ROWS, ask_rows)
        rows = gl.minimum(rows, num_members * GROUP - 1)
        tokens = gl.load(members + (first_member + rows // GROUP) * 3)
        fetch_queries(queries, q, q_strides, tokens, kv_head * GROUP + rows % GROUP)
        await_queries()
        acc, weights, row_max, row_sum, count = walk(
            queries, k_ring, v_ring, count, begin, end, 0, 0, 0, scale, None, False, 1
        )
        acc = finish(acc, weights, v_ring, count)
        count += 1

        rows = FIRST_ROW + gl.arange(0, GROUP_ROWS, out_rows)
        real = rows < num_members * GROUP
        slot = gl.load(members + (first_member + rows // GROUP) * 3 + 2, mask=real, other=0) + part
        slot = slot.to(gl.int64) * (num_kv_heads * GROUP) + kv_head * GROUP + rows % GROUP
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout(HEAD_DIM)))
        gl.store(partial_lse + slot, row_max + gl.log2(row_sum), mask=real)
        found = acc / row_sum[:, None]
        gl.store(partial_out + slot[:, None] * HEAD_DIM + dims[None, :], found, mask=real[:, None])
