"""How the keys of a decode step are shared out: one bar for each place that a program can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from pagedattn.viz import shapes, style
from pagedattn.viz.plans import Split, splits_of

if TYPE_CHECKING:  # the kernels need Triton, which is not on every machine
    from pagedattn.kernels import AttentionPlan

HEIGHT = 1.3  # inches, of the longest bar
GAP = 0.42  # above a panel, for its words
MAX_PANELS, MAX_BARS, MAX_SPLITS = 4, 132, 400

Load = Sequence[Split]


def shares_of(plan: AttentionPlan, share_start: Sequence[int]) -> list[list[Split]]:
    """The splits of each program: those from one number of ``share_start`` up to the next."""
    splits = splits_of(plan)
    ends = share_start[1:]
    return [splits[start:end] for start, end in zip(share_start[:-1], ends, strict=True)]


def num_keys(load: Load) -> int:
    """Keys of one place."""
    return sum(split.keys for split in load)


@style.styled
def draw_loads(panels: Mapping[str, Sequence[Load]], title: str | None = None) -> style.Picture:
    """For each way to share out the same keys a panel, and in it a bar for each place: the splits
    that it has, the first at the bottom. All bars of a panel together are as wide as those of
    another, and a bar is as high as its keys are many beside an even share: the area is the keys.
    The line is the even share.

    Raises ValueError for no panel or more than 4, no place or more than 132, no split or more than
    400.
    """
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"{len(panels)} panels; 1 to {MAX_PANELS} can be drawn")
    for name, loads in panels.items():
        splits = sum(len(load) for load in loads)
        for what, number, most in ("places", len(loads), MAX_BARS), ("splits", splits, MAX_SPLITS):
            if not 1 <= number <= most:
                raise ValueError(f"{number} {what} in {name!r}; 1 to {most} can be drawn")
    evens = {name: sum(map(num_keys, loads)) / len(loads) for name, loads in panels.items()}
    highest = max(num_keys(load) / evens[name] for name, loads in panels.items() for load in loads)
    heights = {
        name: HEIGHT * max(map(num_keys, loads)) / evens[name] / highest + GAP
        for name, loads in panels.items()
    }
    top = style.MARGIN + (0.15 if title else 0.0)
    figure, axes = style.card(top + sum(heights.values()) + 0.45, title)
    for number, (name, loads) in enumerate(panels.items()):
        bottom = top + heights[name]
        _paint_panel(axes, number, name, loads, bottom, HEIGHT / highest)
        top += heights[name]
    x = style.MARGIN
    axes.plot([x, x + 0.3], [top + 0.18] * 2, color=style.ACCENT, lw=1.0, ls=(0, (3, 2)))
    _note(axes, x + 0.38, top + 0.18, "an even share")
    return figure


def _paint_panel(
    axes: Axes, number: int, name: str, loads: Sequence[Load], bottom: float, even_height: float
) -> None:
    even = sum(map(num_keys, loads)) / len(loads)
    most = max(map(num_keys, loads))
    words = f"{name}: {len(loads)} at a time; the busiest has {most:,} keys,"
    words = f"{words} {most / even:.2f} times an even share"
    y = bottom - even_height * most / even - 0.15
    _note(axes, style.MARGIN, y, words, color=style.INK)
    pitch = (style.WIDTH - 2 * style.MARGIN) / len(loads)
    gap = min(0.06, pitch / 5)
    for place, load in enumerate(loads):
        at = bottom
        for split in load:
            height = split.keys * even_height / even
            at -= height
            colour = style.owner_colour(split.row)
            gid = f"load-{number}-{place}-{split.row}-{split.begin}"
            look: dict[str, Any] = {"edgecolor": "none", "linewidth": 0, "clip_on": False}
            x, line = style.MARGIN + place * pitch, min(0.008, height / 4)
            shapes.box(axes, x, at + line, pitch - gap, height - line, colour, gid=gid, **look)
    ends = [style.MARGIN - 0.06, style.WIDTH - style.MARGIN + 0.02]
    axes.plot(ends, [bottom - even_height] * 2, color=style.ACCENT, lw=1.0, ls=(0, (3, 2)))


def _note(axes: Axes, x: float, y: float, words: str, color: str = style.MUTED) -> None:
    shapes.text(axes, x, y, words, ha="left", fontsize=style.SMALL, color=color)
