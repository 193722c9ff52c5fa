"""The rows of `pagedattn bench kernels`: their work counted by hand; their tables and roofline."""

from typing import Any

import pytest
from rich.console import Console

from pagedattn.bench import kernel_report, kernels
from pagedattn.bench.kernel_rows import (
    ATTENTION_ROWS,
    CLIMB,
    FLEX,
    HOST,
    MIXED,
    QUICK,
    SMALL_ROWS,
    AttentionRow,
    Ceilings,
    SmallRow,
)
from pagedattn.viz import draw_roofline
from tests.pictures import words

H200 = Ceilings(4.67e6, 4.56e6, 4.30e6, 760e6, 1.2)
ALL_ROWS: list[AttentionRow | SmallRow] = [*ATTENTION_ROWS, *SMALL_ROWS]
ROWS = {row.name: row for row in ALL_ROWS}


@pytest.mark.parametrize(
    "name,read,written,flops",
    [
        # K and V of 64 x 8192 tokens, 4096 bytes each; 64 queries of 8192; 512 ids a row
        ("decode 64x8192", 2**31 + 2**19 + 64 * 512 * 4, 2**19, 2**33),
        ("decode 64x8192 block 128", 2**31 + 2**19 + 64 * 64 * 4, 2**19, 2**33),
        ("decode 64x8192 fp8 cache", 2**30 + 2**19 + 64 * 512 * 4, 2**19, 2**33),
        ("decode 64x8192 head_dim 64", 2**30 + 2**18 + 64 * 512 * 4, 2**18, 2**32),
        ("decode MHA 64x2048", 64 * 2048 * 16384 + 2**19 + 64 * 128 * 4, 2**19, 2**31),
        # 8192 shared tokens and 64 x 256; every query still meets 8448
        ("decode 64x8448 shared 8192", 24576 * 4096 + 2**19 + 64 * 528 * 4, 2**19, 2**20 * 8448),
        # query i meets i + 1 keys, each 4 x 32 x 128 operations
        ("prefill 1x8192", 8192 * 4096 + 2**26 + 512 * 4, 2**26, 33_558_528 * 16384),
        # 512 x 16384 + 512 x 513 / 2
        ("prefill chunk", 16896 * 4096 + 2**22 + 1056 * 4, 2**22, 8_519_936 * 16384),
        # 8 chunks of 512 over 2048, 120 decodes over 4096
        (
            "mixed step",
            (8 * 2560 + 120 * 4096) * 4096 + 4216 * 8192 + (8 * 160 + 120 * 256) * 4,
            4216 * 8192,
            (8 * (512 * 2048 + 131_328) + 120 * 4096) * 16384,
        ),
        ("write 8192 tokens", 2 * 2**24 + 2**16, 2 * 2**24, 0),
        ("copy 1024 blocks", 2**26 + 2**14, 2**26, 0),
        ("merge 8192 tokens", 2 * (2**26 + 2**20), 2**26 + 2**20, 0),
    ],
)
def test_the_least_work_by_hand(name: str, read: int, written: int, flops: int) -> None:
    assert ROWS[name].work == (read, written, flops)


@pytest.mark.parametrize(
    "name,us,limit",
    [
        ("decode 64x8192", 460.1, "memory"),  # (2^31 + 2^17) / 4.67 + 2^20 / 4.30, in 10^6
        ("prefill 1x8192", 723.5, "matmul"),
        ("copy 1024 blocks", 31.2, "memory"),
        ("plan mixed", 1.2, "launch"),
    ],
)
def test_the_floor_of_a_row(name: str, us: float, limit: str) -> None:
    found = ROWS[name].work.floor(H200)
    assert found[0] == pytest.approx(us, abs=0.06) and found[1] == limit


def test_the_rows() -> None:
    assert len(ROWS) == len(ATTENTION_ROWS) + len(SMALL_ROWS), "a name is used twice"
    assert len(MIXED.seq_lens) == 128
    assert 64 <= min(MIXED.seq_lens) < 100 and 12_000 < max(MIXED.seq_lens) < 16384
    below = sum(length < 1024 for length in MIXED.seq_lens)  # the middle of 64 and 16384, by log
    assert 48 <= below <= 80
    assert {*CLIMB, *FLEX, *HOST, *QUICK} <= set(ROWS)


