"""The pool and the digests, held against what vLLM's KV cache manager answered.

Here stands a small manager over ``BlockPool``. Unlike this book's cache it registers blocks when
slots are given, before anything is computed, because the recorded one does.
"""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagedattn.prefix import BlockHasher, BlockPool, ExtraKeys, Image, KVCacheBlock

_FOLDER = Path(__file__).parent / "data" / "recorded_answers"
_FILES = ("full", "full_nocache", "mla")

# What an answer says beyond what is checked here: shared beginnings, statistics, new ids, events.
_UNCHECKED = {
    "common": {"common"},
    "new_ids": {"ids"},
    "stats": {"requests", "queries", "hits", "reset"},
    "events": {"events"},
}

Json = dict[str, Any]


@dataclass
class Request:
    """A request, the digests of its full blocks, and the blocks that it holds."""

    token_ids: list[int]
    salt: str | None
    extra_keys: ExtraKeys
    block_hashes: list[bytes] = field(default_factory=list)
    hits: list[KVCacheBlock] = field(default_factory=list)
    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_computed_tokens: int = 0


class Manager:
    """One full-attention group over a pool: each operation is a method that returns its answer."""

    def __init__(self, config: Json) -> None:
        self.block_size: int = config["block_size"]
        self.max_model_len: int = config["max_model_len"]
        self.enable_caching: bool = config.get("enable_caching", True)
        self.pool = BlockPool(config["num_blocks"])
        self.hasher = BlockHasher(self.block_size)
        self.requests: dict[str, Request] = {}

    def answer(self, operation: Json) -> Json:
        """What this manager says to an operation, as far as it is checked."""
        name = operation["op"]
        found = getattr(self, name)(operation) if hasattr(self, name) else {}
        if "id" in operation:
            found["table"] = [_ids(self.requests[operation["id"]].blocks)]
        return found | {"free": self.pool.num_free_blocks}

    def request(self, operation: Json) -> Json:
        images = tuple(Image(*image) for image in operation.get("mm", ()))
        request = Request(
            list(operation["tokens"]),
            operation.get("salt"),
            ExtraKeys(operation.get("lora"), images),
        )
        self.requests[operation["id"]] = request
        self._hash(request)
        return {"hashes": len(request.block_hashes)}

    def append(self, operation: Json) -> Json:
        request = self.requests[operation["id"]]
        request.token_ids += operation["tokens"]
        self._hash(request)
        return {}

    def hit(self, operation: Json) -> Json:
        request = self.requests[operation["id"]]
        most = (len(request.token_ids) - 1) // self.block_size
        request.hits = self.pool.find_longest_cache_hit(request.block_hashes[:most])
        return {"hit": len(request.hits) * self.block_size, "blocks": [_ids(request.hits)]}

    def alloc(self, operation: Json) -> Json:
        request = self.requests[operation["id"]]
        hits = request.hits if operation.get("use_hit") else []
        num_tokens = request.num_computed_tokens + len(hits) * self.block_size + operation["new"]
        num_slots = num_tokens + operation.get("lookahead", 0)
        must_fit = max(num_slots, len(request.token_ids)) if operation.get("must_fit") else 0
        if self._num_leaving(request, hits, max(num_slots, must_fit)) > self.pool.num_free_blocks:
            return {"new_blocks": None}
        num_new_blocks = self._num_new_blocks(request, hits, num_slots)
        self.pool.touch(hits)
        new_blocks = self.pool.get_new_blocks(num_new_blocks)
        request.blocks += hits + new_blocks
        request.num_cached_blocks += len(hits)
        request.num_computed_tokens = num_tokens
        self._register(request)
        return {"new_blocks": [_ids(new_blocks)]}

    def free(self, operation: Json) -> Json:
        request = self.requests[operation["id"]]
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.hits = [], []
        request.num_cached_blocks = request.num_computed_tokens = 0
        return {}

    def reset(self, operation: Json) -> Json:
        try:
            self.pool.reset_prefix_cache()
        except ValueError:
            return {"ok": False}
        return {"ok": True}

    def state(self, operation: Json) -> Json:
        blocks = self.pool.blocks
        return {
            "free_order": _ids(self.pool.free_queue),
            "usage": pytest.approx(self.pool.usage),
            "ref_cnt": {str(block.block_id): block.ref_cnt for block in blocks if block.ref_cnt},
            "hashed": [block.block_id for block in blocks if block.block_hash is not None],
            "cache_keys": len(self.pool.cached_blocks),
        }

    def _num_new_blocks(self, request: Request, hits: list[KVCacheBlock], num_slots: int) -> int:
        num_blocks = -(-min(num_slots, self.max_model_len) // self.block_size)
        return max(0, num_blocks - len(request.blocks) - len(hits))

    def _num_leaving(self, request: Request, hits: list[KVCacheBlock], num_slots: int) -> int:
        """Blocks that would leave the free queue: new ones, and hits that are in it."""
        num_free_hits = sum(block.ref_cnt == 0 for block in hits)
        return self._num_new_blocks(request, hits, num_slots) + num_free_hits

    def _hash(self, request: Request) -> None:
        if self.enable_caching:
            request.block_hashes += self.hasher.hash_blocks(
                request.token_ids,
                request.block_hashes,
                salt=request.salt,
                extra_keys=request.extra_keys,
            )

    def _register(self, request: Request) -> None:
        """Slots of tokens that the request does not have yet are left out."""
        if not self.enable_caching:
            return
        num_full_blocks = (
            min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        )
        self.pool.cache_full_blocks(
            request.blocks, request.block_hashes, request.num_cached_blocks, num_full_blocks
        )
        request.num_cached_blocks = max(request.num_cached_blocks, num_full_blocks)


def _ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def _scripts(name: str) -> list[Json]:
    scripts: list[Json] = json.loads(gzip.decompress((_FOLDER / f"{name}.json.gz").read_bytes()))
    return scripts


def _replay(script: Json, manager_class: type[Manager] = Manager) -> list[str]:
    """The first answer that differs, in words; nothing if none does."""
    manager = manager_class(script["config"])
    for number, (operation, expected) in enumerate(
        zip(script["ops"], script["expect"], strict=True)
    ):
        name = operation["op"]
        found = manager.answer(operation)
        keys = expected.keys() - _UNCHECKED.get(name, set()) - {"op", "id"}
        assert keys == found.keys(), f"operation {number}, {name}: answers to {sorted(keys)}"
        differences = [
            f"operation {number}, {operation}: {key} is {found[key]}, recorded {expected[key]}"
            for key in sorted(keys)
            if found[key] != expected[key]
        ]
        if differences:
            return differences
    return []


@pytest.mark.parametrize("name", _FILES)
def test_every_answer_is_the_recorded_one(name: str) -> None:
    scripts = _scripts(name)
    assert len(scripts) == 12
    for number, script in enumerate(scripts):
        assert _replay(script) == [], f"{name}, script {number}"


def test_the_recordings_hold_what_matters() -> None:
    """Hits, evictions, refusals, salts, adapters and images: else a replay would show little."""
    operations = [
        (operation, expected)
        for script in _scripts("full")
        for operation, expected in zip(script["ops"], script["expect"], strict=True)
    ]
    assert sum(expected.get("hit", 0) > 0 for _, expected in operations) > 50
    assert sum(expected.get("new_blocks", 0) is None for _, expected in operations) > 20
    for key in ("salt", "lora", "mm"):
        assert sum(key in operation for operation, _ in operations) > 5


class FreesTheBeginningFirst(Manager):
    def free(self, operation: Json) -> Json:
        self.requests[operation["id"]].blocks.reverse()
        return super().free(operation)


class ForgetsWhatIsFree(Manager):
    def free(self, operation: Json) -> Json:
        found = super().free(operation)
        self.pool._evict([block for block in self.pool.free_queue if block.block_hash is not None])
        return found


class IgnoresExtraKeys(Manager):
    def request(self, operation: Json) -> Json:
        return super().request({key: operation[key] for key in ("id", "tokens")})


class LooksUpTheWholePrompt(Manager):
    def hit(self, operation: Json) -> Json:
        request = self.requests[operation["id"]]
        request.hits = self.pool.find_longest_cache_hit(request.block_hashes)
        return {"hit": len(request.hits) * self.block_size, "blocks": [_ids(request.hits)]}


@pytest.mark.parametrize(
    "manager_class",
    [FreesTheBeginningFirst, ForgetsWhatIsFree, IgnoresExtraKeys, LooksUpTheWholePrompt],
)
def test_another_manager_answers_otherwise(manager_class: type[Manager]) -> None:
    differences = [_replay(script, manager_class) for script in _scripts("full")]
    assert any(differences), "one that does otherwise must be told from the recorded one"
