"""Which slot a token gets when several ranks share a sequence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.course.witness import DEVICE


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def int64(numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def all_ranks(stage, world_size, interleave):
    return [
        stage.ContextParallel(dcp_world_size=world_size, dcp_rank=rank, interleave=interleave)
        for rank in range(world_size)
    ]


def slots_of(stage, rows, query_start_loc, positions, block_size, **options):
    width = max(len(row) for row in rows)
    found = stage.compute_slot_mapping(
        int32([row + [0] * (width - len(row)) for row in rows]),
        int32(query_start_loc),
        int64(positions),
        block_size,
        **options,
    )
    assert found.dtype == torch.int64 and found.device.type == DEVICE
    return found.tolist()


def deal(num_tokens, world_size, interleave):
    """Deal out positions as one deals cards: for each rank, its positions in order."""
    hands = [[] for _ in range(world_size)]
    for position in range(num_tokens):
        hands[position // interleave % world_size].append(position)
    return hands


def slot_by_formula(row, position, block_size, world_size, rank, interleave):
    """The arithmetic of one token, with the block that all ranks together fill."""
    shared_block_size = block_size * world_size
    column = position // shared_block_size
    offset = position - column * shared_block_size
    if offset // interleave % world_size != rank:
        return -1
    local = offset // (world_size * interleave) * interleave + offset % interleave
    return row[column] * block_size + local


# One rank.


def test_one_rank_by_hand(stage):
    expected = [20, 21, 22, 23, 8, 9, 10, 11, 28, 29]
    assert slots_of(stage, [[5, 2, 7]], [0, 10], range(10), 4) == expected
    alone = stage.ContextParallel()
    assert slots_of(stage, [[5, 2, 7]], [0, 10], range(10), 4, context_parallel=alone) == expected


def test_each_token_uses_the_row_of_its_own_sequence(stage):
    rows, positions = [[5, 2, 7], [3], [6], [1, 4]], [9, 0, 1, 2, 3, 4]
    found = slots_of(stage, rows, [0, 1, 4, 4, 6], positions, 4)
    assert found == [29, 12, 13, 14, 7, 16], "9 | 0 1 2 | no token | 3 4"


def test_slots_do_not_fit_into_32_bits(stage):
    assert slots_of(stage, [[2**31 - 1]], [0, 1], [15], 16) == [2**35 - 1]


def test_no_slot_for_padding_up_to_the_end_of_the_buffer(stage):
    out = torch.full((9,), 77, dtype=torch.int64, device=DEVICE)
    found = stage.compute_slot_mapping(
        int32([[5, 2, 7]]), int32([0, 2]), int64([3, 9, 0]), 4, out=out
    )
    assert found is out
    assert out.tolist() == [23, 29, *[-1] * 7], "two tokens, one of padding, six behind"


def test_no_slot_without_a_column(stage):
    found = slots_of(stage, [[5, 2], [3, 7]], [0, 3, 5], [7, 8, -1, 0, 2**40], 4)
    assert found == [11, -1, -1, 12, -1], "two columns of 4 hold positions 0 to 7"


@pytest.mark.parametrize(("num_seqs", "width"), [(0, 3), (2, 0)])
def test_a_table_without_blocks(stage, num_seqs, width):
    out = torch.full((4,), 77, dtype=torch.int64, device=DEVICE)
    table, starts = int32([0] * num_seqs * width).reshape(num_seqs, width), [0] * (num_seqs + 1)
    stage.compute_slot_mapping(table, int32(starts), int64([0, 0]), 4, out=out)
    assert out.tolist() == [-1] * 4


# Several ranks.


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [20, 21, -1, -1, 22, 23, -1, -1, 8, 9, -1, -1]),
        (1, [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1, 8, 9]),
    ],
)
def test_two_ranks_by_hand(stage, rank, expected):
    """Row 5 2, blocks of 4: the first 8 tokens fill block 5 of both ranks."""
    ranks = stage.ContextParallel(dcp_world_size=2, dcp_rank=rank, interleave=2)
    assert slots_of(stage, [[5, 2]], [0, 12], range(12), 4, context_parallel=ranks) == expected


def test_the_number_of_a_rank(stage):
    """Decode ranks are neighbours inside each prefill rank."""
    numbers = [
        stage.ContextParallel(
            dcp_world_size=3, dcp_rank=dcp_rank, pcp_world_size=2, pcp_rank=pcp_rank
        )
        for pcp_rank in range(2)
        for dcp_rank in range(3)
    ]
    assert [ranks.world_size for ranks in numbers] == [6] * 6
    assert [ranks.rank for ranks in numbers] == [0, 1, 2, 3, 4, 5]


def test_prefill_ranks_deal_as_decode_ranks_do(stage):
    """Rank 1 of prefill with 2 decode ranks each, its decode rank 0: number 2 of 4."""
    ranks = stage.ContextParallel(dcp_world_size=2, pcp_world_size=2, pcp_rank=1)
    found = slots_of(stage, [[5, 2]], [0, 12], range(12), 2, context_parallel=ranks)
    assert found == [-1, -1, 10, -1, -1, -1, 11, -1, -1, -1, 4, -1]


worlds = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 4), st.integers(1, 4))


@st.composite
def batches(draw):
    """Ranks, and chunks of sequences of any length: some of no token, some in the middle."""
    world_size, interleave, turns = draw(worlds)
    block_size = interleave * turns
    chunks = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1))
    width = max(start + count for start, count in chunks) // (block_size * world_size) + 1
    ids = st.integers(1, 2**31 - 1)
    rows = [draw(st.lists(ids, min_size=width, max_size=width)) for _ in chunks]
    query_start_loc = [0]
    for _, count in chunks:
        query_start_loc.append(query_start_loc[-1] + count)
    positions = [p for start, count in chunks for p in range(start, start + count)]
    padding = draw(st.lists(st.integers(-5, 2**40), max_size=3))
    return world_size, interleave, block_size, rows, query_start_loc, positions + padding


@given(batches())
def test_any_batch_on_every_rank(stage, batch):
    """Against the formula and against dealing, token by token; every token on one rank."""
    world_size, interleave, block_size, rows, query_start_loc, positions = batch
    stored = [0] * len(positions)
    for rank, ranks in enumerate(all_ranks(stage, world_size, interleave)):
        found = slots_of(
            stage, rows, query_start_loc, positions, block_size, context_parallel=ranks
        )
        by_formula, by_dealing = [-1] * len(positions), [-1] * len(positions)
        hand = deal(61, world_size, interleave)[rank]
        for row, (begin, end) in zip(rows, pairwise(query_start_loc), strict=True):
            for i in range(begin, end):
                by_formula[i] = slot_by_formula(
                    row, positions[i], block_size, world_size, rank, interleave
                )
                if positions[i] in hand:
                    n = hand.index(positions[i])
                    by_dealing[i] = row[n // block_size] * block_size + n % block_size
        assert found == by_formula == by_dealing, f"rank {rank} of {world_size}"
        stored = [n + (slot >= 0) for n, slot in zip(stored, found, strict=True)]
    num_tokens = query_start_loc[-1]
    assert stored == [1] * num_tokens + [0] * (len(positions) - num_tokens)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("interleave", [1, 2, 8])
def test_ranks_together_fill_every_block(stage, world_size, interleave):
    """Block by block: all ranks have the same tokens' blocks full at the same time, which is why
    one hash can name a block on all of them."""
    block_size, row = 8, [5, 2, 7]
    together = block_size * world_size
    positions = range(3 * together)
    for ranks in all_ranks(stage, world_size, interleave):
        found = slots_of(
            stage, [row], [0, len(positions)], positions, block_size, context_parallel=ranks
        )
        for column, block in enumerate(row):
            slots = found[column * together : (column + 1) * together]
            slots = [slot for slot in slots if slot >= 0]
            assert slots == list(range(block * block_size, (block + 1) * block_size))


# How many tokens a rank keeps.


def test_tokens_of_each_rank_by_hand(stage):
    lengths = [0, 1, 2, 3, 4, 5, 7, 8, 9]
    expected = [[0, 1, 2, 2, 2, 3, 4, 4, 5], [0, 0, 0, 1, 2, 2, 3, 4, 4]]
    found = [ranks.local_seq_lens(int32(lengths)) for ranks in all_ranks(stage, 2, 2)]
    assert [lens.tolist() for lens in found] == expected
    assert all(lens.dtype == torch.int32 for lens in found)


@given(
    world_size=st.integers(1, 8),
    interleave=st.integers(1, 20),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
)
def test_tokens_of_each_rank_by_dealing(stage, world_size, interleave, lengths):
    for rank, ranks in enumerate(all_ranks(stage, world_size, interleave)):
        dealt = [len(deal(length, world_size, interleave)[rank]) for length in lengths]
        assert ranks.local_seq_lens(int32(lengths)).tolist() == dealt


def test_tokens_of_many_sequences_at_once(stage):
    """Any shape: a row of two lengths for each of two steps."""
    (_, rank_1) = all_ranks(stage, 2, 1)
    assert rank_1.local_seq_lens(int32([[4, 5], [6, 7]])).tolist() == [[2, 2], [3, 3]]


@given(world_size=st.integers(1, 5), interleave=st.integers(1, 5))
def test_positions_among_a_ranks_own(stage, world_size, interleave):
    for rank, ranks in enumerate(all_ranks(stage, world_size, interleave)):
        hand = deal(70, world_size, interleave)[rank]
        found = ranks.local_positions(int64(range(70))).tolist()
        assert [found[position] for position in hand] == list(range(len(hand)))
        assert found.count(-1) == 70 - len(hand)
        before = ranks.local_positions(int64(range(-30, 0)))
        assert bool((before < 0).all()), "no token stands there"


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dcp_world_size": 2, "dcp_rank": 2}, "dcp_rank is 2; 2 ranks"),
        ({"dcp_rank": 1}, "dcp_rank is 1; 1 ranks"),
        ({"dcp_world_size": 2, "dcp_rank": -1}, "dcp_rank is -1"),
        ({"pcp_world_size": 2, "pcp_rank": 2}, "pcp_rank is 2"),
        ({"dcp_world_size": 4, "pcp_world_size": 2, "pcp_rank": 3}, "pcp_rank is 3; 2 ranks"),
        ({"dcp_world_size": 0}, "dcp_world_size must be at least 1, got 0"),
        ({"interleave": 0}, "interleave must be at least 1, got 0"),
        ({"interleave": 1.5}, "interleave is 1.5"),
    ],
)
def test_ranks_that_cannot_be(stage, options, message):
    with pytest.raises(ValueError, match=message):
        stage.ContextParallel(**options)


def refuse(stage, message, out=None, **changes):
    good = {
        "block_table": int32([[5, 2]]),
        "query_start_loc": int32([0, 2]),
        "positions": int64([0, 1]),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        stage.compute_slot_mapping(**good | changes, out=out)
    return out


def test_an_interleave_that_does_not_divide_the_block(stage):
    """Else a turn would begin in one block and end in the next one."""
    out = torch.full((3,), 77, dtype=torch.int64, device=DEVICE)
    for interleave in (3, 8):
        ranks = stage.ContextParallel(dcp_world_size=2, interleave=interleave)
        message = f"interleave {interleave} does not divide block_size 4"
        refuse(stage, message, out, context_parallel=ranks)
    assert out.tolist() == [77] * 3, "refused before anything is written"


def test_other_refusals(stage):
    refuse(stage, "block_size must be at least 1, got 0", block_size=0)
    refuse(
        stage, "query_start_loc has 3 numbers; 1 sequences need 2", query_start_loc=int32([0] * 3)
    )
    refuse(stage, "out has 1 places for 2 tokens", out=int64([7]))
    refuse(stage, r"out is torch\.int32", out=int32([7, 7]))
