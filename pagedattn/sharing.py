"""Chapter 03: sharing.

Several sequences may begin with the same tokens: samples of one prompt, the beams of a search. The
K and V of these tokens are equal, so their tables name the same blocks, and each block counts the
tables that name it: ``ref_cnt``. ``fork`` copies a table and no memory. Memory is copied when it
must be: a sequence that is about to write into a block which others read gets a copy of it first
(copy-on-write). The last one that holds a block writes in place.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.4. vLLM had it in ``vllm/core/block_manager.py``
(``BlockSpaceManagerV1.fork`` and ``append_slots``); its version 1 engine shares full blocks alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pagedattn import paged
from pagedattn.cache import Config, InvariantError, OutOfBlocks, SeqId, Usage, as_token_ids
from pagedattn.paged import (
    BlockTable,
    KVCacheBlock,
    compute_slot_mapping,
    paged_attention,
    write_kv,
)

__all__ = [
    "BlockPool",
    "BlockTable",
    "Heir",
    "KVCacheBlock",
    "PagedKVCache",
    "build_cache",
    "compute_slot_mapping",
    "copy_blocks",
    "paged_attention",
    "write_kv",
]


class BlockPool(paged.BlockPool):
    """The pool of chapter 02, with counts: a block is free when no table names it any more."""

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table names each of these blocks.

        Raises ValueError for the null block, a block of another pool, or a free one: its contents
        are dead. Then no count has changed.

        Source: ``vllm/v1/core/block_pool.py``, ``BlockPool.touch``.
        """
        blocks = list(blocks)
        for block in blocks:
            self._check_usable(block)
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is free; there is nothing to share in it")
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take one reference off each block, in this order; a block that loses its last is free.

        Returns the blocks whose contents are dead now. A block may be named as often as it has
        references; it comes to the queue once. Raises as in chapter 02, before any change.
        """
        blocks = list(blocks)
        self._check_release(blocks)
        dead = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                dead.append(block)
        self.free_queue.extend(dead)
        return dead


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, K and V of all layers in one call.

    Shapes: ``k_cache``, ``v_cache`` [num_layers, num_blocks, block_size, num_kv_heads, head_dim];
    ``sources``, ``destinations`` int64 [num_copies]. No destination may be a source.
    """
    for cache in (k_cache, v_cache):
        cache[:, destinations] = cache[:, sources]


@dataclasses.dataclass(frozen=True)
class Heir:
    """A sequence that continues another by one token: a beam that was chosen."""

    parent: SeqId
    seq_id: SeqId
    token_id: int


