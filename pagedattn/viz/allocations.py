"""One call of ``allocate_slots``: five kinds of tokens, the blocks below them, and the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from pagedattn.manager import KVCacheBlocks, KVCacheManager, Request
from pagedattn.viz import shapes, style
from pagedattn.viz.groups import note

KINDS = ("comp", "new_comp", "ext_comp", "new", "lookahead")
COLOURS = dict(
    zip(KINDS, (style.NULL, *(style.OWNER_COLOURS[i] for i in (0, 1, 2, 3))), strict=True)
)
STRIP, STEP = 1.45, 0.36
MAX_CALLS, MAX_BLOCKS = 3, 7


@dataclass(frozen=True)
class Place:
    """A block of the table behind the call. ``source`` is "held", "hit", "external", "new", or
    "null" where the null block stands."""

    block_id: int
    source: str
    was_free: bool
    ref_cnt: int
    had_digest: bool
    has_digest: bool


class Allocation:
    """A call of ``allocate_slots`` of a manager of one group, made here, and what it changed.

    ``num_tokens`` says how many tokens of each kind there were, ``places`` are the blocks of the
    table, ``returned`` the ids of the answer; none and None if it was refused. ``released`` left
    the window. Of ``num_free`` free blocks ``num_left`` are not free any more.

    Raises ValueError for another number of groups, and what the call raises.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        request: Request,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> None:
        pool, name = manager.pool, request.request_id
        if (num_groups := len(manager.coordinator.single_type_managers)) != 1:
            raise ValueError(f"a call over one group is drawn, not over {num_groups}")
        (single,) = manager.coordinator.single_type_managers
        self.block_size = single.block_size
        numbers = (
            request.num_computed_tokens,
            num_new_computed_tokens,
            num_external_computed_tokens,
            num_new_tokens,
            num_lookahead_tokens,
        )
        self.num_tokens = dict(zip(KINDS, numbers, strict=True))
        before = [(block.ref_cnt, block.block_hash) for block in pool.blocks]
        held = [block.block_id for block in single.req_to_blocks.get(name, ())]
        self.num_free = pool.num_free_blocks
        new = manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens,
            new_computed_blocks=new_computed_blocks,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
        )
        self.num_left = self.num_free - pool.num_free_blocks
        self.returned = None if new is None else new.get_block_ids()[0]
        hits = set(new_computed_blocks.get_block_ids()[0]) if new_computed_blocks else set()
        self.places: list[Place] = []
        table = single.req_to_blocks.get(name, [])
        self.released = [i for i in held if i not in {block.block_id for block in table}]
        for i, block in enumerate(table if new is not None else ()):
            source = "held" if i < len(held) else "hit" if block.block_id in hits else "external"
            if block.is_null:
                source = "null"
            elif block.block_id in (self.returned or ()):
                source = "new"
            ref_cnt, block_hash = before[block.block_id]
            was_hashed = block_hash is not None and source in ("held", "hit")
            self.places.append(
                Place(
                    block.block_id,
                    source,
                    ref_cnt == 0,
                    block.ref_cnt,
                    was_hashed,
                    block.block_hash is not None,
                )
            )

    def from_source(self, source: str) -> list[int]:
        """The blocks that came from there."""
        return [place.block_id for place in self.places if place.source == source]

    def registered(self) -> list[int]:
        """The blocks that have a digest since this call."""
        return [p.block_id for p in self.places if p.has_digest and not p.had_digest]


@style.styled
def draw_allocations(
    calls: Sequence[tuple[str, Allocation]], title: str | None = None
) -> style.Picture:
    """A strip for each call, captioned: its tokens, and the blocks below them with where they came
    from; then the steps of ``allocate_slots``, with what the first call did in each.

    Raises ValueError for a call that was refused, and for more than 3 calls or 7 blocks.
    """
    longest = max((len(call.places) for _, call in calls), default=0)
    if not 1 <= len(calls) <= MAX_CALLS or longest > MAX_BLOCKS:
        raise ValueError(
            f"{len(calls)} calls, tables of {longest} blocks; 1 to {MAX_CALLS} calls and at most "
            f"{MAX_BLOCKS} blocks can be drawn"
        )
    for caption, call in calls:
        if call.returned is None:
            raise ValueError(f"{caption}: the answer is None; there is nothing to draw")
    top = style.MARGIN + (0.4 if title else 0.1)
    steps = top + STRIP * len(calls) + 0.32
    rows = _steps(calls[0][1])
    figure, axes = style.card(steps + STEP * len(rows) + 0.2, title)
    slot = (style.WIDTH - 2 * style.MARGIN) / (longest * calls[0][1].block_size)
    for i, (caption, call) in enumerate(calls):
        _paint_call(axes, top + STRIP * i, f"call-{i}", caption, call, slot)
    note(axes, style.MARGIN, steps - 0.16, "the steps")
    note(axes, 4.32, steps - 0.16, "in the first call", ha="right")
    for i, row in enumerate(rows):
        _paint_step(axes, steps + STEP * i, i + 1, *row, is_last=i == len(rows) - 1)
    return figure


