# Chapter 05, given: pagedattn/kernels/buffers.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 df53a5c4384ee25cc2e8fb679fbacd84fc5a06154614024be0a5b4612ff706f9

"""What a plan consists of: buffers that stay where they are, and for which machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .shared import SharedPrefixes


class Layer(NamedTuple):
    """What the attention of one layer reads and writes, in one step: ``paged_attention``'s."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    out: Tensor
    lse: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


Launch = Callable[[Layer], None]


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

    ``launches``: what ``paged_attention`` has decided, for each form of a layer that it has seen.
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
    launches: dict[object, list[Launch]] = field(init=False, repr=False, default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        """A copy has buffers of its own, so it decides anew."""
        return vars(self) | {"launches": {}}

    @property
    def max_rows(self) -> int:
        return self.arrivals.shape[0]

    @property
    def is_shared_out(self) -> bool:
        """Whether programs have even shares of the decode items."""
        return self.share_start.shape[0] > 0

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


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have of it; off a GPU, an H200's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return 227 * 1024
