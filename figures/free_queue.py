"""The free queue of a pool that remembers: tails go first, hits leave from the middle."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.prefix import BlockPool, build_cache
from pagedattn.viz.scenes import compute, small_config
from pagedattn.viz.script import run_script

VERBS = ("get_new_blocks", "touch", "free_blocks")
# In blocks of 4. C begins with the first two blocks of A.
PROMPTS = {
    "A": range(12),
    "B": range(20, 28),
    "C": [*range(8), *range(30, 35)],
    "D": range(40, 48),
}


def listen(pool: BlockPool) -> list[str]:
    """Calls of the pool's verbs from now on, as they would be written."""
    calls: list[str] = []

    def noting(verb: str) -> Callable[[Any], Any]:
        method = getattr(pool, verb)

        def call(argument: Any) -> Any:
            argument = argument if isinstance(argument, int) else list(argument)
            if argument:
                words = argument if isinstance(argument, int) else [b.block_id for b in argument]
                calls.append(f"{verb}({words})")
            return method(argument)

        return call

    for verb in VERBS:
        setattr(pool, verb, noting(verb))
    return calls


def record() -> viz.Recording:
    cache = build_cache(small_config(num_blocks=8), seed="a figure")
    recording, calls = viz.Recording(cache), listen(cache.pool)

    def snapshot(event: str) -> None:
        recording.snapshot("\n".join([event, *calls]))
        calls.clear()

    def add(seq_id: str) -> int:
        return len(PROMPTS[seq_id]) - cache.add(seq_id, PROMPTS[seq_id])

    for seq_id in "AB":
        compute(cache, {seq_id: add(seq_id)})
    snapshot("A and B compute")
    cache.free("A")
    cache.free("B")
    snapshot("A ends, then B")
    waiting = add("C")
    snapshot("C begins like A")
    compute(cache, {"C": waiting})
    snapshot("C computes the rest")
    cache.free("C")
    snapshot("C ends")
    compute(cache, {"D": add("D")})
    snapshot("D is new, and evicts")
    return recording


def draw() -> Figure:
    return viz.draw_free_queue(record().frames, "Free for longest, forgotten first")


if __name__ == "__main__":
    run_script(__file__, draw)
