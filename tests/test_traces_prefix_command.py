"""The command `pagedattn bench prefix`: hit rates by capacity, and their chart."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedattn import viz
from pagedattn.bench import prefix
from pagedattn.cli import main
from pagedattn.traces import Request

TESTS = Path(__file__).parent
PUBLISHED = json.loads((TESTS / "data" / "traces_prefix.json").read_text())["traces"]


def write(path: Path, requests: list[Request]) -> None:
    lines = [
        json.dumps(
            {
                "timestamp": 0,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
        )
        for request in requests
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


# The example that test_traces_prefix.py works out.
FIRST, OTHER = Request(1536, 1, hash_ids=(0, 1, 2)), Request(1100, 436, hash_ids=(0, 3, 4))


def test_a_file_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out, figure = (tmp_path / name for name in ("own.jsonl.gz", "out.json", "hits.svg"))
    write(own, [FIRST, OTHER, FIRST])
    arguments = ["bench", "prefix", str(own), "--block-sizes", "512", "256"]
    arguments += ["--capacities", "4096", "2048", "--json", str(out), "--figure", str(figure)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0

    content = json.loads(out.read_text())
    assert content["command"] == f"pagedattn {' '.join(arguments)}"
    by_size = content["traces"][str(own)]
    assert list(by_size) == ["512", "256"]
    assert list(by_size["512"]["capacities"]) == ["2048", "4096"]
    runs = by_size["512"]["capacities"]["2048"]
    assert runs["prompt"] == {
        "block_size": 512,
        "prompt_tokens": 4172,
        "full_blocks": 8,
        "hit_blocks": 4,
        "evictions": 0,
        "cached_blocks": 4,
        "hit_tok": pytest.approx(4 * 512 / 4172),
        "hit_blk": 0.5,
    }
    assert (runs["whole"]["hit_blocks"], runs["whole"]["evictions"]) == (3, 2)
    assert by_size["512"]["infinite"]["hit_blocks"] == 4
    assert by_size["512"]["infinite_cap"]["hit_blocks"] == 3
    # Blocks of 256: prompts of 6, 4 and 6; OTHER finds 2, the last one all 6, or 5 if capped.
    assert by_size["256"]["infinite"]["full_blocks"] == 16
    assert by_size["256"]["infinite"]["hit_blocks"] == 8
    assert by_size["256"]["infinite_cap"]["hit_blocks"] == 7

    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "2,048 4 4 0.490892 0 3 0.368169 2" in rows
    assert "infinite 4 0.490892 0" in rows
    assert "capped 3 0.368169 0" in rows
    words = " ".join(printed.split())
    assert "own.jsonl.gz, blocks of 512: 4,172 prompt tokens, 8 full blocks, 4 distinct" in words
    assert "infinite hit_blk 0.500000" in words
    assert figure.read_text().startswith("<?xml")


def test_a_recorded_trace_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["mooncake_conversation", "--block-sizes", "512", "--capacities", "33554432"]
    assert main(["bench", "prefix", *arguments]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # A row of data/traces_prefix.json.
    published = "33,554,432 65,536 48,991 0.345925 24,160 48,922 0.345438 30,405"
    assert published in rows


def test_the_recorded_figures_are_the_published_ones() -> None:
    path = TESTS.parent / "figures" / "hit_rate.json"
    recorded = json.loads(path.read_text())["traces"]
    for setting in PUBLISHED:
        measured = recorded[setting["trace"]][str(setting["block_size"])]
        infinite = measured["infinite"]
        rates = [round(infinite[name], 6) for name in ("hit_tok", "hit_blk")]
        assert [infinite["hit_blocks"], *rates] == setting["infinite"]
        assert {
            capacity: {
                variant: [hits["hit_blocks"], round(hits["hit_tok"], 6), hits["evictions"]]
                for variant, hits in runs.items()
            }
            for capacity, runs in measured["capacities"].items()
        } == {
            str(int(num_blocks) * setting["block_size"]): runs
            for num_blocks, runs in setting["runs"].items()
        }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["azure_conv"], "azure_conv: request 1 has no hash_ids"),
        (["{}/a/own.jsonl.gz", "{}/b/own.jsonl.gz"], "two traces are called own.jsonl.gz"),
        (["{}/a/own.jsonl.gz", "--block-sizes", "64", "96"], "block_size is 96"),
        (["{}/a/own.jsonl.gz", "--block-sizes", "0"], "block_size is 0"),
        (["{}/a/own.jsonl.gz", "--capacities", "4096", "1000"], "1000 tokens is no whole number"),
        (["{}/a/own.jsonl.gz", "--capacities", "0"], "num_blocks is 0"),
        (
            ["mooncake_synthetic", "{}/a/own.jsonl.gz", "--capacities", "131072"],
            "mooncake_synthetic: 256 blocks of 512 are too few",
        ),
        (["{}/a/own.jsonl.gz", "--json", "{}/none/out.json"], "none/out.json"),
        (["{}/a/own.jsonl.gz", "--figure", "{}/none/out.svg"], "none/out.svg"),
    ],
)
def test_wrong_input_is_one_line_before_the_first_run(
    arguments: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "own.jsonl.gz", [FIRST])
    monkeypatch.setattr(prefix, "measure", lambda *_: pytest.fail("a run has begun"))
    assert main(["bench", "prefix", *(a.format(tmp_path) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagedattn: error: ")
    assert why in said
    assert said.count("\n") == 1


# The chart.

RATES: dict[str, dict[str, dict[int, float]]] = {
    "chat": {"alone": {1024: 0.1, 4096: 0.3}, "whole": {1024: 0.05, 4096: 0.25}},
    "code": {"alone": {2048: 0.2}, "whole": {2048: 0.15}},
}


def test_lines_go_through_the_rates_and_end_at_the_limit() -> None:
    figure = viz.draw_hit_rates(RATES, {"chat": 0.375, "code": 0.2})
    lines = {
        line.get_gid(): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for axes in figure.axes
        for line in axes.lines
        if line.get_gid()
    }
    assert lines == {
        "chat-infinite": ([0, 1], [0.375, 0.375]),
        "chat-0": ([1024, 4096], [0.1, 0.3]),
        "chat-1": ([1024, 4096], [0.05, 0.25]),
        "code-infinite": ([0, 1], [0.2, 0.2]),
        "code-0": ([2048], [0.2]),
        "code-1": ([2048], [0.15]),
    }
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"alone", "whole", "infinite cache: 37.5%", "infinite cache: 20.0%"} <= set(words)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == ["chat", "code"]
    assert all(axes.get_xscale() == "log" for axes in panels)
    assert panels[0].get_ylim() == panels[1].get_ylim()
    figure.canvas.draw()
    ticks = [label.get_text() for label in panels[0].get_xticklabels()]
    assert ticks == ["1K", "4K"]


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ({}, "at least one rate a curve"),
        ({"chat": {"alone": {}}}, "at least one rate a curve"),
        ({"chat": {str(i): {1: 0.5} for i in range(4)}}, "at most 3 curves, got 4"),
        (
            {"chat": {"alone": {1: 0.5}}, "code": {"whole": {1: 0.5}}},
            r"code has the curves \['whole'\], not \['alone'\]",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(curves: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        viz.draw_hit_rates(curves, dict.fromkeys(curves, 0.5))
