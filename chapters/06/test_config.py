"""Blocks, tensors and lengths, against arithmetic by hand. A page has 65536 bytes here."""

import random
from dataclasses import replace

import pytest
import torch

KV = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}
PAGE = 65536


def full(stage, **sizes):
    return stage.FullAttentionSpec(**(KV | sizes))


def narrow(stage):
    return full(stage, num_kv_heads=4)


def sliding(stage, window):
    return stage.SlidingWindowSpec(**KV, sliding_window=window)


def hybrid(stage):
    window = sliding(stage, 1024)
    return {"f0": full(stage), "s0": window, "s1": window, "f1": full(stage), "s2": window}


def hybrid_limits(stage):
    return stage.Limits(max_model_len=32768, max_num_batched_tokens=8192)


def one_block(stage):
    return stage.Limits(max_model_len=16)


def test_a_hybrid_model_in_a_gibibyte(stage):
    (config,) = stage.get_kv_cache_configs([hybrid(stage)], [2**30], hybrid_limits(stage))
    assert config.num_blocks == 8192  # 2**30 / 65536 / 2 layers a group
    assert config.kv_cache_tensors == (
        stage.KVCacheTensor(PAGE * 8192, ("f0", "s0", "s1")),
        stage.KVCacheTensor(PAGE * 8192, ("f1", "s2")),
    )
    # full: 32768 / 16 = 2048 blocks; sliding: (1023 + 8192) / 16 -> 576, and one, in two groups
    assert stage.get_max_concurrency(config, hybrid_limits(stage)) == pytest.approx(
        8192 / 3202, rel=1e-12
    )
    assert round(stage.get_max_concurrency(config, hybrid_limits(stage)), 4) == 2.5584
    assert (
        stage.get_num_cache_tokens(config, hybrid_limits(stage)) == 83833
    )  # 8192 * 32768 / 3202 = 83833.7


def test_memory_is_cut_to_whole_blocks(stage):
    (config,) = stage.get_kv_cache_configs(
        [{"a": full(stage), "b": full(stage)}], [7 * PAGE + 5], one_block(stage)
    )
    assert config.num_blocks == 3
    assert config.kv_cache_tensors == (
        stage.KVCacheTensor(3 * PAGE, ("a",)),
        stage.KVCacheTensor(3 * PAGE, ("b",)),
    )


def test_layers_of_different_width_have_tensors_of_different_size(stage):
    (config,) = stage.get_kv_cache_configs(
        [{"a": full(stage), "b": narrow(stage)}], [1_000_000], one_block(stage)
    )
    assert config.num_blocks == 10  # 1,000,000 / (65536 + 32768) = 10.2
    assert config.kv_cache_tensors == (
        stage.KVCacheTensor(655360, ("a",)),
        stage.KVCacheTensor(327680, ("b",)),
    )
    assert stage.get_max_concurrency(config, stage.Limits(max_model_len=64)) == 2.5  # 4 blocks each


def test_a_given_number_of_blocks_replaces_the_one_from_memory(stage):
    (config,) = stage.get_kv_cache_configs(
        [{"a": full(stage)}], [10 * PAGE], one_block(stage), num_blocks=7
    )
    assert config.num_blocks == 7
    assert config.kv_cache_tensors == (stage.KVCacheTensor(7 * PAGE, ("a",)),)


@pytest.mark.parametrize("layers", [[], ["e"]])
def test_without_layers_there_is_one_block_and_no_tensor(stage, layers):
    specs = {name: stage.EncoderOnlyAttentionSpec(**KV) for name in layers}
    (config,) = stage.get_kv_cache_configs([specs], [0], one_block(stage), num_blocks=5)
    assert (config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups) == (1, (), ())
    with pytest.raises(ValueError, match="no layer needs a block"):
        stage.get_max_concurrency(config, one_block(stage))


# Several workers.


def test_all_workers_get_the_number_of_the_smallest(stage):
    workers = [{"f0": full(stage)}, {"f1": full(stage), "f2": full(stage)}]
    first, second = stage.get_kv_cache_configs(workers, [100 * PAGE, 100 * PAGE], one_block(stage))
    assert first.num_blocks == second.num_blocks == 50
    assert first.kv_cache_tensors == (stage.KVCacheTensor(50 * PAGE, ("f0",)),)
    assert second.kv_cache_tensors == tuple(
        stage.KVCacheTensor(50 * PAGE, (name,)) for name in ("f1", "f2")
    )


