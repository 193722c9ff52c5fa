"""What a picture shows of a cache: copied out of the live object, so that it never changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagedattn.cache import KVCache, SeqId, Usage


@dataclass(frozen=True)
class OwnerState:
    """A sequence: its name, its colour's number, its computed tokens."""

    name: str
    number: int
    num_tokens: int


@dataclass(frozen=True)
class BlockState:
    """A block: the sequences whose tables name it, how many of its slots hold a token, and what it
    counts itself: its ``ref_cnt``."""

    block_id: int
    owners: tuple[OwnerState, ...] = ()
    num_used: int = 0
    ref_cnt: int = 0
    is_null: bool = False

    @property
    def owner(self) -> OwnerState | None:
        """The oldest of its owners; None: nobody's."""
        return self.owners[0] if self.owners else None

    @property
    def is_shared(self) -> bool:
        """Whether more than one table names it, or it counts otherwise than the tables do."""
        return len(self.owners) > 1 or self.ref_cnt != len(self.owners)


@dataclass(frozen=True)
class PoolState:
    """A paged cache: every block, each sequence's block table, the free queue from its head."""

    block_size: int
    blocks: tuple[BlockState, ...]
    tables: tuple[tuple[OwnerState, tuple[int, ...]], ...]
    free_queue: tuple[int, ...]
    usage: Usage
    seen: tuple[SeqId, ...]


@dataclass(frozen=True)
class ArenaState:
    """A contiguous cache: slabs as (owner, first slot, size), holes as (first slot, size)."""

    slabs: tuple[tuple[OwnerState, int, int], ...]
    holes: tuple[tuple[int, int], ...]
    usage: Usage
    seen: tuple[SeqId, ...]


State = PoolState | ArenaState


def capture(cache: KVCache | State, seen: Iterable[SeqId] = ()) -> State:
    """The state of a cache now. ``seen`` are earlier sequences: they keep their colours.

    A state is returned as it is. A student's own cache works as well: what counts is that it has a
    ``pool`` or an ``arena``. Raises ValueError for anything else.
    """
    if isinstance(cache, PoolState | ArenaState):
        return cache
    if not hasattr(cache, "pool") and not hasattr(cache, "arena"):
        raise ValueError(f"a KV cache is drawn, not a {type(cache).__name__}")
    live: Any = cache
    seen = tuple(dict.fromkeys([*seen, *live.seq_ids]))
    owners = {
        seq_id: OwnerState(str(seq_id), seen.index(seq_id), live.num_computed_tokens(seq_id))
        for seq_id in live.seq_ids
    }
    if hasattr(cache, "pool"):
        return _capture_pool(live, owners, seen)
    slabs = [(owners[s.seq_id], s.slab_start, s.max_tokens) for s in live.sequences.values()]
    return ArenaState(
        tuple(sorted(slabs, key=lambda slab: slab[1])),
        tuple(live.arena.holes),
        live.usage(),
        seen,
    )


def _capture_pool(
    cache: Any, owners: dict[SeqId, OwnerState], seen: tuple[SeqId, ...]
) -> PoolState:
    block_size = cache.config.block_size
    tables = tuple((owner, tuple(cache.block_ids(seq_id))) for seq_id, owner in owners.items())
    holders: dict[int, list[OwnerState]] = {}
    num_used: dict[int, int] = {}
    for owner, block_ids in tables:
        for i, block_id in enumerate(block_ids):
            holders.setdefault(block_id, []).append(owner)
            used = slots_used(owner, i, block_size)
            num_used[block_id] = max(used, num_used.get(block_id, 0))
    return PoolState(
        block_size,
        tuple(
            BlockState(
                block.block_id,
                tuple(holders.get(block.block_id, ())),
                num_used.get(block.block_id, 0),
                block.ref_cnt,
                block.is_null,
            )
            for block in cache.pool.blocks
        ),
        tables,
        tuple(block.block_id for block in cache.pool.free_queue),
        cache.usage(),
        seen,
    )


def slots_used(owner: OwnerState, i: int, block_size: int) -> int:
    """How many slots of its logical block ``i`` hold a token of this sequence."""
    return min(max(owner.num_tokens - i * block_size, 0), block_size)


def capture_pool(cache: KVCache | State, seen: Iterable[SeqId] = ()) -> PoolState:
    """The state of a paged cache. Raises ValueError for any other."""
    state = capture(cache, seen)
    if not isinstance(state, PoolState):
        raise ValueError(f"this picture needs a paged cache, not a {type(cache).__name__}")
    return state


def capture_arena(cache: KVCache | State, seen: Iterable[SeqId] = ()) -> ArenaState:
    """The state of a contiguous cache. Raises ValueError for any other."""
    state = capture(cache, seen)
    if not isinstance(state, ArenaState):
        raise ValueError(f"this picture needs a contiguous cache, not a {type(cache).__name__}")
    return state
