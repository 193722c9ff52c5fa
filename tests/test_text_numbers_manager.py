"""Chapter 06: its questions answered by live managers, its numbers as the named commands give
them."""

import gzip
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pagedattn.manager import (
    ContextParallel,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Limits,
    Request,
    SlidingWindowSpec,
    compute_slot_mapping,
    unify_page_sizes,
)
from pagedattn.prefix import BlockHasher

ROOT = Path(__file__).parents[1]
TEXT = " ".join((ROOT / "chapters" / "06" / "README.md").read_text(encoding="utf-8").split())
SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
HASHER = BlockHasher(4, seed="a text")


def full() -> FullAttentionSpec:
    return FullAttentionSpec(**SIZES)


def window(n: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SIZES, sliding_window=n)


def new_manager(*specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(40, (), groups), Limits(max_model_len=64))


def with_cached(
    num_tokens: int, cached: Iterable[set[int]], *specs: KVCacheSpec
) -> tuple[KVCacheManager, int]:
    """A manager with these blocks of a prompt in the cache, and how many tokens it finds of it."""
    manager = new_manager(*specs)
    old = Request("old", range(num_tokens), HASHER)
    manager.allocate_slots(old, num_tokens)
    tables = manager.get_block_ids("old")
    manager.free(old)
    manager.evict_blocks(
        table[i]
        for table, kept in zip(tables, cached, strict=True)
        for i in range(num_tokens // 4)
        if i not in kept
    )
    return manager, manager.get_computed_blocks(Request("new", range(num_tokens), HASHER))[1]


def test_predictions_about_the_manager() -> None:
    """Chapter 06: what live managers answer to the questions."""
    path = ROOT / "chapters" / "06" / "predict.toml"
    answers = {q["id"]: q["answer"] for q in tomllib.loads(path.read_text())["question"]}

    sizes: dict[str, Any] = {"block_size": 16, "head_size": 128, "dtype": torch.bfloat16}
    wide = FullAttentionSpec(**sizes, num_kv_heads=8)
    narrow = SlidingWindowSpec(**sizes, num_kv_heads=2, sliding_window=1024)
    assert unify_page_sizes({"f": wide, "s": narrow})["s"].block_size == answers["unify"]

    manager = new_manager(window(8))
    request = Request("A", range(14), HASHER)
    manager.allocate_slots(request, 13)
    manager.remove_skipped_blocks("A", 13)
    assert sum(map(bool, manager.get_block_ids("A")[0])) == answers["window"]

    assert with_cached(25, [{0, 2, 3, 5}], window(9))[1] == answers["right_to_left"]

    manager, num_hits = with_cached(17, [{0, 1, 2, 3}, {0, 1, 2, 3}], full(), window(4))
    assert num_hits == 16
    before, request = manager.pool.num_free_blocks, Request("new", range(20), HASHER)
    hits, num_hits = manager.get_computed_blocks(request)
    manager.allocate_slots(
        request, 20 - num_hits, num_new_computed_tokens=num_hits, new_computed_blocks=hits
    )
    assert before - manager.pool.num_free_blocks == answers["need"]

    cached: list[set[int]] = [{0, 1}, {1}, {0}]
    assert with_cached(9, cached, full(), window(5), window(3))[1] == answers["fixed_point"]

    ranks = ContextParallel(dcp_world_size=2, interleave=2)
    table, starts = torch.tensor([[5, 7]], dtype=torch.int32), torch.tensor([0, 1])
    (slot,) = compute_slot_mapping(table, starts, torch.tensor([13]), 4, context_parallel=ranks)
    assert slot == answers["ranks"]


def test_how_many_operations_were_recorded() -> None:
    """What `pagedattn replay tests/data/recorded_answers/*.json.gz` replays."""
    files = sorted((ROOT / "tests" / "data" / "recorded_answers").glob("*.json.gz"))
    scripts = [
        script for file in files for script in json.loads(gzip.decompress(file.read_bytes()))
    ]
    num_operations = sum(len(script["ops"]) for script in scripts)
    assert f"replays {len(files)} recordings, {num_operations:,} operations" in TEXT
