"""A hit being searched: what each kind of layers is asked, and what it looks up in the map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedattn.manager import HybridCoordinator, KVCacheManager, Request, SlidingWindowSpec
from pagedattn.manager.keys import split_key
from pagedattn.prefix import KVCacheBlock
from pagedattn.viz.groups import kind_of


@dataclass(frozen=True)
class Question:
    """One kind is asked for a hit of at most ``max_length`` tokens, and answers with ``length``.

    ``lookups`` are the blocks of the prompt that it looked for, in this order, and whether they
    were found. ``block_ids`` is the answer, 0 for the null block.
    """

    kind: int
    max_length: int
    lookups: tuple[tuple[int, bool], ...]
    block_ids: tuple[int, ...]
    length: int


class HitSearch:
    """What ``get_computed_blocks`` of a manager of several groups does for a request.

    ``kinds`` says in words what the kinds are, in the order in which they are asked; ``in_cache``
    which blocks of the prompt each has in the cache, ``windows`` how many tokens its layers see if
    they do not see all. ``questions`` is what happened, ``hits`` are the lists by kind, ``length``
    is their length in tokens. The search counts in the manager's statistics.

    Raises ValueError unless each group is a kind of its own, all blocks are of one size, and no
    draft model takes part.
    """

    def __init__(self, manager: KVCacheManager, request: Request) -> None:
        coordinator = manager.coordinator
        sizes = {m.block_size for m in coordinator.single_type_managers}
        if (
            not isinstance(coordinator, HybridCoordinator)
            or len(coordinator.kinds) != len(coordinator.single_type_managers)
            or len(sizes) != 1
            or coordinator.eagle_groups
        ):
            raise ValueError(
                "a search is drawn for groups of different kinds, blocks of one size and no EAGLE; "
                f"there are {len(coordinator.single_type_managers)} groups, of block sizes "
                f"{sorted(sizes)}, EAGLE in {sorted(coordinator.eagle_groups)}"
            )
        (self.block_size,) = sizes
        self.num_tokens = request.num_tokens
        self.num_blocks = (request.num_tokens - 1) // self.block_size
        kinds, pool = coordinator.kinds, manager.pool
        self.kinds = tuple(kind_of(kind.spec) for kind in kinds)
        self.windows = tuple(
            kind.spec.sliding_window if isinstance(kind.spec, SlidingWindowSpec) else None
            for kind in kinds
        )
        group_ids = [kind.group_ids[0] for kind in kinds]
        hashes = request.block_hashes[: self.num_blocks]
        self.in_cache = tuple(
            tuple(
                pool.get_cached_block(block_hash, (group_id,)) is not None for block_hash in hashes
            )
            for group_id in group_ids
        )
        questions: list[Question] = []
        cached_blocks = pool.cached_blocks
        watched = _WatchedMap(cached_blocks)
        watchers = [
            _Watcher(i, kind.manager, watched, hashes, self.block_size, questions)
            for i, kind in enumerate(kinds)
        ]
        coordinator.kinds = [
            replace(kind, manager=watcher)  # type: ignore[arg-type]
            for kind, watcher in zip(kinds, watchers, strict=True)
        ]
        pool.cached_blocks = watched
        try:
            hits, self.length = manager.get_computed_blocks(request)
        finally:
            coordinator.kinds, pool.cached_blocks = kinds, cached_blocks
        ids = hits.get_block_ids()
        self.hits = tuple(tuple(ids[group_id]) for group_id in group_ids)
        self.questions = tuple(questions)

    def passes(self) -> list[list[Question]]:
        """The questions of each round."""
        rounds: list[list[Question]] = []
        for question in self.questions:
            if not rounds or question.kind <= rounds[-1][-1].kind:
                rounds.append([])
            rounds[-1].append(question)
        return rounds


class _WatchedMap(dict[bytes, KVCacheBlock]):
    """A map that notes which keys are looked up."""

    def __init__(self, cached_blocks: dict[bytes, KVCacheBlock]) -> None:
        super().__init__(cached_blocks)
        self.lookups: list[tuple[bytes, bool]] = []

    def get(self, key: bytes, default: Any = None) -> Any:
        self.lookups.append((split_key(key)[0], key in self))
        return super().get(key, default)


class _Watcher:
    """Stands where a coordinator has a class of managers, and notes what that is asked."""

    def __init__(
        self,
        kind: int,
        manager: Any,
        watched: _WatchedMap,
        hashes: Sequence[bytes],
        block_size: int,
        questions: list[Question],
    ) -> None:
        self.kind, self.manager, self.watched = kind, manager, watched
        self.hashes, self.block_size, self.questions = hashes, block_size, questions

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int, *args: Any, **kwargs: Any
    ) -> tuple[list[KVCacheBlock], ...]:
        self.watched.lookups.clear()
        hits: tuple[list[KVCacheBlock], ...] = self.manager.find_longest_cache_hit(
            block_hashes, max_length, *args, **kwargs
        )
        lookups = tuple(
            (self.hashes.index(digest), found) for digest, found in self.watched.lookups
        )
        block_ids = tuple(block.block_id for block in hits[0])
        length = len(block_ids) * self.block_size
        self.questions.append(Question(self.kind, max_length, lookups, block_ids, length))
        return hits
