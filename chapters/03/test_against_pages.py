"""Equal to chapter 02, where every branch owns a full copy.

The same random Q, K and V go through both. On pages without sharing each branch is a sequence of
its own, and its whole history is computed again.
"""

import pytest
import torch

from pagedattn import paged
from pagedattn.course.witness import TOLERANCE, Witness


def on_pages_alone(witness):
    """Outputs of chapter 02 for all computed tokens of each sequence, [num_layers, tokens, …]."""
    config = witness.config
    outputs = {}
    for seq_id, history in witness.histories.items():
        cache = paged.build_cache(config)
        cache.add(seq_id, history.token_ids)
        batch = cache.reserve({seq_id: history.num_computed})
        n = history.num_computed
        outputs[seq_id] = torch.stack(
            [
                batch.attend(
                    layer, history.q[layer, :n], history.k[layer, :n], history.v[layer, :n]
                )
                for layer in range(config.num_layers)
            ]
        )
    return outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("prompt", [8, 9, 11], ids=lambda n: f"prompt of {n}")
def test_samples(stage, prompt, dtype):
    """One prompt, four samples, six tokens each: all of them differ."""
    witness = Witness(stage, dtype=dtype)
    witness.add("A", prompt)
    witness.step({"A": witness.waiting("A")})
    for child in "BCD":
        witness.fork("A", child)
    ours = {s: [] for s in "ABCD"}
    for _ in range(6):
        outputs = torch.stack(witness.decode("A", "B", "C", "D"))  # [num_layers, 4, …]
        for i, seq_id in enumerate("ABCD"):
            ours[seq_id].append(outputs[:, i])
    compare(witness, ours, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_beams(stage, dtype):
    """Three beams, eight steps; the outputs of a beam are those of its ancestors, then its own."""
    witness = Witness(stage, dtype=dtype)
    witness.add("0.0", 7)
    witness.step({"0.0": witness.waiting("0.0")})
    ours = {"0.0": []}
    for step in range(1, 9):
        old = list(ours)
        heirs = [(old[(step * i) % len(old)], f"{step}.{i}") for i in range(3)]
        witness.replace(old, heirs)
        outputs = torch.stack(witness.step({child: 1 for _, child in heirs}))
        ours = {child: [*ours[parent], outputs[:, i]] for i, (parent, child) in enumerate(heirs)}
    assert witness.cache.num_copies > 0
    compare(witness, ours, dtype)


def compare(witness, ours, dtype):
    theirs = on_pages_alone(witness)
    ends = [tuple(h.token_ids) for h in witness.histories.values()]
    assert len(set(ends)) == len(ends), "the sequences must differ, or nothing is shown"
    for seq_id, outputs in ours.items():
        mine = torch.stack(outputs, dim=1)  # [num_layers, tokens, num_heads, head_dim]
        alone = theirs[seq_id][:, -len(outputs) :]
        error = (mine - alone).abs().max().item()
        assert error <= TOLERANCE[dtype], (
            f"sequence {seq_id!r} differs by {error:.3g} from the same sequence without sharing "
            f"(allowed: {TOLERANCE[dtype]:g})"
        )
