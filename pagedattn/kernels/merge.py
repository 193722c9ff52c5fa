"""Two partial results of attention, each over keys of its own, become the result over all of them.

A softmax over some keys is known by its output and its log-sum-exp: ``lse`` = log of the sum of
exp(score). The sums of two sets of keys add up, and each output weighs what its sum weighs:

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b))

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in vLLM:
``vllm/v1/attention/ops/triton_merge_attn_states.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.whole_number import at_least_1

from .checks import check_device, check_dtype, check_shape

NUMBERS = 2048  # of one program


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from attention over the keys of each.

    Shapes: ``out_a``, ``out_b`` [num_tokens, num_heads, head_dim], any strides; ``lse_a``,
    ``lse_b`` float32 [num_tokens, num_heads], natural logarithm. Returns the two of the whole, the
    output in the type of the parts.

    A part that saw no key has lse = -inf and weighs nothing, whatever its output holds. If neither
    saw one, the output is 0 and the lse -inf. Raises ValueError for a wrong type, shape or device.
    """
    check_shape("out_a", out_a, ("num_tokens", "num_heads", "head_dim"))
    check_shape("out_b", out_b, tuple(out_a.shape))
    check_shape("lse_a", lse_a, tuple(out_a.shape[:2]))
    check_shape("lse_b", lse_b, tuple(out_a.shape[:2]))
    check_dtype("out_a", out_a, torch.float16, torch.bfloat16, torch.float32)
    check_dtype("out_b", out_b, out_a.dtype)
    check_dtype("lse_a", lse_a, torch.float32)
    check_dtype("lse_b", lse_b, torch.float32)
    check_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    at_least_1(out_a.shape[2], "head_dim")

    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    num_tokens, num_heads, head_dim = out.shape
    num_rows = num_tokens * num_heads
    padded_dim = triton.next_power_of_2(head_dim)
    rows = max(1, NUMBERS // padded_dim)
    if num_rows:
        _merge_kernel[(triton.cdiv(num_rows, rows),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            out_a.stride(),
            lse_a.stride(),
            out_b.stride(),
            lse_b.stride(),
            num_rows,
            num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            ROWS=rows,
            num_warps=4,
        )
    return out, lse


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for all sizes of a batch
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    out_a_strides,
    lse_a_strides,
    out_b_strides,
    lse_b_strides,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program has a few rows; a row is one head of one token."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = rows // num_heads
    heads = rows % num_heads
    dims = tl.arange(0, PADDED_DIM).to(tl.int64)
    real = rows < num_rows
    is_dim = (dims < HEAD_DIM)[None, :]
    minus_inf = float("-inf")

    a = tl.load(
        lse_a + tokens * lse_a_strides[0] + heads * lse_a_strides[1], mask=real, other=minus_inf
    )
    b = tl.load(
        lse_b + tokens * lse_b_strides[0] + heads * lse_b_strides[1], mask=real, other=minus_inf
    )
    top = tl.maximum(a, b)
    base = tl.where(top == minus_inf, 0.0, top)  # -inf minus -inf is no number
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = weight_a + weight_b

    # What saw no key may hold anything, and 0 times NaN is NaN: it is not even loaded.
    at_a = (tokens * out_a_strides[0] + heads * out_a_strides[1])[:, None]
    at_b = (tokens * out_b_strides[0] + heads * out_b_strides[1])[:, None]
    here_a = (a > minus_inf)[:, None] & is_dim
    here_b = (b > minus_inf)[:, None] & is_dim
    tile_a = tl.load(out_a + at_a + dims[None, :] * out_a_strides[2], mask=here_a, other=0.0)
    tile_b = tl.load(out_b + at_b + dims[None, :] * out_b_strides[2], mask=here_b, other=0.0)
    tile = tile_a.to(tl.float32) * weight_a[:, None] + tile_b.to(tl.float32) * weight_b[:, None]
    divisor = tl.where(top > minus_inf, total, 1.0)
    tile = tile / divisor[:, None]
    here = real[:, None] & is_dim
    tl.store(
        out + rows[:, None] * HEAD_DIM + dims[None, :], tile.to(out.dtype.element_ty), mask=here
    )
    tl.store(lse + rows, top + tl.log(divisor), mask=real)
