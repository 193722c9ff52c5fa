"""Sliding windows through the verbs: what is seen, what is kept, what is given back.

The cases are those in which other projects went wrong, with their addresses.
"""

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.cache import Config, OutOfBlocks
from pagedattn.config import DTYPES
from pagedattn.course.groups_witness import GroupsWitness, layers_with_windows

FULL = AttentionSpec()


class Seen:
    """A cache whose values are one-hot: V of position p is 1 in place p and 0 elsewhere.

    Queries are 0, so every key that is seen has the same weight, and the output names the keys.
    """

    def __init__(self, stage, window, max_seq_len=16):
        self.config = one_layer(window, max_seq_len)
        self.cache = stage.build_cache(self.config)
        self.cache.add("A", [1])
        self.known = 1

    def compute(self, n):
        """The next n tokens; which keys each of them saw."""
        self.cache.append("A", [1] * (self.cache.num_computed_tokens("A") + n - self.known))
        self.known = self.cache.num_tokens("A")
        batch = self.cache.reserve({"A": n})
        v = torch.eye(self.config.head_dim, dtype=torch.float64)[batch.positions][:, None]
        out = batch.attend(0, torch.zeros_like(v), torch.randn(v.shape, dtype=v.dtype), v)
        batch.commit()
        for row in out[:, 0]:
            seen = row[row > 0]
            torch.testing.assert_close(seen, torch.full_like(seen, 1 / len(seen)))
        return [row.nonzero()[:, 0].tolist() for row in out[:, 0]]


def one_layer(window, max_seq_len):
    return Config(
        num_layers=1, num_kv_heads=1, head_dim=max_seq_len, num_blocks=12, block_size=4,
        max_seq_len=max_seq_len, dtype=torch.float64, poison=True, device="cpu",
        layer_specs=(AttentionSpec(window=window),),
    )  # fmt: skip


@pytest.mark.parametrize("chunks", [(10,), (1,) * 10, (9, 1), (3, 4, 3)])
@pytest.mark.parametrize(
    ("window", "first"), [(4, 6), (1, 9), (100, 0), (10, 0), (9, 1), (None, 0)]
)
def test_a_window_of_w_is_w_keys(stage, chunks, window, first):
    """vllm-project/vllm#3385: the token at position 9 sees itself and the W - 1 before it."""
    seen = Seen(stage, window)
    keys = [key for n in chunks for key in seen.compute(n)]
    assert keys[9] == list(range(first, 10))
    for position, found in enumerate(keys):
        assert found == list(range(max(0, position + 1 - (window or 10)), position + 1))


def test_nothing_is_lost_when_the_window_has_just_become_full(stage):
    """huggingface/transformers#37574: 6 tokens at once, then 4 by themselves."""
    seen = Seen(stage, 8)
    seen.compute(6)
    found = [seen.compute(1)[0] for _ in range(4)]
    assert found == [[*range(7)], [*range(8)], [*range(1, 9)], [*range(2, 10)]]


