# Chapter 05, given: pagedattn/kernels/parts.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 23fcb96c2cdbcf4fce8264fb88c08e4b487813afd80e588d89d2ac9e2b5db315

"""What several programs have found for one query becomes its result.

A *part* is attention over some of a query's keys: an output, and the log of the sum of its
exponentials, in units of log 2. A split of a row writes one for each of its queries, and so does
every program that reads a shared prefix for them. Parts are merged as ``merge`` does it, any
number of them at a time.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the parts of one query, for the heads of one KV head: ``num_shared`` parts of shared
    prefixes, if there are any, and ``num_splits`` of its row's splits. Stores the result."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    SUM: tl.constexpr = partial_lse.dtype.element_ty
    members = tl.arange(0, HEADS)
    row_max = tl.full((HEADS,), float("-inf"), SUM)
    row_sum = tl.zeros((HEADS,), SUM)
    acc = tl.zeros((HEADS, PADDED_DIM), SUM)
    if shared_out is not None:
        first = (first_shared + query * num_shared).to(tl.int64) * num_kv_heads + kv_head
        acc, row_sum, row_max = _add_parts(
            acc, row_sum, row_max, shared_out, shared_lse, first * GROUP, num_kv_heads * GROUP,
            num_shared, GROUP, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    first = (first_split.to(tl.int64) * num_kv_heads + kv_head) * ROWS + query * GROUP
    acc, row_sum, row_max = _add_parts(
        acc, row_sum, row_max, partial_out, partial_lse, first, num_kv_heads * ROWS, num_splits,
        GROUP, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip
    tokens = token.to(tl.int64) + tl.zeros((HEADS,), tl.int64)
    store_rows(
        acc, row_sum, row_max, out, lse, sinks, out_strides, lse_strides, tokens,
        kv_head * GROUP + members, members < GROUP, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit
def _add_parts(
    acc,
    row_sum,
    row_max,
    partial_out,
    partial_lse,
    first,
    stride,
    num_parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Parts of some heads, ``stride`` heads apart. Each weighs the sum of its exponentials. Many
    are fetched at a time."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: tl.constexpr = max(1, 8192 // (HEADS * PADDED_DIM))
    lanes = tl.arange(0, PARTS)
    members = tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_DIM)
    for begin in range(0, num_parts, PARTS):
        number = begin + lanes
        slot = first + number.to(tl.int64) * stride
        slot = slot[:, None] + members[None, :]  # [PARTS, HEADS]
        here = (number < num_parts)[:, None] & (members < GROUP)[None, :]
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
    return acc, row_sum, row_max


@triton.jit
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
    heads = heads.to(tl.int64)
    at = tokens[:, None] * out_strides[0] + heads[:, None] * out_strides[1]
    tl.store(
        out + at + dims.to(tl.int64)[None, :] * out_strides[2],
        (acc / divisor[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )
    if lse is not None:
        log_sum = tl.where(row_sum > 0, (row_max + tl.log2(divisor)) * LN2, float("-inf"))
        at = tokens * lse_strides[0] + heads * lse_strides[1]
        tl.store(lse + at, log_sum.to(lse.dtype.element_ty), mask=real)
