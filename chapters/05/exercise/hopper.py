# Chapter 05, given: pagedattn/kernels/hopper.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 e60135f9823300c3635172655be97fcad01f4eecc1abf4dbf8a378352057a955

"""Attention on a Hopper GPU (H100, H200): the same results, by the machine's own means.

Its matrix units take their factors from shared memory, four warps at a time; its copy engine fills
that memory while they work. Triton's Gluon level gives both into the programmer's hands, and the
layouts with them. ``hopper_ring`` fetches, ``hopper_walk`` and ``hopper_prefill`` compute many
queries, ``hopper_decode`` few, and ``hopper_fp8`` few over an fp8 cache. What these do not do,
``attend`` does.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec

from .buffers import AttentionPlan, Launch, Layer, num_multiprocessors

HEAD_DIMS = 64, 128
PREFILL_ROWS = 128
DECODE_KEYS = 128  # of a tile
LEAST_PIECE = 8  # slots of a block that are fetched at once: rows after which a swizzle repeats
# With so many bytes of K and V or fewer a decode launch is so brief, 21 us of an H200 at most, that
# its start counts. Such a one begins before the kernel before it has ended (programmatic dependent
# launch), and has one fetch warp for K and one for V, not two each: 1 x 512 then takes 6.7 us, not
# 7.9, and 32 x 512 20.7, not 22.0; but 64 x 8192 488, not 476.
BRIEF_BYTES = 2**26
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


def can_attend(layer: Layer, spec: AttentionSpec) -> bool:
    """Whether the kernels here know this attention, and the copy engine these tensors."""
    q, k_cache, v_cache, _, out, *_ = layer
    block_size, head_dim = k_cache.shape[1], q.shape[2]
    return (
        is_hopper(q.device)
        and q.dtype.itemsize == 2
        and head_dim in HEAD_DIMS
        and spec.soft_cap is None
        and spec.alibi_slopes is None
        and block_size & -block_size >= LEAST_PIECE
        and are_aligned(layer)
        and all(_steps_16_bytes(tensor) for tensor in (q, k_cache, v_cache, out))
    )


def are_aligned(layer: Layer) -> bool:
    """Whether the tensors begin at whole 16 bytes, as the copy engine asks."""
    q, k_cache, v_cache, _, out, *_ = layer
    begins = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()
    return begins % 16 == 0


def _steps_16_bytes(tensor: Tensor) -> bool:
    """Whether all strides are whole 16 bytes, which it asks as well."""
    *strides, last = tensor.stride()
    return last == 1 and gcd(*strides) * tensor.element_size() % 16 == 0


def prefill(plan: AttentionPlan, layer: Layer, sinks: Tensor | None, scale: float) -> Launch:
    """The plan's prefill items. ``scale`` is in units of log 2."""
    from .hopper_prefill import prefill_kernel

    span = layer.block_table.shape[1] * layer.k_cache.shape[1]
    short = span <= SHORT_TABLE and not plan.batch_invariant
    keys, stages = (64, 4) if short else (128, 2)
    programs = num_multiprocessors(layer.q.device)
    arguments = _inputs(layer, scale, keys) | {
        "items": plan.prefill_items,
        "num_items": plan.num_items[1:],
        "sinks": sinks,
        "out_strides": layer.out.stride(),
        "lse_strides": (0, 0) if layer.lse is None else layer.lse.stride(),
        "window": plan.clamped_window,
        "num_programs": programs,
        "num_kv_heads": layer.k_cache.shape[2],
        "STAGES": stages,
        "num_warps": 4,
    }
    return _launch(prefill_kernel[(programs,)], arguments, "out", "lse")


