"""The free queue: out at the head, in at the tail, and out of the middle."""

import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test


def make(stage, n):
    """n blocks, and a queue of them: 0 1 2 …"""
    blocks = [stage.KVCacheBlock(block_id) for block_id in range(n)]
    return blocks, stage.FreeKVCacheBlockQueue(blocks)


def ids(blocks):
    return [block.block_id for block in blocks]


def test_a_new_queue_holds_the_blocks_in_their_order(stage):
    blocks = [stage.KVCacheBlock(block_id) for block_id in (4, 1, 3)]
    queue = stage.FreeKVCacheBlockQueue(blocks)
    assert ids(queue) == [4, 1, 3], "from head to tail as given"
    assert ids(queue) == [4, 1, 3], "to look at the queue takes nothing out of it"
    assert len(queue) == 3


def test_an_empty_queue(stage):
    queue = stage.FreeKVCacheBlockQueue([])
    assert (len(queue), ids(queue)) == (0, [])
    assert queue.popleft_n(0) == []
    queue.append(stage.KVCacheBlock(7))
    assert ids(queue) == [7]
    assert queue.popleft().block_id == 7


def test_blocks_leave_at_the_head(stage):
    blocks, queue = make(stage, 5)
    assert queue.popleft() is blocks[0], "the head of 0 1 2 3 4"
    assert ids(queue.popleft_n(3)) == [1, 2, 3], "several leave in their order"
    assert (len(queue), ids(queue)) == (1, [4])


def test_blocks_come_back_at_the_tail(stage):
    blocks, queue = make(stage, 5)
    queue.popleft_n(4)
    queue.append(blocks[2])
    queue.append_n([blocks[3], blocks[0]])
    assert ids(queue) == [4, 2, 3, 0], "in the order in which they came"
    assert len(queue) == 4
    assert ids(queue.popleft_n(4)) == [4, 2, 3, 0]


def test_no_blocks_at_all(stage):
    _, queue = make(stage, 3)
    queue.append_n([])
    assert queue.popleft_n(0) == []
    assert ids(queue) == [0, 1, 2], "nothing came and nothing left"


@pytest.mark.parametrize("index", range(5))
def test_any_block_can_be_taken_out(stage, index):
    blocks, queue = make(stage, 5)
    queue.remove(blocks[index])
    expected = [block_id for block_id in range(5) if block_id != index]
    assert (len(queue), ids(queue)) == (4, expected), "the others keep their order"
    assert ids(queue.popleft_n(4)) == expected, "and leave in it, past the gap"


def test_what_was_taken_out_can_come_back(stage):
    blocks, queue = make(stage, 4)
    queue.remove(blocks[1])
    queue.append(blocks[1])
    assert ids(queue) == [0, 2, 3, 1], "at the tail, not where it stood before"
    queue.remove(blocks[1])
    assert ids(queue) == [0, 2, 3], "its place is known anew"


def test_the_last_block_is_taken_out(stage):
    blocks, queue = make(stage, 1)
    queue.remove(blocks[0])
    assert (len(queue), ids(queue)) == (0, [])
    queue.append(blocks[0])
    assert queue.popleft() is blocks[0]


def test_every_second_block_is_taken_out(stage):
    blocks, queue = make(stage, 20)
    for block in blocks[1::2]:
        queue.remove(block)
    assert ids(queue) == list(range(0, 20, 2))
    assert ids(queue.popleft_n(4)) == [0, 2, 4, 6]
    queue.append_n(blocks[:3])
    for block in blocks[8:20:2]:
        queue.remove(block)
    assert ids(queue) == [0, 1, 2]


@pytest.mark.parametrize("n", [-1, 4])
def test_more_than_are_there_are_refused(stage, n):
    blocks, queue = make(stage, 4)
    queue.remove(blocks[2])
    with pytest.raises(ValueError, match=str(n)):
        queue.popleft_n(n)
    assert (len(queue), ids(queue)) == (3, [0, 1, 3]), "refused, so nothing has left"


def test_nothing_leaves_an_empty_queue(stage):
    _, queue = make(stage, 2)
    queue.popleft_n(2)
    with pytest.raises(ValueError):
        queue.popleft()
    assert (len(queue), ids(queue)) == (0, [])


def test_what_is_not_in_the_queue_cannot_be_taken_out(stage):
    blocks, queue = make(stage, 8)
    _, other = make(stage, 8)
    queue.popleft()
    queue.remove(blocks[5])
    queue.popleft()
    strangers = [
        blocks[0],  # it left at the head
        blocks[1],  # it left there, too, after a call that has looked at it in its place
        blocks[5],  # it was taken out
        stage.KVCacheBlock(3),  # it never was in a queue, but has the number of one that is
        list(other)[4],  # it is in another queue
    ]
    for block in strangers:
        with pytest.raises(ValueError, match=f"block {block.block_id} "):
            queue.remove(block)
        assert (len(queue), ids(queue)) == (5, [2, 3, 4, 6, 7]), "refused, so nothing has left"
    assert len(other) == 8


