"""Page sizes and needs, worked out by hand; the needs also by counting blocks step by step."""

import random

import pytest
import torch

KV = {
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}
LATENT = {
    "block_size": 64,
    "num_kv_heads": 1,
    "head_size": 576,
    "dtype": torch.bfloat16,
}
STATES = {"shapes": ((3, 4), (5,)), "dtypes": (torch.float32, torch.bfloat16)}
LIMITS = {"max_model_len": 1000, "max_num_batched_tokens": 256, "max_encoder_len": 1500}


@pytest.mark.parametrize(
    "make, page",
    [
        (
            lambda stage: stage.FullAttentionSpec(**KV),
            65536,
        ),  # 16 tokens * 8 heads * (128 + 128) * 2 bytes
        (
            lambda stage: stage.FullAttentionSpec(**KV, head_size_v=64),
            49152,
        ),  # 16 * 8 * (128 + 64) * 2
        (lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=5), 65536),
        (lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=5, head_size_v=64), 49152),
        (lambda stage: stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=5), 65536),
        (lambda stage: stage.CrossAttentionSpec(**KV), 65536),
        (lambda stage: stage.SinkFullAttentionSpec(**KV, sink_len=32), 65536),
        (
            lambda stage: stage.MLAAttentionSpec(**LATENT),
            73728,
        ),  # 64 * 1 * 576 * 2: K and V are one vector
        (
            lambda stage: stage.MLAAttentionSpec(**LATENT, compress_ratio=4),
            18432,
        ),  # a quarter of it
        (
            lambda stage: stage.MLAAttentionSpec(**LATENT, cache_dtype_str="fp8_ds_mla"),
            41984,
        ),  # 64 * 656
        (lambda stage: stage.MambaSpec(block_size=1000, **STATES), 58),  # 12 * 4 + 5 * 2
        (lambda stage: stage.FullAttentionSpec(**KV, page_size_padded=70000), 70000),
        (lambda stage: stage.MambaSpec(block_size=1000, **STATES, page_size_padded=64), 64),
        (
            lambda stage: stage.FullAttentionSpec(**KV, page_size_padded=65536),
            65536,
        ),  # no more than the contents
    ],
)
def test_page_size(stage, make, page):
    assert make(stage).page_size_bytes == page


@pytest.mark.parametrize(
    "mode, dtype, page",
    [
        ("FP8_PER_TENSOR", torch.float8_e4m3fn, 32768),  # 16 * 8 * 256 * 1
        # and two fp32 scales for each of the 16 * 8 pairs of a token and a head: 1024 bytes
        ("INT8_PER_TOKEN_HEAD", torch.int8, 33792),
        ("FP8_PER_TOKEN_HEAD", torch.float8_e4m3fn, 33792),
    ],
)
def test_page_size_of_quantised_layers(stage, mode, dtype, page):
    quantised = {**KV, "dtype": dtype, "kv_quant_mode": stage.KVQuantMode[mode]}
    assert stage.FullAttentionSpec(**quantised).page_size_bytes == page
    assert stage.SlidingWindowSpec(**quantised, sliding_window=9).page_size_bytes == page


def mamba(stage, mode, drafts=0):
    return stage.MambaSpec(
        block_size=16, **STATES, mamba_cache_mode=mode, num_speculative_blocks=drafts
    )


