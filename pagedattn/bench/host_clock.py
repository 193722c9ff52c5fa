"""Time on the CPU: how long a call keeps it busy until all that it launches stands in the queue.

Where no graph launches a step, the GPU waits for this if its own work is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from time import perf_counter

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class HostClock:
    """``clock(calls)``: the microseconds of a call, which must be shorter on the GPU. The queue is
    emptied before each round, and ``calls`` are too few to fill it: then a launch would wait."""

    repeats: int = 20
    calls: int = 200

    def __call__(self, calls: Sequence[Call]) -> float:
        for call in calls:  # compiles and allocates
            call()
        return median(self._round(calls) for _ in range(self.repeats)) / self.calls

    def _round(self, calls: Sequence[Call]) -> float:
        """Microseconds of ``self.calls`` calls, those given in turn."""
        torch.cuda.synchronize()
        begin = perf_counter()
        for call in islice(cycle(calls), self.calls):
            call()
        return (perf_counter() - begin) * 1e6
