"""The objects of a manager and who holds whom, as their attributes say it."""

from __future__ import annotations

from matplotlib.axes import Axes

from pagedattn.manager import KVCacheConfig, KVCacheManager
from pagedattn.manager.keys import split_key
from pagedattn.viz import shapes, style
from pagedattn.viz.groups import code, entry, group_colour, kind_of, note

MAX_GROUPS, MAX_BLOCKS, MAX_REQUESTS, MAX_TABLE = 3, 17, 3, 5
LEFT, RIGHT = style.MARGIN, 6.62  # of everything; the way down to the pool is right of it
NODE, ENTRY = 0.5, 0.24


def attribute(holder: object, held: object) -> str:
    """The name under which an object holds another, also in a tuple: ``coordinator``,
    ``single_type_managers[1]``. Raises ValueError if it does not."""
    for name, value in vars(holder).items():
        if value is held:
            return name
        if isinstance(value, tuple | list):
            for i, item in enumerate(value):
                if item is held:
                    return f"{name}[{i}]"
    raise ValueError(f"{type(holder).__name__} holds no such {type(held).__name__}")


@style.styled
def draw_holders(
    manager: KVCacheManager, config: KVCacheConfig, title: str | None = None
) -> style.Picture:
    """The manager, its coordinator, a manager a group with its spec and its tables, and the one
    pool with its blocks, its queue and its map. Arrows bear the names of the attributes.

    ``config`` is what the manager was made from. Raises ValueError for more than 3 groups, 17
    blocks, 3 requests or 5 blocks in a table.
    """
    groups, pool = manager.coordinator.single_type_managers, manager.pool
    requests = list(dict.fromkeys(name for group in groups for name in group.req_to_blocks))
    longest = max((len(t) for group in groups for t in group.req_to_blocks.values()), default=0)
    sizes = (len(groups), len(pool.blocks), len(requests), longest)
    limits = (MAX_GROUPS, MAX_BLOCKS, MAX_REQUESTS, MAX_TABLE)
    if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
        raise ValueError(
            "{} groups, {} blocks, {} requests and tables of {} blocks".format(*sizes)
            + "; at most {}, {}, {} and {} can be drawn".format(*limits)
        )
    top = style.MARGIN + (0.36 if title else 0.06)
    tables = top + 2.6
    bottom = tables + 0.3 * len(requests) + 0.42
    figure, axes = style.card(bottom + 1.72, title)
    drawing = _Drawing(axes, manager, config)
    drawing.managers(top)
    drawing.tables(tables, requests)
    drawing.pool_at(bottom, top)
    return figure


