# Chapter 05, given: pagedattn/kernels/hopper_parts.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 d6773f594b4f960dda0b40a158367e4356d789c41f1a1f48f7fad3c3d9d2e595

"""What ``parts`` does, for kernels of a Hopper GPU: merge what several programs have found, and
store results. There layouts are written down, which ``parts`` leaves to the compiler."""

from __future__ import annotations

import math

import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .hopper_ring import wide

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2.0))


@gluon.jit
def merge_parts(
    out,
    lse,
    partial_out,
    partial_lse,
    shared_out,
    shared_lse,
    sinks,
    out_strides,
    lse_strides,
    token,
    query,
    kv_head,
    num_kv_heads,
    first_split,
    num_splits,
    first_shared,
    num_shared,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Merge the parts of one query, for the heads of one KV head: ``num_shared`` parts of shared
    prefixes, if there are any, and ``num_splits`` of its row's splits. Stores the result."""
    HEADS: gl.constexpr = triton.next_power_of_2(GROUP)
    layout: gl.constexpr = parts_layout(HEADS, HEAD_DIM)
    heads_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    row_max = gl.full([HEADS], float("-inf"), gl.float32, heads_layout)
    row_sum = gl.zeros([HEADS], gl.float32, heads_layout)
    acc = gl.zeros([HEADS, HEAD_DIM], gl.float32, gl.SliceLayout(0, layout))
    if shared_out is not None:
        first = (first_shared + query * num_shared).to(gl.int64) * num_kv_heads + kv_head
        acc, row_sum, row_max = _add_parts(
            acc, row_sum, row_max, shared_out, shared_lse, first * GROUP, num_kv_heads * GROUP,
            num_shared, GROUP,
        )  # fmt: skip
    first = (first_split.to(gl.int64) * num_kv_heads + kv_head) * ROWS + query * GROUP
    acc, row_sum, row_max = _add_parts(
        acc, row_sum, row_max, partial_out, partial_lse, first, num_kv_heads * ROWS, num_splits,
        GROUP,
    )  # fmt: skip
    members = gl.arange(0, HEADS, heads_layout)
    store_rows(
        acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides,
        token + gl.zeros([HEADS], gl.int32, heads_layout), kv_head * GROUP + members,
        members < GROUP, 0,
    )  # fmt: skip


@gluon.constexpr_function
def parts_layout(heads, head_dim):
    """[parts, heads, head_dim]: a warp has heads of its own if there are enough, and a thread the
    same 4 numbers of all parts, so that they meet in registers."""
    warps = min(4, heads)
    lanes = head_dim // 4
    return gl.BlockedLayout([1, 1, 4], [32 // lanes, 1, lanes], [4 // warps, warps, 1], [2, 1, 0])


@gluon.jit
def _add_parts(
    acc, row_sum, row_max, partial_out, partial_lse, first, stride, num_parts, GROUP: gl.constexpr
):
    """Parts of some heads, ``stride`` heads apart. Each weighs the sum of its exponentials. Many
    are fetched at a time."""
    HEADS: gl.constexpr = acc.shape[0]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    PARTS: gl.constexpr = max(1, 8192 // (HEADS * HEAD_DIM))
    layout: gl.constexpr = parts_layout(HEADS, HEAD_DIM)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    heads_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    lanes = gl.arange(0, PARTS, gl.SliceLayout(1, flat))
    members = gl.arange(0, HEADS, gl.SliceLayout(0, flat))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    for begin in range(0, num_parts, PARTS):
        number = begin + lanes
        slot = first + number.to(gl.int64) * stride
        slot = slot[:, None] + members[None, :]  # [PARTS, HEADS]
        here = (number < num_parts)[:, None] & (members < GROUP)[None, :]
        part = gl.load(partial_lse + slot, mask=here, other=float("-inf"))
        found = gl.load(
            partial_out + slot[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=here[:, :, None],
            other=0.0,
        )
        new_max = gl.maximum(row_max, gl.convert_layout(gl.max(part, 0), heads_layout))
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        base_of = gl.convert_layout(base, gl.SliceLayout(0, flat))
        weights = gl.exp2(part - base_of[None, :])
        shrink = gl.exp2(row_max - base)
        row_sum = row_sum * shrink + gl.convert_layout(gl.sum(weights, 0), heads_layout)
        acc = acc * shrink[:, None] + gl.sum(found * weights[:, :, None], 0)
        row_max = new_max
    return acc, row_sum, row_max


@gluon.jit
def store_rows(
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
    AXIS: gl.constexpr,
):
    """Add the sink, which is a score without a value, divide, and store: once for each row, which
    stand along ``AXIS`` of ``acc``."""
    DIMS: gl.constexpr = 1 - AXIS
    if sinks is not None:
        sink = gl.load(sinks + heads, mask=real, other=0.0) * LOG2E
        new_max = gl.maximum(row_max, sink)
        shrink = gl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + gl.exp2(sink - new_max)
        acc = acc * gl.expand_dims(shrink, DIMS)
        row_max = new_max
    divisor = gl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing gives 0
    acc = acc / gl.expand_dims(divisor, DIMS)
    tokens = tokens.to(gl.int64)
    dims = gl.arange(0, acc.shape[DIMS], gl.SliceLayout(AXIS, acc.type.layout))
    heads = heads.to(gl.int64)
    at = tokens * wide(out_strides[0]) + heads * wide(out_strides[1])
    at = gl.expand_dims(at, DIMS) + gl.expand_dims(dims, AXIS)
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=gl.expand_dims(real, DIMS))
    if lse is not None:
        log_sum = gl.where(row_sum > 0, (row_max + gl.log2(divisor)) * LN2, float("-inf"))
        at = tokens * wide(lse_strides[0]) + heads * wide(lse_strides[1])
        gl.store(lse + at, log_sum, mask=real)
