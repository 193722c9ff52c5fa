"""From position 9 of a sequence with blocks 5, 2, 7 to its slot."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.paged import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=8))
    # Others come and go, so that A's blocks are no neighbours: first 5, then 2, then 7.
    for seq_id, tokens in {"W": 4, "X": 4, "Y": 8, "A": 4, "Z": 8}.items():
        start(cache, seq_id, tokens)
    cache.free("X")
    grow(cache, {"A": 1})
    cache.free("Z")
    grow(cache, {"A": 5})
    block_size, last = cache.config.block_size, cache.num_computed_tokens("A") - 1
    title = f"Where is the token at position {last}?"
    return viz.draw_slot_mapping(cache.block_ids("A"), block_size, last, title)


if __name__ == "__main__":
    run_script(__file__, draw)
