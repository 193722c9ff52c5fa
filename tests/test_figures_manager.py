"""Pictures of a window over blocks: what is drawn is what the cache holds."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedattn import viz
from pagedattn.attention import AttentionSpec
from pagedattn.manager import HybridKVCache, build_cache
from pagedattn.viz.scenes import grow, small_config, start
from tests.pictures import rectangle, rectangles, words

FIGURES = Path(__file__).resolve().parents[1] / "figures"
FULL, WINDOW = AttentionSpec(), AttentionSpec(window=5)


def small_cache(*specs: AttentionSpec, num_blocks: int = 12) -> HybridKVCache:
    """Blocks of 2; a layer for each spec."""
    config = replace(
        small_config(num_blocks=num_blocks, block_size=2),
        num_layers=len(specs),
        layer_specs=specs,
    )
    return build_cache(config, enable_prefix_caching=False)


@pytest.fixture
def recording() -> viz.WindowRecording:
    """Window 5: behind 3 tokens nothing has left it, behind 8 the first two blocks have."""
    cache = small_cache(FULL, WINDOW)
    start(cache, "A", 3)
    recording = viz.WindowRecording(cache, "A")
    recording.snapshot("three")
    grow(cache, {"A": 5})
    recording.snapshot("eight")
    return recording


def test_blocks_by_number_and_null_where_they_have_left(recording: viz.WindowRecording) -> None:
    full, window = recording.cache.block_ids("A")
    assert window[:2] == [0, 0] and 0 not in window[2:] and len(window) == 4
    drawn = rectangles(recording.draw())
    shown = {gid for gid in drawn if gid.startswith("step-1-") and not gid.endswith("-used")}
    assert shown == {
        "step-1-window",
        "step-1-0-null",
        "step-1-1-null",
        f"step-1-2-block-{window[2]}",
        f"step-1-3-block-{window[3]}",
    }
    below = {gid for gid in drawn if gid.startswith("full-") and not gid.endswith("-used")}
    assert below == {f"full-{i}-block-{block_id}" for i, block_id in enumerate(full)}


def test_the_window_covers_what_the_next_token_sees(recording: viz.WindowRecording) -> None:
    """Slots are equally wide; blocks of 2 begin at even positions."""
    figure = recording.draw()
    first = rectangle(figure, "step-1-0-null").get_x()
    slot = (rectangle(figure, "step-1-1-null").get_x() - first) / 2
    for step, (begin, end) in enumerate([(0, 4), (4, 9)]):  # itself at 3 and at 8, 5 tokens in all
        window = rectangle(figure, f"step-{step}-window")
        assert window.get_x() == pytest.approx(first + begin * slot)
        assert window.get_width() == pytest.approx((end - begin) * slot)


def test_filled_slots_and_free_blocks(recording: viz.WindowRecording) -> None:
    figure = recording.draw()
    drawn = rectangles(figure)
    used = {gid: box.get_width() for gid, box in drawn.items() if gid.endswith("-used")}
    three = [width for gid, width in used.items() if gid.startswith("step-0")]
    assert three[1] == pytest.approx(three[0] / 2)  # 3 tokens: a whole block, and half of one
    shown = words(figure)
    # 11 usable blocks; 2 in each group behind 3 tokens; 4 and 2 behind 8
    assert [moment.num_free_blocks for moment in recording.moments] == [7, 5]
    assert "7" in shown and "5" in shown


def test_blocks_that_leave_and_come_again_are_named(recording: viz.WindowRecording) -> None:
    window = recording.moments[0].tables[1]
    shown = words(recording.draw())
    assert f"{window[0]} given back" in shown and f"{window[1]} given back" in shown
    assert not any("again" in word for word in shown)
    grow(recording.cache, {"A": 4})
    recording.snapshot("twelve")
    grow(recording.cache, {"A": 2})
    recording.snapshot("fourteen")
    taken = [m.tables[1][-1] for m in recording.moments[2:]]
    again = [f"{block_id} again" for block_id in taken if block_id in window]
    assert again and set(again) <= set(words(recording.draw()))


def test_what_cannot_be_drawn_is_said(recording: viz.WindowRecording) -> None:
    for specs in ((FULL,), (WINDOW,), (FULL, WINDOW, AttentionSpec(window=3))):
        with pytest.raises(ValueError, match="one full group and one window"):
            viz.WindowRecording(small_cache(*specs), "A")
    cache = small_cache(FULL, WINDOW, num_blocks=30)
    empty = viz.WindowRecording(cache, "A")
    with pytest.raises(ValueError, match="0 moments"):
        empty.draw()
    start(cache, "A", 17)
    empty.snapshot("long")
    with pytest.raises(ValueError, match="tables of 9 blocks; at most 8"):
        empty.draw()


def test_the_committed_figure_tells_this_story() -> None:
    script: dict[str, Any] = runpy.run_path(str(FIGURES / "window_over_blocks.py"))
    moments = script["record"]().moments
    assert [moment.num_tokens for moment in moments] == [6, 10, 11, 15, 19, 23, 25]
    held = [sum(block_id != 0 for block_id in moment.tables[1]) for moment in moments]
    assert held == [2, 3, 2, 2, 2, 2, 3]  # a window of 8 over blocks of 4: at most 3
    assert [len(moment.tables[0]) for moment in moments] == [2, 3, 3, 4, 5, 6, 7]
