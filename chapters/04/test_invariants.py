"""What the map adds to the invariants: each breaks when its structure is spoiled by hand."""

import pytest
import torch

from pagedattn.cache import Config, InvariantError
from pagedattn.course.witness import DEVICE

UNKNOWN = bytes(32)  # a digest of nothing


@pytest.fixture
def healthy(stage):
    """[0:null 1:A 2:A 3:B 4:C 5:C 6:free 7:free 8:free]. Full are 1, 3 and 4; 1 and 3 are twins."""
    config = Config(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=9,
        block_size=4,
        max_seq_len=64,
        device=DEVICE,
        poison=True,
    )
    cache = stage.build_cache(config)
    cache.add("A", range(6))
    cache.add("B", range(4))
    cache.add("C", range(10, 15))
    batch = cache.reserve({"A": 6, "B": 4, "C": 5})
    for layer in range(2):
        q, k, v = torch.randn(3, 15, 2, 4, device=DEVICE).unbind()
        batch.attend(layer, q, k, v)
    batch.commit()
    cache.check_invariants()
    return cache


def digest(cache, block_id):
    return cache.pool.blocks[block_id].block_hash


def assert_breaks(cache, invariant, words):
    with pytest.raises(InvariantError) as failure:
        cache.check_invariants()
    message = str(failure.value)
    assert message.startswith(invariant) and words in message, (
        f"expected {invariant} to break ({words}), got: {message}"
    )
    assert "0:null" in message, f"the message does not show the pool: {message}"


def test_the_fixture_holds_twins(healthy):
    assert [digest(healthy, i) is None for i in (1, 2, 3, 4, 5)] == [0, 1, 0, 0, 1]
    assert digest(healthy, 1) == digest(healthy, 3) != digest(healthy, 4)


def test_i5_a_block_with_a_digest_is_full(healthy):
    block = healthy.pool.blocks[2]  # 2 of its 4 slots are computed
    healthy.k_cache[:, 2] = healthy.v_cache[:, 2] = 1.0  # so that I7 holds
    block.block_hash = UNKNOWN
    healthy.pool.cached_blocks[UNKNOWN] = block
    assert_breaks(healthy, "I5", "block 2 of sequence 'A'")


@pytest.mark.parametrize("block_id", [4, 6], ids=["of another digest", "without one"])
def test_i6_the_map_leads_to_a_block_of_its_digest(healthy, block_id):
    healthy.pool.cached_blocks[digest(healthy, 1)] = healthy.pool.blocks[block_id]
    assert_breaks(healthy, "I6", f"block {block_id}")


def test_i6_twins_carry_their_digest(healthy):
    """Block 4 stands in two places of the map, and carries one of the digests."""
    twins = healthy.pool.duplicates
    twins[digest(healthy, 4)] = twins.pop(digest(healthy, 1))
    assert_breaks(healthy, "I6", "block 3")


def test_i6_a_digest_stands_in_the_map(healthy):
    del healthy.pool.cached_blocks[digest(healthy, 4)]
    assert_breaks(healthy, "I6", "block 4")


def test_i6_a_twin_stands_in_the_map(healthy):
    del healthy.pool.duplicates[digest(healthy, 3)]
    assert_breaks(healthy, "I6", "block 3")


def test_i6_a_digest_without_twins_has_no_entry(healthy):
    twins = healthy.pool.duplicates
    twins[digest(healthy, 4)] = type(twins[digest(healthy, 1)])()
    assert_breaks(healthy, "I6", "twins")


def test_i6_twins_have_a_first(healthy):
    del healthy.pool.cached_blocks[digest(healthy, 1)]
    assert_breaks(healthy, "I6", "twins")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_i7_what_can_be_found_holds_numbers(healthy, name):
    healthy.free("C")
    healthy.check_invariants()
    getattr(healthy, name)[1, 4, 3, 0, 0] = float("nan")  # free, and it can be found
    assert_breaks(healthy, "I7", "")