def test_rows_are_chosen_by_a_word() -> None:
    rows, climbs = kernels.chosen_rows("fp8", quick=False)
    assert [row.name for row in rows] == ["decode 64x8192 fp8 cache"] and not climbs
    rows, climbs = kernels.chosen_rows("climb", quick=False)
    assert not rows and sorted(row.name for row in climbs) == sorted(CLIMB)
    rows, climbs = kernels.chosen_rows("", quick=True)
    assert sorted(row.name for row in rows) == sorted(QUICK) and not climbs


def synthetic() -> dict[str, Any]:
    """Two rows that have a time, one that has none, a climb, and two calls on the CPU."""
    row = {"read": 4000, "written": 0, "flops": 16000, "floor_us": 10.0, "limit": "memory"}
    good = {"us": 20.0, "error": 0.001, "share": 0.5, "best_peer": "A", "ratio": 0.8}
    absent = {"absent": "cannot import B"}
    return {
        "ceilings": H200._asdict(),
        "rows": [
            {"name": "decode 64x8192"} | row | good | {"peers": {"A": {"us": 25.0}, "B": absent}},
            {"name": "prefill 1x8192"}
            | row
            | good
            | {"flops": 10**10, "limit": "matmul", "peers": {"A": {"us": 25.0}, "B": absent}},
            {"name": "decode 1x512"}
            | row
            | {"failed": "ValueError: wrong", "peers": {"A": {"failed": "RuntimeError: no"}}},
        ],
        "climb": {"decode 1x512": {"naive": {"us": 70.0}, "packed": {"failed": "ValueError: no"}}},
        "host": {
            "decode 1x512": {"us": 40.0, "peers": {"A": {"us": 15.5}, "B": absent}},
            "plan mixed": {"us": 33.0, "peers": {}},
        },
    }


def test_the_tables(capsys: Any) -> None:
    kernel_report.report(synthetic(), Console(width=80))
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert [
        "decode",
        "64x8192",
        "20.0",
        "10.0",
        "memory",
        "50.0%",
        "0.00",
        "TB/s",
        "A",
        "25.0",
        "0.800",
    ] in lines
    assert [
        "prefill",
        "1x8192",
        "20.0",
        "10.0",
        "matmul",
        "50.0%",
        "500",
        "TFLOP/s",
        "A",
        "25.0",
        "0.800",
    ] in lines
    assert ["decode", "1x512", "failed", "10.0", "memory"] in lines
    assert ["ours", "40.0", "33.0"] in lines and ["A", "15.5"] in lines
    assert ["naive", "70.0"] in lines and ["packed", "failed"] in lines
    assert "reading: 4.67 TB/s" in shown and "matrix product, bf16: 760.00 TFLOP/s" in shown
    assert "B: cannot import B (decode 64x8192, prefill 1x8192)" in shown
    assert "A: RuntimeError: no (decode 1x512)" in shown


def test_the_roofline() -> None:
    figure = kernel_report.draw(synthetic())
    (axes,) = [axes for axes in figure.axes if axes.get_xscale() == "log"]
    lines: dict[Any, Any] = {line.get_gid(): line for line in axes.lines}
    assert lines["points-decode"].get_xydata().tolist() == [[4.0, 16000 / 20 * 1e-6]]
    assert lines["points-prefill"].get_xydata().tolist() == [[2.5e6, 500.0]]
    ridge = 760 / 4.67
    assert lines["memory"].get_xydata()[1].tolist() == pytest.approx([ridge, 760])
    low, high = lines["memory"].get_xydata()[0]
    assert high == pytest.approx(4.67 * low)
    assert lines["compute"].get_ydata().tolist() == pytest.approx([760, 760])
    assert {"64x8192", "1x8192", "memory: 4.67 TB/s"} <= set(words(figure))
    assert "1x512" not in words(figure), "a row without a time has no place"


@pytest.mark.parametrize(
    "points,message",
    [
        ({}, "at least one point"),
        ({"a": {"x": (0.0, 1.0)}}, "must be positive"),
        ({str(i): {"x": (1.0, 1.0)} for i in range(7)}, "at most 6 groups, got 7"),
    ],
)
def test_a_roofline_that_cannot_be_drawn(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_roofline(points, 4.0, 700.0, {})
