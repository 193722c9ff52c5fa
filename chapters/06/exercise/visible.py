# Chapter 06, given: pagedattn/manager/visible.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 60ad141e3a1342036f5d7b83605e670dd90b322588e690412be8a322851bd4ca

"""The part of a block table that a window reaches."""

from __future__ import annotations

import torch
from torch import Tensor


def without_skipped_blocks(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, window: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Tables and lengths that begin with the first block that a query can see.

    Shapes as in ``paged_attention``. The blocks before it may have been given back, and must not be
    read. Attention looks at distances between tokens, not at positions, so it is the same.
    """
    first_query = seq_lens - query_start_loc.diff()
    skipped = (first_query - window + 1).clamp(min=0) // block_size  # whole blocks of each sequence
    columns = torch.arange(block_table.shape[1], device=block_table.device) + skipped[:, None]
    columns = columns.clamp(max=block_table.shape[1] - 1)
    return block_table.gather(1, columns), seq_lens - skipped * block_size
