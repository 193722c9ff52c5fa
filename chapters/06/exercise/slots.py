# Chapter 06, given: pagedattn/manager/slots.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 52a17013e7ea15836359d604d8e40f6374d7280b64e3eceaa50f4422ac8bd3f0

"""Slots, when several ranks share the tokens of every sequence.

In context parallelism each rank keeps a part of every sequence. The tokens are dealt out in turn,
``interleave`` at a time: with 2 ranks and 2 at a time, rank 0 has the positions 0 1 4 5 8 9 … and
rank 1 has 2 3 6 7 …. All ranks have the same block table. Its block ``b`` is a block of
``block_size`` slots on each of them, so together they keep ``block_size * world_size`` tokens in
it.

One thought is enough for the arithmetic: count only the tokens that a rank keeps. Its n-th token
lies where the n-th token of a sequence would lie if there were no other rank.

Source: ``vllm/v1/worker/block_table.py``, ``BlockTable.compute_slot_mapping``;
``vllm/v1/attention/backends/utils.py``, ``get_dcp_local_seq_lens``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.whole_number import at_least_1, whole_number


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """The ranks that share the tokens of every sequence, and which of them this is.

    There are ``pcp_world_size`` ranks of prefill context parallelism, each of which is
    ``dcp_world_size`` ranks of decode context parallelism. ``interleave`` is in tokens. Raises
    ValueError for a size or an interleave below 1, and for a rank outside its world.
    """

    dcp_world_size: int = 1
    dcp_rank: int = 0
    pcp_world_size: int = 1
    pcp_rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        at_least_1(self.interleave, "interleave")
        for kind in ("dcp", "pcp"):
            size = at_least_1(getattr(self, f"{kind}_world_size"), f"{kind}_world_size")
            rank = whole_number(getattr(self, f"{kind}_rank"), f"{kind}_rank")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank is {rank}; {size} ranks are numbered from 0")

    @property
    def world_size(self) -> int:
        """How many ranks share a sequence."""
        return self.pcp_world_size * self.dcp_world_size

    @property
    def rank(self) -> int:
        """This rank's number among all of them."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank

    def check_block_size(self, block_size: int) -> None:
        """Raises ValueError if ``interleave`` does not divide it: a turn of this rank would then
        begin in one block and end in the next, where the other ranks do not follow."""
        if at_least_1(block_size, "block_size") % self.interleave:
            raise ValueError(
                f"interleave {self.interleave} does not divide block_size {block_size}"
            )

    def local_positions(self, positions: Tensor) -> Tensor:
        """How many tokens this rank keeps before each of these; -1 for a token of another rank.

        A position below 0 is no token's and stays below 0. Same shape and type.

        >>> rank_0_of_2 = ContextParallel(dcp_world_size=2, interleave=2)
        >>> rank_0_of_2.local_positions(torch.arange(9)).tolist()
        [0, 1, -1, -1, 2, 3, -1, -1, 4]
        """
        if self.world_size == 1:
            return positions
        turn, place = positions // self.interleave, positions % self.interleave
        local = turn // self.world_size * self.interleave + place
        return local.where(turn % self.world_size == self.rank, -1)

    def local_seq_lens(self, seq_lens: Tensor) -> Tensor:
        """How many of each sequence's tokens this rank keeps. Same shape and type.

        >>> rank_1_of_2 = ContextParallel(dcp_world_size=2, dcp_rank=1, interleave=2)
        >>> rank_1_of_2.local_seq_lens(torch.tensor([2, 3, 4, 9])).tolist()
        [0, 1, 2, 4]
        """
        in_rounds = seq_lens // (self.interleave * self.world_size) * self.interleave
        rest = seq_lens - in_rounds * self.world_size - self.rank * self.interleave
        return in_rounds + rest.clamp(0, self.interleave)


def compute_slot_mapping(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    context_parallel: ContextParallel | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of every token of a batch on this rank, and -1 where it has none. Does not wait for
    the device.

    Shapes: ``block_table`` int32 [num_seqs, width]; ``query_start_loc`` int32 [num_seqs + 1], where
    each sequence's tokens begin; ``positions`` int64 [num_tokens], in the whole sequence. Returns
    int64 [num_tokens], or ``out``, an int64 buffer that may be longer. No slot have: tokens of
    other ranks; padding, which is everything behind ``query_start_loc[-1]`` up to the end of the
    buffer; a position for which its row has no column, and one below 0.

    Raises ValueError if ``interleave`` does not divide ``block_size``, if ``query_start_loc`` has
    another length, or if ``out`` is too short or of another type. Then ``out`` is as it was.

    >>> table, starts = torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([0, 9])
    >>> rank_0_of_2 = ContextParallel(dcp_world_size=2, interleave=2)
    >>> positions = torch.arange(9)
    >>> compute_slot_mapping(table, starts, positions, 4, context_parallel=rank_0_of_2).tolist()
    [20, 21, -1, -1, 22, 23, -1, -1, 8]
    """
    at_least_1(block_size, "block_size")
    num_seqs, width = block_table.shape
    num_tokens = len(positions)
    if len(query_start_loc) != num_seqs + 1:
        raise ValueError(
            f"query_start_loc has {len(query_start_loc)} numbers; {num_seqs} sequences need "
            f"{num_seqs + 1}"
        )
    if out is None:
        out = torch.empty_like(positions, dtype=torch.int64)
    elif out.dtype != torch.int64:
        raise ValueError(f"out is {out.dtype}; slots are torch.int64")
    elif len(out) < num_tokens:
        raise ValueError(f"out has {len(out)} places for {num_tokens} tokens")
    if context_parallel is not None:
        context_parallel.check_block_size(block_size)
        positions = context_parallel.local_positions(positions)
    out[num_tokens:] = -1
    if num_seqs == 0 or width == 0:
        return out.fill_(-1)
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=positions.device)
    # A token's row: so many sequences end at or before it.
    rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    columns = positions // block_size
    real = (rows < num_seqs) & (positions >= 0) & (columns < width)
    blocks = block_table[rows.where(real, 0), columns.where(real, 0)]
    slots = blocks.to(torch.int64) * block_size + positions % block_size  # can exceed 32 bits
    out[:num_tokens] = slots.where(real, -1)
    return out
