"""A beam search over its blocks: the tree of tokens, and below it who holds which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from pagedattn.cache import KVCache, SeqId
from pagedattn.sharing import Heir
from pagedattn.viz import shapes, style
from pagedattn.viz.sharing import (
    NAME_ROOM,
    ROW,
    check_rows,
    paint_shared_tables,
    sharing_in_words,
)
from pagedattn.viz.state import PoolState, capture_pool

MAX_TOKENS = 40
NODE, FONT = 0.2, 6.5  # a token's height in inches, its words in points


@dataclass(frozen=True)
class Node:
    """A token of some beam: after which token of the step before (an index), and how it reads."""

    seq_id: SeqId
    parent: int
    words: str


class BeamTree:
    """What a beam search chose, step by step; the cache itself holds only the beams alive now.

    ``prompt`` is the sequence from which the search begins, ``num_prompt_tokens`` its length,
    ``words`` how it reads (default: its name).
    """

    def __init__(self, prompt: SeqId, num_prompt_tokens: int, words: str | None = None) -> None:
        self.prompt = prompt
        self.words = str(prompt) if words is None else words
        self.num_prompt_tokens = num_prompt_tokens
        self.alive: list[SeqId] = [prompt]
        self.steps: list[list[Node]] = []

    def grow(self, heirs: Sequence[Heir], words: Sequence[str]) -> None:
        """The heirs of one ``replace``, the best first, and how their tokens read.

        Raises ValueError for an heir of a beam that is not alive.
        """
        step = []
        for heir, read in zip(heirs, words, strict=True):
            if heir.parent not in self.alive:
                raise ValueError(f"{heir.parent!r} is not alive; {self.alive} are")
            step.append(Node(heir.seq_id, self.alive.index(heir.parent), read))
        self.steps.append(step)
        self.alive = [node.seq_id for node in step]

    def descendants(self) -> list[list[tuple[int, ...]]]:
        """For each node of each step: the last step's nodes (indices) that descend from it."""
        below: list[tuple[int, ...]] = [(i,) for i in range(len(self.alive))]
        found = [below]
        for before, step in zip(self.steps[-2::-1], self.steps[:0:-1], strict=True):
            above: list[tuple[int, ...]] = [()] * len(before)
            for node, leaves in zip(step, below, strict=True):
                above[node.parent] += leaves
            below = above
            found.append(below)
        return found[::-1]


@style.styled
def draw_beam_tree(cache: KVCache, tree: BeamTree, title: str | None = None) -> style.Picture:
    """Above, every token that a beam once held, the best of a step on top; branches that died are
    pale. Below, under the same tokens, the blocks of the beams alive: one that several beams hold
    stands once.

    Raises ValueError for anything but a paged cache that holds the tree's last beams and nothing
    else, without a step, and for more than 40 tokens or 12 beams.
    """
    state = capture_pool(cache)
    if not tree.steps:
        raise ValueError("the tree has no step yet")
    if set(cache.seq_ids) != set(tree.alive):
        raise ValueError(f"the tree's beams are {tree.alive}; the cache holds {cache.seq_ids}")
    check_rows(state)
    num_tokens = tree.num_prompt_tokens + len(tree.steps)
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"{num_tokens} tokens; at most {MAX_TOKENS} can be drawn")
    most = max(len(step) for step in tree.steps)
    top = style.MARGIN + (0.5 if title else 0.2)
    below = top + most * ROW + 0.3
    figure, axes = style.card(below + len(tree.alive) * ROW + 0.6, title)
    columns = -(-num_tokens // state.block_size)
    pitch = (style.WIDTH - 2 * style.MARGIN - NAME_ROOM) / columns
    left = style.MARGIN + NAME_ROOM
    for i in range(1, columns):
        edge = left + i * pitch - 0.03
        line: dict[str, Any] = {"color": style.LINE, "linewidth": 0.8, "linestyle": (0, (3, 2))}
        axes.plot([edge, edge], [top - 0.05, below], **line)
    _paint_tree(axes, left, top, pitch / state.block_size, tree, _colours(state, tree))
    paint_shared_tables(axes, style.MARGIN, below, pitch, state)
    words = sharing_in_words(state)
    shapes.text(axes, style.MARGIN, below + len(tree.alive) * ROW + 0.2, words, ha="left")
    return figure


def _colours(state: PoolState, tree: BeamTree) -> list[str]:
    """The colour of each beam alive, as its blocks have it."""
    numbers = {owner.name: owner.number for owner, _ in state.tables}
    return [style.owner_colour(numbers[str(seq_id)]) for seq_id in tree.alive]


def _paint_tree(
    axes: Axes, left: float, top: float, slot: float, tree: BeamTree, colours: list[str]
) -> None:
    middle = top + len(tree.steps[-1]) * ROW / 2
    width = tree.num_prompt_tokens * slot - 0.06
    outline = {"edgecolor": style.INK, "linewidth": 1.6}
    shapes.box(axes, left, middle - NODE / 2, width, NODE, style.CARD, gid="prompt", **outline)
    words = shapes.fit(tree.words, width, style.SMALL)
    shapes.text(axes, left + width / 2, middle, words, fontsize=style.SMALL)
    before = [(left + width, middle)]
    for number, (step, alive) in enumerate(zip(tree.steps, tree.descendants(), strict=True)):
        x = left + (tree.num_prompt_tokens + number) * slot
        ends = []
        for i, (node, leaves) in enumerate(zip(step, alive, strict=True)):
            y = top + (i + 0.5) * ROW
            look, ink = _look(leaves, colours)
            start = before[node.parent]
            line: dict[str, Any] = {"color": look["edgecolor"], "linewidth": 1.4 if leaves else 0.8}
            axes.plot([start[0], x], [start[1], y], zorder=0.5, gid=f"edge-{number}-{i}", **line)
            gid = f"token-{number}-{i}"
            shapes.box(axes, x, y - NODE / 2, slot - 0.07, NODE, gid=gid, **look)
            words = shapes.fit(node.words, slot + 0.02, FONT)
            shapes.text(axes, x + (slot - 0.07) / 2, y, words, fontsize=FONT, color=ink)
            ends.append((x + slot - 0.07, y))
        before = ends


def _look(leaves: tuple[int, ...], colours: list[str]) -> tuple[dict[str, Any], str]:
    """A token's box and ink: of a dead branch, of one beam, of several."""
    if not leaves:
        return {"fill": style.FREE, "edgecolor": style.LINE}, style.MUTED
    if len(leaves) > 1:
        return {"fill": style.CARD, "edgecolor": style.INK, "linewidth": 1.6}, style.INK
    colour = colours[leaves[0]]
    return {"fill": colour, "edgecolor": colour}, style.ink_on(colour)
