"""Charts of many runs: policies side by side on several traces, and block sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from pagedattn.viz import shapes, style
from pagedattn.viz.charts import plot_area

BAR, GAP = 0.16, 0.2  # inches: from one bar to the next, and from one trace to the next
DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1, 1, 1)))


class Run(Protocol):
    """What is drawn of a run; ``pagedattn.traces.Metrics`` has it."""

    @property
    def used_of_reserved(self) -> float: ...
    @property
    def saturated_used_of_pool(self) -> float: ...
    @property
    def saturated_mean_running(self) -> float: ...


class Saturated(Protocol):
    """What is drawn of a full pool; ``pagedattn.traces.Metrics`` has it."""

    @property
    def saturated_used_of_reserved(self) -> float: ...
    @property
    def saturated_used_of_pool(self) -> float: ...
    @property
    def saturated_mean_running(self) -> float: ...


class Blocks(Protocol):
    """What is drawn of a block size; ``pagedattn.traces.Fragmentation`` has it."""

    @property
    def life(self) -> float: ...
    @property
    def mean_blocks(self) -> float: ...


@style.styled
def draw_policies(
    results: Mapping[str, Mapping[str, Run]], title: str | None = None
) -> style.Picture:
    """For every trace, one bar a policy: used of reserved slots; used of all slots, and running
    requests as a multiple of the first policy's, both while a request waits.

    ``results`` holds runs by trace and policy, the same policies for each. A figure that is nan is
    left out. Raises ValueError without a run, or if the policies differ.
    """
    policies = list(next(iter(results.values()), {}))
    if not policies:
        raise ValueError("draw_policies needs at least one run")
    for trace, runs in results.items():
        if list(runs) != policies:
            raise ValueError(f"{trace} has the policies {list(runs)}, not {policies}")

    def times_first(runs: Mapping[str, Run], policy: str) -> float:
        return runs[policy].saturated_mean_running / runs[policies[0]].saturated_mean_running

    panels: tuple[tuple[str, str, Callable[[Mapping[str, Run], str], float], str], ...] = (
        ("reserved", "used / reserved slots", lambda r, p: r[p].used_of_reserved, "{:.1%}"),
        ("pool", "used / all slots *", lambda r, p: r[p].saturated_used_of_pool, "{:.1%}"),
        ("running", f"running, times {policies[0]} *", times_first, "{:.1f}"),
    )
    group = BAR * len(policies) + GAP
    figure, card = style.card(1.8 + group * len(results), title)
    width = 1.35  # of a panel
    for column, (key, heading, measure, form) in enumerate(panels):
        left = 1.75 + column * (width + 0.45)
        axes = plot_area(figure, left, 1.15, style.WIDTH - left - width, 0.65)
        longest = 1.0
        for row, (trace, runs) in enumerate(results.items()):
            for i, policy in enumerate(policies):
                value = measure(runs, policy)
                if isnan(value):
                    continue
                longest = max(longest, value)
                y = row * group + (i + 0.5) * BAR
                (bar,) = axes.barh(y, value, 0.8 * BAR, color=style.owner_colour(i))
                bar.set_gid(f"{key}-{trace}-{policy}")
                axes.annotate(
                    form.format(value),
                    (value, y),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    fontsize=7,
                )
        axes.set(xlim=(0, longest), ylim=(group * len(results) - GAP / 2, -GAP / 2))
        axes.set_title(heading, loc="left", fontsize=style.NORMAL, color=style.MUTED)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=key == "running"))
        if key != "running":
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.tick_params(axis="y", length=0)
        middles = [row * group + len(policies) * BAR / 2 for row in range(len(results))]
        axes.set_yticks(middles, list(results) if column == 0 else [], color=style.INK)
    x = style.MARGIN
    for i, policy in enumerate(policies):
        shapes.swatch(card, x, 0.68, style.owner_colour(i))
        shapes.text(card, x + 0.2, 0.68, policy, ha="left", fontsize=style.SMALL)
        x += 0.45 + 0.075 * len(policy)
    _note(card, "* mean over the steps in which a request waits")
    return figure


@style.styled
def draw_pool_shares(
    results: Mapping[str, Saturated], title: str | None = None, note: str | None = None
) -> style.Picture:
    """Where the slots of a pool are while a request waits, one bar a policy: used, reserved and
    empty (internal fragmentation), free and yet not enough (external); and the running requests.

    ``results`` holds one run a policy, by its name; ``note`` stands below. Raises ValueError
    without a run, and for one in which no request ever waited.
    """
    if not results:
        raise ValueError("draw_pool_shares needs at least one run")
    for name, run in results.items():
        if isnan(run.saturated_used_of_pool):
            raise ValueError(f"{name}: no request waits, so the pool was never full")
    below = 0.28 if note else 0.0
    figure, card = style.card(1.65 + 0.42 * len(results) + below, title)
    axes = plot_area(figure, 1.95, 0.95, 1.2, 0.65 + below)
    for i, (name, run) in enumerate(results.items()):
        colour = style.owner_colour(i)
        used = run.saturated_used_of_pool
        reserved = used / run.saturated_used_of_reserved
        hatch: dict[str, Any] = {
            "hatch": "////",
            "edgecolor": style.tint(colour, 0.55),
            "linewidth": 0,
        }
        plain: dict[str, Any] = {}
        for key, start, stop, fill, look, ink in (
            ("used", 0.0, used, colour, plain, style.ink_on(colour)),
            ("empty", used, reserved, style.tint(colour, 0.15), hatch, style.INK),
            ("free", reserved, 1.0, style.FREE, plain, style.INK),
        ):
            (bar,) = axes.barh(i, stop - start, 0.66, left=start, color=fill, **look)
            bar.set_gid(f"{key}-{name}")
            words = f"{stop - start:.1%}"
            if stop - start > 0.09:
                plate = {"boxstyle": "round,pad=0.12", "fc": style.CARD, "ec": "none"}
                axes.annotate(
                    words,
                    ((start + stop) / 2, i),
                    ha="center",
                    va="center_baseline",
                    fontsize=style.SMALL,
                    fontweight="bold" if key == "used" else "normal",
                    color=ink,
                    bbox=plate if key == "empty" else None,
                )
        axes.annotate(
            f"{run.saturated_mean_running:.1f} run",
            (1, i),
            xytext=(8, 0),
            textcoords="offset points",
            va="center_baseline",
        )
    axes.set(xlim=(0, 1), ylim=(len(results) - 0.5, -0.5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(
        "of all slots, mean over the steps in which a request waits", fontsize=style.SMALL
    )
    axes.set_yticks(range(len(results)), list(results), fontsize=style.NORMAL, color=style.INK)
    axes.tick_params(axis="y", length=0)
    x = style.MARGIN
    for words, fill, pattern in (
        ("used", style.NULL, None),
        ("reserved and empty", style.CARD, "//////"),
        ("free, and not enough for the next request", style.FREE, None),
    ):
        shapes.swatch(card, x, 0.68, fill, pattern)
        shapes.text(card, x + 0.19, 0.68, words, ha="left", fontsize=style.SMALL, color=style.MUTED)
        x += 0.45 + 0.063 * len(words)
    if note:
        _note(card, note)
    return figure


@style.styled
def draw_block_sizes(
    runs: Mapping[str, Mapping[int, Run]],
    blocks: Mapping[str, Mapping[int, Blocks]],
    title: str | None = None,
) -> style.Picture:
    """What a smaller block saves and what it costs, one line a trace: reserved slots without a
    token over a request's life, requests running at a time, and blocks a request.

    Both mappings are by trace and block size. The requests are shares of those at the trace's
    smallest block size. Raises ValueError for fewer than two block sizes.
    """
    sizes = sorted({size for measured in blocks.values() for size in measured})
    if len(sizes) < 2:
        raise ValueError(f"draw_block_sizes needs at least two block sizes, got {sizes}")
    legend = -(-len(blocks) // 3) * 0.2  # inches: three traces a line
    figure, card = style.card(3.2 + legend, title)
    width = 1.6
    headings = ("empty slots, share", "running requests *", "blocks a request")
    panels = []
    for column, heading in enumerate(headings):
        left = 0.75 + column * (width + 0.65)
        axes = plot_area(figure, left, 1 + legend, style.WIDTH - left - width, 0.75)
        axes.set_title(heading, loc="left", fontsize=style.NORMAL, color=style.MUTED)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("block size", fontsize=style.SMALL)
        axes.grid(axis="y", color=style.FREE)
        panels.append(axes)
    for i, (trace, measured) in enumerate(blocks.items()):
        running = [runs[trace][size].saturated_mean_running for size in measured]
        values = (
            [block.life for block in measured.values()],
            [number / running[0] for number in running],
            [block.mean_blocks for block in measured.values()],
        )
        for axes, line in zip(panels, values, strict=True):
            axes.plot(
                list(measured),
                line,
                color=style.line_colour(i),
                linestyle=DASHES[i % len(DASHES)],
                marker="o",
                markersize=3,
                linewidth=1.5,
                gid=trace,
            )
        x, y = style.MARGIN + i % 3 * 2.2, 0.66 + i // 3 * 0.2
        colour, dashes = style.line_colour(i), DASHES[i % len(DASHES)]
        card.plot([x, x + 0.35], [y, y], color=colour, linestyle=dashes, linewidth=1.5)
        shapes.text(card, x + 0.45, y, trace, ha="left", fontsize=style.SMALL)
    panels[0].set_ylim(0, None)
    for axes in panels[:2]:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    panels[2].set_yscale("log", base=2)
    panels[2].yaxis.set_minor_locator(NullLocator())
    panels[2].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    words = (
        f"* as a share of those with blocks of {sizes[0]}; mean over the steps in which one waits"
    )
    _note(card, words)
    return figure


def _note(card: Axes, words: str) -> None:
    bottom = card.get_ylim()[0] - 0.24
    shapes.text(
        card, style.MARGIN, bottom, words, ha="left", fontsize=style.SMALL, color=style.MUTED
    )
