"""Equal to chapter 04 where all layers are alike: one group of full attention.

Both caches get the same verbs with the same tokens, drawn by hypothesis: they find the same tokens,
give the same answers to the bit, take and hold the same blocks, and refuse the same steps. Chapter
04 registers a block when it is computed, this one when it is taken. Through these verbs nobody can
tell, abort or not.
"""

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedattn import prefix
from pagedattn.cache import OutOfBlocks
from pagedattn.course.groups_witness import GroupsWitness
from pagedattn.course.schedule import run_schedules
from pagedattn.course.witness import Witness

OPTIONS = {"block_size": 2, "num_blocks": 14, "max_seq_len": 12, "max_num_seqs": 5}
BEGINNINGS = ([7] * 9, [7, 7, 7, 7, 8, 8, 8, 8, 8], [9, 8, 7, 6, 5, 4, 3, 2, 1])
prompts = st.builds(
    lambda beginning, length, tail: beginning[:length] + tail,
    st.sampled_from(BEGINNINGS),
    st.integers(0, 9),
    st.lists(st.integers(7, 8), min_size=1, max_size=3),
)
salts = st.sampled_from([None, None, "us"])


class Both(RuleBasedStateMachine):
    """A cache of this chapter and one of chapter 04, each with its witness."""

    options: Any = OPTIONS

    def __init__(self, stage: ModuleType) -> None:
        super().__init__()
        self.manager = GroupsWitness(stage, **self.options)
        self.prefix = Witness(prefix, **self.options)
        self.both = (self.manager, self.prefix)
        self.batches: tuple[Any, Any] | None = None
        self.num_added = self.num_hit_tokens = self.num_taken_back = 0

    @property
    def seq_ids(self) -> list[Any]:
        return list(self.prefix.histories)

    @property
    def waiting(self) -> list[Any]:
        return [s for s in self.seq_ids if self.prefix.waiting(s)]

    def is_idle(self) -> bool:
        return self.batches is None

    def has_room(self) -> bool:
        return self.is_idle() and len(self.seq_ids) < 5

    def has_sequences(self) -> bool:
        return self.is_idle() and bool(self.seq_ids)

    def has_waiting(self) -> bool:
        return self.is_idle() and bool(self.waiting)

    def has_batch(self) -> bool:
        return self.batches is not None

    def is_empty(self) -> bool:
        return self.is_idle() and not self.seq_ids

    @precondition(is_idle)
    @rule(prompt=prompts, n=st.integers(0, 6), salt=salts)
    def need(self, prompt: list[int], n: int, salt: str | None) -> None:
        found, expected = (w.cache.need(prompt, n, salt=salt) for w in self.both)
        assert found == expected, f"need({prompt}, {n}) is {found}, {expected} in chapter 04"

    @precondition(has_room)
    @rule(prompt=prompts, salt=salts)
    def add(self, prompt: list[int], salt: str | None) -> None:
        self.begin(prompt, salt)

    def begin(self, prompt: list[int], salt: str | None) -> None:
        found, expected = (w.add(self.num_added, prompt, salt=salt) for w in self.both)
        self.num_added += 1
        self.num_hit_tokens += expected
        assert found == expected, f"add({prompt}) found {found} tokens, {expected} in chapter 04"

    @precondition(has_sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(7, 8), min_size=1, max_size=3))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id = data.draw(st.sampled_from(self.seq_ids))
        if len(self.prefix.histories[seq_id].token_ids) + len(tokens) <= 12:
            for witness in self.both:
                witness.append(seq_id, tokens)

    @precondition(has_waiting)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.waiting), min_size=1, unique=True))
        self.take({s: data.draw(st.integers(1, self.prefix.waiting(s))) for s in chosen})

    def take(self, counts: dict[Any, int]) -> None:
        """Both open a batch, or both refuse it."""
        results: list[Any] = []
        before = self.manager.snapshot()
        for witness in self.both:
            try:
                results.append(witness.reserve(counts))
            except OutOfBlocks as refusal:
                results.append((refusal.needed, refusal.free))
        if isinstance(results[1], tuple):
            assert results[0] == results[1], "needed and free blocks of a refusal"
            self.manager.assert_unchanged(before, "a refused reserve")
        else:
            assert not isinstance(results[0], tuple), f"{results[0]}: chapter 04 had room"
            self.batches = (results[0], results[1])

    @precondition(has_batch)
    @rule()
    def attend_and_commit(self) -> None:
        self.finish()

    def finish(self) -> None:
        assert self.batches is not None
        found, expected = (w.attend(b) for w, b in zip(self.both, self.batches, strict=True))
        for layer, (out, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(out, right), f"layer {layer}: not the bits of chapter 04"
        for witness, batch in zip(self.both, self.batches, strict=True):
            witness.commit(batch)
        self.batches = None

    @precondition(has_batch)
    @rule()
    def abort(self) -> None:
        self.undo()

    def undo(self) -> None:
        """The digests that this chapter gave out and takes back count as lost."""
        assert self.batches is not None
        before = self.manager.cache.pool.num_evictions
        for batch in self.batches:
            batch.abort()
        self.num_taken_back += self.manager.cache.pool.num_evictions - before
        self.batches = None

    @precondition(has_sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.seq_ids)))

    def end(self, seq_id: Any) -> None:
        for witness in self.both:
            witness.free(seq_id)

    @precondition(is_empty)
    @rule()
    def reset(self) -> None:
        for witness in self.both:
            witness.cache.reset_prefix_cache()

    @invariant()
    def they_are_alike(self) -> None:
        """After each step: as many slots in each state, as many blocks that can be found, and the
        same tables and queue, block by block."""
        for witness in self.both:
            witness.check()
        upper, lower = self.manager.cache, self.prefix.cache
        assert upper.usage() == lower.usage()
        assert upper.pool.num_free_blocks == lower.pool.num_free_blocks
        if self.batches is None:
            self.manager.check_contents()
            # In chapter 04 the blocks of an open batch have no digest yet.
            assert upper.pool.num_cached_blocks == lower.pool.num_cached_blocks
        assert upper.pool.num_evictions == lower.pool.num_evictions + self.num_taken_back
        for seq_id in self.seq_ids:
            assert upper.block_ids(seq_id) == (lower.block_ids(seq_id),), f"table of {seq_id}"
        queues = [[b.block_id for b in cache.pool.free_queue] for cache in (upper, lower)]
        assert queues[0] == queues[1], "the free queue, in the order of eviction"


