"""Who holds whom in the manager of a hybrid model, as a live one says it."""

from typing import Any

from matplotlib.figure import Figure
from torch import float16

from pagedattn import viz
from pagedattn.manager import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    Limits,
    Request,
    SlidingWindowSpec,
    get_kv_cache_configs,
)
from pagedattn.prefix import BlockHasher
from pagedattn.viz.script import run_script


def new_manager() -> tuple[KVCacheManager, KVCacheConfig]:
    """Two full layers and three with a window of 4; A has computed 10 tokens, and B begins with
    the same 8."""
    sizes: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": float16}
    full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=4)
    layers = {"f0": full, "s0": window, "s1": window, "f1": full, "s2": window}
    limits = Limits(max_model_len=16, max_num_batched_tokens=16)
    memory = 17 * 2 * full.page_size_bytes  # 17 blocks, a page in each of two tensors
    (config,) = get_kv_cache_configs([layers], [memory], limits)
    manager = KVCacheManager(config, limits)
    hasher = BlockHasher(4, seed="a figure")
    a, b = Request("A", range(9), hasher), Request("B", [*range(8), 50], hasher)
    manager.allocate_slots(a, 9)
    a.num_computed_tokens = 9
    hits, num_hits = manager.get_computed_blocks(b)
    manager.allocate_slots(b, 1, num_new_computed_tokens=num_hits, new_computed_blocks=hits)
    a.append([9])
    manager.allocate_slots(a, 1)
    return manager, config


def draw() -> Figure:
    return viz.draw_holders(*new_manager(), "Who holds whom")


if __name__ == "__main__":
    run_script(__file__, draw)
