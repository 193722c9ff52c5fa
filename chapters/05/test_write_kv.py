"""K and V of new tokens go to their slots, in any layout and type, and nothing else changes."""

import pytest
import torch

from pagedattn import paged
from pagedattn.course.witness import DEVICE

FP8 = torch.float8_e4m3fn
COMPILED = DEVICE == "cuda"
on_a_gpu = pytest.mark.skipif(not COMPILED, reason="needs a GPU")


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def some_slots(num_tokens, num_slots):
    """Different slots in any order; every third token is padding."""
    slots = torch.randperm(num_slots, device=DEVICE)[:num_tokens]
    slots[2::3] = -1
    return slots


def bits(tensor):
    """To compare NaN as well, and types that know no equality."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


@pytest.mark.parametrize("block_size", [1, 3, 16, 544])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 80), (1, 96), (3, 64), (5, 1), (2, 192)])
def test_agrees_with_torch(stage, block_size, num_heads, head_dim):
    """Heads of other sizes than powers of two (vllm-project/vllm#4127), blocks of any size
    (vllm-project/vllm#31380)."""
    torch.manual_seed(block_size + head_dim)
    num_blocks = 2 + 24 // block_size
    cache = random(2, num_blocks, block_size, num_heads, head_dim)
    expected = cache.clone()
    k, v = random(2, 10, num_heads, head_dim)
    slots = some_slots(10, num_blocks * block_size)
    paged.write_kv(*expected, k, v, slots)
    stage.write_kv(*cache, k, v, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_in_every_type(stage, dtype):
    torch.manual_seed(0)
    cache = random(2, 5, 3, 2, 20, dtype=dtype)
    k, v = random(2, 6, 2, 20, dtype=dtype)
    k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0], dtype=dtype)
    expected = cache.clone()
    for token, slot in enumerate([7, -1, 0, 14, -1, 3]):
        if slot >= 0:
            expected[0, slot // 3, slot % 3], expected[1, slot // 3, slot % 3] = k[token], v[token]
    stage.write_kv(*cache, k, v, torch.tensor([7, -1, 0, 14, -1, 3], device=DEVICE))
    assert torch.equal(bits(cache), bits(expected)), "every bit is copied, NaN and -0 too"


def test_more_tokens_than_one_program_has(stage):
    """On a GPU also as many as a long prompt has."""
    torch.manual_seed(1)
    num_tokens = 8191 if COMPILED else 70
    cache = random(2, num_tokens // 8, 16, 2, 128, dtype=torch.float16)
    expected = cache.clone()
    k, v = random(2, num_tokens, 2, 128, dtype=torch.float16)
    slots = some_slots(num_tokens, num_tokens // 8 * 16)
    paged.write_kv(*expected, k, v, slots)
    stage.write_kv(*cache, k, v, slots)
    assert torch.equal(cache, expected)


def test_heads_before_slots(stage):
    """A cache laid out [num_blocks, num_kv_heads, block_size, head_dim], K and V of one matrix."""
    torch.manual_seed(2)
    memory = random(2, 4, 3, 5, 16)  # of K and V, with 4 blocks of 3 heads of 5 slots
    before = memory.clone()
    qkv = random(2, 9, 16)  # of each token, 3 heads of Q, K and V
    k, v = qkv[:, 3:6], qkv[:, 6:]
    k_cache, v_cache = memory.transpose(2, 3).unbind()
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([13, 2], device=DEVICE))
    before[0, 2, :, 3], before[0, 0, :, 2] = k  # 13 = 2 * 5 + 3, 2 = 0 * 5 + 2
    before[1, 2, :, 3], before[1, 0, :, 2] = v
    assert torch.equal(memory, before)


def test_k_and_v_lie_differently(stage):
    torch.manual_seed(10)
    k_cache, k = random(4, 3, 2, 16), random(2, 2, 16)
    v_memory, v_wide = random(4, 2, 3, 20), random(2, 2, 18)
    expected_k, expected_v = k_cache.clone(), v_memory.clone()
    v_cache, v = v_memory.transpose(1, 2)[..., :16], v_wide[..., 2:]
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([10, 0], device=DEVICE))
    expected_k[3, 1], expected_k[0, 0] = k  # 10 = 3 * 3 + 1
    expected_v[3, :, 1, :16], expected_v[0, :, 0, :16] = v
    assert torch.equal(k_cache, expected_k), "K: slots before heads, no gaps"
    assert torch.equal(v_memory, expected_v), "V: heads before slots, heads of 20 numbers"


def test_what_lies_behind_the_heads(stage):
    """3 heads of 80 are 240 numbers. A program has 256 lanes, and 16 of them nothing to do."""
    torch.manual_seed(9)
    memory = random(2, 2, 3, 4, 96)
    before = memory.clone()
    (k, v) = random(2, 2, 4, 96)[:, :, :3, :80]
    k_cache, v_cache = memory[..., :3, :80].unbind()
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([4, 0], device=DEVICE))
    for memory_of, new in zip(before, (k, v), strict=True):
        memory_of[1, 1, :3, :80], memory_of[0, 0, :3, :80] = new  # 4 = 1 * 3 + 1
    assert torch.equal(memory, before)


def test_every_dimension_has_gaps(stage):
    torch.manual_seed(3)
    memory = random(2, 6, 6, 4, 10)
    before = memory.clone()
    k_cache, v_cache = memory[:, ::2, ::2, ::2, ::2].unbind()
    k, v = random(2, 4, 4, 10)[:, ::2, ::2, ::2].unbind()
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([8, 1], device=DEVICE))
    for memory_of, new in zip(before, (k, v), strict=True):
        memory_of[4, 4, ::2, ::2], memory_of[0, 2, ::2, ::2] = new  # 8 = 2 * 3 + 2, 1 = 0 * 3 + 1
    assert torch.equal(memory, before), "what lies in the gaps belongs to somebody else"


