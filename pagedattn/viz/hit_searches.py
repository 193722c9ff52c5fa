"""One pass of a search for a hit: where each kind looks, in which order, and what all agree on."""

from __future__ import annotations

from matplotlib.axes import Axes

from pagedattn.viz import shapes, style
from pagedattn.viz.groups import group_colour, note
from pagedattn.viz.searches import HitSearch, Question

LEFT, ANSWER = 1.5, 1.0  # left of the blocks: who is asked; right of them: what it says
STRIP, HEIGHT = 1.1, 0.3
MAX_BLOCKS, MAX_KINDS = 10, 3


@style.styled
def draw_hit_search(search: HitSearch, title: str | None = None) -> style.Picture:
    """A strip for each kind: the blocks of the prompt that it has in the cache, its look-ups in
    their order, and the length that it can go on from; below, the lists that all agree on.

    Raises ValueError for a search of several passes, of more than 3 kinds or 10 blocks.
    """
    if (n := len(search.passes())) != 1:
        raise ValueError(f"a search of {n} passes; draw_fixed_point draws more than one")
    if len(search.kinds) > MAX_KINDS or not 1 <= search.num_blocks <= MAX_BLOCKS:
        raise ValueError(
            f"{len(search.kinds)} kinds and {search.num_blocks} blocks; at most {MAX_KINDS} and "
            f"{MAX_BLOCKS} can be drawn"
        )
    top = style.MARGIN + (0.66 if title else 0.3)
    lists = top + STRIP * len(search.questions) + 0.1
    figure, axes = style.card(lists + 0.42 * len(search.kinds) + 0.42, title)
    _Drawing(axes, search).paint(top, lists)
    return figure


class _Drawing:
    """Where blocks stand, and the rows."""

    def __init__(self, axes: Axes, search: HitSearch) -> None:
        self.axes, self.search = axes, search
        room = style.WIDTH - style.MARGIN - ANSWER - LEFT
        self.pitch = min(room / search.num_blocks, 0.9)
        self.width = self.pitch - 0.06

    def paint(self, top: float, lists: float) -> None:
        for i in range(self.search.num_blocks):
            note(self.axes, self._middle(i), top - 0.16, f"block {i}", ha="center")
        for i, question in enumerate(self.search.questions):
            self._question(top + i * STRIP, question)
        self._lists(lists)

    def _question(self, y: float, question: Question) -> None:
        axes, search, kind = self.axes, self.search, question.kind
        name, middle = search.kinds[kind], y + HEIGHT / 2
        shapes.text(axes, style.MARGIN, middle - 0.07, name, ha="left", fontweight="bold")
        note(axes, style.MARGIN, middle + 0.11, f"at most {question.max_length} tokens")
        for i, is_there in enumerate(search.in_cache[kind]):
            self._block(i, y, kind, is_there, f"kind-{kind}-block-{i}")
        look_up = y + HEIGHT + 0.16
        run = 0
        for number, (i, found) in enumerate(question.lookups, start=1):
            run = run + 1 if found else 0
            gid = f"kind-{kind}-lookup-{number}-block-{i}-{'found' if found else 'missing'}"
            look = {"fontsize": 7.5, "color": style.INK if found else style.ACCENT}
            words = f"{number}. {'✓' if found else '✗'}"
            shapes.text(axes, self._middle(i), look_up, words, gid=gid, **look)
            words = "missing" if not found else f"run of {run}" if search.windows[kind] else ""
            shapes.text(axes, self._middle(i), look_up + 0.15, words, **look)
        if len(question.lookups) > 1:
            start, stop = (self._middle(question.lookups[i][0]) for i in (0, -1))
            at = look_up + 0.31
            arrow = {"arrowstyle": "-|>", "color": style.MUTED, "linewidth": 1.0}
            axes.annotate("", (stop, at), (start, at), arrowprops=arrow)
        end = self._end(question.length)
        axes.plot([end, end], [y - 0.07, look_up + 0.22], color=style.INK, linewidth=1.6)
        x = LEFT + search.num_blocks * self.pitch + 0.06
        gid = f"kind-{kind}-answer"
        shapes.text(axes, x, middle - 0.07, f"{question.length} tokens", ha="left", gid=gid)
        note(axes, x, middle + 0.11, "found")

    def _lists(self, y: float) -> None:
        """The lists of the hit, and the window of the first token that is computed."""
        axes, search = self.axes, self.search
        num_hits = search.length // search.block_size
        longest = max(question.length for question in search.questions)
        for kind, block_ids in enumerate(search.hits):
            at = y + 0.42 * kind
            for i, block_id in enumerate(block_ids):
                gid = f"hit-{kind}-{i}"
                if block_id:
                    self._block(i, at, kind, True, f"{gid}-block-{block_id}")
                else:
                    x = self._x(i)
                    look = {"hatch": "xxxx", "gid": f"{gid}-null"}
                    shapes.box(axes, x, at, self.width, HEIGHT, style.FREE, **look)
                    middle = (x + self.width / 2, at + HEIGHT / 2)
                    shapes.plate(axes, *middle, "null", style.FREE, style.SMALL, "normal")
            shapes.text(axes, style.MARGIN, at + HEIGHT / 2, search.kinds[kind], ha="left")
            window = search.windows[kind]
            if window is not None and num_hits:
                begin = LEFT + max(search.length + 1 - window, 0) * self.pitch / search.block_size
                shapes.box(
                    axes, begin - 0.02, at - 0.05, self._end(search.length) - begin + 0.02,
                    HEIGHT + 0.1, "none", edgecolor=style.INK, linewidth=1.8, zorder=5,
                    gid=f"hit-{kind}-window",
                )  # fmt: skip
        end, bottom = self._end(search.length), y + 0.42 * len(search.hits)
        axes.plot([end, end], [y - 0.1, bottom - 0.05], color=style.INK, linewidth=1.6)
        shapes.text(
            axes, end + 0.12, y + HEIGHT / 2, f"the hit: {search.length} tokens", ha="left",
            fontweight="bold", gid="hit",
        )  # fmt: skip
        if self.search.questions[0].length == longest > search.length:
            words = f"{self.search.kinds[0]} is cut from {longest} to {search.length}"
            note(axes, end + 0.12, y + HEIGHT / 2 + 0.2, words)
        words = f"frame: what token {search.length}, the first to be computed, sees in front of it"
        note(axes, LEFT, bottom + 0.08, words)

    def _block(self, index: int, y: float, kind: int, is_there: bool, gid: str) -> None:
        x, width, axes = self._x(index), self.width, self.axes
        if not is_there:
            gid += "-missing"
            shapes.box(axes, x, y, width, HEIGHT, style.CARD, linestyle="--", gid=gid)
            return
        colour = group_colour(kind)
        shapes.box(axes, x, y, width, HEIGHT, colour, linewidth=0, gid=gid)
        shapes.rungs(axes, x, y, width, HEIGHT, self.search.block_size)
        shapes.plate(axes, x + width / 2, y + HEIGHT / 2, str(index), colour)

    def _x(self, index: int) -> float:
        return LEFT + index * self.pitch

    def _middle(self, index: int) -> float:
        return self._x(index) + self.width / 2

    def _end(self, num_tokens: int) -> float:
        """Right behind the block that ends a length."""
        return LEFT + num_tokens / self.search.block_size * self.pitch - 0.03
