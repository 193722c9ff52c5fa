"""Chapter 04: its questions answered by live caches, its hit rates as they were counted."""

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pagedattn.prefix import PagedKVCache, build_cache
from pagedattn.viz.scenes import compute, small_config

CHAPTERS = Path(__file__).parents[1] / "chapters"


def prefixes(num_blocks: int, block_size: int = 4) -> PagedKVCache:
    config = small_config(num_blocks=num_blocks, block_size=block_size, max_seq_len=2048)
    return build_cache(config, seed="a text")


def run(cache: PagedKVCache, seq_id: str, tokens: Sequence[int]) -> None:
    known = cache.add(seq_id, tokens)
    compute(cache, {seq_id: len(tokens) - known})


def test_predictions_about_prefixes() -> None:
    """Chapter 04: what live caches answer to the questions about hits, the queue and twins."""
    questions = tomllib.loads((CHAPTERS / "04" / "predict.toml").read_text())["question"]
    answers = {question["id"]: question["answer"] for question in questions}

    cache = prefixes(300, block_size=16)
    run(cache, "A", range(2048))
    assert 2048 - cache.add("B", range(2048)) == answers["last"]

    cache = prefixes(300, block_size=16)
    run(cache, "A", range(1000))
    assert cache.add("B", [*range(500), 9999, *range(501, 1000)]) == answers["changed"]

    cache = prefixes(12)
    run(cache, "A", range(9))
    run(cache, "B", range(5))
    cache.free("A")  # its second block is free, the first is used by B
    before = cache.pool.num_free_blocks
    run(cache, "C", range(16))
    assert before - cache.pool.num_free_blocks == answers["need"]

    cache = prefixes(9)
    for seq_id, tokens in (("A", range(12)), ("B", range(100, 116)), ("C", range(200, 212))):
        run(cache, seq_id, tokens)
        if seq_id != "C":
            cache.free(seq_id)
    assert cache.need(range(12), 0)[0] == answers["tail"]

    cache = prefixes(12)
    for seq_id in "ABC":
        cache.add(seq_id, range(9))
    compute(cache, dict.fromkeys("ABC", 9))
    assert cache.pool.num_cached_blocks == answers["twins"]

    chance, n = 1.0, 1
    while chance > 0.5:
        chance *= 1 - n / 2**16
        n += 1
    assert n == math.ceil(answers["birthday"])


def test_what_a_prefix_cache_finds() -> None:
    """Chapter 04: what `pagedattn bench prefix` has counted for the figure."""
    text = (CHAPTERS / "04" / "README.md").read_text(encoding="utf-8")
    figures = json.loads((CHAPTERS.parent / "figures" / "hit_rate.json").read_text())
    by_size = figures["traces"]["mooncake_conversation"]
    runs = by_size["512"]["capacities"]
    for row in text.split("| prompt tokens found |\n|---:|---:|---:|\n")[1].splitlines()[:5]:
        capacity, memory, share = (cell.strip() for cell in row.strip("|").split("|"))
        tokens = int(capacity.removesuffix(" tokens").replace(",", ""))
        assert share == f"{100 * runs[str(tokens)]['prompt']['hit_tok']:.1f} %"
        size, unit = memory.split()
        assert int(size) * {"GiB": 2**30, "TiB": 2**40}[unit] == tokens * 32 * 8 * 128 * 2 * 2
    infinite = by_size["512"]["infinite"]
    words = " ".join(text.split())
    assert f"| all that was ever computed | | {100 * infinite['hit_tok']:.1f} % |" in words
    shares = [by_size[s]["capacities"]["4194304"]["prompt"]["hit_tok"] for s in ("512", "16")]
    assert (
        f"{100 * shares[0]:.1f} % in blocks of 512, and {100 * shares[1]:.1f} % in blocks of 16"
        in words
    )
    mean = infinite["prompt_tokens"] / 5606
    assert f"5,606 requests of a chat service, with {mean:,.0f} tokens a prompt" in words
    assert f"1,048,576 tokens holds {2**20 // mean:.0f} prompts" in words
    distinct = by_size["16"]["infinite"]["cached_blocks"]
    assert f"have {distinct:,} different full blocks" in words
    assert round(2**65 / distinct**2 / 1e6) == 4