@pytest.mark.parametrize("far", ["blocks", "slots", "heads", "dims"])
def test_further_apart_than_32_bits(stage, far, far_apart):
    """One dimension of three has 2^30 numbers between its entries, so the last begins 2^31 behind
    the first (vllm-project/vllm#1486, Dao-AILab/flash-attention#772)."""
    torch.manual_seed(4)
    which = ["blocks", "slots", "heads", "dims"].index(far)
    shape = [3 if i == which else 2 for i in range(4)]
    near = iter((1, 2, 4))  # the numbers of the other three lie close together
    strides = [2**30 if i == which else next(near) for i in range(4)]
    k_cache, v_cache = (far_apart(shape, strides, start) for start in (0, 8))
    for cache in (k_cache, v_cache):
        cache.copy_(random(*shape, dtype=torch.float16))
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    k, v = random(2, 2, *shape[2:], dtype=torch.float16)
    last = shape[0] * shape[1] - 1
    stage.write_kv(k_cache, v_cache, k, v, torch.tensor([last, 1], device=DEVICE))
    for cache, want, new in zip((k_cache, v_cache), expected, (k, v), strict=True):
        want[-1, -1], want[0, 1] = new
        assert torch.equal(cache, want), f"the {far} lie 2^30 numbers apart"


@pytest.mark.parametrize("far", ["tokens", "heads", "dims"])
def test_new_tokens_further_apart_than_32_bits(stage, far, far_apart):
    torch.manual_seed(11)
    which = ["tokens", "heads", "dims"].index(far)
    near = iter((1, 3))
    strides = [2**30 if i == which else next(near) for i in range(3)]
    k, v = (far_apart((3, 3, 3), strides, start) for start in (0, 16))
    for new in (k, v):
        new.copy_(random(3, 3, 3, dtype=torch.float16))
    cache = random(2, 2, 3, 3, 3, dtype=torch.float16)
    expected = cache.clone()
    expected[0, 1], expected[1, 1] = k, v
    stage.write_kv(*cache, k, v, torch.tensor([3, 4, 5], device=DEVICE))
    assert torch.equal(cache, expected), f"the {far} lie 2^30 numbers apart"


@pytest.mark.parametrize("slot", [-1, -2, -33])
def test_padding_may_hold_anything(stage, slot):
    """Neither K and V of padding nor its slot lead anywhere, not in front of the cache either."""
    torch.manual_seed(5)
    memory = random(2, 8, 16, 2, 8)
    before = memory.clone()
    k, v = random(2, 3, 2, 8)
    k[1:], v[1:] = float("nan"), float("nan")
    stage.write_kv(*memory[:, 3:], k, v, torch.tensor([3, slot, slot], device=DEVICE))
    before[0, 3, 3], before[1, 3, 3] = k[0], v[0]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("num_scales", [None, (1, 1), (3, 3), (1, 3), (3, 1)], ids=str)
def test_an_fp8_cache_holds_value_over_scale(stage, num_scales):
    """K and V have scales of their own (flashinfer-ai/flashinfer#1023). The quotients are numbers
    of fp8, so nothing is rounded."""
    torch.manual_seed(6)
    cache = random(2, 4, 3, 3, 80).to(FP8)
    expected = cache.clone()
    stored = random(2, 5, 3, 80).to(FP8)
    scales = [None, None]
    values = stored.float()
    if num_scales:
        scales = [torch.rand(number, device=DEVICE).exp2() * 0.37 for number in num_scales]
        of_heads = torch.stack([scale.expand(3) for scale in scales]).double()
        values = stored.double() * of_heads[:, None, :, None]
        values = values.float()  # over the scale again, it lies next to a number of fp8
    k, v = values
    slots = torch.tensor([4, -1, 11, 0, 7], device=DEVICE)
    stage.write_kv(*cache, k, v, slots, k_scale=scales[0], v_scale=scales[1])
    for kv in range(2):
        flat = expected[kv].flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                flat[slot] = stored[kv, token]
    assert torch.equal(bits(cache), bits(expected))


