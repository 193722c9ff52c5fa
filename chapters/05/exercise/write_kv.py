# Chapter 05, given: pagedattn/kernels/write_kv.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 ffe62298a47a81779b76bba3583ff2a48a54082cfe64af4ee1a2e25ebea77e30

"""New tokens into the cache: K and V of a batch go to their slots, wherever these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.whole_number import at_least_1

from .checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape

FP8 = torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
BYTES = 4096  # of K, and as many of V, that one program moves, or one token if it is larger


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store K and V of a batch's tokens in their slots; a token with slot -1 is not stored.

    Shapes: ``k_cache``, ``v_cache`` [num_blocks, block_size, num_kv_heads, head_dim]; ``k``, ``v``
    [num_tokens, num_kv_heads, head_dim]; any strides; ``slot_mapping`` int64 [num_tokens]. Slots
    must lie in the pool.

    A cache of float8_e4m3fn holds value / scale, at most 448 either way; a scale is a float32
    tensor, one number or one a KV head; no scale is scale 1. Any other cache has the type of K.

    Raises ValueError for a wrong type, shape or device, for blocks of size 0, and for scales
    without an fp8 cache.

    Source: ``vllm/v1/attention/ops/triton_reshape_and_cache_flash.py``; slot -1:
    vllm-project/vllm#43810.
    """
    _check(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
    num_tokens, num_heads, head_dim = k.shape
    numbers = triton.next_power_of_2(num_heads * head_dim)
    if not num_tokens or not num_heads * head_dim:
        return
    tokens = max(1, BYTES // (numbers * k.element_size()))
    _write_kv_kernel[(triton.cdiv(num_tokens, tokens),)](
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping,
        k_scale,
        v_scale,
        0 if k_scale is None or k_scale.numel() == 1 else 1,
        0 if v_scale is None or v_scale.numel() == 1 else 1,
        k_cache.stride(),
        v_cache.stride(),
        k.stride(),
        v.stride(),
        num_tokens,
        BLOCK_SIZE=k_cache.shape[1],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        TOKENS=tokens,
        NUMBERS=numbers,
        QUANTISE=k_cache.dtype != k.dtype,
        num_warps=min(16, max(4, tokens * numbers * k.element_size() // 2048)),
    )


def _check(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_shape("k", k, ("num_tokens", "num_kv_heads", "head_dim"))
    num_tokens, num_heads, head_dim = k.shape
    check_shape("v", v, (num_tokens, num_heads, head_dim))
    check_shape("k_cache", k_cache, ("num_blocks", "block_size", num_heads, head_dim))
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    check_shape("slot_mapping", slot_mapping, (num_tokens,))
    at_least_1(k_cache.shape[1], "block_size")
    check_dtype("k", k, *FLOATS)
    check_dtype("v", v, k.dtype)
    check_dtype("k_cache", k_cache, k.dtype, FP8)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_contiguous(slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)
    check_device(
        k_cache=k_cache, v_cache=v_cache, k=k, v=v, slot_mapping=slot_mapping,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != FP8 or k.dtype == FP8:
            raise ValueError(
                f"{name} is given, but nothing is to be scaled: the cache is {k_cache.dtype}, "
                f"k is {k.dtype}"
            )
        check_dtype(name, scale, torch.float32)
        if scale.numel() != 1:
            check_shape(name, scale, (num_heads,))


@triton.jit
def _quantise(x, scale):
    """As ``scale`` times a number of fp8. NaN stays NaN: it marks what was never computed."""
    x = tl.div_rn(x.to(tl.float32), scale)
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation for all sizes of a batch
def _write_kv_kernel(
    k_cache,
    v_cache,
    k,
    v,
    slot_mapping,
    k_scale,
    v_scale,
    k_scale_stride,
    v_scale_stride,
    k_cache_strides,
    v_cache_strides,
    k_strides,
    v_strides,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    NUMBERS: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """A program stores a few tokens. The numbers of a token, head after head, are one long row of
    lanes: so no lane idles when head_dim is no power of two, and neighbours move together."""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    lanes = tl.arange(0, NUMBERS)
    heads = (lanes // HEAD_DIM).to(tl.int64)  # times a stride, all of these may exceed 32 bits
    dims = (lanes % HEAD_DIM).to(tl.int64)
    is_number = lanes < NUM_HEADS * HEAD_DIM
    real = tokens < num_tokens
    here = real[:, None] & is_number[None, :]

    # Padding is loaded as well, and not stored: no load has to wait for the slots.
    slots = tl.load(slot_mapping + tokens, mask=real, other=-1)
    k_lanes = (heads * k_strides[1] + dims * k_strides[2])[None, :]
    v_lanes = (heads * v_strides[1] + dims * v_strides[2])[None, :]
    k_tile = tl.load(k + tokens[:, None] * k_strides[0] + k_lanes, mask=here)
    v_tile = tl.load(v + tokens[:, None] * v_strides[0] + v_lanes, mask=here)
    if QUANTISE:
        k_factor = 1.0
        v_factor = 1.0
        if k_scale is not None:
            k_factor = tl.load(k_scale + heads * k_scale_stride, mask=is_number, other=1.0)[None, :]
        if v_scale is not None:
            v_factor = tl.load(v_scale + heads * v_scale_stride, mask=is_number, other=1.0)[None, :]
        k_tile = _quantise(k_tile, k_factor)
        v_tile = _quantise(v_tile, v_factor)

    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE
    here = here & (slots >= 0)[:, None]
    k_at = (blocks * k_cache_strides[0] + offsets * k_cache_strides[1])[:, None]
    v_at = (blocks * v_cache_strides[0] + offsets * v_cache_strides[1])[:, None]
    k_at += (heads * k_cache_strides[2] + dims * k_cache_strides[3])[None, :]
    v_at += (heads * v_cache_strides[2] + dims * v_cache_strides[3])[None, :]
    tl.store(k_cache + k_at, k_tile, mask=here)
    tl.store(v_cache + v_at, v_tile, mask=here)
