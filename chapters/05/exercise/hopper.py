# Chapter 05, given: pagedattn/kernels/hopper.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 eb0baa7fea4e8f5d2050c12b96aa32f927b631123478c6c9ad52e6e52a36c0a3

"""Attention on a Hopper GPU (H100, H200): the same results, by the machine's own means.

Its matrix units take their factors from shared memory, four warps at a time; its copy engine fills
that memory while they work. Triton's Gluon level gives both into the programmer's hands, and the
layouts with them. ``hopper_ring`` fetches, ``hopper_walk`` and ``hopper_prefill`` compute many
queries, ``hopper_decode`` few. What these do not do, ``attend`` does.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec

from .buffers import AttentionPlan, num_multiprocessors

HEAD_DIMS = 64, 128
PREFILL_ROWS = 128
DECODE_KEYS = 128  # of a tile
LEAST_PIECE = 8  # slots of a block that are fetched at once: rows after which a swizzle repeats
SHORT_TABLE = 2048  # keys: in short sequences long tiles are cut off by the mask too often


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has what these kernels are written for; "meta" stands for an H200."""
    if find_spec("triton.experimental.gluon") is None:
        return False
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def share_programs(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int, decode_rows: int
) -> int:
    """Programs of one KV head that decode rows are shared out to: all together, one a
    multiprocessor. 0 if no kernel here decodes such heads."""
    fits = head_dim in HEAD_DIMS and dtype.itemsize == 2 and decode_rows <= 32
    if not (fits and is_hopper(device)):
        return 0
    return max(1, num_multiprocessors(device) // num_kv_heads)


def can_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, spec: AttentionSpec
) -> bool:
    """Whether the kernels here know this attention, and the copy engine these strides."""
    block_size, head_dim = k_cache.shape[1], q.shape[2]
    return (
        is_hopper(q.device)
        and q.dtype.itemsize == 2
        and head_dim in HEAD_DIMS
        and spec.soft_cap is None
        and spec.alibi_slopes is None
        and block_size & -block_size >= LEAST_PIECE
        and all(_whole_16_bytes(tensor) for tensor in (q, k_cache, v_cache, out))
    )


def _whole_16_bytes(tensor: Tensor) -> bool:
    """The copy engine asks for them."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    aligned = all(stride * size % 16 == 0 for stride in strides)
    return last == 1 and aligned and (tensor.is_meta or tensor.data_ptr() % 16 == 0)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    scale: float,
) -> None:
    """The plan's prefill items. ``scale`` is in units of log 2."""
    from .hopper_prefill import prefill_kernel

    span = block_table.shape[1] * k_cache.shape[1]
    short = span <= SHORT_TABLE and not plan.batch_invariant
    keys, stages = (64, 4) if short else (128, 2)
    programs = num_multiprocessors(q.device)
    prefill_kernel[(programs,)](
        out=out,
        lse=lse,
        items=plan.prefill_items,
        num_items=plan.num_items[1:],
        sinks=sinks,
        out_strides=out.stride(),
        lse_strides=(0, 0) if lse is None else lse.stride(),
        window=plan.clamped_window,
        num_programs=programs,
        **_inputs(q, k_cache, v_cache, block_table, scale, keys),
        num_kv_heads=k_cache.shape[2],
        STAGES=stages,
        num_warps=4,
    )


def shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    scale: float,
) -> None:
    """The plan's shared prefixes. ``scale`` is in units of log 2."""
    from .hopper_prefill import shared_kernel

    assert plan.shared is not None
    programs = num_multiprocessors(q.device)
    shared_kernel[(programs,)](
        partial_out=plan.shared.partial_out,
        partial_lse=plan.shared.partial_lse,
        items=plan.shared.items,
        num_items=plan.shared.num_items,
        members=plan.shared.members,
        num_programs=programs,
        **_inputs(q, k_cache, v_cache, block_table, scale, 128),
        num_kv_heads=k_cache.shape[2],
        STAGES=2,
        num_warps=4,
    )


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The plan's decode items, share by share. ``scale`` is in units of log 2."""
    from .hopper_decode import decode_kernel

    found = plan.shared
    fp8 = k_cache.dtype != q.dtype
    decode_kernel[(k_cache.shape[2], len(plan.share_start) - 1)](
        out=out,
        lse=lse,
        partial_out=plan.partial_out,
        partial_lse=plan.partial_lse,
        arrivals=plan.arrivals,
        shared_out=None if found is None else found.partial_out,
        shared_lse=None if found is None else found.partial_lse,
        shared_parts=None if found is None else found.parts,
        items=plan.decode_items,
        share_start=plan.share_start,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scale_stride=0 if k_scale is None or k_scale.numel() == 1 else 1,
        v_scale_stride=0 if v_scale is None or v_scale.numel() == 1 else 1,
        out_strides=out.stride(),
        lse_strides=(0, 0) if lse is None else lse.stride(),
        window=plan.clamped_window,
        ROWS=plan.decode_rows,
        **_inputs(q, k_cache, v_cache, block_table, scale, DECODE_KEYS),
        STAGES=2 if fp8 else 3 * 128 // q.shape[2],
        NARROW_STAGES=2 * 128 // q.shape[2] if fp8 else 0,
        num_warps=4,
    )


def _inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float, keys: int
) -> dict[str, Any]:
    """What all these kernels take, for tiles of ``keys`` keys."""
    from .hopper_ring import describe

    num_heads, head_dim = q.shape[1:]
    _, block_size, num_kv_heads, _ = k_cache.shape
    return {
        "q": q,
        "k_desc": describe(k_cache, keys),
        "v_desc": describe(v_cache, keys),
        "block_table": block_table,
        "q_strides": q.stride(),
        "table_stride": block_table.stride(0),
        "SCALE": scale,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "KEYS": keys,
    }
