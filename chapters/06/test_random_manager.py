"""Random requests on a manager, beside a pool in which each slot says what was computed into it.

The model is played: when a step runs, the slot of each new token gets the tokens up to it, since K
and V depend on all of them. Then whatever a request can see must hold its own tokens.
"""

from random import Random

import pytest
import torch

from pagedattn.prefix import BlockHasher

SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
MAX_MODEL_LEN = 48


def full(stage, block_size=4):
    return stage.FullAttentionSpec(block_size=block_size, **SIZES)


def sliding(stage, window, block_size=4):
    return stage.SlidingWindowSpec(block_size=block_size, sliding_window=window, **SIZES)


def chunked(stage, chunk):
    return stage.ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=chunk, **SIZES)


CONFIGURATIONS = {
    "full": lambda stage: [full(stage)],
    "sliding": lambda stage: [sliding(stage, 6)],
    "chunked": lambda stage: [chunked(stage, 8)],
    "full, sliding": lambda stage: [full(stage), sliding(stage, 6)],
    "full, two windows": lambda stage: [full(stage), sliding(stage, 6), sliding(stage, 14)],
    "two windows": lambda stage: [sliding(stage, 6), sliding(stage, 14)],
    "two block sizes": lambda stage: [full(stage, 8), sliding(stage, 9)],
    "full, chunked": lambda stage: [full(stage), chunked(stage, 8)],
}


def first_seen(spec, num_tokens):
    """The first position that the token behind ``num_tokens`` others attends to."""
    if hasattr(spec, "sliding_window") and spec.sliding_window:
        return max(0, num_tokens - spec.sliding_window + 1)
    if hasattr(spec, "attention_chunk_size") and spec.attention_chunk_size:
        return num_tokens - num_tokens % spec.attention_chunk_size
    return 0


class World:
    """A manager, its requests, and the slots: (group, block, offset) -> tokens up to that one."""

    def __init__(self, stage, specs, random):
        self.stage, self.specs, self.random = stage, specs, random
        self.caching = random.random() < 0.9
        groups = tuple(stage.KVCacheGroupSpec((f"{i}",), spec) for i, spec in enumerate(specs))
        eagle = self.caching and random.random() < 0.2
        eagle = eagle and not any(type(s) is stage.ChunkedLocalAttentionSpec for s in specs)
        self.manager = stage.KVCacheManager(
            stage.KVCacheConfig(random.choice([10, 16, 30]), (), groups),
            stage.Limits(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=16),
            enable_caching=self.caching,
            use_eagle=eagle,
        )
        self.hasher = BlockHasher(self.manager.hash_block_size) if self.caching else None
        self.requests, self.scheduled, self.slots, self.num_requests = {}, {}, {}, 0

    def add(self):
        """Prompts often begin alike."""
        tokens = [0] * self.random.randrange(1, 40)
        if self.random.random() < 0.4:
            tokens[self.random.randrange(len(tokens)) :] = [1, 2, 3]
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.requests[name] = self.stage.Request(name, tokens, self.hasher)

    def schedule(self):
        """Some tokens of a request that is not in this step yet; now and then with drafts."""
        waiting = [r for r in self.requests.values() if r.request_id not in self.scheduled]
        if not waiting:
            return
        request = self.random.choice(waiting)
        options, num_hits = {}, 0
        if request.num_computed_tokens == 0:
            hits, num_hits = self.manager.get_computed_blocks(request)
            options = {"new_computed_blocks": hits, "num_new_computed_tokens": num_hits}
            options["full_sequence_must_fit"] = self.random.random() < 0.3
        elif request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == MAX_MODEL_LEN:
                return
            request.append([self.random.randrange(2)])
        start = request.num_computed_tokens + num_hits
        new = self.random.randint(1, min(12, request.num_tokens - start))
        options["num_lookahead_tokens"] = self.random.choice([0, 0, 2])
        if self.manager.allocate_slots(request, new, **options) is not None:
            request.num_computed_tokens = start + new
            self.scheduled[request.request_id] = range(start, start + new)

    def leave(self):
        """Cancelled: if it is in this step, others may have to begin anew."""
        if not self.requests:
            return
        request = self.requests.pop(self.random.choice(list(self.requests)))
        if self.scheduled.pop(request.request_id, None) is None:
            self.manager.free(request)
            return
        for name in self.manager.abort(request):
            self.requests[name].num_computed_tokens = 0
            del self.scheduled[name]

    def evict(self):
        self.manager.evict_blocks([self.random.randrange(len(self.manager.pool.blocks))])

    def run_step(self):
        """What is scheduled is computed, and all that anybody sees must be right."""
        for name, positions in self.scheduled.items():
            tokens = self.requests[name].token_ids
            for position in positions:
                for slot in self.slots_of(name, position):
                    self.slots[slot] = tuple(tokens[: position + 1])
        for name, request in self.requests.items():
            for group, spec in enumerate(self.specs):
                seen = first_seen(spec, request.num_computed_tokens)
                for position in range(seen, request.num_computed_tokens):
                    slot = self.slots_of(name, position)[group]
                    assert slot[1] != 0, f"{name} sees position {position} of the null block"
                    found = self.slots.get(slot)
                    expected = tuple(request.token_ids[: position + 1])
                    assert found == expected, f"{name}, group {group}, position {position}: {slot}"
        self.scheduled.clear()
        self.manager.new_step_starts()

    def slots_of(self, name, position):
        tables = self.manager.get_block_ids(name)
        return [
            (group, tables[group][position // spec.block_size], position % spec.block_size)
            for group, spec in enumerate(self.specs)
        ]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_everybody_sees_their_own_tokens(stage, name):
    for seed in range(12):
        world = World(stage, CONFIGURATIONS[name](stage), Random(f"{name} {seed}"))
        for _ in range(120):
            action = world.random.choices(
                [world.add, world.schedule, world.leave, world.evict, world.run_step],
                [2, 8, 1, 0.3, 2],
            )[0]
            action()
            world.manager.check_invariants()
        world.run_step()
        for request in world.requests.values():
            world.manager.free(request)
        world.manager.check_invariants()
        assert world.manager.usage == 0
        world.manager.reset_prefix_cache()
