# Chapter 05, given: pagedattn/kernels/attention_checks.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 a907fcbc6a96d200dfc46c420918e2cf1af987e2f2988365d29f9b571b0c2159

"""What ``paged_attention`` asks of its arguments, before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec

from .buffers import AttentionPlan, Layer
from .checks import check_contiguous, check_device, check_dtype, check_shape
from .write_kv import FP8

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_HEAD_DIM = 256


def check_sizes(
    max_rows: int,
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    """Those of a plan."""
    for name, number, least in (
        ("max_rows", max_rows, 0),
        ("max_tokens", max_tokens, 0),
        ("num_heads", num_heads, 1),
        ("num_kv_heads", num_kv_heads, 1),
        ("head_dim", head_dim, 1),
        ("window", 1 if window is None else window, 1),
    ):
        if type(number) is not int or number < least:
            raise ValueError(f"{name} is {number!r}; it is a whole number of at least {least}")
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the kernel has room for 1 to {MOST_HEAD_DIM}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if dtype not in DTYPES:
        raise ValueError(f"queries of {dtype}; known are {', '.join(map(str, DTYPES))}")


def check_attention(
    layer: Layer, seq_lens: Tensor, query_start_loc: Tensor, spec: AttentionSpec
) -> None:
    """That the arguments of ``paged_attention`` are of the shapes and types it names, fit each
    other and lie on one device. Raises ValueError for the first that does not."""
    q, k_cache, v_cache, block_table, out, lse, k_scale, v_scale = layer
    check_shape("q", q, ("num_tokens", "num_heads", "head_dim"))
    num_tokens, num_heads, head_dim = q.shape
    check_shape("k_cache", k_cache, ("num_blocks", "block_size", "num_kv_heads", head_dim))
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    check_shape("seq_lens", seq_lens, ("num_seqs",))
    num_seqs = seq_lens.shape[0]
    check_shape("block_table", block_table, (num_seqs, "width"))
    check_shape("query_start_loc", query_start_loc, (num_seqs + 1,))
    check_dtype("q", q, *DTYPES)
    check_dtype("k_cache", k_cache, q.dtype, FP8)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    if q.dtype == torch.float64 and k_cache.dtype == FP8:
        raise ValueError(f"queries of {q.dtype} and a cache of {FP8}: float32 is the most")
    check_device(**layer._asdict(), seq_lens=seq_lens, query_start_loc=query_start_loc)
    num_kv_heads = k_cache.shape[2]
    if not k_cache.shape[1]:
        raise ValueError("the cache's block_size is 0; a block has at least 1 slot")
    if not num_kv_heads or not num_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the kernel has room for 1 to {MOST_HEAD_DIM}")
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
        check_contiguous(**{name: scale})
    check_shape("out", out, tuple(q.shape))
    check_dtype("out", out, q.dtype)
    if lse is not None:
        check_shape("lse", lse, (num_tokens, num_heads))
        check_dtype("lse", lse, torch.float32)


def check_plan(
    plan: AttentionPlan, q: Tensor, k_cache: Tensor, seq_lens: Tensor, spec: AttentionSpec
) -> None:
    """That ``plan`` is one for these heads, this window, these blocks and this type of sums, with
    room for so many rows and tokens. What it was planned from is on the device and not looked at.
    Raises ValueError if it is another's."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    check_device(q=q, plan=plan.num_items)
    found = (plan.group, *plan.partial_out.shape[1::2], plan.window)
    wanted = (num_heads // num_kv_heads, num_kv_heads, head_dim, spec.window)
    if found != wanted:
        raise ValueError(
            f"the plan is for (group, num_kv_heads, head_dim, window) {found}; this is {wanted}"
        )
    if num_rows > plan.max_rows or num_tokens > plan.max_tokens:
        raise ValueError(
            f"{num_rows} rows and {num_tokens} tokens; the plan has room for {plan.max_rows} "
            f"and {plan.max_tokens}"
        )
    if plan.shared is not None and plan.shared.block_size != k_cache.shape[1]:
        raise ValueError(
            f"the plan shares blocks of {plan.shared.block_size}; the cache has blocks of "
            f"{k_cache.shape[1]}"
        )
    if (plan.partial_out.dtype == torch.float64) != (q.dtype == torch.float64):
        raise ValueError(f"the plan sums in {plan.partial_out.dtype}; q is {q.dtype}")
