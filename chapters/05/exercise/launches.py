# Chapter 05, given: pagedattn/kernels/launches.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 e57a5ba597cd168a584eb055b06214d3348269f20e6d1f1afdd3b362187d037e

"""The calls whose kernels must not spill: the configurations in which speed is measured.

Each entry calls a public function on tensors of the "meta" device, which have shapes and no
numbers; ``compiled`` compiles what it would launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec

from . import hopper
from .attention import paged_attention
from .copy_blocks import copy_blocks
from .merge import merge_attention_states
from .naive import naive_paged_decode
from .plan import new_plan, plan_attention
from .slot_mapping import compute_slot_mapping
from .write_kv import FP8, write_kv

BF16 = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 32, 8, 16, 32768, 1024


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _int64(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def _float32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _cache(dtype: torch.dtype, head_dim: int) -> Tensor:
    return _empty(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype=dtype)


def _slot_mapping() -> None:
    compute_slot_mapping(_int32(128, WIDTH), _int32(129), _int64(8192), BLOCK_SIZE)


def _write(dtype: torch.dtype = BF16, head_dim: int = 128) -> None:
    cache, new = _cache(dtype, head_dim), _empty(8192, NUM_KV_HEADS, head_dim)
    scale = _float32(NUM_KV_HEADS) if dtype == FP8 else None
    write_kv(cache, cache, new, new, _int64(8192), k_scale=scale, v_scale=scale)


def _copy(gap: int = 1) -> None:
    """``gap`` 2 leaves every second slot out."""
    cache = _empty(4, NUM_BLOCKS, BLOCK_SIZE * gap, NUM_KV_HEADS, 128)[:, :, ::gap]
    copy_blocks(cache, cache, _int64(1024), _int64(1024))


def _merge() -> None:
    out, lse = _empty(512, NUM_HEADS, 128), _float32(512, NUM_HEADS)
    merge_attention_states(out, lse, out, lse)


def _naive_decode() -> None:
    q, cache = _empty(64, NUM_HEADS, 128), _cache(BF16, 128)
    naive_paged_decode(q, cache, cache, _int32(64, WIDTH), _int32(64))


def _attend(
    num_seqs: int,
    num_tokens: int,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    width: int = WIDTH,
    share_block_size: int | None = None,
    batch_invariant: bool = False,
) -> None:
    """One token a sequence, or more: then there are prefill tiles as well."""
    q, cache = _empty(num_tokens, NUM_HEADS, head_dim), _cache(dtype, head_dim)
    seq_lens, query_start_loc = _int32(num_seqs), _int32(num_seqs + 1)
    table, scale = _int32(num_seqs, width), _float32(1) if dtype == FP8 else None
    has_prefill = num_tokens > num_seqs
    sizes = num_seqs, num_tokens, NUM_HEADS, NUM_KV_HEADS, head_dim
    plan = new_plan(
        *sizes, dtype=BF16, has_prefill=has_prefill, share_block_size=share_block_size,
        batch_invariant=batch_invariant, device="meta",
    )  # fmt: skip
    plan_attention(plan, seq_lens, query_start_loc, table)
    paged_attention(
        q, cache, cache, table, seq_lens, query_start_loc, AttentionSpec(), plan,
        k_scale=scale, v_scale=scale,
    )  # fmt: skip


def _plain(num_seqs: int, num_tokens: int, **options: Any) -> None:
    """The kernels of every machine."""
    with patch.object(hopper, "is_hopper", lambda device: False):
        _attend(num_seqs, num_tokens, **options)


LAUNCHES: dict[str, Callable[[], None]] = {
    "slot mapping": _slot_mapping,
    "write": _write,
    "write, head_dim 80": lambda: _write(head_dim=80),
    "write, fp8 cache": lambda: _write(FP8),
    "copy": _copy,
    "copy, blocks with gaps": lambda: _copy(gap=2),
    "merge": _merge,
    "naive decode": _naive_decode,
    "decode": lambda: _attend(64, 64),
    "decode, short tables": lambda: _attend(8, 8, width=32),
    "decode, head_dim 64": lambda: _attend(64, 64, head_dim=64),
    "decode, fp8 cache": lambda: _attend(64, 64, FP8),
    "decode, shared prefixes": lambda: _attend(64, 64, share_block_size=BLOCK_SIZE),
    "decode, shared prefixes, fp8 cache": lambda: _attend(64, 64, FP8, share_block_size=BLOCK_SIZE),
    "decode, batch-invariant": lambda: _attend(64, 64, batch_invariant=True),
    "prefill": lambda: _attend(4, 16384),
    "prefill, short tables": lambda: _attend(16, 16384, width=64),
    "prefill, head_dim 64": lambda: _attend(4, 16384, head_dim=64),
    "prefill, fp8 cache": lambda: _attend(4, 16384, FP8),
    "decode, any machine": lambda: _plain(64, 64),
    "decode, any machine, short tables": lambda: _plain(8, 8, width=32),
    "decode, any machine, a short table": lambda: _plain(1, 1, width=32),
    "decode, any machine, head_dim 64": lambda: _plain(64, 64, head_dim=64),
    "decode, any machine, fp8 cache": lambda: _plain(64, 64, dtype=FP8),
    "decode, any machine, shared prefixes": lambda: _plain(64, 64, share_block_size=BLOCK_SIZE),
    "prefill, any machine": lambda: _plain(4, 16384),
    "prefill chunk, any machine": lambda: _plain(1, 512),
    "prefill, any machine, head_dim 64": lambda: _plain(4, 16384, head_dim=64),
}
