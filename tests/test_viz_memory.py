"""Pictures of arenas at work, of full memories, and of where a pool's slots are."""

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import pytest
from matplotlib.figure import Figure

from pagedattn import contiguous, paged, viz
from pagedattn.contiguous import SlabArena
from pagedattn.traces import BuddyArena, Metrics
from pagedattn.viz import style
from pagedattn.viz.scenes import fill, small_config, start
from tests.pictures import rectangles, words

LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


def places(figure: Figure, prefix: str, left: float, slots: float) -> dict[str, Any]:
    """First slot and slots of each named rectangle, in an arena that begins at `left`."""
    scale = slots / (LEFT + WIDTH - left)
    return {
        gid.removeprefix(prefix): pytest.approx(
            ((r.get_x() - left) * scale, r.get_width() * scale), abs=1e-6
        )
        for gid, r in rectangles(figure).items()
        if gid.startswith(prefix)
    }


def test_buddies_are_cut_and_merged() -> None:
    run = viz.ArenaRecording(BuddyArena(64))
    run.take("A", 20)  # 32 slots from 0 on
    run.take("B", 9)  # 16 from 32 on
    run.give_back("A")
    run.take("C", 33)  # 64 are needed, 48 are free
    run.give_back("B")
    figure = run.draw("buddies")
    bar = LEFT + 1.75
    assert places(figure, "step-1-slab-", bar, 64) == {
        "0-owner-0": (0, 32),
        "0-owner-0-used": (0, 20),
        "32-owner-1": (32, 16),
        "32-owner-1-used": (32, 9),
        "48-free": (48, 16),
    }
    assert places(figure, "step-2-slab-", bar, 64) == {
        "0-free": (0, 32),
        "32-owner-1": (32, 16),
        "32-owner-1-used": (32, 9),
        "48-free": (48, 16),
    }
    assert places(figure, "step-3-", bar, 64) == {"refused": (0, 64)}
    assert places(figure, "step-4-slab-", bar, 64) == {"0-free": (0, 64)}
    assert {
        "A takes 20",
        "64 = 32 + 32",
        "B takes 9",
        "32 = 16 + 16",
        "A gives 20 back",
        "C asks for 33",
        "64 in one piece",
        "48 are free",
        "B gives 9 back",
        "16 + 16 + 32 = 64",
        "rounded up",
    } <= set(words(figure))


def test_slabs_of_an_arena_are_not_rounded() -> None:
    run = viz.ArenaRecording(SlabArena(3))
    for name in "ABC":
        run.take(name, 1)
    run.give_back("A")
    run.give_back("C")
    run.take("D", 2)
    run.give_back("B")
    figure = run.draw()
    bar = LEFT + 1.75
    assert places(figure, "step-4-slab-", bar, 3) == {
        "0-free": (0, 1),
        "1-owner-1": (1, 1),
        "1-owner-1-used": (1, 1),
        "2-free": (2, 1),
    }
    assert places(figure, "step-6-slab-", bar, 3) == {"0-free": (0, 3)}
    shown = set(words(figure))
    assert {"2 are free, the largest piece has 1", "1 + 1 + 1 = 3", "3 = 1 + 2"} <= shown
    assert "rounded up" not in shown


def test_a_slab_has_one_name() -> None:
    arena = SlabArena(8)
    run = viz.ArenaRecording(arena)
    with pytest.raises(ValueError, match="no step to draw"):
        run.draw()
    run.take("A", 2)
    with pytest.raises(ValueError, match="A has a slab already"):
        run.take("A", 2)
    with pytest.raises(ValueError, match="B has no slab; A has"):
        run.give_back("B")
    assert arena.holes == [(2, 6)] and len(run.steps) == 1