def test_workers_have_the_same_groups_each_with_its_own_layers(stage):
    workers = [
        {"f0": full(stage), "f1": full(stage)},
        {"s0": sliding(stage, 17), "s1": sliding(stage, 17)},
        {},
    ]
    configs = stage.get_kv_cache_configs(workers, [200 * PAGE, 100 * PAGE, 0], one_block(stage))
    layers = [[group.layer_names for group in config.kv_cache_groups] for config in configs]
    assert layers == [[("f0", "f1"), ()], [(), ("s0", "s1")], [(), ()]]
    specs = [[group.kv_cache_spec for group in config.kv_cache_groups] for config in configs]
    assert specs == [[full(stage), sliding(stage, 17)]] * 3
    assert [config.num_blocks for config in configs] == [50, 50, 50]
    assert [len(config.kv_cache_tensors) for config in configs] == [2, 2, 0]


def test_different_widths_on_different_workers(stage):
    workers = [{"a": full(stage)}, {"b": narrow(stage)}]
    first, second = stage.get_kv_cache_configs(workers, [10 * PAGE, 4 * PAGE], one_block(stage))
    assert first.kv_cache_tensors == (stage.KVCacheTensor(8 * PAGE, ("a",)),)
    assert second.kv_cache_tensors == (stage.KVCacheTensor(8 * 32768, ("b",)),)


def test_two_specs_of_one_layer_are_refused(stage):
    with pytest.raises(ValueError, match="layer a has two specs"):
        stage.get_kv_cache_configs(
            [{"a": full(stage)}, {"a": narrow(stage)}], [PAGE, PAGE], one_block(stage)
        )
    both = stage.get_kv_cache_configs(
        [{"a": full(stage)}, {"a": full(stage)}], [PAGE, PAGE], one_block(stage)
    )
    assert both[0] == both[1]


@pytest.mark.parametrize("num_workers, memory", [(1, [PAGE, PAGE]), (0, [])])
def test_each_worker_has_an_amount_of_memory(stage, num_workers, memory):
    workers = [{"a": full(stage)}] * num_workers
    with pytest.raises(ValueError, match=f"{num_workers} workers and {len(memory)} amounts"):
        stage.get_kv_cache_configs(workers, memory, one_block(stage))


def test_a_number_of_blocks_below_1_is_refused(stage):
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        stage.get_kv_cache_configs([{"a": full(stage)}], [PAGE], one_block(stage), num_blocks=0)


def test_the_scheduler_sees_one_spec_a_group(stage):
    configs = stage.get_kv_cache_configs(
        [{"b": narrow(stage), "a": full(stage)}, {"c": full(stage)}],
        [10 * PAGE, 10 * PAGE],
        one_block(stage),
    )
    seen = stage.get_scheduler_config(configs)
    assert [group.kv_cache_spec for group in seen.kv_cache_groups] == [narrow(stage)]
    assert replace(seen, kv_cache_groups=configs[0].kv_cache_groups) == configs[0]
    with pytest.raises(ValueError, match=r"\[6, 5\] blocks"):
        stage.get_scheduler_config([configs[0], replace(configs[1], num_blocks=5)])


# What fits.


@pytest.mark.parametrize("memory", [0, -1])
def test_no_memory_is_refused(stage, memory):
    with pytest.raises(ValueError, match=f"worker 1 has {memory} bytes"):
        stage.get_kv_cache_configs(
            [{"a": full(stage)}, {"b": full(stage)}], [PAGE, memory], one_block(stage)
        )


@pytest.mark.parametrize(
    "memory, fits",
    [(10 * PAGE, 160), (10 * PAGE - 1, 144), (12 * PAGE, 192), (PAGE, 16), (PAGE - 1, 0)],
)
def test_the_error_names_the_length_that_would_fit(stage, memory, fits):
    limits = stage.Limits(max_model_len=200)  # 13 pages
    sentence = f"{fits} tokens would fit" if fits else "not even 1 token fits"
    with pytest.raises(
        stage.NotEnoughMemory, match=f"200 needs {13 * PAGE} .*{sentence}"
    ) as caught:
        stage.get_kv_cache_configs([{"a": full(stage)}], [memory], limits)
    assert caught.value.needed == 13 * PAGE
    assert (caught.value.available, caught.value.max_model_len) == (memory, fits)
    if fits:
        stage.get_kv_cache_configs([{"a": full(stage)}], [memory], stage.Limits(max_model_len=fits))