NUM_BLOCKS = 12


class QueueAgainstAList(RuleBasedStateMachine):
    """Beside the queue stands a plain list, which searches and moves what it must."""

    def __init__(self):
        super().__init__()
        self.blocks, self.queue = make(self.stage, NUM_BLOCKS)
        self.model = list(self.blocks)

    def draw_outside(self, data):
        outside = [block for block in self.blocks if block not in self.model]
        drawn = data.draw(st.permutations(outside))
        return drawn[: data.draw(st.integers(0, len(drawn)))]

    @rule(data=st.data())
    def append_n(self, data):
        blocks = self.draw_outside(data)
        self.queue.append_n(blocks)
        self.model += blocks

    @rule(data=st.data())
    def append(self, data):
        for block in self.draw_outside(data)[:1]:
            self.queue.append(block)
            self.model.append(block)

    @rule(n=st.integers(-1, NUM_BLOCKS))
    def popleft_n(self, n):
        if not 0 <= n <= len(self.model):
            with pytest.raises(ValueError):
                self.queue.popleft_n(n)
            return
        expected, self.model = self.model[:n], self.model[n:]
        assert ids(self.queue.popleft_n(n)) == ids(expected)

    @rule()
    def popleft(self):
        if self.model:
            assert ids([self.queue.popleft()]) == ids([self.model.pop(0)])

    @rule(data=st.data(), n=st.integers(1, NUM_BLOCKS))
    def remove(self, data, n):
        for block in data.draw(st.permutations(self.model))[:n]:
            self.queue.remove(block)
            self.model.remove(block)

    @rule(data=st.data())
    def remove_what_is_not_there(self, data):
        for block in self.draw_outside(data):
            with pytest.raises(ValueError):
                self.queue.remove(block)

    @invariant()
    def same(self):
        assert ids(self.queue) == ids(self.model), f"expected {ids(self.model)}"
        assert len(self.queue) == len(self.model)


def test_any_sequence_of_calls_agrees_with_a_list(stage):
    machine = type("Machine", (QueueAgainstAList,), {"stage": stage})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, deadline=None))


def test_a_long_life_agrees_with_a_list(stage):
    """So many calls that whatever is put in order now and then is put in order often."""
    rng = random.Random(4)
    blocks, queue = make(stage, 60)
    model = list(blocks)
    for _ in range(2000):
        outside = [block for block in blocks if block not in model]
        match rng.choice(["append_n", "popleft_n", "remove", "remove"]):
            case "append_n":
                some = rng.sample(outside, rng.randint(0, len(outside)))
                queue.append_n(some)
                model += some
            case "popleft_n":
                n = rng.randint(0, min(5, len(model)))
                assert ids(queue.popleft_n(n)) == ids(model[:n])
                del model[:n]
            case "remove" if model:
                block = rng.choice(model)
                queue.remove(block)
                model.remove(block)
        assert ids(queue) == ids(model)
        assert len(queue) == len(model)


class Steps:
    """Counts what Python executes inside: not a timer, so the number is always the same."""

    def __enter__(self):
        self.count = 0
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # 3.12 asks for it before it begins to trace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self._trace


def hits_and_returns(queue, blocks):
    for block in blocks[1::2] + blocks[::-2]:
        queue.remove(block)
        queue.append(block)


def take_all_out(queue, blocks):
    for block in blocks:
        queue.remove(block)


def take_all_out_from_the_tail(queue, blocks):
    for block in blocks[::-1]:
        queue.remove(block)


def one_after_another(queue, blocks):
    for _ in range(2 * len(blocks)):
        queue.append(queue.popleft())


def past_gaps(queue, blocks):
    for block in blocks[: len(blocks) // 2]:
        queue.remove(block)
    for _ in blocks[len(blocks) // 2 :]:
        queue.append_n(queue.popleft_n(1))


@pytest.mark.parametrize(
    "work",
    [hits_and_returns, take_all_out, take_all_out_from_the_tail, one_after_another, past_gaps],
)
def test_a_call_costs_the_same_in_a_longer_queue(stage, work):
    """4 times the blocks and 4 times the calls are 4 times the steps; a queue that searches or
    moves the others in each call would need 16 times as many."""

    class Block(stage.KVCacheBlock):
        def __eq__(self, other):  # so that `list.remove`, which compares, is seen, too
            return self is other

        __hash__ = stage.KVCacheBlock.__hash__

    steps = {}
    for n in (100, 400):
        blocks = [Block(block_id) for block_id in range(n)]
        queue = stage.FreeKVCacheBlockQueue(blocks)
        with Steps() as counted:
            work(queue, blocks)
        steps[n] = counted.count
    assert steps[100] > 100, "something was counted"
    assert steps[400] < 6 * steps[100], f"steps by number of blocks: {steps}"
