"""A chart: the share of blocks that sharing saves, by the number of samples or beams."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagedattn.viz import style
from pagedattn.viz.charts import plot_area

ROW, GROUP_GAP = 0.3, 0.42  # inches


@style.styled
def draw_sharing_saved(
    groups: Mapping[str, Mapping[str, Mapping[int, float]]],
    reported: Collection[str] = (),
    title: str | None = None,
) -> style.Picture:
    """Groups of rows; in each row a dot a number of samples or beams, at the share that it saves.

    ``groups`` holds shares by group, row and number. Rows whose name is in ``reported`` come from
    elsewhere: their dots are hollow. Raises ValueError without a row.
    """
    num_rows = sum(len(rows) for rows in groups.values())
    if not num_rows:
        raise ValueError("draw_sharing_saved needs at least one row")
    height = num_rows * ROW + len(groups) * GROUP_GAP
    top, bottom = (0.55 if title else 0.25), 0.7
    figure, _ = style.card(top + height + bottom, title)
    axes = plot_area(figure, 2.55, top, 0.5, bottom)
    y = 0.0
    places, names = [], []
    for group, rows in groups.items():
        y += GROUP_GAP
        axes.annotate(
            group,
            (0, y - 0.17),
            xycoords=("axes fraction", "data"),
            fontweight="bold",
            va="center_baseline",
        )
        for i, (name, shares) in enumerate(rows.items()):
            middle = y + ROW / 2
            places.append(middle)
            names.append(name)
            colour = style.MUTED if name in reported else style.owner_colour(i - len(reported))
            values = list(shares.values())
            line: dict[str, Any] = {
                "color": style.tint(colour, 0.45),
                "linewidth": 5,
                "solid_capstyle": "round",
            }
            axes.plot([min(values), max(values)], [middle, middle], zorder=1, **line)
            for number, share in shares.items():
                fill = style.CARD if name in reported else colour
                ink = style.INK if name in reported else style.ink_on(colour)
                dot: dict[str, Any] = {
                    "markersize": 11,
                    "markeredgecolor": colour,
                    "markerfacecolor": fill,
                }
                gid = f"{group}-{name}-{number}"
                axes.plot([share], [middle], "o", zorder=2, gid=gid, **dot)
                axes.annotate(
                    str(number),
                    (share, middle),
                    ha="center",
                    va="center_baseline",
                    fontsize=7,
                    color=ink,
                    fontweight="bold",
                )
            least, most = (f"{end:.1%}" for end in (min(values), max(values)))
            labels = [(min(values), least, -10, "right"), (max(values), most, 10, "left")]
            if min(values) < 0.12:  # the name stands there
                labels = [(max(values), f"{least} to {most}", 10, "left")]
            for share, words, side, ha in labels:
                axes.annotate(
                    words,
                    (share, middle),
                    xytext=(side, 0),
                    textcoords="offset points",
                    ha=ha,
                    va="center_baseline",
                    fontsize=style.SMALL,
                )
            y += ROW
    axes.set(xlim=(0, 1), ylim=(height, 0))
    axes.set_yticks(places, names, color=style.INK)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("blocks saved by sharing, of those without it", fontsize=style.SMALL)
    axes.grid(axis="x", color=style.FREE)
    axes.set_axisbelow(True)
    return figure
