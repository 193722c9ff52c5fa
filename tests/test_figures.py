"""Pictures: what is drawn is what the object holds; figures have the same bytes on every build."""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path as MplPath

from pagedattn import contiguous, paged, viz
from pagedattn.traces import Metrics
from pagedattn.viz import style
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.state import capture
from tests.pictures import patches, rectangle, words

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "figures"
SCRIPTS = sorted(path.stem for path in FIGURES.glob("*.py"))
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pinned_matplotlib() -> str:
    lines = (ROOT / "constraints.txt").read_text().split()
    return next(line.partition("==")[2] for line in lines if line.startswith("matplotlib=="))


@pytest.fixture
def paged_cache() -> paged.PagedKVCache:
    """A holds 10 tokens in 3 blocks of 4, C 6 in 2; B had blocks 4 and 5 and has ended."""
    cache = paged.build_cache(small_config(num_blocks=9))
    for seq_id, num_tokens in {"A": 10, "B": 8, "C": 6}.items():
        start(cache, seq_id, num_tokens)
    cache.free("B")
    return cache


@pytest.fixture
def contiguous_cache() -> contiguous.ContiguousKVCache:
    """64 slots: A has 5 tokens in 0 .. 15, the hole of B is 16 .. 23, C has 12 in 24 .. 55."""
    cache = contiguous.build_cache(small_config(num_blocks=17))
    start(cache, "A", 5, max_tokens=16)
    start(cache, "B", 8, max_tokens=8)
    start(cache, "C", 12, max_tokens=32)
    cache.free("B")
    return cache


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_draws_the_committed_bytes(name, tmp_path, monkeypatch):
    if mpl.__version__ != pinned_matplotlib():
        pytest.skip(
            f"matplotlib {mpl.__version__} draws other bytes than {pinned_matplotlib()}, "
            "which constraints.txt pins"
        )
    script = FIGURES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    drawn = (tmp_path / f"{name}.svg").read_bytes()
    assert drawn == (FIGURES / f"{name}.svg").read_bytes(), "make figures draws it again"


def test_every_figure_has_its_script_and_stands_alone():
    assert SCRIPTS
    assert sorted(path.stem for path in FIGURES.glob("*.svg")) == SCRIPTS
    for name in SCRIPTS:
        svg = (FIGURES / f"{name}.svg").read_text()
        assert len(svg) < 150_000, name
        assert "<image" not in svg and "<script" not in svg and 'href="http' not in svg, name


def test_the_callers_settings_change_no_byte(paged_cache, tmp_path):
    viz.save(viz.draw_pool(paged_cache, "pool"), tmp_path / "plain.svg")
    changed: Any = {
        "font.size": 30,
        "svg.fonttype": "none",
        "svg.hashsalt": "x",
        "hatch.linewidth": 5,
    }
    with mpl.rc_context(changed):
        viz.save(viz.draw_pool(paged_cache, "pool"), tmp_path / "changed.svg")
        assert mpl.rcParams["font.size"] == 30, "the caller's own settings are left alone"
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "changed.svg").read_bytes()


def test_a_pool_shows_each_block_by_its_owner(paged_cache):
    blocks = {gid for gid in patches(viz.draw_pool(paged_cache)) if not gid.endswith("-used")}
    assert blocks == {
        "block-0-null",
        *(f"block-{i}-owner-0" for i in (1, 2, 3)),
        *(f"block-{i}-owner-1" for i in (6, 7)),
        *(f"block-{i}-free" for i in (4, 5, 8)),
    }


def test_blocks_are_filled_as_far_as_tokens_are_computed(paged_cache):
    paged_cache.append("C", [1, 2, 3])
    paged_cache.reserve({"C": 3})  # slots 6, 7 and a new block, not computed yet
    figure = viz.draw_pool(paged_cache)
    shares = {
        gid: rectangle(figure, f"{gid}-used").get_width() / rectangle(figure, gid).get_width()
        for gid in patches(figure)
        if f"{gid}-used" in patches(figure)
    }
    # A: 4 + 4 + 2 of 4 slots, C: 4 + 2; C's new block 8 holds nothing.
    assert shares == pytest.approx(
        {
            "block-1-owner-0": 1,
            "block-2-owner-0": 1,
            "block-3-owner-0": 0.5,
            "block-6-owner-1": 1,
            "block-7-owner-1": 0.5,
        }
    )
    assert "block-8-owner-1" in patches(figure)


def test_a_pool_names_owners_numbers_and_the_queue(paged_cache):
    shown = words(viz.draw_pool(paged_cache))
    assert [shown.count(name) for name in ("A", "C", "null")] == [3, 2, 1]
    assert "8  5  4" in shown  # never used; then B's blocks, the last one first
    assert "A: 10 of 12 slots used" in shown and "C: 6 of 8 slots used" in shown
    assert {"16 slots used", "4 reserved and empty", "12 free"} <= set(shown)


