"""What a cache says of itself: its words, its slots, and the invariants that must notice damage."""

import math

import pytest

from pagedattn.cache import InvariantError, Usage
from pagedattn.course.groups_witness import GroupsWitness, layers_with_windows


@pytest.fixture
def witness(stage):
    """Layer 0 sees all, layer 1 sees 5 tokens. A has 10 tokens: blocks 1 2 3 in group 0, and in
    group 1 a null block, 5 and 6; block 4 was given back, and can be found."""
    witness = GroupsWitness(stage, **layers_with_windows(None, 5), num_blocks=9)
    witness.begin("A", 10)
    assert witness.cache.block_ids("A") == ([1, 2, 3], [0, 5, 6])
    return witness


def test_in_words(witness):
    assert repr(witness.cache) == "[0:null 1:A/0 2:A/0 3:A/0 4:free 5:A/1 6:A/1 7:free 8:free]"


def test_slots_of_all_groups(witness):
    """10 tokens in group 0, 6 of them in group 1; a second reader of block 1 adds nothing."""
    assert witness.cache.usage() == Usage(total=32, used=16, reserved=20)
    token_ids = witness.histories["A"].token_ids
    assert witness.add("B", token_ids[:5]) == 4  # blocks 1 and 4, which is in use again
    assert witness.cache.block_ids("B") == ([1], [4])
    assert witness.cache.usage() == Usage(total=32, used=20, reserved=24)
    witness.check()


def test_a_row_that_is_not_the_table(witness):
    witness.cache.block_table[1].table[0, 2] = 7
    with pytest.raises(InvariantError, match=r"I2: sequence 'A', group 1: row \[0, 5, 7"):
        witness.cache.check_invariants()


def test_a_table_that_is_too_short(witness):
    witness.cache.sequences["A"].num_computed_tokens = 8
    with pytest.raises(InvariantError, match="I2: sequence 'A', group 0: 3 blocks for 8 tokens"):
        witness.cache.check_invariants()


@pytest.mark.parametrize(
    ("layer", "slot", "number", "message"),
    [
        (0, (2, 1), math.nan, "computed but not finite"),  # A's position 5
        (1, (5, 1), math.nan, "computed but not finite"),
        (1, (4, 0), math.nan, "computed but not finite"),  # out of reach, but it can be found
        (0, (3, 2), 1.0, "dead but not NaN"),  # behind A's end
        (1, (6, 3), 1.0, "dead but not NaN"),
        (0, (7, 0), 1.0, "dead but not NaN"),  # free
        (1, (0, 0), 1.0, "dead but not NaN"),  # the null block
    ],
)
@pytest.mark.parametrize("part", [0, 1], ids=["K", "V"])
def test_contents_that_should_not_be(witness, layer, slot, number, message, part):
    witness.cache.check_invariants()
    witness.cache.layers[layer][part][slot][1, 3] = number
    with pytest.raises(InvariantError, match=message):
        witness.cache.check_invariants()


def test_damage_of_the_pool_is_noticed(witness):
    witness.cache.pool.blocks[5].ref_cnt += 1
    with pytest.raises(InvariantError, match="I3: block 5 has ref_cnt 2"):
        witness.cache.check_invariants()
