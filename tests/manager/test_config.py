"""Blocks, tensors and lengths, against arithmetic by hand. A page has 65536 bytes here."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn.manager import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheTensor,
    Limits,
    NotEnoughMemory,
    SlidingWindowSpec,
    add_kv_sharing_layers,
    estimate_max_model_len,
    fit_max_model_len,
    get_groups_of_workers,
    get_kv_cache_configs,
    get_max_concurrency,
    get_num_cache_tokens,
    get_scheduler_config,
)

KV: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}
PAGE = 65536
FULL = FullAttentionSpec(**KV)
NARROW = FullAttentionSpec(**{**KV, "num_kv_heads": 4})
SLIDING = SlidingWindowSpec(**KV, sliding_window=1024)
SHORT = SlidingWindowSpec(**KV, sliding_window=17)
HYBRID = {"f0": FULL, "s0": SLIDING, "s1": SLIDING, "f1": FULL, "s2": SLIDING}
HYBRID_LIMITS = Limits(max_model_len=32768, max_num_batched_tokens=8192)
ONE_BLOCK = Limits(max_model_len=16)


def test_a_hybrid_model_in_a_gibibyte():
    (config,) = get_kv_cache_configs([HYBRID], [2**30], HYBRID_LIMITS)
    assert config.num_blocks == 8192  # 2**30 / 65536 / 2 layers a group
    assert config.kv_cache_tensors == (
        KVCacheTensor(PAGE * 8192, ("f0", "s0", "s1")),
        KVCacheTensor(PAGE * 8192, ("f1", "s2")),
    )
    # full: 32768 / 16 = 2048 blocks; sliding: (1023 + 8192) / 16 -> 576, and one, in two groups
    assert get_max_concurrency(config, HYBRID_LIMITS) == pytest.approx(8192 / 3202, rel=1e-12)
    assert round(get_max_concurrency(config, HYBRID_LIMITS), 4) == 2.5584
    assert get_num_cache_tokens(config, HYBRID_LIMITS) == 83833  # 8192 * 32768 / 3202 = 83833.7


def test_memory_is_cut_to_whole_blocks():
    (config,) = get_kv_cache_configs([{"a": FULL, "b": FULL}], [7 * PAGE + 5], ONE_BLOCK)
    assert config.num_blocks == 3
    assert config.kv_cache_tensors == (
        KVCacheTensor(3 * PAGE, ("a",)),
        KVCacheTensor(3 * PAGE, ("b",)),
    )


def test_layers_of_different_width_have_tensors_of_different_size():
    (config,) = get_kv_cache_configs([{"a": FULL, "b": NARROW}], [1_000_000], ONE_BLOCK)
    assert config.num_blocks == 10  # 1,000,000 / (65536 + 32768) = 10.2
    assert config.kv_cache_tensors == (
        KVCacheTensor(655360, ("a",)),
        KVCacheTensor(327680, ("b",)),
    )
    assert get_max_concurrency(config, Limits(max_model_len=64)) == 2.5  # 4 blocks each


def test_a_given_number_of_blocks_replaces_the_one_from_memory():
    (config,) = get_kv_cache_configs([{"a": FULL}], [10 * PAGE], ONE_BLOCK, num_blocks=7)
    assert config.num_blocks == 7
    assert config.kv_cache_tensors == (KVCacheTensor(7 * PAGE, ("a",)),)


@pytest.mark.parametrize("specs", [{}, {"e": EncoderOnlyAttentionSpec(**KV)}])
def test_without_layers_there_is_one_block_and_no_tensor(specs):
    (config,) = get_kv_cache_configs([specs], [0], ONE_BLOCK, num_blocks=5)
    assert (config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups) == (1, (), ())
    with pytest.raises(ValueError, match="no layer needs a block"):
        get_max_concurrency(config, ONE_BLOCK)


# Several workers.


def test_all_workers_get_the_number_of_the_smallest():
    workers = [{"f0": FULL}, {"f1": FULL, "f2": FULL}]
    first, second = get_kv_cache_configs(workers, [100 * PAGE, 100 * PAGE], ONE_BLOCK)
    assert first.num_blocks == second.num_blocks == 50
    assert first.kv_cache_tensors == (KVCacheTensor(50 * PAGE, ("f0",)),)
    assert second.kv_cache_tensors == tuple(
        KVCacheTensor(50 * PAGE, (name,)) for name in ("f1", "f2")
    )


def test_workers_have_the_same_groups_each_with_its_own_layers():
    workers: list[dict[str, KVCacheSpec]] = [
        {"f0": FULL, "f1": FULL},
        {"s0": SHORT, "s1": SHORT},
        {},
    ]
    configs = get_kv_cache_configs(workers, [200 * PAGE, 100 * PAGE, 0], ONE_BLOCK)
    layers = [[group.layer_names for group in config.kv_cache_groups] for config in configs]
    assert layers == [[("f0", "f1"), ()], [(), ("s0", "s1")], [(), ()]]
    specs = [[group.kv_cache_spec for group in config.kv_cache_groups] for config in configs]
    assert specs == [[FULL, SHORT]] * 3
    assert [config.num_blocks for config in configs] == [50, 50, 50]
    assert [len(config.kv_cache_tensors) for config in configs] == [2, 2, 0]


def test_different_widths_on_different_workers():
    workers = [{"a": FULL}, {"b": NARROW}]
    first, second = get_kv_cache_configs(workers, [10 * PAGE, 4 * PAGE], ONE_BLOCK)
    assert first.kv_cache_tensors == (KVCacheTensor(8 * PAGE, ("a",)),)
    assert second.kv_cache_tensors == (KVCacheTensor(8 * 32768, ("b",)),)


def test_two_specs_of_one_layer_are_refused():
    with pytest.raises(ValueError, match="layer a has two specs"):
        get_kv_cache_configs([{"a": FULL}, {"a": NARROW}], [PAGE, PAGE], ONE_BLOCK)
    both = get_kv_cache_configs([{"a": FULL}, {"a": FULL}], [PAGE, PAGE], ONE_BLOCK)
    assert both[0] == both[1]


@pytest.mark.parametrize("workers, memory", [([{"a": FULL}], [PAGE, PAGE]), ([], [])])
def test_each_worker_has_an_amount_of_memory(workers, memory):
    with pytest.raises(ValueError, match=f"{len(workers)} workers and {len(memory)} amounts"):
        get_kv_cache_configs(workers, memory, ONE_BLOCK)


def test_a_number_of_blocks_below_1_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        get_kv_cache_configs([{"a": FULL}], [PAGE], ONE_BLOCK, num_blocks=0)


def test_the_scheduler_sees_one_spec_a_group():
    configs = get_kv_cache_configs(
        [{"b": NARROW, "a": FULL}, {"c": FULL}], [10 * PAGE, 10 * PAGE], ONE_BLOCK
    )
    seen = get_scheduler_config(configs)
    assert [group.kv_cache_spec for group in seen.kv_cache_groups] == [NARROW]
    assert replace(seen, kv_cache_groups=configs[0].kv_cache_groups) == configs[0]
    with pytest.raises(ValueError, match=r"\[6, 5\] blocks"):
        get_scheduler_config([configs[0], replace(configs[1], num_blocks=5)])


# What fits.


@pytest.mark.parametrize("memory", [0, -1])
def test_no_memory_is_refused(memory):
    with pytest.raises(ValueError, match=f"worker 1 has {memory} bytes"):
        get_kv_cache_configs([{"a": FULL}, {"b": FULL}], [PAGE, memory], ONE_BLOCK)


@pytest.mark.parametrize(
    "memory, fits",
    [(10 * PAGE, 160), (10 * PAGE - 1, 144), (12 * PAGE, 192), (PAGE, 16), (PAGE - 1, 0)],
)
def test_the_error_names_the_length_that_would_fit(memory, fits):
    limits = Limits(max_model_len=200)  # 13 pages
    sentence = f"{fits} tokens would fit" if fits else "not even 1 token fits"
    with pytest.raises(NotEnoughMemory, match=f"200 needs {13 * PAGE} .*{sentence}") as caught:
        get_kv_cache_configs([{"a": FULL}], [memory], limits)
    assert caught.value.needed == 13 * PAGE
    assert (caught.value.available, caught.value.max_model_len) == (memory, fits)
    if fits:
        get_kv_cache_configs([{"a": FULL}], [memory], Limits(max_model_len=fits))


def test_the_null_block_is_not_counted():
    (config,) = get_kv_cache_configs([{"a": FULL}], [10 * PAGE], Limits(max_model_len=160))
    assert config.num_blocks == 10  # one of which is the null block


def test_a_window_counts_with_what_it_keeps():
    # A step of 16 tokens: the sliding layer keeps (16 + 16) / 16 blocks and one, so 10 blocks
    # leave 7 to the full one.
    groups = get_groups_of_workers([{"f": FULL, "s": SHORT}])[0]
    limits = Limits(max_model_len=1000, max_num_batched_tokens=16)
    assert estimate_max_model_len(groups, 10 * PAGE, limits) == 7 * 16
    # A step as long as the sequence: the sliding layer keeps all blocks and one.
    limits = Limits(max_model_len=1000)
    assert estimate_max_model_len(groups, 10 * PAGE, limits) == 4 * 16


def test_the_error_speaks_of_the_tightest_worker():
    with pytest.raises(NotEnoughMemory) as caught:
        get_kv_cache_configs(
            [{"a": FULL}, {"b": FULL, "c": FULL}], [10 * PAGE, 8 * PAGE], Limits(max_model_len=200)
        )
    assert caught.value.needed == 2 * 13 * PAGE
    assert (caught.value.available, caught.value.max_model_len) == (8 * PAGE, 64)


def test_the_length_is_fitted_to_the_smallest_worker():
    groups = get_groups_of_workers([{"a": FULL}, {"b": FULL, "c": FULL}, {}])
    limits = Limits(max_model_len=200, max_num_batched_tokens=32)
    fitted = fit_max_model_len(groups, [10 * PAGE, 8 * PAGE, 0], limits)
    assert fitted == replace(limits, max_model_len=64)
    assert fit_max_model_len(groups, [100 * PAGE] * 3, limits) == limits
    with pytest.raises(NotEnoughMemory, match="not even 1 token fits"):
        fit_max_model_len(groups, [10 * PAGE, PAGE, 0], limits)


@pytest.mark.parametrize("seed", range(10))
def test_the_length_is_the_longest(seed):
    """Length by length, from 1 on, with the need written out."""
    rng = random.Random(seed)
    step, window, pages = rng.randint(1, 64), rng.randint(1, 64), rng.randint(1, 40)
    groups = get_groups_of_workers(
        [{"f": FULL, "s": SlidingWindowSpec(**KV, sliding_window=window)}]
    )[0]
    longest = 0
    for length in range(1, 301):
        kept = min(window - 1 + step, length)
        if (length + 15) // 16 + (kept + 15) // 16 + 1 <= pages:
            longest = length
    limits = Limits(max_model_len=300, max_num_batched_tokens=step)
    assert estimate_max_model_len(groups, pages * PAGE, limits) == longest


# Layers that use the pages of another one.


def test_a_sharing_layer_joins_the_group_of_its_target():
    (config,) = get_kv_cache_configs([HYBRID], [2**30], HYBRID_LIMITS)
    shared = add_kv_sharing_layers(config, {"f2": "f1", "s3": "s1", "f3": "f1"})
    assert [group.layer_names for group in shared.kv_cache_groups] == [
        ("f0", "f1", "f2", "f3"),
        ("s0", "s2"),
        ("s1", "s3"),
    ]
    assert shared.kv_cache_tensors == config.kv_cache_tensors
    assert shared.num_blocks == 8192
    assert get_num_cache_tokens(shared, HYBRID_LIMITS) == 83833


@pytest.mark.parametrize(
    "targets, message",
    [({"f2": "f9"}, "f2 .* f9, which has none"), ({"f1": "f0"}, "f1 has pages of its own")],
)
def test_sharing_that_cannot_be(targets, message):
    (config,) = get_kv_cache_configs([HYBRID], [2**30], HYBRID_LIMITS)
    with pytest.raises(ValueError, match=message):
        add_kv_sharing_layers(config, targets)
