"""The pool: every block is in use or in the free queue, and never in both."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagedattn.cache import OutOfBlocks


def ids(blocks):
    return [block.block_id for block in blocks]


def shown(pool):
    """The pool in words, for messages."""
    in_use = ids(block for block in pool.blocks if block.ref_cnt)
    return f"in use {in_use}, free queue {ids(pool.free_queue)}"


@pytest.mark.contract
def test_all_blocks_but_block_0_can_be_used(stage):
    pool = stage.BlockPool(5)
    assert pool.num_free_blocks == 4, "5 blocks, one of them the null block: 4 are free"
    blocks = pool.get_new_blocks(4)
    assert len(set(ids(blocks))) == 4, f"one block was given twice: {ids(blocks)}"
    assert 0 not in ids(blocks), f"block 0 pads every block table, but it was given: {ids(blocks)}"
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 1], shown(pool)
    assert pool.num_free_blocks == 0, shown(pool)


@pytest.mark.contract
def test_all_or_nothing(stage):
    pool = stage.BlockPool(5)
    pool.get_new_blocks(2)
    with pytest.raises(OutOfBlocks) as failure:
        pool.get_new_blocks(3)
    assert (failure.value.needed, failure.value.free) == (3, 2), str(failure.value)
    assert pool.num_free_blocks == 2, f"the request failed, so nothing may be taken: {shown(pool)}"
    assert len(pool.get_new_blocks(2)) == 2, "the 2 free blocks can still be had"


@pytest.mark.contract
def test_no_blocks_at_all_is_a_fair_request(stage):
    pool = stage.BlockPool(3)
    assert pool.get_new_blocks(0) == []
    pool.free_blocks([])
    assert pool.num_free_blocks == 2, shown(pool)


@pytest.mark.contract
def test_a_negative_number_of_blocks_is_an_error(stage):
    pool = stage.BlockPool(3)
    with pytest.raises(ValueError):
        pool.get_new_blocks(-1)
    assert pool.num_free_blocks == 2, shown(pool)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_an_error(stage, num_blocks):
    with pytest.raises(ValueError, match=str(num_blocks)):
        stage.BlockPool(num_blocks)


def test_blocks_leave_at_the_head_and_come_back_at_the_tail(stage):
    pool = stage.BlockPool(6)
    first = pool.get_new_blocks(3)
    assert ids(first) == [1, 2, 3], "a new queue holds the blocks in order: 1 2 3 4 5"
    pool.free_blocks(reversed(first))
    assert ids(pool.free_queue) == [4, 5, 3, 2, 1], "freed as 3 2 1, so 3 2 1 stands at the tail"
    assert ids(pool.get_new_blocks(3)) == [4, 5, 3], "the longest free leave first"


@pytest.mark.contract
def test_freed_blocks_are_free_and_unused(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(4)
    pool.free_blocks(blocks[:3])
    assert pool.num_free_blocks == 3, shown(pool)
    assert [block.ref_cnt for block in blocks] == [0, 0, 0, 1], shown(pool)
    again = pool.get_new_blocks(3)
    assert blocks[3] not in again, f"block {blocks[3].block_id} is still in use: {shown(pool)}"


def test_freed_contents_are_reported_dead(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(3)
    assert ids(pool.free_blocks(blocks[1:])) == ids(blocks[1:]), "both blocks hold dead K and V now"


@pytest.mark.contract
def test_a_block_named_twice_in_one_call(stage):
    pool = stage.BlockPool(5)
    [block] = pool.get_new_blocks(1)
    try:
        pool.free_blocks([block, block])
    except ValueError:
        assert pool.num_free_blocks == 3, f"the call failed, so nothing is freed: {shown(pool)}"
        pool.free_blocks([block])
    assert pool.num_free_blocks == 4, f"4 blocks exist, so at most 4 are free: {shown(pool)}"
    blocks = pool.get_new_blocks(4)
    assert len(set(ids(blocks))) == 4, f"two owners would write into one block: {ids(blocks)}"
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)


@pytest.mark.contract
def test_a_block_freed_in_two_calls(stage):
    pool = stage.BlockPool(5)
    block, other = pool.get_new_blocks(2)
    pool.free_blocks([block])
    with pytest.raises(ValueError):
        pool.free_blocks([other, block])
    assert (pool.num_free_blocks, other.ref_cnt) == (3, 1), (
        f"one block of the call is free already, so the whole call must fail: {shown(pool)}"
    )


@pytest.mark.contract
def test_the_null_block_is_never_freed(stage):
    pool = stage.BlockPool(4)
    blocks = pool.get_new_blocks(2)
    with pytest.raises(ValueError):
        pool.free_blocks([*blocks, pool.null_block])
    assert pool.num_free_blocks == 1, f"the call failed, so nothing is freed: {shown(pool)}"
    assert [block.ref_cnt for block in blocks] == [1, 1], shown(pool)


@pytest.mark.contract
def test_a_block_of_another_pool_is_an_error(stage):
    pool, other = stage.BlockPool(4), stage.BlockPool(9)
    mine, foreign = pool.get_new_blocks(1), other.get_new_blocks(8)
    for block in (foreign[0], foreign[-1]):  # an id that this pool has too, and one that it has not
        with pytest.raises(ValueError):
            pool.free_blocks([*mine, block])
    assert pool.num_free_blocks == 2, f"the call failed, so nothing is freed: {shown(pool)}"
    assert other.num_free_blocks == 0, shown(other)


class PoolAgainstAList(RuleBasedStateMachine):
    """A pool beside the plainest model of it: a list of free ids and a list of taken blocks."""

    NUM_BLOCKS = 8
    stage = None

    def __init__(self):
        super().__init__()
        self.pool = self.stage.BlockPool(self.NUM_BLOCKS)
        self.free = list(range(1, self.NUM_BLOCKS))
        self.taken = []

    @rule(n=st.integers(0, NUM_BLOCKS))
    def take(self, n):
        if n > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(n)
            return
        expected, self.free = self.free[:n], self.free[n:]
        blocks = self.pool.get_new_blocks(n)
        assert ids(blocks) == expected, f"the head of the queue was {expected}"
        self.taken += blocks

    @rule(data=st.data())
    def give_back(self, data):
        blocks = data.draw(st.permutations(self.taken))
        blocks = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.free_blocks(blocks)
        self.free += ids(blocks)
        self.taken = [block for block in self.taken if block not in blocks]

    @rule(data=st.data())
    def give_back_what_is_free(self, data):
        free = [block for block in self.pool.blocks[1:] if block not in self.taken]
        if free:
            with pytest.raises(ValueError):
                self.pool.free_blocks([*self.taken, data.draw(st.sampled_from(free))])

    @invariant()
    def same(self):
        assert ids(self.pool.free_queue) == self.free, f"the model's queue is {self.free}"
        assert self.pool.num_free_blocks == len(self.free)
        in_use = {block.block_id for block in self.pool.blocks if block.ref_cnt}
        assert in_use == set(ids(self.taken)), f"taken and not given back: {ids(self.taken)}"


def test_any_sequence_of_calls_agrees_with_a_list(stage):
    machine = type("Machine", (PoolAgainstAList,), {"stage": stage})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, deadline=None))
