"""Pictures of kernels: a walk's numbers are attention's; a plan is drawn as it is."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import viz
from pagedattn.course.witness import DEVICE
from pagedattn.viz.plans import Split, last_to_arrive, schedule
from pagedattn.viz.walks import walk
from tests.pictures import named_words, rectangles

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
