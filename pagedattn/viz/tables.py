"""Block tables: each sequence's blocks in order, and where they lie."""

from __future__ import annotations

from matplotlib.axes import Axes

from pagedattn.cache import KVCache
from pagedattn.viz import shapes, style
from pagedattn.viz.state import BlockState, PoolState, State, capture_pool, slots_used

MAX_BLOCKS = 32
LABEL_ROOM = 0.95


@style.styled
def draw_block_tables(cache: KVCache | State, title: str | None = None) -> style.Picture:
    """Each sequence's blocks in the order of its tokens, its block table, and arrows to where the
    blocks lie in the pool. A block that several tables name lies there once.

    Raises ValueError for anything but a paged cache, and for more than 32 blocks.
    """
    state = capture_pool(cache)
    if len(state.blocks) > MAX_BLOCKS:
        raise ValueError(
            f"{len(state.blocks)} blocks; arrows can be drawn for at most {MAX_BLOCKS}"
        )
    top = style.MARGIN + (0.32 if title else 0.0)
    figure, axes = style.card(top + 2.85, title)
    width = style.WIDTH - 2 * style.MARGIN
    paint_block_tables(axes, style.MARGIN, top, width, state)
    return figure


def paint_block_tables(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    state: PoolState,
    labels: tuple[str, str, str] = ("sequence", "block table", "pool"),
    label_room: float = LABEL_ROOM,
    heading: str = "{name}: {tokens} tokens",
    name: str = "",
) -> None:
    """Logical blocks and tables above, the pool below, arrows between; 2.55 inches high."""
    y_logical, y_table, y_pool = y + 0.22, y + 0.72, y + 2.2
    for words, upper in zip(labels, (y_logical, y_table - 0.02, y_pool), strict=True):
        shapes.text(axes, x, upper + 0.17, words, ha="left", color=style.MUTED)
    left, room = x + label_room, width - label_room
    pitch = room / len(state.blocks)
    cell = pitch - min(0.1, 0.16 * pitch)
    for i, block in enumerate(state.blocks):
        gid = f"{name}block"
        at = left + i * pitch
        shapes.block(axes, at, y_pool, cell, 0.34, block, state.block_size, name=gid)
    entry_pitch, gap = _spread(state, room)
    entry = entry_pitch - min(0.1, 0.16 * entry_pitch)
    column = 0.0
    for owner, ids in state.tables:
        colour = style.line_colour(owner.number)
        words = heading.format(name=owner.name, tokens=owner.num_tokens)
        if shapes.fit(words, (len(ids) + gap) * entry_pitch, style.SMALL) != words:
            words = owner.name
        at = left + column * entry_pitch
        shapes.text(axes, at, y_logical - 0.12, words, ha="left", fontsize=style.SMALL)
        for i, block_id in enumerate(ids):
            at = left + column * entry_pitch
            owners = state.blocks[block_id].owners
            own = BlockState(block_id, (owner,), slots_used(owner, i, state.block_size), 1)
            gid = f"{name}logical-{i}-block"
            shapes.block(
                axes,
                at,
                y_logical,
                entry,
                0.34,
                own,
                state.block_size,
                name=gid,
                show_id=False,
                words=str(i),
            )
            shapes.box(axes, at, y_table, entry, 0.3, style.CARD, edgecolor=colour, linewidth=1.1)
            middle = at + entry / 2
            shapes.text(axes, middle, y_table + 0.15, str(block_id), fontweight="bold")
            share = (owners.index(owner) + 1) / (len(owners) + 1)  # arrows arrive side by side
            end = (left + block_id * pitch + share * cell, y_pool - shapes.ID_ROOM - 0.01)
            gid = f"{name}arrow-{owner.number}-{i}-to-{block_id}"
            shapes.arrow(axes, (middle, y_table + 0.3), end, colour, gid=gid)
            column += 1
        column += gap


def _spread(state: PoolState, room: float) -> tuple[float, float]:
    """The step from one table entry to the next, and the gap between two tables, in such steps.

    Tables that name fewer blocks than there are stand above the pool with its pitch. Tables that
    share blocks can name more, and move together.
    """
    entries, num_tables = sum(len(ids) for _, ids in state.tables), max(1, len(state.tables))
    spare = len(state.blocks) - entries
    if spare > 0:
        return room / len(state.blocks), min(1.0, spare / num_tables)
    return room / (entries + 0.5 * (num_tables - 1)), 0.5
