# Chapter 06, given: pagedattn/manager/cache_state.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 136be19dbf5524067e4306e5232c97e0e1e703a1babcb8cd9f08bd50d7121337

"""What a cache holds, in words and in slots, and what must be true of it between its verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedattn.cache import InvariantError, Usage
from pagedattn.poison import check_poison

from .keys import split_key
from .page import ceil_div

if TYPE_CHECKING:
    from .cache import HybridKVCache


def pool_in_words(cache: HybridKVCache) -> str:
    """Each block with its owners and their groups."""
    owners: dict[int, list[str]] = {}
    for seq_id in cache.seq_ids:
        for group, table in enumerate(cache.block_ids(seq_id)):
            for block_id in filter(None, table):
                owners.setdefault(block_id, []).append(f"{seq_id}/{group}")
    words = [
        f"{block_id}:{','.join(owners.get(block_id, ['free']))}"
        for block_id in range(1, len(cache.pool.blocks))
    ]
    return f"[{' '.join(['0:null', *words])}]"


def count_slots(cache: HybridKVCache) -> Usage:
    """Distinct slots: a block that several tables name is counted once, the null block never."""
    block_size = cache.config.block_size
    used: dict[int, int] = {}
    for sequence in cache.sequences.values():
        for table in cache.block_ids(sequence.seq_id):
            for index, block_id in enumerate(table):
                filled = sequence.num_computed_tokens - index * block_size
                used[block_id] = min(max(filled, 0), block_size)
    used.pop(0, None)
    return Usage(
        total=(len(cache.pool.blocks) - 1) * block_size,
        used=sum(used.values()),
        reserved=len(used) * block_size,
    )


def check_tables(cache: HybridKVCache) -> None:
    """I2: tables are as long as the lengths say, and rows agree with them."""
    for sequence in cache.sequences.values():
        reserved = sequence.num_computed_tokens
        if cache.open_batch is not None:
            reserved += cache.open_batch.num_new_tokens.get(sequence.seq_id, 0)
        length = ceil_div(reserved, cache.config.block_size)
        for group, table in enumerate(cache.block_ids(sequence.seq_id)):
            where = f"I2: sequence {sequence.seq_id!r}, group {group}"
            if len(table) != length:
                raise InvariantError(
                    f"{where}: {len(table)} blocks for {reserved} tokens: {cache!r}"
                )
            row = cache.block_table[group].table[sequence.row].tolist()
            if row[:length] != table or any(row[length:]):
                raise InvariantError(f"{where}: row {row}, but the table is {table}: {cache!r}")


def check_pages(cache: HybridKVCache) -> None:
    """I7: in each layer every number that its group can read is finite, and what no group can read
    is NaN. Between two batches."""
    live = _live_slots(cache)
    used = live.any(2)  # [num_groups, num_blocks]
    for (k_cache, v_cache), group in zip(cache.layers, cache.group_of_layer, strict=True):
        others = used[torch.arange(len(used), device="cpu") != group].any(0)
        blocks = (~others).nonzero()[:, 0]  # in the others, other layers have their numbers
        k, v = (c[blocks.to(c.device)].flatten(0, 1)[None] for c in (k_cache, v_cache))
        where = f"of the blocks {blocks.tolist()}, group {group}: {cache!r}"
        check_poison(k, v, live[group, blocks].flatten(), where)


def _live_slots(cache: HybridKVCache) -> Tensor:
    """What each group can read, now or after a hit: bool [num_groups, num_blocks, block_size]."""
    block_size, num_blocks = cache.config.block_size, len(cache.pool.blocks)
    shape = (len(cache.windows), num_blocks, block_size)
    live = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for sequence in cache.sequences.values():
        positions = torch.arange(sequence.num_computed_tokens, device="cpu")
        for group, table in enumerate(cache.block_ids(sequence.seq_id)):
            ids = torch.tensor(table, dtype=torch.int64, device="cpu")
            live[group, ids[positions // block_size], positions % block_size] = True
    for block in cache.pool.blocks:
        if block.block_hash is not None:
            live[split_key(block.block_hash)[1], block.block_id] = True
    live[:, 0] = False  # the null block stands for many, and holds nothing
    return live
