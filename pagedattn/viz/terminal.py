"""The memory of a cache, drawn with letters in a terminal.

Colour helps, but nothing rests on it: a letter says whose token lies there, a dot is a slot that is
reserved and empty, a blank is free, digits begin a digest. So the drawings read the same in a file
or without colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagedattn.cache import Config, KVCache, Usage
from pagedattn.contiguous import kv_bytes_per_token
from pagedattn.viz import style
from pagedattn.viz.state import BlockState, OwnerState, PoolState, State, capture

BLOCK_WIDTH = 8  # a block has at most so many letters, a slab so many:
SLAB_WIDTH = 40
EMPTY, FREE, NULL, LOST = ".", " ", "/", "?"
DIGEST, HIT, ON_SHARED = "#", "✓", "×"


@dataclass(frozen=True)
class _Region:
    """A block or slab: its number or first slot, its owners, its used slots. ``kind`` says with
    what to fill it when it has no owner: one letter, or as many as there is room for."""

    number: int
    num_slots: int
    owners: tuple[OwnerState, ...] = ()
    num_used: int = 0
    kind: str = FREE
    note: str = ""


def draw_pool(cache: KVCache | State) -> RenderableType:
    """Each block of a paged cache as ``12[AAAAA...]``, or each slab of a contiguous one.

    A block in several tables shows the letters of all its owners in turn, and its ``ref_cnt``
    behind it: ``3[ABABAB..]×2``. A free block that can be found shows how its digest begins:
    ``4[#9c1e07b]``; one that was free and found has a tick: ``4[AAAAAAAA]✓``. A block that is
    neither in a table nor in the free queue is lost, and filled with question marks.

    Raises ValueError for anything but a cache.
    """
    state = capture(cache)
    regions = _regions(state)
    paged = isinstance(state, PoolState)
    widest = max(region.num_slots for region in regions)
    slots_a_letter = -(-widest // (BLOCK_WIDTH if paged else SLAB_WIDTH))
    digits = len(str(regions[-1].number))
    cells = [
        Text.assemble(
            f"{region.number:>{digits}}",
            ("[", "dim"),
            _bar(region, slots_a_letter),
            ("]", "dim"),
            (region.note, "bold"),
        )
        for region in regions
    ]
    slots = "one slot" if slots_a_letter == 1 else f"{slots_a_letter} slots"
    legend = f"a letter: {slots} used   {EMPTY} reserved, empty   blank: free"
    if paged:
        legend += f"   {NULL} null block"
    if any(region.kind == LOST and not region.owners for region in regions):
        legend += f"   {LOST} lost: in no table, and not free"
    if any(ON_SHARED in region.note for region in regions):
        legend += f"\n{ON_SHARED}n: ref_cnt n"
    for marks in _digest_legend(regions):
        legend += f"\n{marks}"
    grid = Columns(cells, padding=(0, 1)) if paged else Group(*cells)
    return Group(grid, Text(legend, style="dim"))


def _digest_legend(regions: Sequence[_Region]) -> Iterator[str]:
    if any(region.kind.startswith(DIGEST) for region in regions):
        yield f"{DIGEST}: free, and can be found; behind it the digest's first digits"
    if any(HIT in region.note for region in regions):
        yield f"{HIT}: a hit, was free and was found"


def draw_strip(cache: KVCache | State, block_size: int) -> Text:
    """The whole memory in one line, a letter for each ``block_size`` slots: who lies where."""
    bars = [_bar(region, block_size) for region in _regions(capture(cache))]
    return Text.assemble(("[", "dim"), *bars, ("]", "dim"))


def draw_block_tables(cache: KVCache | State) -> Table:
    """For each sequence, where its logical blocks lie: ``0→5×2  1→2  2→7``, with the ``ref_cnt`` of
    a block that is shared; or its slab."""
    state = capture(cache)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("sequence")
    table.add_column("tokens", no_wrap=True)
    if isinstance(state, PoolState):
        table.add_column("block table: logical → physical block")
        for owner, block_ids in state.tables:
            full, rest = divmod(owner.num_tokens, state.block_size)
            tokens = f"{owner.num_tokens} = {full} × {state.block_size} + {rest}"
            entries = (
                f"{i}→{block_id}{_ref_cnt(state.blocks[block_id])}"
                for i, block_id in enumerate(block_ids)
            )
            table.add_row(_name(owner), tokens, "  ".join(entries))
    else:
        table.add_column("slab")
        for owner, start, size in sorted(state.slabs, key=lambda slab: slab[0].number):
            where = f"slots {start} to {start + size - 1}: {size} slots"
            table.add_row(_name(owner), str(owner.num_tokens), where)
    return table


def draw_memory(usage: Usage, config: Config, num_seqs: int) -> RenderableType:
    """What is stored, reserved and wasted, in slots and bytes; and what as many slabs of
    ``max_seq_len`` slots would take."""
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
    slot_bytes = kv_bytes_per_token(*sizes, config.dtype)
    slabs = num_seqs * config.max_seq_len
    name = "1 slab" if num_seqs == 1 else f"{num_seqs} slabs"
    wasted = f"{usage.wasted / usage.reserved:.1%} of reserved" if usage.reserved else ""
    more = f"{slabs / usage.reserved:,.0f} times as much" if usage.reserved else ""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("memory")
    table.add_column("slots", justify="right")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("")
    for words, slots, note in (
        ("stored tokens", usage.used, ""),
        ("reserved", usage.reserved, ""),
        ("wasted: reserved, empty", usage.wasted, wasted),
        ("free", usage.free, ""),
        (f"{name} of max_seq_len {config.max_seq_len}", slabs, more),
    ):
        table.add_row(words, f"{slots:,}", _in_bytes(slots * slot_bytes), note)
    table.rows[-2].end_section = True
    notes = (
        "Slabs: contiguous memory for the longest sequence possible, as in chapter 01.\n"
        f"One slot: 2 (K, V) × {config.num_layers} layers × {config.num_kv_heads} KV heads × "
        f"{config.head_dim} numbers × {config.dtype.itemsize} bytes = {slot_bytes:,} bytes."
    )
    return Group(table, Text(notes, style="dim"))


def _regions(state: State) -> list[_Region]:
    if not isinstance(state, PoolState):
        slabs = [_Region(start, n, (o,), o.num_tokens) for o, start, n in state.slabs]
        holes = [_Region(start, size) for start, size in state.holes]
        return sorted(slabs + holes, key=lambda region: region.number)
    free = set(state.free_queue)
    regions = []
    for block in state.blocks:
        kind = NULL if block.is_null else FREE if block.block_id in free else LOST
        if kind == FREE and block.is_findable:
            kind = DIGEST + block.digits(BLOCK_WIDTH)
        regions.append(
            _Region(
                block.block_id,
                state.block_size,
                block.owners,
                block.num_used,
                kind,
                _ref_cnt(block) + HIT * block.is_hit,
            )
        )
    return regions


def _ref_cnt(block: BlockState) -> str:
    return f"{ON_SHARED}{block.ref_cnt}" if block.is_shared else ""


def _bar(region: _Region, slots_a_letter: int) -> Text:
    width = -(-region.num_slots // slots_a_letter)
    if not region.owners:
        return Text("".join(islice(cycle(region.kind), width)), style="dim")
    filled = -(-region.num_used // slots_a_letter)
    letters = [(letter, _colour(owner)) for owner in region.owners for letter in owner.name]
    bar = Text()
    for letter, colour in islice(cycle(letters), filled):
        bar.append(letter, style=_on(colour))
    return bar.append(EMPTY * (width - filled), style=_colour(region.owners[0]))


def label(name: str, number: int) -> Text:
    """A sequence's name on the colour that its blocks have."""
    return Text.assemble((f" {name} ", f"bold {_on(style.owner_colour(number))}"))


def _on(colour: str) -> str:
    return f"{style.ink_on(colour)} on {colour}"


def _colour(owner: OwnerState) -> str:
    return style.owner_colour(owner.number)


def _name(owner: OwnerState) -> Text:
    return label(owner.name, owner.number)


def _in_bytes(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def joined(names: Iterable[str]) -> str:
    """Names in a sentence: ``A``, ``A and B``, ``A, B and C``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
