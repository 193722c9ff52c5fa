"""Any groups of layers, and any order of calls, wrong ones among them.

Each test has a configuration: up to four groups of any kinds, block sizes, caching, EAGLE, context
parallelism, a pool from tiny to ample. Then requests come, get slots, lose them and leave, and now
and then somebody does what nobody may. After each call:

- the invariants hold, and a call that was refused has changed nothing;
- a request took as many blocks as were said to be needed;
- who listens to the events knows which digests there are, and all look-ups were counted;
- what is found holds the same tokens in the same group: blocks with digests are labelled.

In the end all requests are freed, and all blocks are free.
"""

from collections import Counter
from math import gcd, lcm
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pagedattn.course.schedule import run_schedules
from pagedattn.prefix import BlockHasher

SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
MAX_MODEL_LEN = 64
KINDS = ("full", "mla", "sliding", "chunked", "none", "all", "align", "cross")
SEEDS = st.integers(0, 2**32)


def spec_of(random: Random, stage: ModuleType, kind: str, block_size: int) -> Any:
    if kind in ("full", "mla", "cross"):
        names = {"full": "FullAttention", "mla": "MLAAttention", "cross": "CrossAttention"}
        return getattr(stage, f"{names[kind]}Spec")(block_size=block_size, **SIZES)
    if kind == "sliding":
        window = random.choice([1, 2, 3, 5, 6, 7, 9, 14, 33])
        return stage.SlidingWindowSpec(block_size=block_size, sliding_window=window, **SIZES)
    if kind == "chunked":
        chunk = random.choice([3, 4, 6, 8, 20])
        return stage.ChunkedLocalAttentionSpec(
            block_size=block_size, attention_chunk_size=chunk, **SIZES
        )
    return stage.MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=kind,
        num_speculative_blocks=random.randrange(4),
    )