def test_the_null_block_is_not_counted(stage):
    (config,) = stage.get_kv_cache_configs(
        [{"a": full(stage)}], [10 * PAGE], stage.Limits(max_model_len=160)
    )
    assert config.num_blocks == 10  # one of which is the null block


def test_a_window_counts_with_what_it_keeps(stage):
    # A step of 16 tokens: the sliding layer keeps (16 + 16) / 16 blocks and one, so 10 blocks
    # leave 7 to the full one.
    groups = stage.get_groups_of_workers([{"f": full(stage), "s": sliding(stage, 17)}])[0]
    limits = stage.Limits(max_model_len=1000, max_num_batched_tokens=16)
    assert stage.estimate_max_model_len(groups, 10 * PAGE, limits) == 7 * 16
    # A step as long as the sequence: the sliding layer keeps all blocks and one.
    limits = stage.Limits(max_model_len=1000)
    assert stage.estimate_max_model_len(groups, 10 * PAGE, limits) == 4 * 16


def test_the_error_speaks_of_the_tightest_worker(stage):
    with pytest.raises(stage.NotEnoughMemory) as caught:
        stage.get_kv_cache_configs(
            [{"a": full(stage)}, {"b": full(stage), "c": full(stage)}],
            [10 * PAGE, 8 * PAGE],
            stage.Limits(max_model_len=200),
        )
    assert caught.value.needed == 2 * 13 * PAGE
    assert (caught.value.available, caught.value.max_model_len) == (8 * PAGE, 64)


def test_the_length_is_fitted_to_the_smallest_worker(stage):
    groups = stage.get_groups_of_workers(
        [{"a": full(stage)}, {"b": full(stage), "c": full(stage)}, {}]
    )
    limits = stage.Limits(max_model_len=200, max_num_batched_tokens=32)
    fitted = stage.fit_max_model_len(groups, [10 * PAGE, 8 * PAGE, 0], limits)
    assert fitted == replace(limits, max_model_len=64)
    assert stage.fit_max_model_len(groups, [100 * PAGE] * 3, limits) == limits
    with pytest.raises(stage.NotEnoughMemory, match="not even 1 token fits"):
        stage.fit_max_model_len(groups, [10 * PAGE, PAGE, 0], limits)


@pytest.mark.parametrize("seed", range(10))
def test_the_length_is_the_longest(stage, seed):
    """Length by length, from 1 on, with the need written out."""
    rng = random.Random(seed)
    step, window, pages = rng.randint(1, 64), rng.randint(1, 64), rng.randint(1, 40)
    groups = stage.get_groups_of_workers(
        [{"f": full(stage), "s": stage.SlidingWindowSpec(**KV, sliding_window=window)}]
    )[0]
    longest = 0
    for length in range(1, 301):
        kept = min(window - 1 + step, length)
        if (length + 15) // 16 + (kept + 15) // 16 + 1 <= pages:
            longest = length
    limits = stage.Limits(max_model_len=300, max_num_batched_tokens=step)
    assert stage.estimate_max_model_len(groups, pages * PAGE, limits) == longest


# Layers that use the pages of another one.


def test_a_sharing_layer_joins_the_group_of_its_target(stage):
    (config,) = stage.get_kv_cache_configs([hybrid(stage)], [2**30], hybrid_limits(stage))
    shared = stage.add_kv_sharing_layers(config, {"f2": "f1", "s3": "s1", "f3": "f1"})
    assert [group.layer_names for group in shared.kv_cache_groups] == [
        ("f0", "f1", "f2", "f3"),
        ("s0", "s2"),
        ("s1", "s3"),
    ]
    assert shared.kv_cache_tensors == config.kv_cache_tensors
    assert shared.num_blocks == 8192
    assert stage.get_num_cache_tokens(shared, hybrid_limits(stage)) == 83833


@pytest.mark.parametrize(
    "targets, message",
    [({"f2": "f9"}, "f2 .* f9, which has none"), ({"f1": "f0"}, "f1 has pages of its own")],
)
def test_sharing_that_cannot_be(stage, targets, message):
    (config,) = stage.get_kv_cache_configs([hybrid(stage)], [2**30], hybrid_limits(stage))
    with pytest.raises(ValueError, match=message):
        stage.add_kv_sharing_layers(config, targets)
