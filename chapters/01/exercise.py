# Chapter 01, yours to write: pagedattn/contiguous.py without the bodies of its tasks.
#   pytest chapters/01 --student                all its tests on this file
#   pytest chapters/01 --student --task 1.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 434ca441bc0792e227c89c9fda6fcc19d639fc22fb20d122b010725909ea9fbe

"""Chapter 01: one slab a sequence.

A KV cache spares a decoder from computing the keys and values of old tokens again. The simplest
cache gives every sequence one contiguous slab of slots, long enough for the longest that the
sequence may become, and keeps it until the sequence ends. One slot holds K and V of one token.

The slab makes attention easy: a sequence's keys are a slice of one tensor. It makes memory dear: a
slot reserved for a token that is never generated serves nobody, and free slots that do not lie side
by side serve no long sequence. Chapter 02 removes both costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.cache import (
    Batch,
    Config,
    InvariantError,
    KVCache,
    OutOfBlocks,
    SeqId,
    Sequence,
    Usage,
)
from pagedattn.poison import check_poison, poison


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that K and V of one token take: a vector of ``head_dim`` for K and one for V, for each
    KV head of each layer. Query heads that share a KV head add nothing."""
    raise NotImplementedError(
        "task 1.1: two vectors of head_dim for every KV head of every layer; weights first, whole "
        "tokens only"
    )


def slots_that_fit(memory_bytes: int, weight_bytes: int, bytes_per_token: int) -> int:
    """How many tokens' K and V fit in a memory that holds the weights too. Bytes in, slots out.

    Raises ValueError when the weights alone do not fit, or a token takes less than 1 byte.
    """
    raise NotImplementedError(
        "task 1.1: two vectors of head_dim for every KV head of every layer; weights first, whole "
        "tokens only"
    )


class SlabArena:
    """A row of slots from which slabs are cut.

    ``holes`` lists the free pieces as (first slot, size), lowest first; no two of them touch.
    Raises ValueError for an arena with no slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"an arena of {num_slots} slots; at least 1 is needed")
        self.num_slots = num_slots
        self.holes: list[tuple[int, int]] = [(0, num_slots)]

    @property
    def num_free_slots(self) -> int:
        """Free slots, whether or not they lie side by side."""
        return sum(size for _, size in self.holes)

    def take(self, size: int) -> int:
        """Cut a slab of ``size`` slots from the first hole that holds it; returns its first slot.

        Raises OutOfBlocks, counted in slots, when no hole is large enough; ValueError for a size
        below 1.
        """
        raise NotImplementedError(
            "task 1.2: the first hole that is large enough gives its front; what is left of it "
            "stays a hole"
        )

    def give_back(self, start: int, size: int) -> None:
        """Return a slab; it grows together with the holes that it touches.

        Raises ValueError when a slot of it lies outside the arena or is free already.
        """
        raise NotImplementedError(
            "task 1.3: refuse slots that are free already; then no two holes may touch"
        )


@dataclass(eq=False)
class SlabSequence(Sequence):
    """A sequence and the first slot of its slab. The slab has ``max_tokens`` slots."""

    slab_start: int = 0


class ContiguousKVCache(KVCache):
    """K and V of every sequence in a slab of its own, reserved when the sequence begins.

    ``k_cache`` and ``v_cache`` are [num_layers, num_slots, num_kv_heads, head_dim]. Raises
    ValueError for 2**31 slots or more: the first slot of a slab stands in an int32 block table.
    """

    sequence_class = SlabSequence
    sequences: dict[SeqId, SlabSequence]

    def __init__(self, config: Config, arena: SlabArena) -> None:
        super().__init__(config)
        if arena.num_slots >= 2**31:
            raise ValueError(f"{arena.num_slots} slots; a slab's first slot must be below 2**31")
        self.arena = arena
        shape = (config.num_layers, arena.num_slots, config.num_kv_heads, config.head_dim)
        fill = math.nan if config.poison else 0.0
        self.k_cache = torch.full(shape, fill, dtype=config.dtype, device=config.device)
        self.v_cache = self.k_cache.clone()

    def need(self, token_ids: Iterable[int], n: int) -> tuple[int, int]:
        """Nothing is computed before; without a ``max_tokens`` a slab has ``max_seq_len`` slots."""
        return 0, self.config.max_seq_len

    def usage(self) -> Usage:
        """Reserved are whole slabs, from the first token to the last that may ever come."""
        sequences = self.sequences.values()
        return Usage(
            total=self.arena.num_slots,
            used=sum(s.num_computed_tokens for s in sequences),
            reserved=sum(s.max_tokens for s in sequences),
        )

    def __repr__(self) -> str:
        """The arena in words: ``[0-31:A 32-63:free]``."""
        pieces = [(s.slab_start, s.max_tokens, str(s.seq_id)) for s in self.sequences.values()]
        pieces += [(start, size, "free") for start, size in self.arena.holes]
        words = (f"{start}-{start + size - 1}:{owner}" for start, size, owner in sorted(pieces))
        return f"[{' '.join(words)}]"

    def check_invariants(self) -> None:
        """I1 every slot is in one slab or in one hole, and holes do not touch; I7 only computed
        tokens hold numbers."""
        super().check_invariants()
        for (start, size), (next_start, _) in pairwise(self.arena.holes):
            if start + size == next_start:
                raise InvariantError(f"I1: two holes touch at slot {next_start}: {self!r}")
        slabs = [(s.slab_start, s.max_tokens) for s in self.sequences.values()]
        end = 0
        for start, size in sorted(slabs + self.arena.holes):
            if start != end or size < 1:
                raise InvariantError(f"I1: slot {min(start, end)} is not in one place: {self!r}")
            end = start + size
        if end != self.arena.num_slots:
            raise InvariantError(f"I1: slots from {end} on are lost: {self!r}")
        if self.config.poison and self.open_batch is None:
            computed = torch.zeros(self.arena.num_slots, dtype=torch.bool)
            for s in self.sequences.values():
                computed[s.slab_start : s.slab_start + s.num_computed_tokens] = True
            check_poison(self.k_cache, self.v_cache, computed, repr(self))

    def _begin(self, sequence: SlabSequence) -> None:
        sequence.slab_start = self.arena.take(sequence.max_tokens)

    def _take(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        """Nothing to take: the slab is there since ``add``."""

    def _address(
        self, seq_ids: list[SeqId], query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "task 1.4: the start of each sequence's slab, once for every token that it has in the "
            "batch, plus position"
        )

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError(
            "task 1.5: write K and V of every real token, then one call of attention for each "
            "sequence's slice"
        )

    def _abort(self, batch: Batch) -> None:
        if self.config.poison:
            poison(self.k_cache, self.v_cache, batch.slot_mapping)

    def _end(self, sequence: SlabSequence) -> None:
        self.arena.give_back(sequence.slab_start, sequence.max_tokens)
        if self.config.poison:
            slab = slice(sequence.slab_start, sequence.slab_start + sequence.max_tokens)
            poison(self.k_cache, self.v_cache, slab)


def build_cache(config: Config) -> ContiguousKVCache:
    """A cache of ``config.num_slots`` slots, all free."""
    return ContiguousKVCache(config, SlabArena(config.num_slots))
