"""From position to slot, on the device: which slot each token of a batch is stored in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.whole_number import at_least_1

from .checks import INTEGERS, check_contiguous, check_device, check_dtype, check_shape

TOKENS = 256  # of one program


def compute_slot_mapping(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of every token of a batch, and -1 for padding. One launch, no synchronisation.

    Shapes: ``block_table`` int32 [num_seqs, width], any strides; ``query_start_loc`` int32
    [num_seqs + 1], where each sequence's tokens begin; ``positions`` int64 [num_tokens]; int64
    tables and int32 positions are taken, too. Returns int64 [num_tokens], or ``out``, a buffer that
    may be longer. Tokens behind ``query_start_loc[-1]`` are padding: they get slot -1, up to the
    end of the buffer. So does a position for which its row has no column, a negative one too: no
    block is there.

    Raises ValueError for a wrong type, shape, device or block size.

    Source: ``vllm/v1/worker/block_table.py``, ``BlockTable.compute_slot_mapping``.
    """
    block_size = at_least_1(block_size, "block_size")
    _check(block_table, query_start_loc, positions, out)
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
    TOKENS: tl.constexpr,
):
    """A program has some tokens of the batch, of whatever sequences. Which ones, each token finds
    by bisection: its row is the last one that begins at or before it."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.zeros((TOKENS,), tl.int32)  # its first token stands at or before ours,
    end = row + num_seqs  # and that of this one behind it
    real = tokens < num_tokens
    real = real & (tokens < tl.load(query_start_loc + num_seqs))
    for _ in range(num_steps):
        middle = (row + end) // 2
        is_at_or_before = tl.load(query_start_loc + middle, mask=real, other=0) <= tokens
        row = tl.where(is_at_or_before, middle, row)
        end = tl.where(is_at_or_before, end, middle)

    position = tl.load(positions + tokens, mask=real, other=0).to(tl.int64)
    column = position // BLOCK_SIZE
    real = real & (position >= 0) & (column < width)
    at = row.to(tl.int64) * table_strides[0] + column * table_strides[1]
    block = tl.load(block_table + at, mask=real, other=0).to(tl.int64)  # slots can exceed 32 bits
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + tokens, tl.where(real, slot, -1), mask=tokens < num_slots)
