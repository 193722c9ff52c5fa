"""Our kernels at the rows of `pagedattn bench kernels`: their calls, and what their results must
be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from pagedattn.bench.installed_peers import WRITES
from pagedattn.bench.kernel_inputs import Batch, Pool, Trial, Write, unequal
from pagedattn.bench.kernel_rows import (
    COPIES,
    MIXED,
    NUM_HEADS,
    TOKENS,
    AttentionRow,
    SmallRow,
)
from pagedattn.kernels import (
    AttentionPlan,
    attention,
    compute_slot_mapping,
    copy_blocks,
    hopper,
    merge_attention_states,
    new_plan,
    paged_attention,
    plan_attention,
    write_kv,
)
from pagedattn.kernels.naive import naive_paged_decode

SETS = 4  # of inputs of the small kernels: each is tens of megabytes


def attention_trial(batches: list[Batch], make_plan: Callable[[Batch], AttentionPlan]) -> Trial:
    """`paged_attention` of each batch, its plan made beforehand, as a step's layers find it."""

    def call(batch: Batch, plan: AttentionPlan) -> Callable[[], Tensor]:
        return lambda: paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
            batch.query_start_loc, plan=plan, k_scale=batch.scale, v_scale=batch.scale,
            out=batch.out,
        )  # fmt: skip

    for batch in batches:
        batch.out.fill_(float("nan"))  # what another trial left there may be right
    return Trial([call(batch, make_plan(batch)) for batch in batches], batches[0].error)


def made_plan(batch: Batch) -> AttentionPlan:
    """The plan as it is meant."""
    plan = _empty_plan(batch)
    plan_attention(plan, batch.seq_lens, batch.query_start_loc, batch.block_table)
    return plan


def unsplit_plan(batch: Batch) -> AttentionPlan:
    """A plan that cuts no decode row: one program has all keys of a row and KV head."""
    plan = replace(_empty_plan(batch), target_splits=1)
    plan_attention(plan, batch.seq_lens, batch.query_start_loc, batch.block_table)
    return plan


def _empty_plan(batch: Batch) -> AttentionPlan:
    row = batch.row
    return new_plan(
        len(row.seq_lens), row.num_tokens, row.num_heads, row.num_kv_heads, row.head_dim,
        dtype=batch.q.dtype, has_prefill=row.has_prefill, device=batch.q.device,
        share_block_size=row.block_size if row.share else None,
        batch_invariant=row.batch_invariant,
    )  # fmt: skip


@contextmanager
def _plain() -> Iterator[None]:
    """Inside, the kernels are those of every machine."""
    with patch.object(hopper, "is_hopper", lambda device: False):
        yield


@contextmanager
def _without_pipelining() -> Iterator[None]:
    """Inside, these fetch no tile of a decode program before it needs it."""
    tile = attention.decode_tile
    one_stage = patch.object(
        attention, "decode_tile", lambda *call: tile(*call)._replace(num_stages=1)
    )
    with _plain(), one_stage:
        yield


def climb_trials(batches: list[Batch]) -> dict[str, Callable[[], Trial]]:
    """The steps from the first decode kernel to the one that is shipped, in order."""
    return {
        "naive": lambda: _naive_trial(batches),
        "packed": lambda: _inside(_without_pipelining, batches, unsplit_plan),
        "split": lambda: _inside(_without_pipelining, batches, made_plan),
        "pipelined": lambda: _inside(_plain, batches, made_plan),
        "Hopper": lambda: attention_trial(batches, made_plan),
    }


def _naive_trial(batches: list[Batch]) -> Trial:
    def call(batch: Batch) -> Callable[[], Tensor]:
        return lambda: naive_paged_decode(
            batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens
        )

    return Trial([call(batch) for batch in batches], batches[0].error)


def _inside(
    context: Callable[[], AbstractContextManager[None]],
    batches: list[Batch],
    make_plan: Callable[[Batch], AttentionPlan],
) -> Trial:
    """Attention whose plans are made, and whose calls are run, inside a context."""
    with context():
        trial = attention_trial(batches, make_plan)
    return replace(trial, context=context)


Small = tuple[Trial, dict[str, Callable[[], Trial]]]


def small_trials(pool: Pool, row: SmallRow, batch: Batch | None) -> Small:
    """Ours, and others that do the same. ``batch`` is one of ``row.attention``."""
    if batch:
        return _plan_trial(batch), {}
    kinds = {"write": _writes, "copy": _copies, "merge": _merges, "slots": _slots}
    return kinds[row.name.partition(" ")[0]](pool)


