# Chapter 05, given: pagedattn/kernels/checks.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 cac322d86b7a4bbc1c3903ce8c760a16196dfe12eb9d57754f90c829cb656797

"""What must be true before a launch: on a GPU a wrong address gives no error, but wrong numbers.

Every launch waits for these, and where there is no graph the GPU waits as well: so they are plain
loops, and ask for ``shape[0]``, for which ``len`` of a tensor takes four times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.whole_number import at_least_1

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def check_shape(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """Raises ValueError unless the tensor has this shape; a word stands for any number."""
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for size, want in zip(sizes, shape, strict=False):
        if size != want and type(want) is not str:
            fits = False
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(sizes)}; it must be [{wanted}]")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raises ValueError unless the tensor has one of these types."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, allowed))}")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor with gaps; None is no tensor."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: its strides are {tensor.stride()}")


def check_device(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all of these tensors are on one device; None is no tensor."""
    first = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ValueError(f"{name} is on {tensor.device}, {first[0]} on {first[1]}")


def check_block_table(
    block_table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """Every token of every sequence lies in a block of the pool. For debugging: it waits for the
    device.

    Shapes: ``block_table`` [num_seqs, width]; ``seq_lens`` [num_seqs]. Columns behind a sequence's
    last block are not looked at, as no kernel does. Raises ValueError for a sequence that needs
    more columns than there are, and for an id outside 0 .. num_blocks - 1: it names row and column;
    and for a wrong type, shape, device or block size.
    """
    block_size = at_least_1(block_size, "block_size")
    check_shape("block_table", block_table, ("num_seqs", "width"))
    check_shape("seq_lens", seq_lens, (len(block_table),))
    check_dtype("block_table", block_table, *INTEGERS)
    check_dtype("seq_lens", seq_lens, *INTEGERS)
    check_device(block_table=block_table, seq_lens=seq_lens)
    width = block_table.shape[1]
    needed = (seq_lens.long() + block_size - 1) // block_size  # blocks of each sequence
    too_long = ((needed > width) | (seq_lens < 0)).nonzero()
    if len(too_long):
        row = int(too_long[0])
        raise ValueError(
            f"row {row}: seq_lens is {int(seq_lens[row])}, which must lie between 0 and the "
            f"{width * block_size} slots of {width} columns of {block_size}"
        )
    columns = torch.arange(width, device=block_table.device)
    outside = (block_table < 0) | (block_table >= num_blocks)
    wrong = (outside & (columns < needed[:, None])).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"row {row}, column {column}: block_table has block {int(block_table[row, column])}; "
            f"the pool has blocks 0 to {num_blocks - 1}"
        )
