# Chapter 05, given: pagedattn/kernels/plan.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 7200f030764226447b8140b79e5a9e4220e480c867cff2d9a4a53d466fbb9cef

"""The plan of a step: its work, cut into items of like size.

A batch holds rows of very different kinds: a decode that reads 100,000 keys for one token, another
that reads 50, a prefill chunk of 512 tokens. The plan cuts them into *items*, each the work of one
program for each KV head:

- a decode row has few queries. It is cut along its keys into *splits*. All decode rows use one
  split length, so a long row gets many splits, and a short one is not cut at all. The last split
  of a row to be done merges what all have found;
- a prefill row is cut along its queries into tiles.

A plan may also look for decode rows whose block tables begin with the same blocks. Those are read
once for all of them, by items of another kind (``shared``); a row's splits then begin behind.

The plan is made on the device, once a step, into buffers that stay where they are; every layer
reads them. So a captured CUDA graph stays right when lengths change: it launches as many programs
as there can be items, and those behind the last item end at once. A row without queries (padding)
has no item.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_checks import check_sizes
from .buffers import AttentionPlan, num_multiprocessors
from .checks import check_contiguous, check_device, check_dtype, check_shape
from .hopper import share_programs
from .shared import find_shared_prefixes, new_shared_prefixes
from .shares import cut_shares

SPLIT_KEYS = 64  # splits are whole multiples of it
PROGRAMS = 4  # for each multiprocessor: all decode rows are cut into about so many splits
SPARED_BYTES = 2**26  # shared prefixes are used if they spare reading so much: 15 us of an H200
LONE_SPLITS = 16  # batch-invariant: a row has at most so many splits, ...
LONE_KEYS = 512  # ... and none of fewer keys but the last


def new_plan(
    max_rows: int,
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    window: int | None = None,
    has_prefill: bool = True,
    share_block_size: int | None = None,
    batch_invariant: bool = False,
    device: torch.device | str,
) -> AttentionPlan:
    """Buffers for the plans of steps with up to ``max_rows`` rows and ``max_tokens`` tokens.

    ``dtype`` is that of the queries. Layers with another window need another plan.
    ``has_prefill=False`` promises that no row has more than ``decode_queries`` queries: then one
    launch does it all.

    With ``share_block_size``, the block size of the cache, block tables are searched for shared
    prefixes, unless there is a window. With ``batch_invariant`` a row's result is the same to the
    bit whatever stands beside it in the batch: what is cut is cut by the row's own length.

    Raises ValueError for sizes that cannot be, for heads that cannot share KV heads evenly, and if
    both are asked for: what a row shares depends on the others.
    """
    check_sizes(max_rows, max_tokens, num_heads, num_kv_heads, head_dim, dtype, window)
    if share_block_size is not None and share_block_size < 1:
        raise ValueError(f"share_block_size is {share_block_size}; a block has at least 1 slot")
    if share_block_size is not None and batch_invariant:
        raise ValueError("a batch-invariant plan shares no prefixes: they depend on the batch")
    group = num_heads // num_kv_heads
    least = triton.next_power_of_2(group)  # one query must fit into a tile
    decode_rows = max(16, least)  # a matrix product has at least 16 rows
    prefill_rows = max(128 if dtype.itemsize == 2 else 32, least)
    num_programs = num_multiprocessors(torch.device(device)) / num_kv_heads
    target_splits = math.ceil(PROGRAMS * num_programs)
    # A row of k keys has at most k / length + 1 splits, and all keys / length is target_splits.
    most_splits = max_rows * LONE_SPLITS if batch_invariant else max_rows + target_splits
    programs = share_programs(torch.device(device), dtype, num_kv_heads, head_dim, decode_rows)
    shared_out = programs > 0 and not batch_invariant
    if shared_out:  # each program but the first can begin inside a row
        most_splits = max_rows + programs
    most_tiles = max_rows + max_tokens // (prefill_rows // group) if has_prefill else 0

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    sums = torch.float64 if dtype == torch.float64 else torch.float32
    shared = None
    if share_block_size is not None and window is None:
        shared = new_shared_prefixes(
            share_block_size, max_rows, min(max_tokens, max_rows * (decode_rows // group)),
            num_heads, head_dim, tile_tokens=prefill_rows // group,
            num_programs=max(1, int(num_programs)),
            least_spared=SPARED_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize),
            sums=sums, device=device,
        )  # fmt: skip
    return AttentionPlan(
        max_tokens=max_tokens,
        group=group,
        window=window,
        decode_rows=decode_rows,
        prefill_rows=prefill_rows,
        target_splits=target_splits,
        decode_items=buffer(most_splits, 8),
        prefill_items=buffer(most_tiles, 8),
        num_items=buffer(2),
        arrivals=buffer(max_rows, num_kv_heads),
        partial_out=buffer(most_splits, num_kv_heads, decode_rows, head_dim, dtype=sums),
        partial_lse=buffer(most_splits, num_kv_heads, decode_rows, dtype=sums),
        share_start=buffer(programs + 1 if shared_out else 0),
        batch_invariant=batch_invariant,
        shared=shared,
    )


def plan_attention(
    plan: AttentionPlan,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Cut a step into items: fills the plan's buffers, without synchronisation. One launch; one
    more if decode rows are shared out and there may be prefill, and two if prefixes are shared.

    ``seq_lens`` int32 [num_rows], each row's length with its new tokens; ``query_start_loc`` int32
    [num_rows + 1]; ``block_table`` int32 [num_rows, width]: a plan that shares prefixes needs it.
    Raises ValueError for a wrong type, shape or device, or more rows than the plan has room for.
    """
    check_shape("seq_lens", seq_lens, ("num_rows",))
    num_rows = seq_lens.shape[0]
    check_shape("query_start_loc", query_start_loc, (num_rows + 1,))
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_contiguous(seq_lens=seq_lens, query_start_loc=query_start_loc)
    check_device(plan=plan.num_items, seq_lens=seq_lens, query_start_loc=query_start_loc)
    if num_rows > plan.max_rows:
        raise ValueError(f"{num_rows} rows; the plan has room for {plan.max_rows}")
    if plan.shared is not None:
        find_shared_prefixes(
            plan.shared, seq_lens, query_start_loc, block_table, plan.decode_queries
        )
    if not plan.max_rows:
        return
    if plan.prefill_items.shape[0] or not plan.is_shared_out:
        _plan_kernel[(plan.max_rows,)](
            seq_lens,
            query_start_loc,
            None if plan.is_shared_out else plan.decode_items,
            plan.prefill_items,
            plan.arrivals,
            plan.num_items,
            None if plan.shared is None else plan.shared.own_begin,
            num_rows,
            plan.target_splits,
            plan.clamped_window or 0,
            plan.decode_items.shape[0],
            plan.prefill_items.shape[0],
            DECODE_QUERIES=plan.decode_queries,
            PREFILL_QUERIES=plan.prefill_queries,
            SPLIT_KEYS=SPLIT_KEYS,
            LONE_SPLITS=LONE_SPLITS if plan.batch_invariant else None,
            LONE_KEYS=LONE_KEYS,
            NUM_KV_HEADS=plan.arrivals.shape[1],
            BLOCK=min(1024, triton.next_power_of_2(plan.max_rows)),
        )
    if plan.is_shared_out:
        cut_shares(plan, seq_lens, query_start_loc, plan.share_start)


