# Chapter 05, given: pagedattn/kernels/groups.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 23af781a338053ecc4625356041f68db375c16a4d43e64d0fa6a576bb9d6f287

"""Which rows of a batch begin with the same blocks.

Forks, beams and requests with one system prompt have block tables that begin alike. Such rows are a
*group*, and the keys that they have in common a *segment*. Groups nest: 64 requests share a system
prompt, and four beams of one of them share its question, too. So the keys of a row are up to
``LEVELS`` segments, each common to a smaller group than the one before, and then its own.

All of it is found on the device, from the block tables. Of two rows the *common keys* are those in
the equal columns at the beginning of both tables that every query of both sees, down to a multiple
of ``SHARED_KEYS``. Rows that have so many keys in common with a row, or more, have as many in
common with each other. So each row finds its groups alone, and all members of a group agree.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SHARED_KEYS = 128  # segments are whole multiples of it, and so whole tiles: none needs a mask
SAVED_KEYS = 2048  # a group gets a segment if so many keys are read less often, rows times keys
LEVELS = 4  # a power of 2


def find_groups(
    leaders: Tensor,
    ends: Tensor,
    num_tokens: Tensor,
    spared: Tensor,
    order: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    decode_queries: int,
    tile_tokens: int,
) -> None:
    """The groups of each row, the largest first: one launch, no synchronisation.

    Fills ``leaders``, ``ends``, ``num_tokens`` and ``spared``, int32 [LEVELS, max_rows]: the first
    member, where the segment ends, how many tokens the members have, and how many reads of each key
    are spared. It begins where the one before it
    ends. A row without a group is its own leader, and its segment is empty. ``order`` int64
    [max_rows]: sorted by it, members of a group stand together, with the first one in front.

    They are read for ``tile_tokens`` members at a time: so a segment spares its members' reads but
    for one a tile, and a group that spares less than ``SAVED_KEYS`` gets none. A row without a
    query, or of more than ``decode_queries``, is in no group. All else is as ``plan_attention`` has
    checked it.
    """
    num_levels, max_rows = leaders.shape
    rows = triton.next_power_of_2(max_rows)
    _find_kernel[(max_rows,)](
        seq_lens,
        query_start_loc,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        leaders,
        ends,
        num_tokens,
        spared,
        order,
        len(seq_lens),
        max_rows,
        SAVED_KEYS,
        DECODE_QUERIES=decode_queries,
        TILE_TOKENS=tile_tokens,
        BLOCK_SIZE=block_size,
        SHARED_KEYS=SHARED_KEYS,
        LEVELS=num_levels,
        ROWS=rows,
        COLUMNS=max(1, min(64, 4096 // rows)),
    )


@triton.jit
def _all_see(seq_lens, query_start_loc, rows, num_rows, width, BLOCK_SIZE, DECODE_QUERIES):
    """Of these rows: queries, and how many first keys all of their queries see and have a block."""
    real = rows < num_rows
    start = tl.load(query_start_loc + rows, mask=real, other=0)
    queries = tl.load(query_start_loc + rows + 1, mask=real, other=0) - start
    keys = tl.load(seq_lens + rows, mask=real, other=0) - queries
    keys = tl.maximum(tl.minimum(keys, width * BLOCK_SIZE), 0)
    return queries, tl.where((queries > 0) & (queries <= DECODE_QUERIES), keys, 0)


@triton.jit
def _find_kernel(
    seq_lens,
    query_start_loc,
    block_table,
    table_stride,
    width,
    leaders,
    ends,
    num_tokens,
    spared,
    order,
    num_rows,
    max_rows,
    saved_keys,
    DECODE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARED_KEYS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a row: what it has in common with each other row, then its groups."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    _, mine = _all_see(seq_lens, query_start_loc, row, num_rows, width, BLOCK_SIZE, DECODE_QUERIES)
    queries, theirs = _all_see(
        seq_lens, query_start_loc, rows, num_rows, width, BLOCK_SIZE, DECODE_QUERIES
    )
    most = tl.minimum(theirs, mine)

    # Rows that differ in their first block, as most do, are not looked at any further.
    my_table = block_table + row.to(tl.int64) * table_stride
    tables = block_table + rows.to(tl.int64) * table_stride
    alike = (most >= SHARED_KEYS) & (rows != row)
    first_block = tl.load(my_table, mask=mine > 0, other=-1)
    alike = alike & (tl.load(tables, mask=alike, other=-1) == first_block)
    equal_columns = tl.zeros((ROWS,), tl.int32)
    column = 0
    while tl.max(alike.to(tl.int32), 0) > 0:
        columns = column + tl.arange(0, COLUMNS)
        needed = alike[:, None] & (columns[None, :] * BLOCK_SIZE < most[:, None])
        my_blocks = tl.load(my_table + columns, mask=columns * BLOCK_SIZE < mine, other=-1)
        blocks = tl.load(tables[:, None] + columns[None, :], mask=needed, other=-1)
        equal = needed & (blocks == my_blocks[None, :])
        column += COLUMNS
        first_other = tl.min(tl.where(equal, column, columns[None, :]), 1)
        equal_columns = tl.where(alike, first_other, equal_columns)
        alike = alike & (first_other == column)
    common = tl.minimum(equal_columns * BLOCK_SIZE, most) // SHARED_KEYS * SHARED_KEYS

    NONE: tl.constexpr = 2**31 - 1
    level = 0
    begin = 0
    path = tl.zeros((), tl.int64)
    end = tl.min(tl.where(common > 0, common, NONE), 0)
    while (end < NONE) & (level < LEVELS):
        is_member = (common >= end) | (rows == row)
        tokens = tl.sum(tl.where(is_member, queries, 0), 0)
        reads = tl.sum(is_member.to(tl.int32), 0) - tl.cdiv(tokens, TILE_TOKENS)
        if reads * (end - begin) >= saved_keys:
            at = level * max_rows + row
            leader = tl.min(tl.where(is_member, rows, ROWS), 0)
            path = path * max_rows + leader
            tl.store(leaders + at, leader)
            tl.store(ends + at, end)
            tl.store(num_tokens + at, tokens)
            tl.store(spared + at, reads)
            level += 1
            begin = end
        # Members of a group that is not worth it may be of a smaller one with more in common: its
        # segment then begins where this one would have.
        end = tl.min(tl.where(common > end, common, NONE), 0)
    while level < LEVELS:
        at = level * max_rows + row
        tl.store(leaders + at, row)
        tl.store(ends + at, begin)
        tl.store(num_tokens + at, 0)
        tl.store(spared + at, 0)
        path = path * max_rows + row
        level += 1
    tl.store(order + row, path)
