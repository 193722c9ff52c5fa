# Chapter 06, given: pagedattn/manager/cross_attention.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 2816e230716f6297d5ae884312d392e1c6d87a9254d7fe4279309cdd2d9d2f18

"""Cross-attention: a decoder's layer attends to the tokens of the encoder.

- *Keeps* the blocks of the encoder's tokens: as many as they need, once, when the request starts.
- *Finds again* nothing: the inputs of an encoder are not compared.
- *Gives back* nothing before the request ends.

An input of 10 encoder tokens takes 3 blocks of 4 with the first step of the decoder, and none with
any later step.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock

from .page import KVCacheSpec
from .pool import BlockPool
from .request import Request
from .single_type import SingleTypeKVCacheManager


class NoPrefixCaching(ValueError):
    """Blocks of this kind cannot be found again."""


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Tables of the encoder's tokens. Wherever numbers of tokens are given, they are the
    encoder's: 0 after the first step."""

    is_cross_attention = True

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: every token of the decoder attends to all of the encoder."""
        return 0

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        hits: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> int:
        """0: what is computed of the decoder lies elsewhere. Raises NoPrefixCaching for hits."""
        if hits:
            raise NoPrefixCaching(f"request {request_id} has {len(hits)} hits in cross-attention")
        return 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Raises NoPrefixCaching."""
        raise NoPrefixCaching("blocks of cross-attention are not registered; turn caching off")

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
        """Raises NoPrefixCaching."""
        raise NoPrefixCaching("blocks of cross-attention are not looked up; turn caching off")
