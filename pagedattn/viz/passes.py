"""The fixed point of a hybrid hit: kinds in rows, passes in columns, the length on its way down."""

from __future__ import annotations

from matplotlib.axes import Axes

from pagedattn.viz import shapes, style
from pagedattn.viz.groups import group_colour, note
from pagedattn.viz.searches import HitSearch, Question

LEFT, ROW, HEIGHT = 1.2, 0.95, 0.28
MAX_PASSES, MAX_KINDS, MAX_BLOCKS = 4, 4, 5


@style.styled
def draw_fixed_point(search: HitSearch, title: str | None = None) -> style.Picture:
    """Each kind in a row: what it has in the cache, and in each pass what it is asked, where it
    looks and what it answers. What one answers is the most that the next is asked.

    Raises ValueError for more than 4 passes, 4 kinds or 5 blocks.
    """
    passes = search.passes()
    sizes = (len(passes), len(search.kinds), search.num_blocks)
    if not all(
        1 <= n <= most for n, most in zip(sizes, (MAX_PASSES, MAX_KINDS, MAX_BLOCKS), strict=True)
    ):
        raise ValueError(
            f"{sizes[0]} passes, {sizes[1]} kinds, {sizes[2]} blocks; at most {MAX_PASSES}, "
            f"{MAX_KINDS} and {MAX_BLOCKS} can be drawn"
        )
    top = style.MARGIN + (0.85 if title else 0.5)
    figure, axes = style.card(top + ROW * len(search.kinds) + 0.42, title)
    _Drawing(axes, search, top).paint(passes)
    return figure


class _Drawing:
    """Where the columns stand, and what is in them."""

    def __init__(self, axes: Axes, search: HitSearch, top: float) -> None:
        self.axes, self.search, self.top = axes, search, top
        num_columns = len(search.passes()) + 1
        self.column = (style.WIDTH - style.MARGIN - LEFT) / num_columns
        self.pitch = min((self.column - 0.45) / search.num_blocks, 0.5)

    def paint(self, passes: list[list[Question]]) -> None:
        axes, search = self.axes, self.search
        shapes.text(axes, LEFT, self.top - 0.3, "in the cache", ha="left", fontweight="bold")
        for kind, name in enumerate(search.kinds):
            y = self._y(kind)
            shapes.text(axes, style.MARGIN, y + HEIGHT / 2, name, ha="left", fontweight="bold")
            for i, is_there in enumerate(search.in_cache[kind]):
                self._block(LEFT, y, i, kind, is_there, f"kind-{kind}-block-{i}")
        for number, questions in enumerate(passes, start=1):
            self._pass(number, questions, passes[number - 2][-1].length if number > 1 else None)
        bottom = self.top + ROW * len(search.kinds) + 0.12
        note(
            axes, style.MARGIN, bottom,
            "✓ ✗: looked up, and found or not    pale: not looked at",
        )  # fmt: skip

    def _pass(self, number: int, questions: list[Question], length: int | None) -> None:
        """A column; ``length`` is what the pass before ended with."""
        axes, search = self.axes, self.search
        left = LEFT + number * self.column
        shapes.text(axes, left, self.top - 0.3, f"pass {number}", ha="left", fontweight="bold")
        asked = {question.kind: question for question in questions}
        for kind in range(len(search.kinds)):
            y = self._y(kind)
            if kind not in asked:
                note(axes, left, y + HEIGHT / 2 - 0.08, "has no gaps:")
                note(axes, left, y + HEIGHT / 2 + 0.1, f"is only cut to {length}")
                continue
            self._question(left, y, number, asked[kind])
        first = length if length is not None else questions[0].max_length
        last = questions[-1].length
        y = self._y(len(search.kinds) - 1) + HEIGHT + 0.42
        if last < first:
            words, look = f"{first} → {last}: once more", {"color": style.ACCENT}
        else:
            words, look = f"{last}: all agree", {"color": style.INK}
        bold = {"fontweight": "bold", "ha": "left", "gid": f"pass-{number}-length"}
        shapes.text(axes, left, y, words, **bold, **look)

    def _question(self, left: float, y: float, number: int, question: Question) -> None:
        axes, kind = self.axes, question.kind
        lookups = dict(question.lookups)
        for i in range(self.search.num_blocks):
            gid = f"pass-{number}-kind-{kind}-block-{i}"
            if i not in lookups:
                x, width = left + i * self.pitch, self.pitch - 0.05
                shapes.box(axes, x, y, width, HEIGHT, style.FREE, linewidth=0.5, gid=gid)
                continue
            self._block(left, y, i, kind, lookups[i], gid, mark="✓" if lookups[i] else "✗")
        words = f"at most {question.max_length}: finds {question.length}"
        look = {"color": style.INK, "gid": f"pass-{number}-kind-{kind}-answer"}
        note(axes, left, y + HEIGHT + 0.14, words, **look)
        if kind < len(self.search.kinds) - 1:
            x = left + self.search.num_blocks * self.pitch / 2
            shapes.arrow(axes, (x, y + HEIGHT + 0.26), (x, y + ROW - 0.05), linewidth=0.9)

    def _block(
        self, left: float, y: float, index: int, kind: int, is_there: bool, gid: str, mark: str = ""
    ) -> None:
        x, width = left + index * self.pitch, self.pitch - 0.05
        middle = (x + width / 2, y + HEIGHT / 2)
        if is_there:
            colour = group_colour(kind)
            shapes.box(self.axes, x, y, width, HEIGHT, colour, linewidth=0, gid=gid)
            ink = style.ink_on(colour)
        else:
            gid += "-missing"
            shapes.box(self.axes, x, y, width, HEIGHT, style.CARD, linestyle="--", gid=gid)
            ink = style.ACCENT if mark else style.MUTED
        words = f"{index} {mark}".strip()
        shapes.text(self.axes, *middle, words, fontsize=style.SMALL, color=ink)

    def _y(self, kind: int) -> float:
        return self.top + kind * ROW
