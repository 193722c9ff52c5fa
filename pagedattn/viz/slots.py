"""Slot mapping: from a token's position to its slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from pagedattn.paged import compute_slot_mapping
from pagedattn.viz import shapes, style
from pagedattn.viz.state import BlockState

MAX_BLOCKS, MAX_BLOCK_SIZE = 12, 16
GAP = 0.1
NUMBERED = 0.15  # a slot wider than this carries its number
COLOUR = style.owner_colour(0)


@style.styled
def draw_slot_mapping(
    block_table_row: Sequence[int], block_size: int, position: int, title: str | None = None
) -> style.Picture:
    """How one token's slot is found: its entry in the block table, its offset in that block.

    Raises ValueError for an empty table or one of more than 12 blocks, a block id below 1, a
    ``block_size`` over 16, or a position that the table does not reach.
    """
    table = [int(block_id) for block_id in block_table_row]
    if not 1 <= len(table) <= MAX_BLOCKS or min(table) < 1:
        raise ValueError(f"block table {table}; it needs 1 to {MAX_BLOCKS} ids, each at least 1")
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size is {block_size}; slots can be drawn for 1 to 16")
    if not 0 <= position < len(table) * block_size:
        raise ValueError(
            f"position {position}; {len(table)} blocks of {block_size} slots hold positions "
            f"0 to {len(table) * block_size - 1}"
        )
    row = torch.tensor([table], dtype=torch.int32)
    start, positions = torch.tensor([0, 1]), torch.tensor([position])
    slot = int(compute_slot_mapping(row, start, positions, block_size))
    top = style.MARGIN + (0.44 if title else 0.08)
    figure, axes = style.card(top + 2.85, title)
    _paint(axes, top, table, block_size, position)
    _paint_arithmetic(axes, top + 2.32, table, block_size, position, slot)
    return figure


def _paint(axes: Axes, top: float, table: list[int], block_size: int, position: int) -> None:
    """The sequence's positions, its table, the pool, and the way of one position through them."""
    entry, offset = divmod(position, block_size)
    # The whole pool when it is small, else the table's blocks alone.
    shown = list(range(max(table) + 1)) if max(table) < MAX_BLOCKS else sorted(set(table))
    left, width = style.MARGIN, style.WIDTH - 2 * style.MARGIN
    pitch = min((width + GAP) / max(len(shown), len(table)), 1.3)
    cell = pitch - GAP
    y_table, y_pool = top + 0.62, top + 1.62

    _note(axes, left, top - 0.12, "positions of the sequence")
    for i, block_id in enumerate(table):
        x, chosen = left + i * pitch, i == entry
        mark = offset if chosen else None
        _paint_slots(axes, x, top, cell, block_size, i, mark, style.tint(COLOUR), "position")
        fill = COLOUR if chosen else style.CARD
        shapes.box(axes, x, y_table, cell, 0.3, fill, edgecolor=COLOUR, linewidth=1.1)
        ink = style.ink_on(fill)
        shapes.text(axes, x + cell / 2, y_table + 0.15, str(block_id), fontweight="bold", color=ink)
        if chosen:
            middle, end = x + cell / 2, left + shown.index(block_id) * pitch + cell / 2
            marked = x + (offset + 0.5) * cell / block_size
            shapes.arrow(axes, (marked, top + 0.32), (marked, y_table - 0.02), COLOUR)
            if cell / block_size <= NUMBERED:
                _note(axes, marked + 0.07, top + 0.43, str(position), color=style.ACCENT)
            shapes.arrow(axes, (middle, y_table + 0.3), (end, y_pool - 0.19), COLOUR)
    if len(table) * pitch < width - 0.8:
        _note(axes, left + len(table) * pitch, y_table + 0.15, "block table")
    _note(axes, left, y_pool - 0.28, "slots of the pool")
    for i, block_id in enumerate(shown):
        x = left + i * pitch
        if block_id == 0:
            null = BlockState(0, is_null=True)
            shapes.block(axes, x, y_pool, cell, 0.3, null, block_size)
            continue
        fill = style.tint(COLOUR) if block_id in table else style.FREE
        mark = offset if block_id == table[entry] else None
        _paint_slots(axes, x, y_pool, cell, block_size, block_id, mark, fill, "slot")
        if mark is not None and cell / block_size <= NUMBERED:
            at = x + (mark + 0.5) * cell / block_size
            slot = str(block_id * block_size + mark)
            _note(axes, at, y_pool + 0.4, slot, color=style.ACCENT, ha="center")
        shapes.text(
            axes,
            x + cell / 2,
            y_pool - 0.09,
            str(block_id),
            fontsize=style.SMALL,
            color=style.MUTED,
        )


def _paint_slots(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    block_size: int,
    index: int,
    mark: int | None,
    fill: str,
    name: str,
) -> None:
    """The slots of block ``index``, numbered where there is room; the marked one stands out."""
    step = width / block_size
    for i in range(block_size):
        number, marked = index * block_size + i, i == mark
        face = style.ACCENT if marked else fill
        gid = f"{name}-{number}" + ("-marked" if marked else "")
        shapes.box(axes, x + i * step, y, step, 0.3, face, linewidth=0.6, gid=gid)
        if step > NUMBERED:
            shapes.text(
                axes,
                x + (i + 0.5) * step,
                y + 0.15,
                str(number),
                fontsize=7.0,
                color=style.ink_on(face),
                fontweight="bold" if marked else "normal",
            )


def _paint_arithmetic(
    axes: Axes, y: float, table: list[int], block_size: int, position: int, slot: int
) -> None:
    entry, offset = divmod(position, block_size)
    steps = (
        ("entry", f"{position} // {block_size} = {entry}"),
        ("block", f"table[{entry}] = {table[entry]}"),
        ("offset", f"{position} % {block_size} = {offset}"),
        ("slot", f"{table[entry]} × {block_size} + {offset} = {slot}"),
    )
    for i, (words, formula) in enumerate(steps):
        x = style.MARGIN + i * 1.62
        last = i == len(steps) - 1
        _note(axes, x, y, words)
        shapes.text(
            axes,
            x,
            y + 0.2,
            formula,
            ha="left",
            family="DejaVu Sans Mono",
            color=style.ACCENT if last else style.INK,
            fontweight="bold" if last else "normal",
        )


def _note(axes: Axes, x: float, y: float, words: str, **kwargs: str) -> None:
    options: dict[str, Any] = {"ha": "left", "color": style.MUTED, **kwargs}
    shapes.text(axes, x, y, words, fontsize=style.SMALL, **options)