def test_any_schedule_is_that_of_chapter_04(stage, request):
    run_schedules(Both, request, num_runs=60, num_steps=40)


def test_with_hits_evictions_and_aborts_in_plenty(stage):
    """The same, drawn by a plain generator from texts that meet often, over a longer time."""
    choose, both = random.Random(0), Both(stage)
    for _ in range(600):
        if both.has_batch():
            both.undo() if choose.random() < 0.2 else both.finish()
        elif both.has_room() and choose.random() < 0.4:
            beginning = choose.choice(BEGINNINGS)[: choose.randint(0, 9)]
            tail = choose.choices((7, 8), k=choose.randint(1, 3))
            both.begin(beginning + tail, None)
        elif both.has_waiting() and choose.random() < 0.8:
            chosen = choose.sample(both.waiting, k=choose.randint(1, len(both.waiting)))
            both.take({s: choose.randint(1, both.prefix.waiting(s)) for s in chosen})
        elif both.has_sequences():
            both.end(choose.choice(both.seq_ids))
        both.they_are_alike()
    assert both.num_hit_tokens > 100 and both.manager.cache.pool.num_evictions > 30


def test_with_caching_off(stage):
    def build_cache(module):
        return SimpleNamespace(
            build_cache=lambda config: module.build_cache(config, enable_prefix_caching=False)
        )

    upper = GroupsWitness(build_cache(stage), **OPTIONS)
    lower = Witness(build_cache(prefix), **OPTIONS)
    for witness in (upper, lower):
        assert [witness.live([7] * 9) for _ in range(3)] == [0, 0, 0]
        assert witness.cache.need([7] * 9, 9) == (0, 5)
    assert upper.cache.pool.num_cached_blocks == 0