def test_a_position_keeps_its_slot_when_blocks_before_it_have_left(stage):
    """ohdearquant/lattice#292: blocks of 4, window 4, 12 tokens, where is position 9?"""
    witness = GroupsWitness(stage, num_heads=2, **layers_with_windows(4))
    witness.add("A", 14)
    batch = witness.reserve({"A": 12})
    slots = batch.slot_mapping[0].tolist()
    witness.attend(batch)
    (before,) = witness.cache.block_ids("A")
    witness.commit(batch)
    (after,) = witness.cache.block_ids("A")
    assert after[:2] == [0, 0] and after[2] == before[2] != 0
    assert after[9 // 4] * 4 + 9 % 4 == slots[9]
    for n in (12, 13):
        batch = witness.reserve({"A": 1})
        (table,) = witness.cache.block_ids("A")
        assert batch.slot_mapping[0].tolist() == [table[3] * 4 + n % 4]
        witness.attend(batch)  # NaN in block 0 would show
        witness.commit(batch)
    for cache in witness.cache.layers[0]:
        assert cache[0].isnan().all(), "block 0 was written"
    witness.check_contents()


@pytest.mark.parametrize(("chunk", "most"), [(4, 3), (3, 4), (1, 3)])
def test_a_long_prompt_in_a_small_pool(stage, chunk, most):
    """vllm-project/vllm#55800: window 8, blocks of 4, 6 usable blocks, a prompt of 40 tokens."""
    witness = GroupsWitness(stage, **layers_with_windows(8), num_blocks=7, max_seq_len=48)
    witness.add("A", 40)
    held = []
    while waiting := witness.waiting("A"):
        batch = witness.reserve({"A": min(chunk, waiting)})
        held.append(sum(block_id != 0 for block_id in witness.cache.block_ids("A")[0]))
        witness.attend(batch)
        witness.commit(batch)
        witness.check()
    (table,) = witness.cache.block_ids("A")
    assert max(held) == most
    assert len(table) == 10 and table[:8] == [0] * 8 and 0 not in table[8:]


def test_what_can_be_allocated_is_what_is_allocated(stage):
    """vllm-project/vllm#11168: window 8, a prompt of 24 tokens, 4 blocks free. In one piece it
    needs 6; in pieces of 8 it fits."""
    witness = GroupsWitness(stage, **layers_with_windows(8), num_blocks=5)
    assert witness.cache.need(range(24), 24) == (0, 6)
    witness.add("A", 24)
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as refused:
        witness.reserve({"A": 24})
    assert (refused.value.needed, refused.value.free) == (6, 4)
    witness.assert_unchanged(before, "a refused reserve")
    while witness.waiting("A"):
        witness.step({"A": 8})
    witness.check_contents()


KINDS = {
    "ALiBi": AttentionSpec(window=6, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "sinks": AttentionSpec(window=6, sinks=(0.5, -1.0, 2.0, 0.0)),
    "soft cap and scale": AttentionSpec(window=6, soft_cap=2.0, scale=0.5),
}


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_a_window_with_everything_else(stage, spec):
    """Distances count from the token itself, however many blocks the table has lost."""
    witness = GroupsWitness(stage, layer_specs=(spec, FULL))
    witness.begin("A", 15, chunk=4)
    witness.begin("B", 3)
    for _ in range(6):
        witness.decode("A", "B")
    witness.check_contents()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_pages_are_nan_in_every_type(stage, dtype):
    cache = GroupsWitness(stage, dtype=dtype, **layers_with_windows(None, 6)).cache
    assert all(part.isnan().all() for layer in cache.layers for part in layer)


def test_without_poison_memory_holds_numbers(stage):
    witness = GroupsWitness(stage, poison=False, **layers_with_windows(None, 3))
    witness.begin("A", 12)
    witness.free("A")
    assert all(part.isfinite().all() for layer in witness.cache.layers for part in layer)


def test_no_gradients_are_kept(stage):
    witness = GroupsWitness(stage, **layers_with_windows(None, 3))
    witness.add("A", 6)
    batch = witness.reserve({"A": 6})
    for layer in range(2):
        inputs = [t.requires_grad_() for t in witness.inputs(batch, layer)]
        assert not batch.attend(layer, *inputs).requires_grad
    assert not any(part.requires_grad for layer in witness.cache.layers for part in layer)


def test_groups_of_a_model(stage):
    """2 full layers and 3 with a window, in the order of the model: groups of 2, 2 and 1."""
    cache = GroupsWitness(stage, **layers_with_windows(None, 8, 8, None, 8)).cache
    assert cache.windows == [None, 8, 8]
    assert cache.group_of_layer == [0, 1, 2, 0, 1]
    assert len(cache.tensors) == 2
    same = GroupsWitness(stage, **layers_with_windows(None, None)).cache
    assert same.windows == [None] and same.group_of_layer == [0, 0]
