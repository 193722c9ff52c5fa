# Chapter 06, given: pagedattn/manager/dead_pages.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 55186dddad9eb93959b2d61c1af778963465f8a2bf475bbddd68978878703627

"""Poison for pages: what can no longer be read is NaN, so that reading it shows.

As ``pagedattn.poison``, where layers of several groups share memory. A whole page dies for all of
them at once, whatever their types: a floating-point number whose bytes are all 0xFF is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pagedattn.prefix import KVCacheBlock

DEAD_BYTE = 0xFF


class DeadPages:
    """Kills pages of ``tensors``, uint8 [num_blocks, page] each; nothing unless ``enabled``."""

    def __init__(self, tensors: Sequence[Tensor], *, enabled: bool) -> None:
        self.tensors = tensors
        self.enabled = enabled

    def kill(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The contents of these blocks are dead, for the layers of all groups."""
        if self.enabled:
            ids = [block.block_id for block in blocks]
            for pages in self.tensors:
                pages[torch.tensor(ids, dtype=torch.int64, device=pages.device)] = DEAD_BYTE

    def kill_lost(self, blocks: Iterable[KVCacheBlock]) -> None:
        """So are those of blocks that are free and cannot be found."""
        self.kill(b for b in blocks if b.ref_cnt == 0 and b.block_hash is None)

    def kill_slots(self, caches: Iterable[Tensor], slots: Tensor) -> None:
        """So are single slots of one layer. ``caches``: its K and V, [num_blocks, block_size, …];
        ``slots``: int64 [num_slots]."""
        if self.enabled:
            for cache in caches:
                block_size = cache.shape[1]
                cache[slots // block_size, slots % block_size] = math.nan
