"""The hash chain: two sequences that begin alike, their digests, and the map to the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from pagedattn.cache import SeqId
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import grid_height, paint_grid
from pagedattn.viz.state import OwnerState, PoolState, capture_pool

NAME_ROOM = 0.75
MAX_BLOCKS = 6
BLOCK, DIGEST, MAP, GAP = 0.3, 0.24, 0.56, 0.3  # heights in inches
DIGEST_WIDTH = 0.5
FONT = 7.0


@dataclass(frozen=True)
class _Chain:
    """A sequence: its tokens in words, and of its full blocks the digests and the blocks."""

    owner: OwnerState
    words: list[list[str]]
    digests: list[bytes]
    block_ids: tuple[int, ...]


@style.styled
def draw_hash_chain(
    cache: Any,
    first: SeqId,
    second: SeqId,
    words: Mapping[int, str] | None = None,
    title: str | None = None,
) -> style.Picture:
    """Two sequences, one above and one below the map: their tokens block by block, the chain of
    their digests, the map's entries, and the pool. Where both have one entry, ``second`` shares the
    block of ``first``.

    ``words``: what to write for a token (default: its number). Raises ValueError for a cache that
    finds nothing again, a sequence that is unknown or has full blocks to compute, and for more than
    6 full blocks.
    """
    state = capture_pool(cache)
    if getattr(cache, "hasher", None) is None:
        raise ValueError("a hash chain needs a cache with prefix caching")
    chains = [_chain(cache, state, seq_id, words or {}) for seq_id in (first, second)]
    num_columns = max(len(chain.digests) for chain in chains)
    if num_columns > MAX_BLOCKS:
        raise ValueError(f"{num_columns} full blocks; at most {MAX_BLOCKS} can be drawn")
    width = style.WIDTH - 2 * style.MARGIN
    left = style.MARGIN + NAME_ROOM
    pitch = (width - NAME_ROOM) / (num_columns + 0.45)  # a tail is not drawn to scale
    top = style.MARGIN + (0.35 if title else 0.0)
    y_map = top + BLOCK + DIGEST + 2 * GAP
    y_pool = y_map + MAP + DIGEST + BLOCK + 2 * GAP + 0.2
    bottom = y_pool + grid_height(state, width)
    figure, axes = style.card(bottom + 0.45, title)
    rows = ((top, top + BLOCK + GAP), (y_pool - 0.2 - BLOCK, y_map + MAP + GAP))
    for chain, other, (y_tokens, y_digest) in zip(chains, chains[::-1], rows, strict=True):
        _paint_tokens(axes, left, y_tokens, pitch, chain, other)
        _paint_digests(axes, left, (y_tokens, y_digest, y_map), pitch, chain, other)
    _paint_map(axes, left, y_map, pitch, state, chains)
    paint_grid(axes, style.MARGIN, y_pool, width, state)
    hits = len(_common(*chains))
    found = " ".join(map(str, chains[1].block_ids[:hits])) or "none"
    rest = " ".join(map(str, chains[1].block_ids[hits:])) or "none"
    sentence = (
        f"{second} found {hits * state.block_size} of its {cache.num_tokens(second)} tokens, in "
        f"blocks {found}; it computed those in {rest}"
    )
    shapes.text(axes, style.MARGIN, bottom + 0.12, sentence, ha="left")
    return figure


def _chain(cache: Any, state: PoolState, seq_id: SeqId, words: Mapping[int, str]) -> _Chain:
    block_ids = tuple(cache.block_ids(seq_id))  # says so if there is no such sequence
    sequence = cache.sequences[seq_id]
    computed = cache.num_computed_tokens(seq_id) // state.block_size
    if computed < len(sequence.block_hashes):
        raise ValueError(
            f"{seq_id} has computed {computed} of its {len(sequence.block_hashes)} full blocks"
        )
    tokens = [words.get(token, str(token)) for token in sequence.token_ids]
    blocks = [tokens[i : i + state.block_size] for i in range(0, len(tokens), state.block_size)]
    (owner,) = (owner for owner, _ in state.tables if owner.name == str(seq_id))
    return _Chain(owner, blocks, list(sequence.block_hashes), block_ids)


def _common(one: _Chain, other: _Chain) -> list[int]:
    """The logical blocks that lie in the same physical ones."""
    pairs = zip(one.block_ids, other.block_ids, strict=False)
    return [i for i, (a, b) in enumerate(pairs) if a == b]


def _paint_tokens(
    axes: Axes, x: float, y: float, pitch: float, chain: _Chain, other: _Chain
) -> None:
    """The blocks with their tokens; a token that the other has not at this place stands out."""
    owner = chain.owner
    name = shapes.fit(owner.name, NAME_ROOM - 0.2)
    middle = y + BLOCK / 2
    at = x - NAME_ROOM + 0.25
    shapes.plate(axes, at, middle, name, style.owner_colour(owner.number))
    fill = style.tint(style.owner_colour(owner.number))
    for i, block in enumerate(chain.words):
        lengths = [len(word) + 1.6 for word in block]
        full = i < len(chain.digests)
        width = pitch - 0.1 if full else min(0.075 * sum(lengths), 0.5 * pitch - 0.1)
        gid = f"tokens-{owner.number}-{i}"
        edge = style.line_colour(owner.number)
        shapes.box(axes, x + i * pitch, y, width, BLOCK, fill, edgecolor=edge, gid=gid)
        left = x + i * pitch
        for place, (word, length) in enumerate(zip(block, lengths, strict=True)):
            cell = width * length / sum(lengths)
            if place:
                axes.plot([left, left], [y + 0.02, y + BLOCK - 0.02], color=style.CARD, lw=1.2)
            differs = i < len(other.words) and other.words[i][place : place + 1] != [word]
            look = {"color": style.ACCENT, "fontweight": "bold"} if differs else {}
            shapes.text(axes, left + cell / 2, middle, word, fontsize=FONT, **look)
            left += cell


def _paint_digests(
    axes: Axes,
    x: float,
    heights: tuple[float, float, float],
    pitch: float,
    chain: _Chain,
    other: _Chain,
) -> None:
    """The digests, each with arrows from its tokens and from its parent, and one to the map."""
    y_tokens, y, y_map = heights
    number = chain.owner.number
    down = y_tokens < y
    middle = y + DIGEST / 2
    xs = [x - NAME_ROOM + 0.25] + [x + (i + 0.5) * pitch - 0.05 for i in range(len(chain.digests))]
    boxes = [("root", f"root-{number}", style.FREE)]
    for i, digest in enumerate(chain.digests):
        same = other.digests[i : i + 1] == [digest]
        fill = style.FREE if same else style.tint(style.owner_colour(number), 0.45)
        boxes.append((digest.hex()[:4], f"digest-{number}-{i}", fill))
    for at, (words, gid, fill) in zip(xs, boxes, strict=True):
        edge = style.MUTED if fill == style.FREE else style.line_colour(number)
        left = at - DIGEST_WIDTH / 2
        shapes.box(axes, left, y, DIGEST_WIDTH, DIGEST, fill, edgecolor=edge, gid=gid)
        shapes.text(axes, at, middle, words, fontsize=style.SMALL, **shapes.MONO)
    if len(chain.words) > len(chain.digests):
        look = {"fontsize": FONT, "color": style.MUTED, "ha": "left", "linespacing": 1.1}
        shapes.text(axes, x + len(chain.digests) * pitch, middle, "not full:\nno digest", **look)
    for i, (parent, at) in enumerate(pairwise(xs)):
        start, end = parent + DIGEST_WIDTH / 2, at - DIGEST_WIDTH / 2
        _arrow(axes, (start, middle), (end, middle), gid=f"parent-{number}-{i}")
        near, far = (y, y + DIGEST) if down else (y + DIGEST, y)
        brink = y_tokens + BLOCK if down else y_tokens
        _arrow(axes, (at, brink), (at, near), gid=f"content-{number}-{i}")
        hit = not down and i in _common(chain, other)
        colour = style.ACCENT if hit else style.MUTED
        border = y_map if down else y_map + MAP
        _arrow(axes, (at, far), (at, border), colour, gid=f"entry-{number}-{i}")
        if not down:
            words = "hit" if hit else "computed"
            look = {"fontsize": style.SMALL, "color": colour, "ha": "left"}
            weight = "bold" if hit else "normal"
            shapes.text(axes, at + 0.07, (far + border) / 2, words, fontweight=weight, **look)


def _paint_map(
    axes: Axes, x: float, y: float, pitch: float, state: PoolState, chains: Sequence[_Chain]
) -> None:
    """In each column the entries of the digests above and below: one if they are equal."""
    middle = y + MAP / 2
    label = {"ha": "left", "color": style.MUTED, "fontsize": style.SMALL}
    shapes.text(axes, x - NAME_ROOM, middle - 0.08, "map: digest", **label)
    shapes.text(axes, x - NAME_ROOM, middle + 0.08, "→ block", **label)
    blocks = {block.block_id: block for block in state.blocks}
    for i in range(max(len(chain.digests) for chain in chains)):
        here = [chain.block_ids[i] for chain in chains if i < len(chain.digests)]
        entries = [blocks[block_id] for block_id in dict.fromkeys(here)]
        height = MAP / len(entries)
        for place, block in enumerate(entries):
            upper = y + place * height
            gid = f"map-{block.digits()}-{block.block_id}"
            shapes.box(axes, x + i * pitch, upper, pitch - 0.1, height, style.CARD, gid=gid)
            words = f"{block.digits()} → {block.block_id}"
            at = (x + (i + 0.5) * pitch - 0.05, upper + height / 2)
            shapes.text(axes, *at, words, fontsize=style.SMALL, **shapes.MONO)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = style.MUTED,
    **kwargs: Any,
) -> None:
    look: dict[str, Any] = {"arrowstyle": "-|>,head_length=4,head_width=2", "linewidth": 1.2}
    ends: dict[str, Any] = {"shrinkA": 1, "shrinkB": 1}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, **look, **ends, **kwargs))
