"""Readers of drawings: of figures by the gids of their shapes, of pools in a terminal."""

import re

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle


def patches(figure: Figure) -> dict[str, Patch]:
    """The patches of all axes that have a gid, by it."""
    named = [(p.get_gid(), p) for axes in figure.axes for p in axes.patches]
    ids = [gid for gid, _ in named if gid]
    assert len(ids) == len(set(ids)), "a gid is used twice"
    return {gid: patch for gid, patch in named if gid}


def rectangles(figure: Figure) -> dict[str, Rectangle]:
    """Those among the patches with a gid that are rectangles."""
    return {g: patch for g, patch in patches(figure).items() if isinstance(patch, Rectangle)}


def rectangle(figure: Figure, gid: str) -> Rectangle:
    """The rectangle with this gid."""
    return rectangles(figure)[gid]


def words(figure: Figure) -> list[str]:
    """All texts of all axes."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def named_words(figure: Figure) -> dict[str, str]:
    """The texts that have a gid, by it."""
    texts = [(text.get_gid(), text) for axes in figure.axes for text in axes.texts]
    return {gid: text.get_text() for gid, text in texts if gid}


def blocks_in(drawing: str) -> dict[int, str]:
    """What stands in each block of a pool in a terminal: ``12[AAA.]`` -> {12: "AAA."}. Of several
    pools the last one counts."""
    return {int(number): bar for number, bar in re.findall(r"(\d+)\[(.*?)\]", drawing)}