def shared(plan: AttentionPlan, layer: Layer, scale: float) -> Launch:
    """The plan's shared prefixes. ``scale`` is in units of log 2."""
    from .hopper_prefill import shared_kernel

    assert plan.shared is not None
    programs = num_multiprocessors(layer.q.device)
    arguments = _inputs(layer, scale, 128) | {
        "partial_out": plan.shared.partial_out,
        "partial_lse": plan.shared.partial_lse,
        "items": plan.shared.items,
        "num_items": plan.shared.num_items,
        "members": plan.shared.members,
        "num_programs": programs,
        "num_kv_heads": layer.k_cache.shape[2],
        "STAGES": 2,
        "num_warps": 4,
    }
    return _launch(shared_kernel[(programs,)], arguments)


def decode(plan: AttentionPlan, layer: Layer, sinks: Tensor | None, scale: float) -> Launch:
    """The plan's decode items, share by share. ``scale`` is in units of log 2."""
    found = plan.shared
    arguments = _inputs(layer, scale, DECODE_KEYS) | {
        "partial_out": plan.partial_out,
        "partial_lse": plan.partial_lse,
        "arrivals": plan.arrivals,
        "shared_out": None if found is None else found.partial_out,
        "shared_lse": None if found is None else found.partial_lse,
        "shared_parts": None if found is None else found.parts,
        "items": plan.decode_items,
        "share_start": plan.share_start,
        "sinks": sinks,
        "out_strides": layer.out.stride(),
        "lse_strides": (0, 0) if layer.lse is None else layer.lse.stride(),
        "window": plan.clamped_window,
        "ROWS": plan.decode_rows,
        "num_warps": 4,
    }
    head_dim, k_scale, v_scale = layer.q.shape[2], layer.k_scale, layer.v_scale
    grid = layer.k_cache.shape[2], len(plan.share_start) - 1
    if layer.k_cache.dtype == layer.q.dtype:
        from .hopper_decode import decode_kernel

        # Own keys behind a shared prefix are few: for items of two tiles one warp is faster, too.
        brief = _most_bytes(layer) <= BRIEF_BYTES
        arguments |= {
            "STAGES": 3 * 128 // head_dim,
            "FETCHERS": 1 if brief or found is not None else 2,
            "EARLY": brief,
            "launch_pdl": brief,
        }
        return _launch(decode_kernel[grid], arguments, "out", "lse")
    from .hopper_fp8 import fp8_decode_kernel

    # Wide tiles of many rows do not fit into registers. Stages: even, and as many as have room.
    keys, stages = (DECODE_KEYS, 6) if plan.decode_rows <= 16 else (64, 8)
    arguments |= {
        "k_scale_stride": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "v_scale_stride": 0 if v_scale is None or v_scale.numel() == 1 else 1,
        "KEYS": keys,
        "STAGES": stages * 128 // head_dim,
    }
    return _launch(fp8_decode_kernel[grid], arguments, "out", "lse", "k_scale", "v_scale")


def _most_bytes(layer: Layer) -> int:
    """Of the K and V that a block table of this form can name."""
    _, block_size, num_kv_heads, head_dim = layer.k_cache.shape
    keys = layer.block_table.numel() * block_size
    return 2 * keys * num_kv_heads * head_dim * layer.k_cache.element_size()


def _inputs(layer: Layer, scale: float, keys: int) -> dict[str, Any]:
    """What all these kernels take beside the layer, for tiles of ``keys`` keys."""
    num_heads, head_dim = layer.q.shape[1:]
    _, block_size, num_kv_heads, _ = layer.k_cache.shape
    return {
        "q_strides": layer.q.stride(),
        "table_stride": layer.block_table.stride(0),
        "SCALE": scale,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "KEYS": keys,
    }


def _launch(kernel: Any, arguments: dict[str, Any], *names: str) -> Launch:
    """Of a kernel that takes ``arguments``, and of a layer q, both caches, its table and what is
    named."""
    from .hopper_ring import describe

    def launch(layer: Layer) -> None:
        kernel(
            q=layer.q,
            k_desc=describe(layer.k_cache, arguments["KEYS"]),
            v_desc=describe(layer.v_cache, arguments["KEYS"]),
            block_table=layer.block_table,
            **{name: getattr(layer, name) for name in names},
            **arguments,
        )

    return launch
