"""The flow of ``allocate_slots``: a request that begins, with four kinds of tokens, and one step
later with the fifth."""

from typing import Any

from matplotlib.figure import Figure
from torch import float16

from pagedattn import viz
from pagedattn.manager import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Limits,
    Request,
)
from pagedattn.prefix import BlockHasher
from pagedattn.viz.script import run_script


def record() -> list[tuple[str, viz.Allocation]]:
    """Blocks 1 and 2 hold the beginning: a request that runs uses 1, nobody uses 2."""
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(**sizes))
    manager = KVCacheManager(KVCacheConfig(12, (), (group,)), Limits(max_model_len=64))
    hasher = BlockHasher(4, seed="a figure")
    ended = Request("ended", range(8), hasher)
    manager.allocate_slots(ended, 8)
    runs = Request("runs", [*range(4), 50], hasher)
    hits, _ = manager.get_computed_blocks(runs)
    manager.allocate_slots(runs, 1, num_new_computed_tokens=4, new_computed_blocks=hits)
    manager.free(ended)

    request = Request("new", [*range(8), *range(100, 110)], hasher)
    hits, num_hits = manager.get_computed_blocks(request)
    begins = viz.Allocation(
        manager,
        request,
        6,
        num_new_computed_tokens=num_hits,
        new_computed_blocks=hits,
        num_external_computed_tokens=4,
        num_lookahead_tokens=2,
    )
    request.num_computed_tokens = 18
    request.append([110, 111])
    goes_on = viz.Allocation(manager, request, 2, num_lookahead_tokens=2)
    return [("a request begins", begins), ("its next step", goes_on)]


def draw() -> Figure:
    return viz.draw_allocations(record(), "allocate_slots")


if __name__ == "__main__":
    run_script(__file__, draw)