def test_slabs_and_holes_lie_where_the_arena_has_them(contiguous_cache):
    figure = viz.draw_pool(contiguous_cache)
    width = style.WIDTH - 2 * style.MARGIN
    places = {
        gid: ((r.get_x() - style.MARGIN) / width * 64, r.get_width() / width * 64)
        for gid in patches(figure)
        for r in [rectangle(figure, gid)]
    }
    expected = {
        "slab-0-owner-0": (0, 16),
        "slab-0-owner-0-used": (0, 5),
        "slab-16-free": (16, 8),
        "slab-24-owner-1": (24, 32),
        "slab-24-owner-1-used": (24, 12),
        "slab-56-free": (56, 8),
    }
    assert places.keys() == expected.keys()
    for gid, place in expected.items():
        assert places[gid] == pytest.approx(place), gid
    assert {"17 slots used", "31 reserved and empty", "16 free"} <= set(words(figure))


def test_a_large_pool_shows_every_block():
    cache = paged.build_cache(small_config(num_blocks=512, block_size=16, max_seq_len=4096))
    start(cache, 7, 3000)
    drawn = patches(viz.draw_pool(cache))
    assert sum(gid.endswith("owner-0") for gid in drawn) == 188  # 3000 / 16, rounded up
    assert sum(gid.endswith("free") for gid in drawn) == 512 - 1 - 188


def test_arrows_lead_from_tables_to_blocks(paged_cache):
    grow(paged_cache, {"A": 3})  # positions 10, 11 fill block 3; position 12 opens block 8
    figure = viz.draw_block_tables(paged_cache)
    arrows = {g: p for g, p in patches(figure).items() if isinstance(p, FancyArrowPatch)}
    tables = {0: [1, 2, 3, 8], 1: [6, 7]}
    assert arrows.keys() == {
        f"arrow-{owner}-{i}-to-{block_id}"
        for owner, ids in tables.items()
        for i, block_id in enumerate(ids)
    }
    for owner, ids in tables.items():
        for i, block_id in enumerate(ids):
            path = arrows[f"arrow-{owner}-{i}-to-{block_id}"].get_path()
            points = [p for p, code in path.iter_segments() if code != MplPath.CLOSEPOLY]
            end = max((p[-2:] for p in points), key=lambda point: point[1])  # y grows downward
            block = rectangle(figure, f"block-{block_id}-owner-{owner}")
            middle = block.get_x() + block.get_width() / 2
            assert end[0] == pytest.approx(middle, abs=0.02)  # a line's width
            assert end[1] < block.get_y()


@pytest.mark.parametrize(
    ("table", "block_size", "position", "slot"),
    [([5, 2, 7], 4, 9, 29), ([5, 2, 7], 4, 0, 20), ([3], 16, 15, 63), ([90, 41], 16, 16, 656)],
)
def test_the_slot_of_a_position_is_marked(table, block_size, position, slot):
    figure = viz.draw_slot_mapping(table, block_size, position)
    marked = {gid for gid in patches(figure) if gid.endswith("-marked")}
    assert marked == {f"position-{position}-marked", f"slot-{slot}-marked"}
    assert any(text.endswith(f" = {slot}") for text in words(figure))


def test_frames_stay_as_they_were_taken(paged_cache):
    recording = viz.Recording(paged_cache)
    recording.snapshot("A and C")
    before = patches(recording.draw(0)).keys()
    grow(paged_cache, {"A": 5})
    paged_cache.free("C")
    assert patches(recording.draw(0)).keys() == before
    assert recording.frames[0].state != capture(paged_cache)


def test_a_sequence_keeps_its_colour_through_a_recording(paged_cache):
    recording = viz.Recording(paged_cache)
    recording.snapshot("A and C")
    paged_cache.free("A")
    start(paged_cache, "D", 3)
    recording.snapshot("C and D")
    first, second = (patches(recording.draw(i)) for i in range(2))
    assert first["block-6-owner-1"].get_edgecolor() == second["block-6-owner-1"].get_edgecolor()
    assert "block-8-owner-2" in second  # D is the third that the recording has seen
    assert not any("owner-0" in gid for gid in second)


