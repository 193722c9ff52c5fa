"""Which layers share a block table, against groups written down by hand."""

import pytest
import torch

KV = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}
NARROW = {**KV, "num_kv_heads": 4}  # half a page


def full(stage):
    return stage.FullAttentionSpec(**KV)


def sliding(stage):
    return stage.SlidingWindowSpec(**KV, sliding_window=1024)


def chunked(stage):
    return stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=512)


def mamba(stage):
    # 16384 fp32 numbers: the 65536 bytes of the others' pages
    return stage.MambaSpec(block_size=4096, shapes=((128, 128),), dtypes=(torch.float32,))


def cross(stage):
    return stage.CrossAttentionSpec(**KV)


def names(groups):
    return [group.layer_names for group in groups]


def layers(**kinds):
    return {f"{k}{i}": spec for k, (count, spec) in kinds.items() for i in range(count)}


def test_no_layers_no_groups(stage):
    assert stage.get_kv_cache_groups({}) == ()


def test_an_encoder_keeps_nothing_and_is_in_no_group(stage):
    encoder = stage.EncoderOnlyAttentionSpec(**KV)
    assert stage.get_kv_cache_groups({"e": encoder}) == ()
    assert names(stage.get_kv_cache_groups({"e": encoder, "f": full(stage)})) == [("f",)]


@pytest.mark.parametrize("make", [full, sliding, chunked, mamba, cross])
def test_equal_layers_are_one_group(stage, make):
    spec = make(stage)
    groups = stage.get_kv_cache_groups({"a": spec, "b": spec, "c": spec})
    assert groups == (stage.KVCacheGroupSpec(("a", "b", "c"), spec),)


def test_a_recorded_window_makes_no_other_group(stage):
    window = stage.FullAttentionSpec(**KV, sliding_window=1024)
    groups = stage.get_kv_cache_groups({"a": full(stage), "b": window, "c": full(stage)})
    assert groups == (stage.KVCacheGroupSpec(("a", "b", "c"), window),)


@pytest.mark.parametrize("sizes", [KV, NARROW])  # of one width, and of two
def test_two_recorded_windows_in_one_group_are_refused(stage, sizes):
    specs = {
        "a": stage.FullAttentionSpec(**KV, sliding_window=1024),
        "b": stage.FullAttentionSpec(**sizes, sliding_window=512),
    }
    with pytest.raises(ValueError, match=r"different windows .*512.*1024|1024.*512"):
        stage.get_kv_cache_groups(specs)


@pytest.mark.parametrize(
    "wide, narrow",
    [
        (full, lambda stage: stage.FullAttentionSpec(**NARROW)),
        (sliding, lambda stage: stage.SlidingWindowSpec(**NARROW, sliding_window=1024)),
        (
            chunked,
            lambda stage: stage.ChunkedLocalAttentionSpec(**NARROW, attention_chunk_size=512),
        ),
    ],
)
def test_layers_that_differ_in_width_are_one_group(stage, wide, narrow):
    wide, narrow = wide(stage), narrow(stage)
    groups = stage.get_kv_cache_groups({"a": wide, "b": narrow, "c": wide})
    assert names(groups) == [("a", "b", "c")]
    spec = groups[0].kv_cache_spec
    assert isinstance(spec, stage.UniformTypeKVCacheSpecs)
    assert dict(spec.specs) == {"a": wide, "b": narrow, "c": wide}
    assert spec.block_size == 16
    assert spec.page_size_bytes == 65536 + 32768 + 65536
    limits = stage.Limits(max_model_len=1000, max_num_batched_tokens=100)
    assert spec.max_num_pages(limits) == wide.max_num_pages(limits)


def test_latent_layers_differ_from_full_ones_in_width_only(stage):
    mla = stage.MLAAttentionSpec(**{**KV, "num_kv_heads": 1, "head_size": 576})
    groups = stage.get_kv_cache_groups({"a": mla, "b": full(stage)})
    assert names(groups) == [("a", "b")]
    assert groups[0].kv_cache_spec.page_size_bytes == 16 * 576 * 2 + 65536


@pytest.mark.parametrize(
    "other",
    [
        lambda stage: stage.SlidingWindowSpec(**NARROW, sliding_window=512),  # another window
        lambda stage: stage.SlidingWindowSpec(
            **{**NARROW, "block_size": 32}, sliding_window=1024
        ),  # another block size
    ],
)
def test_another_window_or_block_size_is_another_group(stage, other):
    groups = stage.get_kv_cache_groups({"a": sliding(stage), "b": other(stage)})
    assert names(groups) == [("a",), ("b",)]


def test_three_sliding_layers_of_five_fill_two_groups(stage):
    f, s = full(stage), sliding(stage)
    specs = {"f0": f, "s0": s, "s1": s, "f1": f, "s2": s}
    assert stage.get_kv_cache_groups(specs) == (
        stage.KVCacheGroupSpec(("f0", "f1"), f),
        stage.KVCacheGroupSpec(("s0", "s2"), s),
        stage.KVCacheGroupSpec(("s1",), s),
    )


def test_groups_come_in_the_order_of_the_layers(stage):
    f, s = full(stage), sliding(stage)
    specs = {"s0": s, "f0": f, "s1": s}  # 2 is not below 1.5 * 1
    assert names(stage.get_kv_cache_groups(specs)) == [("s0",), ("s1",), ("f0",)]


