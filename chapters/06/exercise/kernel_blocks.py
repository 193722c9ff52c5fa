# Chapter 06, given: pagedattn/manager/kernel_blocks.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 b3e9e8ede61e2e4a7dddc1786a0072e8a35bb833230d3c618f8e5ace77361643

"""Kernel blocks: what an attention kernel takes for a block may be smaller than the manager's.

Groups of unlike layers get pages of one size, and so block sizes that no kernel asked for. A
manager's block of ``block_size`` tokens then is ``r`` kernel blocks in a row: block ``b`` is the
kernel blocks ``b * r`` to ``b * r + r - 1``. No byte moves; the same pages are counted in smaller
units.

Source: ``vllm/v1/worker/block_table.py``, ``map_to_kernel_blocks``;
``vllm/v1/worker/utils.py``, ``select_common_block_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedattn.whole_number import at_least_1

from .groups import UniformTypeKVCacheSpecs
from .page import KVCacheSpec
from .specs import MambaSpec


@dataclass(frozen=True)
class MultipleOf:
    """Any block size that ``base`` tokens divide. Raises ValueError for a base below 1."""

    base: int

    def __post_init__(self) -> None:
        at_least_1(self.base, "the base of MultipleOf")


def select_kernel_block_size(
    spec: KVCacheSpec, supported_sizes: Sequence[Sequence[int | MultipleOf]]
) -> int:
    """The kernel block size for a group's layers, in tokens.

    ``supported_sizes`` has one list for each attention backend that runs a layer of the group. If
    all of them take ``spec.block_size``, that is the size. Otherwise it is the largest that some
    backend names, that divides the block size and that all take. A Mamba layer's state cannot be
    split: its block stays whole.

    Raises ValueError if there is no such size.

    >>> import torch
    >>> from pagedattn.manager import FullAttentionSpec
    >>> spec = FullAttentionSpec(block_size=48, num_kv_heads=1, head_size=8, dtype=torch.float16)
    >>> select_kernel_block_size(spec, [[16, 32, 64], [MultipleOf(8)]])
    16
    """
    block_size = spec.block_size
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.specs[0][1]  # all are of one kind
    if isinstance(spec, MambaSpec) or _all_take(supported_sizes, block_size):
        return block_size
    named = {size for sizes in supported_sizes for size in sizes if isinstance(size, int)}
    for size in sorted(named, reverse=True):
        if block_size % at_least_1(size, "a block size") == 0 and _all_take(supported_sizes, size):
            return size
    lists = ", ".join(str(list(sizes)) for sizes in supported_sizes)
    raise ValueError(
        f"no kernel block size divides block_size {block_size} and suits all backends, which take "
        f"{lists}"
    )


def _all_take(supported_sizes: Sequence[Sequence[int | MultipleOf]], block_size: int) -> bool:
    return all(any(_takes(size, block_size) for size in sizes) for sizes in supported_sizes)


def _takes(size: int | MultipleOf, block_size: int) -> bool:
    return block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size


def get_blocks_per_kv_block(block_size: int, kernel_block_size: int) -> int:
    """How many kernel blocks one block of the manager is. Raises ValueError unless it is a whole
    number of them."""
    at_least_1(block_size, "block_size")
    if block_size % at_least_1(kernel_block_size, "kernel_block_size"):
        raise ValueError(
            f"kernel_block_size {kernel_block_size} does not divide block_size {block_size}"
        )
    return block_size // kernel_block_size


def map_to_kernel_blocks(block_ids: ArrayLike, blocks_per_kv_block: int) -> NDArray[np.int64]:
    """The kernel blocks of some blocks: ids [num_blocks] -> [num_blocks * blocks_per_kv_block].

    Raises ValueError for a ratio below 1.

    >>> map_to_kernel_blocks([5, 2], 3).tolist()
    [15, 16, 17, 6, 7, 8]
    """
    parts = np.arange(at_least_1(blocks_per_kv_block, "blocks_per_kv_block"), dtype=np.int64)
    first = np.asarray(block_ids, dtype=np.int64) * blocks_per_kv_block
    return (first[:, None] + parts).ravel()
