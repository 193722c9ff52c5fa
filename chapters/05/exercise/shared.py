# Chapter 05, given: pagedattn/kernels/shared.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 36ba4fbc78661138a4cdf06aa716102eba513976ebc9635e130660ae4856b786

"""Shared prefixes: the work of reading blocks that rows have in common once for all of them.

The common beginning of a group of rows is an item of its own kind: one program reads its keys
through the table of the first member, for the queries of all members. What it finds is a *part* of
each member's result, to be merged with what the member finds in its own keys.

Sources: Juravsky et al., Hydragen (2024) for the batched reading; Ye et al., ChunkAttention (2024)
for the tree of prefixes. In vLLM one prefix of all requests is shared:
``vllm/v1/attention/backends/flash_attn.py``, ``cascade_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import groups
from .checks import check_device, check_dtype, check_shape
from .groups import LEVELS, find_groups


@dataclass(frozen=True)
class SharedPrefixes:
    """Buffers for the shared prefixes of a step, and the work that they make.

    ``leaders``, ``ends``, ``num_tokens``, ``spared`` int32 [LEVELS, max_rows], and ``order`` int64
    [max_rows]: what ``find_groups`` finds. If all groups together spare fewer reads of a key than
    ``least_spared``, none is used: what they spare would not pay for one more launch.

    ``own_begin`` int32 [max_rows]: the first key that a row reads alone.

    ``items`` int32 [most items, 6]: the row whose table is read; the first key and the end of the
    keys; the first of the members and how many; the number of the part. ``num_items`` int32 [1].
    ``members`` int32 [most decode tokens, 3]: a token, its position, its first part; members of a
    group stand together. ``parts`` int32 [max_rows, 2]: the first part of a row's first token, and
    how many parts each token has. ``partial_out`` [most parts, num_heads, head_dim] and
    ``partial_lse`` [most parts, num_heads]: what they are.

    An item has at most ``tile_tokens`` members; about ``num_programs`` items have all work.
    """

    block_size: int
    tile_tokens: int
    num_programs: int
    least_spared: int
    leaders: Tensor
    ends: Tensor
    num_tokens: Tensor
    spared: Tensor
    order: Tensor
    own_begin: Tensor
    items: Tensor
    num_items: Tensor
    members: Tensor
    parts: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def new_shared_prefixes(
    block_size: int,
    max_rows: int,
    decode_tokens: int,
    num_heads: int,
    head_dim: int,
    *,
    tile_tokens: int,
    num_programs: int,
    least_spared: int,
    sums: torch.dtype,
    device: torch.device | str,
) -> SharedPrefixes:
    """Buffers for up to ``max_rows`` rows, of which decode rows have ``decode_tokens`` tokens.

    How large they are: all keys times tiles, over the split length, is ``num_programs``. A segment
    of k keys has at most k / length + 1 splits, and t tokens at most t / tile_tokens + 1 tiles. A
    token is in at most ``LEVELS`` groups, and of n rows at most n - 1 groups can be made.
    """
    most_tiles = LEVELS * decode_tokens // tile_tokens + max_rows
    most_parts = num_programs * tile_tokens + LEVELS * decode_tokens

    def buffer(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return SharedPrefixes(
        block_size=block_size,
        tile_tokens=tile_tokens,
        num_programs=num_programs,
        least_spared=least_spared,
        leaders=buffer(LEVELS, max_rows),
        ends=buffer(LEVELS, max_rows),
        num_tokens=buffer(LEVELS, max_rows),
        spared=buffer(LEVELS, max_rows),
        own_begin=buffer(max_rows),
        order=torch.zeros(max_rows, dtype=torch.int64, device=device),
        items=buffer(num_programs + most_tiles, 6),
        num_items=buffer(1),
        members=buffer(decode_tokens, 3),
        parts=buffer(max_rows, 2),
        partial_out=torch.empty(most_parts, num_heads, head_dim, dtype=sums, device=device),
        partial_lse=torch.empty(most_parts, num_heads, dtype=sums, device=device),
    )


def find_shared_prefixes(
    shared: SharedPrefixes,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor | None,
    decode_queries: int,
) -> None:
    """Fill the buffers: two launches, no synchronisation.

    ``seq_lens`` and ``query_start_loc`` are as ``plan_attention`` has checked them. A row of more
    than ``decode_queries`` queries is in no group. Raises ValueError for a ``block_table`` that is
    not int32 [num_rows, width], is on another device or is not there.
    """
    if block_table is None:
        raise ValueError("the plan shares prefixes: it needs a block_table")
    check_shape("block_table", block_table, (len(seq_lens), "width"))
    check_dtype("block_table", block_table, torch.int32)
    check_device(seq_lens=seq_lens, block_table=block_table)
    if block_table.stride(1) != 1:
        raise ValueError(
            f"rows of the block_table have gaps: its strides are {block_table.stride()}"
        )
    max_rows = len(shared.parts)
    if not max_rows:
        return
    find_groups(
        shared.leaders, shared.ends, shared.num_tokens, shared.spared, shared.order,
        seq_lens, query_start_loc, block_table,
        block_size=shared.block_size, decode_queries=decode_queries, tile_tokens=shared.tile_tokens,
    )  # fmt: skip
    _cut_groups_kernel[(max_rows,)](
        seq_lens,
        query_start_loc,
        shared.leaders,
        shared.ends,
        shared.num_tokens,
        shared.spared,
        shared.order,
        shared.own_begin,
        shared.items,
        shared.num_items,
        shared.members,
        shared.parts,
        len(seq_lens),
        max_rows,
        shared.num_programs,
        shared.least_spared,
        DECODE_QUERIES=triton.next_power_of_2(decode_queries),
        TILE_TOKENS=shared.tile_tokens,
        SHARED_KEYS=groups.SHARED_KEYS,
        LEVELS=LEVELS,
        BLOCK=min(1024, triton.next_power_of_2(max_rows)),
    )


@triton.jit
def _segments(
    leaders,
    ends,
    num_tokens,
    spared,
    rows,
    max_rows,
    LEVELS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Of these rows at each level: where the segment begins and ends, in how many tiles the
    members' tokens are, and how many reads are spared: 0 unless the row is their leader. Each
    [LEVELS, rows]."""
    level = tl.arange(0, LEVELS)[:, None]
    at = level * max_rows + rows[None, :]
    here = (rows < max_rows)[None, :] & (level >= 0)
    begin = tl.load(ends + at - max_rows, mask=here & (level > 0), other=0)
    end = tl.load(ends + at, mask=here, other=0)
    leads = tl.load(leaders + at, mask=here, other=-1) == rows[None, :]
    tokens = tl.load(num_tokens + at, mask=here & leads, other=0)
    reads = tl.load(spared + at, mask=here & leads, other=0)
    return begin, end, tl.cdiv(tokens, TILE_TOKENS), reads


