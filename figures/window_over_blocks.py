"""A window of 8 tokens slides over the blocks of a sequence: what leaves it serves others."""

from dataclasses import replace

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.attention import AttentionSpec
from pagedattn.manager import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def record() -> viz.WindowRecording:
    """One layer that sees everything, one that sees 8 tokens; 10 usable blocks of 4."""
    config = replace(
        small_config(num_blocks=11),
        num_layers=2,
        layer_specs=(AttentionSpec(), AttentionSpec(window=8)),
    )
    cache = build_cache(config, enable_prefix_caching=False)
    start(cache, "A", 6)
    recording = viz.WindowRecording(cache, "A")
    recording.snapshot("prompt: 6 tokens")
    for num_tokens in (10, 11, 15, 19, 23, 25):
        grow(cache, {"A": num_tokens - cache.num_computed_tokens("A")})
        recording.snapshot(f"{num_tokens} tokens")
    return recording


def draw() -> Figure:
    return record().draw("A window slides over the blocks of a sequence")


if __name__ == "__main__":
    run_script(__file__, draw)
