"""Context parallelism: which rank keeps a token, and in which of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from pagedattn.manager import ContextParallel, compute_slot_mapping
from pagedattn.viz import shapes, style

MAX_RANKS, MAX_TOKENS, MAX_SLOTS = 4, 20, 32
HEIGHT, LABEL_ROOM = 0.28, 1.0


@style.styled
def draw_rank_slots(
    block_table_row: Sequence[int],
    block_size: int,
    num_tokens: int,
    *,
    world_size: int = 2,
    interleave: int = 1,
    title: str | None = None,
) -> style.Picture:
    """The tokens of a sequence in the colours of the ranks that keep them, the slot mapping of each
    rank, and what then stands in the blocks of each.

    Raises ValueError unless there are 2 to 4 ranks, 1 to 20 tokens that the table reaches, and at
    most 32 slots on all ranks; and for an interleave that does not divide the block size.
    """
    table = [int(block_id) for block_id in block_table_row]
    num_slots = len(table) * block_size * world_size
    if not 2 <= world_size <= MAX_RANKS:
        raise ValueError(f"{world_size} ranks; 2 to {MAX_RANKS} can be drawn")
    if num_slots > MAX_SLOTS:
        raise ValueError(f"{num_slots} slots on all ranks; at most {MAX_SLOTS} can be drawn")
    if not 1 <= num_tokens <= min(MAX_TOKENS, num_slots):
        raise ValueError(
            f"{num_tokens} tokens; the table holds {num_slots} and 1 to {MAX_TOKENS} can be drawn"
        )
    ranks = [
        ContextParallel(dcp_world_size=world_size, dcp_rank=rank, interleave=interleave)
        for rank in range(world_size)
    ]
    starts, positions = torch.tensor([0, num_tokens]), torch.arange(num_tokens)
    slots = [
        compute_slot_mapping(
            torch.tensor([table]), starts, positions, block_size, context_parallel=rank
        ).tolist()
        for rank in ranks
    ]
    kept = [int(rank.local_seq_lens(torch.tensor(num_tokens))) for rank in ranks]
    top = style.MARGIN + (0.32 if title else 0.0)
    memory = top + 0.72 + 0.36 * world_size + 0.32
    figure, axes = style.card(memory + 1.1, title)
    _paint_mappings(axes, top, table, block_size, interleave, slots)
    _paint_memories(axes, memory, table, block_size, kept, slots)
    return figure


def _paint_mappings(
    axes: Axes,
    top: float,
    table: list[int],
    block_size: int,
    interleave: int,
    slots: list[list[int]],
) -> None:
    """Positions above, the slot that each rank has for them below."""
    num_tokens, together = len(slots[0]), block_size * len(slots)
    left, room = style.MARGIN + LABEL_ROOM, style.WIDTH - 2 * style.MARGIN - LABEL_ROOM
    gaps = (num_tokens - 1) // interleave * 0.3 + (num_tokens - 1) // together * 0.5
    cell = min(room / (num_tokens + gaps), 0.42)

    def place(position: int) -> float:
        shifts = position // interleave * 0.3 + position // together * 0.5
        return left + (position + shifts) * cell

    y = top + 0.22
    for column, block_id in enumerate(table):
        first, last = column * together, min((column + 1) * together, num_tokens) - 1
        if first <= last:
            start, end = place(first), place(last) + cell
            axes.plot([start, end], [y - 0.06] * 2, color=style.MUTED, linewidth=1.0)
            words = f"block {block_id} of all ranks" if last > first else f"block {block_id}"
            _note(axes, (start + end) / 2, y - 0.17, words, ha="center")
    _note(axes, style.MARGIN, y + HEIGHT / 2, "position")
    for position in range(num_tokens):
        owner = next(rank for rank, found in enumerate(slots) if found[position] >= 0)
        fill = style.owner_colour(owner)
        gid = f"position-{position}-rank-{owner}"
        _paint_cell(axes, place(position), y, cell, fill, str(position), gid)
    for rank, found in enumerate(slots):
        y = top + 0.72 + 0.36 * rank
        _note(axes, style.MARGIN, y + HEIGHT / 2, f"slot, rank {rank}")
        for position, slot in enumerate(found):
            x, gid = place(position), f"rank-{rank}-position-{position}-slot-{slot}"
            if slot >= 0:
                fill = style.tint(style.owner_colour(rank), 0.3)
                _paint_cell(axes, x, y, cell, fill, str(slot), gid)
            else:
                _paint_cell(axes, x, y, cell, style.CARD, "−1", gid, style.MUTED)


def _paint_memories(
    axes: Axes,
    top: float,
    table: list[int],
    block_size: int,
    kept: list[int],
    slots: list[list[int]],
) -> None:
    """The blocks of each rank, in the order of the table: a position in each slot that is used."""
    gap, between = 0.08, 0.3
    room = (style.WIDTH - 2 * style.MARGIN + between) / len(slots) - between
    cell = (room - gap * (len(table) - 1)) / (len(table) * block_size)
    for rank, found in enumerate(slots):
        left = style.MARGIN + rank * (room + between)
        stored = {slot: position for position, slot in enumerate(found) if slot >= 0}
        words = f"rank {rank} keeps {kept[rank]} of {len(found)} tokens"
        if len(slots) > 2:
            words = f"rank {rank}: {kept[rank]} tokens"
        shapes.text(axes, left, top, words, ha="left", color=style.INK, fontweight="bold")
        for column, block_id in enumerate(table):
            x = left + column * (block_size * cell + gap)
            y = top + 0.38
            words = shapes.fit(f"block {block_id}", block_size * cell, style.SMALL)
            _note(axes, x + block_size * cell / 2, y - 0.09, words, ha="center")
            for i in range(block_size):
                slot = block_id * block_size + i
                position = stored.get(slot)
                gid = f"rank-{rank}-slot-{slot}" + (
                    "-free" if position is None else f"-position-{position}"
                )
                fill = style.FREE if position is None else style.owner_colour(rank)
                inside = "" if position is None else str(position)
                _paint_cell(axes, x + i * cell, y, cell, fill, inside, gid)
                look = {"ha": "center", "fontsize": 7.0}
                _note(axes, x + (i + 0.5) * cell, y + HEIGHT + 0.09, str(slot), **look)


def _paint_cell(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    fill: str,
    words: str,
    gid: str,
    ink: str | None = None,
) -> None:
    shapes.box(axes, x, y, width, HEIGHT, fill, linewidth=0.6, gid=gid)
    look = {"fontsize": style.SMALL, "color": ink or style.ink_on(fill)}
    shapes.text(axes, x + width / 2, y + HEIGHT / 2, words, **look)


def _note(axes: Axes, x: float, y: float, words: str, **kwargs: Any) -> None:
    options = {"ha": "left", "color": style.MUTED, "fontsize": style.SMALL, **kwargs}
    shapes.text(axes, x, y, words, **options)
