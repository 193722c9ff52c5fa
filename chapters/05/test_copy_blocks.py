"""Whole blocks of all layers, K and V, in one launch; in any layout and type."""

import pytest
import torch

from pagedattn import sharing
from pagedattn.course.witness import DEVICE

COMPILED = DEVICE == "cuda"


def caches(*shape, dtype=torch.float32):
    """K and V, [num_layers, num_blocks, block_size, num_kv_heads, head_dim] each."""
    return torch.randn(2, *shape, device=DEVICE).to(dtype)


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def bits(tensor):
    """To compare NaN as well, and types that know no equality."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


@pytest.mark.parametrize(
    "shape",
    [
        (3, 9, 16, 2, 8),
        (2, 9, 1, 1, 1),
        (1, 9, 3, 5, 80),
        (2, 9, 16, 8, 64),  # a block of 8192 numbers: two programs in float32
        (1, 9, 544, 1, 96),  # of 52,224: thirteen, the last one partly
    ],
)
def test_agrees_with_torch(stage, shape):
    torch.manual_seed(0)
    cache = caches(*shape)
    expected = cache.clone()
    sources, destinations = torch.randperm(9, device=DEVICE)[:8].view(2, 4)
    sources[1] = sources[0]  # two sequences copy the same block
    sharing.copy_blocks(*expected, sources, destinations)
    stage.copy_blocks(*cache, sources, destinations)
    assert torch.equal(cache, expected)


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_in_every_type(stage, dtype):
    torch.manual_seed(1)
    cache = caches(2, 4, 3, 2, 20, dtype=dtype)
    cache[0, 0, 2, 1, 0, :2] = torch.tensor([float("nan"), -0.0]).to(cache)
    expected = cache.clone()
    expected[:, :, 0], expected[:, :, 3] = cache[:, :, 2], cache[:, :, 1]
    stage.copy_blocks(*cache, ids(2, 1), ids(0, 3))
    assert torch.equal(bits(cache), bits(expected))


def test_heads_before_slots(stage):
    """Without gaps, but in another order: [num_blocks, num_kv_heads, block_size, head_dim]."""
    torch.manual_seed(2)
    memory = caches(2, 4, 3, 5, 16)
    before = memory.clone()
    before[:, :, 3] = before[:, :, 1]
    stage.copy_blocks(*memory.transpose(3, 4), ids(1), ids(3))
    assert torch.equal(memory, before)


def test_k_and_v_in_different_orders(stage):
    torch.manual_seed(3)
    (k_cache, _), (memory, _) = caches(2, 4, 5, 3, 16), caches(2, 4, 3, 5, 16)
    expected = k_cache.clone(), memory.clone()
    for cache in expected:
        cache[:, 0] = cache[:, 2]
    stage.copy_blocks(k_cache, memory.transpose(2, 3), ids(2), ids(0))
    assert torch.equal(k_cache, expected[0]), "K: slots before heads"
    assert torch.equal(memory, expected[1]), "V: heads before slots"


def test_only_v_has_gaps(stage):
    torch.manual_seed(9)
    k_cache, memory = caches(2, 4, 3, 2, 8)[0], caches(2, 4, 3, 2, 12)[0]
    expected_k, expected_v = k_cache.clone(), memory.clone()
    expected_k[:, 3] = expected_k[:, 1]
    expected_v[:, 3, ..., :8] = expected_v[:, 1, ..., :8]
    stage.copy_blocks(k_cache, memory[..., :8], ids(1), ids(3))
    assert torch.equal(k_cache, expected_k) and torch.equal(memory, expected_v)


@pytest.mark.parametrize("dimension", range(5))
def test_gaps(stage, dimension):
    """What lies in the gaps belongs to somebody else."""
    torch.manual_seed(4)
    shape = [3, 4, 3, 2, 8]
    shape[dimension] *= 2
    memory = caches(*shape)
    before = memory.clone()
    every_second = [slice(None)] * 6
    every_second[dimension + 1] = slice(None, None, 2)
    cache, expected = memory[tuple(every_second)], before[tuple(every_second)]
    expected[:, :, 1], expected[:, :, 3] = expected[:, :, 0], expected[:, :, 2]
    stage.copy_blocks(*cache, ids(0, 2), ids(1, 3))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("far", ["layers", "blocks", "slots", "heads", "dims"])
def test_further_apart_than_32_bits(stage, far, far_apart):
    """The third layer, block, slot … begins 2^31 numbers behind the first."""
    torch.manual_seed(5)
    which = ["layers", "blocks", "slots", "heads", "dims"].index(far)
    shape = [3 if i in (which, 1) else 2 for i in range(5)]
    strides, near = [0] * 5, 1
    for i in reversed(range(5)):
        strides[i] = 2**30 if i == which else near
        near *= 1 if i == which else shape[i]
    k_cache, v_cache = (far_apart(shape, strides, start) for start in (0, 128))
    for cache in (k_cache, v_cache):
        cache.copy_(caches(*shape, dtype=torch.float16)[0])
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    stage.copy_blocks(k_cache, v_cache, ids(2).int(), ids(1).int())
    for cache, want in zip((k_cache, v_cache), expected, strict=True):
        want[:, 1] = want[:, 2]
        assert torch.equal(cache, want), f"the {far} lie 2^30 numbers apart"


def test_nothing_to_copy(stage):
    torch.manual_seed(6)
    cache = caches(2, 3, 2, 1, 4)
    before = cache.clone()
    stage.copy_blocks(*cache, ids(), ids())
    assert torch.equal(cache, before)


def test_other_integers(stage):
    torch.manual_seed(7)
    cache = caches(2, 3, 2, 1, 4)
    expected = cache.clone()
    expected[:, :, 1] = expected[:, :, 2]
    stage.copy_blocks(*cache, ids(2).int(), ids(1).int())
    assert torch.equal(cache, expected)


@pytest.mark.skipif(not COMPILED, reason="needs a GPU")
def test_many_large_blocks(stage):
    torch.manual_seed(8)
    cache = caches(2, 600, 16, 8, 128, dtype=torch.bfloat16)
    expected = cache.clone()
    sources, destinations = torch.randperm(600, device=DEVICE).view(2, 300)
    sharing.copy_blocks(*expected, sources, destinations)
    stage.copy_blocks(*cache, sources, destinations)
    assert torch.equal(cache, expected)


CACHE = torch.ones(2, 3, 4, 2, 8, device=DEVICE)
REFUSED = [
    ({"k_cache": CACHE[0]}, r"k_cache has shape \[3, 4, 2, 8\]"),
    ({"v_cache": CACHE[:1]}, r"v_cache has shape \[1, .*\[2, 3, 4, 2, 8\]"),
    ({"v_cache": CACHE.half()}, "v_cache is torch.float16; it must be torch.float32"),
    ({"k_cache": CACHE.int(), "v_cache": CACHE.int()}, "k_cache is torch.int32; it must be"),
    ({"sources": ids(0, 1)}, r"destinations has shape \[1\]; it must be \[2\]"),
    ({"sources": ids(0).float()}, "sources is torch.float32"),
    ({"destinations": ids(0).float()}, "destinations is torch.float32"),
    ({"sources": ids(0, 1, 2)[::2], "destinations": ids(0, 1)}, "sources is not contiguous"),
    (
        {"sources": ids(0, 1), "destinations": ids(2, 1, 0)[::2]},
        "destinations is not contiguous",
    ),
    ({"v_cache": CACHE.to("meta")}, "v_cache is on meta"),
    ({"destinations": ids(2).to("meta")}, "destinations is on meta"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {"k_cache": CACHE, "v_cache": CACHE, "sources": ids(1), "destinations": ids(2)}
    with pytest.raises(ValueError, match=message):
        stage.copy_blocks(**good | change)