class _Drawing:
    """Boxes from top to bottom."""

    def __init__(self, axes: Axes, manager: KVCacheManager, config: KVCacheConfig) -> None:
        self.axes, self.manager, self.config = axes, manager, config
        self.groups = manager.coordinator.single_type_managers
        self.width = min((RIGHT - LEFT + 0.15) / len(self.groups), 2.6)

    def managers(self, y: float) -> None:
        manager, axes = self.manager, self.axes
        coordinator = manager.coordinator
        rows = (y, y + 0.9, y + 1.85)
        self._node(LEFT, rows[0], 2.3, type(manager).__name__, "what a scheduler asks")
        self._node(LEFT, rows[1], 2.3, type(coordinator).__name__, "all groups; hits for all")
        middle = LEFT + 1.15
        shapes.arrow(axes, (middle, rows[0] + NODE), (middle, rows[1]))
        code(axes, middle + 0.08, rows[0] + NODE + 0.2, f".{attribute(manager, coordinator)}")
        for i, group in enumerate(self.groups):
            x, width = LEFT + i * self.width, self.width - 0.15
            layers = ", ".join(self.config.kv_cache_groups[i].layer_names)
            words = f"{kind_of(group.spec)}, blocks of {group.spec.block_size}: {layers}"
            self._node(x, rows[2], width, type(group).__name__, words, fontsize=8.0)
            shapes.arrow(axes, (middle, rows[1] + NODE), (x + width / 2, rows[2]))
        name = attribute(coordinator, self.groups[0]).removesuffix("[0]")
        code(axes, middle + 1.35, rows[1] + NODE + 0.1, f".{name}: {len(self.groups)}")

    def tables(self, y: float, requests: list[str]) -> None:
        """A line a request, a column a group: the block tables."""
        for i, group in enumerate(self.groups):
            x = LEFT + i * self.width
            name = attribute(group, group.req_to_blocks)
            code(self.axes, x + 0.08, y - 0.12, f".{name}")
            for line, request_id in enumerate(requests):
                at = y + 0.3 * line
                look = {"ha": "left", "fontweight": "bold"}
                shapes.text(self.axes, x + 0.08, at + ENTRY / 2, request_id, **look)
                for column, block in enumerate(group.req_to_blocks.get(request_id, ())):
                    place, gid = x + 0.28 + 0.34 * column, f"group-{i}-{request_id}-{column}"
                    entry(self.axes, place, at, 0.31, ENTRY, block.block_id, group_colour(i), gid)

    def pool_at(self, y: float, top: float) -> None:
        """The pool, and the line to it from everybody who holds it."""
        axes, pool, manager = self.axes, self.manager.pool, self.manager
        holders = (manager, manager.coordinator, *self.groups)
        names = {attribute(holder, pool) for holder in holders}
        rail, height = RIGHT + 0.2, 1.42
        shapes.box(axes, LEFT, y, RIGHT - LEFT, height, "none", edgecolor=style.INK, linewidth=1.1)
        starts = [
            (LEFT + 2.3, top + NODE / 2),
            (LEFT + 2.3, top + 0.9 + NODE / 2),
            (LEFT + len(self.groups) * self.width - 0.15, top + 1.85 + NODE / 2),
        ]
        for x, at in starts:
            axes.plot([x, rail], [at, at], color=style.MUTED, linewidth=1.0)
        axes.plot([rail, rail], [top + NODE / 2, y + 0.2], color=style.MUTED, linewidth=1.0)
        arrow = {"arrowstyle": "-|>", "color": style.MUTED, "linewidth": 1.0}
        axes.annotate("", (RIGHT, y + 0.2), (rail, y + 0.2), arrowprops=arrow)
        code(axes, LEFT + 2.4, top + NODE / 2 - 0.11, f".{', .'.join(sorted(names))}")
        note(axes, LEFT + 2.9, top + NODE / 2 - 0.11, f"the same object in all {len(holders)}")
        shapes.text(axes, LEFT + 0.12, y + 0.2, type(pool).__name__, ha="left", fontweight="bold")
        owner = {
            block.block_id: i
            for i, group in enumerate(self.groups)
            for table in group.req_to_blocks.values()
            for block in table
        }
        rows = [y + 0.38 + 0.36 * i for i in range(3)]
        held = (pool.blocks, pool.free_queue, pool.cached_blocks)
        for at, thing in zip(rows, held, strict=True):
            code(axes, LEFT + 0.12, at + ENTRY / 2, f".{attribute(pool, thing)}")
        left = LEFT + 1.35
        pitch = (RIGHT - left - 0.08) / len(pool.blocks)
        for block in pool.blocks:
            i = block.block_id
            colour = group_colour(owner[i]) if i in owner and block.ref_cnt else None
            gid = f"pool-{i}" + (f"-group-{owner[i]}" if colour and i else "")
            x = left + i * pitch
            entry(axes, x, rows[0], pitch - 0.03, ENTRY, i, colour, gid)
            if block.ref_cnt > 1 and i:
                words = f"×{block.ref_cnt}"
                note(axes, x + pitch / 2, rows[0] - 0.09, words, ha="center", fontsize=7.0)
        for place, block in enumerate(pool.free_queue):
            x, gid = left + place * pitch, f"queue-{place}"
            entry(axes, x, rows[1], pitch - 0.03, ENTRY, block.block_id, None, gid)
        code(axes, left, rows[2] + ENTRY / 2, self._map_in_words())

    def _map_in_words(self) -> str:
        """How many keys there are, and the first of them."""
        cached = self.manager.pool.cached_blocks
        words = f"{len(cached)} keys"
        for key, block in list(cached.items())[:1]:
            digest, group_id = split_key(key)
            words += f", digest and group: ({digest.hex()[:6]}…, {group_id}) → {block.block_id}"
        return words

    def _node(
        self, x: float, y: float, width: float, name: str, words: str, fontsize: float = 9.0
    ) -> None:
        look = {"edgecolor": style.INK, "linewidth": 1.1, "gid": f"node-{x:.2f}-{y:.2f}-{name}"}
        shapes.box(self.axes, x, y, width, NODE, style.CARD, **look)
        middle = x + width / 2
        shapes.text(self.axes, middle, y + 0.17, name, fontweight="bold", fontsize=fontsize)
        note(self.axes, middle, y + 0.36, words, ha="center", fontsize=7.2)
