"""A whole memory on one line: the weights, then every sequence's share, then what is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagedattn.cache import KVCache
from pagedattn.viz import shapes, style
from pagedattn.viz.state import ArenaState, OwnerState, State, capture

HEIGHT, PITCH = 0.42, 0.86
LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


@style.styled
def draw_memory(
    caches: Mapping[str, KVCache | State],
    weights: float = 0,
    title: str | None = None,
    words: Mapping[str, str] | None = None,
) -> style.Picture:
    """One bar a cache, all slots long: each sequence's used slots in full colour, its empty ones
    hatched, free slots pale. In front lie the weights, as many slots long as they take memory.

    Above a bar stand its name and, on the right, what ``words`` says of it or how many sequences
    it holds. Raises ValueError without a cache, for negative weights, and for what is no cache.
    """
    if not caches:
        raise ValueError("draw_memory needs at least one cache")
    if weights < 0:
        raise ValueError(f"weights is {weights} slots, but must be at least 0")
    top = style.MARGIN + (0.4 if title else 0.1)
    figure, axes = style.card(top + PITCH * len(caches) + 0.35, title)
    for row, (name, cache) in enumerate(caches.items()):
        state = capture(cache)
        y = top + row * PITCH + 0.22
        scale = WIDTH / (weights + state.usage.total)
        begin = LEFT + weights * scale
        share = f"{state.usage.used / max(state.usage.reserved, 1):.1%} of the reserved slots used"
        tail = (words or {}).get(name, f"{len(state.seen)} sequences, {share}")
        shapes.text(axes, LEFT, y - 0.13, name, ha="left", fontweight="bold")
        shapes.text(axes, LEFT + WIDTH, y - 0.13, tail, ha="right", color=style.MUTED)
        shapes.box(axes, begin, y, LEFT + WIDTH - begin, HEIGHT, style.FREE, gid=f"row-{row}-slots")
        if weights:
            gid = f"row-{row}-weights"
            shapes.box(axes, LEFT, y, begin - LEFT, HEIGHT, style.CARD, gid=gid, hatch="xxxx")
            label = shapes.fit("weights", begin - LEFT)
            shapes.plate(
                axes, (LEFT + begin) / 2, y + HEIGHT / 2, label, style.CARD, style.SMALL, "normal"
            )
        for i, (owner, first, size, used) in enumerate(_pieces(state)):
            x, gid = begin + first * scale, f"row-{row}-piece-{i}-owner-{owner.number}"
            shapes.span(axes, x, y, size * scale, HEIGHT, owner, used / size, gid)
    y, x = top + PITCH * len(caches) + 0.08, LEFT
    for label, fill, hatch in (
        ("K and V of a token", style.NULL, None),
        ("reserved and empty", style.CARD, "//////"),
        ("free", style.FREE, None),
    ):
        shapes.swatch(axes, x, y, fill, hatch)
        shapes.text(axes, x + 0.19, y, label, ha="left", fontsize=style.SMALL, color=style.MUTED)
        x += 0.45 + 0.063 * len(label)
    return figure


def _pieces(state: State) -> Iterator[tuple[OwnerState, int, int, int]]:
    """Slots that lie side by side and belong to one sequence: owner, first, number, used."""
    if isinstance(state, ArenaState):
        for owner, start, size in state.slabs:
            yield owner, start, size, owner.num_tokens
        return
    for owner, block_ids in state.tables:
        tokens, run = owner.num_tokens, 0
        for i, block_id in enumerate(block_ids):
            if block_ids[i + 1 : i + 2] == (block_id + 1,):
                continue
            size = (i + 1 - run) * state.block_size
            first = (block_ids[run] - 1) * state.block_size  # block 0 is not among the slots
            yield owner, first, size, min(tokens, size)
            tokens, run = tokens - min(tokens, size), i + 1
