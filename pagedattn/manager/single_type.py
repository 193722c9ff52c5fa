"""One group's part of the work: its tables, and when its blocks are taken and given back.

All groups share the pool, and each has a manager of its own. What this module does is the same for
every kind of layer. The kinds differ in two answers: how many tokens at the beginning are out of
reach (``get_num_skipped_tokens``), and which blocks of a prompt can be used again
(``find_longest_cache_hit``).

A block that is out of reach is given back, and the null block takes its place in the table. So the
block of position p always stands at ``p // block_size``.

Source: ``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pagedattn.prefix import KVCacheBlock

from .limits import Limits
from .page import KVCacheSpec, ceil_div
from .pool import BlockPool
from .request import Request


class SingleTypeKVCacheManager(ABC):
    """The tables of one group, by request.

    ``block_size`` is in tokens, over all ranks that share a sequence. ``req_to_blocks`` holds the
    tables, ``num_cached_blocks`` how many blocks at the beginning of each are registered, null
    blocks among them; a request is in it as soon as something was registered or found for it.

    ``new_block_ids`` collects the ids that were taken, for somebody who must clear them; None while
    nobody asks for them, so that it does not grow for ever.
    """

    drops_eagle_block: ClassVar[bool] = True
    """Whether a hit of this kind is cut by one block for an EAGLE draft model."""

    is_cross_attention: ClassVar[bool] = False
    """Whether the tokens of the encoder are kept, not those of the sequence."""

    sink_blocks: Sequence[KVCacheBlock] = ()
    """Blocks that belong to no sequence, set aside at the start."""

    def __init__(
        self,
        spec: KVCacheSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.group_id = group_id
        self.enable_caching = enable_caching
        self.block_size = spec.block_size * limits.context_parallel_size
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_blocks: dict[str, int] = {}
        self.new_block_ids: list[int] | None = None
        self.max_admission_blocks: int | None = None

    # What a request needs.

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        *,
        apply_admission_cap: bool = False,
    ) -> int:
        """How many blocks leave the free queue if the request gets slots for ``num_tokens``.

        That is new blocks, and those hits that are in the queue: to touch them takes them out of
        it. A hit that is out of reach behind ``total_computed_tokens`` stays where it is.
        ``apply_admission_cap`` bounds what the tokens require by what a request holds at a time
        (``max_admission_blocks``), before anything is subtracted. Changes nothing. Raises
        ValueError for hits of a request that runs already.
        """
        num_required_blocks = ceil_div(num_tokens, self.block_size)
        if apply_admission_cap and self.max_admission_blocks is not None:
            num_required_blocks = min(num_required_blocks, self.max_admission_blocks)
        num_held_blocks = len(self.req_to_blocks.get(request_id, ()))
        if hits:
            self._check_is_new(request_id)
        elif num_required_blocks <= num_held_blocks:
            return 0
        if request_id in self.num_cached_blocks:
            return num_required_blocks - num_held_blocks
        num_skipped_blocks = max(
            self.get_num_skipped_tokens(total_computed_tokens) // self.block_size, 0
        )
        num_there = max(num_skipped_blocks, num_held_blocks + len(hits))
        null_block, num_free_hits = self.pool.null_block, 0
        for block in hits[num_skipped_blocks:]:
            if block.ref_cnt == 0 and block is not null_block:
                num_free_hits += 1
        return max(num_required_blocks - num_there, 0) + num_free_hits

    @abstractmethod
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many tokens at the beginning no later token needs, once so many are computed."""

    # Taking.

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        hits: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> int:
        """Begin a request's table with its hits; those that are out of reach are left to others.

        Returns how many new blocks the tokens need whose K and V come from outside, as far as they
        are in reach. They are to be taken when the hits of all groups are safe: before that, a hit
        is a free block like any other. A request that runs already is left as it is. Raises
        ValueError for hits of a request that has blocks, or for any hit with caching off.
        """
        if not hits and request_id in self.num_cached_blocks:
            return 0
        self._check_is_new(request_id)
        if hits and not self.enable_caching:
            raise ValueError(f"request {request_id} has {len(hits)} hits, and caching is off")
        num_computed_tokens = num_local_computed_tokens + num_external_computed_tokens
        num_skipped_tokens = self.get_num_skipped_tokens(num_computed_tokens)
        num_skipped_blocks = max(num_skipped_tokens // self.block_size, 0)
        if num_skipped_blocks:
            num_in_reach = num_computed_tokens - num_skipped_tokens
            num_external_computed_tokens = min(num_external_computed_tokens, num_in_reach)
        blocks = hits[num_skipped_blocks:]
        self.pool.touch(blocks)
        table = [self.pool.null_block] * num_skipped_blocks
        table += blocks
        self.req_to_blocks[request_id] = table
        self.num_cached_blocks[request_id] = len(table)
        if num_external_computed_tokens <= 0:
            return 0
        return ceil_div(num_computed_tokens, self.block_size) - len(table)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Lengthen the request's table until it has slots for ``num_tokens``; returns what is new.

        ``num_tokens`` counts the slots of drafts, ``num_tokens_main_model`` does not. Raises
        OutOfBlocks if the pool has too few; then nothing has changed.
        """
        table = self.req_to_blocks.get(request_id)
        num_new_blocks = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if num_new_blocks <= 0:
            return []
        return self.append_new_blocks(request_id, num_new_blocks)

    def append_new_blocks(self, request_id: str, n: int) -> list[KVCacheBlock]:
        """Take ``n`` blocks from the pool to the end of the request's table; returns them. Raises
        as above."""
        new_blocks = self.pool.get_new_blocks(n)
        table = self.req_to_blocks.get(request_id)
        if table is None:
            self.req_to_blocks[request_id] = new_blocks.copy()
        else:
            table += new_blocks
        if self.new_block_ids is not None:
            self.new_block_ids += [block.block_id for block in new_blocks]
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the blocks that the first ``num_tokens`` tokens fill, as far as it was not done
        before. Raises ValueError for tokens that have no slots or no digests."""
        num_full_blocks = num_tokens // self.block_size
        num_cached_blocks = self.num_cached_blocks.get(request.request_id, 0)
        if num_full_blocks > num_cached_blocks:
            self.pool.cache_full_blocks(
                request,
                self.req_to_blocks.get(request.request_id, ()),
                num_cached_blocks,
                num_full_blocks,
                self.block_size,
                self.group_id,
            )
            self.num_cached_blocks[request.request_id] = num_full_blocks

    # Giving back.

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, the last one first: it will be evicted first. Does
        nothing for a request that has none."""
        table = self.req_to_blocks.pop(request_id, None)
        self.num_cached_blocks.pop(request_id, None)
        if table:
            # Two times as quick as reverse(): to copy a list is to visit its blocks all at once,
            # and the processor waits for all of them together, not for one after another.
            self.pool.free_table(table[::-1])

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back the blocks that are wholly out of reach once so many tokens are computed.

        From right to left, up to the first that was given back before. The null block takes their
        places.
        """
        num_skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        if num_skipped_blocks <= 0:
            return
        table, null_block = self.req_to_blocks.get(request_id, []), self.pool.null_block
        removed = []
        for index in range(min(num_skipped_blocks, len(table)) - 1, -1, -1):
            if table[index] is null_block:
                break
            removed.append(table[index])
            table[index] = null_block
        if removed:
            self.pool.free_table(removed)

    # What can be asked, and what a step changes.

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        group_ids: Sequence[int],
        pool: BlockPool,
        spec: KVCacheSpec,
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
        context_parallel_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The blocks of the longest beginning, at most ``max_length`` tokens, from which a request
        can go on: one list for each of the groups, all of one length, whose layers are alike.

        ``block_hashes`` are the digests of the request's blocks of ``spec.block_size`` *
        ``context_parallel_size`` tokens. A block that will not be needed is the null block. The
        length is a multiple of ``alignment_tokens``. With ``drop_eagle_block`` the last block is
        left out, since an EAGLE draft model needs the last hidden states, which are not kept.
        Changes nothing.
        """

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """How many blocks at the beginning of its table all requests share; 0 where the kind has no
        use for it."""
        return 0

    def new_step_starts(self) -> None:
        """What the step before has registered is computed now. Where that makes no difference,
        nothing happens."""
        return

    def take_new_block_ids(self) -> list[int]:
        """The ids taken since the last call; none unless they are collected."""
        if not self.new_block_ids:
            return []
        new_block_ids, self.new_block_ids = self.new_block_ids, []
        return new_block_ids

    def _check_is_new(self, request_id: str) -> None:
        if request_id in self.num_cached_blocks or self.req_to_blocks.get(request_id):
            raise ValueError(
                f"request {request_id} has {len(self.req_to_blocks.get(request_id, ()))} blocks in "
                f"group {self.group_id} already; hits can only begin a table"
            )
