# Chapter 06, given: pagedattn/manager/mamba.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 9d02da150095c207bf3d64d275dd3884192e52a780ea8c6857bd097a1fbce3e4

"""Mamba: a layer that keeps a state, of one size whatever the length, instead of K and V.

The state behind a token follows from the state before it, so only the last one is needed to go on.
What is kept besides is for requests that begin alike. ``mamba_cache_mode`` says how much:

- "none": a request has one block, and nothing is found again.
- "all": a state is stored at the end of each block; those behind the running request are given
  back, and found again as long as nobody takes them.
- "align": the table is as long as with "all", but only the block of the running state is real, and
  for one step that of the state before it, from which it is computed. A scheduler cuts the steps
  of a prompt at the ends of blocks, so the states that lie there can be found again.

*Finds again* the rightmost block in the cache that may end a hit; nothing before it is needed.

"align" in blocks of 4, with steps of 8, 8 and 1 tokens, takes one block a step::

    [null, 1]    [null, 1, null, 2]    [null, null, null, 2, 3]

A draft model's tokens may be rejected, so each of them has a state of its own:
``num_speculative_blocks`` more blocks stand behind the running state's. In "align" they move along.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock

from .limits import Limits
from .page import KVCacheSpec, ceil_div
from .pool import BlockPool
from .request import Request
from .single_type import SingleTypeKVCacheManager
from .specs import MambaSpec


class MambaManager(SingleTypeKVCacheManager):
    """Tables of states in the modes "none" and "all".

    A block is registered when slots are given, before it is computed, and K and V of a prefix can
    be read in the step that writes them. A state cannot: it is read before the step begins. So a
    request whose hit was registered in this step has to wait for the next one.
    """

    drops_eagle_block = False

    def __init__(
        self,
        spec: MambaSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        if enable_caching:
            limits.check_no_context_parallelism("prefix caching of a Mamba layer")
        super().__init__(spec, pool, group_id, limits=limits, enable_caching=enable_caching)
        self.num_speculative_blocks = spec.num_speculative_blocks
        self._cached_this_step: set[bytes | None] = set()

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last one, whose state is the running one."""
        return num_computed_tokens - 1

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
        """As for every kind, and the speculative blocks. More than the pool has if the hit was
        registered in this step."""
        if hits and hits[-1].block_hash in self._cached_this_step:
            return len(self.pool.blocks) + 1
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens + self.block_size * self.num_speculative_blocks,
            hits,
            total_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As for every kind, and the speculative blocks."""
        num_tokens += self.block_size * self.num_speculative_blocks
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """As for every kind, but as if all drafts had been rejected: then an earlier state is
        needed."""
        num_sure_tokens = total_computed_tokens - self.num_speculative_blocks
        super().remove_skipped_blocks(request_id, num_sure_tokens)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """As for every kind; the digests are remembered for this step."""
        request_id = request.request_id
        num_cached_blocks = self.num_cached_blocks.get(request_id, 0)
        super().cache_blocks(request, num_tokens)
        num_full_blocks = self.num_cached_blocks.get(request_id, 0)
        if num_full_blocks > num_cached_blocks:
            new = self.req_to_blocks[request_id][num_cached_blocks:num_full_blocks]
            self._cached_this_step.update(block.block_hash for block in new)
            self._cached_this_step.discard(None)  # the null block has no digest

    def new_step_starts(self) -> None:
        """The states that the step before has registered are computed now."""
        self._cached_this_step.clear()

    @classmethod
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
        """The rightmost block in the cache that ends at a multiple of the alignment, with null
        blocks before it.

        No block is left out for EAGLE: the state of the block before need not exist.
        """
        ratio = alignment_tokens // spec.block_size
        last = min(max_length // spec.block_size, len(block_hashes)) // ratio * ratio
        for length in range(last, 0, -ratio):
            found = pool.get_cached_block(block_hashes[length - 1], group_ids)
            if found is not None:
                return tuple([pool.null_block] * (length - 1) + [block] for block in found)
        return tuple([] for _ in group_ids)


class AlignedMambaManager(MambaManager):
    """Tables of states in the mode "align": null blocks, and at the end the block of the running
    state and the speculative ones."""

    def __init__(
        self,
        spec: MambaSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        super().__init__(spec, pool, group_id, limits=limits, enable_caching=enable_caching)
        self._started: set[str] = set()
        # Where the state stands that the running one is computed from.
        self._index_before: dict[str, int] = {}

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
        """The running state's block and the speculative ones for a new request; for one that runs
        at most one block more. Tokens computed elsewhere need one block, for their last state.
        Slots of drafts are not counted: they would break the alignment."""
        if hits:
            self._check_is_new(request_id)
        if hits and hits[-1].block_hash in self._cached_this_step:
            return len(self.pool.blocks) + 1
        num_blocks = len(self.req_to_blocks.get(request_id, ()))
        num_external_blocks = num_free_hits = 0
        if not num_blocks:  # the table begins with what is computed already
            num_blocks = ceil_div(total_computed_tokens, self.block_size)
            num_external_blocks = min(num_blocks - len(hits), 1)
            if hits and not num_external_blocks and hits[-1].ref_cnt == 0:
                num_free_hits = 1
        num_missing = max(self._num_required_blocks(num_tokens_main_model) - num_blocks, 0)
        most = 1 if request_id in self._started else 1 + self.num_speculative_blocks
        num_new_blocks = min(num_missing, most)
        return num_external_blocks + num_new_blocks + num_free_hits

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Lengthen the table to the block in which the last token lies, and the speculative ones.

        What lies between is null. A request that runs already takes its speculative blocks along,
        so it needs one block only, whose place is the end. Returns all that is new in the table,
        null blocks and blocks that were moved among it.
        """
        table = self.req_to_blocks.get(request_id, [])
        num_blocks, num_before = self._num_required_blocks(num_tokens_main_model), len(table)
        if num_blocks <= num_before:
            return []
        num_new_blocks, num_moving = 1, self.num_speculative_blocks
        if request_id not in self._started:
            num_new_blocks, num_moving = min(num_blocks - num_before, 1 + num_moving), 0
        new_blocks = self.pool.get_new_blocks(num_new_blocks)
        self._started.add(request_id)
        if num_before:
            self._index_before[request_id] = num_before - num_moving - 1
        index = num_blocks - 1 - self.num_speculative_blocks  # of the running state
        null_block = self.pool.null_block
        table += [null_block] * (index - num_before)
        for old in range(num_before - num_moving, min(index, num_before)):
            table.append(table[old])
            table[old] = null_block
        table += new_blocks
        self.req_to_blocks[request_id] = table
        return table[num_before:]

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """As in the other modes; and the state that the running one was computed from, once that
        is computed. It may stand alone between null blocks."""
        super().remove_skipped_blocks(request_id, total_computed_tokens)
        num_sure_tokens = max(total_computed_tokens - self.num_speculative_blocks, 0)
        index = self._index_before.get(request_id)
        if index is not None and index < ceil_div(num_sure_tokens, self.block_size) - 1:
            table, null_block = self.req_to_blocks[request_id], self.pool.null_block
            if table[index] is not null_block:
                self.pool.free_blocks([table[index]])
                table[index] = null_block

    def free(self, request_id: str) -> None:
        """As in the other modes."""
        self._started.discard(request_id)
        self._index_before.pop(request_id, None)
        super().free(request_id)

    def _num_required_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size) + self.num_speculative_blocks
