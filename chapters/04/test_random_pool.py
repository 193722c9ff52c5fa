"""The pool that remembers, beside lists that are searched from beginning to end."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagedattn.cache import OutOfBlocks

NUM_BLOCKS, NUM_NAMES = 6, 4


def digest(number):
    return number.to_bytes(32, "big")


def ids(blocks):
    return [block.block_id for block in blocks]


def names(pool):
    """Block id -> number of its digest, of the blocks that carry one."""
    return {
        block.block_id: int.from_bytes(block.block_hash, "big")
        for block in pool.blocks
        if block.block_hash is not None
    }


def state(pool):
    return ids(pool.free_queue), [block.ref_cnt for block in pool.blocks], names(pool)


def shown(pool):
    """The pool in words, for messages."""
    queue, counts, digests = state(pool)
    return f"free queue {queue}, counts from block 0 on {counts}, digests by block {digests}"


def register(pool, blocks, numbers):
    pool.cache_full_blocks(blocks, [digest(number) for number in numbers], 0, len(blocks))


def lookup(pool, numbers):
    return ids(pool.find_longest_cache_hit([digest(number) for number in numbers]))


class PoolAgainstLists(RuleBasedStateMachine):
    """Beside the pool stand the ids of the free blocks, the references, and who was named when."""

    def __init__(self):
        super().__init__()
        self.pool = self.stage.BlockPool(NUM_BLOCKS + 1)
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.references = Counter()
        self.named = []  # (block id, number) in the order in which they were registered
        self.evictions = 0

    def blocks(self, block_ids):
        return [self.pool.blocks[i] for i in block_ids]

    def draw_some(self, data, things):
        drawn = data.draw(st.permutations(things))
        return drawn[: data.draw(st.integers(0, len(drawn)))]

    @rule(n=st.integers(-1, NUM_BLOCKS))
    def take(self, n):
        if not 0 <= n <= len(self.free):
            with pytest.raises(ValueError if n < 0 else OutOfBlocks):
                self.pool.get_new_blocks(n)
            return
        expected, self.free = self.free[:n], self.free[n:]
        assert ids(self.pool.get_new_blocks(n)) == expected, "taken at the head of the queue"
        self.references.update(expected)
        kept = [(i, number) for i, number in self.named if i not in expected]
        self.evictions += len(self.named) - len(kept)
        self.named = kept

    @rule(data=st.data(), numbers=st.lists(st.integers(1, NUM_NAMES), min_size=NUM_BLOCKS))
    def name(self, data, numbers):
        nameless = [i for i in range(1, NUM_BLOCKS + 1) if i not in dict(self.named)]
        chosen = self.draw_some(data, [i for i in nameless if self.references[i]])
        register(self.pool, self.blocks(chosen), numbers[: len(chosen)])
        self.named += zip(chosen, numbers, strict=False)

    @rule(data=st.data())
    def share(self, data):
        held = list(self.references.elements())
        chosen = self.draw_some(data, sorted({*held, *dict(self.named)}) * 2)
        self.pool.touch(self.blocks(chosen))
        self.references.update(chosen)
        self.free = [i for i in self.free if i not in chosen]

    @rule(data=st.data())
    def give_back(self, data):
        chosen, free = self.draw_some(data, sorted(self.references.elements())), []
        for i in chosen:
            self.references[i] -= 1
            if self.references[i] == 0:
                free.append(i)
        assert ids(self.pool.free_blocks(self.blocks(chosen))) == free, "these are free now"
        self.free += free

    @rule()
    def reset(self):
        if len(self.free) < NUM_BLOCKS:
            with pytest.raises(ValueError):
                self.pool.reset_prefix_cache()
            return
        assert sorted(ids(self.pool.reset_prefix_cache())) == sorted(dict(self.named))
        self.named = []

    @rule(data=st.data(), i=st.integers(0, NUM_BLOCKS))
    def what_is_refused(self, data, i):
        others = sorted(self.references.elements())
        block, name = self.blocks([i]), dict(self.named).get(i)
        with pytest.raises(ValueError):
            self.pool.free_blocks(self.blocks(others) + block)
        if i and (name or not self.references[i]):
            with pytest.raises(ValueError):
                register(self.pool, block, [NUM_NAMES + 1])
        if not (self.references[i] or name):
            with pytest.raises(ValueError):
                self.pool.touch(self.blocks(others) + block)

    @invariant()
    def same(self):
        counts = [self.references[i] for i in range(NUM_BLOCKS + 1)]
        expected = self.free, counts, dict(self.named)
        assert state(self.pool) == expected, f"expected {expected}: {shown(self.pool)}"
        for number in range(1, NUM_NAMES + 1):
            first = [i for i, other in self.named if other == number][:1]
            assert lookup(self.pool, [number]) == first, f"name {number}: {shown(self.pool)}"
        found = len(self.pool.cached_blocks), self.pool.num_cached_blocks, self.pool.num_evictions
        different = len({number for _, number in self.named})
        assert found == (different, len(self.named), self.evictions), shown(self.pool)
        assert self.pool.usage == pytest.approx(1 - len(self.free) / NUM_BLOCKS)


def test_any_sequence_of_calls_agrees_with_lists(stage):
    machine = type("Machine", (PoolAgainstLists,), {"stage": stage})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, deadline=None))


@pytest.mark.parametrize("seed", range(5))
def test_twins_go_in_any_order(stage, seed):
    """12 blocks of one name. Who was registered first, of those that are left, is found."""
    choose = random.Random(seed)
    pool = stage.BlockPool(13)
    blocks = pool.get_new_blocks(12)
    twins = []
    for turn in range(400):
        nameless = [block for block in blocks if block not in twins]
        if nameless and (not twins or choose.random() < (0.7 if turn // 50 % 2 else 0.3)):
            some = choose.sample(nameless, choose.randint(1, len(nameless)))
            register(pool, some, [1] * len(some))
            twins += some
        else:
            some = choose.sample(twins, choose.randint(1, min(3, len(twins))))
            pool.free_blocks(some)
            assert pool.get_new_blocks(len(some)) == some, "no others are free"
            twins = [block for block in twins if block not in some]
        assert lookup(pool, [1]) == ids(twins[:1]), f"registered {ids(twins)}: {shown(pool)}"
        assert pool.num_cached_blocks == len(twins), shown(pool)