@triton.jit
def _first_key(position, window):
    """The first position that the query at ``position`` sees."""
    return tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)


@triton.jit
def _measure(
    seq_lens, query_start_loc, own_begin, rows, num_rows, window, DECODE_QUERIES: tl.constexpr
):
    """Of these rows: queries, first key and number of keys (of decode rows, else 0)."""
    real = rows < num_rows
    start = tl.load(query_start_loc + rows, mask=real, other=0)
    queries = tl.load(query_start_loc + rows + 1, mask=real, other=0) - start
    seq_len = tl.load(seq_lens + rows, mask=real, other=0)
    if own_begin is None:
        first = tl.minimum(_first_key(seq_len - queries, window), seq_len)
    else:  # there is no window
        first = tl.load(own_begin + rows, mask=real, other=0)
    is_decode = (queries > 0) & (queries <= DECODE_QUERIES)
    return queries, seq_len, first, tl.where(is_decode, seq_len - first, 0), is_decode


@triton.jit
def _split_length(keys, even, LONE_SPLITS: tl.constexpr, LONE_KEYS: tl.constexpr):
    """How long splits may be: ``even`` for all rows, or by the row's own number of keys."""
    return even if LONE_SPLITS is None else tl.maximum(tl.cdiv(keys, LONE_SPLITS), LONE_KEYS)


@triton.jit
def _cut(keys, is_decode, split_length, SPLIT_KEYS: tl.constexpr):
    """How long the splits of a row with so many keys are, and how many: at least one."""
    num_splits = tl.maximum(tl.cdiv(keys, split_length), 1)
    length = tl.maximum(tl.cdiv(tl.cdiv(keys, num_splits), SPLIT_KEYS), 1) * SPLIT_KEYS
    return length, tl.where(is_decode, tl.maximum(tl.cdiv(keys, length), 1), 0)


