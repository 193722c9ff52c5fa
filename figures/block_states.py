"""The four states of a block, and what moves it from one to the next.

Every method of a pool is tried on a block in every state; what changes it must be drawn here.
"""

from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from pagedattn.prefix import BlockPool, KVCacheBlock, build_cache
from pagedattn.viz import shapes, style
from pagedattn.viz.scenes import compute, small_config, start
from pagedattn.viz.script import run_script
from pagedattn.viz.state import BlockState, capture_pool

BLANK, IN_USE = "free and blank", "in use"
REGISTERED, FINDABLE = "in use, with a digest", "free, can be found"
DIGEST = bytes(32)
VERBS = {
    "get_new_blocks": lambda pool, block: pool.get_new_blocks(1),
    "cache_full_blocks": lambda pool, block: pool.cache_full_blocks([block], [DIGEST], 0, 1),
    "free_blocks": lambda pool, block: pool.free_blocks([block]),
    "touch": lambda pool, block: pool.touch([block]),
    "reset_prefix_cache": lambda pool, block: pool.reset_prefix_cache(),
}

WIDTH, HEIGHT = 2.2, 0.72
NODES = {BLANK: (0.3, 1.2), IN_USE: (4.7, 1.2), FINDABLE: (0.3, 3.35), REGISTERED: (4.7, 3.35)}


class Move(NamedTuple):
    """An arrow from point to point, and where the method and its occasion stand."""

    begin: tuple[float, float]
    end: tuple[float, float]
    words: str
    at: tuple[float, float]
    ha: str = "center"


MOVES = {
    (BLANK, "get_new_blocks", IN_USE): Move(
        (2.5, 1.4), (4.7, 1.4), "from the head of the queue", (3.6, 1.12)
    ),
    (IN_USE, "free_blocks", BLANK): Move(
        (4.7, 1.75), (2.5, 1.75), "without a digest: to the tail", (3.6, 1.89)
    ),
    (IN_USE, "cache_full_blocks", REGISTERED): Move(
        (6.3, 1.92), (6.3, 3.35), "full and\ncomputed:\nat commit", (6.2, 2.5), "right"
    ),
    (REGISTERED, "free_blocks", FINDABLE): Move(
        (4.7, 3.55), (2.5, 3.55), "to the tail of the queue", (3.6, 3.27)
    ),
    (FINDABLE, "touch", REGISTERED): Move(
        (2.5, 3.9), (4.7, 3.9), "a hit: out of the middle", (3.6, 4.04)
    ),
    (FINDABLE, "get_new_blocks", IN_USE): Move(
        (2.5, 3.4), (4.75, 1.92), "at the head:\nevicted", (3.25, 2.45), "right"
    ),
    (FINDABLE, "reset_prefix_cache", BLANK): Move(
        (0.75, 3.35), (0.75, 1.92), "all digests\nforgotten", (0.85, 2.6), "left"
    ),
}


def state_of(block: KVCacheBlock) -> str:
    if block.ref_cnt:
        return IN_USE if block.block_hash is None else REGISTERED
    return BLANK if block.block_hash is None else FINDABLE


def block_in(state: str) -> tuple[BlockPool, KVCacheBlock]:
    """A pool with one usable block, in this state."""
    pool = BlockPool(2)
    block = pool.blocks[1]
    if state != BLANK:
        VERBS["get_new_blocks"](pool, block)
    if state in (REGISTERED, FINDABLE):
        VERBS["cache_full_blocks"](pool, block)
    if state == FINDABLE:
        VERBS["free_blocks"](pool, block)
    assert state_of(block) == state
    return pool, block


def try_everything() -> set[tuple[str, str, str]]:
    """(state, method, state after it), for each method that leads to another state."""
    moves = set()
    for state in NODES:
        for name, verb in VERBS.items():
            pool, block = block_in(state)
            try:
                verb(pool, block)
            except ValueError:
                continue
            moves.add((state, name, state_of(block)))
    return {move for move in moves if move[0] != move[2]}


