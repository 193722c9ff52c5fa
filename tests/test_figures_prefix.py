"""Pictures of blocks that can be found again: what is drawn is what pool and cache hold."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from pagedattn import prefix, sharing, viz
from pagedattn.viz import style
from pagedattn.viz.scenes import compute, small_config, start
from pagedattn.viz.state import PoolState, capture_pool
from tests.pictures import named_words, patches, rectangles, words

FIGURES = Path(__file__).resolve().parents[1] / "figures"


def begin(cache: Any, seq_id: str, tokens: Sequence[int]) -> None:
    """A sequence with these tokens, all of them computed or found."""
    compute(cache, {seq_id: len(tokens) - cache.add(seq_id, tokens)})


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FIGURES / f"{name}.py"))


@pytest.fixture
def recording() -> viz.Recording:
    """Blocks of 4. A holds 10 tokens in 1, 2, 3 and ends; B begins with the first 4 of them."""
    cache = prefix.build_cache(small_config(num_blocks=8), seed="test")
    recording = viz.Recording(cache)
    begin(cache, "A", range(10))
    recording.snapshot("A")
    cache.free("A")
    recording.snapshot("A ends")
    begin(cache, "B", [*range(4), 70, 71, 72, 73, 74])
    recording.snapshot("B")
    begin(cache, "C", range(90, 95))
    recording.snapshot("C")
    return recording


def outlines(recording: viz.Recording, i: int) -> set[str]:
    drawn = {gid for gid in patches(recording.draw(i)) if gid.startswith("block-")}
    return {gid for gid in drawn if not gid.endswith("used")}


def test_a_free_block_that_can_be_found_is_neither_blank_nor_in_use(
    recording: viz.Recording,
) -> None:
    assert {"block-1-owner-0", "block-2-owner-0", "block-3-owner-0"} <= outlines(recording, 0)
    # Of A's 10 tokens 8 lie in full blocks; the third block is blank when A has ended.
    assert outlines(recording, 1) == {
        "block-0-null",
        "block-1-findable",
        "block-2-findable",
        *(f"block-{i}-free" for i in (3, 4, 5, 6, 7)),
    }
    # B takes block 1, and two new ones for its other 5 tokens: 4 and 5.
    assert outlines(recording, 2) == {
        "block-0-null",
        "block-1-owner-1",
        "block-2-findable",
        *("block-4-owner-1", "block-5-owner-1"),
        *(f"block-{i}-free" for i in (3, 6, 7)),
    }


def test_digests_stand_below_their_blocks_and_hits_are_ticked(recording: viz.Recording) -> None:
    hasher = prefix.BlockHasher(4, "test")
    first, second = (digest.hex()[:4] for digest in hasher.hash_blocks(list(range(8))))
    found, other = hasher.hash_blocks([*range(4), 70, 71, 72, 73])
    assert found.hex()[:4] == first
    below = [named_words(recording.draw(i)) for i in range(3)]
    assert below[0] == below[1] == {"block-1-digest": first, "block-2-digest": second}
    assert below[2] == {
        "block-1-digest": f"✓{first}",
        "block-2-digest": second,
        "block-4-digest": other.hex()[:4],
    }
    assert "1 free blocks can be found" in words(recording.draw(2))
    assert "✓ hit: it was free" in words(recording.draw(2))
    assert "✓ hit: it was free" not in words(recording.draw(1))


def test_a_hit_stays_one_until_its_block_is_free_again(recording: viz.Recording) -> None:
    def hits() -> list[int]:
        state = recording.frames[-1].state
        assert isinstance(state, PoolState)
        return [block.block_id for block in state.blocks if block.is_hit]

    cache: Any = recording.cache
    assert hits() == [1]  # C has come since, and found nothing
    cache.fork("B", "D")
    recording.snapshot("forked")
    assert hits() == [1]
    cache.free("B")
    cache.free("D")
    recording.snapshot("ended")
    assert hits() == []


def test_what_can_be_found_keeps_the_colour_of_who_held_it_last(
    recording: viz.Recording,
) -> None:
    cache: Any = recording.cache
    cache.free("B")
    recording.snapshot("B ends")
    drawn = patches(recording.draw(4))
    edges = {i: to_hex(drawn[f"block-{i}-findable"].get_edgecolor()) for i in (1, 2, 4)}
    a, b = (style.line_colour(owner) for owner in (0, 1))
    assert edges == {1: b, 2: a, 4: b}
    assert named_words(recording.draw(4)).keys() == {
        f"block-{i}-digest"
        for i in (1, 2, 4, 6)  # and C's full block, 6
    }


def test_a_state_without_a_past_has_digests_and_no_hits() -> None:
    cache = prefix.build_cache(small_config(num_blocks=6), seed="test")
    begin(cache, "A", range(5))
    cache.free("A")
    begin(cache, "B", range(5))
    state = capture_pool(cache)
    assert state.has_digests and not any(block.is_hit for block in state.blocks)
    assert [len(block.digits()) for block in state.blocks] == [0, 4, 0, 0, 0, 0]


def test_the_stages_below_have_no_room_for_digests() -> None:
    below, here = (stage.build_cache(small_config(num_blocks=6)) for stage in (sharing, prefix))
    for cache in (below, here):
        start(cache, "A", 6)
    drawings = [viz.draw_pool(cache) for cache in (below, here)]
    heights = [figure.get_size_inches()[1] for figure in drawings]
    assert heights[0] < heights[1]
    assert not any("found" in text for text in words(drawings[0]))
    assert named_words(drawings[0]) == {}


def test_a_large_pool_shows_which_blocks_can_be_found() -> None:
    cache = prefix.build_cache(small_config(num_blocks=300))
    begin(cache, "A", range(30))
    cache.free("A")
    figure = viz.draw_pool(cache)
    assert sum(gid.endswith("findable") for gid in patches(figure)) == 7 + 1  # and the legend's
    assert named_words(figure) == {}
    assert "7 free blocks can be found" in words(figure)


@pytest.fixture
def cache() -> prefix.PagedKVCache:
    """Blocks of 2. A and B agree in two blocks, then in token 5, not in token 4."""
    cache = prefix.build_cache(small_config(num_blocks=12, block_size=2), seed="test")
    begin(cache, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    begin(cache, "B", [1, 2, 3, 4, 50, 6, 7, 8, 9])
    return cache


def test_the_chain_shows_digests_and_the_entries_they_lead_to(cache: prefix.PagedKVCache) -> None:
    hasher = prefix.BlockHasher(2, "test")
    a, b = (
        [digest.hex()[:4] for digest in hasher.hash_blocks([1, 2, 3, 4, token, 6, 7, 8, 9])]
        for token in (5, 50)
    )
    assert a[:2] == b[:2] and len({*a, *b}) == 6
    figure = viz.draw_hash_chain(cache, "A", "B", {50: "fifty"})
    shown = words(figure)
    assert [shown.count(digest) for digest in a] == [3, 3, 2, 2]  # A, B, the pool; A, the pool
    assert [shown.count(digest) for digest in b[2:]] == [2, 2]
    # A has blocks 1 to 5, B shares two of them and has 6 to 8.
    entries = {gid for gid in patches(figure) if gid.startswith("map-")}
    expected = [(a[0], 1), (a[1], 2), (a[2], 3), (a[3], 4), (b[2], 6), (b[3], 7)]
    assert entries == {f"map-{digest}-{block_id}" for digest, block_id in expected}
    assert {f"{digest} → {block_id}" for digest, block_id in expected} <= set(shown)
    assert shown.count("hit") == 2 and shown.count("computed") == 2
    assert "B found 4 of its 9 tokens, in blocks 1 2; it computed those in 6 7 8" in shown
    assert shown.count("fifty") == 1 and shown.count("7") == 2 + 1  # tokens, and block 7


def test_arrows_lead_from_parent_tokens_and_digest(cache: prefix.PagedKVCache) -> None:
    drawn = patches(viz.draw_hash_chain(cache, "A", "B"))
    for kind in ("parent", "content", "entry"):
        arrows = {gid for gid in drawn if gid.startswith(kind)}
        assert arrows == {f"{kind}-{owner}-{i}" for owner in (0, 1) for i in range(4)}
    red = {g for g, p in drawn.items() if "entry" in g and to_hex(p.get_edgecolor()) == "#b3261e"}
    assert red == {"entry-1-0", "entry-1-1"}
    same, other = drawn["digest-1-1"].get_facecolor(), drawn["digest-1-3"].get_facecolor()
    assert same == drawn["digest-0-1"].get_facecolor() != other


def test_what_has_no_chain_is_said(cache: prefix.PagedKVCache) -> None:
    off = prefix.build_cache(small_config(num_blocks=6), enable_prefix_caching=False)
    for each in (off, sharing.build_cache(small_config(num_blocks=6))):
        start(each, "A", 4)
        with pytest.raises(ValueError, match="a cache with prefix caching"):
            viz.draw_hash_chain(each, "A", "A")
    with pytest.raises(ValueError, match="unknown sequence 'X'"):
        viz.draw_hash_chain(cache, "A", "X")
    cache.add("D", [1, 2, 30, 31, 32])
    with pytest.raises(ValueError, match="D has computed 1 of its 2 full blocks"):
        viz.draw_hash_chain(cache, "A", "D")
    long = prefix.build_cache(small_config(num_blocks=12))
    start(long, "A", 28)
    with pytest.raises(ValueError, match="7 full blocks; at most 6"):
        viz.draw_hash_chain(long, "A", "A")


def test_the_queue_is_drawn_from_head_to_tail(recording: viz.Recording) -> None:
    figure = viz.draw_free_queue(recording.frames)
    # Blocks never used first; then what A left, its last block in front; C took 6 and 7. Block 2
    # can be found, and 1 unless B holds it; 3 was not full.
    queues = [
        ["4-free", "5-free", "6-free", "7-free"],
        ["4-free", "5-free", "6-free", "7-free", "3-free", "2-findable", "1-findable"],
        ["6-free", "7-free", "3-free", "2-findable"],
        ["3-free", "2-findable"],
    ]
    drawn = rectangles(figure)
    for step, queue in enumerate(queues):
        entries = [gid for gid in drawn if gid.startswith(f"step-{step}-queue-")]
        looks = [entry.partition("-")[2] for entry in queue]
        assert entries == [f"step-{step}-queue-{i}-{look}" for i, look in enumerate(looks)]
        places = [drawn[gid].get_x() for gid in entries]
        assert places == sorted(places)
    numbers = "4567 4567321 6732 32".replace(" ", "")
    shown = [text for axes in figure.axes for text in axes.texts if text.get_text().isdigit()]
    left = min(box.get_x() for gid, box in drawn.items() if "queue" in gid)
    assert "".join(t.get_text() for t in shown if t.get_position()[0] > left) == numbers


def test_lost_digests_are_crossed_out(recording: viz.Recording) -> None:
    lost = named_words(recording.draw(1))["block-2-digest"]
    cache: Any = recording.cache
    shown = words(viz.draw_free_queue(recording.frames[2:]))
    assert shown.count(lost) == 2  # below block 2, in both rows
    begin(cache, "D", range(60, 68))  # takes 3 and 2
    recording.snapshot("D")
    assert words(viz.draw_free_queue(recording.frames[2:])).count(lost) == 3
    with pytest.raises(ValueError, match="at least one frame"):
        viz.draw_free_queue([])
    big = viz.Recording(prefix.build_cache(small_config(num_blocks=9)))
    big.snapshot("big")
    with pytest.raises(ValueError, match="9 blocks; at most 8"):
        viz.draw_free_queue(big.frames)


def test_the_committed_queue_tells_this_story() -> None:
    frames = script("free_queue")["record"]().frames
    assert [frame.caption.split("\n")[1:] for frame in frames] == [
        ["get_new_blocks(3)", "get_new_blocks(2)"],
        ["free_blocks([3, 2, 1])", "free_blocks([5, 4])"],
        ["touch([1, 2])"],
        ["get_new_blocks(2)"],
        ["free_blocks([7, 6, 2, 1])"],
        ["get_new_blocks(2)"],
    ]
    assert [list(frame.state.free_queue) for frame in frames] == [
        [6, 7],
        [6, 7, 3, 2, 1, 5, 4],
        [6, 7, 3, 5, 4],
        [3, 5, 4],
        [3, 5, 4, 7, 6, 2, 1],
        [4, 7, 6, 2, 1],
    ]


def test_the_committed_states_are_what_a_pool_does(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = script("block_states")
    blank, used, registered, findable = (
        figure[name] for name in ("BLANK", "IN_USE", "REGISTERED", "FINDABLE")
    )
    assert figure["try_everything"]() == {
        (blank, "get_new_blocks", used),
        (used, "free_blocks", blank),
        (used, "cache_full_blocks", registered),
        (registered, "free_blocks", findable),
        (findable, "touch", registered),
        (findable, "get_new_blocks", used),
        (findable, "reset_prefix_cache", blank),
    }
    monkeypatch.setattr(prefix.BlockPool, "_evict", lambda pool, blocks: None)
    with pytest.raises(AssertionError):
        figure["draw"]()