def _writes(pool: Pool) -> Small:
    """Whole blocks in any order, as a prefill has them."""
    k_cache, v_cache = pool.cache(MIXED)
    num_blocks, block_size, num_heads, head_dim = k_cache.shape
    tokens = min(TOKENS, num_blocks // 8 * block_size)
    blocks = pool.permuted(num_blocks, tokens // block_size * SETS).view(SETS, -1)
    slots = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)
    writes = [
        Write(
            k_cache, v_cache, pool.randn(tokens, num_heads, head_dim),
            pool.randn(tokens, num_heads, head_dim), blocks[i], slots[i].flatten(),
        )
        for i in range(SETS)
    ]  # fmt: skip
    # Others write other numbers than we: what we have left there would not do.
    others = [replace(write, k=write.v, v=write.k) for write in writes]
    peers: dict[str, Callable[[], Trial]] = {
        name: partial(_write_trial, make, others)
        for name, make in {"torch index_copy_": _index_copy, **WRITES}.items()
    }
    return _write_trial(_our_write, writes), peers


def _write_trial(make: Callable[[Write], Callable[[], object]], writes: list[Write]) -> Trial:
    return Trial([make(write) for write in writes], writes[0].error)


def _our_write(write: Write) -> Callable[[], None]:
    return lambda: write_kv(write.k_cache, write.v_cache, write.k, write.v, write.slots)


def _index_copy(write: Write) -> Callable[[], None]:
    def call() -> None:
        for cache, numbers in write.pairs():
            cache.index_copy_(0, write.slots, numbers)

    return call


def _copies(pool: Pool) -> Small:
    k_cache, v_cache = (cache[None] for cache in pool.cache(MIXED))
    num_blocks = k_cache.shape[1]
    copies = min(COPIES, (num_blocks - 1) // (2 * SETS))
    ids = pool.permuted(num_blocks, 2 * copies * SETS).view(SETS, 2, copies)

    def ours(i: int) -> Callable[[], None]:
        return lambda: copy_blocks(k_cache, v_cache, *ids[i])

    def index(i: int) -> Callable[[], None]:
        sources, destinations = ids[i - 1][0], ids[i][1]  # or what ours has left would do

        def call() -> None:
            for cache in (k_cache, v_cache):
                cache[:, destinations] = cache[:, sources]

        return call

    def error(which: int) -> float:
        sources, destinations = ids[which][0], ids[0][1]
        return unequal(
            *((cache[:, destinations], cache[:, sources]) for cache in (k_cache, v_cache))
        )

    return Trial([ours(i) for i in range(SETS)], lambda _: error(0)), {
        "torch index": lambda: Trial([index(i) for i in range(SETS)], lambda _: error(-1))
    }


def _merges(pool: Pool) -> Small:
    tokens = min(TOKENS, pool.k.numel() // 2**12)
    parts = [(pool.randn(tokens, NUM_HEADS, 128), _lse(pool, tokens)) for _ in range(2 * SETS)]

    def ours(i: int) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: merge_attention_states(*parts[2 * i], *parts[2 * i + 1])

    def error(merged: tuple[Tensor, Tensor]) -> float:
        out_a, lse_a, out_b, lse_b = (part.double() for part in (*parts[0], *parts[1]))
        lse = torch.logaddexp(lse_a, lse_b)
        out = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
        found = [part.double() for part in merged]
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, (out, lse), strict=True))

    return Trial([ours(i) for i in range(SETS)], error), {}


def _lse(pool: Pool, tokens: int) -> Tensor:
    return torch.randn(tokens, NUM_HEADS, device=pool.k.device) + 5


def _slots(pool: Pool) -> Small:
    """Prefill chunks of 64 tokens of 128 sequences."""
    device = pool.k.device
    rows, chunk = 128, TOKENS // 128
    table = torch.randint(1, 2**16, (rows, 1024), dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * chunk
    first = torch.randint(0, 16384 - chunk, (rows, 1), device=device)
    positions = (first + torch.arange(chunk, device=device)).flatten()
    out = torch.full_like(positions, -7)

    def error(slots: Tensor) -> float:
        owners = torch.arange(rows, device=device).repeat_interleave(chunk)
        expected = table[owners, positions // 16].long() * 16 + positions % 16
        return unequal((slots, expected))

    return Trial([lambda: compute_slot_mapping(table, starts, positions, 16, out=out)], error), {}


def _plan_trial(batch: Batch) -> Trial:
    plan = _empty_plan(batch)
    return Trial(
        [lambda: plan_attention(plan, batch.seq_lens, batch.query_start_loc, batch.block_table)],
        lambda _: _uncovered(plan, batch.row),
    )


def _uncovered(plan: AttentionPlan, row: AttentionRow) -> float:
    """0 if the items of the plan are all keys of the decode rows and all queries of the others,
    each once."""
    num_splits, num_tiles = plan.num_items.tolist()
    keys = [(item[0], item[4], item[5]) for item in plan.decode_items[:num_splits].tolist()]
    keys += _shared_keys(plan, row)
    queries = [(item[1], item[1] + item[2]) for item in plan.prefill_items[:num_tiles].tolist()]
    kinds = list(enumerate(zip(row.seq_lens, row.query_lens, strict=True)))
    decodes = [(n, seq_len) for n, (seq_len, length) in kinds if length <= plan.decode_queries]
    splits_fit = all(
        _tile([(begin, end) for owner, begin, end in keys if owner == number], 0, seq_len)
        for number, seq_len in decodes
    )
    chunks = sum(length for length in row.query_lens if length > plan.decode_queries)
    first = 0 if row.query_lens[0] > plan.decode_queries else row.num_tokens
    tiles_fit = _tile(queries, first, first + chunks)
    return 0.0 if splits_fit and tiles_fit else float("inf")


def _shared_keys(plan: AttentionPlan, row: AttentionRow) -> list[tuple[int, int, int]]:
    """Each row's keys that are read for others as well: the row, the first key, the end."""
    if plan.shared is None:
        return []
    owners = [number for number, length in enumerate(row.query_lens) for _ in range(length)]
    tokens = plan.shared.members[:, 0].tolist()
    items = plan.shared.items[: int(plan.shared.num_items)].tolist()
    return [
        (number, begin, end)
        for _, begin, end, first, count, _ in items
        for number in sorted({owners[token] for token in tokens[first : first + count]})
    ]


def _tile(ranges: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Whether the ranges follow each other from begin to end."""
    for low, high in sorted(ranges):
        if low != begin or high <= low:
            return False
        begin = high
    return begin == end
