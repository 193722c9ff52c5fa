# Chapter 05, given: pagedattn/kernels/buffers.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 3d96001e42d3b92d1f80129f6cebdf26529dae700ac7ae944a9caf8746656b8a

"""What a plan consists of: buffers that stay where they are, and for which machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shared import SharedPrefixes


@dataclass(frozen=True)
class AttentionPlan:
    """Buffers of a plan. ``decode_rows`` and ``prefill_rows`` are the rows of a tile: its queries
    times the query heads that share a KV head (``group``).

    ``decode_items``, ``prefill_items`` int32 [most items, 8]: the row; its first token in the
    batch, how many queries, the position of the first; the first key and the end of the keys; how
    many splits the row has, and which item is its first. ``num_items`` int32 [2]: decode items,
    prefill items. ``partial_out`` [most decode items, num_kv_heads, decode_rows, head_dim] and
    ``partial_lse``: what a split found. ``arrivals`` int32 [max_rows, num_kv_heads]: how many
    splits of a row are done. ``share_start`` int32 [programs + 1]: the first decode item of each
    program that has a share of them; empty if each item has a program of its own. ``shared``: what
    rows have in common; None if that is not looked for.
    """

    max_tokens: int
    group: int
    window: int | None
    decode_rows: int
    prefill_rows: int
    target_splits: int
    decode_items: Tensor
    prefill_items: Tensor
    num_items: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    share_start: Tensor
    batch_invariant: bool
    shared: SharedPrefixes | None

    @property
    def max_rows(self) -> int:
        return len(self.arrivals)

    @property
    def is_shared_out(self) -> bool:
        """Whether programs have even shares of the decode items."""
        return len(self.share_start) > 0

    @property
    def clamped_window(self) -> int | None:
        """As kernels take it. So wide a window hides no key, and positions less it fit 32 bits."""
        return None if self.window is None else min(self.window, 2**30)

    @property
    def decode_queries(self) -> int:
        """A row with so many queries or fewer is a decode row."""
        return self.decode_rows // self.group

    @property
    def prefill_queries(self) -> int:
        """Queries of a prefill tile."""
        return self.prefill_rows // self.group


def num_multiprocessors(device: torch.device) -> int:
    """One in the interpreter, which runs one program after another; an H200's on "meta"."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 1
