"""Chapter 02: pages.

Memory is cut into blocks of ``block_size`` slots. A sequence takes a block when it needs the next
slots, from anywhere in the pool, and its block table says where: token ``position`` lies in slot
``table[position // block_size] * block_size + position % block_size``. Nothing is reserved for
tokens that may never come, so less than one block a sequence is wasted; any free block serves any
sequence, so no free slot is ever out of reach.

The idea: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4. In vLLM: ``vllm/v1/core/block_pool.py``,
``vllm/v1/worker/block_table.py``.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec, attention
from pagedattn.cache import (
    Batch,
    Config,
    InvariantError,
    KVCache,
    OutOfBlocks,
    SeqId,
    Sequence,
    Usage,
)
from pagedattn.poison import check_poison, poison
from pagedattn.whole_number import whole_number


@dataclass(eq=False, slots=True)
class KVCacheBlock:
    """One block of the pool. ``ref_cnt`` is the number of tables that name it: 0 (free) or 1."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class BlockPool:
    """All blocks, and the queue of the free ones.

    Block 0 is the null block: the padding of block tables points at it, and it is never handed out
    or freed. The others leave at the head of the queue and come back at its tail.

    Raises ValueError for a pool with no usable block.
    """

    block_class = KVCacheBlock
    queue_class = deque

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; block 0 is never used, so 2 is the least"
            )
        self.blocks = [self.block_class(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = self.queue_class(self.blocks[1:])

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``get_new_blocks`` can still give."""
        return len(self.free_queue)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Take the ``n`` blocks at the head of the queue, each with ``ref_cnt`` 1.

        Raises OutOfBlocks when fewer are free, ValueError for n below 0; then nothing is taken.
        """
        if n < 0:
            raise ValueError(f"get_new_blocks({n}): the number of blocks cannot be negative")
        if n > self.num_free_blocks:
            raise OutOfBlocks(n, self.num_free_blocks)
        blocks = [self.free_queue.popleft() for _ in range(n)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Give blocks back, the one to be used again first in front.

        Returns the blocks whose contents are dead now: all of them. Raises ValueError for the null
        block, a block of another pool, or more releases of a block than it has references; then
        nothing is freed.
        """
        blocks = list(blocks)
        self._check_release(blocks)
        for block in blocks:
            block.ref_cnt = 0
        self.free_queue.extend(blocks)
        return blocks

    def _check_release(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block, releases in Counter(blocks).items():
            self._check_usable(block)
            if releases > block.ref_cnt:
                raise ValueError(
                    f"block {block.block_id} is released {releases} times; "
                    f"its ref_cnt is {block.ref_cnt}"
                )

    def _check_usable(self, block: KVCacheBlock) -> None:
        if block.block_id >= len(self.blocks) or self.blocks[block.block_id] is not block:
            raise ValueError(f"block {block.block_id} is not a block of this pool")
        if block.is_null:
            raise ValueError("block 0 is the null block; no sequence holds or frees it")


class BlockTable:
    """The block ids of many sequences, one row each: int32 [max_num_seqs, max_blocks_per_seq].

    Behind a row's own entries stands 0, the null block. Rows are copied whole, so what a former
    owner of a row left behind never shows.

    Source: ``vllm/v1/worker/block_table.py``, ``BlockTable``.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        shape = (max_num_seqs, max_blocks_per_seq)
        self.table = torch.zeros(shape, dtype=torch.int32, device="cpu")
        self.num_blocks = [0] * max_num_seqs

    def append_row(self, block_ids: list[int], row: int) -> None:
        """Add ids behind those of the row. Raises ValueError when they do not fit."""
        start, width = self.num_blocks[row], self.table.shape[1]
        stop = start + len(block_ids)
        if stop > width:
            raise ValueError(f"row {row} would have {stop} blocks; the table has {width} columns")
        self.table[row, start:stop] = torch.tensor(block_ids, dtype=torch.int32, device="cpu")
        self.num_blocks[row] = stop

    def add_row(self, block_ids: list[int], row: int) -> None:
        """Make these the ids of the row, whatever stood there. Raises as ``append_row``."""
        if len(block_ids) > self.table.shape[1]:
            raise ValueError(
                f"row {row} would have {len(block_ids)} blocks; "
                f"the table has {self.table.shape[1]} columns"
            )
        self.clear_row(row)
        self.append_row(block_ids, row)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another; the source stays as it is."""
        self.table[target] = self.table[source]
        self.num_blocks[target] = self.num_blocks[source]

    def swap_row(self, row: int, other: int) -> None:
        """Exchange two rows."""
        self.table[[row, other]] = self.table[[other, row]]
        self.num_blocks[row], self.num_blocks[other] = self.num_blocks[other], self.num_blocks[row]

    def clear_row(self, row: int) -> None:
        """Empty a row."""
        self.table[row] = 0
        self.num_blocks[row] = 0

    def gather(self, rows: list[int]) -> Tensor:
        """The named rows, in this order, as wide as the longest: int32 [len(rows), width]."""
        width = max(self.num_blocks[row] for row in rows)
        return self.table[rows, :width]


def compute_slot_mapping(
    block_table: Tensor, query_start_loc: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """The slot of every token of a batch.

    Shapes: ``block_table`` int32 [num_seqs, width]; ``query_start_loc`` int32 [num_seqs + 1], where
    each sequence's tokens begin; ``positions`` int64 [num_tokens]. Returns int64 [num_tokens].
    Tokens behind ``query_start_loc[-1]`` are padding and get slot -1.

    >>> table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    >>> compute_slot_mapping(table, torch.tensor([0, 2]), torch.tensor([0, 9]), 4).tolist()
    [20, 29]
    """
    rows = torch.arange(len(block_table), device=positions.device)
    rows = rows.repeat_interleave(
        query_start_loc.diff()
    )  # the row of each token that is not padding
    real = positions[: len(rows)]
    block_ids = block_table[rows, real // block_size].to(torch.int64)  # slots can exceed 32 bits
    slot_mapping = torch.full_like(positions, -1)
    slot_mapping[: len(rows)] = block_ids * block_size + real % block_size
    return slot_mapping


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store K and V of a batch's tokens in their slots; a token with slot -1 is not stored.

    Shapes: ``k_cache``, ``v_cache`` [num_blocks, block_size, num_kv_heads, head_dim], any strides;
    ``k``, ``v`` [num_tokens, num_kv_heads, head_dim]; ``slot_mapping`` int64 [num_tokens].
    """
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[real]
    block_size = k_cache.shape[1]
    block_ids, offsets = slots // block_size, slots % block_size
    k_cache[block_ids, offsets] = k[real]
    v_cache[block_ids, offsets] = v[real]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention of a mixed batch, prefill chunks and decodes together, through block tables.

    Shapes: ``q`` [num_tokens, num_heads, head_dim]; ``k_cache``, ``v_cache`` [num_blocks,
    block_size, num_kv_heads, head_dim]; ``block_table`` int32 [num_seqs, width]; ``seq_lens`` int32
    [num_seqs], each sequence's length with its new tokens; ``query_start_loc`` int32 [num_seqs +
    1]. The queries of a sequence stand at its last positions. Returns the shape of ``q``; 0 for
    padding tokens.

    Once the blocks are gathered in the order of the tables, paging is over: what is left is
    attention over contiguous K and V, one sequence after another. Only slots of the sequence are
    looked at; the ones behind its end may hold anything, and a weight of 0 does not help, because 0
    times NaN is NaN.
    """
    block_size = k_cache.shape[1]
    num_blocks = (seq_lens + block_size - 1) // block_size  # of each sequence
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    blocks = block_table[columns < num_blocks[:, None]]  # row after row, without the padding
    keys = k_cache.index_select(0, blocks).flatten(0, 1)  # [slots of all sequences, heads, dim]
    values = v_cache.index_select(0, blocks).flatten(0, 1)
    out = torch.zeros_like(q)
    bounds = query_start_loc.tolist()
    starts = (num_blocks.cumsum(0) - num_blocks) * block_size
    for row, (start, seq_len) in enumerate(zip(starts.tolist(), seq_lens.tolist(), strict=True)):
        queries, slots = slice(bounds[row], bounds[row + 1]), slice(start, start + seq_len)
        out[queries] = attention(q[queries], keys[slots], values[slots], spec)
    return out


@dataclass(eq=False)
class PagedSequence(Sequence):
    """A sequence, its blocks in order, and its row of the block table."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    row: int = 0


class PagedKVCache(KVCache):
    """K and V in blocks that a pool hands out one at a time.

    ``k_cache`` and ``v_cache`` are [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
    """

    sequence_class = PagedSequence
    sequences: dict[SeqId, PagedSequence]

    def __init__(self, config: Config, pool: BlockPool) -> None:
        super().__init__(config)
        self.pool = pool
        self.block_table = BlockTable(config.max_num_seqs, self._num_blocks(config.max_seq_len))
        self.rows: list[PagedSequence] = []  # rows[i].row == i; no hole between them
        slots = (len(pool.blocks), config.block_size)
        shape = (config.num_layers, *slots, config.num_kv_heads, config.head_dim)
        fill = math.nan if config.poison else 0.0
        self.k_cache = torch.full(shape, fill, dtype=config.dtype, device=config.device)
        self.v_cache = self.k_cache.clone()

    def block_ids(self, seq_id: SeqId) -> list[int]:
        """The blocks of a sequence, in the order of its tokens."""
        return [block.block_id for block in self._sequence(seq_id).blocks]

    def ref_cnts(self, seq_id: SeqId) -> list[int]:
        """For each block of a sequence, how many tables name it."""
        return [block.ref_cnt for block in self._sequence(seq_id).blocks]

    def need(self, token_ids: Iterable[int], n: int) -> tuple[int, int]:
        """Nothing is computed before, and n tokens fill ceil(n / block_size) blocks."""
        self._check_need(n)
        return 0, self._num_blocks(n)

    def _check_need(self, n: int) -> None:
        if whole_number(n, "n") < 0:
            raise ValueError(f"need of {n} tokens; n is 0 or more")

    def usage(self) -> Usage:
        """Reserved are whole blocks, the empty end of each sequence's last block among them."""
        block_size, sequences = self.config.block_size, self.sequences.values()
        return Usage(
            total=(len(self.pool.blocks) - 1) * block_size,
            used=sum(s.num_computed_tokens for s in sequences),
            reserved=sum(len(s.blocks) for s in sequences) * block_size,
        )

    def __repr__(self) -> str:
        """The pool in words: ``[0:null 1:A 2:A 3:free]``."""
        owners: dict[int, list[str]] = {}
        for sequence in self.sequences.values():
            for block in sequence.blocks:
                owners.setdefault(block.block_id, []).append(str(sequence.seq_id))
        words = [
            f"{block_id}:{','.join(owners.get(block_id, ['free']))}"
            for block_id in range(1, len(self.pool.blocks))
        ]
        return f"[{' '.join(['0:null', *words])}]"

    def check_invariants(self) -> None:
        """I1 each block is in use or once in the free queue; I2 tables are as long as the lengths
        say; I3 each block in use stands in one table; I7 only computed tokens hold numbers."""
        super().check_invariants()
        blocks, free = self.pool.blocks, Counter(b.block_id for b in self.pool.free_queue)
        tables = Counter(b.block_id for s in self.sequences.values() for b in s.blocks)
        if free[0] or tables[0]:
            raise InvariantError(f"I1: the null block was handed out or freed: {self!r}")
        for block in blocks[1:]:
            uses, times_free = tables[block.block_id], free[block.block_id]
            if times_free != (block.ref_cnt == 0):
                raise InvariantError(
                    f"I1: block {block.block_id} has ref_cnt {block.ref_cnt} and stands "
                    f"{times_free} times in the free queue: {self!r}"
                )
            if block.ref_cnt != uses:
                raise InvariantError(
                    f"I3: block {block.block_id} has ref_cnt {block.ref_cnt} and stands in "
                    f"{uses} tables: {self!r}"
                )
        self._check_owners()
        for sequence in self.sequences.values():
            self._check_table(sequence)
        if self.config.poison and self.open_batch is None:
            k_cache, v_cache = self.k_cache.flatten(1, 2), self.v_cache.flatten(1, 2)
            check_poison(k_cache, v_cache, self._live_slots().flatten(), repr(self))

    def _live_slots(self) -> Tensor:
        """Which slots hold something of worth, the computed tokens: bool [num_blocks,
        block_size]."""
        block_size = self.config.block_size
        live = torch.zeros(len(self.pool.blocks), block_size, dtype=torch.bool, device="cpu")
        for sequence in self.sequences.values():
            ids = torch.tensor(self.block_ids(sequence.seq_id), dtype=torch.int64, device="cpu")
            positions = torch.arange(sequence.num_computed_tokens, device="cpu")
            live[ids[positions // block_size], positions % block_size] = True
        return live

    def _check_owners(self) -> None:
        for block in self.pool.blocks:
            if block.ref_cnt > 1:
                raise InvariantError(
                    f"I3: block {block.block_id} stands in {block.ref_cnt} tables: {self!r}"
                )

    def _check_table(self, sequence: PagedSequence) -> None:
        reserved = sequence.num_computed_tokens
        if self.open_batch is not None:
            reserved += self.open_batch.num_new_tokens.get(sequence.seq_id, 0)
        if len(sequence.blocks) != self._num_blocks(reserved):
            raise InvariantError(
                f"I2: sequence {sequence.seq_id!r} has {len(sequence.blocks)} blocks for "
                f"{reserved} tokens: {self!r}"
            )
        row = self.block_table.table[sequence.row]
        ids = self.block_ids(sequence.seq_id)
        if row[: len(ids)].tolist() != ids or row[len(ids) :].any():
            raise InvariantError(
                f"I2: row {sequence.row} of the block table is {row.tolist()}, but sequence "
                f"{sequence.seq_id!r} has blocks {ids}: {self!r}"
            )

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.config.block_size)

    def _begin(self, sequence: PagedSequence) -> None:
        sequence.row = len(self.rows)
        self.rows.append(sequence)

    def _take(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        missing = self._num_missing_blocks(num_new_tokens)
        new_blocks = iter(self._get_new_blocks(sum(missing.values())))
        for seq_id, count in missing.items():
            sequence = self.sequences[seq_id]
            opened = [next(new_blocks) for _ in range(count)]
            sequence.blocks += opened
            self.block_table.append_row([block.block_id for block in opened], sequence.row)

    def _get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        return self.pool.get_new_blocks(n)

    def _num_missing_blocks(self, num_new_tokens: Mapping[SeqId, int]) -> dict[SeqId, int]:
        """How many blocks each sequence lacks for its next n tokens."""
        missing = {}
        for seq_id, n in num_new_tokens.items():
            sequence = self.sequences[seq_id]
            num_blocks = self._num_blocks(sequence.num_computed_tokens + n)
            missing[seq_id] = num_blocks - len(sequence.blocks)
        return missing

    def _address(
        self, seq_ids: list[SeqId], query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = [self.sequences[seq_id].row for seq_id in seq_ids]
        table = self.block_table.gather(rows).to(positions.device)
        slots = compute_slot_mapping(table, query_start_loc, positions, self.config.block_size)
        return table, slots

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        write_kv(k_cache, v_cache, k, v, batch.slot_mapping)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            self.config.layer_specs[layer],
        )

    def _abort(self, batch: Batch) -> None:
        if self.config.poison:
            poison(self.k_cache.flatten(1, 2), self.v_cache.flatten(1, 2), batch.slot_mapping)
        opened: list[KVCacheBlock] = []
        for seq_id in batch.num_new_tokens:
            sequence = self.sequences[seq_id]
            kept = self._num_blocks(sequence.num_computed_tokens)
            opened += sequence.blocks[kept:]
            del sequence.blocks[kept:]
            self.block_table.add_row(self.block_ids(seq_id), sequence.row)
        self._release(opened)

    def _end(self, sequence: PagedSequence) -> None:
        self._release(sequence.blocks)
        last = self.rows.pop()
        if last is not sequence:  # the last row fills the hole
            self.block_table.move_row(last.row, sequence.row)
            self.rows[sequence.row] = last
            last.row = sequence.row
        self.block_table.clear_row(len(self.rows))

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks, the last one first: it is the first to be used again."""
        dead = self.pool.free_blocks(reversed(blocks))
        self._kill(dead)

    def _kill(self, blocks: list[KVCacheBlock]) -> None:
        """The contents of these blocks are dead; with poison on, that shows."""
        if self.config.poison:
            block_size = self.config.block_size
            slots = [block.block_id * block_size + i for block in blocks for i in range(block_size)]
            dead_slots = torch.tensor(slots, dtype=torch.int64, device=self.k_cache.device)
            poison(self.k_cache.flatten(1, 2), self.v_cache.flatten(1, 2), dead_slots)


def build_cache(config: Config) -> PagedKVCache:
    """A cache of ``config.num_blocks`` blocks, all free but block 0, which holds no sequence."""
    return PagedKVCache(config, BlockPool(config.num_blocks))
