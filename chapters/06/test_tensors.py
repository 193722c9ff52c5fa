"""Pages in bytes: what a layer writes lies in the page of its block, and nowhere else.

The bytes are looked at from outside, as a flat buffer, and where a part must lie is computed by
hand from the layout that the specs describe.
"""

import struct

import pytest
import torch

from pagedattn import prefix
from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE
from pagedattn.prefix import compute_slot_mapping, paged_attention, write_kv

KV = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
PAGE = 4 * 2 * (8 + 8) * 4  # 512 bytes


def configure(stage, specs, num_blocks, max_model_len=16):
    (config,) = stage.get_kv_cache_configs(
        [specs], [2**30], stage.Limits(max_model_len=max_model_len), num_blocks=num_blocks
    )
    return config


def random_bytes(pages, seed=0):
    """Fill pages with bytes that are not 0, so that every byte that changes shows."""
    torch.manual_seed(seed)
    pages.copy_(torch.randint(1, 255, pages.shape, dtype=torch.uint8))
    return pages.clone()


def changed_pages(before, pages):
    return (before != pages).any(dim=1).nonzero()[:, 0].tolist()


def test_a_page_has_k_before_v_and_padding_behind(stage):
    """Byte by byte: float32 numbers at the places that the layout gives them."""
    spec = stage.FullAttentionSpec(**KV, page_size_padded=PAGE + 128)
    config = configure(stage, {"a": spec}, num_blocks=3)
    pages = stage.allocate_pages(config)["a"]
    assert pages.shape == (3, 640) and pages.dtype == torch.uint8 and not pages.any()
    k, v = stage.keys_and_values(pages, spec)
    assert k.shape == v.shape == (3, 4, 2, 8)
    k[1, 2, 1, 5] = 1.25
    v[2, 3, 0, 7] = -7.5
    raw = bytes(pages.flatten().tolist())
    k_at = 640 * 1 + ((2 * 2 + 1) * 8 + 5) * 4
    v_at = 640 * 2 + 256 + ((3 * 2 + 0) * 8 + 7) * 4
    assert struct.unpack_from("f", raw, k_at) == (1.25,)
    assert struct.unpack_from("f", raw, v_at) == (-7.5,)
    assert sum(byte != 0 for byte in raw) == sum(
        byte != 0 for number in (1.25, -7.5) for byte in struct.pack("f", number)
    )


