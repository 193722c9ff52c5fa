"""Pictures of a hit being searched: who is asked, what is looked up, and what all agree on."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import float16

from pagedattn import viz
from pagedattn.manager import (
    FullAttentionSpec,
    HybridCoordinator,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Limits,
    Request,
    SlidingWindowSpec,
)
from pagedattn.prefix import BlockHasher
from tests.pictures import named_words, rectangle, rectangles, words

FIGURES = Path(__file__).resolve().parents[1] / "figures"
SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
HASHER = BlockHasher(4, seed="tests")


def manager_of(*windows: int | None, **options: Any) -> KVCacheManager:
    """A group a window, None for full attention, in blocks of 4."""
    specs = [
        FullAttentionSpec(**SIZES) if w is None else SlidingWindowSpec(**SIZES, sliding_window=w)
        for w in windows
    ]
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(40, (), groups), Limits(max_model_len=64), **options)


def prompt(name: str, num_tokens: int) -> Request:
    return Request(name, range(num_tokens), HASHER)


def search_of(windows: list[int | None], missing: list[set[int]], num_tokens: int) -> viz.HitSearch:
    """The search for a prompt that is in the cache, but for some blocks of each group."""
    manager = manager_of(*windows)
    old = prompt("old", num_tokens)
    manager.allocate_slots(old, num_tokens)
    tables = manager.get_block_ids("old")
    manager.free(old)
    for table, indices in zip(tables, missing, strict=True):
        manager.evict_blocks([table[i] for i in indices])
    return viz.HitSearch(manager, prompt("new", num_tokens))


def figure_script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FIGURES / f"{name}.py"))


def with_prefix(figure: Figure, prefix: str) -> list[str]:
    return [gid for gid in rectangles(figure) if gid.startswith(prefix)]


def test_full_looks_from_the_left_and_a_window_from_the_right() -> None:
    """28 tokens may be found. Full lacks block 6; window 9 needs two blocks and lacks 1 and 4."""
    search = figure_script("hit_right_to_left")["search"]()
    full, window = search.questions
    assert full.lookups == (*((i, True) for i in range(6)), (6, False))
    assert (full.max_length, full.length) == (28, 24)
    assert window.lookups == ((5, True), (4, False), (3, True), (2, True))
    assert (window.max_length, window.length) == (24, 16)
    assert search.length == 16
    assert search.in_cache[1] == (True, False, True, True, False, True, True)

    figure = viz.draw_hit_search(search)
    shown = named_words(figure)
    steps = [gid for gid in shown if gid.startswith("kind-1-lookup-")]
    assert steps == [
        "kind-1-lookup-1-block-5-found", "kind-1-lookup-2-block-4-missing",
        "kind-1-lookup-3-block-3-found", "kind-1-lookup-4-block-2-found",
    ]  # fmt: skip
    assert shown["hit"] == "the hit: 16 tokens" and shown["kind-0-answer"] == "24 tokens"
    tables = [gid for gid in with_prefix(figure, "hit-1-") if gid != "hit-1-window"]
    assert [gid.split("-")[3] for gid in tables] == ["null", "null", "block", "block"]
    # token 16 sees 8 to 16: the blocks 2 and 3
    frame, first = rectangle(figure, "hit-1-window"), rectangle(figure, tables[2])
    assert frame.get_x() == pytest.approx(first.get_x(), abs=0.03)
    assert "full is cut from 24 to 16" in words(figure)


def test_the_search_leaves_the_manager_as_it_was() -> None:
    manager, old = manager_of(None, 5), prompt("old", 9)
    manager.allocate_slots(old, 9)
    pool, coordinator = manager.pool, manager.coordinator
    assert isinstance(coordinator, HybridCoordinator)
    kinds, cached_blocks = coordinator.kinds, pool.cached_blocks
    viz.HitSearch(manager, prompt("new", 9))
    assert pool.cached_blocks is cached_blocks and type(cached_blocks) is dict
    assert coordinator.kinds is kinds
    manager.check_invariants()


def test_three_passes_of_the_smallest_example() -> None:
    """Full has both blocks, window 5 the second, window 3 the first: 8, 4, 0."""
    search = search_of([None, 5, 3], [set(), {0}, {1}], 9)
    assert [[(q.kind, q.max_length, q.length) for q in asked] for asked in search.passes()] == [
        [(0, 8, 8), (1, 8, 8), (2, 8, 4)],
        [(1, 4, 0), (2, 0, 0)],
        [(1, 0, 0), (2, 0, 0)],
    ]
    figure = viz.draw_fixed_point(search)
    shown = named_words(figure)
    assert [shown[f"pass-{i}-length"] for i in (1, 2, 3)] == [
        "8 → 4: once more", "4 → 0: once more", "0: all agree",
    ]  # fmt: skip
    assert shown["pass-2-kind-1-answer"] == "at most 4: finds 0"
    assert "pass-2-kind-0-answer" not in shown, "full attention is asked once"
    looked_up = {gid for gid in with_prefix(figure, "pass-") if gid.endswith("-missing")}
    assert looked_up == {"pass-1-kind-2-block-1-missing", "pass-2-kind-1-block-0-missing"}
    script = figure_script("fixed_point")["search"]()
    assert script.questions == search.questions and script.in_cache == search.in_cache


def test_searches_that_cannot_be_drawn() -> None:
    for manager in (manager_of(None), manager_of(None, 4, 4), manager_of(None, 4, use_eagle=True)):
        with pytest.raises(ValueError, match="groups of different kinds"):
            viz.HitSearch(manager, prompt("A", 9))
    search = search_of([None, 5, 3], [set(), {0}, {1}], 9)
    with pytest.raises(ValueError, match="a search of 3 passes"):
        viz.draw_hit_search(search)
    with pytest.raises(ValueError, match="2 kinds and 11 blocks; at most 3 and 10"):
        viz.draw_hit_search(search_of([None, 5], [set(), set()], 45))
    with pytest.raises(ValueError, match="1 passes, 2 kinds, 6 blocks; at most 4, 4 and 5"):
        viz.draw_fixed_point(search_of([None, 5], [set(), set()], 25))
