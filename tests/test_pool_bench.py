"""`pagedattn bench pool` times queues that do the same. Its times are no test."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagedattn.bench.pool import VLLM
from pagedattn.bench.queues import DequeQueue, LinkedQueue, Node, OrderedDictQueue
from pagedattn.cli import main
from pagedattn.prefix import FreeKVCacheBlockQueue

QUEUES = [LinkedQueue, OrderedDictQueue, DequeQueue, FreeKVCacheBlockQueue]


@pytest.mark.parametrize("kind", QUEUES)
def test_queues_agree_with_a_list(kind: Any) -> None:
    random, nodes = Random(1), [Node(block_id) for block_id in range(20)]
    queue, expected, outside = kind(nodes), list(nodes), []
    for _ in range(300):
        if random.random() < 0.3:
            n = random.randint(0, len(expected))
            taken = queue.popleft_n(n)
            assert taken == expected[:n]
            del expected[:n]
            outside += taken
        elif random.random() < 0.5 and expected:
            block = random.choice(expected)
            queue.remove(block)
            expected.remove(block)
            outside.append(block)
        else:
            random.shuffle(outside)
            back, outside = outside[:5], outside[5:]
            queue.append_n(back)
            expected += back
    assert queue.popleft_n(len(expected)) == expected


def test_the_command_measures_every_row(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pool.json"
    arguments = ["bench", "pool", "--rounds", "2", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0
    result = json.loads(out.read_text())
    assert result["command"] == f"pagedattn bench pool --rounds 2 --json {out}"
    assert list(result["rows"]) == list(VLLM)
    loops = result["loop_microseconds"]
    for name, row in result["rows"].items():
        loop = loops["B" if name == "hash" else "A"]
        assert row["loops"] == pytest.approx(row["microseconds"] / loop, rel=0.01)
        assert row["ratio"] == pytest.approx(row["loops"] / row["vllm_loops"], rel=0.01)
    assert list(result["queues"]) == [kind.__name__ for kind in QUEUES]
    assert "FreeKVCacheBlockQueue" in capsys.readouterr().out


def test_rounds_below_1_are_refused(capsys: Any) -> None:
    assert main(["bench", "pool", "--rounds", "0"]) == 2
    assert "rounds must be at least 1, got 0" in capsys.readouterr().err
