# Chapter 04, yours to write: pagedattn/prefix/cache.py without the bodies of its tasks.
#   pytest chapters/04 --student                all its tests on this folder
#   pytest chapters/04 --student --task 4.5     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 a9694838aeefe9b8ac8be5d80d4c9dc192d4f79f2fc40905031f70d3046d08d4

"""The cache that remembers: ``add`` finds what is computed already, ``commit`` registers.

A sequence shares the blocks of the longest beginning that is found, and computes the rest. At least
its last token is computed, because the model must give scores for it. Blocks are registered when
they are full and computed, not before: what is found has contents.

Source: ``vllm/v1/core/kv_cache_manager.py``, ``get_computed_blocks``; its ``allocate_slots``
registers earlier, when slots are given.
"""

# A stage narrows the types of the stage below:
# mypy: disable-error-code="assignment, override"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pagedattn import sharing
from pagedattn.cache import Batch, Config, InvariantError, SeqId, as_token_ids
from pagedattn.paged import PagedSequence

from .block import KVCacheBlock
from .hashing import BlockHasher, ExtraKeys, check_identity
from .pool import BlockPool


@dataclass(eq=False)
class PrefixSequence(PagedSequence):
    """A sequence, the digests of its full blocks, and what enters them besides tokens."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    salt: str | bytes | None = None
    extra_keys: ExtraKeys | None = None


class PagedKVCache(sharing.PagedKVCache):
    """Pages that are found again by what they hold. Without a ``hasher`` nothing is ever found.

    Raises ValueError for a hasher of another block size.
    """

    sequence_class = PrefixSequence
    sequences: dict[SeqId, PrefixSequence]
    pool: BlockPool

    def __init__(self, config: Config, pool: BlockPool, hasher: BlockHasher | None = None) -> None:
        if hasher is not None and hasher.block_size != config.block_size:
            raise ValueError(
                f"the hasher's block size is {hasher.block_size}, the cache's {config.block_size}"
            )
        super().__init__(config, pool)
        self.hasher = hasher

    # The verbs.

    def add(
        self,
        seq_id: SeqId,
        token_ids: Iterable[int],
        max_tokens: int | None = None,
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Begin a sequence on the blocks of its longest beginning that is in the cache.

        Returns how many of its tokens are already computed: whole blocks, and never the last token.
        Sequences share only with those of equal ``salt`` and ``extra_keys``. Raises as in chapter
        01, and for a salt or keys of another type; then nothing has changed.
        """
        check_identity(salt, extra_keys)
        sequence = self._new_sequence(seq_id, token_ids, max_tokens)
        sequence.salt, sequence.extra_keys = salt, extra_keys
        return self._add(sequence)

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """As in chapter 03; the child knows the digests of its parent's blocks, too."""
        super().fork(parent, child)
        self.sequences[child].block_hashes = list(self.sequences[parent].block_hashes)

    def reset_prefix_cache(self) -> None:
        """Forget all that could be found, as one must when the weights change.

        Raises ValueError while a batch is open or a block is in use; then nothing has changed.
        """
        self._check_no_open_batch("reset_prefix_cache")
        self._kill(self.pool.reset_prefix_cache())

    # What can be asked.

    def need(
        self,
        token_ids: Iterable[int],
        n: int,
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> tuple[int, int]:
        """The hit, and how many blocks would leave the free queue: new ones, and hits in it.

        Both are free blocks until then, so a request fits if the sum is at most
        ``pool.num_free_blocks``.
        """
        self._check_need(n)
        check_identity(salt, extra_keys)
        tokens = as_token_ids(token_ids)
        if not tokens:
            raise ValueError("the prompt is empty; at least 1 token is needed")
        sequence = PrefixSequence(None, tokens, len(tokens), salt=salt, extra_keys=extra_keys)
        hits = self._find_hits(sequence)
        num_computed_tokens = len(hits) * self.config.block_size
        new = self._num_blocks(num_computed_tokens + n) - len(hits)
        return num_computed_tokens, new + sum(block.ref_cnt == 0 for block in hits)

    def check_invariants(self) -> None:
        """Those of chapter 03, and: I5 a block with a digest is full and computed; I6 the map and
        the blocks agree; I7 what can be found holds numbers, too."""
        super().check_invariants()
        for sequence in self.sequences.values():
            num_full_blocks = sequence.num_computed_tokens // self.config.block_size
            for block in sequence.blocks[num_full_blocks:]:
                if block.block_hash is not None:
                    raise InvariantError(
                        f"I5: block {block.block_id} of sequence {sequence.seq_id!r} has a digest "
                        f"and is not full: {self!r}"
                    )
        self._check_map()

    def _check_map(self) -> None:
        entries = [
            (digest, block)
            for digest, first in self.pool.cached_blocks.items()
            for block in (first, *self.pool.duplicates.get(digest, ()))
        ]
        for digest, block in entries:
            if block.block_hash != digest:
                raise InvariantError(
                    f"I6: the map leads to block {block.block_id}, which carries another digest "
                    f"or none: {self!r}"
                )
        for digest, others in self.pool.duplicates.items():
            if not others or digest not in self.pool.cached_blocks:
                raise InvariantError(f"I6: twins are kept of a digest that has none: {self!r}")
        found = {block for _, block in entries}
        for block in self.pool.blocks:
            if block.block_hash is not None and block not in found:
                raise InvariantError(
                    f"I6: block {block.block_id} has a digest that is not in the map: {self!r}"
                )

    def _live_slots(self) -> Tensor:
        live = super()._live_slots()
        live[[block.block_id for block in self.pool.blocks if block.block_hash is not None]] = True
        return live

    # Where blocks are found, registered, and die.

    def _find_hits(self, sequence: PrefixSequence) -> list[KVCacheBlock]:
        """The blocks of the longest beginning in the cache; notes the digests of the sequence."""
        raise NotImplementedError(
            "task 4.5: a hit never covers the last token; blocks are registered when they are full "
            "and computed"
        )

    def _add(self, sequence: PrefixSequence) -> int:
        raise NotImplementedError(
            "task 4.5: a hit never covers the last token; blocks are registered when they are full "
            "and computed"
        )

    def _commit(self, batch: Batch) -> None:
        raise NotImplementedError(
            "task 4.5: a hit never covers the last token; blocks are registered when they are full "
            "and computed"
        )

    def _hash_full_blocks(self, sequence: PrefixSequence) -> None:
        if self.hasher is not None:
            sequence.block_hashes += self.hasher.hash_blocks(
                sequence.token_ids,
                sequence.block_hashes,
                salt=sequence.salt,
                extra_keys=sequence.extra_keys,
            )

    def _get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        blocks = self.pool.get_new_blocks(n)
        self._kill(blocks)  # of those that were evicted the contents die here
        return blocks

    def _kill(self, blocks: Sequence[KVCacheBlock]) -> None:
        super()._kill([block for block in blocks if block.block_hash is None])


def build_cache(
    config: Config, *, enable_prefix_caching: bool = True, seed: str | bytes | None = None
) -> PagedKVCache:
    """A cache of ``config.num_blocks`` blocks, all free but block 0, which holds no sequence.

    Digests start from ``seed``, or from random bytes of this process.
    """
    hasher = BlockHasher(config.block_size, seed) if enable_prefix_caching else None
    return PagedKVCache(config, BlockPool(config.num_blocks), hasher)
