"""The pool and the hasher by the clock: microseconds, and multiples of two small loops.

Machines differ, loops of the same interpreter less: loop A takes the oldest key out of an
OrderedDict of 10,000 integers and puts it in again, loop B is the SHA-256 of 96 bytes. vLLM's own
pool and hasher (0.21.0, Python 3.11) were timed beside the same loops; ``VLLM`` has their times as
multiples of one pass. What is compared takes turns, and the best of all rounds counts.
"""

from __future__ import annotations

import platform
import time
from argparse import ArgumentParser, Namespace
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedattn.bench.queues import DequeQueue, LinkedQueue, Node, OrderedDictQueue
from pagedattn.bench.result_file import write_result
from pagedattn.prefix import BlockHasher, BlockPool, FreeKVCacheBlockQueue
from pagedattn.prefix.hashing import DIGEST_SIZE
from pagedattn.whole_number import at_least_1

NUM_BLOCKS = 16_384  # usable ones
BATCH = 1000  # blocks a call
NUM_TOKENS = 32_768  # that are hashed
PASSES = 1000  # of a loop, a round

# As multiples of loop A for 1000 blocks, of loop B for 32,768 tokens; and what is to be reached.
VLLM = {
    "take and free, caching off": (910, 0.75),
    "take and free, caching on": (1452, 0.75),
    "take and free, each evicts": (2446, 0.6),
    "hash": (11_800, 0.5),
}


def add_arguments(parser: ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the result to this file")


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _Evicting:
    """A full pool of registered blocks: each round takes 1000, which evicts as many digests."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS + 1)
        self.num_digests = 0
        for _ in range(NUM_BLOCKS // BATCH + 1):
            self.round()

    def round(self) -> float:
        """The seconds of taking and freeing; registering in between is not counted."""
        start = time.perf_counter()
        blocks = self.pool.get_new_blocks(BATCH)
        taken = time.perf_counter() - start
        first, self.num_digests = self.num_digests, self.num_digests + BATCH
        digests = [i.to_bytes(DIGEST_SIZE, "big") for i in range(first, self.num_digests)]
        self.pool.cache_full_blocks(blocks, digests, 0, BATCH)
        return taken + _seconds(lambda: self.pool.free_blocks(reversed(blocks)))


def loop_a() -> Callable[[], None]:
    """``PASSES`` passes of loop A, as a function."""
    keys = OrderedDict.fromkeys(range(10_000))

    def loop() -> None:
        for _ in range(PASSES):
            key, _value = keys.popitem(last=False)
            keys[key] = None

    return loop


def _loop_b() -> None:
    content = b"x" * 96
    for _ in range(PASSES):
        sha256(content).digest()


def _take_and_free(pool: BlockPool) -> Callable[[], object]:
    return lambda: pool.free_blocks(reversed(pool.get_new_blocks(BATCH)))


def _caching_pool() -> BlockPool:
    """A pool in which something is registered, but nothing that will be taken."""
    pool = BlockPool(NUM_BLOCKS + 1)
    pool.cache_full_blocks(pool.get_new_blocks(1), [bytes(DIGEST_SIZE)], 0, 1)
    return pool


def measure_pool(rounds: int) -> dict[str, float]:
    """The best seconds of each row of ``VLLM``, and of one pass of the loops "A" and "B"."""
    hasher = BlockHasher(16)
    tokens = [Random(0).randrange(50_000) for _ in range(NUM_TOKENS)]
    evicting, loop = _Evicting(), loop_a()
    off = _take_and_free(BlockPool(NUM_BLOCKS + 1))
    on = _take_and_free(_caching_pool())
    work: dict[str, Callable[[], float]] = {
        "A": lambda: _seconds(loop) / PASSES,
        "B": lambda: _seconds(_loop_b) / PASSES,
        "take and free, caching off": lambda: _seconds(off),
        "take and free, caching on": lambda: _seconds(on),
        "take and free, each evicts": evicting.round,
        "hash": lambda: _seconds(lambda: hasher.hash_blocks(tokens)),
    }
    return _best(work, rounds)


def measure_queues(rounds: int) -> dict[str, dict[str, float]]:
    """The best microseconds a block of each queue, for the two things that a queue does.

    ``ends``: 1000 blocks leave at the head and come back at the tail. ``middle``: 100 blocks leave
    one by one from places drawn at random, as hits do, and come back at the tail together.
    """
    kinds = (LinkedQueue, OrderedDictQueue, DequeQueue, FreeKVCacheBlockQueue)
    work = {}
    for kind in kinds:
        work[f"{kind.__name__} ends"], work[f"{kind.__name__} middle"] = _queue_work(kind)
    seconds = _best(work, rounds)
    return {
        kind.__name__: {
            what: round(seconds[f"{kind.__name__} {what}"] * 1e6, 4) for what in ("ends", "middle")
        }
        for kind in kinds
    }


def _queue_work(kind: type[Any]) -> tuple[Callable[[], float], Callable[[], float]]:
    nodes = [Node(block_id) for block_id in range(NUM_BLOCKS)]
    queue = kind(nodes)
    drawn = Random(0).sample(nodes, BATCH // 10)

    def ends() -> None:
        queue.append_n(queue.popleft_n(BATCH))

    def middle() -> None:
        for node in drawn:
            queue.remove(node)
        queue.append_n(drawn)

    return lambda: _seconds(ends) / BATCH, lambda: _seconds(middle) / len(drawn)


def _best(work: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, time_it in work.items():
            best[name] = min(best[name], time_it())
    return best


def measure(args: Namespace) -> dict[str, Any]:
    """Measure by the options of ``add_arguments``. Raises ValueError for rounds below 1."""
    rounds = at_least_1(args.rounds, "rounds")
    seconds = measure_pool(rounds)
    rows = {}
    for name, (theirs, target) in VLLM.items():
        loop = seconds["B" if name == "hash" else "A"]
        rows[name] = {
            "microseconds": round(seconds[name] * 1e6, 1),
            "loops": round(seconds[name] / loop),
            "vllm_loops": theirs,
            "ratio": round(seconds[name] / loop / theirs, 3),
            "to_reach": target,
        }
    return {
        "rows": rows,
        "loop_microseconds": {name: round(seconds[name] * 1e6, 4) for name in "AB"},
        "queues": measure_queues(max(1, rounds // 10)),
        "python": platform.python_version(),
    }


def report(result: dict[str, Any], console: Console) -> None:
    """The result as two tables."""
    table = Table(
        title=f"{BATCH} blocks of {NUM_BLOCKS}; {NUM_TOKENS} tokens in blocks of 16",
        caption="loops: passes of loop A, or B for the hash, in that time; vLLM: the same for vLLM "
        "0.21.0; ratio: ours over vLLM's, and what it should be at most",
    )
    table.add_column("")
    for column in ("µs", "loops", "vLLM", "ratio", "at most"):
        table.add_column(column, justify="right")
    for name, row in result["rows"].items():
        table.add_row(name, *(f"{row[key]:,}" for key in row))
    console.print(table)
    table = Table(title="µs a block")
    for column in ("queue", "head to tail", "out of the middle"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name, row in result["queues"].items():
        table.add_row(name, f"{row['ends']:.3f}", f"{row['middle']:.3f}")
    console.print(table)


def run(args: Namespace) -> None:
    """Measure, print, and write the JSON file if one is asked for. Raises OSError, before it
    measures, for a file that cannot be written."""
    if args.json:
        args.json.touch()
    result = measure(args)
    report(result, Console())
    write_result(args.json, result)
