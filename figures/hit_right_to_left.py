"""A hit that a full group and a window agree on: one searched from the left, one from the right."""

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
    SlidingWindowSpec,
)
from pagedattn.prefix import BlockHasher
from pagedattn.viz.script import run_script

MISSING = ({6}, {1, 4})  # blocks of the prompt: full attention, the window
LENGTH = 29


def search() -> viz.HitSearch:
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
    specs = (FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=9))
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    manager = KVCacheManager(KVCacheConfig(20, (), groups), Limits(max_model_len=64))
    hasher = BlockHasher(4, seed="a figure")
    old = Request("old", range(LENGTH), hasher)
    manager.allocate_slots(old, LENGTH)
    tables = manager.get_block_ids("old")
    manager.free(old)
    for table, missing in zip(tables, MISSING, strict=True):
        manager.evict_blocks([table[i] for i in missing])
    return viz.HitSearch(manager, Request("new", range(LENGTH), hasher))


def draw() -> Figure:
    return viz.draw_hit_search(search(), "A hit in a window is searched from the right")


if __name__ == "__main__":
    run_script(__file__, draw)
