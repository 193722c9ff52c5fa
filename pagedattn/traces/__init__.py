"""Recorded requests, and what each way of reserving memory makes of them.

A trace is a list of requests that a real service received: how long each prompt was and how many
tokens were generated. That is enough to ask how many requests fit into a pool of KV slots at the
same time, and how much of what they reserve they ever use. No model has to run.

Read `recorded` (what a request is), then `fcfs` (one run, step by step), then `policies` (what a
request reserves) and `oracles` (what could be reserved if lengths were known). `prefix` asks
another question: how much of each prompt is in the cache already.
"""

from pagedattn.traces.buddy import BuddyArena
from pagedattn.traces.fcfs import Metrics, replay
from pagedattn.traces.files import load_trace, shipped_traces
from pagedattn.traces.fragmentation import Fragmentation, fragmentation
from pagedattn.traces.named import policy_named
from pagedattn.traces.oracles import Buddy, ExactFirstFit, PagedOracle, ReserveExact
from pagedattn.traces.policies import Paged, Policy, ReserveMax, Running
from pagedattn.traces.prefix import Hits, infinite_hits, prefix_hits
from pagedattn.traces.recorded import VIEWS, Request, select

__all__ = [
    "VIEWS",
    "Buddy",
    "BuddyArena",
    "ExactFirstFit",
    "Fragmentation",
    "Hits",
    "Metrics",
    "Paged",
    "PagedOracle",
    "Policy",
    "Request",
    "ReserveExact",
    "ReserveMax",
    "Running",
    "fragmentation",
    "infinite_hits",
    "load_trace",
    "policy_named",
    "prefix_hits",
    "replay",
    "select",
    "shipped_traces",
]