@pytest.mark.parametrize(
    "make, pages",
    [
        (lambda stage: stage.FullAttentionSpec(**KV), 63),  # 1000 / 16 = 62.5
        (
            lambda stage: stage.FullAttentionSpec(**KV, sliding_window=16),
            63,
        ),  # a recorded window releases nothing
        (lambda stage: stage.MLAAttentionSpec(**LATENT), 16),  # 1000 / 64 = 15.6
        (lambda stage: stage.SinkFullAttentionSpec(**KV, sink_len=32), 63),
        (
            lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=100),
            24,
        ),  # (99 + 256) / 16 = 22.2, and one
        (
            lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=900),
            64,
        ),  # 1000 tokens at most, and one
        (
            lambda stage: stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=100),
            23,
        ),  # 356 / 16 = 22.25
        (lambda stage: stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=900), 63),
        (lambda stage: stage.CrossAttentionSpec(**KV), 94),  # 1500 / 16 = 93.75
        (lambda stage: stage.EncoderOnlyAttentionSpec(**KV), 0),
        (lambda stage: mamba(stage, "none"), 1),
        (lambda stage: mamba(stage, "none", drafts=3), 4),
        (lambda stage: mamba(stage, "align"), 2),
        (lambda stage: mamba(stage, "align", drafts=3), 5),
        (lambda stage: mamba(stage, "all", drafts=3), 63),
    ],
)
def test_most_memory_of_a_request(stage, make, pages):
    spec, limits = make(stage), stage.Limits(**LIMITS)
    assert spec.max_num_pages(limits) == pages
    assert spec.max_memory_usage_bytes(limits) == pages * spec.page_size_bytes


def test_without_a_limit_of_a_step_it_may_be_the_whole_sequence(stage):
    limits = stage.Limits(max_model_len=1000)
    assert stage.SlidingWindowSpec(**KV, sliding_window=100).max_num_pages(limits) == 64
    assert (
        stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=100).max_num_pages(limits) == 63
    )


def test_context_parallel_ranks_share_a_sequence(stage):
    limits = stage.Limits(
        max_model_len=1000, decode_context_parallel_size=2, prefill_context_parallel_size=2
    )
    assert stage.FullAttentionSpec(**KV).max_num_pages(limits) == 16  # 250 / 16 = 15.6
    with pytest.raises(ValueError, match=r"sliding window .* 4 context-parallel ranks"):
        stage.SlidingWindowSpec(**KV, sliding_window=100).max_num_pages(limits)
    with pytest.raises(ValueError, match=r"chunked .* 4 context-parallel ranks"):
        stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=8).max_num_pages(limits)


def test_a_long_prompt_needs_no_more_than_its_window(stage):
    """vllm-project/vllm#55800: window 8, 4 tokens a step, blocks of 4: 4 blocks, not 10."""
    spec = stage.SlidingWindowSpec(**{**KV, "block_size": 4}, sliding_window=8)
    assert spec.max_num_pages(stage.Limits(max_model_len=40, max_num_batched_tokens=4)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_no_run_ever_holds_more(stage, seed):
    """Blocks counted as a sequence grows by random steps and what is out of reach is released."""
    rng = random.Random(seed)
    block_size, step, length = rng.choice([1, 4, 16]), rng.randint(1, 40), rng.randint(1, 300)
    window, chunk = rng.randint(1, 60), block_size * rng.randint(1, 8)
    limits = stage.Limits(max_model_len=length, max_num_batched_tokens=step)
    sizes = {**KV, "block_size": block_size}
    sliding = stage.SlidingWindowSpec(**sizes, sliding_window=window).max_num_pages(limits)
    chunked = stage.ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=chunk).max_num_pages(
        limits
    )
    for _ in range(20):
        computed = 0
        while computed < length:
            end = min(computed + rng.choice([1, step, rng.randint(1, step)]), length)
            held = {position // block_size for position in range(end)}
            left_window = max(0, computed - window + 1) // block_size
            left_chunk = computed // chunk * chunk // block_size
            assert len(held) - left_window <= sliding
            assert len(held) - left_chunk <= chunked
            computed = end


def test_a_larger_block_keeps_the_padding_in_proportion(stage):
    spec = stage.FullAttentionSpec(**KV, page_size_padded=70000)
    assert spec.copy_with_new_block_size(48).page_size_bytes == 210000
    assert stage.FullAttentionSpec(**KV).copy_with_new_block_size(48).page_size_bytes == 3 * 65536


def test_merging_keeps_what_one_of_them_records(stage):
    plain = stage.FullAttentionSpec(**KV)
    window = stage.FullAttentionSpec(**KV, sliding_window=64)
    assert stage.merge([plain, plain]) == plain
    assert stage.merge([plain, window, plain]) == window
    chunk = stage.FullAttentionSpec(**KV, attention_chunk_size=64)
    assert stage.merge([chunk, plain]) == chunk


@pytest.mark.parametrize(
    "make_other",
    [
        lambda stage: stage.FullAttentionSpec(**KV, sliding_window=32),
        lambda stage: stage.FullAttentionSpec(**KV, attention_chunk_size=64),
        lambda stage: stage.FullAttentionSpec(**KV, head_size_v=64),
        lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=64),
        lambda stage: stage.FullAttentionSpec(**KV, kv_quant_mode=stage.KVQuantMode.FP8_PER_TENSOR),
    ],
)
def test_merging_what_differs_is_refused(stage, make_other):
    with pytest.raises(ValueError, match=r"must be equal|different windows"):
        stage.merge([stage.FullAttentionSpec(**KV, sliding_window=64), make_other(stage)])


