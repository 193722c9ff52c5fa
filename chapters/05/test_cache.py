"""The cache on kernels: what the contracts of the chapters below do not ask.

Outputs of every step are compared with attention that has no cache, by ``Witness``.
"""

import random

import pytest
import torch

from pagedattn import prefix
from pagedattn.attention import AttentionSpec
from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import TOLERANCE, Witness

WINDOW = AttentionSpec(window=3)
LAYERS = (
    AttentionSpec(),
    WINDOW,
    AttentionSpec(sinks=(0.5, -1.0, 2.0, 0.0)),
    AttentionSpec(window=3, soft_cap=2.0),
    AttentionSpec(window=6, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
)


def layered(stage, **options):
    return Witness(stage, num_layers=len(LAYERS), layer_specs=LAYERS, **options)


def test_every_layer_has_its_own_attention(stage):
    witness = layered(stage, dtype=torch.float32)
    witness.add("A", 12)
    witness.add("B", 5)
    witness.step({"A": 7})
    witness.step({"A": 5, "B": 5})
    for _ in range(3):
        witness.decode("A", "B")


def test_one_plan_for_each_window(stage, monkeypatch):
    """Five layers with three windows: three plans a step, made anew in the next one."""
    made = []
    library_plan = stage.cache.plan_attention

    def plan_attention(plan, *step):
        made.append(plan.window)
        library_plan(plan, *step)

    monkeypatch.setattr(stage.cache, "plan_attention", plan_attention)
    witness = layered(stage)
    witness.add("A", 9)
    witness.step({"A": 9})
    assert made == [None, 3, 6]
    witness.decode("A")
    assert made == [None, 3, 6] * 2


def test_layers_in_another_order(stage):
    """A layer's plan does not lean on that of the layer before it."""
    witness = layered(stage)
    witness.add("A", 9)
    batch = witness.reserve({"A": 9})
    for layer in (3, 0, 4, 2, 1):
        witness.attend_layer(batch, layer)
    witness.commit(batch)
    witness.check()


def test_only_decodes_and_then_a_prompt(stage):
    """A step of decodes has no prefill tiles; the next step may have some."""
    witness = Witness(stage, max_seq_len=40)
    witness.add("A", 2)
    witness.step({"A": 2})
    witness.decode("A")
    witness.add("B", 33)
    witness.append("A")
    witness.step({"A": 1, "B": 33})
    witness.decode("A", "B")


@pytest.mark.parametrize("block_id", [31, -1])
def test_a_table_with_a_wrong_block(stage, block_id):
    """With poison on it is reported, with row and column, before anything is stored or read."""
    witness = Witness(stage)
    for seq_id, length in (("A", 5), ("B", 9)):
        witness.add(seq_id, length)
    batch = witness.reserve({"A": 5, "B": 9})
    right = batch.block_table.clone()
    batch.block_table[1, 2] = block_id
    message = f"row 1, column 2: block_table has block {block_id}; the pool has blocks 0 to 30"
    before = witness.cache.k_cache.clone(), witness.cache.v_cache.clone()
    with pytest.raises(ValueError, match=message):
        batch.attend(0, *witness.inputs(batch, 0))
    for cache, was in zip((witness.cache.k_cache, witness.cache.v_cache), before, strict=True):
        torch.testing.assert_close(cache, was, rtol=0, atol=0, equal_nan=True)
    batch.block_table.copy_(right)
    witness.attend(batch)
    witness.commit(batch)
    witness.check()


def test_a_length_that_does_not_fit_into_the_table(stage):
    witness = Witness(stage)
    witness.add("A", 5)
    batch = witness.reserve({"A": 5})
    batch.block_table = batch.block_table[:, :1].contiguous()
    with pytest.raises(ValueError, match=r"row 0: seq_lens is 5, .* 4 slots of 1 columns of 4"):
        batch.attend(0, *witness.inputs(batch, 0))
    batch.abort()
    witness.check()


@pytest.mark.parametrize("layers_done", [0, 1, 2])
def test_an_aborted_batch_leaves_nothing(stage, layers_done):
    """Nor does its plan: the next batch has other lengths."""
    witness = Witness(stage)
    witness.add("A", 9)
    witness.add("B", 7)
    witness.step({"A": 4})
    batch = witness.reserve({"A": 5, "B": 7})
    for layer in range(layers_done):
        witness.attend_layer(batch, layer)
    batch.abort()
    witness.check()
    witness.step({"B": 2})
    witness.step({"A": 5, "B": 5})
    witness.check_contents()


def test_a_copy_in_every_layer_of_k_and_v(stage):
    witness = layered(stage)
    witness.add("A", 6)
    witness.step({"A": 6})
    witness.fork("A", "B")
    witness.append("A")
    witness.append("B")
    witness.step({"A": 1, "B": 1})
    assert witness.cache.num_copies == 1
    witness.check_contents()


def random_life(witness, seed, turns):
    """Random requests with common beginnings; the outputs of every step, one tensor a layer."""
    choose, outputs, begun = random.Random(seed), [], 0
    text = list(range(20))
    for _ in range(turns):
        seq_ids = list(witness.histories)
        if len(seq_ids) < 4 and choose.random() < 0.5:
            begun += 1
            witness.add(begun, [*text[: choose.randint(1, 16)], choose.randrange(3)])
        elif seq_ids and choose.random() < 0.2:
            witness.free(choose.choice(seq_ids))
        elif seq_ids and choose.random() < 0.5:
            begun += 1
            witness.fork(choose.choice(seq_ids), begun)
        for seq_id, history in witness.histories.items():
            if not witness.waiting(seq_id) and len(history.token_ids) < 24:
                witness.append(seq_id, [choose.randrange(3)])
        waiting = [s for s in witness.histories if witness.waiting(s)]
        counts = {s: choose.randint(1, witness.waiting(s)) for s in waiting}
        try:
            outputs.append(witness.step(counts) if counts else [])
        except OutOfBlocks:
            witness.free(choose.choice(list(counts)))
    return outputs


def test_the_same_outputs_as_chapter_04(stage):
    """The same requests go through both. Each differs from attention without a cache by the order
    of its sums, by up to ``TOLERANCE``; so they differ from each other by up to twice that."""
    options = {"dtype": torch.float32, "num_layers": 1, "num_blocks": 16, "max_num_seqs": 8}
    upper, lower = Witness(stage, **options), Witness(prefix, **options)
    found, expected = (random_life(witness, seed=29, turns=14) for witness in (upper, lower))
    assert lower.cache.num_copies > 2 and lower.cache.pool.num_evictions > 2, "a lively life"
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for layer, (out, want) in enumerate(zip(ours, theirs, strict=True)):
            error = float((out - want).abs().max())
            assert error <= 2 * TOLERANCE[torch.float32], (
                f"step {step}, layer {layer}: differs by {error:.2g} from chapter 04"
            )
    assert {s: upper.cache.block_ids(s) for s in upper.histories} == {
        s: lower.cache.block_ids(s) for s in lower.histories
    }, "the same blocks: only the arithmetic is another"
