"""What a picture shows of a cache: copied out of the live object, so that it never changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    says itself: its ``ref_cnt`` and its digest.

    ``former`` is the sequence that held a free block last, if its contents can still be found.
    ``is_hit`` says that it was free, and was found. Both are known where the state before is.
    """

    block_id: int
    owners: tuple[OwnerState, ...] = ()
    num_used: int = 0
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: bytes | None = None
    former: OwnerState | None = None
    is_hit: bool = False

    @property
    def owner(self) -> OwnerState | None:
        """The oldest of its owners; None: nobody's."""
        return self.owners[0] if self.owners else None

    @property
    def is_shared(self) -> bool:
        """Whether more than one table names it, or it counts otherwise than the tables do."""
        return len(self.owners) > 1 or self.ref_cnt != len(self.owners)

    @property
    def is_findable(self) -> bool:
        """Whether it is free and its contents can still be found."""
        return not self.owners and self.block_hash is not None

    def digits(self, count: int = 4) -> str:
        """The first hexadecimal digits of its digest; none without one."""
        return self.block_hash.hex()[:count] if self.block_hash else ""


@dataclass(frozen=True)
class PoolState:
    """A paged cache: every block, each sequence's block table, the free queue from its head.

    Where layers lie in groups, a sequence has a table for each group, and the null block may stand
    in it. ``has_digests`` says that its pool can find blocks again, whether or not there are any
    now.
    """

    block_size: int
    blocks: tuple[BlockState, ...]
    tables: tuple[tuple[OwnerState, tuple[int, ...]], ...]
    free_queue: tuple[int, ...]
    usage: Usage
    seen: tuple[SeqId, ...]
    has_digests: bool = False


@dataclass(frozen=True)
class ArenaState:
    """A contiguous cache: slabs as (owner, first slot, size), holes as (first slot, size)."""

    slabs: tuple[tuple[OwnerState, int, int], ...]
    holes: tuple[tuple[int, int], ...]
    usage: Usage
    seen: tuple[SeqId, ...]


State = PoolState | ArenaState


def capture(cache: KVCache | State, before: State | None = None) -> State:
    """The state of a cache now. Sequences of the state ``before`` keep their colours, and hits
    since then are marked.

    A state is returned as it is. A student's own cache works as well: what counts is that it has a
    ``pool`` or an ``arena``. Raises ValueError for anything else.
    """
    if isinstance(cache, PoolState | ArenaState):
        return cache
    if not hasattr(cache, "pool") and not hasattr(cache, "arena"):
        raise ValueError(f"a KV cache is drawn, not a {type(cache).__name__}")
    live: Any = cache
    seen = tuple(dict.fromkeys([*(before.seen if before else ()), *live.seq_ids]))
    owners = {
        seq_id: OwnerState(str(seq_id), seen.index(seq_id), live.num_computed_tokens(seq_id))
        for seq_id in live.seq_ids
    }
    if hasattr(cache, "pool"):
        pool = _capture_pool(live, owners, seen)
        return _with_past(pool, before) if isinstance(before, PoolState) else pool
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
    tables = tuple(
        (owner, table) for seq_id, owner in owners.items() for table in _tables(cache, seq_id)
    )
    holders: dict[int, list[OwnerState]] = {}
    num_used: dict[int, int] = {}
    for owner, block_ids in tables:
        for i, block_id in enumerate(block_ids):
            if block_id == 0:
                continue
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
                getattr(block, "block_hash", None),  # blocks have it from chapter 04 on
            )
            for block in cache.pool.blocks
        ),
        tables,
        tuple(block.block_id for block in cache.pool.free_queue),
        cache.usage(),
        seen,
        hasattr(cache.pool, "cached_blocks"),
    )


def _tables(cache: Any, seq_id: SeqId) -> list[tuple[int, ...]]:
    """The block tables of a sequence, one for each group; most caches have one for all layers."""
    block_ids = cache.block_ids(seq_id)
    return [tuple(ids) for ids in block_ids] if isinstance(block_ids, tuple) else [tuple(block_ids)]


def _with_past(state: PoolState, before: PoolState) -> PoolState:
    """The state, its blocks with what follows from the one before."""
    blocks = []
    for block, old in zip(state.blocks, before.blocks, strict=True):
        if block.block_hash is not None and block.block_hash == old.block_hash:
            block = replace(
                block,
                former=None if block.owners else old.owner or old.former,
                is_hit=bool(block.owners) and (old.is_findable or old.is_hit),
            )
        blocks.append(block)
    return replace(state, blocks=tuple(blocks))


def slots_used(owner: OwnerState, i: int, block_size: int) -> int:
    """How many slots of its logical block ``i`` hold a token of this sequence."""
    return min(max(owner.num_tokens - i * block_size, 0), block_size)


def capture_pool(cache: KVCache | State, before: State | None = None) -> PoolState:
    """The state of a paged cache. Raises ValueError for any other."""
    state = capture(cache, before)
    if not isinstance(state, PoolState):
        raise ValueError(f"this picture needs a paged cache, not a {type(cache).__name__}")
    return state


def capture_arena(cache: KVCache | State, before: State | None = None) -> ArenaState:
    """The state of a contiguous cache. Raises ValueError for any other."""
    state = capture(cache, before)
    if not isinstance(state, ArenaState):
        raise ValueError(f"this picture needs a contiguous cache, not a {type(cache).__name__}")
    return state
