"""A chart: how many prompt tokens a prefix cache holds already, by its capacity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from pagedattn.viz import shapes, style
from pagedattn.viz.charts import plot_area

LOOKS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "markersize": 4, "linewidth": 1.8},
    {"marker": "s", "markersize": 3.5, "linewidth": 1.5, "linestyle": (0, (5, 1.5))},
    {"marker": "o", "markersize": 9, "linestyle": "none", "markerfacecolor": "none"},
)
MILLION = 2**20


@style.styled
def draw_hit_rates(
    curves: Mapping[str, Mapping[str, Mapping[int, float]]],
    limits: Mapping[str, float],
    title: str | None = None,
) -> style.Picture:
    """A panel a trace, the hit rate (a share of the prompt tokens) against the capacity in tokens.

    ``curves`` holds rates by trace, curve and capacity, the same curves for each trace, at most
    three; the third is drawn as rings. ``limits`` is what an infinite cache reaches, by trace: a
    dashed line. Raises ValueError without a rate, for a fourth curve, or if the curves differ.
    """
    names = list(next(iter(curves.values()), {}))
    if not names or not all(rates for lines in curves.values() for rates in lines.values()):
        raise ValueError("draw_hit_rates needs at least one rate a curve")
    if len(names) > len(LOOKS):
        raise ValueError(f"draw_hit_rates draws at most {len(LOOKS)} curves, got {len(names)}")
    for trace, lines in curves.items():
        if list(lines) != names:
            raise ValueError(f"{trace} has the curves {list(lines)}, not {names}")
    legend = 0.2 * len(names)
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    panel = 2.0  # inches high
    height = 0.6 + legend + rows * (panel + 0.95)
    figure, card = style.card(height, title)
    for i, name in enumerate(names):
        y = 0.66 + 0.2 * i
        colour = style.line_colour(i)
        look = LOOKS[i] | ({"markersize": 6} if i == 2 else {})
        card.plot([0.3, 0.475, 0.65], [y] * 3, color=colour, markevery=[1], **look)
        shapes.text(card, 0.8, y, name, ha="left", fontsize=style.SMALL)
    highest = max(limits.values())
    width = (style.WIDTH - 0.8 - 0.3 - 0.5 * (columns - 1)) / columns
    for place, (trace, lines) in enumerate(curves.items()):
        row, column = divmod(place, columns)
        left = 0.8 + column * (width + 0.5)
        top = 0.9 + legend + row * (panel + 0.95)
        axes = plot_area(figure, left, top, style.WIDTH - left - width, height - top - panel)
        axes.set_title(trace, loc="left", fontsize=style.NORMAL, color=style.MUTED)
        axes.axhline(
            limits[trace],
            color=style.MUTED,
            linewidth=1,
            linestyle=(0, (2, 2)),
            gid=f"{trace}-infinite",
        )
        capacities = sorted({capacity for rates in lines.values() for capacity in rates})
        axes.annotate(
            f"infinite cache: {limits[trace]:.1%}",
            (capacities[0], limits[trace]),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=style.SMALL,
            color=style.MUTED,
        )
        for i, (name, rates) in enumerate(lines.items()):
            axes.plot(
                list(rates),
                list(rates.values()),
                color=style.line_colour(i),
                gid=f"{trace}-{i}",
                label=name,
                **LOOKS[i],
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.15 * highest)
        axes.xaxis.set_major_locator(FixedLocator(capacities))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: _tokens(value))
        axes.tick_params(axis="x", labelsize=7)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("capacity, tokens (1M = 2^20)", fontsize=style.SMALL)
        axes.grid(axis="y", color=style.FREE)
        axes.set_axisbelow(True)
    return figure


def _tokens(value: float) -> str:
    if value >= MILLION:
        return f"{value / MILLION:g}M"
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
