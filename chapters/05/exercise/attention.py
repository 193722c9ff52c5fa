# Chapter 05, given: pagedattn/kernels/attention.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 3065fe59e1c03175caa5f7cc9c2a531e539025e5abbf2bd79c91863b0892d3a0

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

from . import attend
from .checks import check_device, check_dtype, check_shape
from .plan import PROGRAMS, SPLIT_KEYS, AttentionPlan, new_plan, plan_attention
from .write_kv import FP8

LOG2E = math.log2(math.e)  # the kernel's exponentials are powers of 2: one instruction each
PLAIN = AttentionSpec()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    launches and without synchronisation.

    Shapes: ``q`` [num_tokens, num_heads, head_dim]; ``k_cache``, ``v_cache`` [num_blocks,
    block_size, num_kv_heads, head_dim], any strides; ``block_table`` int32 [num_seqs, width];
    ``seq_lens`` int32 [num_seqs], each sequence's length with its new tokens; ``query_start_loc``
    int32 [num_seqs + 1]. The queries of a sequence stand at its last positions. Returns the shape
    of ``q``, in ``out`` if it is given; the natural log-sum-exp goes to ``lse``, float32
    [num_tokens, num_heads], if that is given. Padding tokens are not touched; a new output has 0
    there.

    ``plan`` is what ``plan_attention`` has made of these lengths; without one it is made here. A
    cache of float8_e4m3fn holds K / ``k_scale`` and V / ``v_scale``: float32, one number or one a
    KV head. K and V of keys behind a sequence's end are never read.

    Raises ValueError for a wrong type, shape or device, and for a plan of other sizes. Lengths and
    block ids are on the device and not looked at: ``check_block_table`` does that.
    """
    _check(
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
    _check_plan(plan, q, k_cache, seq_lens, spec)
    if out is None:
        out = torch.zeros_like(q)
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "out": out,
        "lse": lse,
        "partial_out": plan.partial_out,
        "partial_lse": plan.partial_lse,
        "arrivals": plan.arrivals,
        "block_table": block_table,
        "num_items": plan.num_items,
        "sinks": _per_head(spec.sinks, plan.partial_lse),
        "alibi_slopes": _per_head(spec.alibi_slopes, plan.partial_lse),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_scale_stride": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "v_scale_stride": 0 if v_scale is None or v_scale.numel() == 1 else 1,
        "q_strides": q.stride(),
        "k_strides": k_cache.stride(),
        "v_strides": v_cache.stride(),
        "out_strides": out.stride(),
        "lse_strides": (0, 0) if lse is None else lse.stride(),
        "table_stride": block_table.stride(0),
        "window": spec.window,
        "SCALE": scale * LOG2E,
        "SOFT_CAP": None if spec.soft_cap is None else spec.soft_cap * LOG2E,
        "GROUP": plan.group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": k_cache.shape[1],
    }
    tile = decode_tile(q, k_cache, block_table, plan)
    attend.attend_kernel[(num_kv_heads, len(plan.decode_items))](
        items=plan.decode_items,
        KIND=0,
        ROWS=plan.decode_rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arguments,
    )
    if len(plan.prefill_items):
        tile = prefill_tile(q, k_cache)
        attend.attend_kernel[(num_kv_heads, len(plan.prefill_items))](
            items=plan.prefill_items,
            KIND=1,
            ROWS=plan.prefill_rows,
            KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **arguments,
        )
    return out


@cache
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _per_head(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    """A spec's numbers on the device: copied there once."""
    return None if values is None else _on_device(values, like.dtype, like.device)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    spec: AttentionSpec,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    check_shape("q", q, ("num_tokens", "num_heads", "head_dim"))
    num_tokens, num_heads, head_dim = q.shape
    check_shape("k_cache", k_cache, ("num_blocks", "block_size", "num_kv_heads", head_dim))
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    check_shape("seq_lens", seq_lens, ("num_seqs",))
    check_shape("block_table", block_table, (len(seq_lens), "width"))
    check_shape("query_start_loc", query_start_loc, (len(seq_lens) + 1,))
    check_dtype("q", q, *DTYPES)
    check_dtype("k_cache", k_cache, q.dtype, FP8)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens)):
        check_dtype(name, tensor, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_device(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens,
        query_start_loc=query_start_loc, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
    )  # fmt: skip
    num_kv_heads = k_cache.shape[2]
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}; the kernel has room for 1 to 256")
    if block_table.stride(1) != 1:
        raise ValueError(
            f"rows of the block_table have gaps: its strides are {block_table.stride()}"
        )
    for name, values in (("sinks", spec.sinks), ("alibi_slopes", spec.alibi_slopes)):
        if values is not None and len(values) != num_heads:
            raise ValueError(f"{len(values)} {name} for {num_heads} query heads")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != FP8:
            raise ValueError(f"{name} is given, but the cache is {k_cache.dtype}, not {FP8}")
        check_dtype(name, scale, torch.float32)
        if scale.numel() != 1:
            check_shape(name, scale, (num_kv_heads,))
    if out is not None:
        check_shape("out", out, tuple(q.shape))
        check_dtype("out", out, q.dtype)
    if lse is not None:
        check_shape("lse", lse, (num_tokens, num_heads))
        check_dtype("lse", lse, torch.float32)


def _check_plan(
    plan: AttentionPlan, q: Tensor, k_cache: Tensor, seq_lens: Tensor, spec: AttentionSpec
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    found = (plan.group, *plan.partial_out.shape[1::2], plan.window)
    wanted = (num_heads // k_cache.shape[2], k_cache.shape[2], head_dim, spec.window)
    if found != wanted:
        raise ValueError(
            f"the plan is for (group, num_kv_heads, head_dim, window) {found}; this is {wanted}"
        )
    if len(seq_lens) > plan.max_rows or num_tokens > plan.max_tokens:
        raise ValueError(
            f"{len(seq_lens)} rows and {num_tokens} tokens; the plan has room for {plan.max_rows} "
            f"and {plan.max_tokens}"
        )
    if (plan.partial_out.dtype == torch.float64) != (q.dtype == torch.float64):
        raise ValueError(f"the plan sums in {plan.partial_out.dtype}; q is {q.dtype}")
