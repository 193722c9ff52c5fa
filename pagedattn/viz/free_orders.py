"""In which order blocks go back to the free queue: tables and queue, moment by moment."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from pagedattn.manager import KVCacheManager
from pagedattn.viz import shapes, style
from pagedattn.viz.groups import code, entry, note

TABLES, QUEUE = 1.95, 4.0  # where the two columns begin
ENTRY, HEIGHT, ROW = 0.27, 0.24, 0.72
MAX_MOMENTS, MAX_QUEUE, MAX_TABLE, MAX_REQUESTS = 8, 10, 6, 2


@dataclass(frozen=True)
class Moment:
    """What happened, the call, the tables of requests that have one, and what is free in order."""

    caption: str
    call: str
    tables: dict[str, tuple[int, ...]]
    ref_cnt: tuple[int, ...]
    free_queue: tuple[int, ...]


class FreeOrder:
    """Moments of a manager of one group. Raises ValueError for another number of groups."""

    def __init__(self, manager: KVCacheManager) -> None:
        num_groups = len(manager.coordinator.single_type_managers)
        if num_groups != 1:
            raise ValueError(f"the free order of one group is drawn, not of {num_groups}")
        self.manager = manager
        self.moments: list[Moment] = []

    def snapshot(self, caption: str, call: str = "") -> None:
        """Keep what the manager holds now."""
        (single,) = self.manager.coordinator.single_type_managers
        pool = self.manager.pool
        self.moments.append(
            Moment(
                caption,
                call,
                {name: tuple(b.block_id for b in t) for name, t in single.req_to_blocks.items()},
                tuple(block.ref_cnt for block in pool.blocks),
                tuple(block.block_id for block in pool.free_queue),
            )
        )

    @style.styled
    def draw(self, title: str | None = None) -> style.Picture:
        """A row a moment: the tables, and the queue, the block that leaves next on the left. What
        came into the queue since the row before is in the colour of who gave it back.

        Raises ValueError without a moment, for more than 8, for more than 2 requests, and for
        tables of more than 6 or queues of more than 10 blocks.
        """
        moments = self.moments
        if not 1 <= len(moments) <= MAX_MOMENTS:
            raise ValueError(f"{len(moments)} moments; 1 to {MAX_MOMENTS} can be drawn")
        names = list(dict.fromkeys(name for moment in moments for name in moment.tables))
        longest = max((len(table) for m in moments for table in m.tables.values()), default=0)
        queue = max(len(moment.free_queue) for moment in moments)
        if len(names) > MAX_REQUESTS or longest > MAX_TABLE or queue > MAX_QUEUE:
            raise ValueError(
                f"{len(names)} requests, tables of {longest} blocks and {queue} free ones; at most "
                f"{MAX_REQUESTS}, {MAX_TABLE} and {MAX_QUEUE} can be drawn"
            )
        top = style.MARGIN + (0.8 if title else 0.45)
        figure, axes = style.card(top + ROW * len(moments) + 0.24, title)
        note(axes, TABLES, top - 0.27, "block tables, with ref_cnt")
        note(axes, QUEUE, top - 0.27, "free queue: next to leave first")
        owners = {name: style.owner_colour(i) for i, name in enumerate(names)}
        for i, moment in enumerate(moments):
            y = top + i * ROW
            shapes.text(axes, style.MARGIN, y + 0.1, moment.caption, ha="left")
            code(axes, style.MARGIN, y + 0.28, moment.call)
            _paint_tables(axes, y - 0.06, i, moment, owners)
            _paint_queue(axes, y + 0.06, i, moment, moments[i - 1] if i else moment, owners)
        bottom = top + ROW * len(moments)
        words = "in colour: just given back, the end of the table first; white: free before"
        note(axes, style.MARGIN, bottom, words)
        return figure


def _paint_tables(axes: Axes, y: float, i: int, moment: Moment, owners: dict[str, str]) -> None:
    for line, (name, colour) in enumerate(owners.items()):
        at = y + 0.29 * line
        table = moment.tables.get(name)
        if table is None:
            continue
        shapes.text(axes, TABLES - 0.06, at + HEIGHT / 2, name, ha="right", fontweight="bold")
        for column, block_id in enumerate(table):
            x = TABLES + 0.02 + 0.46 * column
            gid = f"step-{i}-{name}-{column}"
            entry(axes, x, at, ENTRY, HEIGHT, block_id, colour, gid)
            if moment.ref_cnt[block_id] > 1:
                words = f"×{moment.ref_cnt[block_id]}"
                note(axes, x + ENTRY + 0.005, at + HEIGHT / 2, words, fontsize=6.5)


def _paint_queue(
    axes: Axes, y: float, i: int, moment: Moment, before: Moment, owners: dict[str, str]
) -> None:
    ended = [name for name in before.tables if name not in moment.tables]
    for place, block_id in enumerate(moment.free_queue):
        is_new = block_id not in before.free_queue
        colour = owners[ended[-1]] if is_new and ended else None
        gid = f"step-{i}-queue-{place}" + "-new" * is_new
        entry(axes, QUEUE + 0.29 * place, y, ENTRY, HEIGHT, block_id, colour, gid)
