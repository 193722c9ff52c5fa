"""Blocks that several sequences share: who holds what, and copy-on-write step by step."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from pagedattn.cache import KVCache
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import grid_height, paint_grid
from pagedattn.viz.recording import Frame
from pagedattn.viz.state import OwnerState, PoolState, State, capture_pool
from pagedattn.viz.tables import paint_block_tables

ROW, GAP = 0.3, 0.06  # inches: a sequence's row, and what is free between blocks
NAME_ROOM = 0.5
MAX_COLUMNS, MAX_ROWS = 24, 12
PANEL, PANEL_GAP, PANEL_HEIGHT = 3.1, 0.4, 3.05


@style.styled
def draw_shared_tables(cache: KVCache | State, title: str | None = None) -> style.Picture:
    """A row a sequence, its blocks from left to right; a block that several tables name stands
    once, as high as it has owners. Below, the pool.

    Raises ValueError for anything but a paged cache, for one without a sequence, and for more than
    12 sequences or 24 blocks a sequence.
    """
    state = capture_pool(cache)
    check_rows(state)
    top = style.MARGIN + (0.55 if title else 0.25)
    width = style.WIDTH - 2 * style.MARGIN
    rows, pool = ROW * len(state.tables), grid_height(state, width)
    figure, axes = style.card(top + rows + 0.3 + pool + 0.42, title)
    columns = max(len(ids) for _, ids in state.tables)
    pitch = min(1.1, (width - NAME_ROOM) / columns)
    for i in range(columns):
        first = i * state.block_size
        at = style.MARGIN + NAME_ROOM + i * pitch + (pitch - GAP) / 2
        words = f"{first} to {first + state.block_size - 1}"
        words = words if shapes.fit(words, pitch, style.SMALL) == words else str(first)
        shapes.text(axes, at, top - 0.13, words, fontsize=style.SMALL, color=style.MUTED)
    shapes.text(
        axes, style.MARGIN, top - 0.13, "tokens", ha="left", fontsize=style.SMALL, color=style.MUTED
    )
    paint_shared_tables(axes, style.MARGIN, top, pitch, state)
    y = top + rows + 0.3
    paint_grid(axes, style.MARGIN, y - 0.1, width, state)
    shapes.text(axes, style.MARGIN, y + pool + 0.08, sharing_in_words(state), ha="left")
    return figure


def check_rows(state: PoolState) -> None:
    """Raise ValueError for a state whose tables cannot be drawn as rows."""
    if not state.tables:
        raise ValueError("the cache holds no sequence")
    if len(state.tables) > MAX_ROWS:
        raise ValueError(f"{len(state.tables)} sequences; at most {MAX_ROWS} can be drawn")
    longest = max(len(ids) for _, ids in state.tables)
    if longest > MAX_COLUMNS:
        raise ValueError(f"a table of {longest} blocks; at most {MAX_COLUMNS} can be drawn")


def paint_shared_tables(axes: Axes, x: float, y: float, pitch: float, state: PoolState) -> None:
    """Names on the left, then the tables; ``pitch`` inches from one logical block to the next."""
    tables = in_shared_order(state)
    left = x + NAME_ROOM
    for row, (owner, _) in enumerate(tables):
        colour = style.owner_colour(owner.number)
        room = NAME_ROOM - 0.12
        fits = shapes.fit(owner.name, room) == owner.name
        fontsize = style.NORMAL if fits else style.SMALL
        name = shapes.fit(owner.name, room, fontsize)
        shapes.plate(axes, x + room / 2, y + (row + 0.5) * ROW, name, colour, fontsize)
    for i in range(max(len(ids) for _, ids in tables)):
        row = 0
        while row < len(tables):
            here = tables[row][1][i : i + 1]
            stop = row + 1
            while here and stop < len(tables) and tables[stop][1][i : i + 1] == here:
                stop += 1
            if here:
                block = state.blocks[here[0]]
                words = f"{block.block_id} ×{block.ref_cnt}"
                shapes.block(
                    axes,
                    left + i * pitch,
                    y + row * ROW + GAP / 2,
                    pitch - GAP,
                    (stop - row) * ROW - GAP,
                    block,
                    state.block_size,
                    name=f"row-{row}-block",
                    show_id=False,
                    words=words if block.is_shared else str(block.block_id),
                )
            row = stop


def in_shared_order(state: PoolState) -> list[tuple[OwnerState, tuple[int, ...]]]:
    """The tables, those that begin with the same blocks side by side."""
    order: dict[int, int] = {}  # by first mention
    for _, ids in state.tables:
        for block_id in ids:
            order.setdefault(block_id, len(order))
    return sorted(state.tables, key=lambda table: [order[block_id] for block_id in table[1]])


def sharing_in_words(state: PoolState) -> str:
    """How many blocks there are, and how many there would be without sharing."""
    own = sum(len(ids) for _, ids in state.tables)
    blocks = len({block_id for _, ids in state.tables for block_id in ids})
    return f"{blocks} blocks; without sharing it would be {own}, one for each table entry"


@style.styled
def draw_copy_on_write(frames: Sequence[Frame], title: str | None = None) -> style.Picture:
    """Two moments of a cache a row: its tables, and its pool with each block's ``ref_cnt``. Where a
    table names another block than a moment before, the copy is marked below the pool.

    ``frames`` are those of a Recording. Raises ValueError without one, and for anything but a paged
    cache.
    """
    if not frames:
        raise ValueError("draw_copy_on_write needs at least one frame")
    states = [capture_pool(frame.state) for frame in frames]
    top = style.MARGIN + (0.4 if title else 0.0)
    bottom = top + PANEL_HEIGHT * -(-len(frames) // 2)
    figure, axes = style.card(bottom + 0.32, title)
    for number, (frame, state) in enumerate(zip(frames, states, strict=True)):
        x = style.MARGIN + number % 2 * (PANEL + PANEL_GAP)
        y = top + number // 2 * PANEL_HEIGHT
        shapes.text(axes, x, y + 0.05, frame.caption, ha="left", fontweight="bold")
        blank, name = ("", "", ""), f"step-{number}-"
        paint_block_tables(axes, x, y + 0.22, PANEL, state, blank, 0.0, name=name)
        copies = _copies(states[number - 1], state) if number else []
        for source, target in copies:
            pitch = PANEL / len(state.blocks)
            start, end = (x + (block_id + 0.42) * pitch for block_id in (source, target))
            below = y + 0.22 + 2.2 + 0.36
            curve = FancyArrowPatch(
                (start, below),
                (end, below),
                connectionstyle="arc3,rad=-0.4" if start > end else "arc3,rad=0.4",
                arrowstyle="-|>,head_length=4,head_width=2.5",
                color=style.ACCENT,
                linewidth=1.6,
                gid=f"{name}copy-{source}-to-{target}",
            )
            axes.add_patch(curve)
            at = max(start, end) + 0.12
            shapes.text(axes, at, below + 0.12, "copied", ha="left", color=style.ACCENT)
    note = "×2: the block has ref_cnt 2, two tables name it"
    look = {"ha": "left", "fontsize": style.SMALL, "color": style.MUTED}
    shapes.text(axes, style.MARGIN, bottom + 0.06, note, **look)
    return figure


def _copies(before: PoolState, after: PoolState) -> list[tuple[int, int]]:
    """Blocks that stand in a table in the place of others: (the other, the block)."""
    old = {owner.name: ids for owner, ids in before.tables}
    return [
        (source, target)
        for owner, ids in after.tables
        for source, target in zip(old.get(owner.name, ()), ids, strict=False)
        if source != target
    ]
