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
        assert isinstance(spec, SlidingWindowSpec)
        num_needed = ceil_div(spec.sliding_window - 1, spec.block_size) + drop_eagle_block
        ratio = alignment_tokens // spec.block_size
        run: list[list[KVCacheBlock]] = []  # from right to left
        first = min(max_length // spec.block_size, len(block_hashes))
        while first > 0 and not (run and len(run) >= num_needed):
            first -= 1
            found = pool.get_cached_block(block_hashes[first], group_ids)
            if found is None:
                run.clear()
            elif run or (first + 1 - drop_eagle_block) % ratio == 0:
                run.append(found)
        length = first + len(run) if run else 0
        if len(run) < num_needed:
            length -= length % ratio
        if drop_eagle_block and length:
            length -= 1
            length -= length % ratio
        nulls = [pool.null_block] * first
        return tuple(
            (nulls + [found[i] for found in reversed(run)])[:length] for i in range(len(group_ids))
        )
