"""Recorded requests, and what each way of reserving memory makes of them.

A trace is a list of requests that a real service received: how long each prompt was and how many
tokens were generated. That is enough to ask how many requests fit into a pool of KV slots at the
same time, and how much of what they reserve they ever use. No model has to run.

Read `recorded` (what a request is), then `fcfs` (one run, step by step), then `policies` (what a
request reserves) and `oracles` (what could be reserved if lengths were known).
"""

from pagedattn.traces.buddy import BuddyArena
from pagedattn.traces.fcfs import Metrics, replay
from pagedattn.traces.files import load_trace, shipped_traces
from pagedattn.traces.fragmentation import Fragmentation, fragmentation
from pagedattn.traces.named import policy_named
from pagedattn.traces.oracles import Buddy, ExactFirstFit, PagedOracle, ReserveExact
from pagedattn.traces.policies import Paged, Policy, ReserveMax, Running
from pagedattn.traces.recorded import VIEWS, Request, select

__all__ = [
    "VIEWS",
    "Buddy",
    "BuddyArena",
    "ExactFirstFit",
    "Fragmentation",
    "Metrics",
    "Paged",
    "PagedOracle",
    "Policy",
    "Request",
    "ReserveExact",
    "ReserveMax",
    "Running",
    "fragmentation",
    "load_trace",
    "policy_named",
    "replay",
    "select",
    "shipped_traces",
]
