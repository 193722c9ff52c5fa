"""Pictures of kernels: a walk's numbers are attention's; a plan is drawn as it is."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import viz
from pagedattn.course.witness import DEVICE
from pagedattn.viz.loads import shares_of
from pagedattn.viz.plans import Split, last_to_arrive, schedule
from pagedattn.viz.prefixes import Read, reads_of
from pagedattn.viz.walks import walk
from tests.pictures import named_words, rectangles, words

TABLE, SEQ_LEN = [3, 1, 4], 9  # in blocks of 4


@pytest.fixture
def row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of two heads, K and V; slots of no token hold NaN."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.full((2, 6, 4, 1, 2), math.nan)
    for cache in (k_cache, v_cache):
        for position in range(SEQ_LEN):
            cache[TABLE[position // 4], position % 4] = torch.randn(1, 2)
    return torch.randn(2, 2), k_cache, v_cache


@pytest.mark.parametrize("keys", [1, 4, 5, 8])
def test_a_walk_ends_at_attention(row: Any, keys: int) -> None:
    q, k_cache, v_cache = row
    steps = walk(q, k_cache, v_cache, TABLE, SEQ_LEN, keys)
    k, v = (cache[TABLE].flatten(0, 1)[:SEQ_LEN, 0].double() for cache in (k_cache, v_cache))
    scores = q.double() @ k.T
    torch.testing.assert_close(steps[-1].acc / steps[-1].total[:, None], scores.softmax(1) @ v)
    torch.testing.assert_close(steps[-1].top + steps[-1].total.log(), scores.logsumexp(1))


def test_a_walk_shows_what_it_reads(row: Any) -> None:
    q, k_cache, v_cache = row
    figure = viz.draw_walk(q, k_cache, v_cache, TABLE, SEQ_LEN, 8)
    drawn = rectangles(figure)
    assert {gid for gid in drawn if gid.startswith("block-")} == {
        "block-0-null", *(f"block-{i}" for i in range(1, 6)),
    }  # fmt: skip
    assert drawn["block-4"].get_width() == pytest.approx(drawn["block-3"].get_width() / 4)
    scores = {gid for gid in drawn if gid.startswith("score-1-")}
    assert scores == {f"score-1-{i}" + "-none" * (i >= SEQ_LEN) for i in range(16)}
    k, v = (cache[TABLE].flatten(0, 1)[:SEQ_LEN, 0] for cache in (k_cache, v_cache))
    out = (q[1] @ k.T).softmax(0) @ v
    numbers = named_words(figure)["result-1"].replace("−", "-").split()
    assert [float(x.strip(",")) for x in numbers[2:4]] == pytest.approx(out.tolist(), abs=0.006)


def test_what_a_walk_has_no_room_for(row: Any) -> None:
    q, k_cache, v_cache = row
    with pytest.raises(ValueError, match="9 keys a tile; 1 to 8 can be drawn"):
        viz.draw_walk(q, k_cache, v_cache, TABLE, SEQ_LEN, 9)


def test_splits_start_when_a_place_is_free() -> None:
    splits = [Split(0, 0, 100), Split(1, 0, 30), Split(0, 100, 150), Split(2, 0, 40)]
    runs = schedule(splits, 2)
    assert [(run.place, run.start, run.stop) for run in runs] == [
        (0, 0, 100), (1, 0, 30), (1, 30, 80), (1, 80, 120),
    ]  # fmt: skip
    assert last_to_arrive(runs) == {0: runs[0]}


def test_a_plan_is_drawn_as_it_is() -> None:
    kernels = pytest.importorskip("pagedattn.kernels")
    plan = kernels.new_plan(
        12, 3, 4, 1, 16, dtype=torch.float32, has_prefill=False, device=DEVICE
    )  # fmt: skip
    plan = replace(plan, target_splits=4)
    seq_lens = torch.tensor([70, 600, 10], dtype=torch.int32, device=DEVICE)
    kernels.plan_attention(plan, seq_lens, torch.arange(4, dtype=torch.int32, device=DEVICE))
    drawn = rectangles(viz.draw_plan(plan, 2))
    # 680 keys in 4 parts are 170 a part, 192 in whole tiles: 600 keys in 4 parts of at most 192.
    cuts = {gid for gid in drawn if gid.startswith("row-")}
    assert cuts == {"row-0-0", "row-1-0", "row-1-192", "row-1-384", "row-1-576", "row-2-0"}
    assert {gid for gid in drawn if gid.startswith("merge-")} == {"merge-1-1", "merge-2-1"}
    left, right = drawn["run-2-1-0"].get_x(), drawn["run-2-2-0"].get_x()
    assert left < right, "the longest first"


def test_a_plan_without_rows() -> None:
    kernels = pytest.importorskip("pagedattn.kernels")
    plan = kernels.new_plan(2, 2, 4, 1, 16, dtype=torch.float32, device=DEVICE)
    with pytest.raises(ValueError, match="0 decode rows; 1 to 6 can be drawn"):
        viz.draw_plan(plan, 2)


def test_an_areas_keys() -> None:
    """300 keys on two places and on one: a bar's height times its width is its keys."""
    loads = [[Split(0, 0, 200)], [Split(1, 0, 60), Split(0, 200, 240)]]
    figure = viz.draw_loads({"two": loads, "one": [[*loads[0], *loads[1]]]})
    drawn = rectangles(figure)
    assert set(drawn) == {
        "load-0-0-0-0", "load-0-1-1-0", "load-0-1-0-200",
        "load-1-0-0-0", "load-1-0-1-0", "load-1-0-0-200",
    }  # fmt: skip
    high, low = drawn["load-0-0-0-0"], drawn["load-0-1-1-0"]
    assert high.get_height() / low.get_height() == pytest.approx(200 / 60, rel=0.02)
    assert low.get_y() > drawn["load-0-1-0-200"].get_y(), "the first at the bottom"
    area = [drawn[f"load-{panel}-0-0-0"] for panel in range(2)]
    assert area[1].get_width() / area[0].get_width() == pytest.approx(2, rel=0.05)
    assert area[0].get_height() / area[1].get_height() == pytest.approx(2, rel=0.02)
    assert "two: 2 at a time; the busiest has 200 keys, 1.33 times an even share" in words(figure)


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ({}, "0 panels; 1 to 4"),
        ({"a": []}, "0 places in 'a'; 1 to 132"),
        ({"a": [[], []]}, "0 splits in 'a'; 1 to 400"),
        ({"a": [[Split(0, 0, 1)]] * 133}, "133 places in 'a'; 1 to 132"),
    ],
)
def test_loads_that_have_no_room(panels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        viz.draw_loads(panels)


def test_shares_are_those_of_the_plan() -> None:
    """300, 128 and 1000 keys, 4 programs: worked by hand in the tests of the shares."""
    kernels = pytest.importorskip("pagedattn.kernels")
    plan = kernels.new_plan(9, 3, 4, 1, 16, dtype=torch.float32, has_prefill=False, device=DEVICE)
    seq_lens, starts, share_start = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([300, 128, 1000], [0, 1, 2, 3], [0] * 5)
    )
    kernels.shares.cut_shares(plan, seq_lens, starts, share_start)
    assert shares_of(plan, share_start.tolist()) == [
        [Split(0, 0, 300)],
        [Split(1, 0, 128), Split(2, 0, 256)],
        [Split(2, 256, 640)],
        [Split(2, 640, 1000)],
    ]


