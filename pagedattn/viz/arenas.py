"""An arena at work: slabs come and go, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.cache import OutOfBlocks, Usage
from pagedattn.contiguous import SlabArena
from pagedattn.traces.buddy import BuddyArena, buddy_size
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import paint_arena
from pagedattn.viz.state import ArenaState, OwnerState

LABEL, HEIGHT, PITCH = 1.75, 0.3, 0.62  # inches: words on the left, a row's bar, row to row
LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


@dataclass(frozen=True)
class ArenaStep:
    """One take or give_back: what it did to the pieces, and the arena after it."""

    caption: str
    pieces: str
    state: ArenaState
    refused: int | None = None  # slots of the slab that was not given
    refusal: str = ""


class ArenaRecording:
    """Slabs of an arena by name: ``take`` and ``give_back`` go to the arena, and every step is
    kept for ``draw``.

    In a BuddyArena a slab is larger than what was asked for; the rest is drawn hatched.
    """

    def __init__(self, arena: SlabArena | BuddyArena) -> None:
        self.arena = arena
        self.steps: list[ArenaStep] = []
        self._slabs: dict[str, tuple[int, int]] = {}  # first slot, slots asked for
        self._seen: list[str] = []

    def take(self, name: str, num_slots: int) -> None:
        """Ask the arena for a slab. A refusal is a step like others.

        Raises ValueError for a name that has a slab.
        """
        if name in self._slabs:
            raise ValueError(f"{name} has a slab already")
        if name not in self._seen:
            self._seen.append(name)
        before = self._holes()
        try:
            start = self.arena.take(num_slots)
        except OutOfBlocks as refusal:
            caption = f"{name} asks for {num_slots}"
            step = ArenaStep(caption, "", self._state(), refusal.needed, str(refusal))
            self.steps.append(step)
            return
        self._slabs[name] = (start, num_slots)
        parts = [self._size(num_slots), *_sizes(self._holes() - before)]
        (cut,) = _sizes(before - self._holes())
        pieces = f"{cut} = {' + '.join(map(str, parts))}" if len(parts) > 1 else ""
        self.steps.append(ArenaStep(f"{name} takes {num_slots}", pieces, self._state()))

    def give_back(self, name: str) -> None:
        """Give the slab of this name back. Raises ValueError for a name without one."""
        if name not in self._slabs:
            raise ValueError(f"{name} has no slab; {', '.join(self._slabs) or 'nobody'} has")
        before = self._holes()
        start, num_slots = self._slabs[name]
        self.arena.give_back(start, num_slots)
        del self._slabs[name]
        parts = sorted([self._size(num_slots), *_sizes(before - self._holes())])
        pieces = f"{' + '.join(map(str, parts))} = {sum(parts)}" if len(parts) > 1 else ""
        caption = f"{name} gives {num_slots} back"
        self.steps.append(ArenaStep(caption, pieces, self._state()))

    @style.styled
    def draw(self, title: str | None = None) -> style.Picture:
        """One row a step: on the left what was asked for and how pieces were cut or merged, on the
        right the arena after it. Raises ValueError without a step."""
        if not self.steps:
            raise ValueError("no step to draw; take a slab first")
        top = style.MARGIN + (0.35 if title else 0.0)
        figure, axes = style.card(top + PITCH * len(self.steps) + 0.4, title)
        for i, step in enumerate(self.steps):
            y = top + i * PITCH
            left, width, middle = LEFT + LABEL, WIDTH - LABEL, y + HEIGHT / 2
            colour = style.INK if step.refused is None else style.ACCENT
            lines = [step.caption, step.pieces] if step.pieces else [step.caption]
            for k, words in enumerate(lines):
                at = middle + 0.18 * (k - (len(lines) - 1) / 2)
                look = (
                    {"color": colour} if k == 0 else {"color": style.MUTED, "fontsize": style.SMALL}
                )
                shapes.text(axes, LEFT, at, words, ha="left", **look)
            if step.refused is None:
                paint_arena(axes, left, y, width, step.state, f"step-{i}-slab", HEIGHT)
                continue
            asked = step.refused * width / step.state.usage.total
            dashed = {"edgecolor": style.ACCENT, "linestyle": "--", "linewidth": 1.4}
            shapes.box(axes, left, y, asked, HEIGHT, style.CARD, gid=f"step-{i}-refused", **dashed)
            size = f"{step.refused} in one piece"
            if shapes.fit(size, asked) == size:
                shapes.text(axes, left + asked / 2, middle, size, color=style.ACCENT)
            words = "; ".join(step.refusal.split("; ")[1:])
            shapes.text(
                axes, left, y + HEIGHT + 0.12, words, ha="left", fontsize=style.SMALL, color=colour
            )
        y = top + PITCH * len(self.steps) + 0.12
        x = LEFT + LABEL
        for words, fill, hatch in (
            ("asked for", style.NULL, None),
            ("rounded up", style.CARD, "//////"),
            ("free", style.FREE, None),
        ):
            if hatch and not any(step.state.usage.wasted for step in self.steps):
                continue
            shapes.swatch(axes, x, y, fill, hatch)
            shapes.text(
                axes, x + 0.19, y, words, ha="left", fontsize=style.SMALL, color=style.MUTED
            )
            x += 0.45 + 0.063 * len(words)
        return figure

    def _size(self, num_slots: int) -> int:
        return buddy_size(num_slots) if isinstance(self.arena, BuddyArena) else num_slots

    def _holes(self) -> set[tuple[int, int]]:
        """Free pieces as (first slot, size)."""
        if isinstance(self.arena, BuddyArena):
            return {(start, size) for size, starts in self.arena.free.items() for start in starts}
        return set(self.arena.holes)

    def _state(self) -> ArenaState:
        owners = [
            (OwnerState(name, self._seen.index(name), num_slots), start, self._size(num_slots))
            for name, (start, num_slots) in self._slabs.items()
        ]
        usage = Usage(
            total=self.arena.num_slots,
            used=sum(num_slots for _, num_slots in self._slabs.values()),
            reserved=sum(size for _, _, size in owners),
        )
        slabs = tuple(sorted(owners, key=lambda slab: slab[1]))
        return ArenaState(slabs, tuple(sorted(self._holes())), usage, tuple(self._seen))


def _sizes(pieces: set[tuple[int, int]]) -> list[int]:
    """Sizes of pieces in the order of their places."""
    return [size for _, size in sorted(pieces)]
