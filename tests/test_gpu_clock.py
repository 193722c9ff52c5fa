"""The clock of `pagedattn bench kernels`, on a GPU that is made up: what it captures and counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn.bench.gpu_clock import GraphClock


class FakeGPU:
    """As much of ``torch.cuda`` as the clock uses: a launch takes 5 µs, in a graph or not."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: list[int] | None = None
        self.slow_replay = 4

    def launch(self) -> None:
        if self.captured is None:
            self.now += 5
        else:
            self.captured[0] += 1

    def module(self) -> SimpleNamespace:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) / 1e3

        class CUDAGraph:
            def __init__(self) -> None:
                self.launches = [0]

            def replay(self) -> None:
                gpu.slow_replay -= 1
                gpu.now += 5 * self.launches[0] + (1000 if gpu.slow_replay == 0 else 0)

        class graph:
            def __init__(self, captured: CUDAGraph) -> None:
                captured.launches = self.launches = [0]

            def __enter__(self) -> None:
                gpu.captured = self.launches

            def __exit__(self, *_: object) -> None:
                gpu.captured = None

        class Stream:
            def wait_stream(self, other: Any) -> None:
                assert isinstance(other, Stream)

        class stream:
            def __init__(self, _: Stream) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

        return SimpleNamespace(
            Event=Event, CUDAGraph=CUDAGraph, graph=graph, Stream=Stream, stream=stream,
            current_stream=Stream,
        )  # fmt: skip


@pytest.mark.parametrize("graph_us,rounds", [(100.0, 7), (1.0, 1)])
def test_the_clock_takes_the_median_of_replays(
    graph_us: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGPU()
    monkeypatch.setattr(torch, "cuda", gpu.module())
    launched = []

    def call() -> None:
        launched.append(1)
        gpu.launch()

    # Three calls are 15 µs, so 7 rounds of them fill 100; one replay of five is slow.
    assert GraphClock(repeats=5, graph_us=graph_us)([call] * 3) == pytest.approx(5)
    warm_up_and_captures = 3 + 3 + (3 * rounds if rounds > 1 else 0)
    assert len(launched) == warm_up_and_captures
