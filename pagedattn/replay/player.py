"""The operations of a recording, done by a manager.

Each word is a method of ``Player``, which says what it does and what it answers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from pagedattn.course.tasks import unfinished_task
from pagedattn.prefix import BlockHasher, ExtraKeys, Image
from pagedattn.replay.recording import Json


class Player:
    """One manager, and the requests that a script gives it.

    Raises ValueError for a configuration that the manager refuses.
    """

    def __init__(self, config: Json, stage: ModuleType) -> None:
        self.stage = stage
        limits = stage.Limits(
            max_model_len=config.get("max_model_len", 8192),
            max_num_batched_tokens=config.get("max_num_batched_tokens"),
            decode_context_parallel_size=config.get("dcp", 1),
            prefill_context_parallel_size=config.get("pcp", 1),
        )
        groups = config["groups"]
        specs = [self._spec(group, config.get("block_size", 16)) for group in groups]
        self.manager = stage.KVCacheManager(
            stage.KVCacheConfig(
                config["num_blocks"],
                (),
                tuple(
                    stage.KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs)
                ),
            ),
            limits,
            hash_block_size=config.get("hash_block_size"),
            enable_caching=config.get("enable_caching", True),
            use_eagle=config.get("use_eagle", False),
            eagle_groups=[i for i, group in enumerate(groups) if group.get("eagle")],
            enable_events=config.get("events", False),
            collect_new_block_ids=True,
        )
        self.hasher = (
            BlockHasher(self.manager.hash_block_size) if self.manager.enable_caching else None
        )
        self.requests: dict[str, Any] = {}
        self.hits: dict[str, tuple[Any, int]] = {}  # looked up, and not used yet

    def answer(self, operation: Json) -> Json:
        """Do it. Every answer has ``free``, the number of free blocks, and if a request is named,
        ``table``, its block ids by group; a refusal has ``error``."""
        try:
            found: Json = getattr(self, f"_{operation['op']}")(operation)
        except Exception as error:  # also what breaks in a student's manager
            if unfinished_task(error):
                raise
            found = {"error": f"{type(error).__name__}: {error}"}
        if "id" in operation:
            found["id"] = operation["id"]
            found["table"] = list(self.manager.get_block_ids(operation["id"]))
        return found | {"op": operation["op"], "free": self.manager.pool.num_free_blocks}

    def _spec(self, group: Json, block_size: int) -> Any:
        """One layer's spec. Its widths do not matter to a manager."""
        stage, kind = self.stage, group["type"]
        block_size = group.get("block_size", block_size)
        if kind == "mamba":
            return stage.MambaSpec(
                block_size=block_size,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=group.get("mode", "none"),
                num_speculative_blocks=group.get("spec_blocks", 0),
            )
        spec_class, options = {
            "full": (stage.FullAttentionSpec, {}),
            "mla": (stage.MLAAttentionSpec, {}),
            "sliding": (stage.SlidingWindowSpec, {"sliding_window": group.get("window")}),
            "chunked": (
                stage.ChunkedLocalAttentionSpec,
                {"attention_chunk_size": group.get("chunk")},
            ),
            "cross": (stage.CrossAttentionSpec, {}),
        }[kind]
        return spec_class(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, **options
        )

    # The words.

    def _request(self, operation: Json) -> Json:
        """A new request: how many full blocks have a digest."""
        images = tuple(Image(*image) for image in operation.get("mm") or ())
        request = self.stage.Request(
            operation["id"],
            operation["tokens"],
            self.hasher,
            salt=operation.get("salt"),
            extra_keys=ExtraKeys(operation.get("lora"), images),
            skip_reading_prefix_cache=operation.get("skip_read", False),
        )
        self.requests[operation["id"]] = request
        return {"hashes": len(request.block_hashes)}

    def _append(self, operation: Json) -> Json:
        """The request grows."""
        self.requests[operation["id"]].append(operation["tokens"])
        return {}

    def _set_computed(self, operation: Json) -> Json:
        """So many tokens are computed: drafts were rejected, say."""
        self.requests[operation["id"]].num_computed_tokens = operation["n"]
        return {}

    def _hit(self, operation: Json) -> Json:
        """The longest cached prefix: tokens, and blocks by group."""
        blocks, num_tokens = self.manager.get_computed_blocks(self.requests[operation["id"]])
        self.hits[operation["id"]] = blocks, num_tokens
        return {"hit": num_tokens, "blocks": list(blocks.get_block_ids())}

    def _alloc(self, operation: Json) -> Json:
        """Slots: the new blocks by group, or null. Then the tokens count as computed."""
        request, new = self.requests[operation["id"]], operation["new"]
        hits, num_hits = None, 0
        if operation.get("use_hit"):
            hits, num_hits = self.hits.pop(operation["id"], (None, 0))
        external = operation.get("external", 0)
        blocks = self.manager.allocate_slots(
            request,
            new,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hits,
            num_lookahead_tokens=operation.get("lookahead", 0),
            num_external_computed_tokens=external,
            delay_cache_blocks=operation.get("delay", False),
            num_encoder_tokens=operation.get("encoder", 0),
            full_sequence_must_fit=operation.get("must_fit", False),
        )
        if blocks is None:
            return {"new_blocks": None}
        advance = operation.get("advance", True)
        if advance is not False:
            request.num_computed_tokens += (
                num_hits + external + (new if advance is True else advance)
            )
        return {"new_blocks": list(blocks.get_block_ids())}

    def _free(self, operation: Json) -> Json:
        """Its blocks are freed; it may be allocated again from its beginning."""
        request = self.requests[operation["id"]]
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.hits.pop(operation["id"], None)
        return {}

    def _cache(self, operation: Json) -> Json:
        """Full blocks of the first ``n`` tokens are registered."""
        self.manager.cache_blocks(self.requests[operation["id"]], operation["n"])
        return {}

    def _skip(self, operation: Json) -> Json:
        """Blocks that a token behind ``n`` others does not see are freed."""
        self.manager.remove_skipped_blocks(operation["id"], operation["n"])
        return {}

    def _common(self, operation: Json) -> Json:
        """Leading blocks that all requests share, by group."""
        return {"common": self.manager.get_num_common_prefix_blocks(operation["id"])}

    def _evict(self, operation: Json) -> Json:
        """The digests of these blocks are forgotten."""
        self.manager.evict_blocks(operation["ids"])
        return {}

    def _reset(self, operation: Json) -> Json:
        """All digests are forgotten, unless a block is in use."""
        try:
            self.manager.reset_prefix_cache()
        except ValueError:
            return {"ok": False}
        return {"ok": True}

    def _new_step(self, operation: Json) -> Json:
        """A step begins."""
        self.manager.new_step_starts()
        return {}

    def _new_ids(self, operation: Json) -> Json:
        """Ids that full attention was given since the last call."""
        return {"ids": self.manager.take_new_block_ids()}

    def _stats(self, operation: Json) -> Json:
        """Look-ups since the last call."""
        stats = self.manager.make_prefix_cache_stats()
        return {key: getattr(stats, key) for key in ("requests", "queries", "hits", "reset")}

    def _events(self, operation: Json) -> Json:
        """What happened to digests since the last call."""
        return {"events": [self._event(event) for event in self.manager.take_events()]}

    def _event(self, event: Any) -> Json:
        if isinstance(event, self.stage.AllBlocksCleared):
            return {"type": "AllBlocksCleared"}
        common = {
            "n_hashes": len(event.block_hashes),
            "group_idx": event.group_idx,
            "medium": event.medium,
        }
        if isinstance(event, self.stage.BlockRemoved):
            return {"type": "BlockRemoved", **common}
        return {
            "type": "BlockStored",
            **common,
            "has_parent": event.parent_block_hash is not None,
            "token_ids": list(event.token_ids),
            "block_size": event.block_size,
            "lora_name": event.adapter,
            "extra_keys": _as_lists(event.extra_keys),
        }

    def _state(self, operation: Json) -> Json:
        """The pool: the order of the free queue, counts, which blocks have a digest."""
        pool = self.manager.pool
        return {
            "free_order": [block.block_id for block in pool.free_queue],
            "usage": pool.usage,
            "ref_cnt": {
                str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt
            },
            "hashed": [block.block_id for block in pool.blocks if block.block_hash is not None],
            "cache_keys": len(pool.cached_blocks),
        }


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
