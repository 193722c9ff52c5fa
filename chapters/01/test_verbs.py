"""The verbs of a cache, whatever it keeps its slots in.

Every later stage runs these tests too. They drive a cache through a `Witness`, which compares each
output with attention that has no cache, and each length and tensor with what it should be.
"""

from types import ModuleType

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import Witness

pytestmark = pytest.mark.contract


def prefill(witness: Witness, lengths: dict[str, int]) -> None:
    """Sequences with so many computed tokens each."""
    for seq_id, length in lengths.items():
        witness.add(seq_id, length)
        witness.step({seq_id: witness.waiting(seq_id)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_prompt_then_decode(stage: ModuleType, dtype: torch.dtype) -> None:
    witness = Witness(stage, dtype=dtype)
    prefill(witness, {"A": 7, "B": 1, "C": 12})
    for _ in range(6):
        witness.decode("A", "B", "C")


@pytest.mark.parametrize("num_heads, num_kv_heads", [(10, 2), (9, 3), (8, 8), (8, 1)])
@pytest.mark.parametrize("head_dim", [1, 3, 80])
def test_every_shape(stage: ModuleType, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    witness = Witness(stage, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    prefill(witness, {"A": 6, "B": 3})
    witness.decode("A", "B")


def test_window(stage: ModuleType) -> None:
    """A query at position i sees the keys i - 3 .. i."""
    witness = Witness(stage, layer_specs=(AttentionSpec(window=4),) * 2)
    prefill(witness, {"A": 9, "B": 3})
    for _ in range(3):
        witness.decode("A", "B")


def test_every_layer_has_its_own_spec(stage: ModuleType) -> None:
    specs = (AttentionSpec(window=4), AttentionSpec(soft_cap=2.0), AttentionSpec(scale=0.9))
    witness = Witness(stage, num_layers=3, layer_specs=specs)
    prefill(witness, {"A": 10})
    witness.decode("A")


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_give_the_same_outputs(stage: ModuleType, chunk: int) -> None:
    whole, chunked = Witness(stage), Witness(stage)
    for witness in (whole, chunked):
        witness.add("A", 13)
    expected = torch.stack(whole.step({"A": whole.waiting("A")}))
    pieces = []
    while waiting := chunked.waiting("A"):
        pieces.append(torch.stack(chunked.step({"A": min(chunk, waiting)})))
    error = (torch.cat(pieces, dim=1) - expected).abs().max().item()
    assert error <= 1e-12, (
        f"a prompt of 13 tokens in chunks of {chunk} differs by {error:.3g} from the same prompt "
        f"in one step; {chunked!r}"
    )


def test_a_prompt_is_read_causally(stage: ModuleType) -> None:
    """A cache is present, and yet no token of a prompt sees a later one."""
    one, other = Witness(stage), Witness(stage)
    for witness in (one, other):
        witness.add("A", 5)
    other.histories["A"].k[:, 4] += 1
    other.histories["A"].v[:, 4] += 1
    before, after = (
        batch.attend(0, *witness.inputs(batch, 0))
        for witness in (one, other)
        for batch in [witness.reserve({"A": 5})]
    )
    changed = [p for p in range(5) if not torch.equal(before[p], after[p])]
    assert changed == [4], (
        f"K and V of position 4 changed, and with them the outputs of positions {changed}; "
        f"only that of position 4 may; {other!r}"
    )


def test_positions_count_on(stage: ModuleType) -> None:
    """A prompt of 6 tokens and three decode steps: positions 0 .. 5, 6, 7, 8."""
    witness = Witness(stage)
    witness.add("A", 6)
    found = []
    for _ in range(4):
        batch = witness.cache.reserve({"A": witness.waiting("A")})
        found.append(batch.positions.tolist())
        for layer in range(2):
            batch.attend(layer, *witness.inputs(batch, layer))
        witness.commit(batch)
        witness.append("A")
    expected = [[0, 1, 2, 3, 4, 5], [6], [7], [8]]
    assert found == expected, f"the positions are {found}, expected {expected}; {witness!r}"


def test_a_chunk_sees_no_slot_behind_it(stage: ModuleType) -> None:
    """Chunks of 4 of a prompt of 10: seq_lens 4, 8, 10. The slots behind a chunk hold NaN."""
    witness = Witness(stage)
    witness.add("A", 10)
    lengths = []
    for n in (4, 4, 2):
        batch = witness.reserve({"A": n})
        lengths += batch.seq_lens.tolist()
        witness.attend(batch)
        witness.commit(batch)
    assert lengths == [4, 8, 10], f"seq_lens are {lengths}, expected [4, 8, 10]; {witness!r}"


def test_tensors_of_a_batch(stage: ModuleType) -> None:
    witness = Witness(stage)
    prefill(witness, {"A": 6, "B": 9})
    witness.append("A", 2)
    witness.add("C", 5)
    batch = witness.reserve({"C": 4, "A": 2})
    assert batch.query_start_loc.tolist() == [0, 4, 6]
    assert batch.seq_lens.tolist() == [4, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 6, 7]
    for name, tensor, dtype in (
        ("token_ids", batch.token_ids, torch.int64),
        ("positions", batch.positions, torch.int64),
        ("slot_mapping", batch.slot_mapping, torch.int64),
        ("query_start_loc", batch.query_start_loc, torch.int32),
        ("seq_lens", batch.seq_lens, torch.int32),
        ("block_table", batch.block_table, torch.int32),
    ):
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, expected {dtype}"
    assert batch.slot_mapping.shape == (6,)
    assert len(set(batch.slot_mapping.tolist())) == 6, (
        f"two tokens were given the same slot: {batch.slot_mapping.tolist()}; {witness!r}"
    )
    assert batch.block_table.shape[0] == 2


def test_lengths_advance_only_at_commit(stage: ModuleType) -> None:
    witness = Witness(stage)
    witness.add("A", 7)

    def lengths() -> tuple[int, int]:
        return witness.cache.num_tokens("A"), witness.cache.num_computed_tokens("A")

    batch = witness.reserve({"A": 5})
    assert lengths() == (7, 0), f"after reserve: known, computed = {lengths()}; {witness!r}"
    witness.attend(batch)
    assert lengths() == (7, 0), f"after attend: known, computed = {lengths()}; {witness!r}"
    assert witness.cache.usage().used == 0, "a token of an open batch is not used yet"
    batch.commit()
    assert lengths() == (7, 5), f"after commit: known, computed = {lengths()}; {witness!r}"
    assert witness.cache.usage().used == 5


@pytest.mark.parametrize("layers_attended", [0, 1, 2])
def test_abort_leaves_everything(stage: ModuleType, layers_attended: int) -> None:
    """An aborted batch leaves lengths and contents; what it wrote is dead."""
    witness = Witness(stage)
    prefill(witness, {"A": 6, "B": 3})
    witness.append("A", 4)
    witness.add("C", 9)
    usage = witness.cache.usage()
    batch = witness.reserve({"C": 9, "A": 3})
    for layer in range(layers_attended):
        witness.attend_layer(batch, layer)
    batch.abort()
    witness.check()
    assert witness.cache.usage() == usage, (
        f"before the batch: {usage}; after its abort: {witness.cache.usage()}; {witness!r}"
    )
    witness.step({"A": 4, "C": 5})
    witness.decode("B")


def test_a_new_sequence_owes_nothing_to_an_old_one(stage: ModuleType) -> None:
    """The same name and the same slots again: lengths, positions and outputs start from nothing."""
    witness = Witness(stage, num_blocks=4, max_seq_len=12)
    for length in (11, 3, 7):
        witness.add("A", length, max_tokens=12)
        witness.step({"A": witness.waiting("A")})
        witness.decode("A")
        witness.free("A")
        assert witness.cache.usage().reserved == 0, f"something was not given back: {witness!r}"
        witness.check()


def test_a_batch_in_another_order(stage: ModuleType) -> None:
    """Sequences are decoded in an order that is neither that of their arrival nor of their age."""
    witness = Witness(stage)
    prefill(witness, {"s0": 4, "s1": 9, "s2": 2, "s3": 7})
    witness.free("s0")
    prefill(witness, {"s4": 5})
    for order in (("s3", "s4", "s1"), ("s2", "s1", "s3", "s4"), ("s4", "s2")):
        witness.decode(*order)


def test_chunks_and_decodes_in_one_batch(stage: ModuleType) -> None:
    witness = Witness(stage)
    prefill(witness, {"A": 6, "B": 3})
    witness.add("C", 11)
    for chunk in (4, 1, 6):
        witness.append("A")
        witness.append("B")
        witness.step({"A": 1, "C": chunk, "B": 1})
    witness.decode("C", "A", "B")


def test_usage_adds_up(stage: ModuleType) -> None:
    """Used are computed tokens, whoever computed them; what is not reserved is free."""
    witness = Witness(stage)
    assert witness.cache.usage().free == 120, f"an empty cache has 120 free slots; {witness!r}"
    prefill(witness, {"A": 7, "B": 16})
    witness.decode("A")
    usage = witness.cache.usage()
    assert (usage.total, usage.used) == (120, 24), f"{usage}; {witness!r}"
    assert usage.used + usage.wasted + usage.free == 120, f"{usage}; {witness!r}"
    for seq_id in ("A", "B"):
        witness.free(seq_id)
    witness.check()
    assert witness.cache.usage().free == 120, f"all were freed, but {witness!r}"


def test_need_changes_nothing(stage: ModuleType) -> None:
    witness = Witness(stage)
    prefill(witness, {"A": 7})
    before = witness.snapshot()
    num_computed, needed = witness.cache.need([3, 1, 4, 1, 5], 5)
    witness.assert_unchanged(before, "need")
    assert num_computed == 0
    assert needed > 0


def test_a_full_pool_serves_again_after_a_free(stage: ModuleType) -> None:
    """A pool of 24 slots: three sequences of 8 tokens fit, a fourth only when one has ended."""
    witness = Witness(stage, num_blocks=7, max_seq_len=8)
    prefill(witness, {"A": 8, "B": 8, "C": 8})
    refused = None
    try:
        witness.add("D", 8)
        witness.reserve({"D": 8})
    except OutOfBlocks as error:
        refused = error
    assert refused is not None, f"24 slots hold 24 tokens, yet 8 more were accepted; {witness!r}"
    assert (refused.needed > refused.free) and refused.free == 0, (
        f"nothing is free, but the error says needed {refused.needed}, free {refused.free}"
    )
    witness.check()
    witness.free("B")
    if "D" not in witness.histories:  # it was add that refused
        witness.add("D", 8)
    witness.step({"D": witness.waiting("D")})


def test_without_poison_memory_holds_numbers(stage: ModuleType) -> None:
    """Poison is a switch: off, nothing is NaN, not even memory that was freed."""
    witness = Witness(stage, poison=False)
    witness.add("A", 5)
    witness.step({"A": witness.waiting("A")})
    witness.free("A")
    for name in ("k_cache", "v_cache"):
        cache = getattr(witness.cache, name)
        assert cache.isfinite().all(), f"{name} holds NaN, but poison is off; {witness!r}"


def test_no_gradients_are_kept(stage: ModuleType) -> None:
    """K and V that are part of a graph would keep every step's graph alive."""
    witness = Witness(stage)
    witness.add("A", 3)
    batch = witness.reserve({"A": 3})
    for layer in range(2):
        q, k, v = (tensor.requires_grad_() for tensor in witness.inputs(batch, layer))
        out = batch.attend(layer, q, k, v)
        assert not out.requires_grad
    batch.commit()
    assert not witness.cache.k_cache.requires_grad and not witness.cache.v_cache.requires_grad
