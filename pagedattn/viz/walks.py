"""How a program of paged attention walks a block table: tile after tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from pagedattn.viz import shapes, style
from pagedattn.viz.state import BlockState

MAX_BLOCKS, MAX_KEYS, MAX_TILES, MAX_HEADS = 10, 8, 3, 4
CELL, ROW = 0.39, 0.24  # a score's width and height, in inches
LABELS = 0.62  # left of the scores, for the names of the heads
BLOCK = 0.25  # a block's height


@dataclass(frozen=True)
class Step:
    """One tile of keys, ``begin`` to ``end``, and what a program knows behind it: for each head the
    scores of the tile, the greatest score so far, the sum of exp(score - that), and the sum of
    exp(score - that) times the value."""

    begin: int
    end: int
    scores: Tensor  # [num_heads, keys]
    top: Tensor  # [num_heads]
    total: Tensor  # [num_heads]
    acc: Tensor  # [num_heads, head_dim]


def walk(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Sequence[int], seq_len: int, keys: int
) -> list[Step]:
    """Online softmax of one token over ``keys`` keys at a time, as the kernels of chapter 05 do it,
    unscaled. ``q`` [num_heads, head_dim], heads that share the one KV head of the cache."""
    block_size = k_cache.shape[1]
    q = q.double()
    top = q.new_full((len(q),), float("-inf"))
    total, acc = q.new_zeros(len(q)), q.new_zeros(q.shape)
    steps = []
    for begin in range(0, seq_len, keys):
        end = min(begin + keys, seq_len)
        slots = [divmod(position, block_size) for position in range(begin, end)]
        k, v = (
            cache[[table[column] for column, _ in slots], [offset for _, offset in slots], 0]
            for cache in (k_cache.double(), v_cache.double())
        )
        scores = q @ k.T
        new_top = top.maximum(scores.amax(1))
        weights, shrink = (scores - new_top[:, None]).exp(), (top - new_top).exp()
        total = total * shrink + weights.sum(1)
        acc = acc * shrink[:, None] + weights @ v
        top = new_top
        steps.append(Step(begin, end, scores, top, total, acc))
    return steps


@style.styled
def draw_walk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Sequence[int],
    seq_len: int,
    keys: int,
    title: str | None = None,
) -> style.Picture:
    """A decode program: the table, the blocks that it leads to, and for each tile of ``keys`` keys
    the scores, the running maximum, sum and output of each head.

    ``q`` [num_heads, 2]; ``k_cache``, ``v_cache`` [num_blocks, block_size, 1, 2]. Scores are not
    scaled. Raises ValueError for more blocks, keys, tiles or heads than there is room for.
    """
    num_blocks = len(k_cache)
    num_tiles = -(-seq_len // keys)
    for name, number, most in (
        ("blocks", num_blocks, MAX_BLOCKS),
        ("keys a tile", keys, MAX_KEYS),
        ("tiles", num_tiles, MAX_TILES),
        ("heads", len(q), MAX_HEADS),
    ):
        if not 1 <= number <= most:
            raise ValueError(f"{number} {name}; 1 to {most} can be drawn")
    steps = walk(q, k_cache, v_cache, table, seq_len, keys)
    panel = len(q) * ROW + 0.5
    top = style.MARGIN + (0.6 if title else 0.35)
    first = top + 1.62
    figure, axes = style.card(first + num_tiles * panel + 0.62, title)
    _paint_table(axes, top, k_cache, table, seq_len, keys)
    for number, step in enumerate(steps):
        _paint_step(axes, first + number * panel, number, step, keys)
    _paint_result(axes, first + num_tiles * panel, steps[-1])
    return figure


def _paint_table(
    axes: Axes, top: float, k_cache: Tensor, table: Sequence[int], seq_len: int, keys: int
) -> None:
    num_blocks, block_size = k_cache.shape[:2]
    pitch = (style.WIDTH - 2 * style.MARGIN + 0.1) / num_blocks
    y_pool = top + 1.0
    _note(axes, style.MARGIN, top - 0.15, "block table of the row")
    _note(axes, style.MARGIN, y_pool - 0.3, "the pool")
    for block_id in range(num_blocks):
        x = style.MARGIN + block_id * pitch
        width = pitch - 0.1
        if block_id == 0:
            shapes.block(axes, x, y_pool, width, BLOCK, BlockState(0, is_null=True), block_size)
        elif block_id not in table:
            shapes.box(axes, x, y_pool, width, BLOCK, style.FREE, gid=f"block-{block_id}")
            shapes.rungs(axes, x, y_pool, width, BLOCK, block_size)
            _number(axes, x + width / 2, y_pool, block_id)
    middle = style.MARGIN + (num_blocks - len(table)) * pitch / 2
    for column, block_id in enumerate(table):
        begin = column * block_size
        colour = style.owner_colour(begin // keys)
        x, width = middle + column * pitch, pitch - 0.1
        shapes.box(axes, x, top, width, 0.27, colour, gid=f"entry-{column}")
        look = {"color": style.ink_on(colour), "fontweight": "bold"}
        shapes.text(axes, x + width / 2, top + 0.135, str(block_id), **look)
        last = min(begin + block_size, seq_len) - 1
        words = f"keys {begin} to {last}"
        shapes.text(axes, x + width / 2, top - 0.08, words, fontsize=6.5, color=style.MUTED)
        at = style.MARGIN + block_id * pitch
        used = min(seq_len - begin, block_size) / block_size
        rest = {"hatch": "////", "edgecolor": style.tint(colour, 0.55), "linewidth": 0}
        shapes.box(axes, at, y_pool, width, BLOCK, style.tint(colour, 0.15), **rest)
        gid = f"block-{block_id}"
        shapes.box(axes, at, y_pool, used * width, BLOCK, colour, linewidth=0, gid=gid)
        shapes.rungs(axes, at, y_pool, width, BLOCK, block_size)
        edge = style.line_colour(begin // keys)
        shapes.box(axes, at, y_pool, width, BLOCK, "none", edgecolor=edge, linewidth=1.0)
        _number(axes, at + width / 2, y_pool, block_id)
        shapes.arrow(axes, (x + width / 2, top + 0.28), (at + width / 2, y_pool - 0.19), colour)


def _paint_step(axes: Axes, y: float, number: int, step: Step, keys: int) -> None:
    colour = style.owner_colour(number)
    shapes.box(axes, style.MARGIN, y, 0.12, 0.12, colour, linewidth=0)
    words = f"tile {number + 1}: keys {step.begin} to {step.end - 1}"
    _note(axes, style.MARGIN + 0.18, y + 0.06, words, color=style.INK)
    left = style.MARGIN + LABELS
    end = left + keys * CELL
    columns = {"maximum": end + 0.42, "sum": end + 1.05, "output, undivided": end + 1.95}
    for name, x in columns.items():
        shapes.text(axes, x, y + 0.06, name, fontsize=style.SMALL, color=style.MUTED)
    for head in range(len(step.scores)):
        at = y + 0.2 + head * ROW
        _note(axes, style.MARGIN, at + ROW / 2, f"head {head}")
        for i in range(keys):
            x, gid = left + i * CELL, f"score-{head}-{step.begin + i}"
            if step.begin + i < step.end:
                fill = style.tint(colour, 0.25)
                shapes.box(axes, x, at, CELL, ROW, fill, edgecolor=style.CARD, gid=gid)
                score = round(float(step.scores[head, i]), 1) + 0.0  # not -0.0
                words = f"{score:.1f}".replace("-", "−")
                shapes.text(axes, x + CELL / 2, at + ROW / 2, words, fontsize=style.SMALL)
            else:
                look = {"hatch": "////", "edgecolor": style.tint(colour, 0.4), "linewidth": 0}
                shapes.box(axes, x, at, CELL, ROW, style.CARD, gid=f"{gid}-none", **look)
        numbers = f"{step.top[head]:.1f}", f"{step.total[head]:.3f}", _pair(step.acc[head])
        for x, words in zip(columns.values(), numbers, strict=True):
            shapes.text(axes, x, at + ROW / 2, words, fontsize=style.SMALL, **shapes.MONO)


def _paint_result(axes: Axes, y: float, step: Step) -> None:
    """Divided once, behind the last tile."""
    _note(
        axes,
        style.MARGIN,
        y,
        "the end: output divided by sum, and the log-sum-exp, maximum + log(sum)",
        color=style.INK,
    )
    for head in range(len(step.top)):
        out, lse = step.acc[head] / step.total[head], step.top[head] + step.total[head].log()
        words = f"head {head}: {_pair(out)},  log-sum-exp {lse:.3f}"
        x = style.MARGIN + head * 3.3
        look: dict[str, Any] = {"ha": "left", "fontsize": style.SMALL, "gid": f"result-{head}"}
        shapes.text(axes, x, y + 0.22, words, **look, **shapes.MONO)


def _pair(numbers: Tensor) -> str:
    return " ".join(f"{float(x):6.2f}" for x in numbers).replace("-", "−")


def _number(axes: Axes, x: float, y: float, block_id: int) -> None:
    place = y - shapes.ID_ROOM / 2
    shapes.text(axes, x, place, str(block_id), fontsize=style.SMALL, color=style.MUTED)


def _note(axes: Axes, x: float, y: float, words: str, color: str = style.MUTED) -> None:
    shapes.text(axes, x, y, words, ha="left", fontsize=style.SMALL, color=color)
