"""Shared prefixes of a decode step: the block tables, and which blocks are read once for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from torch import Tensor

from pagedattn.viz import shapes, style

if TYPE_CHECKING:  # the kernels need Triton, which is not on every machine
    from pagedattn.kernels import AttentionPlan

MAX_ROWS, MAX_COLUMNS = 8, 14
NAMES, PARTS = 0.6, 0.85  # inches left and right of the blocks
ROW, GAP = 0.27, 0.05  # a row's height, and the room between two


@dataclass(frozen=True)
class Read:
    """Keys ``begin`` to ``end`` of some rows, read once, through the table of ``leader``."""

    rows: tuple[int, ...]
    leader: int
    begin: int
    end: int

    @property
    def is_shared(self) -> bool:
        return len(self.rows) > 1


def reads_of(plan: AttentionPlan) -> list[Read]:
    """What the decode items of a plan read: those of shared prefixes first, then those of a row."""
    items = plan.decode_items[: int(plan.num_items[0])].tolist()
    owner = {
        token + query: row
        for row, token, queries, *_ in items
        for query in range(queries)
    }  # fmt: skip
    reads = []
    if plan.shared is not None:
        members = plan.shared.members.tolist()
        for leader, begin, end, first, count, _ in plan.shared.items[
            : int(plan.shared.num_items)
        ].tolist():
            rows = sorted({owner[token] for token, _, _ in members[first : first + count]})
            reads.append(Read(tuple(rows), leader, begin, end))
    own = [Read((row,), row, begin, end) for row, _, _, _, begin, end, _, _ in items]
    return reads + [read for read in own if read.end > read.begin]


@style.styled
def draw_shared_prefixes(
    plan: AttentionPlan, block_table: Tensor, block_size: int, title: str | None = None
) -> style.Picture:
    """Above, the block tables of the decode rows, as they come. Below, a box for every block that
    is read, as high as the rows are that it is read for: those of a group stand together. At the
    right, how many parts are merged for a row: of shared prefixes, and its own.

    Raises ValueError for a plan without decode rows or of more than 8, or more than 14 columns.
    """
    reads = reads_of(plan)
    rows = sorted({row for read in reads for row in read.rows})
    lengths = {row: max(read.end for read in reads if row in read.rows) for row in rows}
    columns = -(-max(lengths.values(), default=0) // block_size)
    for name, number, most in ("rows", len(rows), MAX_ROWS), ("columns", columns, MAX_COLUMNS):
        if not 1 <= number <= most:
            raise ValueError(f"{number} {name}; 1 to {most} can be drawn")
    table = block_table.tolist()
    order = list(range(len(table))) if plan.shared is None else plan.shared.order.tolist()
    panel = len(rows) * (ROW + GAP)
    top = style.MARGIN + (0.6 if title else 0.35)
    below = top + panel + 0.5
    figure, axes = style.card(below + panel + 0.5, title)
    pitch = (style.WIDTH - 2 * style.MARGIN - NAMES - PARTS) / columns
    left = style.MARGIN + NAMES
    _note(axes, style.MARGIN, top - 0.15, "block tables of the batch")
    for place, row in enumerate(rows):
        y = top + place * (ROW + GAP)
        _note(axes, style.MARGIN, y + ROW / 2, _name(row))
        for column in range(-(-lengths[row] // block_size)):
            x, gid = left + column * pitch, f"table-{row}-{column}"
            shapes.box(axes, x, y, pitch - GAP, ROW, style.FREE, gid=gid)
            _number(axes, x + (pitch - GAP) / 2, y + ROW / 2, table[row][column], style.INK)
    _note(axes, style.MARGIN, below - 0.15, "what is read: each box once")
    _note(axes, style.WIDTH - style.MARGIN - PARTS + 0.1, below - 0.15, "parts")
    places = {row: i for i, row in enumerate(sorted(rows, key=lambda row: (order[row], row)))}
    groups = list(dict.fromkeys(read.rows for read in reads if read.is_shared))
    for read in reads:
        group = groups.index(read.rows) if read.is_shared else None
        _paint_read(axes, read, table[read.leader], block_size, left, pitch, below, places, group)
    for row, place in places.items():
        y = below + place * (ROW + GAP) + ROW / 2
        _note(axes, style.MARGIN, y, _name(row))
        own = sum(read.rows == (row,) for read in reads)
        common = sum(read.is_shared and row in read.rows for read in reads)
        words = f"{common} + {own}" if common else str(own)
        look: dict[str, Any] = {"ha": "left", "fontsize": style.SMALL, "gid": f"parts-{row}"}
        shapes.text(axes, style.WIDTH - style.MARGIN - PARTS + 0.1, y, words, **look)
    alone = sum(lengths.values())
    together = sum(read.end - read.begin for read in reads)
    words = f"keys in the tables: {alone:,}; keys that are read: {together:,}"
    _note(axes, style.MARGIN, below + panel + 0.12, words, color=style.INK)
    return figure


def _paint_read(
    axes: Axes,
    read: Read,
    table: list[int],
    block_size: int,
    left: float,
    pitch: float,
    top: float,
    places: dict[int, int],
    group: int | None,
) -> None:
    """The blocks of one read, or the pieces of them that it covers."""
    first = min(places[row] for row in read.rows)
    y = top + first * (ROW + GAP)
    height = len(read.rows) * (ROW + GAP) - GAP
    fill = style.CARD if group is None else style.owner_colour(group)
    edge = style.NULL if group is None else style.line_colour(group)
    for column in range(read.begin // block_size, -(-read.end // block_size)):
        begin = max(read.begin, column * block_size) / block_size
        end = min(read.end, (column + 1) * block_size) / block_size
        x, width = left + begin * pitch, (end - begin) * pitch - GAP * (end == column + 1)
        kind = "own" if group is None else "shared"
        gid = f"{kind}-{read.leader}-{table[column]}"
        shapes.box(axes, x, y, width, height, fill, edgecolor=edge, gid=gid)
        colour = style.INK if group is None else style.ink_on(fill)
        _number(axes, x + width / 2, y + height / 2, table[column], colour)


def _name(row: int) -> str:
    return f"row {row}"


def _number(axes: Axes, x: float, y: float, block_id: int, colour: str) -> None:
    shapes.text(axes, x, y, str(block_id), fontsize=style.SMALL, color=colour)


def _note(axes: Axes, x: float, y: float, words: str, color: str = style.MUTED) -> None:
    shapes.text(axes, x, y, words, ha="left", fontsize=style.SMALL, color=color)
