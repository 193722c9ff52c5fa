"""Inputs of `pagedattn bench kernels`: one pool of random numbers, and batches whose blocks lie all
over it; and a dense reference for a few of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pagedattn.bench.kernel_rows import AttentionRow
from pagedattn.kernels.write_kv import FP8

ROTATED = 2**28  # bytes that the inputs of a row have together, about: four times an H200's L2
MOST_SETS = 64


@dataclass(frozen=True)
class Trial:
    """Calls that do the same, each on inputs of its own; how far the first one's result is off from
    what it should be; and a context that they run in."""

    calls: Sequence[Callable[[], Any]]
    error: Callable[[Any], float]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Pool:
    """Random numbers, ``size`` of K and as many of V, seen as a cache of any shape."""

    def __init__(
        self, size: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.k = torch.randn(size, device=device, dtype=dtype)
        self.v = torch.randn(size, device=device, dtype=dtype)

    @cached_property
    def fp8(self) -> tuple[Tensor, Tensor]:
        return self.k.to(FP8), self.v.to(FP8)

    def cache(self, row: AttentionRow) -> tuple[Tensor, Tensor]:
        """[num_blocks, block_size, num_kv_heads, head_dim], K and V."""
        shape = -1, row.block_size, row.num_kv_heads, row.head_dim
        k, v = self.fp8 if row.fp8 else (self.k, self.v)
        return k.view(shape), v.view(shape)

    def permuted(self, num_blocks: int, count: int) -> Tensor:
        """``count`` numbers of 1 .. num_blocks - 1 in any order, none twice if there are enough."""
        usable = num_blocks - 1
        order = torch.randperm(usable, device=self.k.device) + 1
        return order.repeat(-(-count // usable))[:count]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.k.device, dtype=self.k.dtype)


@dataclass(frozen=True)
class Batch:
    """One batch of a row. ``out`` is full of NaN until something is written there."""

    row: AttentionRow
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: Tensor | None  # of an fp8 cache, K's and V's alike
    out: Tensor

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, [seq_len, num_kv_heads, head_dim], as numbers of float64."""
        ids = self.block_table[number, : self.row.num_blocks[number]].long()
        seq_len = self.row.seq_lens[number]
        factor = 1.0 if self.scale is None else self.scale.double()[:, None]
        k, v = (
            _blocks(cache, ids).flatten(0, 1)[:seq_len].double() * factor
            for cache in (self.k_cache, self.v_cache)
        )
        return k, v

    def error(self, out: Tensor) -> float:
        """How far an output of this batch is off."""
        return attention_error(self.row, self.q, out, self.sequence)


@dataclass(frozen=True)
class Write:
    """New tokens and their slots: those of whole blocks, one block after the other."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    slots: Tensor

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """K, then V: the cache as [num_slots, num_kv_heads, head_dim], and what goes there."""
        return [(self.k_cache.flatten(0, 1), self.k), (self.v_cache.flatten(0, 1), self.v)]

    def error(self, _: object) -> float:
        """Whether it is all there."""
        return unequal(*((cache[self.slots], numbers) for cache, numbers in self.pairs()))


def _blocks(cache: Tensor, ids: Tensor) -> Tensor:
    """These blocks, moved as bytes: torch does not index fp8 everywhere."""
    return cache.view(torch.uint8)[ids].view(cache.dtype)


def unequal(*pairs: tuple[Tensor, Tensor]) -> float:
    """0 if the two of each pair are equal to the bit, infinite if not."""
    return 0.0 if all(torch.equal(a, b) for a, b in pairs) else float("inf")


def make_batches(pool: Pool, row: AttentionRow) -> list[Batch]:
    """Batches of a row, so many that together they read more than a cache holds."""
    count = max(1, min(MOST_SETS, -(-ROTATED // row.work.read)))
    k_cache, v_cache = pool.cache(row)
    device = pool.k.device
    shared = row.shared // row.block_size
    needed = shared + sum(row.num_blocks) - shared * len(row.seq_lens)
    ids = pool.permuted(len(k_cache), count * needed).int().view(count, needed)
    seq_lens = torch.tensor(row.seq_lens, dtype=torch.int32, device=device)
    starts = list(accumulate(row.query_lens, initial=0))
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    scale = torch.rand(row.num_kv_heads, device=device) + 0.5 if row.fp8 else None
    batches = []
    for own in ids:
        q = pool.randn(row.num_tokens, row.num_heads, row.head_dim)
        batches.append(
            Batch(
                row, q, k_cache, v_cache, _table(row, own), seq_lens, query_start_loc, scale,
                torch.full_like(q, float("nan")),
            )
        )  # fmt: skip
    return batches


def _table(row: AttentionRow, ids: Tensor) -> Tensor:
    """The batch's block table; its width is a multiple of 16, as an engine's is."""
    shared = row.shared // row.block_size
    width = -(-max(row.num_blocks) // 16) * 16
    table = torch.zeros(len(row.seq_lens), width, dtype=torch.int32, device=ids.device)
    table[:, :shared] = ids[:shared]
    used = shared
    for number, blocks in enumerate(row.num_blocks):
        table[number, shared:blocks] = ids[used : used + blocks - shared]
        used += blocks - shared
    return table


def attention_error(
    row: AttentionRow, q: Tensor, out: Tensor, sequence: Callable[[int], tuple[Tensor, Tensor]]
) -> float:
    """How far ``out`` is off, as a share of the right output's norm: over the first token, the last
    one and some between, in float64. Infinite if a number of ``out`` is none.

    ``q``, ``out`` [num_tokens, num_heads, head_dim]; ``sequence`` gives K and V of a sequence.
    """
    if not bool(out.isfinite().all()):
        return float("inf")
    starts = list(accumulate(row.query_lens, initial=0))
    last = row.num_tokens - 1
    wrong = right = 0.0
    for token in sorted({0, last // 3, 2 * last // 3, last}):
        number = next(n for n in range(len(row.seq_lens)) if token < starts[n + 1])
        position = row.seq_lens[number] - (starts[number + 1] - token)
        k, v = (found[: position + 1] for found in sequence(number))
        expected = _one_query(q[token].double(), k, v)
        wrong += float((out[token].double() - expected).square().sum())
        right += float(expected.square().sum())
    return float((wrong / right) ** 0.5)


def _one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q`` [num_heads, head_dim] over all of K and V, [num_keys, num_kv_heads, head_dim]."""
    grouped = q.view(k.shape[1], -1, q.shape[1])
    scores = torch.einsum("hgd,nhd->hgn", grouped, k) * q.shape[1] ** -0.5
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1)
