"""The command `pagedattn bench waste`: every policy on several traces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from pagedattn import viz
from pagedattn.bench import survey
from pagedattn.cli import main
from pagedattn.traces import Fragmentation, Metrics

HEADER = "input_length,output_length\n"


def test_two_traces_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two, many = tmp_path / "two.csv", tmp_path / "many.csv"
    two.write_text(HEADER + "3,2\n6,4\n")
    many.write_text(HEADER + "5,11\n" * 6)
    out, figures = tmp_path / "out.json", tmp_path / "new" / "figures"
    arguments = ["bench", "waste", str(two), str(many), "--slots", "32", "--view", "full"]
    arguments += ["--block-sizes", "8", "4", "--json", str(out), "--figures", str(figures)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0

    content = json.loads(out.read_text())
    assert content["command"] == f"pagedattn {' '.join(arguments)}"
    assert (content["num_slots"], content["view"]) == (32, "full")
    assert list(content["traces"]) == [str(two), str(many)]
    first, second = content["traces"].values()
    names = ["max", "buddy", "exact_ff", "exact", "paged8", "paged4", "pagedR8", "pagedR4"]
    assert list(first["policies"]) == list(second["policies"]) == names

    # two.csv: both run at once. used 3 4 5 and 6 7 8 9 10, 52 in 5 steps.
    assert (first["num_requests"], first["num_kept"], first["max_seq_len"]) == (2, 2, 10)
    shares = {name: run["used_of_reserved"] for name, run in first["policies"].items()}
    reserved = {"max": 80, "buddy": 16 * 8, "exact": 15 + 50, "exact_ff": 15 + 50}
    for name, slots in reserved.items():
        assert shares[name] == pytest.approx(52 / slots)
    # Blocks of 8: 8 8 8 and 8 8 8 16 16; of 4: 4 4 8 and 8 8 8 12 12.
    assert shares["paged8"] == shares["pagedR8"] == pytest.approx(52 / 80)
    assert shares["paged4"] == shares["pagedR4"] == pytest.approx(52 / 64)
    for run in first["policies"].values():
        assert run["saturated_mean_running"] is None  # nobody waits
        assert run["times_max"] is None
        assert run["seconds"] >= 0
    # 5 and 10 tokens in blocks of 8: 8 and 16 slots.
    assert first["fragmentation"]["8"]["final"] == pytest.approx(9 / 24)
    assert first["fragmentation"]["8"]["mean_blocks"] == 1.5

    # many.csv: 16 slots each, so two at a time but for pages without a promise.
    assert second["max_seq_len"] == 16
    for name, run in second["policies"].items():
        if name not in ("paged8", "paged4"):
            assert run["saturated_mean_running"] == 2
            assert run["times_max"] == 1
            assert run["num_steps"] == 3 * 12
    for name in ("paged8", "paged4"):  # 5 tokens and more: four of them begin at a time
        assert second["policies"][name]["peak_running"] == 4
        assert 1 < second["policies"][name]["times_max"] < 2

    printed = capsys.readouterr().out
    assert "two.csv, full: 2 of 2 requests; max_seq_len 10; 32 slots" in printed
    assert "many.csv, full: 6 of 6 requests; max_seq_len 16; 32 slots" in printed
    assert sorted(path.name for path in figures.iterdir()) == [
        "waste_block_sizes.svg",
        "waste_policies.svg",
    ]


def test_a_recorded_trace(capsys: pytest.CaptureFixture[str]) -> None:
    # Figures of data/traces.json; 112.31 / 39 = 2.88.
    assert main(["bench", "waste", "azure_code", "--block-sizes", "16"]) == 0
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert ["max", "35.48%", "34.85%", "39.00", "1.00", "39", "3,946", "0"] in cells
    assert ["paged16", "99.49%", "98.80%", "112.31", "2.88", "141", "2,190", "3"] in cells


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["azure_conv", "nowhere.csv"], "nowhere.csv"),
        (["{}/a/own.csv", "{}/b/own.csv"], "two traces are called own.csv"),
        (["{}/a/own.csv", "--slots", "4096", "--block-sizes", "8", "0"], "no policy 'paged0'"),
        (["{}/a/own.csv", "--slots", "64", "--block-sizes", "65"], "block_size is 65"),
        (["{}/a/own.csv", "--slots", "4000"], "max_seq_len is 4096"),
        (["{}/a/own.csv", "--json", "{}/none/out.json"], "none/out.json"),
        (["{}/a/own.csv", "--figures", "{}/a/own.csv"], "own.csv"),
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
        (tmp_path / folder / "own.csv").write_text(HEADER + "3,2\n")
    monkeypatch.setattr(survey, "replay", lambda *_: pytest.fail("a run has begun"))
    view = ["--view", "full"] if "64" in arguments else []
    assert main(["bench", "waste", *(a.format(tmp_path) for a in arguments), *view]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagedattn: error: ")
    assert why in said
    assert said.count("\n") == 1


# The charts.


def metrics(share: float, pool: float, running: float) -> Metrics:
    return Metrics(9, 0, 3, 25.0, 80.0, share, 0.3, pool, running)


NAN = float("nan")
RUNS = {
    "code": {"max": metrics(0.25, 0.2, 4.0), "paged8": metrics(0.75, 0.7, 10.0)},
    "chat": {"max": metrics(0.5, NAN, NAN), "paged8": metrics(0.9, NAN, NAN)},
}


def test_bars_are_as_long_as_the_figures() -> None:
    figure = viz.draw_policies(RUNS)
    lengths = {
        patch.get_gid(): patch.get_width()
        for axes in figure.axes
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_gid()
    }
    assert lengths == {
        "reserved-code-max": 0.25,
        "reserved-code-paged8": 0.75,
        "reserved-chat-max": 0.5,
        "reserved-chat-paged8": 0.9,
        "pool-code-max": 0.2,
        "pool-code-paged8": 0.7,
        "running-code-max": 1.0,
        "running-code-paged8": 2.5,
    }
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"max", "paged8", "25.0%", "90.0%", "2.5"} <= set(words)


def test_lines_go_through_the_figures() -> None:
    blocks: dict[str, dict[int, Any]] = {
        "code": {8: Fragmentation(0.1, 0.02, 0.1, 3, 40), 16: Fragmentation(0.1, 0.05, 0.1, 7, 20)}
    }
    runs = {"code": {8: metrics(0.5, 0.5, 20.0), 16: metrics(0.5, 0.5, 18.0)}}
    figure = viz.draw_block_sizes(runs, blocks)
    lines = [
        (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for axes in figure.axes
        for line in axes.lines
        if line.get_gid() == "code"
    ]
    assert lines == [([8, 16], [0.02, 0.05]), ([8, 16], [1.0, 0.9]), ([8, 16], [40, 20])]


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        viz.draw_policies({})
    with pytest.raises(ValueError, match=r"b has the policies \['paged8'\], not \['max'\]"):
        run = metrics(0.5, 0.5, 1.0)
        viz.draw_policies({"a": {"max": run}, "b": {"paged8": run}})
    with pytest.raises(ValueError, match=r"at least two block sizes, got \[8\]"):
        blocks = {"a": {8: Fragmentation(0.1, 0.1, 0.1, 3, 40)}}
        viz.draw_block_sizes({"a": {8: metrics(0.5, 0.5, 1.0)}}, blocks)
