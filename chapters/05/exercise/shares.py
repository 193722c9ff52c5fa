# Chapter 05, given: pagedattn/kernels/shares.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 93e213a8a321635f739acdcaba87fdabe161be84f1a7cd652a3009c3be49331d

"""Even shares: decode items for kernels that keep a ring of tiles full.

Such a program takes one item after the other without a pause, so it can be given any number of
them. All keys of all decode rows are laid out one row after the other, in tiles, and cut into as
many shares of equal length as there are programs. A cut inside a row makes two splits of it. So no
program has more than one tile more than another, whatever the lengths are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .buffers import AttentionPlan

SHARE_KEYS = 128  # a tile: shares are whole multiples of it


def cut_shares(
    plan: AttentionPlan, seq_lens: Tensor, query_start_loc: Tensor, share_start: Tensor
) -> None:
    """Fill ``plan.decode_items`` and ``share_start``, int32 [programs + 1]: the first item of each
    program's share. One launch, no synchronisation.

    ``seq_lens`` and ``query_start_loc`` are as ``plan_attention`` has checked them.
    """
    _cut_shares_kernel[(plan.max_rows,)](
        seq_lens,
        query_start_loc,
        None if plan.shared is None else plan.shared.own_begin,
        plan.decode_items,
        plan.num_items,
        plan.arrivals,
        share_start,
        len(seq_lens),
        len(share_start) - 1,
        plan.clamped_window or 0,
        len(plan.decode_items),
        DECODE_QUERIES=plan.decode_queries,
        SHARE_KEYS=SHARE_KEYS,
        NUM_KV_HEADS=plan.arrivals.shape[1],
        BLOCK=min(1024, triton.next_power_of_2(plan.max_rows)),
    )


@triton.jit
def _measure(
    seq_lens,
    query_start_loc,
    own_begin,
    rows,
    num_rows,
    window,
    DECODE_QUERIES: tl.constexpr,
    SHARE_KEYS: tl.constexpr,
):
    """Of these rows: first token, queries, length, first key, where its tile begins, and tiles: 0
    unless it decodes."""
    real = rows < num_rows
    first_token = tl.load(query_start_loc + rows, mask=real, other=0)
    queries = tl.load(query_start_loc + rows + 1, mask=real, other=0) - first_token
    seq_len = tl.load(seq_lens + rows, mask=real, other=0)
    if own_begin is None:
        first_seen = tl.where(window > 0, tl.maximum(seq_len - queries - window + 1, 0), 0)
        first_key = tl.minimum(first_seen, seq_len)
        begin = first_key // SHARE_KEYS * SHARE_KEYS
    else:  # there is no window
        first_key = tl.load(own_begin + rows, mask=real, other=0)
        begin = first_key
    tiles = tl.maximum(tl.cdiv(seq_len - begin, SHARE_KEYS), 1)
    tiles = tl.where((queries > 0) & (queries <= DECODE_QUERIES), tiles, 0)
    return first_token, queries, seq_len, first_key, begin, tiles


@triton.jit
def _cuts_before(tile, all_tiles, shares):
    """How many shares begin before a tile. Share w begins at tile w * all_tiles // shares."""
    tile = tile.to(tl.int64)
    return tl.minimum(tl.cdiv(tile * shares, tl.maximum(all_tiles, 1)), shares).to(tl.int32)


@triton.jit
def _cut_shares_kernel(
    seq_lens,
    query_start_loc,
    own_begin,
    items,
    num_items,
    arrivals,
    share_start,
    num_rows,
    num_programs,
    window,
    most_items,
    DECODE_QUERIES: tl.constexpr,
    SHARE_KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. It looks at all rows, as in the plan, to find where its tiles stand."""
    row = tl.program_id(0)
    all_tiles = tl.zeros((), tl.int64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        _, _, _, _, _, tiles = _measure(
            seq_lens, query_start_loc, own_begin, rows, num_rows, window, DECODE_QUERIES,
            SHARE_KEYS,
        )  # fmt: skip
        all_tiles += tl.sum(tiles.to(tl.int64))
    shares = tl.minimum(num_programs, all_tiles).to(tl.int32)  # so no two begin at one tile

    my_tile = tl.zeros((), tl.int64)
    first_item = 0
    all_items = 0
    passed = tl.zeros((), tl.int64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        _, _, _, _, _, tiles = _measure(
            seq_lens, query_start_loc, own_begin, rows, num_rows, window, DECODE_QUERIES,
            SHARE_KEYS,
        )  # fmt: skip
        last = passed + tl.cumsum(tiles.to(tl.int64))
        first = last - tiles
        inside = _cuts_before(last, all_tiles, shares) - _cuts_before(first + 1, all_tiles, shares)
        pieces = tl.where(tiles > 0, 1 + inside, 0)
        my_tile += tl.sum(tl.where(rows < row, tiles, 0).to(tl.int64))
        first_item += tl.sum(tl.where(rows < row, pieces, 0))
        all_items += tl.sum(pieces)
        passed += tl.sum(tiles.to(tl.int64))
    if row == 0:
        # More than there is room for: the lengths do not fit the plan. Nothing is written outside.
        all_items = tl.minimum(all_items, most_items)
        tl.store(num_items, all_items)
        for start in range(0, num_programs + 1, BLOCK):
            share = start + tl.arange(0, BLOCK)
            tl.store(
                share_start + share, all_items, mask=(share >= shares) & (share <= num_programs)
            )
    for kv_head in range(NUM_KV_HEADS):
        tl.store(arrivals + row * NUM_KV_HEADS + kv_head, 0)

    token, queries, seq_len, first_key, begin, tiles = _measure(
        seq_lens, query_start_loc, own_begin, row, num_rows, window, DECODE_QUERIES, SHARE_KEYS
    )
    if tiles == 0:
        return
    end_tile = my_tile + tiles
    next_cut = _cuts_before(my_tile + 1, all_tiles, shares)  # the first one inside the row
    pieces = 1 + _cuts_before(end_tile, all_tiles, shares) - next_cut
    for start in range(0, pieces, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        cut = next_cut + piece
        tile = tl.where(piece == 0, my_tile, (cut - 1).to(tl.int64) * all_tiles // shares)
        upto = tl.minimum(cut.to(tl.int64) * all_tiles // shares, end_tile)
        here = (piece < pieces) & (first_item + piece < most_items)
        item = items + (first_item + piece) * 8
        tl.store(item, row, mask=here)
        tl.store(item + 1, token, mask=here)
        tl.store(item + 2, queries, mask=here)
        tl.store(item + 3, seq_len - queries, mask=here)
        keys_from = begin + ((tile - my_tile) * SHARE_KEYS).to(tl.int32)
        # Blocks before a window's first key were given away, and may hold anything.
        keys_from = tl.maximum(keys_from, first_key)
        keys_to = begin + ((upto - my_tile) * SHARE_KEYS).to(tl.int32)
        tl.store(item + 4, keys_from, mask=here)
        tl.store(item + 5, tl.minimum(keys_to, tl.maximum(seq_len, 0)), mask=here)
        tl.store(item + 6, pieces, mask=here)
        tl.store(item + 7, first_item, mask=here)
    # Which shares begin in this row: at its first tile, or at a cut.
    share = _cuts_before(my_tile, all_tiles, shares)
    if share < next_cut:
        tl.store(share_start + share, tl.minimum(first_item, most_items))
    for start in range(0, pieces - 1, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        number = tl.minimum(first_item + 1 + piece, most_items)
        tl.store(share_start + next_cut + piece, number, mask=piece < pieces - 1)