def test_fp8_ends_at_448(stage):
    cache = torch.zeros(2, 1, 1, 1, 8, device=DEVICE).to(FP8)
    k = torch.tensor([[[448.0, 449, 1e6, float("inf"), -448, -500, -1e30, 2]]], device=DEVICE)
    scale = torch.tensor(0.5, device=DEVICE)
    stage.write_kv(*cache, k, k / 2, torch.tensor([0], device=DEVICE), v_scale=scale)
    expected = [448, 448, 448, 448, -448, -448, -448, 2]
    assert cache[0].flatten().tolist() == expected, "K, without a scale"
    assert cache[1].flatten().tolist() == expected, "V: half of it, over a scale of one half"


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_rounds_as_torch_does(stage, dtype):
    """Triton's interpreter rounds some numbers to fp8 wrongly, so only where kernels are
    compiled."""
    torch.manual_seed(7)
    k, v = (
        random(2, 300, 8, 128, dtype=dtype)
        * torch.logspace(-3, 3, 300, device=DEVICE).to(dtype)[:, None, None]
    )
    k[5, 0, :2] = float("nan")
    cache = torch.zeros(2, 100, 3, 8, 128, device=DEVICE).to(FP8)
    scales = torch.rand(2, 8, device=DEVICE) + 0.1
    stage.write_kv(
        *cache, k, v, torch.arange(300, device=DEVICE), k_scale=scales[0], v_scale=scales[1]
    )
    for found, new, scale in zip(cache, (k, v), scales, strict=True):
        expected = (new.float() / scale[:, None]).clamp(-448, 448).to(FP8)
        assert torch.equal(bits(found).view(300, 8, 128), bits(expected))


def test_fp8_into_fp8_is_a_copy(stage):
    torch.manual_seed(8)
    cache, (k, v) = random(2, 2, 2, 2, 8).to(FP8), random(2, 1, 2, 8).to(FP8)
    expected = cache.clone()
    expected[0, 1, 0], expected[1, 1, 0] = k[0], v[0]
    stage.write_kv(*cache, k, v, torch.tensor([2], device=DEVICE))
    assert torch.equal(bits(cache), bits(expected))


def test_a_step_without_tokens(stage):
    cache = random(2, 2, 2, 2, 8)
    before = cache.clone()
    none = random(0, 2, 8)
    stage.write_kv(*cache, none, none, torch.tensor([], dtype=torch.int64, device=DEVICE))
    assert torch.equal(cache, before)


CACHE = torch.zeros(3, 4, 2, 8, device=DEVICE)
ONE = torch.ones(1, device=DEVICE)
FP8_CACHE = {"k_cache": CACHE.to(FP8), "v_cache": CACHE.to(FP8)}
REFUSED = [
    ({"k": torch.zeros(2, 16, device=DEVICE)}, r"k has shape \[2, 16\]"),
    ({"v": torch.zeros(2, 2, 9, device=DEVICE)}, r"v has shape \[2, 2, 9\].*\[2, 2, 8\]"),
    ({"k_cache": CACHE[:, :, :1]}, r"k_cache has shape \[3, 4, 1, 8\].*, 2, 8\]"),
    ({"v_cache": CACHE[:2]}, r"v_cache has shape \[2, 4, 2, 8\].*\[3, 4, 2, 8\]"),
    ({"slot_mapping": torch.zeros(3, dtype=torch.int64, device=DEVICE)}, "slot_mapping has shape"),
    ({"slot_mapping": torch.zeros(2, dtype=torch.int32, device=DEVICE)}, "torch.int32"),
    ({"slot_mapping": torch.arange(4, device=DEVICE)[::2]}, "slot_mapping is not contiguous"),
    ({"k_cache": CACHE.half(), "v_cache": CACHE.half()}, "k_cache is torch.float16"),
    ({"v_cache": CACHE.half()}, "v_cache is torch.float16"),
    ({"v": torch.zeros(2, 2, 8, device=DEVICE).half()}, "v is torch.float16"),
    (
        {"k": torch.zeros(2, 2, 8, device=DEVICE).int()},
        "k is torch.int32; it must be torch.float16",
    ),
    ({"k_cache": CACHE[:, :0], "v_cache": CACHE[:, :0]}, "block_size must be at least 1, got 0"),
    ({"v_cache": CACHE.to("meta")}, "v_cache is on meta"),
    ({"k_scale": ONE}, "k_scale is given, but nothing is to be scaled"),
    (FP8_CACHE | {"v_scale": ONE.half()}, "v_scale is torch.float16; it must be torch.float32"),
    (FP8_CACHE | {"k_scale": ONE.repeat(3)}, r"k_scale has shape \[3\]; it must be \[2\]"),
    (FP8_CACHE | {"v_scale": ONE.expand(2)}, r"v_scale is not contiguous: its strides are \(0,\)"),
    (FP8_CACHE | {"k_scale": ONE.to("meta")}, "k_scale is on meta, k_cache on"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {
        "k_cache": CACHE.clone(),
        "v_cache": CACHE.clone(),
        "k": torch.ones(2, 2, 8, device=DEVICE),
        "v": torch.ones(2, 2, 8, device=DEVICE),
        "slot_mapping": torch.tensor([0, 1], device=DEVICE),
    }
    with pytest.raises(ValueError, match=message):
        stage.write_kv(**good | change)
    assert not good["k_cache"].any() and not good["v_cache"].any(), "refused, and yet written"
