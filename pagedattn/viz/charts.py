"""Charts: how the KV cache grows, and what each policy makes of the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pagedattn.viz import shapes, style

GIB = 2**30


class Measured(Protocol):
    """What ``draw_waste`` reads of a run; ``pagedattn.traces.Metrics`` has it."""

    @property
    def mean_used(self) -> float: ...
    @property
    def mean_reserved(self) -> float: ...
    @property
    def used_of_reserved(self) -> float: ...
    @property
    def saturated_mean_running(self) -> float: ...


def plot_area(figure: Figure, left: float, top: float, right: float, bottom: float) -> Axes:
    """Axes inside a card; distances from its edges in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


@style.styled
def draw_kv_growth(
    bytes_per_token: Mapping[str, int], max_tokens: int, title: str | None = None
) -> style.Picture:
    """Bytes of K and V against tokens, one line a model, from each model's bytes a token.

    Raises ValueError without a model, for fewer than 2 tokens, or for a size below 1 byte.
    """
    if not bytes_per_token:
        raise ValueError("draw_kv_growth needs at least one model")
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; a line needs at least 2")
    for name, size in bytes_per_token.items():
        if size < 1:
            raise ValueError(f"{name}: {size} bytes a token; at least 1 is needed")
    figure, _ = style.card(3.4, title)
    axes = plot_area(figure, 0.85, 0.75, 2.2, 0.65)
    dashes = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1, 1, 1)))
    for i, (name, size) in enumerate(bytes_per_token.items()):
        colour = style.owner_colour(i)
        (line,) = axes.plot(
            [0, max_tokens],
            [0, size * max_tokens / GIB],
            color=colour,
            linewidth=2,
            linestyle=dashes[i % 4],
        )
        line.set_gid(f"line-{i}")
        axes.annotate(
            f"{name}\n{_bytes(size)} a token",
            (max_tokens, size * max_tokens / GIB),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.SMALL,
        )
    axes.set(xlim=(0, max_tokens), ylim=(0, None), xlabel="tokens", ylabel="K and V, GiB")
    axes.set_xticks([max_tokens * i / 4 for i in range(5)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=style.FREE)
    axes.set_axisbelow(True)
    return figure


@style.styled
def draw_waste(
    results: Mapping[str, Measured], num_slots: int, title: str | None = None
) -> style.Picture:
    """Left, the slots of the pool that are reserved and those of them that hold a token, mean over
    a run; right, the requests that run at a time while another waits.

    ``results`` holds one run a policy, by its name. Raises ValueError without one.
    """
    if not results:
        raise ValueError("draw_waste needs at least one run")
    figure, card = style.card(1.85 + 0.5 * len(results), title)
    slots = plot_area(figure, 1.3, 1.1, 2.9, 0.65)
    running = plot_area(figure, 4.8, 1.1, 0.85, 0.65)
    for i, run in enumerate(results.values()):
        colour = style.owner_colour(i)
        wasted: dict[str, Any] = {
            "hatch": "////",
            "edgecolor": style.tint(colour, 0.55),
            "linewidth": 0,
        }
        slots.barh(i, run.mean_reserved, 0.6, color=style.tint(colour, 0.15), **wasted)
        slots.barh(i, run.mean_used, 0.6, color=colour)
        slots.annotate(
            f"{run.used_of_reserved:.1%}",
            (run.mean_used, i),
            xytext=(-5, 0),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            fontweight="bold",
            color=style.ink_on(colour),
        )
        running.barh(i, run.saturated_mean_running, 0.6, color=colour)
        running.annotate(
            f"{run.saturated_mean_running:.0f}",
            (run.saturated_mean_running, i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center_baseline",
            fontweight="bold",
        )
    for axes, heading, label in (
        (slots, "used, of what is reserved", "slots, mean over the run"),
        (running, "requests at a time", "mean, while another waits"),
    ):
        axes.set(xlabel=label, ylim=(len(results) - 0.5, -0.5))
        axes.set_title(heading, loc="left", fontsize=style.NORMAL, color=style.MUTED)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.label.set_fontsize(style.SMALL)
        axes.tick_params(axis="y", length=0)
    slots.set_yticks(range(len(results)), list(results), fontsize=style.NORMAL, color=style.INK)
    slots.set_xlim(0, num_slots)
    slots.xaxis.set_major_locator(MaxNLocator(4))
    running.set_yticks([])
    shapes.swatch(card, 1.3, 0.68, style.NULL)
    shapes.text(card, 1.5, 0.68, "used", ha="left", fontsize=style.SMALL, color=style.MUTED)
    shapes.swatch(card, 2.1, 0.68, style.CARD, "//////")
    words = "reserved and empty"
    shapes.text(card, 2.3, 0.68, words, ha="left", fontsize=style.SMALL, color=style.MUTED)
    return figure


def _bytes(size: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"
