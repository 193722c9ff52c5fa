"""Which layers share a block table, against groups written down by hand."""

from typing import Any

import pytest
import torch

from pagedattn.manager import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    Limits,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UnequalPages,
    UniformTypeKVCacheSpecs,
    get_kv_cache_groups,
    unify_page_sizes,
)

KV: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}
NARROW = {**KV, "num_kv_heads": 4}  # half a page
FULL = FullAttentionSpec(**KV)
SLIDING = SlidingWindowSpec(**KV, sliding_window=1024)
CHUNKED = ChunkedLocalAttentionSpec(**KV, attention_chunk_size=512)
# 16384 fp32 numbers: the 65536 bytes of the others' pages
MAMBA = MambaSpec(block_size=4096, shapes=((128, 128),), dtypes=(torch.float32,))


def names(groups: tuple[KVCacheGroupSpec, ...]) -> list[tuple[str, ...]]:
    return [group.layer_names for group in groups]


def layers(**kinds: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"{k}{i}": spec for k, (count, spec) in kinds.items() for i in range(count)}


def test_no_layers_no_groups():
    assert get_kv_cache_groups({}) == ()


def test_an_encoder_keeps_nothing_and_is_in_no_group():
    encoder = EncoderOnlyAttentionSpec(**KV)
    assert get_kv_cache_groups({"e": encoder}) == ()
    assert names(get_kv_cache_groups({"e": encoder, "f": FULL})) == [("f",)]


@pytest.mark.parametrize("spec", [FULL, SLIDING, CHUNKED, MAMBA, CrossAttentionSpec(**KV)])
def test_equal_layers_are_one_group(spec):
    groups = get_kv_cache_groups({"a": spec, "b": spec, "c": spec})
    assert groups == (KVCacheGroupSpec(("a", "b", "c"), spec),)


def test_a_recorded_window_makes_no_other_group():
    window = FullAttentionSpec(**KV, sliding_window=1024)
    groups = get_kv_cache_groups({"a": FULL, "b": window, "c": FULL})
    assert groups == (KVCacheGroupSpec(("a", "b", "c"), window),)


@pytest.mark.parametrize("sizes", [KV, NARROW])  # of one width, and of two
def test_two_recorded_windows_in_one_group_are_refused(sizes):
    specs = {
        "a": FullAttentionSpec(**KV, sliding_window=1024),
        "b": FullAttentionSpec(**sizes, sliding_window=512),
    }
    with pytest.raises(ValueError, match=r"different windows .*512.*1024|1024.*512"):
        get_kv_cache_groups(specs)


@pytest.mark.parametrize(
    "wide, narrow",
    [
        (FULL, FullAttentionSpec(**NARROW)),
        (SLIDING, SlidingWindowSpec(**NARROW, sliding_window=1024)),
        (CHUNKED, ChunkedLocalAttentionSpec(**NARROW, attention_chunk_size=512)),
    ],
)
def test_layers_that_differ_in_width_are_one_group(wide, narrow):
    groups = get_kv_cache_groups({"a": wide, "b": narrow, "c": wide})
    assert names(groups) == [("a", "b", "c")]
    spec = groups[0].kv_cache_spec
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    assert dict(spec.specs) == {"a": wide, "b": narrow, "c": wide}
    assert spec.block_size == 16
    assert spec.page_size_bytes == 65536 + 32768 + 65536
    limits = Limits(max_model_len=1000, max_num_batched_tokens=100)
    assert spec.max_num_pages(limits) == wide.max_num_pages(limits)


def test_latent_layers_differ_from_full_ones_in_width_only():
    mla = MLAAttentionSpec(**{**KV, "num_kv_heads": 1, "head_size": 576})
    groups = get_kv_cache_groups({"a": mla, "b": FULL})
    assert names(groups) == [("a", "b")]
    assert groups[0].kv_cache_spec.page_size_bytes == 16 * 576 * 2 + 65536


@pytest.mark.parametrize(
    "other",
    [
        SlidingWindowSpec(**NARROW, sliding_window=512),  # another window
        SlidingWindowSpec(
            **{**NARROW, "block_size": 32}, sliding_window=1024
        ),  # another block size
    ],
)
def test_another_window_or_block_size_is_another_group(other):
    groups = get_kv_cache_groups({"a": SLIDING, "b": other})
    assert names(groups) == [("a",), ("b",)]


def test_three_sliding_layers_of_five_fill_two_groups():
    specs = {"f0": FULL, "s0": SLIDING, "s1": SLIDING, "f1": FULL, "s2": SLIDING}
    assert get_kv_cache_groups(specs) == (
        KVCacheGroupSpec(("f0", "f1"), FULL),
        KVCacheGroupSpec(("s0", "s2"), SLIDING),
        KVCacheGroupSpec(("s1",), SLIDING),
    )


def test_groups_come_in_the_order_of_the_layers():
    specs = {"s0": SLIDING, "f0": FULL, "s1": SLIDING}  # 2 is not below 1.5 * 1
    assert names(get_kv_cache_groups(specs)) == [("s0",), ("s1",), ("f0",)]


