# Chapter 06, given: pagedattn/manager/pool.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 86a157926c327ad413324aa9ed5eb930d237c77eacfa4abed7d906c581e44a49

"""The pool of all groups: chapter 04's pool with a map in which each group has its own keys.

The groups of a model take blocks from one pool, and a block belongs to one of them at a time. The
tables of a sliding window contain the null block wherever a block has left the window, so here the
null block may stand in any list; it is passed over.

Source: ``vllm/v1/core/block_pool.py``.
"""

# A stage narrows the types of the stage below:
# mypy: disable-error-code="override"

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagedattn import prefix
from pagedattn.prefix import KVCacheBlock
from pagedattn.whole_number import at_least_1, whole_number

from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    extra_keys_of_blocks,
)
from .keys import group_suffix, join_hashes, split_key
from .request import Request
from .residency import BlockMetricsCollector


def block_hashes_of(request: Request, block_size: int) -> Sequence[bytes]:
    """The digests of the request's full blocks of ``block_size`` tokens, as a group sees them.

    Raises ValueError unless the hasher's block size divides it.
    """
    if request.hasher is None:
        return request.block_hashes
    return join_hashes(request.block_hashes, request.hasher.block_size, block_size)


class BlockPool(prefix.BlockPool):
    """``num_blocks`` blocks, of which block 0, the null block, is never used.

    With ``enable_caching`` off no block is ever registered. With ``enable_events`` on, ``take_
    events`` must be called now and then, as the events wait for it. ``metrics`` watches how long
    blocks stay. ``registered_in_step`` notes by request what was registered since the step began,
    for an abort; the manager clears it. Raises ValueError for fewer than 1 block.
    """

    null_block: KVCacheBlock

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        enable_events: bool = False,
        metrics: BlockMetricsCollector | None = None,
    ) -> None:
        # Chapter 02 asks for a usable block. A model whose layers keep nothing needs none.
        super().__init__(max(2, at_least_1(num_blocks, "num_blocks")))
        if num_blocks == 1:
            self.free_queue.remove(self.blocks.pop())
            self._usable = frozenset()
        self.enable_caching = enable_caching
        self.enable_events = enable_events
        self.metrics = metrics
        self.registered_in_step: dict[str, list[KVCacheBlock]] = {}
        self._events: list[KVCacheEvent] = []

    # Taking and giving back.

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """The ``n`` blocks that were free for longest, each with ``ref_cnt`` 1 and no digest.

        A block that had a digest is evicted. Raises OutOfBlocks when fewer are free, ValueError for
        n below 0; then nothing is taken.
        """
        blocks = super().get_new_blocks(n)
        if self.metrics is not None:
            if self.enable_caching:
                self.metrics.on_evicted(blocks)
            self.metrics.on_allocated(blocks)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table names each of these blocks; one that was free leaves the queue.

        Raises ValueError for a block of another pool, or one that is free and carries no digest;
        then nothing has changed.
        """
        real = self._without_null(blocks)
        for block in real:
            if block.ref_cnt == 0 and block.block_hash is None:
                raise ValueError(f"block {block.block_id} is free; there is nothing to share in it")
        for block in real:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1
        if self.metrics is not None:
            self.metrics.on_accessed(real)

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take one reference off each block, in this order; a block that loses its last is free.

        Returns those that are free now; what carries a digest can still be found. Raises ValueError
        for a block of another pool, or more releases of a block than it has references; then
        nothing has changed.
        """
        blocks = self._without_null(blocks)
        if len(set(blocks)) == len(blocks) and not [b for b in blocks if b.ref_cnt == 0]:
            return self.free_table(blocks)
        return super().free_blocks(blocks)

    def free_table(self, table: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """``free_blocks`` without a look at what is given: for a table, whose blocks are of this
        pool and in use, and stand in it once, the null block excepted."""
        null_block = self.null_block
        if table and table[-1] is null_block:  # a window has moved on from its beginning
            table = [block for block in table if block is not null_block]
        free, others = table, False
        for block in table:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
            else:
                others = True
                if block.ref_cnt:
                    block.ref_cnt -= 1
        if others:  # the null block, and blocks that other tables name
            free = [b for b in table if b.ref_cnt == 0 and b is not null_block]
        self.free_queue.append_n(free)
        return free

    def _without_null(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """The blocks of this pool but the null block. Raises ValueError for other blocks."""
        blocks = list(blocks)
        if not self._usable.issuperset(blocks):
            blocks = [block for block in blocks if block is not self.null_block]
            for block in blocks:
                self._check_usable(block)
        return blocks

    # Digests.

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """Register ``blocks[num_cached_blocks:num_full_blocks]`` for one group.

        ``blocks`` are the request's table in that group, from its beginning. Raises ValueError for
        fewer blocks or digests than ``num_full_blocks``, for a block that is free, of another
        pool, named twice or registered; then nothing has changed.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        block_hashes = block_hashes_of(request, block_size)
        if num_cached_blocks < 0 or num_full_blocks > min(len(blocks), len(block_hashes)):
            raise ValueError(
                f"blocks {num_cached_blocks} to {num_full_blocks} of request {request.request_id} "
                f"are to be registered; it has {len(blocks)} blocks and {len(block_hashes)} digests"
            )
        full = range(num_cached_blocks, num_full_blocks)
        indices: Sequence[int] = full
        new = blocks[num_cached_blocks:num_full_blocks]
        digests = block_hashes[num_cached_blocks:num_full_blocks]
        if not self._usable.issuperset(new):
            indices = [i for i in full if blocks[i] is not self.null_block]
            new = [blocks[i] for i in indices]
            digests = [block_hashes[i] for i in indices]
            self._check_registrable(new)
        if len({b for b in new if b.block_hash is None and b.ref_cnt}) < len(new):
            self._check_registrable(new)
        suffix = group_suffix(group_id)
        self.registered_in_step.setdefault(request.request_id, []).extend(new)
        cached_blocks, duplicates = self.cached_blocks, self.duplicates
        for block, digest in zip(new, digests, strict=True):
            block.block_hash = key = digest + suffix
            if cached_blocks.setdefault(key, block) is not block:
                duplicates.setdefault(key, OrderedDict())[block] = None
        if self.enable_events:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(digests),
                    parent_block_hash=block_hashes[full.start - 1] if full.start else None,
                    token_ids=tuple(
                        request.token_ids[full.start * block_size : full.stop * block_size]
                    ),
                    block_size=block_size,
                    adapter=request.extra_keys.adapter if request.extra_keys else None,
                    extra_keys=extra_keys_of_blocks(
                        request.extra_keys, request.salt, indices, block_size
                    ),
                    group_idx=group_id,
                )
            )

    def get_cached_block(
        self, block_hash: bytes, group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """The block with this digest in each of the groups; None if one of them has none."""
        found = []
        for group_id in group_ids:
            block = self.cached_blocks.get(block_hash + group_suffix(group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def find_longest_cache_hit(
        self, block_hashes: Iterable[bytes], group_ids: Sequence[int]
    ) -> tuple[list[KVCacheBlock], ...]:
        """The blocks of each group under these digests, up to the first that one group lacks."""
        get, hits = self.cached_blocks.get, []
        for group_id in group_ids:
            suffix, blocks, found = group_suffix(group_id), [], []
            for block_hash in block_hashes:
                block = get(block_hash + suffix)
                if block is None:
                    break
                blocks.append(block)
                found.append(block_hash)
            hits.append(blocks)
            block_hashes = found  # the next group need not look further
        for blocks in hits:
            del blocks[len(hits[-1]) :]
        return tuple(hits)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the digests of these blocks, in use or free; they stay where they are.

        Raises ValueError for an id outside the pool; then nothing has changed.
        """
        block_ids = list(dict.fromkeys(whole_number(i, "a block id") for i in block_ids))
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ValueError(f"block {block_id} is asked for; there are {len(self.blocks)}")
        blocks = [self.blocks[block_id] for block_id in block_ids]
        if self.metrics is not None:
            self.metrics.on_evicted(blocks)
        self._evict([block for block in blocks if block.block_hash is not None])

    def reset_prefix_cache(self) -> list[KVCacheBlock]:
        """Forget every digest. Returns the blocks that had one.

        The order of the queue stays. Raises ValueError while a block is in use.
        """
        forgotten = super().reset_prefix_cache()
        if self.metrics is not None:
            self.metrics.reset()
        if self.enable_events:
            self._events.append(AllBlocksCleared())
        return forgotten

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to digests since the last call; nothing if events are off."""
        events, self._events = self._events, []
        return events

    @property
    def usage(self) -> float:
        """The share of the usable blocks that is in use, 0 to 1; 0 if there is none."""
        num_usable = len(self.blocks) - 1
        return 1 - len(self.free_queue) / num_usable if num_usable else 0.0

    def _evict(self, blocks: list[KVCacheBlock]) -> None:
        if self.enable_events:
            for block in blocks:
                assert block.block_hash is not None
                block_hash, group_id = split_key(block.block_hash)
                self._events.append(BlockRemoved((block_hash,), group_id))
        if self.duplicates:
            super()._evict(blocks)
            return
        cached_blocks = self.cached_blocks
        for block in blocks:
            del cached_blocks[block.block_hash]  # type: ignore[arg-type]
            block.block_hash = None
        self.num_evictions += len(blocks)

    def _check_registrable(self, blocks: Sequence[KVCacheBlock]) -> None:
        seen = set()
        for block in blocks:
            self._check_usable(block)
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is free; it holds nothing to register")
            if block.block_hash is not None or block in seen:
                raise ValueError(f"block {block.block_id} has a digest already")
            seen.add(block)
