"""The manager by the clock: a trace of equal requests, and multiples of a small loop.

Requests of 512 prompt tokens and 128 answer tokens come in waves of 250, over 16,384 blocks of 16
tokens. All of a wave get slots for their prompts, then 128 times for one token each, and then they
are freed. vLLM's own manager (0.21.0, Python 3.11) was timed on the same trace, beside loop A of
``pagedattn bench pool``, of which ``VLLM`` gives multiples.
"""

from __future__ import annotations

import platform
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagedattn.bench.pool import PASSES, loop_a
from pagedattn.bench.result_file import write_result
from pagedattn.manager import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Limits,
    Request,
    SlidingWindowSpec,
)
from pagedattn.prefix import BlockHasher
from pagedattn.whole_number import at_least_1

BLOCK_SIZE = 16
NUM_BLOCKS = 16_384
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 512, 128
WAVE = 250  # requests at a time
SLIDING_WINDOW = 128
NUM_SHARED_TOKENS = 256
TO_REACH = 0.5  # of vLLM's time

OPERATIONS = ("prefill", "decode", "free")


@dataclass(frozen=True)
class Row:
    """What is run, and vLLM's times as multiples of loop A: one prompt, one token, one free."""

    sliding: bool
    caching: bool
    num_shared_tokens: int
    vllm: tuple[int, int, int]


# The row with shared tokens was timed in microseconds only; its multiples are those of the row
# before it, times the ratios of their microseconds.
ROWS = {
    "full, caching off": Row(False, False, 0, (105, 31, 37)),
    "full, caching on": Row(False, True, 0, (410, 29, 36)),
    "full, caching on, 256 tokens shared": Row(False, True, NUM_SHARED_TOKENS, (424, 33, 37)),
    "full and sliding, caching off": Row(True, False, 0, (193, 70, 69)),
    "full and sliding, caching on": Row(True, True, 0, (880, 56, 61)),
}


def add_arguments(parser: ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result to this file")


def _new_manager(row: Row) -> KVCacheManager:
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1}
    sizes["dtype"] = torch.float32
    specs: list[KVCacheSpec] = [FullAttentionSpec(**sizes)]
    if row.sliding:
        specs.append(SlidingWindowSpec(**sizes, sliding_window=SLIDING_WINDOW))
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, (), groups),
        Limits(max_model_len=8192),
        enable_caching=row.caching,
    )


def _waves(row: Row, num_requests: int) -> Iterator[list[Request]]:
    hasher = BlockHasher(BLOCK_SIZE) if row.caching else None
    random = Random(0)
    shared = [random.randrange(50_000) for _ in range(row.num_shared_tokens)]
    for first in range(0, num_requests, WAVE):
        yield [
            Request(
                f"request {number}",
                shared + [random.randrange(50_000) for _ in range(NUM_PROMPT_TOKENS - len(shared))],
                hasher,
            )
            for number in range(first, min(first + WAVE, num_requests))
        ]


def time_trace(row: Row, num_requests: int) -> dict[str, float]:
    """Seconds of the whole trace in each of ``OPERATIONS``. New requests are not counted, nor the
    digests of tokens."""
    manager, seconds = _new_manager(row), dict.fromkeys(OPERATIONS, 0.0)
    for requests in _waves(row, num_requests):
        manager.new_step_starts()
        seconds["prefill"] += _seconds(lambda: _prefill(manager, requests))  # noqa: B023
        for _ in range(NUM_NEW_TOKENS):
            manager.new_step_starts()
            for request in requests:
                request.append((7,))
            seconds["decode"] += _seconds(lambda: _decode(manager, requests))  # noqa: B023
            for request in requests:
                request.num_computed_tokens += 1
        seconds["free"] += _seconds(lambda: _free(manager, requests))  # noqa: B023
    return seconds