@pytest.mark.parametrize(
    "full, sliding, sizes",
    [
        (13, 12, [13, 12]),  # 13 < 18: a group for each kind
        (4, 5, [4, 5]),  # 5 < 6
        (4, 6, [4, 3, 3]),  # 6 is not below 6: groups of at most 4
        (2, 5, [2, 2, 2, 1]),
        (10, 1, [1] * 11),
    ],
)
def test_group_sizes(full, sliding, sizes):
    groups = get_kv_cache_groups(layers(f=(full, FULL), s=(sliding, SLIDING)))
    assert [len(group.layer_names) for group in groups] == sizes


def test_layers_are_dealt_in_turn():
    groups = get_kv_cache_groups(layers(f=(2, FULL), s=(5, SLIDING)))
    assert names(groups)[1:] == [("s0", "s3"), ("s1", "s4"), ("s2",)]


def test_three_kinds():
    groups = get_kv_cache_groups(layers(m=(4, MAMBA), f=(1, FULL), s=(1, SLIDING)))
    assert names(groups) == [("m0",), ("m1",), ("m2",), ("m3",), ("f0",), ("s0",)]


def test_smaller_pages_get_more_tokens():
    eighth = SlidingWindowSpec(**{**KV, "head_size": 16}, sliding_window=64)
    groups = get_kv_cache_groups({"f": FULL, "s": eighth})
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 128]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {65536}


def test_layers_alike_after_unification_share_a_group():
    specs = {
        "f0": FULL,
        "s0": SlidingWindowSpec(**NARROW, sliding_window=64),
        "s1": SlidingWindowSpec(**{**NARROW, "block_size": 32}, sliding_window=64),
    }
    assert get_kv_cache_groups(specs)[1].kv_cache_spec == specs["s1"]


def test_padding_makes_pages_equal():
    odd = SlidingWindowSpec(**{**KV, "num_kv_heads": 3}, sliding_window=64)  # 24576 bytes
    with pytest.raises(UnequalPages, match=r"layer s has 24576 bytes.* 65536"):
        get_kv_cache_groups({"f": FULL, "s": odd})
    padded = SlidingWindowSpec(
        **{**KV, "num_kv_heads": 3}, sliding_window=64, page_size_padded=32768
    )
    spec = get_kv_cache_groups({"f": FULL, "s": padded})[1].kv_cache_spec
    assert (spec.block_size, spec.page_size_bytes) == (32, 65536)


def test_a_state_does_not_grow_with_its_block():
    small: dict[str, Any] = {"block_size": 4096, "shapes": ((64, 128),), "dtypes": (torch.float32,)}
    for padded in (None, 32768):
        state = MambaSpec(**small, page_size_padded=padded)
        with pytest.raises(UnequalPages, match="layer m has 32768 bytes whatever"):
            unify_page_sizes({"f": FULL, "m": state})
    filled = MambaSpec(**small, page_size_padded=65536)
    assert unify_page_sizes({"f": FULL, "m": filled}) == {"f": FULL, "m": filled}


def test_unequal_pages_are_both_a_value_error_and_not_implemented():
    assert issubclass(UnequalPages, ValueError) and issubclass(UnequalPages, NotImplementedError)


def test_without_hybrid_groups_all_layers_keep_all_tokens():
    groups = get_kv_cache_groups({"f": FULL, "s": SLIDING}, enable_hybrid=False)
    window = FullAttentionSpec(**KV, sliding_window=1024)
    assert groups == (KVCacheGroupSpec(("f", "s"), window),)
    groups = get_kv_cache_groups({"c": CHUNKED, "f": FULL}, enable_hybrid=False)
    chunk = FullAttentionSpec(**KV, attention_chunk_size=512)
    assert groups == (KVCacheGroupSpec(("c", "f"), chunk),)


def test_without_hybrid_groups_widths_may_differ_still():
    narrow = SlidingWindowSpec(**NARROW, sliding_window=1024)
    (group,) = get_kv_cache_groups({"f": FULL, "s": narrow}, enable_hybrid=False)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    full = FullAttentionSpec(**NARROW, sliding_window=1024)
    assert dict(group.kv_cache_spec.specs) == {"f": FULL, "s": full}


def test_without_hybrid_groups_a_model_of_one_kind_stays_as_it_is():
    (group,) = get_kv_cache_groups({"a": SLIDING, "b": SLIDING}, enable_hybrid=False)
    assert group.kv_cache_spec == SLIDING


@pytest.mark.parametrize(
    "other, message",
    [
        (SlidingWindowSpec(**KV, sliding_window=64), "different windows"),
        (CHUNKED, "different windows and chunks"),
        (MAMBA, "layer x .*'mamba'.* cannot be kept as full attention"),
        (CrossAttentionSpec(**KV), "layer x .*'cross'.* cannot be kept as full attention"),
        (FullAttentionSpec(**{**KV, "block_size": 32}), "blocks of 16.* blocks of 32"),
    ],
)
def test_what_cannot_be_without_hybrid_groups(other, message):
    with pytest.raises(ValueError, match=message):
        get_kv_cache_groups({"f": FULL, "s": SLIDING, "x": other}, enable_hybrid=False)
