# Chapter 05, yours to write: pagedattn/kernels/slot_mapping.py without the bodies of its tasks.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 ae300f7909da0f428b96511847dd23716076d74d54810ab0904c62ea0d44af35

"""From position to slot, on the device: which slot each token of a batch is stored in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.whole_number import at_least_1, whole_number

from .checks import INTEGERS, check_contiguous, check_device, check_dtype, check_shape

TOKENS = 256  # of one program


def compute_slot_mapping(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    out: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> Tensor:
    """The slot of every token of a batch, and -1 for padding. One launch, no synchronisation.

    Shapes: ``block_table`` int32 [num_seqs, width], any strides; ``query_start_loc`` int32
    [num_seqs + 1], where each sequence's tokens begin; ``positions`` int64 [num_tokens]; int64
    tables and int32 positions are taken, too. Returns int64 [num_tokens], or ``out``, a buffer that
    may be longer. Tokens behind ``query_start_loc[-1]`` are padding: they get slot -1, up to the
    end of the buffer. So does a position for which its row has no column, a negative one too: no
    block is there.

    In context parallelism ``cp_world_size`` ranks share the tokens of every sequence, dealt out in
    turn, ``cp_interleave`` at a time. A token of another rank than ``cp_rank`` gets slot -1; of the
    others, the n-th lies where the n-th of a sequence would lie if there were one rank.

    Raises ValueError for a wrong type, shape, device or block size, a rank outside its world, and
    an interleave that does not divide the block size.

    Source: ``vllm/v1/worker/block_table.py``, ``BlockTable.compute_slot_mapping``.
    """
    block_size = at_least_1(block_size, "block_size")
    _check(block_table, query_start_loc, positions, out)
    _check_ranks(cp_world_size, cp_rank, cp_interleave, block_size)
    num_seqs, width = block_table.shape
    if out is None:
        out = torch.empty_like(positions, dtype=torch.int64)
    if len(out):
        _slot_mapping_kernel[(triton.cdiv(len(out), TOKENS),)](
            block_table,
            query_start_loc,
            positions,
            out,
            num_seqs,
            width,
            block_table.stride(),
            len(positions),
            len(out),
            num_seqs.bit_length(),
            BLOCK_SIZE=block_size,
            WORLD_SIZE=cp_world_size,
            RANK=cp_rank,
            INTERLEAVE=cp_interleave,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return out


def _check(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor | None,
) -> None:
    check_shape("block_table", block_table, ("num_seqs", "width"))
    check_shape("query_start_loc", query_start_loc, (len(block_table) + 1,))
    check_shape("positions", positions, ("num_tokens",))
    check_dtype("block_table", block_table, *INTEGERS)
    check_dtype("query_start_loc", query_start_loc, *INTEGERS)
    check_dtype("positions", positions, *INTEGERS)
    check_device(
        block_table=block_table, query_start_loc=query_start_loc, positions=positions, out=out
    )
    check_contiguous(query_start_loc=query_start_loc, positions=positions, out=out)
    if out is not None:
        check_shape("out", out, ("num_tokens",))
        check_dtype("out", out, torch.int64)
        if len(out) < len(positions):
            raise ValueError(f"out has {len(out)} places for {len(positions)} tokens")


def _check_ranks(world_size: int, rank: int, interleave: int, block_size: int) -> None:
    if not 0 <= whole_number(rank, "cp_rank") < at_least_1(world_size, "cp_world_size"):
        raise ValueError(f"cp_rank is {rank}; {world_size} ranks are numbered from 0")
    if block_size % at_least_1(interleave, "cp_interleave"):
        raise ValueError(f"cp_interleave {interleave} does not divide block_size {block_size}")


@triton.jit
def _local_position(
    position, WORLD_SIZE: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr
):
    """How many of its sequence's tokens this rank keeps before a token; below 0 for a token of
    another rank, and for a position below 0."""
    if WORLD_SIZE > 1:
        turn = position // INTERLEAVE
        mine = (position >= 0) & (turn % WORLD_SIZE == RANK)
        position = turn // WORLD_SIZE * INTERLEAVE + position % INTERLEAVE
        position = tl.where(mine, position, -1)
    return position


# One compilation for all sizes of a batch.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "num_slots", "num_steps"])
def _slot_mapping_kernel(
    block_table,
    query_start_loc,
    positions,
    slot_mapping,
    num_seqs,
    width,
    table_strides,
    num_tokens,
    num_slots,
    num_steps,
    BLOCK_SIZE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A program has some tokens of the batch, of whatever sequences. Which ones, each token finds
    by bisection: its row is the last one that begins at or before it. What decides about its slot
    is its ``_local_position``."""
    raise NotImplementedError(
        "task 5.1: each token bisects query_start_loc for its row, num_steps times; then, with its "
        "_local_position, slot = block * BLOCK_SIZE + offset, in 64 bits, and -1 for padding"
    )
