"""The command `pagedattn trace`."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from pagedattn.bench import waste


def run_command(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[str, dict[str, list[str]]]:
    """The printed text, and the cells of the table by the label of their row."""
    parser = ArgumentParser()
    waste.add_arguments(parser)
    waste.run(parser.parse_args(arguments))
    printed = capsys.readouterr().out
    rows = {}
    for line in printed.splitlines():
        if line.startswith("│"):
            label, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows[label] = cells
    return printed, rows


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    # The figures of test_traces_fcfs.py.
    printed, rows = run_command(
        capsys, "azure_conv", "--slots", "160000", "--view", "le4096", "--block-size", "16"
    )
    assert "azure_conv, le4096: 8,640 of 9,739 requests" in printed
    assert "max_seq_len 4,096; 160,000 slots" in printed
    assert rows["used / reserved slots"] == ["28.15%", "99.35%"]
    assert rows["used / all slots *"] == ["28.10%", "98.97%"]
    assert rows["running requests, mean *"] == ["39.00", "137.30"]
    assert rows["times max *"] == ["1.00", "3.52"]  # 137.3 / 39
    assert rows["running requests, peak"] == ["39", "215"]
    assert rows["steps"] == ["53,908", "15,622"]
    assert rows["preemptions"] == ["0", "1,319"]


def test_a_file_of_two_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # By hand, 3 + 2 tokens each in 9 slots. Slabs of 5, one at a time: used 3 4 5 3 4 5.
    # Blocks of 3: both start with one block. In step 1 each needs another and one is left: the
    # second request goes, and comes back in step 2. used 6 4 8 4 5, reserved 6 6 9 6 6.
    path = tmp_path / "own.csv"
    path.write_text("input_length,output_length\n3,2\n3,2\n")
    printed, rows = run_command(
        capsys, str(path), "--slots", "9", "--view", "full", "--block-size", "3"
    )
    assert "own.csv, full: 2 of 2 requests; max_seq_len 5; 9 slots" in printed
    assert rows["used slots, mean"] == ["4", "5"]  # 24 / 6, 27 / 5
    assert rows["reserved slots, mean"] == ["5", "7"]  # 30 / 6, 33 / 5
    assert rows["used / reserved slots"] == ["80.00%", "81.82%"]  # 24 / 30, 27 / 33
    assert rows["preemptions"] == ["0", "1"]


def test_figures_of_saturated_steps_are_left_out_if_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.csv"
    path.write_text("input_length,output_length\n3,2\n3,2\n")
    _, rows = run_command(capsys, str(path), "--slots", "80", "--view", "full")
    assert rows["used / reserved slots"] == ["80.00%", "25.00%"]  # 24 / 30, 24 / 96
    assert rows["used / all slots *"] == ["-", "-"]
    assert rows["times max *"] == ["-", "-"]
