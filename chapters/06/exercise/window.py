# Chapter 06, yours to write: pagedattn/manager/window.py without the bodies of its tasks.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.3     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 a112d83e54ee9e2507287602de3811f5d2d994cc0a6c83b2dd8d16e64c2bd342

"""A sliding window: a token attends to itself and the ``sliding_window`` - 1 tokens before it.

- *Keeps* the blocks in which the window of the next token lies.
- *Finds again* a run of blocks that is long enough for a window, wherever it lies; what is before
  it is not needed.
- *Gives back* a block when its last token has left the window.

A window of 4 tokens, and 7 tokens computed: token 7 attends to 4, 5, 6 and itself, so the first 4
are out of reach, which is one block of 4::

    tokens    0 1 2 3 | 4 5 6 (7)          table [null, b]
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock

from .limits import Limits
from .page import KVCacheSpec, ceil_div
from .pool import BlockPool
from .single_type import SingleTypeKVCacheManager
from .specs import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Tables that are null on the left and hold a window's blocks on the right.

    A whole prompt gets its blocks at first; those outside the window go at the next call. Raises
    ValueError under context parallelism.
    """

    def __init__(
        self,
        spec: SlidingWindowSpec,
        pool: BlockPool,
        group_id: int,
        *,
        limits: Limits,
        enable_caching: bool,
    ) -> None:
        super().__init__(spec, pool, group_id, limits=limits, enable_caching=enable_caching)
        self.sliding_window = spec.sliding_window
        self.max_admission_blocks = spec.max_num_pages(limits)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Those before the window of the next token."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

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
        """The rightmost run of blocks that covers a window, with null blocks before it.

        The next token sees ``sliding_window`` - 1 tokens before itself, so the run has as many
        blocks as these can fill, at least one, and the EAGLE block. It ends where the hit may end:
        at a multiple of the alignment, or one block behind with EAGLE. A run that reaches the first
        block may be shorter. If it is, it is cut to the alignment both before and after the EAGLE
        block goes, as vLLM does.

        Window 6 in blocks of 4: two blocks are enough. With blocks 0, 2, 3 and 5 in the cache the
        hit is [null, null, 2, 3].
        """
        raise NotImplementedError(
            "task 6.3: walk from the right and collect a run; a miss drops it; it begins only "
            "where a hit may end, and is long enough when it covers window - 1 tokens, or reaches "
            "block 0; EAGLE wants one block more, and drops it"
        )