class AnyConfiguration(RuleBasedStateMachine):
    """A manager that is drawn, its requests, and what was registered in which block."""

    def __init__(self, stage: ModuleType, number: int) -> None:
        super().__init__()
        self.stage, self.number = stage, number
        self.configure(Random(f"configuration {number}"))
        self.requests: dict[str, Any] = {}
        self.num_requests = 0
        self.labels: dict[int, Any] = {}  # block -> its key, group, tokens to its end, salt
        self.listener: Counter[tuple[bytes, int]] = Counter()
        self.looked_up = [0, 0, 0]  # requests, their tokens, hits

    def configure(self, random: Random) -> None:
        stage = self.stage
        caching = random.random() < 0.8
        num_groups, size = random.randint(1, 4), random.choice([2, 4])
        sizes = [size, 2 * size] if num_groups > 1 and random.random() < 0.4 else [size]
        eagle = random.random() < 0.3
        dcp, pcp = random.choice([(1, 1), (2, 1), (1, 2), (2, 2)]) if num_groups == 1 else (1, 1)
        kinds = [kind for kind in KINDS if kind != "cross" or not caching]
        if caching and (eagle or len(sizes) > 1):
            kinds.remove("chunked")
        if dcp * pcp > 1:
            kinds = ["full", "mla"]
        specs = [
            spec_of(random, stage, random.choice(kinds), random.choice(sizes))
            for _ in range(num_groups)
        ]
        if num_groups > 1 and len(set(specs)) == 1:
            caching = False  # equal groups are one group, so they are not looked up
        self.caching = caching
        self.block_sizes = [spec.block_size * dcp * pcp for spec in specs]
        self.manager = stage.KVCacheManager(
            stage.KVCacheConfig(
                random.choice([2, 8, 16, 30, 60, 200]),
                (),
                tuple(stage.KVCacheGroupSpec((f"{i}",), spec) for i, spec in enumerate(specs)),
            ),
            stage.Limits(
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=random.choice([None, 16]),
                decode_context_parallel_size=dcp,
                prefill_context_parallel_size=pcp,
            ),
            enable_caching=caching,
            use_eagle=eagle,
            eagle_groups=[i for i in range(num_groups) if eagle and random.random() < 0.4],
            enable_events=True,
        )
        self.hasher = BlockHasher(gcd(*self.block_sizes)) if caching else None
        self.pool, self.groups = self.manager.pool, self.manager.coordinator.single_type_managers
        self.spy_on_the_need()

    def spy_on_the_need(self) -> None:
        ask = self.manager.coordinator.get_num_blocks_to_allocate

        def spy(*args: Any, **options: Any) -> int:
            self.need, self.num_free = ask(*args, **options), self.pool.num_free_blocks
            return self.need

        self.manager.coordinator.get_num_blocks_to_allocate = spy

    # What is there.

    def snapshot(self) -> Any:
        """The pool and all tables, in numbers."""
        return (
            [(block.block_id, block.ref_cnt, block.block_hash) for block in self.pool.blocks],
            [block.block_id for block in self.pool.free_queue],
            [dict(group.num_cached_blocks) for group in self.groups],
            [self.table_ids(group) for group in self.groups],
            {name: list(blocks) for name, blocks in self.pool.registered_in_step.items() if blocks},
        )

    def table_ids(self, group: Any) -> dict[str, list[int]]:
        tables = group.req_to_blocks.items()
        return {name: [block.block_id for block in table] for name, table in tables if table}

    def has_requests(self) -> bool:
        return bool(self.requests)

    def has_blocks(self, request: Any) -> bool:
        return any(self.manager.get_block_ids(request.request_id))

    # What a scheduler does.

    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        """Some requests come, and some get slots; often the next step starts."""
        random = Random(f"{self.number} {self.num_requests} {seed}")  # hypothesis repeats seeds
        for _ in range(random.randrange(3)):
            self.add(random)
        for name in random.sample(list(self.requests), random.randint(0, len(self.requests))):
            request = self.requests[name]
            if request.num_computed_tokens >= request.num_tokens:
                tokens = [random.choice([7, 8]) for _ in range(random.randint(1, 3))]
                request.append(tokens[: MAX_MODEL_LEN - request.num_tokens])
            self.schedule(random, request)
        if self.requests and random.random() < 0.3:
            self.abort(self.requests[random.choice(list(self.requests))])
        if random.random() < 0.5:
            self.manager.new_step_starts()

    def add(self, random: Random) -> None:
        """Prompts begin alike."""
        tokens = [7] * random.choice([0, 9, 24, 40])
        tokens += [random.choice([7, 8]) for _ in range(random.randint(1, 3))]
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.requests[name] = self.stage.Request(
            name,
            tokens,
            self.hasher,
            salt="us" if random.random() < 0.1 else None,
            skip_reading_prefix_cache=random.random() < 0.1,
        )

    def look_up(self, request: Any) -> tuple[Any, int]:
        before = self.snapshot()
        hits, num_hits = self.manager.get_computed_blocks(request)
        assert self.snapshot() == before
        if not self.caching or request.skip_reading_prefix_cache:
            assert num_hits == 0
            return hits, 0
        for i, count in enumerate((1, request.num_tokens, num_hits)):
            self.looked_up[i] += count
        assert num_hits < request.num_tokens
        assert num_hits % lcm(*self.block_sizes) == 0
        for group, (size, blocks) in enumerate(zip(self.block_sizes, hits.blocks, strict=True)):
            assert len(blocks) * size == num_hits, f"{hits} do not cover {num_hits} tokens"
            for end, block in enumerate(blocks, 1):
                if not block.is_null:
                    tokens = tuple(request.token_ids[: end * size])
                    assert self.labels[block.block_id][1:] == (group, tokens, request.salt)
        return hits, num_hits

    def schedule(self, random: Random, request: Any) -> None:
        """Five kinds of tokens, as far as they make sense for the request."""
        hits, num_hits, external = None, 0, 0
        begins = request.num_computed_tokens == 0 and not self.has_blocks(request)
        if begins and random.random() < 0.8:
            hits, num_hits = self.look_up(request)
        waiting = request.num_tokens - request.num_computed_tokens - num_hits
        if begins:
            external = min(random.choice([0, 0, 0, 1, 6, 16]), waiting - 1)
        new = min(random.choice([1, 4, 16, 64]), waiting - external)
        if waiting <= external + new:  # drafts come behind all known tokens
            start = request.num_computed_tokens + num_hits + external
            new = min(max(new, 0) + random.choice([0, 0, 2]), MAX_MODEL_LEN - start)
        if new + external < 1:
            return
        before = self.snapshot()
        new_blocks = self.manager.allocate_slots(
            request,
            new,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hits,
            num_external_computed_tokens=external,
            num_lookahead_tokens=random.choice([0, 0, 1, 4]),
            delay_cache_blocks=random.random() < 0.2,
            num_encoder_tokens=5 if begins else 0,
            full_sequence_must_fit=random.random() < 0.4,
        )
        if new_blocks is None:
            assert self.need > self.num_free
            self.check_refused(request.request_id, before)
            return
        assert self.num_free - self.pool.num_free_blocks == self.need
        request.num_computed_tokens += num_hits + external + new
        self.label_blocks()
        for group, blocks in zip(self.groups, new_blocks.blocks, strict=True):
            table = group.req_to_blocks.get(request.request_id, [])
            assert not blocks or table[-len(blocks) :] == list(blocks)

    def check_refused(self, name: str, before: Any) -> None:
        """Nothing has changed, but blocks out of reach may be free now, and null in the table."""
        blocks, queue, cached, tables, registered = before
        after = self.snapshot()
        assert (after[2], after[4]) == (cached, registered)
        gone = []
        for old, new in zip(tables, after[3], strict=True):
            assert {**old, name: 0} == {**new, name: 0}
            for old_id, new_id in zip(old.get(name, []), new.get(name, []), strict=True):
                assert new_id in (old_id, 0)
                gone += [old_id] if new_id != old_id else []
        references = Counter(gone)
        assert after[0] == [(i, count - references[i], key) for i, count, key in blocks]
        assert after[1][: len(queue)] == queue and set(after[1][len(queue) :]) <= set(gone)

    @precondition(has_requests)
    @rule(seed=SEEDS, what=st.sampled_from(["reject drafts", "cache", "skip"]))
    def between_steps(self, seed: int, what: str) -> None:
        random = Random(seed)
        request = self.requests[random.choice(list(self.requests))]
        computed, known = request.num_computed_tokens, request.num_tokens
        if what == "reject drafts" and computed > known:
            request.num_computed_tokens = random.randint(known, computed)
        elif what == "cache":
            self.manager.cache_blocks(request, random.randint(0, min(computed, known)))
        elif what == "skip":
            self.manager.remove_skipped_blocks(request.request_id, random.randint(0, computed))

    def abort(self, request: Any) -> None:
        """Whoever hit what the request has registered in this step begins anew, too."""
        for name in (request.request_id, *self.manager.abort(request)):
            assert not self.has_blocks(self.requests[name])
            self.requests[name].num_computed_tokens = 0

    @precondition(has_requests)
    @rule(seed=SEEDS, ends=st.booleans())
    def free(self, seed: int, ends: bool) -> None:
        """At its end, or preempted: then it waits again."""
        request = self.requests[Random(seed).choice(list(self.requests))]
        self.manager.free(request)
        assert not self.has_blocks(request)
        request.num_computed_tokens = 0
        if ends:
            del self.requests[request.request_id]

    @rule(seed=SEEDS)
    def evict(self, seed: int) -> None:
        ids = Random(seed).choices(range(len(self.pool.blocks)), k=3)
        self.manager.evict_blocks(ids)
        assert all(self.pool.blocks[i].block_hash is None for i in ids)

    @rule()
    def reset(self) -> None:
        before = self.snapshot()
        if self.manager.usage:
            with pytest.raises(ValueError, match="in use"):
                self.manager.reset_prefix_cache()
            assert self.snapshot() == before
        else:
            self.manager.reset_prefix_cache()
            assert self.pool.num_cached_blocks == 0

    # What nobody may do.

    @precondition(has_requests)
    @rule(seed=SEEDS)
    def what_is_wrong_is_refused(self, seed: int) -> None:
        random, manager, pool, stage = Random(seed), self.manager, self.pool, self.stage
        request = self.requests[random.choice(list(self.requests))]
        num_blocks, many_tokens = len(pool.blocks), 100 * max(self.block_sizes)
        stranger = stage.BlockPool(9).blocks[3]
        free = list(pool.free_queue)[:1]
        used = [block for block in pool.blocks if block.ref_cnt == 1][:1]
        hits = {
            "num_new_computed_tokens": self.block_sizes[0],
            "new_computed_blocks": stage.KVCacheBlocks(([stranger],) * len(self.groups)),
        }
        wrong: list[Any] = [
            lambda: manager.allocate_slots(request, 0),
            lambda: manager.allocate_slots(request, 1.5),
            lambda: manager.allocate_slots(request, -1, num_external_computed_tokens=2),
            lambda: manager.allocate_slots(request, 1, num_lookahead_tokens=-1),
            lambda: manager.allocate_slots(request, 1, num_encoder_tokens="1"),
            lambda: manager.allocate_slots(request, 1, num_external_computed_tokens=65),
            lambda: manager.allocate_slots(request, 1, num_new_computed_tokens=4),
            lambda: manager.allocate_slots(request, 1, **hits),
            lambda: manager.evict_blocks([1, num_blocks]),
            lambda: manager.remove_skipped_blocks(request.request_id, None),
            lambda: pool.free_blocks([*used, stranger]),
            lambda: pool.free_blocks([*used, *used, *free]),
            lambda: pool.touch([*used, stranger]),
            lambda: pool.get_new_blocks(num_blocks),
        ]
        if self.caching:
            wrong.append(lambda: manager.cache_blocks(request, many_tokens))
        before = self.snapshot()
        with pytest.raises(ValueError):
            random.choice(wrong)()
        assert self.snapshot() == before

    # After each call.

    @invariant()
    def all_is_well(self) -> None:
        self.manager.check_invariants()
        stats = self.manager.make_prefix_cache_stats()
        assert [stats.requests, stats.queries, stats.hits] == self.looked_up
        self.looked_up = [0, 0, 0]
        self.listen()
        self.label_blocks()

    def listen(self) -> None:
        """What the events say that is registered is what is registered."""
        for event in self.manager.take_events():
            if isinstance(event, self.stage.AllBlocksCleared):
                self.listener.clear()
                continue
            keys = [(block_hash, event.group_idx) for block_hash in event.block_hashes]
            if isinstance(event, self.stage.BlockStored):
                self.listener.update(keys)
            else:
                self.listener.subtract(keys)
        digests = [block.block_hash for block in self.pool.blocks if block.block_hash is not None]
        here = Counter((key[:-4], int.from_bytes(key[-4:], "big")) for key in digests)
        assert +self.listener == here and min(self.listener.values(), default=0) >= 0

    def label_blocks(self) -> None:
        """A digest belongs to the tokens up to its block, wherever it stands."""
        for index, (size, group) in enumerate(zip(self.block_sizes, self.groups, strict=True)):
            for name, table in group.req_to_blocks.items():
                request = self.requests[name]
                for end, block in enumerate(table, 1):
                    if block.block_hash is not None:
                        tokens = tuple(request.token_ids[: end * size])
                        label = (block.block_hash, index, tokens, request.salt)
                        known = self.labels.get(block.block_id)
                        assert known is None or known[0] != block.block_hash or known == label
                        self.labels[block.block_id] = label

    def teardown(self) -> None:
        for request in self.requests.values():
            self.manager.free(request)
        self.manager.check_invariants()
        assert self.pool.num_free_blocks == len(self.pool.blocks) - 1
        self.manager.reset_prefix_cache()


@pytest.mark.parametrize("number", range(60))
def test_any_configuration(stage: ModuleType, request: pytest.FixtureRequest, number: int) -> None:
    """60 configurations, 10 runs of 30 steps each."""
    run_schedules(lambda stage: AnyConfiguration(stage, number), request, 10, 30)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60, 160))
def test_many_configurations(
    stage: ModuleType, request: pytest.FixtureRequest, number: int
) -> None:
    """100 configurations, 60 runs of 40 steps each."""
    run_schedules(lambda stage: AnyConfiguration(stage, number), request, 60, 40)
