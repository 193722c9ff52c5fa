# Chapter 05, given: pagedattn/kernels/hopper_sideways.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 e2aa7513c16ad53bb99d4a3d527dd120ad3ccb89ed6ce36e8e6a3cbd2c841f02

"""What decode kernels of a Hopper GPU have in common, for a 16-bit cache and for fp8: there the
tile stands on its side, scores [keys, queries] and output [head_dim, queries]."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .hopper_parts import merge_parts, store_rows
from .hopper_ring import key_positions, wide

# gluon calls it so since Triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def sideways_layout(rows):
    """Of scores, [keys, rows], and of the output, [head_dim, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def load_queries(
    q,
    q_strides,
    first_token,
    num_queries,
    kv_head,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """The heads of a group, for each query of an item: [ROWS, HEAD_DIM], and zeros below."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    tokens = (first_token + rows // GROUP).to(gl.int64)
    heads = (kv_head * GROUP + rows % GROUP).to(gl.int64)
    at = tokens * wide(q_strides[0]) + heads * wide(q_strides[1])
    real = rows < num_queries * GROUP
    return gl.load(q + at[:, None] + dims[None, :], mask=real[:, None], other=0.0)


@gluon.jit
def softmax(
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
    maxima=None,
):
    """Scores become weights. ``maxima`` is shared memory for the maxima of four warps."""
    cut = start + scores.shape[0] > gl.minimum(lowest + 1, end)
    if window is not None:
        cut = cut | (start <= highest - window)
    if cut:
        keys = key_positions(start, end, lanes, PIECE)
        seen = keys[:, None] <= positions[None, :]
        if window is not None:
            seen = seen & (keys[:, None] > positions[None, :] - window)
        scores = gl.where(seen, scores, float("-inf"))
    if maxima is None:
        new_max = gl.maximum(row_max, gl.max(scores, 0))
    else:
        new_max = gl.maximum(row_max, _max_of_keys(scores, maxima))
    base = gl.where(new_max == float("-inf"), 0.0, new_max * scales)
    found = gl.exp2(scores * scales[None, :] - base[None, :])
    return found, new_max, gl.exp2(row_max * scales - base)


@gluon.jit
def _max_of_keys(scores, maxima):
    """Each row's maximum. Every warp puts that of its keys into ``maxima`` and reads all of them:
    so all wait once, and in ``gl.max`` twice."""
    KEYS: gl.constexpr = scores.shape[0]
    ROWS: gl.constexpr = scores.shape[1]
    of_warps = scores.reshape([KEYS // 64, 4, 16, ROWS])
    maxima.store(gl.max(gl.max(of_warps, 0), 1))
    found = gl.max(maxima.load(_all_maxima(ROWS)), 0)
    return gl.convert_layout(found, gl.SliceLayout(0, scores.type.layout), assert_trivial=True)


@gluon.constexpr_function
def _all_maxima(rows):
    """A thread has all warps' maxima of those rows of which it has scores."""
    columns = [[0, 1], *([0, 8 << bit] for bit in range((rows // 8).bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    warps = [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout([*columns, [1, 0], [2, 0]], lanes, warps, [], [4, rows])


@gluon.jit
def store_item(
    acc,
    row_max,
    row_sum,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    shared_out,
    shared_lse,
    shared_parts,
    item,
    sinks,
    out_strides,
    lse_strides,
    number,
    num_kv_heads,
    GROUP: gl.constexpr,
):
    """Store what was found for an item, or, if its row has other parts, store this one; who stores
    the last of them merges all."""
    HEAD_DIM: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    kv_head = number % num_kv_heads
    row = gl.load(item)
    first_token = gl.load(item + 1)
    num_queries = gl.load(item + 2)
    num_splits = gl.load(item + 6)
    first_split = gl.load(item + 7)
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    heads = kv_head * GROUP + rows % GROUP
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
        gl.store(partial_out + slot[None, :] * HEAD_DIM + dims[:, None], found, mask=real[None, :])
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
