"""Every policy on every shipped trace: the figures of an independent implementation.

`data/traces.json` holds them: what a run gave, with shares rounded to 4 decimals and means to 2.
Runs of few steps are tested always, the others with `pytest --slow tests/test_traces_published.py`.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pagedattn.traces import Request, fragmentation, load_trace, policy_named, replay, select

FIGURES = json.loads((Path(__file__).parent / "data" / "traces.json").read_text())
FEW_STEPS = 4_000


@lru_cache(maxsize=2)
def trace(name: str) -> list[Request]:
    return load_trace(name)


@pytest.mark.parametrize("name", FIGURES["lengths"])
def test_lengths(name: str) -> None:
    expected = FIGURES["lengths"][name]
    requests = trace(name)
    assert len(requests) == expected["requests"]
    assert max(request.total_length for request in requests) == expected["total_max"]
    for part in ("input", "output"):
        lengths = sorted(getattr(request, f"{part}_length") for request in requests)
        below = [lengths[int(share * len(lengths))] for share in (0.5, 0.9, 0.99)]
        mean = round(sum(lengths) / len(lengths), 2)
        assert [mean, *below, lengths[-1]] == expected[part]


def runs() -> list[Any]:
    return [
        pytest.param(
            setting,
            policy,
            id=f"{setting['trace']}-{setting['view']}-{setting['num_slots']}-{policy}",
            marks=[pytest.mark.slow] if row[4] > FEW_STEPS else [],
        )
        for setting in FIGURES["runs"]
        for policy, row in setting["policies"].items()
    ]


@pytest.mark.parametrize(("setting", "name"), runs())
def test_run(setting: dict[str, Any], name: str) -> None:
    num_slots = setting["num_slots"]
    requests, max_seq_len = select(trace(setting["trace"]), setting["view"], num_slots)
    assert (len(requests), max_seq_len) == (setting["kept"], setting["max_seq_len"])
    policy = policy_named(name, num_slots, max_seq_len)
    assert policy.name == name
    metrics = replay(requests, policy)
    assert [
        round(metrics.used_of_reserved, 4),
        round(metrics.saturated_used_of_pool, 4),
        metrics.peak_running,
        round(metrics.saturated_mean_running, 2),
        metrics.num_steps,
        metrics.num_preemptions,
    ] == setting["policies"][name]


@pytest.mark.parametrize("name", FIGURES["fragmentation"])
def test_fragmentation(name: str) -> None:
    for block_size, (final, life, prompt, mean_waste) in FIGURES["fragmentation"][name].items():
        measured = fragmentation(trace(name), int(block_size))
        shares = [measured.final, measured.life, measured.prompt]
        # The file's percentages were rounded to 6 decimals of the share, then to 3 of the percent.
        assert [round(100 * round(share, 6), 3) for share in shares] == pytest.approx(
            [final, life, prompt], rel=0, abs=1e-9
        )
        assert round(measured.mean_waste, 2) == mean_waste
