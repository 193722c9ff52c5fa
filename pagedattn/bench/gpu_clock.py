"""Time on a GPU: the median of many replays of a captured graph, by the device's own events.

In a graph the launches follow each other as the device takes them, so that the CPU is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class GraphClock:
    """``clock(calls)``: the microseconds of a call. Each call has inputs of its own, together more
    than a cache holds. A graph is filled with rounds of them until it takes ``graph_us``: what its
    launch takes then counts for little."""

    repeats: int = 20
    graph_us: float = 2000.0

    def __call__(self, calls: Sequence[Call]) -> float:
        _warm_up(calls)
        graph = _capture(calls, 1)
        _replay(graph)
        rounds = math.ceil(self.graph_us / _replay(graph))
        if rounds > 1:
            graph = _capture(calls, rounds)
            _replay(graph)
        times = [_replay(graph) for _ in range(self.repeats)]
        return median(times) / (len(calls) * rounds)


def _warm_up(calls: Sequence[Call]) -> None:
    """Compiles and allocates; on another stream, as a capture asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
