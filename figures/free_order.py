"""Two requests with one beginning end: what they share is freed last."""

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


def record() -> viz.FreeOrder:
    """Ten usable blocks of 4; the prompts differ in their last token."""
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(**sizes))
    manager = KVCacheManager(KVCacheConfig(11, (), (group,)), Limits(max_model_len=64))
    hasher, order = BlockHasher(4, seed="a figure"), viz.FreeOrder(manager)
    a, b = (Request(name, [*range(12), last], hasher) for name, last in (("A", 12), ("B", 99)))
    for request, caption in ((a, "A begins"), (b, "B begins like A")):
        hits, num_hits = manager.get_computed_blocks(request)
        manager.allocate_slots(
            request, 13 - num_hits, num_new_computed_tokens=num_hits, new_computed_blocks=hits
        )
        order.snapshot(caption, f"allocate_slots({request.request_id}, {13 - num_hits})")
    for request, caption in ((a, "A ends"), (b, "B ends")):
        manager.free(request)
        order.snapshot(caption, f"free({request.request_id})")
    return order


def draw() -> Figure:
    return record().draw("Given back from the end of the table")


if __name__ == "__main__":
    run_script(__file__, draw)
