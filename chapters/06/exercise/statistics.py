# Chapter 06, given: pagedattn/manager/statistics.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 55d474443621ce05f0906b191e88be3e43688fb44cb02b354e151e7310047e15

"""How much of the prompts was found: counts since they were last asked for.

Source: ``vllm/v1/metrics/stats.py``, ``PrefixCacheStats``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Look-ups, the tokens that were looked for, and those that were found.

    A request that lost its blocks and is looked up again counts apart: it mostly finds its own
    blocks, which says nothing about shared prefixes. ``reset`` says whether all digests were
    forgotten meanwhile.

    >>> stats = PrefixCacheStats()
    >>> stats.record(num_tokens=100, num_hits=64)
    >>> stats.requests, stats.queries, stats.hits
    (1, 100, 64)
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool = False) -> None:
        """Count one look-up of ``num_tokens`` tokens, of which ``num_hits`` were found."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
