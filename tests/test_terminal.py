"""The drawings for a terminal show what the cache holds, and nothing else."""

import io
import re
from collections.abc import Hashable, Mapping
from dataclasses import replace

import pytest
import torch
from rich.console import Console, RenderableType

from pagedattn import contiguous, manager, paged, prefix, sharing
from pagedattn.attention import AttentionSpec
from pagedattn.cache import Config, KVCache, Usage
from pagedattn.viz import terminal
from pagedattn.viz.state import capture, capture_pool

CONFIG = Config(
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
    num_blocks=10,
    max_seq_len=64,
    block_size=4,
    dtype=torch.float64,
)


def plain(drawing: RenderableType, width: int = 80) -> str:
    """The drawing as a file would get it."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(drawing)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def compute(cache: KVCache, lengths: Mapping[Hashable, int]) -> None:
    """The next tokens of these sequences, with random K and V."""
    config, batch = cache.config, cache.reserve(lengths)
    shape = (len(batch.token_ids), config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        q, k, v = (torch.randn(shape, dtype=config.dtype) for _ in "qkv")
        batch.attend(layer, q, k, v)
    batch.commit()


def grown(cache: KVCache) -> KVCache:
    """B has left; A (7 tokens, then 9) and C (5) have grown over the whole memory."""
    for name, length in (("A", 7), ("B", 3), ("C", 5)):
        cache.add(name, range(length), max_tokens=10)
    compute(cache, {"A": 7, "B": 3, "C": 5})
    cache.free("B")
    cache.append("A", [7, 8])
    compute(cache, {"A": 2})
    return cache


def blocks(drawing: str) -> dict[int, str]:
    """What stands in each block: ``12[AAA.]`` -> {12: "AAA."}."""
    found = re.findall(r"(\d+)\[(.*?)\]", drawing)
    assert len({number for number, _ in found}) == len(found)
    return {int(number): bar for number, bar in found}


def test_the_pool_shows_who_lies_where() -> None:
    cache = paged.build_cache(CONFIG)
    grown(cache)
    bars = blocks(plain(terminal.draw_pool(cache)))
    assert list(bars) == list(range(10)) and bars[0] == "////"
    shown = {name: [i for i, bar in bars.items() if name in bar] for name in "ABC"}
    assert shown == {"A": sorted(cache.block_ids("A")), "B": [], "C": sorted(cache.block_ids("C"))}
    # 9 = 4 + 4 + 1 tokens and 5 = 4 + 1; the blocks in the order of the tables.
    assert [bars[i] for i in cache.block_ids("A")] == ["AAAA", "AAAA", "A..."]
    assert [bars[i] for i in cache.block_ids("C")] == ["CCCC", "C..."]
    free = [block.block_id for block in cache.pool.free_queue]
    assert [i for i, bar in bars.items() if bar == "    "] == sorted(free)


def test_a_letter_stands_for_several_slots_of_a_large_block() -> None:
    cache = paged.build_cache(Config(1, 1, 2, num_blocks=3, max_seq_len=40, block_size=20))
    cache.add("A", range(27))
    compute(cache, {"A": 27})
    drawing = plain(terminal.draw_pool(cache))
    # 20 slots at 3 a letter are 7 letters; 7 tokens of the second block are 3 of them, rounded up.
    assert blocks(drawing) == {0: "///////", 1: "AAAAAAA", 2: "AAA...."}
    assert "3 slots" in drawing


def test_the_block_tables_are_those_of_the_cache() -> None:
    cache = paged.build_cache(CONFIG)
    grown(cache)
    lines = plain(terminal.draw_block_tables(cache)).splitlines()
    for name, tokens in (("A", "9 = 2 × 4 + 1"), ("C", "5 = 1 × 4 + 1")):
        [line] = [line for line in lines if line.split()[:1] == [name]]
        assert tokens in line
        pairs = [(int(i), int(block)) for i, block in re.findall(r"(\d+)→(\d+)", line)]
        assert pairs == list(enumerate(cache.block_ids(name)))
    assert not any("B" in line.split() for line in lines)


def test_the_blocks_of_several_groups() -> None:
    """A has 9 tokens. Layers with a window of 4 have given their first block back."""
    specs = (AttentionSpec(), AttentionSpec(window=4))
    config = replace(CONFIG, layer_specs=specs)
    cache = manager.build_cache(config, enable_prefix_caching=False)
    cache.add("A", range(9))
    compute(cache, {"A": 9})
    assert blocks(plain(terminal.draw_pool(cache))) == {
        0: "////", 1: "AAAA", 2: "AAAA", 3: "A...", 4: "    ", 5: "AAAA", 6: "A...",
        7: "    ", 8: "    ", 9: "    ",
    }  # fmt: skip
    tables = {(owner.name, table) for owner, table in capture_pool(cache).tables}
    assert tables == {("A", (1, 2, 3)), ("A", (0, 5, 6))}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_wide_pool_wraps_and_loses_no_block(width: int) -> None:
    cache = paged.build_cache(Config(1, 1, 2, num_blocks=200, max_seq_len=3000, block_size=16))
    cache.add("A", range(2500))
    compute(cache, {"A": 2500})
    drawings = terminal.draw_pool(cache), terminal.draw_block_tables(cache)
    pool, tables = (plain(drawing, width) for drawing in drawings)
    assert max(map(len, (pool + tables).splitlines())) <= width
    assert list(blocks(pool)) == list(range(200))
    assert re.findall(r"\d+→(\d+)", tables) == [str(i) for i in cache.block_ids("A")]


def test_a_block_of_two_sequences_and_a_lost_block_show() -> None:
    pool = paged.build_cache(CONFIG)
    pool.add("A", range(4))
    pool.add("B", range(6))
    compute(pool, {"A": 4, "B": 6})
    pool.sequences["B"].blocks[0] = pool.sequences["A"].blocks[0]
    bars = blocks(plain(terminal.draw_pool(pool)))
    assert [bars[i] for i in (1, 2, 3)] == ["ABAB", "????", "BB.."]


def test_a_shared_block_shows_its_owners_and_its_count() -> None:
    cache = sharing.build_cache(CONFIG)
    cache.add("A", range(6))
    compute(cache, {"A": 6})
    cache.fork("A", "B")
    cache.fork("A", "C")
    drawing = plain(terminal.draw_pool(cache))
    assert "1[ABCA]×3" in drawing and "2[AB..]×3" in drawing  # 4 and 2 tokens
    assert "×n: ref_cnt n" in drawing
    cache.append("B", [6])
    compute(cache, {"B": 1})  # B writes into a copy, block 3
    drawing = plain(terminal.draw_pool(cache))
    assert "1[ABCA]×3" in drawing and "2[AC..]×2" in drawing and "3[BBB.] " in drawing
    lines = plain(terminal.draw_block_tables(cache)).splitlines()
    entries = {line.split()[0]: line.split()[-2:] for line in lines if line.split()[:1] != []}
    assert entries["A"] == entries["C"] == ["0→1×3", "1→2×2"]
    assert entries["B"] == ["0→1×3", "1→3"]
    cache.free("A")
    cache.free("C")
    assert "×" not in plain(terminal.draw_pool(cache))


def test_free_blocks_show_the_digest_by_which_they_are_found_and_hits_a_tick() -> None:
    cache = prefix.build_cache(CONFIG, seed="test")
    cache.add("A", range(10))
    compute(cache, {"A": 10})
    drawing = plain(terminal.draw_pool(cache))
    assert "#" not in drawing and "✓" not in drawing
    cache.free("A")
    before = capture(cache)
    drawing = plain(terminal.draw_pool(before))
    digests = prefix.BlockHasher(4, "test").hash_blocks(list(range(10)))
    first, second = (f"#{digest.hex()[:3]}" for digest in digests)
    bars = blocks(drawing.partition("a letter")[0])
    assert [bars[i] for i in (1, 2, 3)] == [first, second, "    "]
    assert "#: free, and can be found" in drawing and "✓" not in drawing
    cache.add("B", range(6))  # 4 of its 6 tokens are found, in block 1
    compute(cache, {"B": 2})
    drawing = plain(terminal.draw_pool(capture(cache, before)))
    assert "1[BBBB]✓" in drawing and f"2[{second}] " in drawing and "4[BB..] " in drawing
    assert drawing.count("✓") == 2  # the block, and what the tick means
    assert plain(terminal.draw_strip(cache, 4)).strip() == "[/B# B     ]"


def test_the_arena_shows_slabs_and_holes() -> None:
    cache = grown(contiguous.build_cache(CONFIG))  # 36 slots, slabs of 10
    bars = blocks(plain(terminal.draw_pool(cache)))
    assert bars == {0: "A" * 9 + ".", 10: " " * 10, 20: "C" * 5 + "." * 5, 30: " " * 6}
    table = plain(terminal.draw_block_tables(cache))
    assert "slots 0 to 9" in table and "slots 20 to 29" in table
    assert plain(terminal.draw_strip(cache, 5)).strip() == f"[AA{' ' * 2}C.{' ' * 2}]"


def test_the_strip_has_a_letter_a_block() -> None:
    cache = grown(paged.build_cache(CONFIG))
    # A took blocks 1 and 2, B 3, C 4 and 5; then B's came back and A took 6.
    assert plain(terminal.draw_strip(cache, 4)).strip() == "[/AA CCA   ]"


def test_memory_by_hand() -> None:
    # One slot: 2 (K and V) x 2 layers x 3 heads x 5 numbers x 8 bytes = 480 bytes.
    drawing = plain(terminal.draw_memory(Usage(total=36, used=15, reserved=20), CONFIG, 2))
    rows = {
        "stored tokens": ("15", "7.0 KiB"),  # 7200 / 1024 = 7.03
        "reserved": ("20", "9.4 KiB"),  # 9600 / 1024 = 9.38
        "wasted": ("5", "2.3 KiB", "25.0%"),  # 2400 / 1024 = 2.34
        "free": ("16", "7.5 KiB"),  # 7680 / 1024
        "2 slabs of max_seq_len 64": ("128", "60.0 KiB", "6 times"),  # 128 / 20 = 6.4
    }
    lines = drawing.splitlines()
    for start, figures in rows.items():
        [line] = [line for line in lines if line.startswith(start)]
        assert all(f" {figure}" in line for figure in figures)
    assert "= 480 bytes" in drawing


def test_nothing_reserved_divides_by_nothing() -> None:
    drawing = plain(terminal.draw_memory(Usage(total=36, used=0, reserved=0), CONFIG, 0))
    assert "36" in drawing and "%" not in drawing
