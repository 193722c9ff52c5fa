# Chapter 06, given: pagedattn/manager/cache.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 50fa447fed7be556a33dc381c339c396a63279701131e92b0fd74b33e1685494

"""The verbs of a KV cache, as in every chapter before, over all that stands in this one.

The layers of a model are put into groups by the windows of their attention. A sequence has a block
table in each group, and all groups take their blocks from one pool. A block that no later token of
a sequence can see is given back while the sequence runs, and the null block takes its place in the
table: tables keep their length, so position ``p`` stays in entry ``p // block_size``.
"""

# A stage narrows the types of the stage below:
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from pagedattn.cache import (
    Batch,
    Config,
    KVCache,
    OutOfBlocks,
    SeqId,
    Sequence,
    Usage,
    as_token_ids,
)
from pagedattn.prefix import BlockHasher, ExtraKeys, KVCacheBlock, paged_attention, write_kv
from pagedattn.whole_number import whole_number

from .block_table import MultiGroupBlockTable
from .cache_state import check_pages, check_tables, count_slots, pool_in_words
from .dead_pages import DeadPages
from .layers import configure, limits_of, spec_of_layer
from .manager import KVCacheManager
from .request import Request
from .slots import compute_slot_mapping
from .take_back import take_back_slots
from .tensors import allocate_pages, keys_and_values
from .visible import without_skipped_blocks


@dataclass(eq=False)
class HybridSequence(Sequence):
    """A sequence, the request that the manager knows, and its row of the block tables."""

    request: Request = field(init=False)
    row: int = 0