@triton.jit
def _plan_kernel(
    seq_lens,
    query_start_loc,
    decode_items,
    prefill_items,
    arrivals,
    num_items,
    own_begin,
    num_rows,
    target_splits,
    window,
    most_splits,
    most_tiles,
    DECODE_QUERIES: tl.constexpr,
    PREFILL_QUERIES: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    LONE_SPLITS: tl.constexpr,
    LONE_KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. Each looks at all rows and finds its own items' place among theirs, so
    that no program waits for another."""
    row = tl.program_id(0)
    total_keys = tl.zeros((), dtype=tl.int64)
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        _, _, _, keys, _ = _measure(
            seq_lens, query_start_loc, own_begin, rows, num_rows, window, DECODE_QUERIES
        )
        total_keys += tl.sum(keys.to(tl.int64))
    even = tl.maximum(tl.cdiv(total_keys, target_splits), 1).to(tl.int32)
    even = tl.cdiv(even, SPLIT_KEYS) * SPLIT_KEYS

    queries, seq_len, first, keys, is_decode = _measure(
        seq_lens, query_start_loc, own_begin, row, num_rows, window, DECODE_QUERIES
    )
    length, num_splits = _cut(
        keys, is_decode, _split_length(keys, even, LONE_SPLITS, LONE_KEYS), SPLIT_KEYS
    )
    num_tiles = tl.where(is_decode, 0, tl.cdiv(queries, PREFILL_QUERIES))

    # Where this row's items stand among all: long splits come first, so that none is left to run
    # alone in the end.
    first_split = 0
    first_tile = 0
    all_splits = 0
    all_tiles = 0
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        their_queries, _, _, their_keys, they_decode = _measure(
            seq_lens, query_start_loc, own_begin, rows, num_rows, window, DECODE_QUERIES
        )
        their_length, their_splits = _cut(
            their_keys, they_decode, _split_length(their_keys, even, LONE_SPLITS, LONE_KEYS),
            SPLIT_KEYS,
        )  # fmt: skip
        their_tiles = tl.where(they_decode, 0, tl.cdiv(their_queries, PREFILL_QUERIES))
        before = (their_length > length) | ((their_length == length) & (rows < row))
        first_split += tl.sum(tl.where(before, their_splits, 0))
        first_tile += tl.sum(tl.where(rows < row, their_tiles, 0))
        all_splits += tl.sum(their_splits)
        all_tiles += tl.sum(their_tiles)
    if row == 0:
        # More than there is room for: the lengths do not fit the plan. Nothing is written outside.
        tl.store(num_items, tl.minimum(all_splits, most_splits))
        tl.store(num_items + 1, tl.minimum(all_tiles, most_tiles))

    first_token = tl.load(query_start_loc + row, mask=row < num_rows, other=0)
    first_position = seq_len - queries
    for kv_head in range(NUM_KV_HEADS):
        tl.store(arrivals + row * NUM_KV_HEADS + kv_head, 0)
    if decode_items is not None:
        for start in range(0, num_splits, BLOCK):
            split = start + tl.arange(0, BLOCK)
            keys_from = first + split * length
            keys_to = tl.minimum(keys_from + length, seq_len)
            _store_items(
                decode_items + (first_split + split) * 8,
                (split < num_splits) & (first_split + split < most_splits),
                row, first_token, queries, first_position, keys_from, keys_to, num_splits,
                first_split,
            )  # fmt: skip

    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        query = tile * PREFILL_QUERIES
        num_queries = tl.minimum(queries - query, PREFILL_QUERIES)
        position = first_position + query
        keys_to = tl.maximum(position + num_queries, 0)
        keys_from = tl.minimum(tl.maximum(_first_key(position, window), 0), keys_to)
        place = first_tile + num_tiles - 1 - tile  # the longest first
        _store_items(
            prefill_items + place * 8, (tile < num_tiles) & (place < most_tiles),
            row, first_token + query, num_queries, position, keys_from, keys_to, 1, 0,
        )  # fmt: skip


@triton.jit
def _store_items(items, here, row, token, queries, position, begin, end, splits, first):
    tl.store(items, row, mask=here)
    tl.store(items + 1, token, mask=here)
    tl.store(items + 2, queries, mask=here)
    tl.store(items + 3, position, mask=here)
    tl.store(items + 4, begin, mask=here)
    tl.store(items + 5, end, mask=here)
    tl.store(items + 6, splits, mask=here)
    tl.store(items + 7, first, mask=here)
