# Chapter 05, given: pagedattn/kernels/attention.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 aeb95d47a998f433be0950962f1d54a1739be53cc5a8dd6749481809af6a02d5

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
from .buffers import AttentionPlan, Launch, Layer, num_multiprocessors, shared_memory
from .plan import PROGRAMS, SPLIT_KEYS, new_plan, plan_attention

LOG2E = math.log2(math.e)  # the kernel's exponentials are powers of 2: one instruction each
PLAIN = AttentionSpec()
MOST_FORMS = 1024  # that a plan remembers


class Tile(NamedTuple):
    """Keys a tile, and how a program of it is compiled; so few registers a thread that two programs
    fit on a multiprocessor, or as many as it likes."""

    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None


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


def prefill_tile(q: Tensor, k_cache: Tensor, plan: AttentionPlan, num_seqs: int) -> Tile:
    """Much work a tile: every key that is fetched meets many queries.

    Two programs share a multiprocessor: while one makes weights of its scores, the other has the
    matrix units. Each has half of the registers, which is room for shorter tiles. Where there are
    so few programs that each is alone, it has long tiles.
    """
    if q.dtype.itemsize > 2 or q.shape[2] > 128 or plan.prefill_rows > 128:
        return lone_tile(q, k_cache)  # half of the registers have no room for it
    # A row of n queries has at most (n - 1) / prefill_queries + 1 tiles.
    most_tiles = num_seqs + max(0, len(q) - num_seqs) // plan.prefill_queries
    programs = most_tiles * k_cache.shape[2]
    if programs <= num_multiprocessors(q.device) and not plan.batch_invariant:
        return lone_tile(q, k_cache)
    return Tile(64, 8, 3, registers=128)


def lone_tile(q: Tensor, k_cache: Tensor) -> Tile:
    """Of a program that has a multiprocessor for itself."""
    if q.dtype.itemsize > 2:
        return Tile(32, 8, 1)
    if q.shape[2] > 128:
        return Tile(32, 8, 2)
    long = 128 * 128 * q.dtype.itemsize  # bytes of a tile of 128 keys
    fits = 5 * long + 1024 <= shared_memory(q.device)  # K and V, the next K and V, and q
    return Tile(128 if fits and k_cache.dtype == q.dtype else 64, 8, 3)


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
    if out is None:
        out = torch.zeros_like(q)
    layer = Layer(q, k_cache, v_cache, block_table, out, lse, k_scale, v_scale)
    if plan is None:
        check_attention(layer, seq_lens, query_start_loc, spec)
        plan = new_plan(
            len(seq_lens), len(q), q.shape[1], k_cache.shape[2], q.shape[2],
            dtype=q.dtype, window=spec.window, device=q.device,
        )  # fmt: skip
        plan_attention(plan, seq_lens, query_start_loc)
    # All layers of a step, and most steps, are alike: so whatever follows from shapes is checked
    # and decided the first time. Where there is no graph, the GPU waits for all that is done here.
    forms = spec, hopper.are_aligned(layer), *map(_form, (*layer, seq_lens, query_start_loc))
    launches = plan.launches.get(forms)
    if launches is None:
        check_attention(layer, seq_lens, query_start_loc, spec)
        check_plan(plan, q, k_cache, seq_lens, spec)
        if len(plan.launches) == MOST_FORMS:
            plan.launches.clear()
        launches = plan.launches[forms] = _launches(plan, layer, len(seq_lens), spec)
    for launch in launches:
        launch(layer)
    return out


