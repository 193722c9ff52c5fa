"""The pool counts: a block is free when no table names it any more, and not before."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagedattn.cache import OutOfBlocks


def ids(blocks):
    return [block.block_id for block in blocks]


def counts(pool):
    return [block.ref_cnt for block in pool.blocks[1:]]


def state(pool):
    return counts(pool), ids(pool.free_queue)


def shown(pool):
    """The pool in words, for messages."""
    return f"counts of blocks 1 … are {counts(pool)}, free queue {ids(pool.free_queue)}"


@pytest.mark.contract
def test_touch_adds_one_reference(stage):
    pool = stage.BlockPool(5)
    a, b, c = pool.get_new_blocks(3)
    pool.touch([a, c])
    pool.touch([a])
    assert [a.ref_cnt, b.ref_cnt, c.ref_cnt] == [3, 1, 2], shown(pool)
    assert pool.num_free_blocks == 1, f"sharing takes no block: {shown(pool)}"


@pytest.mark.contract
def test_a_shared_block_is_free_after_its_last_reference(stage):
    pool = stage.BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.touch([block])
    for left in (2, 1):
        pool.free_blocks([block])
        assert block.ref_cnt == left, shown(pool)
        assert pool.num_free_blocks == 3, f"somebody still reads this block: {shown(pool)}"
        assert block.block_id not in ids(pool.get_new_blocks(0)), shown(pool)
    pool.free_blocks([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (0, 4), shown(pool)


@pytest.mark.contract
def test_a_block_in_use_is_not_handed_out(stage):
    pool = stage.BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)
    assert counts(pool) == [1, 1, 1], shown(pool)


@pytest.mark.contract
def test_only_contents_that_nobody_reads_are_dead(stage):
    pool = stage.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    pool.touch([a])
    assert ids(pool.free_blocks([a, b])) == [b.block_id], "another table still names the first"
    assert ids(pool.free_blocks([a])) == [a.block_id], "now nobody does"


@pytest.mark.contract
def test_a_block_may_be_named_as_often_as_it_has_references(stage):
    """A table that names a block twice gives two references back in one call."""
    pool = stage.BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    dead = pool.free_blocks([block, block])
    assert ids(dead) == [block.block_id], f"it died once: {ids(dead)}"
    assert pool.num_free_blocks == 4, f"it is in the queue once: {shown(pool)}"
    assert len(set(ids(pool.get_new_blocks(4)))) == 4, "no block is given twice"


def test_blocks_come_back_in_the_order_in_which_they_die(stage):
    pool = stage.BlockPool(6)
    a, b, c = pool.get_new_blocks(3)
    pool.touch([b])
    pool.free_blocks([c, b, a])
    assert ids(pool.free_queue) == [4, 5, 3, 1], f"block 2 is still shared: {shown(pool)}"
    pool.free_blocks([b])
    assert ids(pool.free_queue) == [4, 5, 3, 1, 2], shown(pool)


@pytest.mark.contract
@pytest.mark.parametrize("surplus", [1, 2])
def test_more_releases_than_references_are_an_error(stage, surplus):
    pool = stage.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    pool.touch([a])
    before = state(pool)
    with pytest.raises(ValueError, match=f"released {2 + surplus} times; its ref_cnt is 2"):
        pool.free_blocks([b, *[a] * (2 + surplus)])
    assert state(pool) == before, f"the call failed, so no count may have changed: {shown(pool)}"


@pytest.mark.contract
def test_a_free_block_cannot_be_shared(stage):
    pool = stage.BlockPool(4)
    a, b = pool.get_new_blocks(2)
    pool.free_blocks([b])
    before = state(pool)
    with pytest.raises(ValueError, match=f"block {b.block_id} is free"):
        pool.touch([a, b])
    assert state(pool) == before, f"the call failed, so no count may have changed: {shown(pool)}"


@pytest.mark.contract
def test_the_null_block_is_never_shared(stage):
    pool = stage.BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="null"):
        pool.touch([block, pool.null_block])
    assert (block.ref_cnt, pool.null_block.ref_cnt) == (1, 0), shown(pool)


@pytest.mark.contract
@pytest.mark.parametrize("size", [4, 9], ids=["an id that exists here", "an id that does not"])
def test_a_block_of_another_pool_cannot_be_shared(stage, size):
    pool, other = stage.BlockPool(4), stage.BlockPool(size)
    (block,), foreign = pool.get_new_blocks(1), other.get_new_blocks(size - 1)[-1]
    with pytest.raises(ValueError, match=f"block {foreign.block_id} is not a block of this pool"):
        pool.touch([block, foreign])
    assert (block.ref_cnt, foreign.ref_cnt) == (1, 1), "refused, so no count may have changed"


NUM_BLOCKS = 6


class PoolAgainstACounter(RuleBasedStateMachine):
    """Beside the pool stand a list of free ids and a counter of references."""

    def __init__(self):
        super().__init__()
        self.pool = self.stage.BlockPool(NUM_BLOCKS + 1)
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.references = Counter()

    def draw_references(self, data):
        """Some of the references that are held, in any order, a block perhaps several times."""
        held = data.draw(st.permutations(sorted(self.references.elements())))
        return held[: data.draw(st.integers(0, len(held)))]

    @rule(n=st.integers(0, NUM_BLOCKS))
    def take(self, n):
        if n > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(n)
            return
        expected, self.free = self.free[:n], self.free[n:]
        assert ids(self.pool.get_new_blocks(n)) == expected, "taken at the head of the queue"
        self.references.update(expected)

    @rule(data=st.data())
    def share(self, data):
        chosen = self.draw_references(data)
        self.pool.touch([self.pool.blocks[i] for i in chosen])
        self.references.update(chosen)

    @rule(data=st.data())
    def give_back(self, data):
        chosen, dead = self.draw_references(data), []
        for i in chosen:
            self.references[i] -= 1
            if self.references[i] == 0:
                dead.append(i)
        reported = self.pool.free_blocks([self.pool.blocks[i] for i in chosen])
        assert ids(reported) == dead, "these lost their last reference, in this order"
        self.free += dead

    @rule(data=st.data())
    def give_back_too_many(self, data):
        i = data.draw(st.integers(1, NUM_BLOCKS))
        with pytest.raises(ValueError):
            self.pool.free_blocks([self.pool.blocks[i]] * (self.references[i] + 1))

    @invariant()
    def same(self):
        expected = [self.references[i] for i in range(1, NUM_BLOCKS + 1)]
        assert counts(self.pool) == expected, f"expected {expected}: {shown(self.pool)}"
        assert ids(self.pool.free_queue) == self.free, f"expected {self.free}: {shown(self.pool)}"


def test_any_sequence_of_calls_agrees_with_a_counter(stage):
    machine = type("Machine", (PoolAgainstACounter,), {"stage": stage})
    run_state_machine_as_test(machine, settings=settings(max_examples=40))