def _prefill(manager: KVCacheManager, requests: list[Request]) -> None:
    for request in requests:
        hits, num_hits = manager.get_computed_blocks(request)
        num_new_tokens = NUM_PROMPT_TOKENS - num_hits
        manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hits,
        )
        request.num_computed_tokens = NUM_PROMPT_TOKENS


def _decode(manager: KVCacheManager, requests: list[Request]) -> None:
    for request in requests:
        manager.allocate_slots(request, 1)


def _free(manager: KVCacheManager, requests: list[Request]) -> None:
    for request in requests:
        manager.free(request)


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()  # not that of others on this machine
    work()
    return time.process_time() - start


def measure(args: Namespace) -> dict[str, Any]:
    """Measure by the options of ``add_arguments``: the best of all rounds counts, for each
    operation and for the loop. Raises ValueError for numbers below 1."""
    num_requests = at_least_1(args.requests, "requests")
    rounds = at_least_1(args.rounds, "rounds")
    loop, loop_seconds = loop_a(), float("inf")
    best = {name: dict.fromkeys(OPERATIONS, float("inf")) for name in ROWS}
    for _ in range(rounds):
        for name, row in ROWS.items():
            for _ in range(20):
                loop_seconds = min(loop_seconds, _seconds(loop) / PASSES)
            for operation, seconds in time_trace(row, num_requests).items():
                best[name][operation] = min(best[name][operation], seconds)
    rows = {
        name: _row_result(row, best[name], loop_seconds, num_requests) for name, row in ROWS.items()
    }
    return {
        "rows": rows,
        "loop_microseconds": round(loop_seconds * 1e6, 4),
        "requests": num_requests,
        "to_reach": TO_REACH,
        "python": platform.python_version(),
    }


def _row_result(
    row: Row, seconds: dict[str, float], loop_seconds: float, num_requests: int
) -> dict[str, Any]:
    times = {"prefill": 1, "decode": NUM_NEW_TOKENS, "free": 1}  # of each request
    result: dict[str, Any] = {}
    theirs = dict(zip(OPERATIONS, row.vllm, strict=True))
    for operation in OPERATIONS:
        each = seconds[operation] / num_requests / times[operation]
        result[operation] = {
            "microseconds": round(each * 1e6, 3),
            "loops": round(each / loop_seconds, 2),
            "vllm_loops": theirs[operation],
            "ratio": round(each / loop_seconds / theirs[operation], 3),
        }
    whole = sum(seconds.values()) / num_requests
    vllm_whole = sum(theirs[operation] * times[operation] for operation in OPERATIONS)
    result["request"] = {
        "microseconds": round(whole * 1e6, 1),
        "loops": round(whole / loop_seconds),
        "vllm_loops": vllm_whole,
        "ratio": round(whole / loop_seconds / vllm_whole, 3),
    }
    return result


def report(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    table = Table(
        title=f"{result['requests']} requests of {NUM_PROMPT_TOKENS} + {NUM_NEW_TOKENS} tokens",
        caption="µs: of one prompt, one token, one free, and all of a request; loops: passes of "
        "loop A in that time; vLLM: the same for vLLM 0.21.0; ratio: ours over vLLM's, which "
        f"should be at most {result['to_reach']}",
    )
    table.add_column("")
    table.add_column("")
    for column in ("µs", "loops", "vLLM", "ratio"):
        table.add_column(column, justify="right")
    for name, operations in result["rows"].items():
        for operation, row in operations.items():
            table.add_row(
                name if operation == OPERATIONS[0] else "",
                operation,
                *(f"{row[key]:,}" for key in ("microseconds", "loops", "vllm_loops", "ratio")),
            )
        table.add_section()
    console.print(table)


def run(args: Namespace) -> None:
    """Measure, print, and write the JSON file if one is asked for. Raises OSError, before it
    measures, for a file that cannot be written."""
    if args.json:
        args.json.touch()
    result = measure(args)
    report(result, Console())
    write_result(args.json, result)