def _form(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _launches(
    plan: AttentionPlan, layer: Layer, num_seqs: int, spec: AttentionSpec
) -> list[Launch]:
    """The kernels that work on such a layer, in order."""
    q, k_cache, _, block_table, *_ = layer
    scale = (q.shape[2] ** -0.5 if spec.scale is None else spec.scale) * LOG2E
    sinks = _per_head(spec.sinks, plan.partial_lse)
    arguments = _arguments(plan, layer, spec, scale)
    results = _results(plan, layer, sinks)
    on_hopper = hopper.can_attend(layer, spec)
    tiles_on_hopper = (
        on_hopper and k_cache.dtype == q.dtype and plan.prefill_rows == hopper.PREFILL_ROWS
    )
    launches: list[Launch] = []
    if plan.shared is not None:
        if tiles_on_hopper:
            launches.append(hopper.shared(plan, layer, scale))
        else:
            launches.append(_attend_shared(plan, lone_tile(q, k_cache), arguments))
    if on_hopper and plan.is_shared_out:
        launches.append(hopper.decode(plan, layer, sinks, scale))
    else:
        tile = decode_tile(q, k_cache, block_table, plan)
        launches.append(_attend(plan, 0, tile, arguments | results))
    if plan.prefill_items.shape[0]:
        if tiles_on_hopper:
            launches.append(hopper.prefill(plan, layer, sinks, scale))
        else:
            tile = prefill_tile(q, k_cache, plan, num_seqs)
            launches.append(_attend(plan, 1, tile, arguments | results))
    return launches


def _arguments(
    plan: AttentionPlan, layer: Layer, spec: AttentionSpec, log2_scale: float
) -> dict[str, Any]:
    """What the kernels of ``attend`` and ``attend_shared`` take, beside the layer."""
    q, k_cache, v_cache, block_table, _, _, k_scale, v_scale = layer
    head_dim = q.shape[2]
    return {
        "alibi_slopes": _per_head(spec.alibi_slopes, plan.partial_lse),
        "k_scale_stride": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "v_scale_stride": 0 if v_scale is None or v_scale.numel() == 1 else 1,
        "q_strides": q.stride(),
        "table_stride": block_table.stride(0),
        "SCALE": log2_scale,
        "SOFT_CAP": None if spec.soft_cap is None else spec.soft_cap * LOG2E,
        "GROUP": plan.group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": k_cache.shape[1],
        "K_STRIDES": k_cache.stride(),
        "V_STRIDES": v_cache.stride(),
    }


def _results(plan: AttentionPlan, layer: Layer, sinks: Tensor | None) -> dict[str, Any]:
    """What ``attend``'s kernel takes beside that."""
    shared = plan.shared
    return {
        "partial_out": plan.partial_out,
        "partial_lse": plan.partial_lse,
        "arrivals": plan.arrivals,
        "shared_out": None if shared is None else shared.partial_out,
        "shared_lse": None if shared is None else shared.partial_lse,
        "shared_parts": None if shared is None else shared.parts,
        "num_items": plan.num_items,
        "sinks": sinks,
        "out_strides": layer.out.stride(),
        "lse_strides": (0, 0) if layer.lse is None else layer.lse.stride(),
        "window": plan.clamped_window,
    }


def _attend_shared(plan: AttentionPlan, tile: Tile, arguments: dict[str, Any]) -> Launch:
    shared = plan.shared
    assert shared is not None
    kernel = attend_shared.attend_shared_kernel[(plan.arrivals.shape[1], shared.num_programs)]
    arguments = arguments | {
        "items": shared.items,
        "num_items": shared.num_items,
        "members": shared.members,
        "partial_out": shared.partial_out,
        "partial_lse": shared.partial_lse,
        "ROWS": plan.prefill_rows,
        "KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }

    def launch(layer: Layer) -> None:
        q, k_cache, v_cache, block_table, _, _, k_scale, v_scale = layer
        kernel(
            q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
            k_scale=k_scale, v_scale=v_scale, **arguments,
        )  # fmt: skip

    return launch


def _attend(plan: AttentionPlan, kind: int, tile: Tile, arguments: dict[str, Any]) -> Launch:
    """Decode items (kind 0) or prefill items (1)."""
    items = (plan.decode_items, plan.prefill_items)[kind]
    kernel = attend.attend_kernel[(plan.arrivals.shape[1], len(items))]
    arguments = arguments | {
        "items": items,
        "KIND": kind,
        "ROWS": (plan.decode_rows, plan.prefill_rows)[kind],
        "KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.registers,
    }

    def launch(layer: Layer) -> None:
        kernel(**layer._asdict(), **arguments)

    return launch


@cache
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _per_head(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    """A spec's numbers on the device: copied there once."""
    return None if values is None else _on_device(values, like.dtype, like.device)