def test_the_slider_shows_frame_after_frame(paged_cache):
    pytest.importorskip("ipywidgets")
    recording = viz.Recording(paged_cache)
    recording.snapshot("first")
    grow(paged_cache, {"A": 5})
    recording.snapshot("second")
    player = recording.play()
    first = bytes(player.image.value)
    assert first == style.png(recording.draw(0)) and first.startswith(PNG_SIGNATURE)
    player.slider.value = 1
    assert bytes(player.image.value) == style.png(recording.draw(1)) != first
    bundle, metadata = player._repr_mimebundle_()
    assert metadata["image/png"]["width"] == 691
    assert bundle["image/png"] == first, "what shows where no kernel runs"
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_a_figure_shows_itself_in_a_notebook(paged_cache):
    figure = viz.draw_pool(paged_cache, "pool")
    assert isinstance(figure, style.Picture)
    data, metadata = figure._repr_mimebundle_()
    assert data["image/png"].startswith(PNG_SIGNATURE)
    assert metadata["image/png"]["width"] == 691  # 7.2 inches of 96 pixels


def test_a_cache_of_another_module_is_drawn_alike(paged_cache):
    spec = spec_from_file_location("students_paged", paged.__file__)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    cache = module.build_cache(small_config(num_blocks=9))
    assert not isinstance(cache, paged.PagedKVCache)
    for seq_id, num_tokens in {"A": 10, "B": 8, "C": 6}.items():
        start(cache, seq_id, num_tokens)
    cache.free("B")
    assert patches(viz.draw_pool(cache)).keys() == patches(viz.draw_pool(paged_cache)).keys()


def test_growth_is_bytes_times_tokens():
    figure = viz.draw_kv_growth({"large": 524_288, "small": 46_080}, 4096)
    ends = {
        line.get_gid(): tuple(np.asarray(line.get_path().vertices)[-1].tolist())
        for axes in figure.axes
        for line in axes.lines
    }
    assert ends["line-0"] == (4096, 2.0)  # 0.5 MiB a token is 2 GiB for 4096
    assert ends["line-1"] == (4096, pytest.approx(0.17578125))
    assert any("512 KiB a token" in text for text in words(figure))
    assert any("45 KiB a token" in text for text in words(figure))


def test_waste_bars_are_as_long_as_measured():
    runs = {
        "max": Metrics(9, 0, 3, 25.0, 80.0, 0.3125, 0.3, 0.3, 2.5),
        "paged4": Metrics(5, 1, 8, 70.0, 72.0, 0.9722, 0.9, 0.9, 7.0),
    }
    figure = viz.draw_waste(runs, num_slots=100)
    _, slots, running = figure.axes
    lengths = [p.get_width() for p in slots.patches if isinstance(p, Rectangle)]
    assert lengths == [80.0, 25.0, 72.0, 70.0]
    assert [p.get_width() for p in running.patches if isinstance(p, Rectangle)] == [2.5, 7.0]
    assert slots.get_xlim() == (0, 100)
    assert "31.2%" in words(figure) and "97.2%" in words(figure)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: viz.draw_pool([1, 2]), "a KV cache is drawn, not a list"),  # type: ignore[arg-type]
        (lambda: viz.Recording(None), "not a NoneType"),  # type: ignore[arg-type]
        (lambda: viz.draw_slot_mapping([], 4, 0), r"block table \[\]"),
        (lambda: viz.draw_slot_mapping([5, 0], 4, 0), r"block table \[5, 0\]"),
        (lambda: viz.draw_slot_mapping([5], 17, 0), "block_size is 17"),
        (lambda: viz.draw_slot_mapping([5, 2], 4, 8), "position 8; .* positions 0 to 7"),
        (lambda: viz.draw_slot_mapping([5, 2], 4, -1), "position -1"),
        (lambda: viz.draw_kv_growth({}, 10), "at least one model"),
        (lambda: viz.draw_kv_growth({"m": 0}, 10), "m: 0 bytes a token"),
        (lambda: viz.draw_kv_growth({"m": 8}, 1), "max_tokens is 1"),
        (lambda: viz.draw_waste({}, 10), "at least one run"),
    ],
)
def test_what_cannot_be_drawn_is_said(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_pools_too_large_to_draw_are_said(contiguous_cache):
    cache = paged.build_cache(small_config(num_blocks=513))
    with pytest.raises(ValueError, match="513 blocks; at most 512"):
        viz.draw_pool(cache)
    with pytest.raises(ValueError, match="513 blocks; arrows can be drawn for at most 32"):
        viz.draw_block_tables(cache)
    with pytest.raises(ValueError, match="needs a paged cache, not a ContiguousKVCache"):
        viz.draw_block_tables(contiguous_cache)


def test_a_recording_says_which_frames_it_has(paged_cache):
    recording = viz.Recording(paged_cache)
    with pytest.raises(ValueError, match="empty"):
        recording.play()
    recording.snapshot("one")
    for i in (-1, 1):
        with pytest.raises(ValueError, match=f"frame {i} of a recording with 1 frames"):
            recording.draw(i)
