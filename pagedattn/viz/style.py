"""One look for every picture: colours, type, the light card they stand on, and how they are saved.

Owner colours are Paul Tol's "bright" scheme, made to be told apart by colour-blind readers. Nothing
rests on colour alone: blocks carry their owner's name, unused slots are hatched. A picture brings
its own opaque background, so it reads the same on a light and on a dark page.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

OWNER_COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377"]
CARD = "#FBFBF8"
INK = "#1F2328"
MUTED = "#59636E"
LINE = "#B4BAC2"
FREE = "#EBEDEF"
NULL = "#9AA1A9"
ACCENT = "#B3261E"  # a refusal, or the one thing to look at

WIDTH = 7.2  # inches: 691 pixels on a page
MARGIN = 0.3
SMALL, NORMAL, TITLE = 8.0, 9.0, 11.5  # points

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",
    "font.size": NORMAL,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.facecolor": CARD,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "pagedattn",
    "svg.fonttype": "path",
}

P = ParamSpec("P")
R = TypeVar("R")


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function under the book's style, whatever the caller's matplotlib is set to."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context():
            mpl.rcdefaults()  # all but the backend
            mpl.rcParams.update(RC)
            return function(*args, **kwargs)

    return wrapper


class Picture(Figure):
    """A matplotlib Figure that shows itself at the end of a notebook cell, pyplot or not."""

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {"image/png": png(self), "text/plain": f"<Picture: {self.get_suptitle() or '-'}>"}
        return data, {"image/png": self.size_on_page()}

    def size_on_page(self) -> dict[str, int]:
        """Width and height in CSS pixels, 96 an inch."""
        width, height = (round(96 * inches) for inches in self.get_size_inches())
        return {"width": width, "height": height}


@styled
def save(figure: Figure, path: str | Path) -> None:
    """Write the figure as SVG: the same bytes on every build, text as outlines."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


@styled
def png(figure: Figure) -> bytes:
    """The figure as a PNG of 192 dots an inch, for notebooks."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=192)
    return buffer.getvalue()


def card(height: float, title: str | None = None, width: float = WIDTH) -> tuple[Picture, Axes]:
    """An empty picture and its one set of axes, which measures in inches from the top left."""
    figure = Picture(figsize=(width, height), facecolor="none")
    background = FancyBboxPatch(
        (0.09, 0.09),
        width - 0.18,
        height - 0.18,
        boxstyle="round,pad=0.08,rounding_size=0.08",
        transform=figure.dpi_scale_trans,
        facecolor=CARD,
        edgecolor=LINE,
        linewidth=0.6,
    )
    background.set_zorder(-1)
    figure.add_artist(background)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    if title:
        figure.suptitle(
            title,
            x=MARGIN / width,
            y=1 - 0.24 / height,
            ha="left",
            va="top",
            fontsize=TITLE,
            fontweight="bold",
        )
    return figure, axes


def owner_colour(owner: int) -> str:
    """The colour of the sequence that came as number ``owner``; after six they come again."""
    return OWNER_COLOURS[owner % len(OWNER_COLOURS)]


def line_colour(owner: int) -> str:
    """The owner's colour, darker: thin lines in it stand out from the card."""
    red, green, blue = to_rgb(owner_colour(owner))
    return to_hex((0.75 * red, 0.75 * green, 0.75 * blue))


def tint(colour: str, strength: float = 0.22) -> str:
    """The colour, thinned with the card's."""
    red, green, blue = (
        strength * c + (1 - strength) * base
        for c, base in zip(to_rgb(colour), to_rgb(CARD), strict=True)
    )
    return to_hex((red, green, blue))


def ink_on(colour: str) -> str:
    """Dark or white text, whichever has more contrast on this colour (WCAG luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.2 else INK
