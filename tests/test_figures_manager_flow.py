"""Pictures of the manager: its objects, a call of allocate_slots, the free order."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import float16

from pagedattn import viz
from pagedattn.attention import AttentionSpec
from pagedattn.manager import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Limits,
    Request,
    SlidingWindowSpec,
    build_cache,
)
from pagedattn.prefix import BlockHasher
from pagedattn.viz.holders import attribute
from pagedattn.viz.scenes import small_config, start
from tests.pictures import named_words, rectangle, rectangles, words

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "figures"
TEXT = (ROOT / "chapters" / "06" / "README.md").read_text(encoding="utf-8")
SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
HASHER = BlockHasher(4, seed="tests")


def config_of(*windows: int | None, num_blocks: int = 17) -> KVCacheConfig:
    """A group a window, None for full attention, in blocks of 4."""
    specs = [
        FullAttentionSpec(**SIZES) if w is None else SlidingWindowSpec(**SIZES, sliding_window=w)
        for w in windows
    ]
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, (), groups)


def manager_of(*windows: int | None, num_blocks: int = 17, **options: Any) -> KVCacheManager:
    config = config_of(*windows, num_blocks=num_blocks)
    return KVCacheManager(config, Limits(max_model_len=64), **options)


def prompt(name: str, num_tokens: int) -> Request:
    return Request(name, range(num_tokens), HASHER)


def figure_script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FIGURES / f"{name}.py"))


def with_prefix(figure: Figure, prefix: str) -> list[str]:
    return [gid for gid in rectangles(figure) if gid.startswith(prefix)]


# Who holds whom.


def test_tables_pool_and_queue_of_a_hybrid_manager() -> None:
    """A has 9 tokens and a tenth to come: with a window of 4 block 4, its first, has left."""
    manager, a = manager_of(None, 4, num_blocks=10), prompt("A", 9)
    manager.allocate_slots(a, 9)
    a.num_computed_tokens = 9
    a.append([9])
    manager.allocate_slots(a, 1)
    figure = viz.draw_holders(manager, config_of(None, 4, num_blocks=10))
    assert with_prefix(figure, "group-") == [
        "group-0-A-0-block-1", "group-0-A-1-block-2", "group-0-A-2-block-3",
        "group-1-A-0-null", "group-1-A-1-block-5", "group-1-A-2-block-6",
    ]  # fmt: skip
    owners = ["", *["-group-0"] * 3, "", *["-group-1"] * 2, "", "", ""]
    assert with_prefix(figure, "pool-") == ["pool-0-null"] + [
        f"pool-{i}{owner}-block-{i}" for i, owner in enumerate(owners) if i
    ]
    assert with_prefix(figure, "queue-") == [
        f"queue-{place}-block-{block_id}" for place, block_id in enumerate([7, 8, 9, 4])
    ]
    shown = words(figure)
    assert {"full, blocks of 4: layer 0", "window 4, blocks of 4: layer 1"} <= set(shown)
    assert "the same object in all 4" in shown and ".single_type_managers: 2" in shown
    assert any(word.startswith("4 keys") for word in shown), "two full blocks in each group"


def test_shared_blocks_show_how_many_tables_name_them() -> None:
    manager = manager_of(None)
    for name, n in (("A", 9), ("B", 1)):
        request = prompt(name, 9)
        hits, num_hits = manager.get_computed_blocks(request)
        manager.allocate_slots(
            request, n, num_new_computed_tokens=num_hits, new_computed_blocks=hits
        )
    assert words(viz.draw_holders(manager, config_of(None))).count("×2") == 2


def test_an_attribute_is_found_by_the_object_it_holds() -> None:
    manager, other = manager_of(None, 4), manager_of(None, 4)
    coordinator = manager.coordinator
    assert attribute(manager, manager.pool) == "pool"
    second = coordinator.single_type_managers[1]
    assert attribute(coordinator, second) == "single_type_managers[1]"
    with pytest.raises(ValueError, match="HybridCoordinator holds no such BlockPool"):
        attribute(coordinator, other.pool)


def test_the_committed_manager_is_hybrid() -> None:
    """A has 10 tokens; with a window of 4 seven of them, one block, are out of reach. B was found
    8, of which a window needs the second block only."""
    script = figure_script("manager_classes")
    manager, config = script["new_manager"]()
    assert [group.layer_names for group in config.kv_cache_groups] == [
        ("f0", "f1"), ("s0", "s2"), ("s1",),
    ]  # fmt: skip
    assert manager.get_block_ids("A") == ([1, 2, 3], [0, 5, 6], [0, 8, 9])
    assert manager.get_block_ids("B") == ([1, 2, 10], [0, 5, 11], [0, 8, 12])
    shown = words(script["draw"]())
    assert shown.count("SlidingWindowManager") == 2
    classes = {"KVCacheManager", "HybridCoordinator", "FullAttentionManager", "BlockPool"}
    assert classes <= set(shown)


def test_what_does_not_fit_beside_one_another() -> None:
    with pytest.raises(ValueError, match="4 groups, 17 blocks, 0 requests and tables of 0 blocks"):
        viz.draw_holders(manager_of(None, 4, 5, 6), config_of(None, 4, 5, 6))


# A call of allocate_slots.


@pytest.fixture
def calls() -> list[tuple[str, viz.Allocation]]:
    """Blocks 1 and 2 are a hit of 8 tokens that nobody uses; then 4 external, 6 new, 2 lookahead
    tokens. One step later 2 more tokens are new."""
    manager, old = manager_of(None, num_blocks=9), prompt("old", 8)
    manager.allocate_slots(old, 8)
    manager.free(old)
    request = prompt("new", 18)
    hits, num_hits = manager.get_computed_blocks(request)
    first = viz.Allocation(
        manager, request, 6, num_new_computed_tokens=num_hits, new_computed_blocks=hits,
        num_external_computed_tokens=4, num_lookahead_tokens=2,
    )  # fmt: skip
    request.num_computed_tokens = 18
    request.append([18, 19])
    return [("first", first), ("second", viz.Allocation(manager, request, 2))]


def test_where_each_block_came_from_and_which_are_registered(
    calls: list[tuple[str, viz.Allocation]],
) -> None:
    """20 slots are 5 blocks: 2 hits, 1 to load, 2 new; 18 tokens fill 4 of them, 20 the fifth."""
    (_, first), (_, second) = calls
    assert [first.from_source(s) for s in ("held", "hit", "external", "new")] == [
        [], [1, 2], [3], [4, 5],
    ]  # fmt: skip
    assert first.registered() == [3, 4] and first.returned == [4, 5]
    assert (first.num_left, first.num_free) == (5, 8), "free hits leave the queue, too"
    assert second.from_source("held") == [1, 2, 3, 4, 5] and second.returned == []
    assert second.registered() == [5]


def test_tokens_stand_above_the_blocks_that_hold_them(
    calls: list[tuple[str, viz.Allocation]],
) -> None:
    figure = viz.draw_allocations(calls)
    assert {gid for gid in with_prefix(figure, "call-") if "block" not in gid} == {
        "call-0-new_comp-8", "call-0-ext_comp-4", "call-0-new-6", "call-0-lookahead-2",
        "call-1-comp-18", "call-1-new-2",
    }  # fmt: skip
    for tokens, block in (("ext_comp-4", "3-external"), ("new-6", "4-new")):
        above = rectangle(figure, f"call-0-{tokens}")
        below = rectangle(figure, f"call-0-block-{block}")
        assert above.get_x() == pytest.approx(below.get_x())
        assert above.get_y() < below.get_y()
    slot = rectangle(figure, "call-0-block-3-external").get_x()
    slot = (rectangle(figure, "call-0-block-4-new").get_x() - slot) / 4
    last = rectangle(figure, "call-0-lookahead-2")
    assert last.get_x() == pytest.approx(rectangle(figure, "call-0-new-6").get_x() + 6 * slot)


def test_the_steps_say_what_the_first_call_did(calls: list[tuple[str, viz.Allocation]]) -> None:
    shown = named_words(viz.draw_allocations(calls))
    assert [shown[f"step-{i}"] for i in range(1, 9)] == [
        "10 tokens", "not asked", "none", "5 needed, 8 free", "1, 2; to load: 3", "4, 5", "3, 4",
        "4, 5",
    ]  # fmt: skip


def test_a_window_that_moves_on_releases_before_it_counts() -> None:
    """Behind 9 tokens a window of 4 begins at 6: block 1 goes, and block 4 comes."""
    manager, request = manager_of(4, num_blocks=6), prompt("A", 9)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    request.append(range(9, 13))
    call = viz.Allocation(manager, request, 4)
    assert call.released == [1] and call.returned == [4]
    assert [place.source for place in call.places] == ["null", "held", "held", "new"]
    shown = named_words(viz.draw_allocations([("goes on", call)]))
    assert shown["step-3"] == "1" and shown["step-4"] == "1 needed, 3 free"


def test_a_refusal_is_seen_and_not_drawn() -> None:
    manager, request = manager_of(None, num_blocks=3), prompt("A", 12)
    call = viz.Allocation(manager, request, 12)
    assert call.returned is None and call.places == [] and call.num_left == 0
    with pytest.raises(ValueError, match="too long: the answer is None"):
        viz.draw_allocations([("too long", call)])
    with pytest.raises(ValueError, match="one group is drawn, not over 2"):
        viz.Allocation(manager_of(None, 4), prompt("A", 4), 4)


def test_the_committed_call_has_all_five_kinds_of_the_text() -> None:
    """8 + 4 + 6 + 2 tokens are 5 blocks: 2 hits, 1 to be loaded, 2 that are returned."""
    script = figure_script("allocate_slots")
    calls = script["record"]()
    kinds = {kind for _, call in calls for kind, n in call.num_tokens.items() if n}
    assert kinds == {"comp", "new_comp", "ext_comp", "new", "lookahead"}
    assert all(f"**{kind}**" in TEXT for kind in kinds)
    assert [place.block_id for place in calls[0][1].places] == [1, 2, 4, 5, 6]
    assert calls[0][1].returned == [5, 6]
    shown = words(script["draw"]())
    assert shown.count("None") == 2 and shown.count("ValueError") == 1
    hits = [place for place in calls[0][1].places if place.source == "hit"]
    assert [(place.was_free, place.ref_cnt) for place in hits] == [(False, 2), (True, 1)]


# The free order.


def test_what_is_shared_is_freed_last() -> None:
    order = figure_script("free_order")["record"]()
    moments = order.moments
    assert moments[1].tables == {"A": (1, 2, 3, 4), "B": (1, 2, 3, 5)}
    assert [moment.free_queue for moment in moments[2:]] == [
        (6, 7, 8, 9, 10, 4),
        (6, 7, 8, 9, 10, 4, 5, 3, 2, 1),
    ]
    figure = order.draw()
    assert with_prefix(figure, "step-1-B-") == [
        f"step-1-B-{i}-block-{block_id}" for i, block_id in enumerate((1, 2, 3, 5))
    ]
    assert [gid for gid in with_prefix(figure, "step-3-queue-") if "-new-" in gid] == [
        f"step-3-queue-{6 + i}-new-block-{block_id}" for i, block_id in enumerate((5, 3, 2, 1))
    ]
    given_back = rectangle(figure, "step-2-queue-5-new-block-4")
    assert given_back.get_facecolor() == rectangle(figure, "step-0-A-0-block-1").get_facecolor()
    assert words(figure).count("×2") == 6, "three blocks in two tables"


def test_free_orders_that_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="one group is drawn, not of 2"):
        viz.FreeOrder(manager_of(None, 4))
    order = viz.FreeOrder(manager_of(None, num_blocks=12))
    with pytest.raises(ValueError, match="0 moments; 1 to 8"):
        order.draw()
    order.snapshot("nothing is used")
    with pytest.raises(ValueError, match="0 requests, tables of 0 blocks and 11 free ones"):
        order.draw()


# The pool of a hybrid cache.


def test_the_legend_counts_the_slots_of_all_groups() -> None:
    """10 tokens: 3 blocks of 4 in the full group; with a window of 6 the first has left, and 6 of
    8 slots hold tokens 4 to 9."""
    config = replace(
        small_config(num_blocks=9),
        num_layers=2,
        layer_specs=(AttentionSpec(), AttentionSpec(window=6)),
    )
    cache = build_cache(config)
    start(cache, "A", 10)
    assert cache.block_ids("A")[1][0] == 0
    assert [word for word in words(viz.draw_pool(cache)) if word.startswith("A: ")] == [
        "A: 16 of 20 slots used"
    ]