@triton.jit
def _cut_groups_kernel(
    seq_lens,
    query_start_loc,
    leaders,
    ends,
    num_tokens,
    spared,
    order,
    own_begin,
    items,
    num_items,
    members,
    parts,
    num_rows,
    max_rows,
    num_programs,
    least_spared,
    DECODE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    SHARED_KEYS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. It looks at all rows, as in the plan, and writes the items of the groups
    that it leads, its tokens as members, and where its parts lie."""
    row = tl.program_id(0)
    work = tl.zeros((), tl.int64)
    all_spared = tl.zeros((), tl.int64)
    for start in range(0, max_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        begin, end, tiles, reads = _segments(
            leaders, ends, num_tokens, spared, rows, max_rows, LEVELS, TILE_TOKENS
        )
        length = (end - begin).to(tl.int64)
        work += tl.sum(tl.sum(length * tiles, 1), 0)
        all_spared += tl.sum(tl.sum(length * reads, 1), 0)
    if (work == 0) | (all_spared < least_spared):  # as in most steps
        tl.store(parts + row * 2 + 1, 0)
        tl.store(own_begin + row, 0)
        if row == 0:
            tl.store(num_items, 0)
        return
    length = tl.cdiv(tl.cdiv(work, num_programs), SHARED_KEYS).to(tl.int32) * SHARED_KEYS

    place = 0
    first_part = 0
    first_item = 0
    all_items = 0
    my_place = tl.load(order + row)
    for start in range(0, max_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        begin, end, tiles, _ = _segments(
            leaders, ends, num_tokens, spared, rows, max_rows, LEVELS, TILE_TOKENS
        )
        splits = tl.cdiv(end - begin, length)
        num_parts = tl.sum(splits, 0)
        their_items = tl.sum(splits * tiles, 0)
        shares = (rows < num_rows) & (num_parts > 0)
        queries = tl.load(query_start_loc + rows + 1, mask=shares, other=0)
        queries -= tl.load(query_start_loc + rows, mask=shares, other=0)
        their_place = tl.load(order + rows, mask=shares, other=0)
        before = (their_place < my_place) | ((their_place == my_place) & (rows < row))
        place += tl.sum(tl.where(before, queries, 0))
        first_part += tl.sum(tl.where(rows < row, queries * num_parts, 0))
        first_item += tl.sum(tl.where(rows < row, their_items, 0))
        all_items += tl.sum(their_items)
    if row == 0:
        tl.store(num_items, all_items)

    part = 0
    begin = 0
    for level in range(LEVELS):
        at = level * max_rows + row
        end = tl.load(ends + at)
        splits = tl.cdiv(end - begin, length)
        tokens = tl.where(tl.load(leaders + at) == row, tl.load(num_tokens + at), 0)
        tiles = tl.cdiv(tokens, TILE_TOKENS)
        for start in range(0, splits * tiles, BLOCK):
            number = start + tl.arange(0, BLOCK)
            keys_from = begin + number // tiles * length
            token = number % tiles * TILE_TOKENS
            here = number < splits * tiles
            item = items + (first_item + number) * 6
            tl.store(item, row, mask=here)
            tl.store(item + 1, keys_from, mask=here)
            tl.store(item + 2, tl.minimum(keys_from + length, end), mask=here)
            tl.store(item + 3, place + token, mask=here)
            tl.store(item + 4, tl.minimum(tokens - token, TILE_TOKENS), mask=here)
            tl.store(item + 5, part + number // tiles, mask=here)
        first_item += splits * tiles
        part += splits
        begin = end
    tl.store(own_begin + row, begin)
    tl.store(parts + row * 2, first_part)
    tl.store(parts + row * 2 + 1, part)

    real = (row < num_rows) & (part > 0)
    first_token = tl.load(query_start_loc + row, mask=real, other=0)
    num_queries = tl.load(query_start_loc + row + 1, mask=real, other=0) - first_token
    first_position = tl.load(seq_lens + row, mask=real, other=0) - num_queries
    query = tl.arange(0, DECODE_QUERIES)
    member = members + (place + query) * 3
    tl.store(member, first_token + query, mask=query < num_queries)
    tl.store(member + 1, first_position + query, mask=query < num_queries)
    tl.store(member + 2, first_part + query * part, mask=query < num_queries)
