"""Prefixes of a model with several groups: what is found, and what must not be, by the verbs."""

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pagedattn.course.groups_witness import GroupsWitness, layers_with_windows
from pagedattn.course.schedule import Schedule, run_schedules

# What each group can still find, by logical block; and the tokens that all of them agree on.
CASES = {
    "one window": ((None, 8), ([0, 1, 2, 3, 4], [0, 1, 2, 4]), 12),
    "two windows": ((None, 8, 12), ([0, 1, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2]), 12),
    "no common end": ((None, 8, 12), ([0, 1, 2, 3, 4], [0, 1, 2, 4], [1, 2]), 0),
}


@pytest.mark.parametrize(("sizes", "findable", "hit"), CASES.values(), ids=CASES)
def test_a_hit_that_every_group_can_serve(stage, sizes, findable, hit):
    """vllm-project/vllm#31707: a hit at n does not imply one below n, so groups are asked again."""
    witness = GroupsWitness(stage, **layers_with_windows(*sizes), num_blocks=40, poison=False)
    prompt = list(range(100, 121))
    witness.add("A", prompt)
    batch = witness.reserve({"A": 21})
    tables = witness.cache.block_ids("A")
    witness.attend(batch)
    witness.commit(batch)
    lost = {
        table[block]
        for group, table in enumerate(tables)
        for block in range(5)
        if block not in findable[witness.cache.windows.index(sizes[group])]
    }
    assert [*witness.cache.windows] == list(sizes)
    witness.free("A")
    witness.cache.manager.evict_blocks(lost)  # past the cache, which would have killed them
    assert witness.cache.need(prompt, 0)[0] == hit
    assert witness.add("B", prompt) == hit
    for group, table in enumerate(witness.cache.block_ids("B")):
        assert len(table) == hit // 4
        first = 0 if sizes[group] is None else max(0, hit - sizes[group] + 1) // 4
        assert table == [0] * first + tables[group][first : hit // 4]
    witness.step({"B": 21 - hit})
    witness.check_contents()


def test_released_blocks_are_found_again(stage):
    """A block that has left the window keeps its digest; a shorter prompt finds it."""
    witness = GroupsWitness(stage, **layers_with_windows(None, 5), num_blocks=40)
    prompt = list(range(20))
    witness.begin("A", 20)
    token_ids = witness.histories["A"].token_ids
    assert witness.cache.block_ids("A")[1][:4] == [0] * 4
    assert witness.add("B", token_ids[:9]) == 8
    assert [len(table) for table in witness.cache.block_ids("B")] == [2, 2]
    witness.step({"B": 1})
    assert witness.live(prompt) == 0  # other tokens


def test_an_abort_makes_nothing_findable(stage):
    """Blocks are registered when they are taken. An abort takes that back: nobody may find them."""
    witness = GroupsWitness(stage, **layers_with_windows(None, 6), num_blocks=40)
    witness.add("A", 12)
    token_ids = witness.histories["A"].token_ids
    free = witness.cache.pool.num_free_blocks
    for _ in range(3):
        witness.reserve({"A": 12}).abort()
        witness.check()
        assert witness.cache.pool.num_free_blocks == free
        assert witness.cache.need([*token_ids, 1], 0) == (0, 0)
    witness.step({"A": 7})
    batch = witness.reserve({"A": 5})
    witness.attend(batch)
    batch.abort()
    witness.check()
    witness.check_contents()
    assert witness.cache.need([*token_ids, 1], 0)[0] == 4
    witness.step({"A": 5})
    assert witness.cache.need([*token_ids, 1], 0)[0] == 12


def test_reset_forgets_all_groups(stage):
    witness = GroupsWitness(stage, **layers_with_windows(None, 6), num_blocks=40)
    witness.begin("A", 12)
    token_ids = witness.histories["A"].token_ids
    with pytest.raises(ValueError, match="in use"):
        witness.cache.reset_prefix_cache()
    witness.free("A")
    assert witness.cache.need([*token_ids, 1], 0)[0] == 12
    witness.cache.reset_prefix_cache()
    assert witness.cache.need([*token_ids, 1], 0) == (0, 0)
    for k_cache, v_cache in witness.cache.layers:
        assert k_cache.isnan().all() and v_cache.isnan().all()
    witness.check()


def test_salts_keep_apart(stage):
    witness = GroupsWitness(stage, **layers_with_windows(None, 6), num_blocks=40)
    prompt = list(range(9))
    assert witness.live(prompt, salt="us") == 0
    assert witness.live(prompt, salt="them") == 0
    assert witness.live(prompt, salt="us") == 8


class WindowSchedule(Schedule):
    """Any order of the verbs on a full and a windowed group. Tokens are from an alphabet of two, so
    that prompts meet again. `need` says beforehand what an `add` takes."""

    options = {  # noqa: RUF012
        **layers_with_windows(None, 3),
        "block_size": 2,
        "num_blocks": 18,
        "max_seq_len": 12,
        "max_num_seqs": 5,
    }

    def __init__(self, stage):
        super().__init__(stage)
        self.witness = GroupsWitness(stage, **self.options)

    @precondition(Schedule.has_room)
    @rule(tokens=st.lists(st.integers(7, 8), min_size=1, max_size=12))
    def add_with_hits(self, tokens):
        cache, seq_id = self.witness.cache, len(self.limits)
        hit, taken = cache.need(tokens, 0)
        free = cache.pool.num_free_blocks
        if taken > free:
            return
        self.limits.append(12)
        assert self.witness.add(seq_id, tokens, 12) == hit
        assert cache.pool.num_free_blocks == free - taken

    @precondition(Schedule.has_sequences)
    @rule(data=st.data())
    def append_a_known_token(self, data):
        seq_id = data.draw(st.sampled_from(self.seq_ids))
        if len(self.witness.histories[seq_id].token_ids) < self.limits[seq_id]:
            self.witness.append(seq_id, [data.draw(st.integers(7, 8))])

    @precondition(Schedule.is_idle)
    @rule(tokens=st.lists(st.integers(7, 8), min_size=1, max_size=12), n=st.integers(0, 12))
    def ask(self, tokens, n):
        before = self.witness.snapshot()
        self.witness.cache.need(tokens, n)
        self.witness.assert_unchanged(before, "need")

    @invariant()
    def everybody_finds_what_was_stored(self):
        if self.batch is None:
            self.witness.check_contents()


def test_any_schedule_with_a_window(stage, request):
    run_schedules(WindowSchedule, request, num_runs=60, num_steps=30)


def test_without_caching_nothing_is_found(stage):
    def build_cache(config):
        return stage.build_cache(config, enable_prefix_caching=False)

    witness = GroupsWitness(
        SimpleNamespace(build_cache=build_cache), **layers_with_windows(None, 5)
    )
    prompt = list(range(20))
    assert witness.live(prompt) == witness.live(prompt) == 0
    witness.check()
