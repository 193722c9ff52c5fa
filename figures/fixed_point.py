"""The smallest hit that one pass over the groups gets wrong: two blocks, three kinds."""

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

WINDOWS = (None, 5, 3)
MISSING = (set(), {0}, {1})  # blocks of the prompt, by group


def search() -> viz.HitSearch:
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
    specs = [
        SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes)
        for window in WINDOWS
    ]
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    manager = KVCacheManager(KVCacheConfig(12, (), groups), Limits(max_model_len=64))
    hasher = BlockHasher(4, seed="a figure")
    old = Request("old", range(9), hasher)
    manager.allocate_slots(old, 9)
    tables = manager.get_block_ids("old")
    manager.free(old)
    for table, missing in zip(tables, MISSING, strict=True):
        manager.evict_blocks([table[i] for i in missing])
    return viz.HitSearch(manager, Request("new", range(9), hasher))


def draw() -> Figure:
    return viz.draw_fixed_point(search(), "Asked in turn, until nobody shortens the hit")


if __name__ == "__main__":
    run_script(__file__, draw)
