"""A decode step in time: rows cut into splits, splits run by programs, and the merges."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from pagedattn.viz import shapes, style

if TYPE_CHECKING:  # the kernels need Triton, which is not on every machine
    from pagedattn.kernels import AttentionPlan

LANE, GAP = 0.2, 0.04  # a program's height, and the room between two
NAMES = 0.75  # inches, left of the bars
MAX_ROWS = len(style.OWNER_COLOURS)


@dataclass(frozen=True)
class Split:
    """The keys of a row that one program reads: ``begin`` to ``end``."""

    row: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Run:
    """A split in time: which of the places for programs it had, and when, counted in keys."""

    split: Split
    place: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.split.keys


def splits_of(plan: AttentionPlan) -> list[Split]:
    """The decode items of a plan, in the order in which its programs start."""
    items = plan.decode_items[: int(plan.num_items[0])].tolist()
    return [Split(row, begin, end) for row, _, _, _, begin, end, _, _ in items]


def schedule(splits: Sequence[Split], num_places: int) -> list[Run]:
    """Each split starts when a place is free, in the order given. A key takes one unit of time."""
    free = [(0, place) for place in range(num_places)]
    runs = []
    for split in splits:
        start, place = heapq.heappop(free)
        runs.append(Run(split, place, start))
        heapq.heappush(free, (start + split.keys, place))
    return runs


def last_to_arrive(runs: Sequence[Run]) -> dict[int, Run]:
    """Of each row with several splits the one that is done last: it merges what all have found."""
    rows: dict[int, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.split.row, []).append(run)
    return {
        row: max(found, key=lambda run: run.stop) for row, found in rows.items() if len(found) > 1
    }


@style.styled
def draw_plan(plan: AttentionPlan, num_places: int, title: str | None = None) -> style.Picture:
    """Above, the decode rows of a plan and where they are cut. Below, ``num_places`` programs at a
    time: rows that are not cut; splits in the order of their rows; splits as the plan orders them.
    A key takes one unit of time everywhere.

    Raises ValueError for a plan without decode rows, or of more than 6.
    """
    splits = splits_of(plan)
    rows = sorted({split.row for split in splits})
    if not 1 <= len(rows) <= MAX_ROWS:
        raise ValueError(f"{len(rows)} decode rows; 1 to {MAX_ROWS} can be drawn")
    lengths = {row: sum(s.keys for s in splits if s.row == row) for row in rows}
    schedules = {
        "one program a row": schedule([Split(r, 0, n) for r, n in lengths.items()], num_places),
        "splits, row by row": schedule(sorted(splits, key=lambda s: (s.row, s.begin)), num_places),
        "splits, the longest first": schedule(splits, num_places),
    }
    longest = max(run.stop for runs in schedules.values() for run in runs)
    unit = (style.WIDTH - 2 * style.MARGIN - NAMES) / longest
    pitch = LANE + GAP
    top = style.MARGIN + (0.6 if title else 0.35)
    below = top + len(rows) * pitch + 0.45
    height = below + len(schedules) * (num_places * pitch + 0.48) + 0.3
    figure, axes = style.card(height, title)
    left = style.MARGIN + NAMES
    _note(axes, style.MARGIN, top - 0.15, "rows of the batch and their keys, cut into splits")
    for i, row in enumerate(rows):
        y = top + i * pitch
        _note(axes, style.MARGIN, y + LANE / 2, f"{_name(row)}: {lengths[row]:,}")
        for split in sorted((s for s in splits if s.row == row), key=lambda s: s.begin):
            gid = f"row-{row}-{split.begin}"
            _paint(axes, left + split.begin * unit, y, split.keys * unit, split.row, gid)
    average = sum(lengths.values()) / num_places
    for number, (words, runs) in enumerate(schedules.items()):
        y = below + number * (num_places * pitch + 0.48)
        end = max(run.stop for run in runs)
        _note(axes, style.MARGIN, y - 0.13, f"{words}: done after {end:,} keys", color=style.INK)
        for place in range(num_places):
            _note(axes, style.MARGIN, y + place * pitch + LANE / 2, f"program {place + 1}")
        for run in runs:
            x, gid = left + run.start * unit, f"run-{number}-{run.split.row}-{run.split.begin}"
            at = y + run.place * pitch
            _paint(axes, x, at, run.split.keys * unit, run.split.row, gid)
        for row, run in last_to_arrive(runs).items():
            x, gid = left + run.stop * unit, f"merge-{number}-{row}"
            at = y + run.place * pitch
            shapes.box(axes, x - 0.05, at, 0.05, LANE, style.INK, linewidth=0, gid=gid)
        x = left + average * unit
        bottom = y + num_places * pitch - GAP
        axes.plot([x, x], [y - 0.03, bottom + 0.03], color=style.ACCENT, lw=1.0, ls=(0, (3, 2)))
    _paint_legend(axes, height - 0.32, average)
    return figure


def _paint(axes: Axes, x: float, y: float, width: float, row: int, gid: str) -> None:
    colour = style.owner_colour(row)
    shapes.box(axes, x, y, width, LANE, colour, edgecolor=style.CARD, linewidth=1.2, gid=gid)
    if width > 0.12:
        look = {"color": style.ink_on(colour), "fontsize": style.SMALL, "fontweight": "bold"}
        shapes.text(axes, x + width / 2, y + LANE / 2, _name(row), **look)


def _name(row: int) -> str:
    return chr(ord("A") + row)


def _paint_legend(axes: Axes, y: float, average: float) -> None:
    x = style.MARGIN
    shapes.box(axes, x, y - 0.08, 0.05, 0.16, style.INK, linewidth=0)
    _note(axes, x + 0.12, y, "merge, by the split of a row that arrives last")
    x += 3.3
    axes.plot([x, x], [y - 0.08, y + 0.08], color=style.ACCENT, lw=1.0, ls=(0, (3, 2)))
    _note(axes, x + 0.1, y, f"all keys, shared evenly: {average:,.0f}")


def _note(axes: Axes, x: float, y: float, words: str, color: str = style.MUTED) -> None:
    shapes.text(axes, x, y, words, ha="left", fontsize=style.SMALL, color=color)