@pytest.fixture
def prefixes() -> tuple[Any, torch.Tensor]:
    """Rows 0 and 2 have 8 blocks of 1024 tokens in common, and all three have 4. Nothing is cut, as
    on a machine of one multiprocessor."""
    kernels = pytest.importorskip("pagedattn.kernels")
    plan = kernels.new_plan(
        3, 3, 16, 4, 128, dtype=torch.float32, share_block_size=1024, device=DEVICE
    )
    shared = replace(plan.shared, least_spared=0, num_programs=1)
    plan = replace(plan, target_splits=1, shared=shared)
    table = torch.zeros(3, 9, dtype=torch.int32, device=DEVICE)
    table[:, :8] = torch.arange(1, 9)
    table[1, 4] = table[0, 8] = 11
    table[2, 8] = 12
    seq_lens = torch.tensor([8500, 5000, 8700], dtype=torch.int32, device=DEVICE)
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    kernels.plan_attention(plan, seq_lens, starts, table)
    return plan, table


def test_reads_of_a_plan_that_shares(prefixes: Any) -> None:
    plan, _ = prefixes
    assert set(reads_of(plan)) == {
        Read((0, 1, 2), 0, 0, 4096), Read((0, 2), 0, 4096, 8192),
        Read((0,), 0, 8192, 8500), Read((1,), 1, 4096, 5000), Read((2,), 2, 8192, 8700),
    }  # fmt: skip


def test_a_box_is_as_high_as_the_rows_it_is_read_for(prefixes: Any) -> None:
    plan, table = prefixes
    figure = viz.draw_shared_prefixes(plan, table, 1024)
    drawn = rectangles(figure)
    assert {gid for gid in drawn if not gid.startswith("table-")} == {
        *(f"shared-0-{block}" for block in range(1, 9)),
        "own-0-11", "own-1-11", "own-2-12",
    }  # fmt: skip
    assert {gid for gid in drawn if gid.startswith("table-1-")} == {
        f"table-1-{column}" for column in range(5)
    }
    row = drawn["own-0-11"].get_height()
    assert drawn["shared-0-1"].get_height() > 3 * row
    assert 2 * row < drawn["shared-0-5"].get_height() < 3 * row
    top, bottom = (drawn[gid].get_y() for gid in ("own-0-11", "own-2-12"))
    assert drawn["shared-0-5"].get_y() == pytest.approx(min(top, bottom)), "members stand together"
    assert drawn["own-1-11"].get_y() > max(top, bottom)
    said = named_words(figure)
    assert said["parts-0"] == said["parts-2"] == "2 + 1" and said["parts-1"] == "1 + 1"
    assert "keys in the tables: 22,200; keys that are read: 9,912" in words(figure)


def test_a_plan_that_shares_nothing(prefixes: Any) -> None:
    kernels = pytest.importorskip("pagedattn.kernels")
    plan, table = prefixes
    with pytest.raises(ValueError, match="0 rows; 1 to 8 can be drawn"):
        viz.draw_shared_prefixes(
            kernels.new_plan(2, 2, 4, 1, 16, dtype=torch.float32, device=DEVICE), table, 1024
        )
    with pytest.raises(ValueError, match="34 columns; 1 to 14 can be drawn"):
        viz.draw_shared_prefixes(plan, table, 256)
