"""Kernel blocks: a block table as the manager and as an attention kernel count it."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes

from pagedattn.manager import BlockTable, compute_slot_mapping
from pagedattn.viz import shapes, style

MAX_KERNEL_BLOCKS = 28
GAP, HEIGHT = 0.12, 0.32
COLOUR = style.owner_colour(0)


@style.styled
def draw_kernel_blocks(
    table: BlockTable, row: int, position: int, title: str | None = None
) -> style.Picture:
    """The blocks of a row as the manager gave them, the kernel blocks that stand for them in the
    table, where both lie in the pool, and the slot of one position, counted in both.

    The pool is drawn up to one block behind the highest of the row. Raises ValueError for a
    position that the row does not reach, and if that is more than 28 kernel blocks.
    """
    ratio = table.blocks_per_kv_block
    entries = table.table[row, : table.num_blocks[row]].tolist()
    block_ids = [entry // ratio for entry in entries[::ratio]]
    if not 0 <= position < len(block_ids) * table.block_size:
        raise ValueError(
            f"position {position}; row {row} has {len(block_ids)} blocks of {table.block_size}"
        )
    num_shown = (max(block_ids) + 2) * ratio
    if num_shown > MAX_KERNEL_BLOCKS:
        raise ValueError(
            f"the pool up to block {max(block_ids) + 1} has {num_shown} kernel blocks; at most "
            f"{MAX_KERNEL_BLOCKS} can be drawn"
        )
    top = style.MARGIN + (0.46 if title else 0.14)
    figure, axes = style.card(top + 3.0, title)
    _paint(axes, top, table, entries, position)
    _paint_arithmetic(axes, top + 2.2, table, entries, position)
    return figure


def _paint(axes: Axes, top: float, table: BlockTable, entries: list[int], position: int) -> None:
    """The manager's ids, the table's, and the pool, with an arrow for each entry."""
    ratio, kernel_block_size = table.blocks_per_kv_block, table.kernel_block_size
    num_shown = max(entries) // ratio + 2
    left, width = style.MARGIN, style.WIDTH - 2 * style.MARGIN
    pitch = min((width + GAP) / max(num_shown, len(entries) // ratio), 1.5)
    cell = pitch - GAP
    part = cell / ratio
    y_table, y_pool = top + 0.33, top + 1.42
    chosen = position // kernel_block_size

    for i in range(0, len(entries), ratio):
        x = left + i // ratio * pitch
        block_id = entries[i] // ratio
        shapes.box(
            axes, x, top, cell, HEIGHT, style.CARD,
            edgecolor=COLOUR, linewidth=1.1, gid=f"block-{block_id}",
        )  # fmt: skip
        _number(axes, x + cell / 2, top + HEIGHT / 2, block_id, style.CARD, fontweight="bold")
    for i, entry in enumerate(entries):
        x = left + i // ratio * pitch + i % ratio * part
        marked = i == chosen
        fill = COLOUR if marked else style.tint(COLOUR)
        gid = f"entry-{i}-block-{entry}" + "-marked" * marked
        shapes.box(axes, x, y_table, part, HEIGHT, fill, edgecolor=COLOUR, linewidth=0.8, gid=gid)
        _number(axes, x + part / 2, y_table + HEIGHT / 2, entry, fill)
        goal = left + entry // ratio * pitch + (entry % ratio + 0.5) * part
        start = (x + part / 2, y_table + HEIGHT + 0.02)
        look = {"linewidth": 1.6} if marked else {"linewidth": 0.9}
        shapes.arrow(axes, start, (goal, y_pool - 0.19), COLOUR, **look)
    words = (
        f"what the manager gave: blocks of {table.block_size} tokens; "
        f"below, the block table: kernel blocks of {kernel_block_size}"
    )
    _note(axes, left, top - 0.13, words)

    _note(axes, left, y_pool - 0.36, "the pool")
    for block_id in range(num_shown):
        x = left + block_id * pitch
        held = block_id * ratio in entries
        ink = {"color": style.INK, "fontweight": "bold"} if held else {}
        _note(axes, x + cell / 2, y_pool - 0.1, str(block_id), ha="center", **ink)
        for i in range(ratio):
            kernel_block = block_id * ratio + i
            marked = kernel_block == entries[chosen]
            fill = COLOUR if marked else style.tint(COLOUR) if held else style.FREE
            at, gid = x + i * part, f"kernel-block-{kernel_block}" + "-marked" * marked
            shapes.box(axes, at, y_pool, part, HEIGHT, fill, linewidth=0.6, gid=gid)
            if block_id:
                _number(axes, at + part / 2, y_pool + HEIGHT / 2, kernel_block, fill)
        if block_id == 0:
            shapes.box(axes, x, y_pool, cell, HEIGHT, style.FREE, hatch="xxxx", linewidth=0.6)
            middle = (x + cell / 2, y_pool + HEIGHT / 2)
            shapes.plate(axes, *middle, "null", style.FREE, style.SMALL, "normal")
        edge = COLOUR if held else style.LINE
        shapes.box(axes, x, y_pool, cell, HEIGHT, "none", edgecolor=edge, linewidth=1.2)


def _paint_arithmetic(
    axes: Axes, y: float, table: BlockTable, entries: list[int], position: int
) -> None:
    """The slot of the position, in the manager's blocks and in the kernel's: the same number."""
    ratio = table.blocks_per_kv_block
    ways = (
        ("the manager counts", table.block_size, [entry // ratio for entry in entries[::ratio]]),
        ("the kernel counts", table.kernel_block_size, entries),
    )
    _note(axes, style.MARGIN, y - 0.08, f"Where is the token at position {position}?")
    for i, (words, block_size, ids) in enumerate(ways):
        column, offset = divmod(position, block_size)
        slot = int(
            compute_slot_mapping(
                torch.tensor([ids]), torch.tensor([0, 1]), torch.tensor([position]), block_size
            )
        )
        at = y + 0.18 + 0.24 * i
        _note(axes, style.MARGIN, at, words)
        steps = (
            f"{position} // {block_size} = {column}",
            f"table[{column}] = {ids[column]}",
            f"{ids[column]} × {block_size} + {offset} = {slot}",
        )
        for x, step, last in zip((1.75, 3.25, 4.75), steps, (False, False, True), strict=True):
            look = {"color": style.ACCENT, "fontweight": "bold"} if last else {}
            shapes.text(axes, x, at, step, ha="left", **shapes.MONO, **look)


def _number(axes: Axes, x: float, y: float, number: int, fill: str, **look: Any) -> None:
    shapes.text(axes, x, y, str(number), fontsize=style.SMALL, color=style.ink_on(fill), **look)


def _note(axes: Axes, x: float, y: float, words: str, **kwargs: Any) -> None:
    options = {"ha": "left", "color": style.MUTED, "fontsize": style.SMALL, **kwargs}
    shapes.text(axes, x, y, words, **options)
