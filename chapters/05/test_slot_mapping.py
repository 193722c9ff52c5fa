"""The slot of every token, found on the device: over several programs, and into a fixed buffer."""

from itertools import pairwise

import pytest
import torch

from pagedattn.course.witness import DEVICE

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def int64(numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def slots_by_hand(table, query_start_loc, positions, block_size):
    """One token after another, in plain Python; -1 behind the last sequence."""
    found = []
    for row, (begin, end) in zip(table, pairwise(query_start_loc), strict=True):
        for position in positions[begin:end]:
            found.append(row[position // block_size] * block_size + position % block_size)
    return found + [-1] * (len(positions) - len(found))


def random_batch(counts, *, block_size, width, num_padding=0, seed=0):
    """A batch with so many tokens of each sequence: table, query_start_loc, positions, as lists."""
    random = torch.Generator().manual_seed(seed)

    def numbers(limit, *shape):
        return torch.randint(1, limit, shape, generator=random).tolist()

    query_start_loc = [sum(counts[:row]) for row in range(len(counts) + 1)]
    positions = numbers(block_size * width, sum(counts) + num_padding)
    return numbers(10**8, len(counts), width), query_start_loc, positions


@pytest.mark.parametrize(
    "counts",
    [
        [700],  # one sequence, several programs
        [1] * 33,  # decodes
        [0, 0, 5, 0, 255, 1, 0, 300, 0],  # a program begins inside a row; rows without tokens
        [256, 256, 1],  # programs begin where rows do
    ],
)
@pytest.mark.parametrize("block_size", [1, 3, 16, 544])
def test_agrees_with_a_loop_over_many_programs(stage, counts, block_size):
    table, query_start_loc, positions = random_batch(
        counts, block_size=block_size, width=7, num_padding=3
    )
    found = stage.compute_slot_mapping(
        int32(table), int32(query_start_loc), int64(positions), block_size
    )
    assert found.dtype == torch.int64
    assert found.tolist() == slots_by_hand(table, query_start_loc, positions, block_size)


def test_every_number_of_rows(stage):
    """The search for a token's row ends with the right one, whatever it is cut from."""
    for num_seqs in range(1, 18):
        batch = random_batch([2] * num_seqs, block_size=4, width=3, seed=num_seqs)
        table, query_start_loc, positions = batch
        found = stage.compute_slot_mapping(
            int32(table), int32(query_start_loc), int64(positions), 4
        )
        assert found.tolist() == slots_by_hand(*batch, 4), f"{num_seqs} rows of two tokens"


def test_the_buffer_is_filled_to_its_end(stage):
    out = torch.full((9,), 77, dtype=torch.int64, device=DEVICE)
    found = stage.compute_slot_mapping(
        int32([[5, 2, 7]]), int32([0, 2]), int64([3, 9, 0]), 4, out=out
    )
    assert found is out
    assert out.tolist() == [23, 29, *[-1] * 7], (
        "two tokens, one of padding, and six places that no token has"
    )


def test_a_smaller_batch_in_the_buffers_of_a_larger_one(stage):
    """Fixed buffers of 4 rows and 6 tokens; behind a batch lies what an earlier one left
    (flashinfer-ai/flashinfer#4002)."""
    table = int32([[5, 2], [3, 9], [8, 6], [4, 1]])
    positions, out = int64([4, 0, 1, 2, 5, 7]), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    query_start_loc = int32([0, 1, 4, 5, 6])
    stage.compute_slot_mapping(table, query_start_loc, positions, 4, out=out)
    assert out.tolist() == [8, 12, 13, 14, 25, 7]
    query_start_loc.copy_(int32([0, 1, 2, 2, 2]))
    table[2:] = -7  # no block
    positions[2:] = 2**40  # no column
    stage.compute_slot_mapping(table, query_start_loc, positions, 4, out=out)
    assert out.tolist() == [8, 12, -1, -1, -1, -1], "two rows of one token, two rows of none"


def test_a_position_without_a_column_has_no_slot(stage):
    """Better not stored than stored in a slot that lies anywhere (GeeeekExplorer/nano-vllm#106)."""
    wide = int32([[5, 2, 9], [3, 7, 9]])
    found = stage.compute_slot_mapping(wide[:, :2], int32([0, 2, 4]), int64([7, 8, 0, 8]), 4)
    assert found.tolist() == [11, -1, 12, -1], "two columns of 4 end at position 7"


def test_a_negative_position_has_no_slot(stage):
    """In front of a table, too, there is no block of the row: here is another's."""
    whole = int32([[9, 9, 9], [9, 5, 2], [9, 3, 7]])
    found = stage.compute_slot_mapping(whole[1:, 1:], int32([0, 2, 4]), int64([-1, 0, -4, -7]), 4)
    assert found.tolist() == [-1, 20, -1, -1]


def test_no_slot_without_a_position(stage):
    """Of four tokens two have a position; what lies behind is not read as one."""
    out = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    positions = int64([4, 1, 2, 3])[:2]
    stage.compute_slot_mapping(int32([[5, 2]]), int32([0, 4]), positions, 4, out=out)
    assert out.tolist() == [8, 21, -1, -1, -1, -1]


def test_a_table_may_be_a_view(stage):
    whole = int32([[5, 0, 2, 0], [1, 1, 1, 1], [3, 0, 7, 0]])
    found = stage.compute_slot_mapping(whole[::2, ::2], int32([0, 1, 3]), int64([6, 1, 7]), 4)
    assert found.tolist() == [10, 13, 31], "rows 5 2 | 3 7, block size 4, positions 6 | 1 7"


def test_other_integers(stage):
    found = stage.compute_slot_mapping(int64([[5, 2]]), int64([0, 2]), int32([4, 1]), 4)
    assert found.tolist() == [8, 21] and found.dtype == torch.int64


def test_a_step_without_tokens(stage):
    found = stage.compute_slot_mapping(int32([[5]]), int32([0, 0]), int64([]), 4)
    assert found.shape == (0,)


def deal(num_tokens, world_size, interleave):
    """Deal out positions as one deals cards: for each rank, its positions in order."""
    hands = [[] for _ in range(world_size)]
    for position in range(num_tokens):
        hands[position // interleave % world_size].append(position)
    return hands


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [20, 21, -1, -1, 22, 23, -1, -1, 8, 9, -1, -1]),
        (1, [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1, 8, 9]),
    ],
)
def test_two_ranks_by_hand(stage, rank, expected):
    """Row 5 2, block size 4, two tokens a turn: the first 8 tokens fill block 5 of both ranks."""
    positions, ranks = int64(list(range(12))), {"cp_world_size": 2, "cp_interleave": 2}
    found = stage.compute_slot_mapping(
        int32([[5, 2]]), int32([0, 12]), positions, 4, cp_rank=rank, **ranks
    )
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("world_size", "interleave", "block_size"),
    [(2, 1, 1), (2, 16, 16), (3, 2, 6), (4, 1, 16), (4, 8, 16), (8, 4, 4)],
)
def test_ranks_store_each_token_once(stage, world_size, interleave, block_size):
    """Over several programs: a token lies where its rank's n-th token lies, and nowhere else."""
    counts, width, num_padding = [0, 300, 1, 255, 40], 3, 3
    table, query_start_loc, _ = random_batch(counts, block_size=block_size, width=width)
    num_tokens, limit = sum(counts), width * block_size * world_size
    random = torch.Generator().manual_seed(1)
    positions = torch.randint(limit, (num_tokens + num_padding,), generator=random).tolist()
    times_stored = [0] * len(positions)
    for rank, hand in enumerate(deal(limit, world_size, interleave)):
        place = {position: n for n, position in enumerate(hand)}
        expected = [
            row[place[position] // block_size] * block_size + place[position] % block_size
            if position in place
            else -1
            for row, (begin, end) in zip(table, pairwise(query_start_loc), strict=True)
            for position in positions[begin:end]
        ]
        found = stage.compute_slot_mapping(
            int32(table), int32(query_start_loc), int64(positions), block_size,
            cp_world_size=world_size, cp_rank=rank, cp_interleave=interleave,
        ).tolist()  # fmt: skip
        assert found == expected + [-1] * num_padding, f"rank {rank} of {world_size}"
        times_stored = [n + (slot >= 0) for n, slot in zip(times_stored, found, strict=True)]
    assert times_stored == [1] * num_tokens + [0] * num_padding


@pytest.mark.parametrize("rank", [0, 1])
def test_no_slot_on_any_rank(stage, rank):
    """In front of a table, behind it, and behind the batch, up to the end of the buffer."""
    whole = int32([[9, 9, 9], [9, 5, 9]])
    positions = int64([-1, -2, -4, -5, 8, 11, 2**40, 0])
    out = torch.full((10,), 77, dtype=torch.int64, device=DEVICE)
    stage.compute_slot_mapping(
        whole[1:, 1:2], int32([0, 7]), positions, 4,
        out=out, cp_world_size=2, cp_rank=rank, cp_interleave=2,
    )  # fmt: skip
    assert out.tolist() == [-1] * 10, "one column of 4 holds positions 0 to 7 on two ranks"


REFUSED = [
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ({"block_size": 4.0}, "block_size is 4.0; it must be a whole number"),
    ({"block_table": int32([5, 2])}, r"block_table has shape \[2\]"),
    ({"query_start_loc": int32([0, 1, 2])}, r"query_start_loc has shape \[3\].*\[2\]"),
    ({"positions": int64([[0, 1]])}, r"positions has shape \[1, 2\]"),
    ({"positions": torch.rand(2, device=DEVICE)}, "positions is torch.float32"),
    ({"block_table": torch.rand(1, 2, device=DEVICE)}, "block_table is torch.float32"),
    ({"query_start_loc": torch.rand(2, device=DEVICE)}, "query_start_loc is torch.float32"),
    ({"positions": int64([0, 9, 1, 9])[::2]}, "positions is not contiguous"),
    ({"positions": torch.zeros(2, dtype=torch.int64, device="meta")}, "positions is on meta"),
    ({"out": int64([0])}, "out has 1 places for 2 tokens"),
    ({"out": int32([0, 0])}, "out is torch.int32"),
    ({"cp_world_size": 0}, "cp_world_size must be at least 1, got 0"),
    ({"cp_rank": 1}, "cp_rank is 1; 1 ranks"),
    ({"cp_world_size": 2, "cp_rank": 2}, "cp_rank is 2; 2 ranks"),
    ({"cp_world_size": 2, "cp_rank": -1}, "cp_rank is -1; 2 ranks"),
    ({"cp_world_size": 2, "cp_interleave": 0}, "cp_interleave must be at least 1, got 0"),
    ({"cp_world_size": 2, "cp_interleave": 3}, "cp_interleave 3 does not divide block_size 4"),
    ({"cp_world_size": 2, "cp_interleave": 8}, "cp_interleave 8 does not divide block_size 4"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {
        "block_table": int32([[5, 2]]),
        "query_start_loc": int32([0, 2]),
        "positions": int64([4, 1]),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        stage.compute_slot_mapping(**good | change)


@on_a_gpu
def test_a_captured_graph_stays_right(stage):
    table, query_start_loc, positions = (
        int32([[5, 2], [3, 9]]),
        int32([0, 1, 4]),
        int64([4, 0, 1, 2]),
    )
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    stage.compute_slot_mapping(table, query_start_loc, positions, 4, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a function that waited for the device could not be captured
        stage.compute_slot_mapping(table, query_start_loc, positions, 4, out=out)
    query_start_loc.copy_(int32([0, 2, 3]))
    positions.copy_(int64([6, 7, 5, 0]))
    graph.replay()
    assert out.tolist() == [10, 11, 37, -1]
