"""Block tables: each sequence's blocks in order, and where they lie."""

from __future__ import annotations

from matplotlib.axes import Axes

from pagedattn.cache import KVCache
from pagedattn.viz import shapes, style
from pagedattn.viz.state import PoolState, State, capture_pool

MAX_BLOCKS = 32
LABEL_ROOM = 0.95


@style.styled
def draw_block_tables(cache: KVCache | State, title: str | None = None) -> style.Picture:
    """Each sequence's blocks in the order of its tokens, its block table, and arrows to where the
    blocks lie in the pool.

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
    pitch = (width - label_room) / len(state.blocks)
    cell = pitch - min(0.1, 0.16 * pitch)

    def place(i: float) -> float:
        return x + label_room + i * pitch

    for i, block in enumerate(state.blocks):
        gid = f"{name}block"
        shapes.block(axes, place(i), y_pool, cell, 0.34, block, state.block_size, name=gid)
    spare = len(state.blocks) - sum(len(ids) for _, ids in state.tables)
    gap = min(1.0, spare / max(1, len(state.tables)))
    column = 0.0
    for owner, ids in state.tables:
        colour = style.line_colour(owner.number)
        words = heading.format(name=owner.name, tokens=owner.num_tokens)
        if shapes.fit(words, (len(ids) + gap) * pitch, style.SMALL) != words:
            words = owner.name
        at = place(column)
        shapes.text(axes, at, y_logical - 0.12, words, ha="left", fontsize=style.SMALL)
        for i, block_id in enumerate(ids):
            at = place(column)
            shapes.block(
                axes,
                at,
                y_logical,
                cell,
                0.34,
                state.blocks[block_id],
                state.block_size,
                name=f"{name}logical-{i}-block",
                show_id=False,
                words=str(i),
            )
            shapes.box(axes, at, y_table, cell, 0.3, style.CARD, edgecolor=colour, linewidth=1.1)
            middle = at + cell / 2
            shapes.text(axes, middle, y_table + 0.15, str(block_id), fontweight="bold")
            end = (place(block_id) + cell / 2, y_pool - shapes.ID_ROOM - 0.01)
            gid = f"{name}arrow-{owner.number}-{i}-to-{block_id}"
            shapes.arrow(axes, (middle, y_table + 0.3), end, colour, gid=gid)
            column += 1
        column += gap
