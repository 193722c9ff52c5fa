"""Where a token goes: from position to slot, and from slot into the cache."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedattn.course.witness import DEVICE


def slots(stage, rows, query_start_loc, positions, block_size):
    """``compute_slot_mapping`` of lists."""
    width = max(len(row) for row in rows)
    padded = [row + [0] * (width - len(row)) for row in rows]
    return stage.compute_slot_mapping(
        torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        torch.tensor(query_start_loc, dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        block_size,
    )


@pytest.mark.contract
def test_by_hand(stage):
    found = slots(stage, [[5, 2, 7]], [0, 10], range(10), 4)
    assert found.dtype == torch.int64
    assert found.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29], (
        "positions 0-3 lie in block 5 (slots 20-23), 4-7 in block 2 (8-11), 8-9 in block 7 (28, 29)"
    )


@pytest.mark.contract
def test_each_token_uses_the_row_of_its_own_sequence(stage):
    rows = [[5, 2, 7], [3], [1, 4]]
    positions = [9, 0, 1, 2, 3, 4]  # a decode, a whole prompt, a chunk over a block's end
    found = slots(stage, rows, [0, 1, 4, 6], positions, 4).tolist()
    assert found == [29, 12, 13, 14, 7, 16], (
        "rows 5 2 7 | 3 | 1 4, block size 4: position 9 | positions 0 1 2 | positions 3 4"
    )


@pytest.mark.contract
def test_a_sequence_without_tokens_takes_no_slot(stage):
    found = slots(stage, [[5], [6], [7]], [0, 1, 1, 2], [2, 3], 4).tolist()
    assert found == [22, 31], "the second of three sequences has no token in this batch"


@pytest.mark.contract
def test_padding_behind_the_last_token_has_no_slot(stage):
    found = slots(stage, [[5, 2], [3, 0]], [0, 1, 2], [4, 0, 0, 0, 7], 4).tolist()
    assert found == [8, 12, -1, -1, -1], "query_start_loc ends at 2: the other 3 tokens are padding"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("block_size", "expected"),
    [  # row 4 9 6, positions 0, block_size, 2 * block_size + (block_size - 1)
        (1, [4, 9, 6]),
        (3, [12, 27, 20]),
        (8, [32, 72, 55]),
        (16, [64, 144, 111]),
        (20, [80, 180, 139]),
        (256, [1024, 2304, 1791]),
    ],
)
def test_block_sizes(stage, block_size, expected):
    positions = [0, block_size, 3 * block_size - 1]
    assert slots(stage, [[4, 9, 6]], [0, 3], positions, block_size).tolist() == expected, (
        f"block size {block_size}, row 4 9 6, positions {positions}"
    )


@pytest.mark.contract
def test_block_size_544(stage):
    [slot] = slots(stage, [[8, 3]], [0, 1], [1000], 544).tolist()
    assert slot == 3 * 544 + 456, "with 544 slots a block, position 1000 is block 1, offset 456"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("block_id", "block_size", "expected"),
    [
        (2**27, 16, 2**31),
        (200_000_000, 16, 3_200_000_000),
        (2**31 - 1, 16, 34_359_738_352),
        # Counted in numbers instead of tokens, so that real pools reach it: a block of 16 tokens,
        # 32 heads and 128 numbers a head; a block of 480 * 576 numbers.
        (65_535, 16 * 32 * 128, 4_294_901_760),
        (7_767, 480 * 576, 2_147_420_160),
        (7_768, 480 * 576, 2_147_696_640),
    ],
)
def test_slots_do_not_fit_into_32_bits(stage, block_id, block_size, expected):
    found = slots(stage, [[0, block_id]], [0, 2], [block_size, 2 * block_size - 1], block_size)
    assert found.tolist() == [expected, expected + block_size - 1], (
        f"block {block_id} times {block_size}; 32 bits end at {2**31 - 1}"
    )


@pytest.mark.contract
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_agrees_with_a_loop(stage, data):
    block_size = data.draw(st.integers(1, 20), "block_size")
    spans = st.tuples(st.integers(0, 50), st.integers(0, 12))  # first position, tokens
    batch = data.draw(st.lists(spans, min_size=1, max_size=4), "batch")
    rows = [
        data.draw(st.lists(st.integers(1, 10**6), min_size=62 // block_size + 1, max_size=63))
        for _ in batch
    ]
    num_padding = data.draw(st.integers(0, 3), "padding")
    positions, query_start_loc, expected = [], [0], []
    for (first, count), row in zip(batch, rows, strict=True):
        for position in range(first, first + count):
            positions.append(position)
            expected.append(row[position // block_size] * block_size + position % block_size)
        query_start_loc.append(len(positions))
    positions += [0] * num_padding
    expected += [-1] * num_padding
    assert slots(stage, rows, query_start_loc, positions, block_size).tolist() == expected


def random_kv(num_tokens, num_heads=2, head_dim=4):
    """K and V of tokens: random, so that no two of their numbers are equal."""
    return torch.randn(2, num_tokens, num_heads, head_dim, device=DEVICE).unbind()


def filled_caches(num_blocks, block_size, num_heads=2, head_dim=4):
    """A K and a V cache that hold old numbers."""
    return torch.randn(2, num_blocks, block_size, num_heads, head_dim, device=DEVICE).unbind()


@pytest.mark.contract
def test_a_token_goes_to_its_slot_and_nowhere_else(stage):
    torch.manual_seed(0)
    k_cache, v_cache = filled_caches(num_blocks=5, block_size=3)
    old = k_cache.clone(), v_cache.clone()
    k, v = random_kv(3)
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([7, 3, 14], device=DEVICE))
    for name, cache, before, new in zip("KV", (k_cache, v_cache), old, (k, v), strict=True):
        expected = before.clone()
        expected[2, 1], expected[1, 0], expected[4, 2] = (
            new  # 7 = 2 * 3 + 1, 3 = 1 * 3, 14 = 4 * 3 + 2
        )
        right = torch.equal(cache, expected)
        assert right, f"{name}: slots 7, 3, 14 take tokens 0, 1, 2, and nothing else changes"


@pytest.mark.contract
def test_slot_minus_one_is_never_written(stage):
    torch.manual_seed(0)
    k_cache, v_cache = filled_caches(num_blocks=5, block_size=16)
    old = k_cache.clone(), v_cache.clone()
    k, v = random_kv(3)
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([3, -1, -1], device=DEVICE))
    for name, cache, before, new in zip("KV", (k_cache, v_cache), old, (k, v), strict=True):
        last_kept = torch.equal(cache[4, 15], before[4, 15])
        assert last_kept, (
            f"{name}: slot 79, the last one, was overwritten by a token whose slot is -1"
        )
        before[0, 3] = new[0]
        only_slot_3 = torch.equal(cache, before)
        assert only_slot_3, f"{name}: only slot 3 may change"


@pytest.mark.contract
def test_slot_zero_is_a_slot(stage):
    """Only -1 means "do not store"; who may use slot 0 is for the pool to say."""
    k_cache, v_cache = filled_caches(num_blocks=2, block_size=2)
    k, v = random_kv(1)
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([0], device=DEVICE))
    assert torch.equal(k_cache[0, 0], k[0]) and torch.equal(v_cache[0, 0], v[0])


@pytest.mark.contract
def test_a_batch_of_padding_writes_nothing(stage):
    torch.manual_seed(0)
    k_cache, v_cache = filled_caches(num_blocks=3, block_size=2)
    old = k_cache.clone(), v_cache.clone()
    stage.write_kv(k_cache, v_cache, *random_kv(2), torch.tensor([-1, -1], device=DEVICE))
    kept = torch.equal(k_cache, old[0]) and torch.equal(v_cache, old[1])
    assert kept, "both tokens have slot -1, so no slot may change"


@pytest.mark.contract
def test_padded_strides(stage):
    """A layer's cache may be a view: more numbers between its blocks, tokens and heads."""
    torch.manual_seed(0)
    whole = torch.randn(2, 5, 2 * 3, 2 + 1, 4 + 5, device=DEVICE)
    before = whole.clone()
    k_cache, v_cache = whole[:, :, ::2, :2, :4].unbind()
    k, v = random_kv(2)
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([4, 13], device=DEVICE))
    for of_kv, new in enumerate((k, v)):
        before[of_kv, 1, 2, :2, :4] = new[0]  # slot 4 = block 1, offset 1: row 2 of the whole
        before[of_kv, 4, 2, :2, :4] = new[1]  # slot 13 = block 4, offset 1
    assert torch.equal(whole, before), "what lies between the slots belongs to somebody else"


def test_blocks_further_apart_than_32_bits(stage, tmp_path):
    """Block 2 begins 2^31 numbers behind block 0. The file is sparse: it takes no such space."""
    stride = 2**30
    numbers = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=4 * stride + 1, dtype=torch.float16
    )
    k_cache = numbers[: 3 * stride].view(3, stride)[:, :2].view(3, 1, 1, 2)
    v_cache = numbers[2:][: 3 * stride].view(3, stride)[:, :2].view(3, 1, 1, 2)
    k, v = torch.randn(2, 2, 1, 2, dtype=torch.float16).unbind()
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([1, 2]))
    for name, cache, new in (("K", k_cache, k), ("V", v_cache, v)):
        assert not cache[0].any(), f"{name}: blocks 1 and 2 were written, and block 0 changed"
        assert torch.equal(cache[1:, 0], new), f"{name}: block 1 takes token 0, block 2 token 1"