def _paint_call(
    axes: Axes, y: float, name: str, caption: str, call: Allocation, slot: float
) -> None:
    shapes.text(axes, style.MARGIN, y + 0.06, caption, ha="left", fontweight="bold")
    x, tokens, blocks = style.MARGIN, y + 0.38, y + 0.68
    for kind, n in call.num_tokens.items():
        if not n:
            continue
        fill, width = COLOURS[kind], n * slot
        gid = f"{name}-{kind}-{n}"
        shapes.box(axes, x, tokens, width - 0.03, 0.24, fill, linewidth=0, gid=gid)
        shapes.text(axes, x + width / 2, tokens - 0.1, kind, fontsize=style.SMALL)
        ink = style.ink_on(fill)
        shapes.text(axes, x + width / 2, tokens + 0.12, str(n), color=ink, fontweight="bold")
        x += width
    for i, place in enumerate(call.places):
        left, width = style.MARGIN + i * call.block_size * slot, call.block_size * slot - 0.05
        fresh = place.source in ("external", "new")
        edge = {"edgecolor": style.INK, "linewidth": 1.5} if fresh else {}
        gid = f"{name}-block-{place.block_id}-{place.source}"
        shapes.box(axes, left, blocks, width, 0.27, style.CARD, gid=gid, **edge)
        middle = left + width / 2
        look: dict[str, Any] = {"fontweight": "bold", "fontsize": style.SMALL}
        shapes.text(axes, middle, blocks + 0.135, str(place.block_id), **look)
        note(axes, middle, blocks + 0.37, _whence(place), ha="center", fontsize=7.5)
        registered = place.has_digest and not place.had_digest
        words = "registered" if registered else "has a digest" if place.has_digest else "not full"
        look = {"color": style.INK, "fontweight": "bold"} if registered else {}
        note(axes, middle, blocks + 0.52, words, ha="center", fontsize=7.5, **look)


def _whence(place: Place) -> str:
    if place.source in ("held", "null"):
        return place.source
    if place.source == "hit":
        return "hit, was free" if place.was_free else f"hit, now ×{place.ref_cnt}"
    return "taken to load" if place.source == "external" else "new, returned"


def _steps(call: Allocation) -> tuple[tuple[str, str, str, str], ...]:
    """What is done, what came of it in this call, the way out, and what has changed there."""
    hits, loaded, new = (_list(call.from_source(s)) for s in ("hit", "external", "new"))
    released, unchanged = len(call.released), "nothing has changed"
    need = f"{call.num_left + released} needed, {call.num_free + released} free"
    n = call.num_tokens["new"] + call.num_tokens["ext_comp"]
    return (
        ("anything new or external?", f"{n} tokens", "ValueError", unchanged),
        ("if asked: does the whole request fit?", "not asked", "None", unchanged),
        ("release what is out of reach", _list(call.released), "", ""),
        ("are enough blocks free?", need, "None", "windows stay trimmed"),
        ("attach hits; blocks to load into", f"{hits}; to load: {loaded}", "", ""),
        ("take new blocks, group by group", new, "", ""),
        ("register the blocks that are full", _list(call.registered()), "", ""),
        ("return the blocks of step 6", new, "", ""),
    )


def _list(block_ids: list[int]) -> str:
    return ", ".join(map(str, block_ids)) or "none"


def _paint_step(
    axes: Axes, y: float, number: int, words: str, here: str, way_out: str, changed: str, *,
    is_last: bool,
) -> None:  # fmt: skip
    left, width, height = style.MARGIN, 4.1, 0.26
    middle = y + height / 2
    shapes.box(axes, left, y, width, height, style.CARD, edgecolor=style.INK, linewidth=1.0)
    shapes.text(axes, left + 0.14, middle, str(number), fontweight="bold")
    shapes.text(axes, left + 0.3, middle, words, ha="left")
    note(axes, left + width - 0.08, middle, here, ha="right", gid=f"step-{number}")
    if not is_last:
        shapes.arrow(axes, (left + 0.4, y + height), (left + 0.4, y + STEP))
    if way_out:
        start, end = left + width, left + width + 0.35
        arrow = {"arrowstyle": "-|>", "color": style.ACCENT, "linewidth": 1.2}
        axes.annotate("", (end, middle), (start, middle), arrowprops=arrow)
        look: dict[str, Any] = {"ha": "left", "color": style.ACCENT, "fontweight": "bold"}
        shapes.text(axes, end + 0.05, middle, way_out, **look)
        note(axes, end + (0.87 if len(way_out) > 4 else 0.5), middle, changed, fontsize=7.5)
