# Chapter 06, given: pagedattn/manager/residency.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 20ad98da94a2dfcd62c592865732ae67a1f53130620408542460e497fc6141f4

"""How long blocks stay: a sample of them is watched from allocation to eviction.

If blocks are evicted soon after their last use, the pool is too small for what people ask again; if
they lie idle for long, it is large enough.

Source: ``vllm/v1/core/kv_cache_metrics.py``.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from pagedattn.prefix import KVCacheBlock

ACCESSES_KEPT = 4


@dataclass(frozen=True)
class BlockResidency:
    """One block's stay, in seconds: from allocation to eviction, from the last access (allocation
    if there was none) to eviction, and between accesses, the last four of them."""

    lifetime: float
    idle_time: float
    access_gaps: tuple[float, ...]


@dataclass(slots=True)
class _Stay:
    birth: float
    last_access: float
    accesses: deque[float] = field(default_factory=lambda: deque(maxlen=ACCESSES_KEPT))


class BlockMetricsCollector:
    """Watches each allocated block with probability ``sample_rate``.

    ``clock`` gives seconds, ``draw`` numbers in [0, 1). Raises ValueError for a rate that is not
    above 0 and at most 1.
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate is {sample_rate}; above 0 and at most 1 is needed")
        self.sample_rate = sample_rate
        self._clock = clock
        self._draw = draw
        self._stays: dict[int, _Stay] = {}
        self._residencies: list[BlockResidency] = []

    def on_allocated(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks were handed out; some are watched from now on, the others not any more."""
        for block in blocks:
            self._stays.pop(block.block_id, None)
            if self._draw() < self.sample_rate:
                now = self._clock()
                self._stays[block.block_id] = _Stay(now, now)

    def on_accessed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks were hit."""
        for block in blocks:
            stay = self._stays.get(block.block_id)
            if stay is not None:
                stay.last_access = self._clock()
                stay.accesses.append(stay.last_access)

    def on_evicted(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks are used for something else now; what was seen of each is kept."""
        for block in blocks:
            stay = self._stays.pop(block.block_id, None)
            if stay is None:
                continue
            now = self._clock()
            gaps = tuple(later - earlier for earlier, later in pairwise(stay.accesses))
            self._residencies.append(BlockResidency(now - stay.birth, now - stay.last_access, gaps))

    def reset(self) -> None:
        """Watch none of the blocks any more. What was seen is kept."""
        self._stays.clear()

    def take_residencies(self) -> list[BlockResidency]:
        """The stays that ended since the last call."""
        taken, self._residencies = self._residencies, []
        return taken