class PagedKVCache(paged.PagedKVCache):
    """Pages that several sequences may share. ``num_copies`` counts the blocks copied so far."""

    pool: BlockPool

    def __init__(self, config: Config, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self.num_copies = 0

    # The new verbs.

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """Begin ``child`` as a second sequence with all that ``parent`` knows; takes no block.

        The tokens that the parent has not computed yet are handed on, too, and its limit. Raises
        ValueError for an unknown parent, a child's id that is in use, one sequence too many, or
        while a batch is open; then nothing has changed.
        """
        self._check_no_open_batch("fork")
        origin = self._sequence(parent)
        self._check_new([child])
        sequence = dataclasses.replace(
            origin, seq_id=child, token_ids=list(origin.token_ids), blocks=list(origin.blocks)
        )
        self.pool.touch(sequence.blocks)
        self._begin(sequence)
        self.block_table.append_row(self.block_ids(parent), sequence.row)
        self.sequences[child] = sequence

    def replace(self, seq_ids: Iterable[SeqId], heirs: Iterable[Heir]) -> None:
        """One step of a beam search: the sequences ``seq_ids`` end, their heirs begin.

        All forks come first: a parent that took its token before would hand it on to every child.
        Then the parents are freed, those without an heir for good; so a sole heir is the only owner
        of its blocks, and writes in place. For this moment both generations count against
        ``max_num_seqs``.

        Raises ValueError for an heir of a sequence that is not among ``seq_ids``, for an id or a
        token that ``fork`` or ``append`` would refuse; then nothing has changed.
        """
        self._check_no_open_batch("replace")
        seq_ids, heirs = list(seq_ids), list(heirs)
        self._check_replace(seq_ids, heirs)
        for heir in heirs:
            self.fork(heir.parent, heir.seq_id)
        for seq_id in seq_ids:
            self.free(seq_id)
        for heir in heirs:
            self.append(heir.seq_id, [heir.token_id])

    # What can be asked.

    def usage(self) -> Usage:
        """Distinct slots: a block that several tables name is counted once.

        Its sharers agree about how much of it is filled: who wrote into it was alone with it.
        """
        block_size = self.config.block_size
        used: dict[KVCacheBlock, int] = {}
        for sequence in self.sequences.values():
            for index, block in enumerate(sequence.blocks):
                filled = sequence.num_computed_tokens - index * block_size
                used[block] = min(max(filled, 0), block_size)
        return Usage(
            total=(len(self.pool.blocks) - 1) * block_size,
            used=sum(used.values()),
            reserved=len(used) * block_size,
        )

    def _check_replace(self, seq_ids: list[SeqId], heirs: list[Heir]) -> None:
        for index, seq_id in enumerate(seq_ids):
            self._sequence(seq_id)
            if seq_id in seq_ids[:index]:
                raise ValueError(f"sequence {seq_id!r} is to end twice")
        for heir in heirs:
            if heir.parent not in seq_ids:
                raise ValueError(
                    f"{heir.seq_id!r} would continue {heir.parent!r}, which is not among the "
                    f"sequences that end: {seq_ids}"
                )
            as_token_ids([heir.token_id])
            self._check_limit(self.sequences[heir.parent], 1)
        self._check_new([heir.seq_id for heir in heirs])

    def _check_owners(self) -> None:
        """I4: in an open batch each block that is written stands in one table."""
        if self.open_batch is None:
            return
        for seq_id in self.open_batch.num_new_tokens:
            sequence = self.sequences[seq_id]
            first = sequence.num_computed_tokens // self.config.block_size
            for block in sequence.blocks[first:]:
                if block.ref_cnt > 1:
                    raise InvariantError(
                        f"I4: sequence {seq_id!r} writes block {block.block_id}, which stands in "
                        f"{block.ref_cnt} tables: {self!r}"
                    )

    # Copy-on-write.

    def _take(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        sharers = [seq_id for seq_id in num_new_tokens if self._shares_what_it_writes(seq_id)]
        if sharers:
            shared = self._blocks_to_copy(sharers)
            needed = len(shared) + sum(self._num_missing_blocks(num_new_tokens).values())
            if needed > self.pool.num_free_blocks:
                raise OutOfBlocks(needed, self.pool.num_free_blocks)
            self._copy_before_write(shared)
        super()._take(num_new_tokens)

    def _shares_what_it_writes(self, seq_id: SeqId) -> bool:
        """The next token goes into a block that others name. Only a last block can be such a one:
        one that is partly filled."""
        sequence = self.sequences[seq_id]
        partly_filled = sequence.num_computed_tokens % self.config.block_size > 0
        return partly_filled and sequence.blocks[-1].ref_cnt > 1

    def _blocks_to_copy(self, sharers: Iterable[SeqId]) -> dict[SeqId, KVCacheBlock]:
        """Which of these sequences need a copy before they write, and of which block.

        Each copy takes one reference off the block. So of k sharers that write, when nobody else
        names the block, the first k - 1 copy, and the last finds itself alone.
        """
        shared: dict[SeqId, KVCacheBlock] = {}
        references: dict[KVCacheBlock, int] = {}  # once the copies so far are made
        for seq_id in sharers:
            block = self.sequences[seq_id].blocks[-1]
            left = references.setdefault(block, block.ref_cnt)
            if left > 1:
                shared[seq_id] = block
                references[block] = left - 1
        return shared

    def _copy_before_write(self, shared: Mapping[SeqId, KVCacheBlock]) -> None:
        """Give each of these sequences a copy of its last block in place of it."""
        copies = self._get_new_blocks(len(shared))
        try:
            ids = [[block.block_id for block in blocks] for blocks in (shared.values(), copies)]
            sources, destinations = torch.tensor(ids, dtype=torch.int64, device=self.config.device)
            self._copy_blocks(sources, destinations)
        except BaseException:  # no memory for it, say
            self._release(copies)
            raise
        for seq_id, copy in zip(shared, copies, strict=True):
            sequence = self.sequences[seq_id]
            sequence.blocks[-1] = copy
            self.block_table.add_row(self.block_ids(seq_id), sequence.row)
        self.pool.free_blocks(shared.values())  # others still name each of them
        self.num_copies += len(copies)

    def _copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        copy_blocks(self.k_cache, self.v_cache, sources, destinations)


def build_cache(config: Config) -> PagedKVCache:
    """A cache of ``config.num_blocks`` blocks, all free but block 0, which holds no sequence."""
    return PagedKVCache(config, BlockPool(config.num_blocks))
