"""The paged cache: the answers of chapter 01's slabs, from less memory."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedattn import contiguous
from pagedattn.cache import Config
from pagedattn.course.witness import DEVICE

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}  # what rounding leaves of outputs of size 1
NUM_HEADS = 4
fresh_tokens = iter(range(10**9))  # no two sequences have a token in common


def make_config(num_blocks=9, block_size=4, **options):
    defaults = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 64}
    defaults |= {"dtype": torch.float64, "device": DEVICE, "poison": True}
    return Config(num_blocks=num_blocks, block_size=block_size, **defaults | options)


def tokens(n):
    return [next(fresh_tokens) for _ in range(n)]


def random_qkv(batch):
    """What a model would hand to ``attend`` in each layer: random q, k and v."""
    config, num_tokens = batch.cache.config, len(batch.token_ids)
    options = {"dtype": config.dtype, "device": config.device}
    heads = (NUM_HEADS, config.num_kv_heads, config.num_kv_heads)
    return [
        [torch.randn(num_tokens, h, config.head_dim, **options) for h in heads]
        for _ in range(config.num_layers)
    ]


class Both:
    """One stage and chapter 01's slabs, driven by the same calls and compared after each step."""

    def __init__(self, stage, **options):
        config = make_config(**options)
        self.cache = stage.build_cache(config)
        slabs = config.max_num_seqs * -(-config.max_seq_len // config.block_size)
        self.slabs = contiguous.build_cache(make_config(**options | {"num_blocks": slabs + 1}))

    def add(self, seq_id, length):
        prompt = tokens(length)
        for cache in (self.cache, self.slabs):
            cache.add(seq_id, prompt)

    def append(self, seq_id, n=1):
        new = tokens(n)
        for cache in (self.cache, self.slabs):
            cache.append(seq_id, new)

    def free(self, seq_id):
        for cache in (self.cache, self.slabs):
            cache.free(seq_id)

    def compute(self, num_new_tokens, abort=False):
        batch = self.cache.reserve(num_new_tokens)
        expected = self.slabs.reserve(num_new_tokens)
        for layer, qkv in enumerate(random_qkv(batch)):
            out, slab_out = batch.attend(layer, *qkv), expected.attend(layer, *qkv)
            assert out.isfinite().all(), (
                f"NaN in layer {layer}: a dead slot was read: {self.cache!r}"
            )
            error = (out - slab_out).abs().max().item()
            assert error <= TOLERANCE[out.dtype], (
                f"layer {layer} differs from chapter 01 by {error:.2g} when "
                f"{num_new_tokens} tokens are computed: {self.cache!r}"
            )
        for each in (batch, expected):
            each.abort() if abort else each.commit()

    def waiting(self):
        """Tokens of each sequence that are known and not computed yet."""
        of = {s: self.slabs.num_tokens(s) - self.slabs.num_computed_tokens(s) for s in self.ids}
        return {s: n for s, n in of.items() if n}

    @property
    def ids(self):
        return self.slabs.seq_ids


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 20, 256])
def test_equal_to_chapter_01(stage, dtype, block_size):
    torch.manual_seed(0)
    both = Both(stage, num_blocks=80, block_size=block_size, dtype=dtype, max_num_seqs=3)
    both.add("A", 21)
    both.add("B", 4)
    both.compute({"A": 16, "B": 4})  # a chunk and a whole prompt
    both.append("B")
    both.compute({"B": 1, "A": 5})  # a decode and the rest of the prompt
    both.add("C", 1)
    both.append("A")
    both.append("B", 2)
    both.compute({"C": 1, "A": 1, "B": 2})
    both.cache.check_invariants()


@pytest.mark.contract
def test_a_sequence_reads_its_own_blocks_whatever_its_place_in_the_batch(stage):
    torch.manual_seed(0)
    both = Both(stage, num_blocks=40, max_num_seqs=8)
    for seq_id in range(8):
        both.add(seq_id, 3 + 2 * seq_id)
    both.compute({s: 3 + 2 * s for s in both.ids})
    for seq_id in (3, 7, 1):
        both.append(seq_id, 3)
    for _ in range(3):
        both.compute({3: 1, 7: 1, 1: 1})


@pytest.mark.contract
def test_a_sequence_goes_on_when_another_has_left(stage):
    torch.manual_seed(0)
    both = Both(stage, num_blocks=20, max_num_seqs=4)
    for seq_id, length in {"A": 18, "B": 7, "C": 3, "D": 12}.items():
        both.add(seq_id, length)
    both.compute({"A": 18, "B": 7, "C": 3, "D": 12})
    for gone in "AC":
        both.free(gone)
        both.cache.check_invariants()
        for seq_id in both.ids:
            both.append(seq_id, 5)
        both.compute(dict.fromkeys(both.ids, 5))
    both.add("E", 20)  # it gets blocks that A and C had
    both.compute({"E": 20})
    for seq_id in both.ids:
        both.append(seq_id)
    both.compute(dict.fromkeys(both.ids, 1))


@pytest.mark.contract
@pytest.mark.parametrize("shuffle", range(3))
def test_the_order_of_the_free_queue_does_not_matter(stage, shuffle):
    torch.manual_seed(0)
    both = Both(stage, num_blocks=20, max_num_seqs=3)
    blocks = both.cache.pool.get_new_blocks(19)
    random.Random(shuffle).shuffle(blocks)
    both.cache.pool.free_blocks(blocks)
    for seq_id, length in {"A": 18, "B": 7, "C": 3}.items():
        both.add(seq_id, length)
    both.compute({"A": 18, "B": 7, "C": 3})
    for seq_id in "CAB":
        both.append(seq_id, 6)
    both.compute({"C": 6, "A": 6, "B": 6})


@pytest.mark.contract
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_equal_to_chapter_01_on_any_schedule(stage, data):
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]), "block_size")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")
    torch.manual_seed(0)
    both = Both(stage, num_blocks=200, block_size=block_size, dtype=dtype, max_num_seqs=4)
    names = iter(range(100))
    for _ in range(data.draw(st.integers(1, 12), "calls")):
        verbs = ["add"] * (len(both.ids) < 4) + ["append", "free"] * bool(both.ids)
        verbs += ["commit", "commit", "abort"] * bool(both.waiting())
        verb = data.draw(st.sampled_from(verbs), "verb")
        if verb == "add":
            both.add(next(names), data.draw(st.integers(1, 30), "length"))
        elif verb == "append":
            seq_id = data.draw(st.sampled_from(both.ids), "sequence")
            room = 64 - both.slabs.num_tokens(seq_id)
            both.append(seq_id, min(data.draw(st.integers(1, 5), "tokens"), room))
        elif verb == "free":
            both.free(data.draw(st.sampled_from(both.ids), "sequence"))
        else:
            waiting = both.waiting()
            chosen = data.draw(st.lists(st.sampled_from([*waiting]), min_size=1, unique=True))
            counts = {s: data.draw(st.integers(1, waiting[s]), "tokens") for s in chosen}
            both.compute(counts, abort=verb == "abort")
        cache = both.cache
        cache.check_invariants()
        wasted = cache.usage().wasted
        assert wasted <= (block_size - 1) * len(both.ids), (
            f"{wasted} slots wasted; less than one block a sequence is the promise: {cache!r}"
        )
    for seq_id in both.ids:
        both.free(seq_id)
    assert both.cache.pool.num_free_blocks == 199, f"blocks were lost: {both.cache!r}"
