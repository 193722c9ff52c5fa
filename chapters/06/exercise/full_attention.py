# Chapter 06, given: pagedattn/manager/full_attention.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 da6bebcee6ca7e7a81741057678a7890e30678891225af3f81b0fe8788f26ea4

"""Full attention: every token attends to all before it.

- *Keeps* the blocks of all tokens.
- *Finds again* what it finds from left to right, up to the first block that is missing.
- *Gives back* nothing before the request ends.

With blocks of 4 tokens, of which the first, the second and the fourth are in the cache, a prompt of
17 tokens begins on two blocks: what lies behind a gap is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pagedattn.prefix import KVCacheBlock

from .limits import Limits
from .page import KVCacheSpec
from .pool import BlockPool
from .single_type import SingleTypeKVCacheManager
from .specs import SinkFullAttentionSpec


class FullAttentionManager(SingleTypeKVCacheManager):
    """Tables of layers that keep everything: full attention, and MLA, which keeps less of each
    token."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: the last token attends to the first."""
        return 0

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
        """All blocks before the first that is missing, less the EAGLE block, then less what is
        behind the last multiple of the alignment."""
        block_size = spec.block_size * context_parallel_size
        hits = pool.find_longest_cache_hit(
            islice(block_hashes, max_length // block_size), group_ids
        )
        length = len(hits[0])
        if drop_eagle_block and length:
            length -= 1
        length -= length % (alignment_tokens // block_size)
        for blocks in hits:
            del blocks[length:]
        return hits

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Nothing is out of reach."""

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """How many blocks at the beginning of the table all requests with blocks here share.

        A block that stands in every table has as many references as there are tables.
        """
        num_requests = len(self.req_to_blocks)
        num_common_blocks = 0
        for block in self.req_to_blocks.get(request_id, ()):
            if block.ref_cnt != num_requests:
                break
            num_common_blocks += 1
        return num_common_blocks


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention whose first ``sink_len`` tokens belong to no sequence; every sequence sees
    them. Their blocks are taken at the start and stay taken.

    Raises ValueError if the sink does not fill whole blocks, OutOfBlocks if the pool is too small.
    """

    def __init__(
        self,
        spec: SinkFullAttentionSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        super().__init__(spec, pool, group_id, limits=limits, enable_caching=enable_caching)
        num_sink_blocks, rest = divmod(spec.sink_len, self.block_size)
        if rest:
            raise ValueError(
                f"sink_len {spec.sink_len} is no multiple of {self.block_size}, the tokens of a "
                "block over all ranks"
            )
        self.sink_blocks = pool.get_new_blocks(num_sink_blocks)