def counts_up_and_down(state: str) -> bool:
    """Whether touch and free_blocks move the count of a block in this state, and nothing else."""
    pool, block = block_in(state)
    counts = [block.ref_cnt]
    for name in ("touch", "free_blocks"):
        VERBS[name](pool, block)
        counts.append(block.ref_cnt)
    return counts == [1, 2, 1] and state_of(block) == state


def examples() -> dict[str, BlockState]:
    """A block in each state, out of a cache at work."""
    cache = build_cache(small_config(num_blocks=5), seed="a figure")
    start(cache, "A", 4)
    cache.free("A")
    cache.add("B", [9] * 7)
    compute(cache, {"B": 7})
    blocks = {state_of(block): block.block_id for block in cache.pool.blocks[1:]}
    state = capture_pool(cache)
    return {name: state.blocks[block_id] for name, block_id in blocks.items()}


def draw() -> Figure:
    assert try_everything() == set(MOVES)
    assert all(map(counts_up_and_down, (IN_USE, REGISTERED)))
    figure, axes = style.card(4.85, "The four states of a block")
    blocks = examples()
    for state, (x, y) in NODES.items():
        _paint_node(axes, x, y, state, blocks[state])
    for (state, name, after), move in MOVES.items():
        _paint_move(axes, name, move, lost=(state, after) == (FINDABLE, IN_USE))
    for state, y, bend in ((IN_USE, 1.2, -1.6), (REGISTERED, 4.07, 1.6)):
        _paint_counts(axes, NODES[state][0], y, bend)
    return figure


def _paint_node(axes: Axes, x: float, y: float, state: str, block: BlockState) -> None:
    box = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": style.CARD}
    edge = style.INK if block.ref_cnt else style.MUTED
    axes.add_patch(
        FancyBboxPatch((x, y), WIDTH, HEIGHT, edgecolor=edge, gid=f"node-{state}", **box)
    )
    shapes.block(axes, x + 0.14, y + 0.24, 0.42, 0.28, block, 4)
    shapes.text(axes, x + 0.7, y + 0.28, state, ha="left", fontweight="bold")
    count = "ref_cnt 1 or more" if block.ref_cnt else "ref_cnt 0, in the queue"
    small = {"ha": "left", "fontsize": style.SMALL, "color": style.MUTED}
    shapes.text(axes, x + 0.7, y + 0.48, count, **small)


def _paint_move(axes: Axes, name: str, move: Move, lost: bool) -> None:
    colour = style.ACCENT if lost else style.INK
    _arrow(axes, move.begin, move.end, colour)
    x, y = move.at
    method = {"fontsize": style.SMALL, "color": colour, **shapes.MONO}
    shapes.text(axes, x, y, name, ha=move.ha, **method)
    small: dict[str, Any] = {"fontsize": style.SMALL, "color": style.MUTED, "linespacing": 1.15}
    shapes.text(axes, x, y + 0.07, move.words, ha=move.ha, va="top", **small)


def _paint_counts(axes: Axes, x: float, y: float, bend: float) -> None:
    """A loop above or below a node: the block stays, its count moves."""
    _arrow(axes, (x + 0.15, y), (x + 0.5, y), style.INK, connectionstyle=f"arc3,rad={bend}")
    middle = y + (0.2 if bend > 0 else -0.2)
    for place, (name, change) in enumerate((("touch", "+ 1"), ("free_blocks", "− 1"))):
        at = middle + 0.15 * (place - 0.5)
        method = {"fontsize": style.SMALL, **shapes.MONO}
        shapes.text(axes, x + 0.62, at, name, ha="left", **method)
        small = {"fontsize": style.SMALL, "color": style.MUTED}
        shapes.text(axes, x + 1.42, at, f"ref_cnt {change}", ha="left", **small)


def _arrow(axes: Axes, begin: Any, end: Any, colour: str, **kwargs: Any) -> None:
    look = {"arrowstyle": "-|>,head_length=5,head_width=2.5", "linewidth": 1.3, "color": colour}
    axes.add_patch(FancyArrowPatch(begin, end, shrinkA=2, shrinkB=2, **look, **kwargs))


if __name__ == "__main__":
    run_script(__file__, draw)
