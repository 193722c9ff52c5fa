# Chapter 04, yours to write: pagedattn/prefix/pool.py without the bodies of its tasks.
#   pytest chapters/04 --student                all its tests on this folder
#   pytest chapters/04 --student --task 4.3     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 e82222a1f4b117c4907b68ea46bd1efdc1a76e1d92c23db7ddf5ecdc2bdedc6a

"""The pool with a memory: chapter 03's pool, in which free blocks can be found again.

A block that is registered under a digest keeps its contents when it becomes free. It waits in the
queue like any other free block. Whichever comes first decides: a hit takes it out of the queue, or
it reaches the head, is handed out, and forgets what it held (it is *evicted*).

Source: ``vllm/v1/core/block_pool.py``.
"""

# A stage narrows the types of the stage below:
# mypy: disable-error-code="assignment, override"

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagedattn import sharing
from pagedattn.cache import OutOfBlocks

from .block import KVCacheBlock
from .hashing import check_digest
from .queue import FreeKVCacheBlockQueue


class BlockPool(sharing.BlockPool):
    """All blocks, the queue of the free ones, and a map from digests to blocks.

    Several blocks may carry one digest: equal prompts that were computed at the same time.
    ``cached_blocks`` holds the first of them, ``duplicates`` the others in the order in which they
    were registered. ``num_evictions`` counts digests that were lost because their block was needed.
    """

    block_class = KVCacheBlock
    queue_class = FreeKVCacheBlockQueue

    blocks: list[KVCacheBlock]
    free_queue: FreeKVCacheBlockQueue

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.cached_blocks: dict[bytes, KVCacheBlock] = {}
        self.duplicates: dict[bytes, OrderedDict[KVCacheBlock, None]] = {}
        self.num_evictions = 0
        self._usable = frozenset(self.blocks[1:])

    # Taking and giving back.

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Take the ``n`` blocks at the head of the queue, each with ``ref_cnt`` 1 and no digest.

        A block that had a digest is evicted: what it held can no longer be found. Raises
        OutOfBlocks when fewer are free, ValueError for n below 0; then nothing is taken.
        """
        if n < 0:
            raise ValueError(f"get_new_blocks({n}): the number of blocks cannot be negative")
        if n > len(self.free_queue):
            raise OutOfBlocks(n, len(self.free_queue))
        blocks = self.free_queue.popleft_n(n)
        for block in blocks:
            block.ref_cnt = 1
        if self.cached_blocks:
            self._evict([block for block in blocks if block.block_hash is not None])
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table names each of these blocks; one that was free leaves the queue.

        Raises ValueError for the null block, a block of another pool, or one that is free and
        carries no digest: its contents are dead. Then nothing has changed.
        """
        raise NotImplementedError(
            "task 4.4: a free block that is found leaves the queue; a block that is handed out "
            "loses its digest, and a duplicate takes its place in the map; count each in "
            "num_evictions"
        )

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take one reference off each block, in this order; a block that loses its last is free.

        Returns the blocks that are free now. The contents of those that carry a digest live on.
        Raises as in chapter 03, before any change.
        """
        blocks = list(blocks)
        if not self._usable.issuperset(blocks):
            self._check_release(blocks)
        free = []
        overdrawn = False
        for block in blocks:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                free.append(block)
            else:
                block.ref_cnt -= 1
                overdrawn = overdrawn or block.ref_cnt < 0
        if overdrawn:  # rare, so it is cheaper to undo than to count the releases beforehand
            for block in blocks:
                block.ref_cnt += 1
            self._check_release(blocks)
        self.free_queue.append_n(free)
        return free

    # Names of blocks.

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[bytes],
        num_cached_blocks: int,
        num_full_blocks: int,
    ) -> None:
        """Register ``blocks[num_cached_blocks:num_full_blocks]`` under their digests.

        ``blocks`` and ``block_hashes`` are those of one sequence from its beginning; the blocks
        before ``num_cached_blocks`` are registered already. The null block is left out. Raises
        ValueError for a negative number, fewer blocks or digests than ``num_full_blocks``, a digest
        that is not 32 bytes, a block that is free, of another pool, named twice or registered; then
        nothing has changed.
        """
        raise NotImplementedError(
            "task 4.3: check everything before you register anything; the first block of a digest "
            "stays first; a hit ends at the first miss"
        )

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block registered under a digest, the first one of several; None if there is none.

        Raises ValueError for what is no digest.
        """
        check_digest(block_hash)
        return self.cached_blocks.get(block_hash)

    def find_longest_cache_hit(self, block_hashes: Iterable[bytes]) -> list[KVCacheBlock]:
        """The blocks registered under these digests, up to the first that is missing.

        Changes nothing: who wants to keep the blocks touches them. Raises ValueError for what is no
        digest.

        Source: ``vllm/v1/core/single_type_kv_cache_manager.py``, ``FullAttentionManager``.
        """
        raise NotImplementedError(
            "task 4.3: check everything before you register anything; the first block of a digest "
            "stays first; a hit ends at the first miss"
        )

    def reset_prefix_cache(self) -> list[KVCacheBlock]:
        """Forget every digest. Returns the blocks that had one: their contents are dead now.

        The order of the queue stays. Raises ValueError while a block is in use.
        """
        in_use = len(self.blocks) - 1 - len(self.free_queue)
        if in_use:
            raise ValueError(f"the prefix cache cannot be reset: {in_use} blocks are in use")
        forgotten = [block for block in self.blocks if block.block_hash is not None]
        for block in forgotten:
            block.block_hash = None
        self.cached_blocks.clear()
        self.duplicates.clear()
        return forgotten

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that carry a digest."""
        return len(self.cached_blocks) + sum(map(len, self.duplicates.values()))

    @property
    def usage(self) -> float:
        """The share of the usable blocks that is in use, 0 to 1. A free block with a digest is
        free."""
        return 1 - len(self.free_queue) / (len(self.blocks) - 1)

    def _evict(self, blocks: list[KVCacheBlock]) -> None:
        """Forget the digests of these blocks, and count each in ``num_evictions``; a duplicate, if
        there is one, takes the place."""
        raise NotImplementedError(
            "task 4.4: a free block that is found leaves the queue; a block that is handed out "
            "loses its digest, and a duplicate takes its place in the map; count each in "
            "num_evictions"
        )

    def _check_new_digests(self, new: list[tuple[KVCacheBlock, bytes]]) -> None:
        seen = set()
        for block, digest in new:
            self._check_usable(block)
            check_digest(digest)
            if block.block_hash is not None or block in seen:
                raise ValueError(f"block {block.block_id} has a digest already")
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is free; it holds nothing to register")
            seen.add(block)
