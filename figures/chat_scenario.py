"""Llama-7B on a card of 80 GB, chats of 1331 tokens, at most 4096: slabs against blocks."""

from itertools import repeat

import torch
from matplotlib.figure import Figure

from pagedattn import contiguous, paged, viz
from pagedattn.cache import Config
from pagedattn.contiguous import kv_bytes_per_token, slots_that_fit
from pagedattn.viz.scenes import fill
from pagedattn.viz.script import run_script

CARD, WEIGHTS = 80 * 10**9, 6_738_415_616 * 2  # bytes; 2 for each weight
LENGTH, BLOCK_SIZE = 1331, 16


def draw() -> Figure:
    bytes_per_token = kv_bytes_per_token(32, 32, 128, torch.float16)
    num_slots = slots_that_fit(CARD, WEIGHTS, bytes_per_token)
    # As many slots as on the card; one small head, because only the places matter.
    config = Config(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=num_slots // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_seq_len=4096,
    )
    caches, words = {}, {}
    for name, stage in {"slabs of 4,096": contiguous, "blocks of 16": paged}.items():
        cache = stage.build_cache(config)
        running, usage = fill(cache, repeat(LENGTH)), cache.usage()
        caches[name] = cache
        words[name] = f"{running} chats, {usage.used / usage.reserved:.1%} of their slots used"
    title = f"Chats of {LENGTH:,} tokens: Llama-7B on a card of 80 GB"
    return viz.draw_memory(caches, WEIGHTS / bytes_per_token, title, words)


if __name__ == "__main__":
    run_script(__file__, draw)