def test_a_full_memory_shows_every_sequence() -> None:
    """20 slots: two slabs of 8; and blocks of 4, where one sequence's blocks lie apart."""
    config = small_config(num_blocks=6, max_seq_len=8)
    slabs, pages = contiguous.build_cache(config), paged.build_cache(config)
    assert fill(slabs, repeat(5)) == 2
    for seq_id, length in {"A": 4, "B": 4, "C": 3}.items():
        start(pages, seq_id, length)
    pages.free("A")
    start(pages, "D", 8)  # blocks 4 and 5
    pages.free("C")
    start(pages, "E", 5)  # blocks 1 and 3
    caches: Mapping[str, Any] = {"slabs": slabs, "pages": pages}
    figure = viz.draw_memory(caches, weights=10, title="memory", words={"pages": "three"})

    bar = LEFT + WIDTH * 10 / 30
    assert places(figure, "row-0-piece-", bar, 20) == {
        "0-owner-0": (0, 8),
        "0-owner-0-used": (0, 5),
        "1-owner-1": (8, 8),
        "1-owner-1-used": (8, 5),
    }
    # The null block is not among the 20 slots, so block 1 stands first.
    assert places(figure, "row-1-piece-", bar, 20) == {
        "0-owner-0": (4, 4),
        "0-owner-0-used": (4, 4),
        "1-owner-1": (12, 8),
        "1-owner-1-used": (12, 8),
        "2-owner-2": (0, 4),
        "2-owner-2-used": (0, 4),
        "3-owner-2": (8, 4),
        "3-owner-2-used": (8, 1),
    }
    weights = rectangles(figure)["row-0-weights"]
    assert (weights.get_x(), weights.get_width()) == pytest.approx((LEFT, WIDTH / 3))
    assert {"slabs", "pages", "three", "2 sequences, 62.5% of the reserved slots used"} <= set(
        words(figure)
    )


def metrics(of_reserved: float, of_pool: float, running: float) -> Metrics:
    return Metrics(9, 0, 3, 25.0, 80.0, 0.9, of_reserved, of_pool, running)


def test_shares_of_a_pool_add_up() -> None:
    runs = {"max": metrics(0.25, 0.2, 4.0), "first fit": metrics(0.75, 0.6, 10.0)}
    figure = viz.draw_pool_shares(runs, "shares", "a note")
    spans = {gid: (r.get_x(), r.get_width()) for gid, r in rectangles(figure).items()}
    # 0.2 / 0.25 of the pool is reserved, and so is 0.6 / 0.75.
    assert spans == {
        "used-max": (0, 0.2),
        "empty-max": pytest.approx((0.2, 0.6)),
        "free-max": pytest.approx((0.8, 0.2)),
        "used-first fit": (0, 0.6),
        "empty-first fit": pytest.approx((0.6, 0.2)),
        "free-first fit": pytest.approx((0.8, 0.2)),
    }
    assert {"20.0%", "60.0%", "4.0 run", "10.0 run", "a note"} <= set(words(figure))


@pytest.mark.parametrize("stage", [contiguous, paged])
def test_fill_stops_where_nothing_fits(stage: Any) -> None:
    cache = stage.build_cache(small_config(num_blocks=6, max_seq_len=8))  # 20 slots
    assert fill(cache, [5]) == 1
    cache = stage.build_cache(small_config(num_blocks=6, max_seq_len=8))
    assert fill(cache, [8, 7, 6, 1]) == 2  # 4 slots are left: no slab, no 2 blocks
    assert [cache.num_computed_tokens(seq_id) for seq_id in cache.seq_ids] == [8, 7]
    cache.check_invariants()


def test_what_cannot_be_drawn_is_said() -> None:
    cache = contiguous.build_cache(small_config(num_blocks=6))
    nan = float("nan")
    for draw, message in (
        (lambda: viz.draw_memory({}), "at least one cache"),
        (lambda: viz.draw_memory({"slabs": cache}, weights=-1), "weights is -1 slots"),
        (lambda: viz.draw_pool_shares({}), "at least one run"),
        (lambda: viz.draw_pool_shares({"max": metrics(nan, nan, nan)}), "max: no request waits"),
    ):
        with pytest.raises(ValueError, match=message):
            draw()