@pytest.mark.parametrize(
    "num_full, num_sliding, sizes",
    [
        (13, 12, [13, 12]),  # 13 < 18: a group for each kind
        (4, 5, [4, 5]),  # 5 < 6
        (4, 6, [4, 3, 3]),  # 6 is not below 6: groups of at most 4
        (2, 5, [2, 2, 2, 1]),
        (10, 1, [1] * 11),
    ],
)
def test_group_sizes(stage, num_full, num_sliding, sizes):
    groups = stage.get_kv_cache_groups(
        layers(f=(num_full, full(stage)), s=(num_sliding, sliding(stage)))
    )
    assert [len(group.layer_names) for group in groups] == sizes


def test_layers_are_dealt_in_turn(stage):
    groups = stage.get_kv_cache_groups(layers(f=(2, full(stage)), s=(5, sliding(stage))))
    assert names(groups)[1:] == [("s0", "s3"), ("s1", "s4"), ("s2",)]


def test_three_kinds(stage):
    groups = stage.get_kv_cache_groups(
        layers(m=(4, mamba(stage)), f=(1, full(stage)), s=(1, sliding(stage)))
    )
    assert names(groups) == [("m0",), ("m1",), ("m2",), ("m3",), ("f0",), ("s0",)]


def test_smaller_pages_get_more_tokens(stage):
    eighth = stage.SlidingWindowSpec(**{**KV, "head_size": 16}, sliding_window=64)
    groups = stage.get_kv_cache_groups({"f": full(stage), "s": eighth})
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 128]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {65536}


def test_layers_alike_after_unification_share_a_group(stage):
    specs = {
        "f0": full(stage),
        "s0": stage.SlidingWindowSpec(**NARROW, sliding_window=64),
        "s1": stage.SlidingWindowSpec(**{**NARROW, "block_size": 32}, sliding_window=64),
    }
    assert stage.get_kv_cache_groups(specs)[1].kv_cache_spec == specs["s1"]


def test_padding_makes_pages_equal(stage):
    odd = stage.SlidingWindowSpec(**{**KV, "num_kv_heads": 3}, sliding_window=64)  # 24576 bytes
    with pytest.raises(stage.UnequalPages, match=r"layer s .*24576 bytes.* 65536"):
        stage.get_kv_cache_groups({"f": full(stage), "s": odd})
    padded = stage.SlidingWindowSpec(
        **{**KV, "num_kv_heads": 3}, sliding_window=64, page_size_padded=32768
    )
    spec = stage.get_kv_cache_groups({"f": full(stage), "s": padded})[1].kv_cache_spec
    assert (spec.block_size, spec.page_size_bytes) == (32, 65536)


def test_a_state_does_not_grow_with_its_block(stage):
    small = {"block_size": 4096, "shapes": ((64, 128),), "dtypes": (torch.float32,)}
    for padded in (None, 32768):
        state = stage.MambaSpec(**small, page_size_padded=padded)
        with pytest.raises(stage.UnequalPages, match=r"layer m .*32768 bytes.* 65536"):
            stage.unify_page_sizes({"f": full(stage), "m": state})
    specs = {"f": full(stage), "m": stage.MambaSpec(**small, page_size_padded=65536)}
    assert stage.unify_page_sizes(specs) == specs


def test_without_hybrid_groups_all_layers_keep_all_tokens(stage):
    groups = stage.get_kv_cache_groups({"f": full(stage), "s": sliding(stage)}, enable_hybrid=False)
    window = stage.FullAttentionSpec(**KV, sliding_window=1024)
    assert groups == (stage.KVCacheGroupSpec(("f", "s"), window),)
    groups = stage.get_kv_cache_groups({"c": chunked(stage), "f": full(stage)}, enable_hybrid=False)
    chunk = stage.FullAttentionSpec(**KV, attention_chunk_size=512)
    assert groups == (stage.KVCacheGroupSpec(("c", "f"), chunk),)


def test_without_hybrid_groups_widths_may_differ_still(stage):
    narrow = stage.SlidingWindowSpec(**NARROW, sliding_window=1024)
    (group,) = stage.get_kv_cache_groups({"f": full(stage), "s": narrow}, enable_hybrid=False)
    assert isinstance(group.kv_cache_spec, stage.UniformTypeKVCacheSpecs)
    kept = stage.FullAttentionSpec(**NARROW, sliding_window=1024)
    assert dict(group.kv_cache_spec.specs) == {"f": full(stage), "s": kept}


def test_without_hybrid_groups_a_model_of_one_kind_stays_as_it_is(stage):
    (group,) = stage.get_kv_cache_groups(
        {"a": sliding(stage), "b": sliding(stage)}, enable_hybrid=False
    )
    assert group.kv_cache_spec == sliding(stage)


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=64), "different windows"),
        (chunked, "different windows and chunks"),
        (mamba, "layer x .*'mamba'.* cannot be kept as full attention"),
        (cross, "layer x .*'cross'.* cannot be kept as full attention"),
        (
            lambda stage: stage.FullAttentionSpec(**{**KV, "block_size": 32}),
            "blocks of 16.* blocks of 32",
        ),
    ],
)
def test_what_cannot_be_without_hybrid_groups(stage, other, message):
    with pytest.raises(ValueError, match=message):
        stage.get_kv_cache_groups(
            {"f": full(stage), "s": sliding(stage), "x": other(stage)}, enable_hybrid=False
        )
