"""Recorded requests, and what each way of reserving memory makes of them.

A trace is a list of requests that a real service received: how long each prompt was and how many
tokens were generated. That is enough to ask how many requests fit into a pool of KV slots at the
same time, and how much of what they reserve they ever use. No model has to run.

Read `recorded` (what a trace is), then `fcfs` (one run, step by step), then `policies` (what a
request reserves).
"""

from pagedattn.traces.fcfs import Metrics, replay
from pagedattn.traces.files import load_trace, shipped_traces
from pagedattn.traces.policies import Paged, Policy, ReserveMax, Running
from pagedattn.traces.recorded import VIEWS, Request, select

__all__ = [
    "VIEWS",
    "Metrics",
    "Paged",
    "Policy",
    "Request",
    "ReserveMax",
    "Running",
    "load_trace",
    "replay",
    "select",
    "shipped_traces",
]
