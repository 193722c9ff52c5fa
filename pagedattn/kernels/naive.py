"""The first version of the climb: paged decode as one would write it at first.

A program has one query head of one row, and reads all keys of its KV head by itself: heads that
share a KV head read the same keys once more each. It multiplies and adds without the tensor cores.
It is right, and slow; ``attention.py`` shows what speed takes.
"""

from __future__ import annotations

from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.whole_number import at_least_1

from .checks import check_contiguous, check_device, check_dtype, check_shape
from .merge import merge_attention_states

KEYS = tl.constexpr(16)  # that a program looks at together


def naive_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_splits: int = 1,
) -> Tensor:
    """One new token a row attends to all tokens of its row, itself included: causal, no window.

    Shapes: ``q`` [num_seqs, num_heads, head_dim], float16, bfloat16 or float32; ``k_cache``,
    ``v_cache`` [num_blocks, block_size, num_kv_heads, head_dim] in the type of ``q``; any strides.
    ``block_table`` int32 [num_seqs, width]; ``seq_lens`` int32 [num_seqs], each with the new token;
    a row of length 0 gives 0. With ``num_splits`` > 1 so many programs share a row's keys, and what
    they find is merged, one part after another. Returns the shape of ``q``.

    Raises ValueError for a wrong type, shape, device or number of splits, and for a size of 0.
    """
    num_splits = at_least_1(num_splits, "num_splits")
    _check(q, k_cache, v_cache, block_table, seq_lens)
    num_seqs, num_heads, head_dim = q.shape
    out = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
    lse = torch.empty((num_splits, num_seqs, num_heads), dtype=torch.float32, device=q.device)
    if num_seqs:
        _naive_decode_kernel[(num_seqs, num_heads, num_splits)](
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            out,
            lse,
            q.stride(),
            k_cache.stride(),
            v_cache.stride(),
            block_table.stride(),
            out.stride(),
            lse.stride(),
            SCALE=head_dim**-0.5,
            GROUP=num_heads // k_cache.shape[2],
            BLOCK_SIZE=k_cache.shape[1],
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
        )
    parts = zip(out, lse, strict=True)
    whole, _ = reduce(lambda a, b: merge_attention_states(*a, *b), parts)
    return whole.to(q.dtype)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
) -> None:
    check_shape("q", q, ("num_seqs", "num_heads", "head_dim"))
    num_seqs, num_heads, head_dim = q.shape
    check_shape("k_cache", k_cache, ("num_blocks", "block_size", "num_kv_heads", head_dim))
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    check_shape("block_table", block_table, (num_seqs, "width"))
    check_shape("seq_lens", seq_lens, (num_seqs,))
    check_dtype("q", q, torch.float16, torch.bfloat16, torch.float32)
    check_dtype("k_cache", k_cache, q.dtype)
    check_dtype("v_cache", v_cache, q.dtype)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_contiguous(seq_lens=seq_lens)
    check_device(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    num_kv_heads = k_cache.shape[2]
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    at_least_1(k_cache.shape[1], "block_size")
    at_least_1(head_dim, "head_dim")


@triton.jit
def _naive_decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    out,
    lse,
    q_strides,
    k_strides,
    v_strides,
    table_strides,
    out_strides,
    lse_strides,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """One query head of one row, over the keys of one split: ``out`` [num_splits, num_seqs,
    num_heads, head_dim] and ``lse`` [num_splits, num_seqs, num_heads], float32. A split without
    keys gives 0 and minus infinity."""
    row = tl.program_id(0).to(tl.int64)  # times a stride, all of these may exceed 32 bits
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    share = tl.cdiv(seq_len, tl.num_programs(2))
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, seq_len)

    dims = tl.arange(0, PADDED_DIM)  # [PADDED_DIM]
    is_dim = dims < HEAD_DIM
    query = q + row * q_strides[0] + head * q_strides[1] + dims.to(tl.int64) * q_strides[2]
    query = tl.load(query, mask=is_dim, other=0.0).to(tl.float32)  # [PADDED_DIM]
    k_lanes = k_cache + head // GROUP * k_strides[2] + dims.to(tl.int64) * k_strides[3]
    v_lanes = v_cache + head // GROUP * v_strides[2] + dims.to(tl.int64) * v_strides[3]

    top = float("-inf")  # the greatest score so far
    total = 0.0  # the sum of exp(score - top)
    acc = tl.zeros((PADDED_DIM,), tl.float32)  # the sum of exp(score - top) * value
    for start in range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)  # [KEYS]
        live = positions < end
        columns = positions // BLOCK_SIZE
        at = block_table + row * table_strides[0] + columns * table_strides[1]
        blocks = tl.load(at, mask=live, other=0).to(tl.int64)  # [KEYS]
        slots = (positions % BLOCK_SIZE).to(tl.int64)
        k_at = (blocks * k_strides[0] + slots * k_strides[1])[:, None] + k_lanes[None, :]
        v_at = (blocks * v_strides[0] + slots * v_strides[1])[:, None] + v_lanes[None, :]
        here = live[:, None] & is_dim[None, :]  # nothing else is read: it may be NaN
        k = tl.load(k_at, mask=here, other=0.0).to(tl.float32)  # [KEYS, PADDED_DIM]
        v = tl.load(v_at, mask=here, other=0.0).to(tl.float32)

        scores = tl.where(live, tl.sum(k * query[None, :], 1) * SCALE, float("-inf"))  # [KEYS]
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp(scores - new_top)
        shrink = tl.exp(top - new_top)  # what was summed up so far was measured from the old top
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(v * weights[:, None], 0)
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    at = split * out_strides[0] + row * out_strides[1] + head * out_strides[2] + dims
    tl.store(out + at, acc / divisor, mask=is_dim)
    at = split * lse_strides[0] + row * lse_strides[1] + head * lse_strides[2]
    tl.store(lse + at, top + tl.log(divisor))
