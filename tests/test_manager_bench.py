"""`pagedattn bench manager` runs its trace on every row. Its times are no test."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedattn.bench import manager
from pagedattn.bench.manager import NUM_NEW_TOKENS, OPERATIONS, ROWS
from pagedattn.cli import main
from pagedattn.manager import KVCacheManager


def test_the_command_measures_every_row(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "manager.json"
    arguments = ["bench", "manager", "--requests", "3", "--rounds", "1", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0
    result = json.loads(out.read_text())
    assert result["command"] == f"pagedattn bench manager --requests 3 --rounds 1 --json {out}"
    assert list(result["rows"]) == list(ROWS)
    loop = result["loop_microseconds"]
    for row in result["rows"].values():
        assert list(row) == [*OPERATIONS, "request"]
        for operation in row.values():
            assert operation["loops"] == pytest.approx(operation["microseconds"] / loop, rel=0.02)
            ratio = operation["loops"] / operation["vllm_loops"]
            assert operation["ratio"] == pytest.approx(ratio, abs=0.002)
        prefill, decode, free = (row[operation]["microseconds"] for operation in OPERATIONS)
        whole = prefill + NUM_NEW_TOKENS * decode + free
        assert row["request"]["microseconds"] == pytest.approx(whole, rel=0.02)
    assert "full and sliding" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(ROWS))
def test_the_trace_is_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, each request holds 640 tokens in 40 blocks of full attention; in a window of 128
    the last token sees tokens 512 to 639, which fill 8 blocks."""
    managers: list[KVCacheManager] = []
    held = []
    new_manager, free = manager._new_manager, manager._free

    def keep_manager(row: manager.Row) -> KVCacheManager:
        managers.append(new_manager(row))
        return managers[-1]

    def count_and_free(which: Any, requests: Any) -> None:
        for request in requests:
            tables = which.get_block_ids(request.request_id)
            held.append([sum(block_id > 0 for block_id in table) for table in tables])
        which.check_invariants()
        free(which, requests)

    monkeypatch.setattr(manager, "_new_manager", keep_manager)
    monkeypatch.setattr(manager, "_free", count_and_free)
    manager.time_trace(ROWS[name], 4)
    assert held == [[40, 8] if ROWS[name].sliding else [40]] * 4
    (found,) = managers
    assert found.pool.usage == 0
    stats = found.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.hits) == {
        (False, 0): (0, 0),
        (True, 0): (4, 0),
        (True, 256): (4, 3 * 256),
    }[ROWS[name].caching, ROWS[name].num_shared_tokens]


@pytest.mark.parametrize("option", ["--rounds", "--requests"])
def test_numbers_below_1_are_refused(option: str, capsys: Any) -> None:
    assert main(["bench", "manager", option, "0"]) == 2
    assert f"{option[2:]} must be at least 1, got 0" in capsys.readouterr().err
