# Chapter 05, given: pagedattn/kernels/attend_shared.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 a73b452de4dd6d2fde4270d63c8f61ce3557953627569053ae2057b965c3c6f7

"""The attention kernel for shared prefixes.

A tile has the queries of many rows: all members of a group that fit, with the query heads that
share a KV head. So the keys of the group's common blocks are read once for all of them, and where
decode does two operations for each byte that it reads, there are matrix products worth the name.
Every member sees all of these keys, so nothing is masked. ``attend`` merges what is found here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import attend
from .parts import LOG2E


@triton.jit
def attend_shared_kernel(
    q,
    k_cache,
    v_cache,
    partial_out,
    partial_lse,
    block_table,
    items,
    num_items,
    members,
    alibi_slopes,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    q_strides,
    table_stride,
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
    """One KV head. As many programs as the machine runs at a time take turns at the items: when
    there is none, as in most steps, that is over at once."""
    FEW: tl.constexpr = ROWS // 4
    for number in range(tl.program_id(1), tl.load(num_items), tl.num_programs(1)):
        item = items + number * 6
        # Two beams do not fill a tile, and its products would then take longer than its keys.
        if FEW >= 16 and tl.load(item + 4) * GROUP <= FEW:
            _attend_members(
                item, q, k_cache, v_cache, partial_out, partial_lse, block_table, members,
                alibi_slopes, k_scale, v_scale, k_scale_stride, v_scale_stride,
                q_strides, table_stride,
                GROUP, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, K_STRIDES, V_STRIDES, SCALE,
                SOFT_CAP, FEW, KEYS,
            )  # fmt: skip
        else:
            _attend_members(
                item, q, k_cache, v_cache, partial_out, partial_lse, block_table, members,
                alibi_slopes, k_scale, v_scale, k_scale_stride, v_scale_stride,
                q_strides, table_stride,
                GROUP, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, K_STRIDES, V_STRIDES, SCALE,
                SOFT_CAP, ROWS, KEYS,
            )  # fmt: skip


@triton.jit
def _attend_members(
    item,
    q,
    k_cache,
    v_cache,
    partial_out,
    partial_lse,
    block_table,
    members,
    alibi_slopes,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    q_strides,
    table_stride,
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
    """One item: its keys, for the queries of its members, at most ``ROWS`` with their heads."""
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    first_member = tl.load(item + 3)
    num_members = tl.load(item + 4)
    part = tl.load(item + 5)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows % GROUP
    real = rows < num_members * GROUP
    member = members + (first_member + rows // GROUP) * 3
    tokens = tl.load(member, mask=real, other=0).to(tl.int64)
    positions = tl.load(member + 1, mask=real, other=0)
    at = tokens[:, None] * q_strides[0] + heads.to(tl.int64)[:, None] * q_strides[1]
    here = real[:, None] & (dims < HEAD_DIM)[None, :]
    at += dims.to(tl.int64)[None, :] * q_strides[2]
    q_tile = tl.load(q + at, mask=here, other=0.0)
    SUM: tl.constexpr = partial_lse.dtype.element_ty
    slopes = tl.zeros((ROWS,), SUM)
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=real, other=0.0) * LOG2E
    scale = tl.full((), SCALE, SUM)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * k_scale_stride)

    row_max = tl.full((ROWS,), float("-inf"), SUM)
    row_sum = tl.zeros((ROWS,), SUM)
    acc = tl.zeros((ROWS, PADDED_DIM), SUM)
    k_head = k_cache + kv_head.to(tl.int64) * K_STRIDES[2]
    v_head = v_cache + kv_head.to(tl.int64) * V_STRIDES[2]
    table = block_table + row.to(tl.int64) * table_stride
    acc, row_sum, row_max = attend._walk(
        acc, row_sum, row_max, q_tile, k_head, v_head, table, begin, end, positions, slopes,
        scale, None, False, alibi_slopes is not None, SOFT_CAP,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, K_STRIDES, V_STRIDES, KEYS,
    )  # fmt: skip

    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head * v_scale_stride)
    slot = tl.load(member + 2, mask=real, other=0) + part
    slot = slot.to(tl.int64) * num_kv_heads * GROUP + heads
    tl.store(partial_lse + slot, row_max + tl.log2(row_sum), mask=real)
    acc = acc / row_sum[:, None]
    tl.store(partial_out + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=here)
