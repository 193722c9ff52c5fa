"""The CPU's clock of `pagedattn bench kernels`, on a machine that is made up."""

import pytest
import torch

from pagedattn.bench import host_clock
from pagedattn.bench.host_clock import HostClock


def test_the_median_of_rounds_that_begin_with_an_empty_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    waiting = 0
    rounds = 0
    calls = [0, 0]

    def synchronize() -> None:
        nonlocal waiting, now, rounds
        now += 1e-4 * waiting  # what the GPU has still to do is no time of the CPU
        waiting, rounds = 0, rounds + 1

    def caller(which: int) -> None:
        nonlocal now, waiting
        calls[which] += 1
        waiting += 1
        assert waiting <= 10 + 2, "so many would fill the queue"
        compiling = sum(calls) <= 2
        # 30 us; in the third round another process has the CPU
        now += 1.0 if compiling else 90e-6 if rounds == 3 else 30e-6

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(host_clock, "perf_counter", lambda: now)
    found = HostClock(repeats=5, calls=10)([lambda: caller(0), lambda: caller(1)])
    assert found == pytest.approx(30.0)
    assert rounds == 5 and calls == [1 + 25, 1 + 25]
