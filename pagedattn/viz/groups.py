"""What drawings of the manager share: a colour for each group, a block as an entry of a list."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from pagedattn.manager import KVCacheSpec, SlidingWindowSpec
from pagedattn.viz import shapes, style

COLOURS = [style.OWNER_COLOURS[i] for i in (0, 2, 3, 5)]


def group_colour(group_id: int) -> str:
    """The colour of a group; after four they come again."""
    return COLOURS[group_id % len(COLOURS)]


def kind_of(spec: KVCacheSpec) -> str:
    """What the layers of a group see, in two words."""
    if isinstance(spec, SlidingWindowSpec):
        return f"window {spec.sliding_window}"
    return type(spec).__name__.removesuffix("Spec").removesuffix("Attention").lower()


def entry(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    block_id: int,
    colour: str | None,
    gid: str,
) -> None:
    """A block by its number: in a colour, pale without one; crossed if it is the null block."""
    middle = (x + width / 2, y + height / 2)
    if block_id == 0:
        shapes.box(axes, x, y, width, height, style.FREE, hatch="xxxx", gid=f"{gid}-null")
    elif colour is None:
        shapes.box(axes, x, y, width, height, style.CARD, gid=f"{gid}-block-{block_id}")
        shapes.text(axes, *middle, str(block_id), color=style.MUTED, fontsize=style.SMALL)
    else:
        shapes.box(axes, x, y, width, height, colour, linewidth=0, gid=f"{gid}-block-{block_id}")
        ink = style.ink_on(colour)
        shapes.text(
            axes, *middle, str(block_id), color=ink, fontweight="bold", fontsize=style.SMALL
        )


def note(axes: Axes, x: float, y: float, words: str, **kwargs: Any) -> None:
    """Small words that explain, to the right of x."""
    look = {"ha": "left", "color": style.MUTED, "fontsize": style.SMALL, **kwargs}
    shapes.text(axes, x, y, words, **look)


def code(axes: Axes, x: float, y: float, words: str, **kwargs: Any) -> None:
    """Small words of a program, to the right of x."""
    note(axes, x, y, words, **{"fontsize": 7.5, **shapes.MONO, **kwargs})
