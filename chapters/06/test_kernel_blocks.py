"""Blocks of the manager, counted in the smaller blocks that a kernel takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

HEADS = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


def full(stage, block_size):
    return stage.FullAttentionSpec(block_size=block_size, **HEADS)


def mamba(stage, block_size):
    return stage.MambaSpec(block_size=block_size, shapes=((4, 4),), dtypes=(torch.float32,))


# From the manager's blocks to the kernel's.


@pytest.mark.parametrize(
    ("block_ids", "ratio", "expected"),
    [
        ([0, 1, 2], 2, [0, 1, 2, 3, 4, 5]),
        ([5, 2], 3, [15, 16, 17, 6, 7, 8]),
        ([7], 1, [7]),
        ([], 4, []),
    ],
)
def test_a_block_is_so_many_kernel_blocks_in_a_row(stage, block_ids, ratio, expected):
    assert stage.map_to_kernel_blocks(block_ids, ratio).tolist() == expected


def test_kernel_blocks_are_counted_in_64_bits(stage):
    ids = np.array([2**30], dtype=np.int32)
    assert stage.map_to_kernel_blocks(ids, 4).tolist() == [2**32 + i for i in range(4)]


@pytest.mark.parametrize("ratio", [0, -1, 1.5])
def test_a_block_is_at_least_one_kernel_block(stage, ratio):
    with pytest.raises(ValueError, match="blocks_per_kv_block"):
        stage.map_to_kernel_blocks([1], ratio)


@given(
    block_ids=st.lists(st.integers(0, 100), max_size=6),
    kernel_block_size=st.integers(1, 8),
    ratio=st.integers(1, 6),
)
def test_no_slot_moves(stage, block_ids, kernel_block_size, ratio):
    """In both units a table names the same slots in the same order."""
    kernel_blocks = stage.map_to_kernel_blocks(block_ids, ratio)
    block_size = kernel_block_size * ratio
    slots = [block * block_size + i for block in block_ids for i in range(block_size)]
    assert slots == [
        block * kernel_block_size + i
        for block in kernel_blocks.tolist()
        for i in range(kernel_block_size)
    ]


# The size that a kernel gets.


def test_the_managers_size_if_all_backends_take_it(stage):
    sizes = [[16, 32, 64], [stage.MultipleOf(16)]]
    assert stage.select_kernel_block_size(full(stage, 32), sizes) == 32
    assert stage.select_kernel_block_size(full(stage, 64), sizes) == 64, (
        "not split for its own sake"
    )


def test_a_multiple_alone_takes_large_blocks_whole(stage):
    assert stage.select_kernel_block_size(full(stage, 544), [[stage.MultipleOf(16)]]) == 544


@pytest.mark.parametrize(
    ("block_size", "expected", "why"),
    [
        (128, 64, "the largest that both take"),
        (96, 32, "64 does not divide 96"),
        (48, 16, "32 does not divide 48"),
    ],
)
def test_else_the_largest_named_size_that_divides(stage, block_size, expected, why):
    backends = [[16, 32, 64], [stage.MultipleOf(16)]]
    assert stage.select_kernel_block_size(full(stage, block_size), backends) == expected, why


def test_every_backend_must_take_it(stage):
    backends = [[16, 64], [16, 32], [stage.MultipleOf(8)]]
    assert stage.select_kernel_block_size(full(stage, 64), backends) == 16, (
        "64 and 32 are taken by one of the first two only"
    )


def test_a_size_named_by_one_and_a_multiple_for_another(stage):
    backends = [[stage.MultipleOf(16)], [stage.MultipleOf(8), 48]]
    assert stage.select_kernel_block_size(full(stage, 144), backends) == 144
    backends = [[stage.MultipleOf(32)], [24, 32, 96]]
    assert stage.select_kernel_block_size(full(stage, 192), backends) == 96
    assert stage.select_kernel_block_size(full(stage, 160), backends) == 32, (
        "96 does not divide 160, and 24 is no multiple of 32"
    )


@pytest.mark.parametrize(
    ("block_size", "make_backends"),
    [
        (40, lambda m: [[16, 32]]),  # no named size divides it
        (64, lambda m: [[16], [32]]),  # no size that both take
        (24, lambda m: [[m(16)]]),  # 16 would suit, but nobody names it
        (16, lambda m: [[16], []]),  # a backend that takes nothing
    ],
)
def test_no_size_at_all(stage, block_size, make_backends):
    with pytest.raises(ValueError, match=f"block_size {block_size} "):
        stage.select_kernel_block_size(full(stage, block_size), make_backends(stage.MultipleOf))


def test_a_state_is_never_split(stage):
    backends = [[16], [stage.MultipleOf(32)]]
    assert stage.select_kernel_block_size(mamba(stage, 544), backends) == 544
    group = stage.UniformTypeKVCacheSpecs(
        block_size=544, specs=(("a", mamba(stage, 544)), ("b", mamba(stage, 544)))
    )
    assert stage.select_kernel_block_size(group, backends) == 544


def test_layers_of_one_kind_are_split_together(stage):
    group = stage.UniformTypeKVCacheSpecs(
        block_size=64, specs=(("a", full(stage, 64)), ("b", full(stage, 64)))
    )
    assert stage.select_kernel_block_size(group, [[16, 32]]) == 32


@pytest.mark.parametrize("base", [0, -16, 2.5])
def test_a_multiple_of_nothing(stage, base):
    with pytest.raises(ValueError, match="base"):
        stage.MultipleOf(base)


def test_a_size_of_nothing(stage):
    with pytest.raises(ValueError, match="block size must be at least 1, got 0"):
        stage.select_kernel_block_size(full(stage, 12), [[0, 8]])


@given(
    block_size=st.integers(1, 256),
    backends=st.lists(
        st.lists(st.tuples(st.booleans(), st.sampled_from([1, 8, 12, 16, 32, 48, 64])), max_size=3),
        max_size=3,
    ),
)
def test_the_size_against_a_search(stage, block_size, backends):
    """From the largest to the smallest, one size after another."""

    def suits(size):
        return all(
            any(size % n == 0 if is_multiple else size == n for is_multiple, n in sizes)
            for sizes in backends
        )

    named = {n for sizes in backends for is_multiple, n in sizes if not is_multiple}
    candidates = [block_size, *(n for n in range(block_size, 0, -1) if n in named)]
    expected = next((n for n in candidates if block_size % n == 0 and suits(n)), None)
    supported = [[stage.MultipleOf(n) if m else n for m, n in sizes] for sizes in backends]
    if expected is None:
        with pytest.raises(ValueError):
            stage.select_kernel_block_size(full(stage, block_size), supported)
    else:
        assert stage.select_kernel_block_size(full(stage, block_size), supported) == expected
