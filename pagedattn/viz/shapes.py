"""The few shapes that all drawings are made of. Lengths are inches, y grows downward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path

from pagedattn.viz import style
from pagedattn.viz.state import BlockState, OwnerState

ID_ROOM = 0.17  # above a block, for its number
DIGEST_ROOM = 0.15  # below a block, for the first digits of its digest
MONO: dict[str, Any] = {"family": "DejaVu Sans Mono"}


def text(axes: Axes, x: float, y: float, words: str, **kwargs: Any) -> None:
    """Words, centred on the point unless ``ha`` and ``va`` say otherwise."""
    axes.text(
        x, y, words, **{"ha": "center", "va": "center_baseline", "fontsize": style.NORMAL, **kwargs}
    )


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, **kwargs: Any
) -> Rectangle:
    """A rectangle with its top left corner at (x, y)."""
    options: dict[str, Any] = {"edgecolor": style.LINE, "linewidth": 0.8, **kwargs}
    patch = Rectangle((x, y), width, height, facecolor=fill, **options)
    axes.add_patch(patch)
    return patch


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = style.MUTED,
    **kwargs: Any,
) -> None:
    """A thin arrow that leaves and arrives upright."""
    options: dict[str, Any] = {"linewidth": 1.2, **kwargs}
    middle = (start[1] + end[1]) / 2
    way = [start, (start[0], middle), (end[0], middle), end]
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    axes.add_patch(
        FancyArrowPatch(
            path=Path(way, codes),
            arrowstyle="-|>,head_length=4,head_width=2",
            color=colour,
            **options,
        )
    )


def rungs(
    axes: Axes, x: float, y: float, width: float, height: float, n: int, colour: str = style.CARD
) -> None:
    """Thin lines that cut a box into n slots."""
    lines = [
        ((x + i * width / n, y + 0.01), (x + i * width / n, y + height - 0.01)) for i in range(1, n)
    ]
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.8))


def span(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    owner: OwnerState,
    used: float,
    gid: str,
) -> None:
    """Slots of one owner: the first ``used`` (a share of the width) full, the rest hatched."""
    colour = style.owner_colour(owner.number)
    rest = {"hatch": "////", "edgecolor": style.tint(colour, 0.55), "linewidth": 0}
    if used < 1:
        box(axes, x + used * width, y, (1 - used) * width, height, style.tint(colour, 0.15), **rest)
    if used > 0:
        box(axes, x, y, used * width, height, colour, linewidth=0, gid=f"{gid}-used")
    edge = style.line_colour(owner.number)
    box(axes, x, y, width, height, "none", edgecolor=edge, linewidth=1.0, gid=gid)


def bands(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    owners: Sequence[OwnerState],
    used: float,
    gid: str,
) -> None:
    """Slots of several owners: a band in the colour of each, inside a dark outline."""
    owners = owners[: len(style.OWNER_COLOURS)]  # the colours come again after that
    rest = {"hatch": "////", "edgecolor": style.tint(style.MUTED, 0.55), "linewidth": 0}
    if used < 1:
        fill = style.tint(style.MUTED, 0.1)
        box(axes, x + used * width, y, (1 - used) * width, height, fill, **rest)
    band = height / len(owners)
    for i, owner in enumerate(owners):
        colour = style.owner_colour(owner.number)
        box(axes, x, y + i * band, used * width, band, colour, linewidth=0, gid=f"{gid}-band-{i}")
    box(axes, x, y, width, height, "none", edgecolor=style.INK, linewidth=1.6, gid=gid)


def findable(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    former: OwnerState | None,
    gid: str,
) -> None:
    """A free block that can still be found: ruled, in the thinned colour of who held it last."""
    colour = style.owner_colour(former.number) if former else style.MUTED
    edge = style.line_colour(former.number) if former else style.MUTED
    rules = {"hatch": "-----", "edgecolor": style.tint(colour, 0.45), "linewidth": 0}
    box(axes, x, y, width, height, style.tint(colour, 0.15), **rules)
    box(axes, x, y, width, height, "none", edgecolor=edge, linewidth=1.0, gid=gid)


def digest(axes: Axes, x: float, y: float, state: BlockState, gid: str) -> None:
    """The first digits of a block's digest, centred at x below y; ticked if it was found."""
    if not state.block_hash:
        return
    words = "✓" * state.is_hit + state.digits()
    look = {"fontsize": 7.0, "color": style.ACCENT if state.is_hit else style.INK, **MONO}
    text(axes, x, y + DIGEST_ROOM / 2, words, gid=gid, **look)


