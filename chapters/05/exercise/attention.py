# Chapter 05, given: pagedattn/kernels/attention.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 bb3c1b22fb1182921279cb9aad127796d78a0c746cfff9bb1f1da5dd78e9c402

"""Paged attention: decode, prefill, prefill chunks, and all of them in one batch.

One entry for all. What a batch needs is cut into items by the plan; ``attend`` has the kernel that
works on them, launched once for decode items and once more if there are prefill items.

In vLLM: ``vllm/v1/attention/ops/triton_unified_attention.py``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pagedattn.attention import AttentionSpec

from . import attend, attend_shared, hopper
from .attention_checks import check_attention, check_plan
from .buffers import AttentionPlan
from .plan import PROGRAMS, SPLIT_KEYS, new_plan, plan_attention

LOG2E = math.log2(math.e)  # the kernel's exponentials are powers of 2: one instruction each
PLAIN = AttentionSpec()


class Tile(NamedTuple):
    """Keys a tile, and how a program of it is compiled."""

    keys: int
    num_warps: int
    num_stages: int


def decode_tile(q: Tensor, k_cache: Tensor, block_table: Tensor, plan: AttentionPlan) -> Tile:
    """Little work a tile: many programs share a multiprocessor, and wait for memory in turn.

    If the table is so narrow that every split is a single tile, there is nothing to pipeline; and
    if a multiprocessor gets one tile at most, more warps share it.
    """
    if q.dtype.itemsize > 2:
        return Tile(32, 4, 2)
    if q.shape[2] > 128:
        return Tile(32, 4, 3)
    num_warps = 2 if k_cache.dtype == q.dtype else 4  # fp8 has to be unpacked
    if plan.batch_invariant:  # whatever the table
        return Tile(SPLIT_KEYS, num_warps, 3)
    most_tiles = -(-block_table.numel() * k_cache.shape[1] // SPLIT_KEYS)
    if most_tiles > plan.target_splits:
        return Tile(SPLIT_KEYS, num_warps, 3)
    return Tile(SPLIT_KEYS, 4 if PROGRAMS * most_tiles <= plan.target_splits else num_warps, 1)


def prefill_tile(q: Tensor, k_cache: Tensor) -> Tile:
    """Much work a tile: every key that is fetched meets many queries."""
    if q.dtype.itemsize > 2:
        return Tile(32, 8, 1)
    if q.shape[2] > 128:
        return Tile(32, 8, 2)
    return Tile(128 if k_cache.dtype == q.dtype else 64, 8, 3)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    spec: AttentionSpec = PLAIN,
    plan: AttentionPlan | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of a mixed batch through block tables, as chapter 02's, in one or two
    launches, one more if the plan shares prefixes, and without synchronisation.

    Shapes: ``q`` [num_tokens, num_heads, head_dim]; ``k_cache``, ``v_cache`` [num_blocks,
    block_size, num_kv_heads, head_dim], any strides; ``block_table`` int32 [num_seqs, width];
    ``seq_lens`` int32 [num_seqs], each sequence's length with its new tokens; ``query_start_loc``
    int32 [num_seqs + 1]. The queries of a sequence stand at its last positions. Returns the shape
    of ``q``, in ``out`` if it is given; the natural log-sum-exp goes to ``lse``, float32
    [num_tokens, num_heads], if that is given. Padding tokens are not touched; a new output has 0
    there.

    ``plan`` is what ``plan_attention`` has made of these lengths and, if it shares prefixes, of
    this table; without one a plain one is made here. A
    cache of float8_e4m3fn holds K / ``k_scale`` and V / ``v_scale``: float32, one number or one a
    KV head. K and V of keys behind a sequence's end are never read.

    Raises ValueError for a wrong type, shape or device, and for a plan of other sizes. Lengths and
    block ids are on the device and not looked at: ``check_block_table`` does that.
    """
    check_attention(
        q, k_cache, v_cache, block_table, seq_lens, query_start_loc, spec, k_scale, v_scale,
        out, lse,
    )  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if plan is None:
        plan = new_plan(
            len(seq_lens), num_tokens, num_heads, num_kv_heads, head_dim,
            dtype=q.dtype, window=spec.window, device=q.device,
        )  # fmt: skip
        plan_attention(plan, seq_lens, query_start_loc)
    check_plan(plan, q, k_cache, seq_lens, spec)
    if out is None:
        out = torch.zeros_like(q)
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    log2_scale = scale * LOG2E
    sinks = _per_head(spec.sinks, plan.partial_lse)
    batch = q, k_cache, v_cache, block_table, plan
    on_hopper = hopper.can_attend(q, k_cache, v_cache, out, spec)
    narrow = k_cache.dtype != q.dtype
    plain = _arguments(*batch, spec, log2_scale, k_scale, v_scale)
    results = _results(plan, spec, sinks, out, lse)
    if plan.shared is not None:
        if on_hopper and not narrow and plan.prefill_rows == hopper.PREFILL_ROWS:
            hopper.shared(*batch, log2_scale)
        else:
            _attend_shared(plan, prefill_tile(q, k_cache), plain)
    if on_hopper and plan.is_shared_out:
        hopper.decode(*batch, out, lse, sinks, log2_scale, k_scale, v_scale)
    else:
        _attend(plan, 0, decode_tile(q, k_cache, block_table, plan), plain | results)
    if len(plan.prefill_items):
        if on_hopper and not narrow and plan.prefill_rows == hopper.PREFILL_ROWS:
            hopper.prefill(*batch, out, lse, sinks, log2_scale)
        else:
            _attend(plan, 1, prefill_tile(q, k_cache), plain | results)
    return out


