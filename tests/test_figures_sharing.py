"""Pictures of shared blocks: what is drawn is what the cache and its counts hold."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from pagedattn import paged, sharing, viz
from pagedattn.sharing import Heir
from pagedattn.viz import style
from pagedattn.viz.scenes import compute, grow, small_config, start
from pagedattn.viz.state import capture_pool
from tests.pictures import patches, rectangle, words


@pytest.fixture
def cache() -> sharing.PagedKVCache:
    """Blocks of 4. A and B share the full block 1 and the half-full block 2, C has block 3."""
    cache = sharing.build_cache(small_config(num_blocks=6))
    start(cache, "A", 6)
    cache.fork("A", "B")
    start(cache, "C", 4)
    return cache


def test_the_state_names_all_owners_and_the_blocks_own_count(cache: sharing.PagedKVCache) -> None:
    state = capture_pool(cache)
    assert [[owner.name for owner in block.owners] for block in state.blocks] == [
        [],
        ["A", "B"],
        ["A", "B"],
        ["C"],
        [],
        [],
    ]
    assert [block.num_used for block in state.blocks] == [0, 4, 2, 4, 0, 0]
    assert [block.ref_cnt for block in state.blocks] == [0, 2, 2, 1, 0, 0]
    assert [block.is_shared for block in state.blocks] == [False, True, True, False, False, False]


def test_a_count_that_contradicts_the_tables_shows(cache: sharing.PagedKVCache) -> None:
    cache.pool.blocks[3].ref_cnt = 2
    assert "3 ×2" in words(viz.draw_pool(cache))


def test_a_shared_block_has_a_band_for_each_owner_as_far_as_it_is_filled(
    cache: sharing.PagedKVCache,
) -> None:
    figure = viz.draw_pool(cache)
    whole = rectangle(figure, "block-2-owner-0-1")
    bands = [rectangle(figure, f"block-2-owner-0-1-band-{i}") for i in range(2)]
    for owner, band in enumerate(bands):
        assert to_hex(band.get_facecolor()) == style.owner_colour(owner).lower()
        assert band.get_width() == pytest.approx(whole.get_width() / 2)  # 2 of 4 slots
        assert band.get_height() == pytest.approx(whole.get_height() / 2)
    assert bands[1].get_y() == pytest.approx(bands[0].get_y() + bands[0].get_height())
    shown = words(figure)
    assert {"1 ×2", "2 ×2", "3", "4", "5"} <= set(shown)
    assert shown.count("A B") == 2 and shown.count("C") == 1
    assert "10 slots used" in shown and "2 reserved and empty" in shown


def test_many_owners_are_counted_instead_of_named() -> None:
    cache = sharing.build_cache(small_config(num_blocks=6))
    start(cache, "A", 4)
    for i in range(8):
        cache.fork("A", f"sample {i}")
    shown = words(viz.draw_pool(cache))
    assert "×9" in shown and "1 ×9" in shown


def test_arrows_of_all_owners_arrive_at_a_shared_block(cache: sharing.PagedKVCache) -> None:
    figure = viz.draw_block_tables(cache)
    drawn = patches(figure)
    arrows = {gid for gid, patch in drawn.items() if isinstance(patch, FancyArrowPatch)}
    tables = {0: (1, 2), 1: (1, 2), 2: (3,)}
    assert arrows == {
        f"arrow-{owner}-{i}-to-{block_id}"
        for owner, ids in tables.items()
        for i, block_id in enumerate(ids)
    }
    # Logical blocks are each sequence's own: one owner, its own tokens.
    assert {f"logical-{i}-block-{i + 1}-owner-{owner}" for owner in (0, 1) for i in (0, 1)} <= set(
        drawn
    )


@pytest.mark.parametrize("num_samples", [2, 6])
def test_tables_that_name_more_than_the_pool_holds_stay_on_the_card(num_samples: int) -> None:
    cache = sharing.build_cache(small_config(num_blocks=5))
    start(cache, 0, 16)
    for sample in range(1, num_samples):
        cache.fork(0, sample)
    figure = viz.draw_block_tables(cache)
    boxes = [
        (r.get_x(), r.get_x() + r.get_width())
        for gid, r in patches(figure).items()
        if gid.startswith("logical") and not gid.endswith("used") and isinstance(r, Rectangle)
    ]
    assert len(boxes) == 4 * num_samples
    assert max(right for _, right in boxes) <= style.WIDTH - style.MARGIN + 0.01
    boxes.sort()
    assert all(right < left for (_, right), (left, _) in pairwise(boxes))


def test_a_block_of_neighbours_stands_once_and_spans_their_rows() -> None:
    cache = sharing.build_cache(small_config(num_blocks=12))
    start(cache, "A", 8)
    cache.fork("A", "B")
    grow(cache, {"A": 3, "B": 5})  # both open blocks of their own
    cache.fork("A", "C")  # and C shares all of A's
    figure = viz.draw_shared_tables(cache)
    # Rows: A, C, then B. Blocks 1 and 2 are everybody's, A and C share block 3.
    outlines = {gid for gid in patches(figure) if gid.startswith("row-") and "-owner-" in gid}
    outlines = {gid for gid in outlines if "band" not in gid and not gid.endswith("used")}
    assert outlines == {
        "row-0-block-1-owner-0-1-2",
        "row-0-block-2-owner-0-1-2",
        "row-0-block-3-owner-0-2",
        "row-2-block-4-owner-1",
        "row-2-block-5-owner-1",
    }
    one = rectangle(figure, "row-2-block-4-owner-1").get_height()
    two = rectangle(figure, "row-0-block-3-owner-0-2").get_height()
    three = rectangle(figure, "row-0-block-1-owner-0-1-2").get_height()
    assert three - two == pytest.approx(two - one) and one < two
    shown = words(figure)
    assert {"1 ×3", "2 ×3", "3 ×2", "4"} <= set(shown)
    assert "5 blocks; without sharing it would be 10, one for each table entry" in shown


def test_the_copy_is_marked_where_a_table_changed(cache: sharing.PagedKVCache) -> None:
    recording = viz.Recording(cache)
    recording.snapshot("forked")
    grow(cache, {"B": 1})
    recording.snapshot("B writes")
    grow(cache, {"A": 1})
    recording.snapshot("A writes")
    drawn = patches(viz.draw_copy_on_write(recording.frames))
    assert {gid for gid in drawn if "copy" in gid} == {"step-1-copy-2-to-4"}
    assert cache.block_ids("B") == [1, 4]
    assert "step-0-block-2-owner-0-1" in drawn
    assert "step-1-block-2-owner-0" in drawn and "step-1-block-4-owner-1" in drawn


def search(choices: list[str]) -> tuple[sharing.PagedKVCache, viz.BeamTree]:
    """Two beams after a prompt of 3 tokens in blocks of 2; the last ones are called X and Y."""
    cache = sharing.build_cache(small_config(num_blocks=20, block_size=2))
    start(cache, "prompt", 3)
    tree = viz.BeamTree("prompt", 3)
    for step, parents in enumerate(choices):
        names = ["X", "Y"] if step == len(choices) - 1 else [f"{step}a", f"{step}b"]
        heirs = [Heir(tree.alive[int(p)], name, 0) for p, name in zip(parents, names, strict=True)]
        cache.replace(tree.alive, heirs)
        compute(cache, dict.fromkeys(names, 1))
        tree.grow(heirs, [f"{name}!" for name in names])
    return cache, tree


def test_the_tree_knows_who_descends_from_whom() -> None:
    _, tree = search(["00", "10", "11", "01"])
    # Step 2: both continue the second of step 1, which continues the first of step 0.
    assert tree.descendants() == [[(0, 1), ()], [(), (0, 1)], [(0,), (1,)], [(0,), (1,)]]


def test_the_beam_tree_shows_tokens_dead_and_alive_over_the_blocks() -> None:
    cache, tree = search(["00", "10", "11", "01"])
    figure = viz.draw_beam_tree(cache, tree)
    faces = {
        gid: to_hex(patch.get_facecolor())
        for gid, patch in patches(figure).items()
        if gid.startswith("token")
    }
    dead, both = style.FREE.lower(), style.CARD.lower()
    x, y = (style.owner_colour(i).lower() for i in range(2))
    assert faces == {
        "token-0-0": both,
        "token-0-1": dead,
        "token-1-0": dead,
        "token-1-1": both,
        "token-2-0": x,
        "token-2-1": y,
        "token-3-0": x,
        "token-3-1": y,
    }
    edges = {
        line.get_gid(): np.asarray(line.get_ydata()).tolist()
        for axes in figure.axes
        for line in axes.lines
        if line.get_gid()
    }
    assert edges["edge-1-0"][0] == edges["edge-0-1"][1]  # the first of step 1 continues the second
    assert edges["edge-1-1"][0] == edges["edge-0-0"][1]
    # 7 tokens in blocks of 2: the prompt's full block, then the tokens of steps 0 | 1 2 | 3; the
    # prompt's third token lies with step 0, which both share.
    ids = cache.block_ids("X")
    drawn = patches(figure)
    assert f"row-0-block-{ids[0]}-owner-0-1" in drawn
    assert f"row-0-block-{ids[1]}-owner-0-1" in drawn
    for row, name in enumerate("XY"):
        for block_id in cache.block_ids(name)[2:]:
            assert f"row-{row}-block-{block_id}-owner-{row}" in drawn
    assert {"X!", "Y!", "0a!", "2b!", "prompt"} <= set(words(figure))


SHARES = {"samples": {"paper": {2: 0.05, 6: 0.25}, "ours": {2: 0.3, 4: 0.5, 6: 0.6}}}


def test_dots_stand_where_the_shares_are() -> None:
    figure = viz.draw_sharing_saved(SHARES, ["paper"], "saved")
    places: dict[Any, Any] = {
        line.get_gid(): (np.asarray(line.get_xdata()).item(), line.get_markerfacecolor())
        for axes in figure.axes
        for line in axes.lines
        if "samples-" in str(line.get_gid())
    }
    ours = style.owner_colour(0)
    assert places == {
        "samples-paper-2": (0.05, style.CARD),
        "samples-paper-6": (0.25, style.CARD),
        "samples-ours-2": (0.3, ours),
        "samples-ours-4": (0.5, ours),
        "samples-ours-6": (0.6, ours),
    }
    assert {"5.0% to 25.0%", "30.0%", "60.0%"} <= set(words(figure))


def test_what_cannot_be_drawn_is_said(cache: sharing.PagedKVCache) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        viz.draw_sharing_saved({})
    with pytest.raises(ValueError, match="at least one frame"):
        viz.draw_copy_on_write([])
    with pytest.raises(ValueError, match="holds no sequence"):
        viz.draw_shared_tables(paged.build_cache(small_config(num_blocks=4)))
    with pytest.raises(ValueError, match="the tree has no step yet"):
        viz.draw_beam_tree(cache, viz.BeamTree("A", 6))
    tree = viz.BeamTree("A", 6)
    with pytest.raises(ValueError, match="'B' is not alive"):
        tree.grow([Heir("B", "D", 0)], ["d"])
    tree.grow([Heir("A", "D", 0)], ["d"])
    with pytest.raises(ValueError, match=r"beams are \['D'\]; the cache holds \['A', 'B', 'C'\]"):
        viz.draw_beam_tree(cache, tree)
    for i in range(10):
        cache.fork("A", i)
    with pytest.raises(ValueError, match="13 sequences; at most 12"):
        viz.draw_shared_tables(cache)


def test_a_shared_picture_is_the_same_twice(cache: sharing.PagedKVCache, tmp_path: Path) -> None:
    for name in ("one", "two"):
        viz.save(viz.draw_shared_tables(cache, "shared"), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