def block(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    state: BlockState,
    block_size: int,
    *,
    name: str = "block",
    show_id: bool = True,
    words: str | None = None,
    fontsize: float = style.NORMAL,
) -> None:
    """One block: its number above, its owner inside (or ``words``), its slots by their state.

    A block that several tables name has a band for each owner, a dark outline, and its ``ref_cnt``
    beside its number: ``5 ×3``. The first digits of its digest stand below. Its outline has the gid
    ``block-5-owner-0``, ``block-5-owner-0-2`` for the owners 0 and 2, ``block-5-free``,
    ``block-5-findable`` or ``block-0-null``.
    """
    middle = (x + width / 2, y + height / 2)
    gid = f"{name}-{state.block_id}"
    if state.is_null:
        box(axes, x, y, width, height, style.FREE, gid=f"{gid}-null", hatch="xxxx")
        if width > 0.35:
            plate(axes, *middle, "null", style.FREE, style.SMALL, "normal")
    elif state.is_findable:
        findable(axes, x, y, width, height, state.former, f"{gid}-findable")
    elif state.owner is None:
        box(axes, x, y, width, height, style.FREE, gid=f"{gid}-free")
        if words:
            text(axes, *middle, words, color=style.MUTED, fontsize=style.SMALL)
    else:
        used = state.num_used / block_size
        gid = "-".join([gid, "owner", *(str(owner.number) for owner in state.owners)])
        if len(state.owners) > 1:
            bands(axes, x, y, width, height, state.owners, used, gid)
        else:
            span(axes, x, y, width, height, state.owner, used, gid)
    if (
        not state.is_null
        and not state.is_findable
        and block_size <= 8
        and width / block_size > 0.06
    ):
        rungs(axes, x, y, width, height, block_size)
    if len(state.owners) > 1:
        names = words or " ".join(owner.name for owner in state.owners)
        words = names if fit(names, width, fontsize) == names else f"×{len(state.owners)}"
        plate(axes, *middle, words, style.CARD, fontsize)
    elif state.owner is not None:
        words = fit(state.owner.name if words is None else words, width, fontsize)
        colour = style.owner_colour(state.owner.number)
        plate(axes, x + name_place(used, width), middle[1], words, colour, fontsize)
    if show_id:
        shared = {"color": style.INK, "fontweight": "bold"} if state.is_shared else {}
        number = f"{state.block_id} ×{state.ref_cnt}" if state.is_shared else str(state.block_id)
        look = {"fontsize": style.SMALL, "color": style.MUTED, **shared}
        text(axes, middle[0], y - ID_ROOM / 2, number, **look)
        digest(axes, middle[0], y + height, state, f"{name}-{state.block_id}-digest")


def name_place(used: float, width: float) -> float:
    """Where a name stands: in the middle of the used slots if they are wide enough for it, else in
    the middle of all."""
    return used * width / 2 if used * width > 0.2 else width / 2


def fit(words: str, width: float, fontsize: float = style.NORMAL) -> str:
    """The words, cut where they would run over a width."""
    room = max(1, int((width - 0.06) / (0.0095 * fontsize)))
    return words if len(words) <= room else words[: max(1, room - 1)] + "…" * (room > 1)


def plate(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    colour: str,
    fontsize: float = style.NORMAL,
    weight: str = "bold",
) -> None:
    """Words on a small plate of a colour, legible on any slots behind it."""
    text(
        axes,
        x,
        y,
        words,
        fontsize=fontsize,
        fontweight=weight,
        color=style.ink_on(colour),
        bbox={"boxstyle": "round,pad=0.15,rounding_size=0.25", "fc": colour, "ec": "none"},
    )


def swatch(axes: Axes, x: float, y: float, fill: str, hatch: str | None = None) -> None:
    """A little square in front of a legend's words, its middle at y."""
    edge = style.NULL if hatch or fill == style.FREE else "none"
    box(axes, x, y - 0.06, 0.12, 0.12, fill, linewidth=0.6, edgecolor=edge, hatch=hatch)
