# Chapter 06, given: pagedattn/manager/chunked.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 20055c2fbffe7408406eb9fc75ae3c2bc2c8ec9b1fcf55fc9c5c36cb0f897f4a

"""Chunked local attention: a token attends to its own chunk, up to itself.

- *Keeps* the blocks of the chunk in which the next token lies.
- *Finds again* the blocks of the last chunk, from left to right; earlier chunks are not needed, so
  they count as found even when nothing is in the cache.
- *Gives back* the blocks of a chunk when the chunk is computed.

Chunks of 8 tokens, and 13 computed: token 13 attends to 8 to 12 and itself, so the first 8 are out
of reach, which is two blocks of 4::

    tokens    0 … 7 | 8 9 10 11 12 (13)    table [null, null, b, c]
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock

from .limits import Limits
from .page import KVCacheSpec
from .pool import BlockPool
from .single_type import SingleTypeKVCacheManager
from .specs import ChunkedLocalAttentionSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Tables that are null up to the chunk of the next token.

    ``max_admission_blocks`` is vLLM's number. It is too small where blocks do not divide chunks:
    with chunks of 6 tokens, blocks of 4 and steps of 2 it is 2, but behind 11 tokens the blocks
    from 1 to 3 are held. Raises ValueError under context parallelism.
    """

    def __init__(
        self,
        spec: ChunkedLocalAttentionSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        super().__init__(spec, pool, group_id, limits=limits, enable_caching=enable_caching)
        self.attention_chunk_size = spec.attention_chunk_size
        self.max_admission_blocks = spec.max_num_pages(limits)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Those of the chunks before the next token's."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

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
        """Null blocks up to the chunk in which token ``max_length`` lies, then what is found.

        Chunks of 8, blocks of 4, at most 15 tokens: the chunk begins at 8, so the hit is [null,
        null] with an empty cache, and [null, null, 2] if block 2 is there. This is exact where
        blocks divide chunks; elsewhere a hit can end inside a chunk whose first block is null, in
        vLLM as well. Raises ValueError with EAGLE, or if other groups have blocks of another size.
        """
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        if drop_eagle_block:
            raise ValueError("chunked local attention cannot leave out a block for EAGLE")
        if alignment_tokens != spec.block_size:
            raise ValueError(
                f"chunked local attention in blocks of {spec.block_size} tokens cannot align its "
                f"hits to {alignment_tokens} tokens; all groups must have blocks of one size"
            )
        chunk_begin = max_length // spec.attention_chunk_size * spec.attention_chunk_size
        num_skipped_blocks = chunk_begin // spec.block_size
        found = pool.find_longest_cache_hit(
            block_hashes[num_skipped_blocks : max_length // spec.block_size], group_ids
        )
        return tuple([pool.null_block] * num_skipped_blocks + blocks for blocks in found)