def test_merging_nothing_is_refused(stage):
    with pytest.raises(ValueError, match="must be equal"):
        stage.merge([])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda stage: stage.FullAttentionSpec(**{**KV, "block_size": 0}), "block_size .* got 0"),
        (
            lambda stage: stage.FullAttentionSpec(**{**KV, "num_kv_heads": 0}),
            "num_kv_heads .* got 0",
        ),
        (lambda stage: stage.FullAttentionSpec(**KV, head_size_v=0), "head_size_v .* got 0"),
        (lambda stage: stage.FullAttentionSpec(**{**KV, "dtype": "bf16"}), "dtype is 'bf16'"),
        (
            lambda stage: stage.FullAttentionSpec(**KV, page_size_padded=65535),
            "65535 bytes.* 65536",
        ),
        (
            lambda stage: stage.MambaSpec(block_size=1, **STATES, page_size_padded=57),
            "57 bytes.* 58",
        ),
        (
            lambda stage: stage.FullAttentionSpec(**KV, sliding_window=4, attention_chunk_size=8),
            "4 .* 8",
        ),
        (lambda stage: stage.SlidingWindowSpec(**KV, sliding_window=0), "sliding_window .* got 0"),
        (
            lambda stage: stage.ChunkedLocalAttentionSpec(**KV, attention_chunk_size=0),
            "attention_chunk_size .* got 0",
        ),
        (
            lambda stage: stage.MLAAttentionSpec(**LATENT, compress_ratio=3),
            "3 does not divide .* 64",
        ),
        (lambda stage: stage.MLAAttentionSpec(**LATENT, cache_dtype_str="fp8"), "'fp8'"),
        (
            lambda stage: stage.MLAAttentionSpec(
                **LATENT, kv_quant_mode=stage.KVQuantMode.INT8_PER_TOKEN_HEAD
            ),
            "MLA keeps neither",
        ),
        (
            lambda stage: stage.SinkFullAttentionSpec(**KV, sink_len=24),
            "24 is no multiple of block_size 16",
        ),
        (
            lambda stage: stage.MambaSpec(block_size=1, shapes=((3,),), dtypes=()),
            "1 shapes and 0 dtypes",
        ),
        (lambda stage: mamba(stage, "some"), "'some'"),
        (lambda stage: mamba(stage, "none", drafts=-1), "-1, below 0"),
        (lambda stage: stage.Limits(max_model_len=0), "max_model_len .* got 0"),
        (
            lambda stage: stage.Limits(max_model_len=1, max_num_batched_tokens=0),
            "batched_tokens .* got 0",
        ),
        (lambda stage: stage.Limits(max_model_len=1, max_encoder_len=-1), "-1, below 0"),
        (
            lambda stage: stage.Limits(max_model_len=1, decode_context_parallel_size=0),
            "decode.* got 0",
        ),
    ],
)
def test_sizes_that_cannot_be(stage, make, message):
    with pytest.raises(ValueError, match=message):
        make(stage)