def test_tokens_written_land_in_the_page_of_their_block(stage):
    """Through the verbs of chapter 02, whatever the strides: 10 tokens in the blocks 5, 2 and 3."""
    spec = stage.FullAttentionSpec(**{**KV, "head_size_v": 8}, page_size_padded=PAGE + 64)
    pages = stage.allocate_pages(configure(stage, {"a": spec}, num_blocks=7))["a"]
    k_cache, v_cache = stage.keys_and_values(pages, spec)
    before = random_bytes(pages)
    torch.manual_seed(1)
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    table = torch.tensor([[5, 2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 10], dtype=torch.int32)
    slots = compute_slot_mapping(table, starts, torch.arange(10), 4)
    write_kv(k_cache, v_cache, k, v, slots)
    assert changed_pages(before, pages) == [2, 3, 5]
    assert torch.equal(pages[:, PAGE:], before[:, PAGE:]), "padding belongs to nobody"
    seq_lens = torch.tensor([10], dtype=torch.int32)
    out = paged_attention(q, k_cache, v_cache, table, seq_lens, starts, AttentionSpec())
    expected = attention(q.double(), k.double(), v.double())
    # float32 against float64: a few units in the last place of numbers around 1
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


def test_kernels_take_pages_as_they_are(stage):
    """Those of chapter 05 see the same numbers through the same views, and pages need no copy."""
    kernels = pytest.importorskip("pagedattn.kernels", exc_type=ImportError)
    spec = stage.SlidingWindowSpec(**KV, page_size_padded=PAGE + 64, sliding_window=6)
    config = configure(stage, {"a": spec}, num_blocks=7)
    torch.manual_seed(3)
    q, k, v = (torch.randn(10, heads, 8, device=DEVICE) for heads in (4, 2, 2))
    table = torch.tensor([[5, 2, 3]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 10], dtype=torch.int32, device=DEVICE)
    slots = compute_slot_mapping(table, starts, torch.arange(10, device=DEVICE), 4)
    seq_lens = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    outputs, written = [], []
    for chapter in (prefix, kernels):
        pages = stage.allocate_pages(config, DEVICE)["a"]
        caches = stage.keys_and_values(pages, spec)
        chapter.write_kv(*caches, k, v, slots)
        attention_spec = AttentionSpec(window=6)
        outputs.append(chapter.paged_attention(q, *caches, table, seq_lens, starts, attention_spec))
        written.append(pages)
    assert torch.equal(*written)
    torch.testing.assert_close(*outputs, atol=2e-6, rtol=0)  # sums in another order


def test_layers_of_two_groups_share_bytes_and_never_meet(stage):
    """2 full and 3 sliding layers: three groups on two tensors. A block belongs to one group."""
    full, sliding = (
        stage.FullAttentionSpec(**KV),
        stage.SlidingWindowSpec(**KV, sliding_window=5),
    )
    specs = {"f0": full, "s0": sliding, "s1": sliding, "f1": full, "s2": sliding}
    config = configure(stage, specs, num_blocks=12)
    groups = [group.layer_names for group in config.kv_cache_groups]
    assert groups == [("f0", "f1"), ("s0", "s2"), ("s1",)]
    pages = stage.allocate_pages(config)
    places = {name: layer.data_ptr() for name, layer in pages.items()}
    assert places["f0"] == places["s0"] == places["s1"] != places["f1"] == places["s2"]
    blocks = {0: [1, 4], 1: [2, 5, 6], 2: [3, 11]}
    torch.manual_seed(2)
    written = {}
    for round_ in range(2):  # what was written first is still there when all others have written
        for group, names in enumerate(groups):
            for name in names:
                k, v = stage.keys_and_values(pages[name], specs[name])
                for block in blocks[group]:
                    if round_ == 0:
                        numbers = torch.randn(2, 4, 2, 8)
                        k[block], v[block] = numbers
                        written[name, block] = numbers
                    found = torch.stack((k[block], v[block]))
                    assert torch.equal(found, written[name, block]), (name, block)
    unused = [0, 7, 8, 9, 10]
    assert not any(layer[unused].any() for layer in pages.values())


def test_different_block_sizes_and_widths_on_one_page_size(stage):
    """A sliding layer with half as many heads has blocks of twice as many tokens."""
    full = stage.FullAttentionSpec(**KV)
    narrow = stage.SlidingWindowSpec(**{**KV, "num_kv_heads": 1}, sliding_window=5)
    config = configure(stage, {"f": full, "s": narrow}, num_blocks=6)
    specs, pages = stage.specs_of_layers(config), stage.allocate_pages(config)
    assert [specs["f"].block_size, specs["s"].block_size] == [4, 8]
    k, v = stage.keys_and_values(pages["f"], specs["f"])
    k_narrow, v_narrow = stage.keys_and_values(pages["s"], specs["s"])
    assert k.shape == v.shape == (6, 4, 2, 8) and k_narrow.shape == v_narrow.shape == (6, 8, 1, 8)
    before = random_bytes(pages["f"])
    k_narrow[3], v_narrow[3] = torch.randn(2, 8, 1, 8)
    assert changed_pages(before, pages["f"]) == [3]


def test_layers_that_differ_in_width_have_their_own_tensors(stage):
    """One group: the same block is a page of another size in each layer, and V may be narrower."""
    wide = stage.FullAttentionSpec(**KV)
    thin = stage.FullAttentionSpec(**{**KV, "num_kv_heads": 1}, head_size_v=4)
    config = configure(stage, {"wide": wide, "thin": thin}, num_blocks=5)
    specs, pages = stage.specs_of_layers(config), stage.allocate_pages(config)
    assert pages["wide"].shape == (5, 512) and pages["thin"].shape == (5, 4 * 12 * 4)
    k, v = stage.keys_and_values(pages["thin"], specs["thin"])
    assert k.shape == (5, 4, 1, 8) and v.shape == (5, 4, 1, 4)
    before = random_bytes(pages["thin"]), random_bytes(pages["wide"])
    k[4], v[4] = torch.randn(4, 1, 8), torch.randn(4, 1, 4)
    assert changed_pages(before[0], pages["thin"]) == [4]
    assert torch.equal(before[1], pages["wide"])
    assert not (before[0][4] == pages["thin"][4]).all(), "all of page 4 was written"


def test_scales_lie_behind_v(stage):
    spec = stage.FullAttentionSpec(
        **{**KV, "dtype": torch.int8}, kv_quant_mode=stage.KVQuantMode.INT8_PER_TOKEN_HEAD
    )
    pages = stage.allocate_pages(configure(stage, {"a": spec}, num_blocks=3))["a"]
    assert pages.shape[1] == 4 * 2 * (8 + 8 + 8)  # one byte a number, two scales of 4 bytes
    k_scales, v_scales = stage.kv_scales(pages, spec)
    assert k_scales.shape == v_scales.shape == (3, 4, 2) and k_scales.dtype == torch.float32
    k, v = stage.keys_and_values(pages, spec)
    k[:], v[:], k_scales[:], v_scales[:] = 1, 2, 3.0, 4.0
    three, four = struct.pack("f", 3.0), struct.pack("f", 4.0)
    page = bytes([1] * 64 + [2] * 64) + three * 8 + four * 8
    assert bytes(pages.flatten().tolist()) == page * 3
    with pytest.raises(ValueError, match="keeps no scales"):
        stage.kv_scales(pages, stage.FullAttentionSpec(**KV))


def test_latent_vectors(stage):
    """One vector for two tokens; no V beside it."""
    spec = stage.MLAAttentionSpec(**{**KV, "num_kv_heads": 1, "head_size": 6}, compress_ratio=2)
    pages = stage.allocate_pages(configure(stage, {"a": spec}, num_blocks=4))["a"]
    vectors = stage.latent_vectors(pages, spec)
    assert vectors.shape == (4, 2, 1, 6) and pages.shape == (4, 2 * 6 * 4)
    before = random_bytes(pages)
    vectors[2, 1, 0, 3] = 0.5
    assert changed_pages(before, pages) == [2]
    assert struct.unpack_from("f", bytes(pages[2].tolist()), (6 + 3) * 4) == (0.5,)
    with pytest.raises(ValueError, match="no K and V"):
        stage.keys_and_values(pages, spec)


def test_the_packed_format_of_latent_vectors_is_656_bytes_a_token(stage):
    spec = stage.MLAAttentionSpec(
        **{**KV, "num_kv_heads": 1, "head_size": 576}, cache_dtype_str="fp8_ds_mla"
    )
    pages = stage.allocate_pages(configure(stage, {"a": spec}, num_blocks=3))["a"]
    vectors = stage.latent_vectors(pages, spec)
    assert vectors.shape == (3, 4, 656) and vectors.dtype == torch.uint8
    vectors[1, 2, 655] = 7
    assert pages[1, 2 * 656 + 655] == 7 and pages.sum() == 7


def test_states_share_a_tensor_with_attention(stage):
    """Two states of different dtypes in each page, padded to the page of the attention layer."""
    full = stage.FullAttentionSpec(**KV)
    mamba = stage.MambaSpec(
        block_size=16,
        shapes=((3, 8), (2, 4, 5)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PAGE,
    )
    config = configure(stage, {"f": full, "m": mamba}, num_blocks=5)
    pages = stage.allocate_pages(config)
    conv, ssm = stage.mamba_states(pages["m"], mamba)
    assert conv.shape == (5, 3, 8) and conv.dtype == torch.bfloat16
    assert ssm.shape == (5, 2, 4, 5) and ssm.dtype == torch.float32
    before = random_bytes(pages["f"])
    conv[3], ssm[3] = 1.5, 2.5
    assert changed_pages(before, pages["f"]) == [3]
    used = struct.pack("f", 1.5)[2:] * 24 + struct.pack("f", 2.5) * 40  # bfloat16: upper 2 bytes
    assert bytes(pages["f"][3, : len(used)].tolist()) == used
    assert torch.equal(pages["f"][3, len(used) :], before[3, len(used) :])


def test_smaller_blocks_for_a_kernel(stage):
    """A block of 4 tokens is two blocks of 2; tokens go into the same page by both ways."""
    spec = stage.FullAttentionSpec(**KV)
    pages = stage.allocate_pages(configure(stage, {"a": spec}, num_blocks=5))["a"]
    halves = stage.split_pages(pages, 2)
    k, v = stage.keys_and_values(halves, spec.copy_with_new_block_size(2))
    assert k.shape == (10, 2, 2, 8)
    before = random_bytes(pages)
    k[7], v[7] = torch.randn(2, 2, 2, 8)
    assert changed_pages(before, pages) == [3]
    assert torch.equal(before[3, : PAGE // 2], pages[3, : PAGE // 2]), "block 6: its first half"
    for ratio in (0, -1, 7):
        with pytest.raises(ValueError, match="cannot be split"):
            stage.split_pages(pages, ratio)


def test_offsets_beyond_32_bits_are_exact(stage):
    """The arithmetic of vllm-project/vllm#47671: no memory is touched, only addresses are."""
    spec = stage.FullAttentionSpec(
        block_size=16, num_kv_heads=32, head_size=128, dtype=torch.float16
    )
    config = configure(stage, {"a": spec}, num_blocks=65536 * 2)
    pages = stage.allocate_pages(config, "meta")["a"]
    k, v = stage.keys_and_values(pages, spec)
    page = 16 * 32 * 128 * 2  # numbers, K and V
    assert k[65535].storage_offset() == 65535 * page == 8589803520
    assert v[131071].storage_offset() == 131071 * page + page // 2


def test_pages_that_do_not_fit_are_refused(stage):
    spec = stage.FullAttentionSpec(**KV)
    with pytest.raises(ValueError, match="pages of 500 bytes; the layer's have 512"):
        stage.keys_and_values(torch.zeros(3, 500, dtype=torch.uint8), spec)
    askew = stage.FullAttentionSpec(**KV, page_size_padded=PAGE + 2)
    with pytest.raises(ValueError, match="514 bytes: both must be multiples of 4"):
        stage.keys_and_values(torch.zeros(3, PAGE + 2, dtype=torch.uint8), askew)
    odd = stage.MambaSpec(
        block_size=16, shapes=((3,), (2,)), dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="at byte 6"):
        stage.mamba_states(torch.zeros(3, 16, dtype=torch.uint8), odd)
    config = configure(stage, {"a": spec}, num_blocks=3)
    short = stage.KVCacheConfig(4, config.kv_cache_tensors, config.kv_cache_groups)
    with pytest.raises(ValueError, match="1536 bytes; 4 pages of 512 bytes are needed"):
        stage.allocate_pages(short)