def _arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    spec: AttentionSpec,
    log2_scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, Any]:
    """What the kernels of ``attend`` and ``attend_shared`` take."""
    head_dim = q.shape[2]
    return {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "alibi_slopes": _per_head(spec.alibi_slopes, plan.partial_lse),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_scale_stride": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "v_scale_stride": 0 if v_scale is None or v_scale.numel() == 1 else 1,
        "q_strides": q.stride(),
        "k_strides": k_cache.stride(),
        "v_strides": v_cache.stride(),
        "table_stride": block_table.stride(0),
        "SCALE": log2_scale,
        "SOFT_CAP": None if spec.soft_cap is None else spec.soft_cap * LOG2E,
        "GROUP": plan.group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": k_cache.shape[1],
    }


def _results(
    plan: AttentionPlan, spec: AttentionSpec, sinks: Tensor | None, out: Tensor, lse: Tensor | None
) -> dict[str, Any]:
    """What ``attend``'s kernel takes beside that."""
    shared = plan.shared
    return {
        "out": out,
        "lse": lse,
        "partial_out": plan.partial_out,
        "partial_lse": plan.partial_lse,
        "arrivals": plan.arrivals,
        "shared_out": None if shared is None else shared.partial_out,
        "shared_lse": None if shared is None else shared.partial_lse,
        "shared_parts": None if shared is None else shared.parts,
        "num_items": plan.num_items,
        "sinks": sinks,
        "out_strides": out.stride(),
        "lse_strides": (0, 0) if lse is None else lse.stride(),
        "window": plan.clamped_window,
    }


def _attend_shared(plan: AttentionPlan, tile: Tile, arguments: dict[str, Any]) -> None:
    shared = plan.shared
    assert shared is not None
    attend_shared.attend_shared_kernel[(plan.arrivals.shape[1], shared.num_programs)](
        items=shared.items,
        num_items=shared.num_items,
        members=shared.members,
        partial_out=shared.partial_out,
        partial_lse=shared.partial_lse,
        ROWS=plan.prefill_rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arguments,
    )


def _attend(plan: AttentionPlan, kind: int, tile: Tile, arguments: dict[str, Any]) -> None:
    """Decode items (kind 0) or prefill items (1)."""
    items = (plan.decode_items, plan.prefill_items)[kind]
    attend.attend_kernel[(plan.arrivals.shape[1], len(items))](
        items=items,
        KIND=kind,
        ROWS=(plan.decode_rows, plan.prefill_rows)[kind],
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arguments,
    )


@cache
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _per_head(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    """A spec's numbers on the device: copied there once."""
    return None if values is None else _on_device(values, like.dtype, like.device)
