"""Fork: a second sequence with all that the first knows, and not one block more.

In no test of this file does a sequence write into a block that is shared.
"""

import pytest

from pagedattn.course.witness import Witness


@pytest.fixture
def witness(stage):
    """A: 10 tokens computed, in blocks of 4: two full ones and one half full."""
    witness = Witness(stage)
    witness.add("A", 10)
    witness.step({"A": witness.waiting("A")})
    return witness


@pytest.mark.contract
def test_a_fork_takes_no_block(witness):
    free = witness.cache.pool.num_free_blocks
    witness.fork("A", "B")
    assert witness.cache.pool.num_free_blocks == free, f"B shares all blocks of A: {witness!r}"
    assert witness.cache.block_ids("B") == witness.cache.block_ids("A"), repr(witness)
    assert witness.cache.ref_cnts("A") == [2, 2, 2], f"the half full one, too: {witness!r}"
    witness.check()


@pytest.mark.contract
def test_the_oldest_stands_first(witness):
    witness.fork("A", "B")
    witness.fork("A", "C")
    assert witness.cache.seq_ids == ["A", "B", "C"]


@pytest.mark.contract
def test_a_fork_copies_nothing(witness):
    witness.fork("A", "B")
    assert witness.cache.num_copies == 0, repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_every_fork_counts(witness):
    for child in "BCD":
        witness.fork("A", child)
    assert witness.cache.ref_cnts("C") == [4, 4, 4], repr(witness)
    witness.free("A")
    assert witness.cache.ref_cnts("C") == [3, 3, 3], repr(witness)
    witness.check()


@pytest.mark.contract
def test_a_fork_of_a_fork(witness):
    witness.fork("A", "B")
    witness.fork("B", "C")
    assert witness.cache.block_ids("C") == witness.cache.block_ids("A"), repr(witness)
    assert witness.cache.ref_cnts("A") == [3, 3, 3], repr(witness)
    witness.check()


@pytest.mark.contract
@pytest.mark.parametrize("order", ["ABC", "CBA", "BAC"])
def test_the_last_to_go_frees_the_blocks(witness, order):
    total = witness.cache.usage().total // 4
    witness.fork("A", "B")
    witness.fork("A", "C")
    for gone, seq_id in enumerate(order, start=1):
        witness.free(seq_id)
        expected = total - 3 if gone < 3 else total
        assert witness.cache.pool.num_free_blocks == expected, (
            f"{gone} of 3 sharers are gone; expected {expected} free blocks: {witness!r}"
        )
        witness.check()
        witness.check_contents()


@pytest.mark.contract
def test_the_child_outlives_its_parent(witness):
    """After A is gone its name is free, and another sequence takes blocks; B keeps its own."""
    witness.fork("A", "B")
    witness.free("A")
    witness.add("A", 16)
    witness.step({"A": witness.waiting("A")})
    assert not set(witness.cache.block_ids("A")) & set(witness.cache.block_ids("B")), repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_distinct_slots_are_counted(witness):
    """10 tokens in three blocks of 4, however many tables name them."""
    for child in "BCD":
        witness.fork("A", child)
    usage = witness.cache.usage()
    assert (usage.used, usage.reserved, usage.wasted) == (10, 12, 2), f"{usage}: {witness!r}"


@pytest.mark.contract
def test_a_fork_knows_the_tokens_that_wait(witness):
    witness.append("A", 2)
    witness.fork("A", "B")
    cache = witness.cache
    assert (cache.num_tokens("B"), cache.num_computed_tokens("B")) == (12, 10), repr(witness)
    witness.check()


@pytest.mark.contract
def test_tokens_of_the_child_are_its_own(witness):
    witness.fork("A", "B")
    witness.append("B", 3)
    assert witness.cache.num_tokens("A") == 10, "B has got tokens, A has not"
    witness.append("A", 1)
    assert witness.cache.num_tokens("B") == 13
    witness.check()


@pytest.mark.contract
def test_a_fork_has_the_limit_of_its_parent(stage):
    witness = Witness(stage)
    witness.add("A", 5, max_tokens=6)
    witness.step({"A": witness.waiting("A")})
    witness.fork("A", "B")
    witness.cache.append("B", [1])
    with pytest.raises(ValueError, match="'B' has 6 tokens; 1 more exceed its limit of 6"):
        witness.cache.append("B", [1])


@pytest.mark.contract
def test_a_fork_of_what_is_not_computed_yet(stage):
    """There is nothing to share but the tokens: each computes the prompt for itself."""
    witness = Witness(stage)
    witness.add("A", 6)
    witness.fork("A", "B")
    assert witness.cache.num_computed_tokens("B") == witness.cache.num_computed_tokens("A")
    witness.step({s: witness.waiting(s) for s in "AB"})
    witness.check_contents()


@pytest.mark.contract
def test_full_blocks_stay_shared(stage):
    """After 8 tokens in blocks of 4 the ninth opens a block: nothing shared is written."""
    witness = Witness(stage)
    witness.add("A", 8)
    witness.step({"A": witness.waiting("A")})
    witness.fork("A", "B")
    witness.decode("A", "B")
    cache = witness.cache
    assert cache.ref_cnts("A") == cache.ref_cnts("B") == [2, 2, 1], repr(witness)
    assert cache.block_ids("A")[:2] == cache.block_ids("B")[:2], repr(witness)
    assert cache.block_ids("A")[2] != cache.block_ids("B")[2], repr(witness)
    assert cache.num_copies == 0, f"no block had to be copied: {witness!r}"
    witness.check_contents()


@pytest.mark.contract
@pytest.mark.parametrize(
    "words, parent, child",
    [
        ("unknown sequence 'X'", "X", "C"),
        ("sequence 'B' is in the cache already", "A", "B"),
        ("sequence 'A' is in the cache already", "A", "A"),
    ],
)
def test_a_fork_is_refused(witness, words, parent, child):
    witness.add("B", 3)
    before = witness.snapshot()
    with pytest.raises(ValueError, match=words):
        witness.cache.fork(parent, child)
    witness.assert_unchanged(before, f"a refused fork ({words})")


@pytest.mark.contract
def test_no_fork_while_a_batch_is_open(witness):
    witness.append("A")
    batch = witness.cache.reserve({"A": 1})
    before = witness.snapshot()
    with pytest.raises(ValueError, match="fork while a batch of \\['A'\\] is open"):
        witness.cache.fork("A", "B")
    witness.assert_unchanged(before, "a refused fork")
    batch.abort()
    witness.fork("A", "B")
    witness.check()


@pytest.mark.contract
def test_one_sequence_too_many(stage):
    witness = Witness(stage, max_num_seqs=2)
    witness.add("A", 5)
    witness.step({"A": witness.waiting("A")})
    witness.fork("A", "B")
    before = witness.snapshot()
    with pytest.raises(ValueError, match="max_num_seqs is 2"):
        witness.cache.fork("A", "C")
    witness.assert_unchanged(before, "a refused fork")
