"""A chart: how fast kernels compute, under the two limits of the machine (Williams, Waterman and
Patterson, "Roofline", 2009)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from pagedattn.viz import style
from pagedattn.viz.charts import plot_area

MARKERS = "osDv^P"
HEIGHT = 4.6  # inches, of the card
LABEL_GAP = 0.15  # inches between two labels' middles
LABEL_SIDE = 0.22  # inches from a point to its label

Point = tuple[float, float]


@style.styled
def draw_roofline(
    points: Mapping[str, Mapping[str, Point]],
    memory: float,
    compute: float,
    labels: Mapping[str, Mapping[str, str]],
    title: str | None = None,
) -> style.Picture:
    """Both axes logarithmic: operations a byte to the right, TFLOP/s upward.

    ``points`` holds (operations a byte, TFLOP/s) by group and name; ``memory`` is what the machine
    reads, in TB/s, and ``compute`` what it multiplies, in TFLOP/s. No point can lie above the lower
    of the two lines. ``labels`` holds what stands beside a point, by group and name. Raises
    ValueError without a point, for more than six groups, or for a number that is not positive.
    """
    everything = [point for group in points.values() for point in group.values()]
    if not everything:
        raise ValueError("draw_roofline needs at least one point")
    if len(points) > len(MARKERS):
        raise ValueError(f"draw_roofline draws at most {len(MARKERS)} groups, got {len(points)}")
    if not all(value > 0 for value in (memory, compute, *sum(everything, ()))):
        raise ValueError("a roofline is logarithmic: every number must be positive")
    figure, _ = style.card(HEIGHT, title)
    axes = plot_area(figure, 0.8, 0.6, 0.35, 0.65)
    low = min(x for x, _ in everything) / 2.5
    high = max(2.5 * compute / memory, 3 * max(x for x, _ in everything))
    bottom = min(y for _, y in everything) / 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, 2 * compute))
    _draw_roof(axes, memory, compute)
    for i, (group, named) in enumerate(points.items()):
        colour = style.line_colour(i)
        look: dict[str, Any] = {"marker": MARKERS[i], "markersize": 5, "linestyle": "none"}
        axes.plot(
            [x for x, _ in named.values()],
            [y for _, y in named.values()],
            color=colour,
            label=group,
            gid=f"points-{group}",
            **look,
        )
    shown = [
        (points[group][name], words, f"label-{group}-{name}")
        for group, named in labels.items()
        for name, words in named.items()
        if name in points.get(group, {})
    ]
    _draw_labels(axes, axes.get_position().height * HEIGHT, shown)
    axes.set_xlabel("operations a byte", fontsize=style.SMALL)
    axes.set_ylabel("TFLOP/s", fontsize=style.SMALL)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=style.FREE)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False, fontsize=style.SMALL)
    return figure


def _draw_roof(axes: Axes, memory: float, compute: float) -> None:
    low, high = axes.get_xlim()
    ridge = compute / memory
    line: dict[str, Any] = {"color": style.INK, "linewidth": 1.4}
    axes.plot([low, ridge], [low * memory, compute], gid="memory", **line)
    axes.plot([ridge, high], [compute, compute], gid="compute", **line)
    words: dict[str, Any] = {
        "textcoords": "offset points",
        "fontsize": style.SMALL,
        "color": style.MUTED,
    }
    middle = math.sqrt(max(low, axes.get_ylim()[0] / memory) * ridge)
    axes.annotate(
        f"memory: {memory:.2f} TB/s",
        (middle, middle * memory),
        xytext=(-6, 5),
        ha="right",
        **words,
    )
    axes.annotate(
        f"matrix product: {compute:.0f} TFLOP/s",
        (high, compute),
        xytext=(0, 5),
        ha="right",
        **words,
    )


def _draw_labels(axes: Axes, height: float, shown: list[tuple[Point, str, str]]) -> None:
    """Names to the right of their points, moved down where they would cover each other. The axes
    are ``height`` inches high."""
    bottom, top = (math.log(end) for end in axes.get_ylim())
    inches = height / (top - bottom)
    columns: dict[int, float] = {}  # points of like intensity -> the lowest label so far
    for (x, y), words, gid in sorted(shown, key=lambda label: -label[0][1]):
        at = (math.log(y) - bottom) * inches
        column = round(math.log2(x) / 3)
        place = min(at, columns.get(column, math.inf) - LABEL_GAP)
        columns[column] = place
        axes.annotate(
            words,
            (x, y),
            xytext=(72 * LABEL_SIDE, 72 * (place - at)),
            textcoords="offset points",
            va="center",
            fontsize=7,
            gid=gid,
            arrowprops={"arrowstyle": "-", "color": style.LINE, "linewidth": 0.6, "shrinkB": 3},
        )
