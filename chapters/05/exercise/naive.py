# Chapter 05, yours to write: pagedattn/kernels/naive.py without the bodies of its tasks.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.2     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 488f760b98af2fea5d06824e0e5130a54fcee6de66775962ebab8f7e4d869735

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
    raise NotImplementedError(
        "task 5.2: walk the keys of the split 16 at a time: look up their blocks, load what is "
        "live, and keep the greatest score, the sum and the output measured from it"
    )
