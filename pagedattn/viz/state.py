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
    """A block: whose it is (None: nobody's), and how many of its slots hold a token."""

    block_id: int
    owner: OwnerState | None
    num_used: int
    is_null: bool = False


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
    held: dict[int, BlockState] = {}
    for seq_id, owner in owners.items():
        for i, block_id in enumerate(cache.block_ids(seq_id)):
            num_used = min(max(owner.num_tokens - i * block_size, 0), block_size)
            held[block_id] = BlockState(block_id, owner, num_used)
    return PoolState(
        block_size,
        tuple(
            held.get(block.block_id, BlockState(block.block_id, None, 0, block.is_null))
            for block in cache.pool.blocks
        ),
        tuple((owner, tuple(cache.block_ids(seq_id))) for seq_id, owner in owners.items()),
        tuple(block.block_id for block in cache.pool.free_queue),
        cache.usage(),
        seen,
    )


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
