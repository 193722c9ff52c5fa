# Chapter 06, given: pagedattn/manager/block_table.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 3c37b2c1a248540aea63faa4aaf1d80116d894f3eeb74e5004825c95418e7b97

"""Block tables of a running model: one a group, in kernel blocks, here and on the device.

The manager knows blocks by their ids, the kernels read a table on the device. In between stands
this: rows that change a little each step, a copy of those in use, and the slots of the step's
tokens.

Source: ``vllm/v1/worker/block_table.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn import prefix
from pagedattn.whole_number import at_least_1

from .kernel_blocks import get_blocks_per_kv_block, map_to_kernel_blocks
from .page import ceil_div
from .slots import ContextParallel, compute_slot_mapping

MAX_INT32 = 2**31 - 1
ALIGNMENT = 128  # tokens: some attention kernels read the blocks of so many at once


class BlockTable(prefix.BlockTable):
    """Chapter 02's table, in kernel blocks, with a copy on the device and a buffer for slots.

    Callers give the manager's block ids. ``table``, int32 [max_num_seqs, max_blocks_per_seq * r],
    and ``num_blocks`` hold kernel blocks, ``r = block_size // kernel_block_size`` for each;
    ``device_table`` is what was last committed of them. ``slot_mapping`` is int64
    [max_num_batched_tokens] on the device.

    Raises ValueError for a size below 1, a kernel block size that does not divide ``block_size``,
    or an interleave that does not.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        max_num_batched_tokens: int,
        *,
        kernel_block_size: int | None = None,
        context_parallel: ContextParallel | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = at_least_1(block_size, "block_size")
        self.kernel_block_size = block_size if kernel_block_size is None else kernel_block_size
        ratio = get_blocks_per_kv_block(block_size, self.kernel_block_size)
        self.blocks_per_kv_block = ratio
        self.context_parallel = context_parallel or ContextParallel()
        self.context_parallel.check_block_size(block_size)
        num_slots = at_least_1(max_num_batched_tokens, "max_num_batched_tokens")
        super().__init__(
            at_least_1(max_num_seqs, "max_num_seqs"),
            at_least_1(max_blocks_per_seq, "max_blocks_per_seq") * ratio,
        )
        self._rows = self.table.numpy()  # the same memory; single entries are written faster
        self.device_table = torch.zeros_like(self.table, device=device)
        self.slot_mapping = torch.full((num_slots,), -1, dtype=torch.int64, device=device)

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks behind those of the row; none is no change.

        Raises ValueError for a row that is not there, for blocks that do not fit into it, and for
        an id below 0 or whose kernel blocks have no 32-bit number. Then nothing is changed.
        """
        self.check_append(block_ids, row)
        self._append(block_ids, row)

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Make these the blocks of the row, whatever stood there. Raises as ``append_row``."""
        self.check_add(block_ids, row)
        self.clear_row(row)
        self._append(block_ids, row)

    def check_append(self, block_ids: Sequence[int], row: int) -> None:
        """Raises what ``append_row`` would raise."""
        self._check_rows(row)
        self._check_blocks(block_ids, row, self.num_blocks[row])

    def check_add(self, block_ids: Sequence[int], row: int) -> None:
        """Raises what ``add_row`` would raise."""
        self._check_rows(row)
        self._check_blocks(block_ids, row, 0)

    def clear_row(self, row: int) -> None:
        """Empty a row. Raises ValueError for one that is not there; so do the next two."""
        self._check_rows(row)
        self._rows[row, : self.num_blocks[row]] = 0  # behind them stands 0 already
        self.num_blocks[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another; the source stays as it is."""
        self._check_rows(source, target)
        super().move_row(source, target)

    def swap_row(self, row: int, other: int) -> None:
        """Exchange two rows."""
        self._check_rows(row, other)
        super().swap_row(row, other)

    def clear(self) -> None:
        """Empty all rows, here and on the device."""
        self.table.zero_()
        self.device_table.zero_()
        self.num_blocks = [0] * len(self.num_blocks)

    def commit_block_table(self, num_seqs: int) -> None:
        """Copy the first ``num_seqs`` rows to the device. Raises ValueError for more than there
        are."""
        self._check_num_seqs(num_seqs)
        self.device_table[:num_seqs].copy_(self.table[:num_seqs])

    def compute_slot_mapping(
        self, num_seqs: int, query_start_loc: Tensor, positions: Tensor
    ) -> Tensor:
        """Fill ``slot_mapping`` with the slots of a step's tokens on this rank, and return it.

        The sequences are the first ``num_seqs`` rows as last committed. On the device:
        ``query_start_loc`` int32 [num_seqs + 1], or longer; ``positions`` int64 [num_tokens].
        Everything without a slot gets -1, up to the end of the buffer. Raises ValueError for more
        sequences or tokens than there is room for; then the buffer is as it was.
        """
        self._check_num_seqs(num_seqs)
        # A rank's tokens fill its blocks one after another, however the kernel cuts them up.
        return compute_slot_mapping(
            self.device_table[:num_seqs],
            query_start_loc[: num_seqs + 1],
            self.context_parallel.local_positions(positions),
            self.kernel_block_size,
            out=self.slot_mapping,
        )

    def _append(self, block_ids: Sequence[int], row: int) -> None:
        start, ratio = self.num_blocks[row], self.blocks_per_kv_block
        stop = start + len(block_ids) * ratio
        if ratio > 1:
            self._rows[row, start:stop] = map_to_kernel_blocks(block_ids, ratio)
        else:
            self._rows[row, start:stop] = block_ids
        self.num_blocks[row] = stop

    def _check_blocks(self, block_ids: Sequence[int], row: int, start: int) -> None:
        if not block_ids:
            return
        ratio, width = self.blocks_per_kv_block, self.table.shape[1]
        stop = start + len(block_ids) * ratio
        if stop > width:
            raise ValueError(
                f"row {row} would have {stop // ratio} blocks; the table has room for "
                f"{width // ratio} a row"
            )
        lowest, highest, limit = min(block_ids), max(block_ids), (MAX_INT32 + 1) // ratio - 1
        if lowest < 0 or highest > limit:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"block {wrong} for row {row}; ids go from 0 to {limit}")

    def _check_rows(self, *rows: int) -> None:
        for row in rows:
            if not 0 <= row < len(self.num_blocks):
                raise ValueError(f"row {row}; the table has rows 0 to {len(self.num_blocks) - 1}")

    def _check_num_seqs(self, num_seqs: int) -> None:
        if not 0 <= num_seqs <= len(self.num_blocks):
            raise ValueError(f"{num_seqs} sequences; the table has {len(self.num_blocks)} rows")


class MultiGroupBlockTable:
    """A block table for each KV cache group; a sequence has the same row in all of them.

    ``block_sizes`` and ``kernel_block_sizes`` (tokens), and ``max_num_blocks`` (of the manager's
    blocks, a sequence) have one number for each group. Without ``max_num_blocks`` a row has room
    for ``max_model_len`` tokens spread over all ranks, in a multiple of ``128 // block_size``
    blocks.

    Raises ValueError for lists of different lengths, and as ``BlockTable`` does. Every change
    happens in all groups or in none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        *,
        max_num_blocks: Sequence[int] | None = None,
        context_parallel: ContextParallel | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        context_parallel = context_parallel or ContextParallel()
        if kernel_block_sizes is None:
            kernel_block_sizes = block_sizes
        if max_num_blocks is None:
            at_least_1(max_model_len, "max_model_len")
            max_num_blocks = [
                _default_width(max_model_len, block_size, context_parallel.world_size)
                for block_size in block_sizes
            ]
        _check_length("kernel_block_sizes", len(kernel_block_sizes), len(block_sizes))
        _check_length("max_num_blocks", len(max_num_blocks), len(block_sizes))
        self.block_tables = tuple(
            BlockTable(
                max_num_seqs,
                width,
                block_size,
                max_num_batched_tokens,
                kernel_block_size=kernel_block_size,
                context_parallel=context_parallel,
                device=device,
            )
            for block_size, kernel_block_size, width in zip(
                block_sizes, kernel_block_sizes, max_num_blocks, strict=True
            )
        )

    def __getitem__(self, group_id: int) -> BlockTable:
        return self.block_tables[group_id]

    def __len__(self) -> int:
        return len(self.block_tables)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Add each group's blocks behind those of the row. Raises as ``BlockTable.append_row``,
        and unless there is one list for each group."""
        _check_length("block_ids", len(block_ids), len(self))
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.check_append(ids, row)
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(ids, row)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """Make these each group's blocks of the row. Raises as ``append_row``."""
        _check_length("block_ids", len(block_ids), len(self))
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.check_add(ids, row)
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.add_row(ids, row)

    def clear_row(self, row: int) -> None:
        """Empty a row in all groups."""
        for table in self.block_tables:
            table.clear_row(row)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another in all groups; the source stays as it is."""
        for table in self.block_tables:
            table.move_row(source, target)

    def swap_row(self, row: int, other: int) -> None:
        """Exchange two rows in all groups."""
        for table in self.block_tables:
            table.swap_row(row, other)

    def clear(self) -> None:
        """Empty all rows of all groups, here and on the device."""
        for table in self.block_tables:
            table.clear()

    def commit_block_table(self, num_seqs: int) -> None:
        """Copy the first ``num_seqs`` rows of all groups to the device."""
        for table in self.block_tables:
            table.commit_block_table(num_seqs)

    def compute_slot_mapping(
        self, num_seqs: int, query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Fill and return each group's ``slot_mapping``: see ``BlockTable``."""
        return tuple(
            table.compute_slot_mapping(num_seqs, query_start_loc, positions)
            for table in self.block_tables
        )


def _default_width(max_model_len: int, block_size: int, world_size: int) -> int:
    """Blocks a row, at most, when a sequence is spread over ``world_size`` ranks."""
    width = ceil_div(max_model_len, at_least_1(block_size, "block_size") * world_size)
    if block_size > ALIGNMENT:
        return width
    blocks = ALIGNMENT // block_size
    return ceil_div(width, blocks) * blocks


def _check_length(name: str, length: int, num_groups: int) -> None:
    if length != num_groups:
        raise ValueError(f"{name} has {length} entries for {num_groups} groups")