class HybridKVCache(KVCache):
    """K and V of layers of several kinds, in blocks of one pool.

    ``windows[g]`` is the window of group g, None for full attention; ``group_of_layer`` says where
    a layer is; ``layers`` has its K and V, [num_blocks, block_size, num_kv_heads, head_dim] each.
    In a batch ``block_table`` [num_groups, num_seqs, width] and ``slot_mapping`` [num_groups,
    num_tokens] have those of every group. Without a ``hasher`` nothing is ever found.

    Raises ValueError for a hasher of another block size.
    """

    sequence_class = HybridSequence
    sequences: dict[SeqId, HybridSequence]

    def __init__(self, config: Config, hasher: BlockHasher | None = None) -> None:
        if hasher is not None and hasher.block_size != config.block_size:
            raise ValueError(
                f"the hasher's block size is {hasher.block_size}, the cache's {config.block_size}"
            )
        super().__init__(config)
        self.hasher = hasher
        self.num_added = 0  # requests are named by this number
        kv_cache_config = configure(config)
        self.manager = KVCacheManager(
            kv_cache_config, limits_of(config), enable_caching=hasher is not None, log_stats=False
        )
        self.pool = self.manager.pool
        groups = kv_cache_config.kv_cache_groups
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        group_of = {name: g for g, group in enumerate(groups) for name in group.layer_names}
        pages = allocate_pages(kv_cache_config, config.device)
        layers = range(config.num_layers)
        self.group_of_layer = [group_of[str(i)] for i in layers]
        self.layers = [keys_and_values(pages[str(i)], spec_of_layer(config, i)) for i in layers]
        self.tensors = [pages[t.shared_by[0]] for t in kv_cache_config.kv_cache_tensors]
        self.dead = DeadPages(self.tensors, enabled=config.poison)
        self.rows: list[HybridSequence] = []  # rows[i].row == i; no hole between them
        self.block_table = MultiGroupBlockTable(
            config.max_num_seqs,
            config.max_seq_len,
            config.max_seq_len,
            [group.kv_cache_spec.block_size for group in groups],
        )
        self.dead.kill(self.pool.blocks)

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
        """Begin a sequence on the blocks of its longest beginning that every group can serve.

        Returns how many of its tokens are already computed: whole blocks, and never the last token.
        Raises as in chapter 04; then nothing has changed.
        """
        sequence = self._new_sequence(seq_id, token_ids, max_tokens)
        sequence.request = Request(
            str(self.num_added), sequence.token_ids, self.hasher, salt=salt, extra_keys=extra_keys
        )
        sequence.token_ids = sequence.request.token_ids  # one list, to which the request appends
        return self._add(sequence)

    def append(self, seq_id: SeqId, token_ids: Iterable[int]) -> None:
        """As in chapter 01; blocks that are full now get their digests."""
        self._check_no_open_batch("append")
        sequence, tokens = self._sequence(seq_id), as_token_ids(token_ids)
        self._check_limit(sequence, len(tokens))
        sequence.request.append(tokens)

    def reset_prefix_cache(self) -> None:
        """Forget all that could be found, as one must when the weights change.

        Raises ValueError while a batch is open or a block is in use; then nothing has changed.
        """
        self._check_no_open_batch("reset_prefix_cache")
        self.manager.reset_prefix_cache()
        self.dead.kill(self.pool.blocks)

    # What can be asked.

    def block_ids(self, seq_id: SeqId) -> tuple[list[int], ...]:
        """The table of a sequence in each group, 0 where a block has left the window."""
        return self.manager.get_block_ids(self._sequence(seq_id).request.request_id)

    def need(
        self,
        token_ids: Iterable[int],
        n: int,
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> tuple[int, int]:
        """The hit, and how many blocks of all groups would leave the free queue: new ones, and hits
        in it."""
        if whole_number(n, "n") < 0:
            raise ValueError(f"need of {n} tokens; n is 0 or more")
        tokens = as_token_ids(token_ids)
        if not tokens:
            raise ValueError("the prompt is empty; at least 1 token is needed")
        request = Request("need", tokens, self.hasher, salt=salt, extra_keys=extra_keys)
        hits, request.num_computed_tokens = self.manager.get_computed_blocks(request)
        num_blocks = self._num_blocks_to_allocate(request, hits.blocks, n)
        return request.num_computed_tokens, num_blocks

    def usage(self) -> Usage:
        """Distinct slots of all groups. A token fills one in each group that keeps it."""
        return count_slots(self)

    def __repr__(self) -> str:
        """The pool in words; behind an owner stands its group: ``[0:null 1:A/0 2:A/1 3:free]``."""
        return pool_in_words(self)

    def check_invariants(self) -> None:
        """Those of chapter 01 and of the manager; and: I2 tables are as long as the lengths say,
        and their rows agree; I7 what can still be read holds numbers, and nothing else does."""
        super().check_invariants()
        self.manager.check_invariants()
        check_tables(self)
        if self.config.poison and self.open_batch is None:
            check_pages(self)

    # What a stage adds.

    def _begin(self, sequence: HybridSequence) -> None:
        request = sequence.request
        hits, num_computed_tokens = self.manager.get_computed_blocks(request)
        if num_computed_tokens:
            self.manager.coordinator.allocate_new_computed_blocks(
                request.request_id, hits.blocks, num_computed_tokens, 0
            )
        sequence.num_computed_tokens = request.num_computed_tokens = num_computed_tokens
        self.num_added += 1
        sequence.row = len(self.rows)
        self.rows.append(sequence)
        try:
            self.block_table.add_row(self._tables(sequence), sequence.row)
        except BaseException:  # no memory for it, say
            self._end(sequence)
            raise

    def _take(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        chosen = [(self.sequences[seq_id], n) for seq_id, n in num_new_tokens.items()]
        needed = sum(self._num_blocks_to_allocate(s.request, (), n) for s, n in chosen)
        if needed > self.pool.num_free_blocks:
            raise OutOfBlocks(needed, self.pool.num_free_blocks)
        try:
            for sequence, n in chosen:
                new_blocks = self.manager.allocate_slots(sequence.request, n)
                assert new_blocks is not None  # there is room for all of them
                self.dead.kill(chain(*new_blocks.blocks))  # what they held is found no more
                self.block_table.append_row(new_blocks.get_block_ids(), sequence.row)
        except BaseException:
            self._take_back(num_new_tokens)
            raise

    def _num_blocks_to_allocate(
        self, request: Request, hits: Seq[Seq[KVCacheBlock]], n: int
    ) -> int:
        """Blocks of all groups that leave the free queue for the next n tokens of a request."""
        computed = request.num_computed_tokens
        return self.manager.coordinator.get_num_blocks_to_allocate(
            request.request_id, computed + n, hits, 0, computed, computed + n
        )

    def _address(
        self, seq_ids: list[SeqId], query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = [self.sequences[seq_id].row for seq_id in seq_ids]
        tables = [table.gather(rows) for table in self.block_table.block_tables]
        block_table = torch.stack(tables).to(positions.device)  # equally long in all groups
        slots = [
            compute_slot_mapping(table, query_start_loc, positions, self.config.block_size)
            for table in block_table
        ]
        return block_table, torch.stack(slots)

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, spec = self.group_of_layer[layer], self.config.layer_specs[layer]
        k_cache, v_cache = self.layers[layer]
        write_kv(k_cache, v_cache, k, v, batch.slot_mapping[group])
        table, seq_lens = batch.block_table[group], batch.seq_lens
        if spec.window is not None:
            table, seq_lens = without_skipped_blocks(
                table, seq_lens, batch.query_start_loc, spec.window, self.config.block_size
            )
        return paged_attention(q, k_cache, v_cache, table, seq_lens, batch.query_start_loc, spec)

    def _commit(self, batch: Batch) -> None:
        super()._commit(batch)
        for seq_id in batch.num_new_tokens:
            sequence = self.sequences[seq_id]
            request = sequence.request
            request.num_computed_tokens = sequence.num_computed_tokens
            held = self._blocks(sequence)
            self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
            self.block_table.add_row(self._tables(sequence), sequence.row)
            self.dead.kill_lost(held)
        self.manager.new_step_starts()

    def _abort(self, batch: Batch) -> None:
        for layer, group in enumerate(self.group_of_layer):
            # A batch that got no addresses has no slots, in no group.
            slots = batch.slot_mapping[group : group + 1].flatten()
            self.dead.kill_slots(self.layers[layer], slots)
        self._take_back(batch.num_new_tokens)

    def _take_back(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        for seq_id in reversed(list(num_new_tokens)):
            sequence = self.sequences[seq_id]
            held = self._blocks(sequence)
            take_back_slots(self.manager, sequence.request)
            self.block_table.add_row(self._tables(sequence), sequence.row)
            self.dead.kill_lost(held)

    def _end(self, sequence: HybridSequence) -> None:
        held = self._blocks(sequence)
        self.manager.free(sequence.request)
        self.dead.kill_lost(held)
        last = self.rows.pop()
        if last is not sequence:  # the last row fills the hole
            self.block_table.move_row(last.row, sequence.row)
            self.rows[sequence.row] = last
            last.row = sequence.row
        self.block_table.clear_row(len(self.rows))

    def _tables(self, sequence: HybridSequence) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(sequence.request.request_id)

    def _blocks(self, sequence: HybridSequence) -> list[KVCacheBlock]:
        """Of all groups, null blocks among them."""
        return list(chain(*self.manager.get_blocks(sequence.request.request_id).blocks))


def build_cache(
    config: Config, *, enable_prefix_caching: bool = True, seed: str | bytes | None = None
) -> HybridKVCache:
    """A cache of ``config.num_blocks`` blocks, which all layers share. Digests start from ``seed``,
    or from random bytes of this process."""
    hasher = BlockHasher(config.block_size, seed) if enable_prefix_caching else None
    return HybridKVCache(config, hasher)
