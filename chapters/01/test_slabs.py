"""Tasks 1.4 and 1.5: the cache that keeps every sequence in one slab."""

from types import ModuleType

import pytest
import torch
from torch.nn.functional import pad

from pagedattn.attention import attention
from pagedattn.cache import Config, InvariantError, OutOfBlocks
from pagedattn.course.witness import Witness

# Task 1.4: where the tokens of a batch lie.


def test_slots_of_a_batch(stage: ModuleType) -> None:
    """A has slots 0 .. 9, B 10 .. 16. B's first 2 tokens and A's first 3 lie at their starts."""
    witness = Witness(stage)
    witness.add("A", 6, max_tokens=10)
    witness.add("B", 7, max_tokens=7)
    batch = witness.cache.reserve({"B": 2, "A": 3})
    assert batch.slot_mapping.tolist() == [10, 11, 0, 1, 2], f"{witness!r}"
    shape = list(batch.block_table.shape)
    assert shape == [2, 1], f"the block table is {shape}, expected [num_seqs, 1]: [2, 1]"
    assert batch.block_table.tolist() == [[10], [0]], f"the first slot of each slab; {witness!r}"
    assert (batch.slot_mapping.dtype, batch.block_table.dtype) == (torch.int64, torch.int32)


def test_slots_behind_computed_tokens(stage: ModuleType) -> None:
    """Positions, not tokens of this batch, are counted from the start of the slab."""
    witness = Witness(stage)
    witness.add("A", 6, max_tokens=10)
    witness.add("B", 7, max_tokens=9)
    cache = witness.cache
    for sequence, computed in zip(cache.sequences.values(), (4, 5), strict=True):
        sequence.num_computed_tokens = computed
    batch = cache.reserve({"B": 2, "A": 1})
    assert batch.slot_mapping.tolist() == [15, 16, 4], f"{witness!r}"


def test_slots_stay_in_their_slab(stage: ModuleType) -> None:
    """Every token of every sequence: a slot of its own, in its own slab, in order."""
    witness = Witness(stage, num_blocks=31)
    sizes = {"A": 7, "B": 1, "C": 24, "D": 13}
    for seq_id, size in sizes.items():
        witness.add(seq_id, size, max_tokens=size)
    batch = witness.cache.reserve(dict(reversed(sizes.items())))
    # Slabs lie one after another, in the order of add: A 0 .. 6, B 7, C 8 .. 31, D 32 .. 44.
    expected = [*range(32, 45), *range(8, 32), 7, *range(7)]
    assert batch.slot_mapping.tolist() == expected, f"{witness!r}"


# Task 1.5: storing and attending. The tests of the verbs do most of the work.


def test_attend_writes_its_slots_and_no_other(stage: ModuleType) -> None:
    witness = Witness(stage)
    for seq_id in ("A", "B"):
        witness.add(seq_id, 6, max_tokens=8)
        witness.step({seq_id: 6})
    witness.append("A", 2)
    batch = witness.reserve({"A": 2})
    q, k, v = witness.inputs(batch, 1)
    expected_k, expected_v = witness.cache.k_cache.clone(), witness.cache.v_cache.clone()
    expected_k[1, 6:8], expected_v[1, 6:8] = k, v
    batch.attend(1, q, k, v)
    for name, cache, expected in (
        ("K", witness.cache.k_cache, expected_k),
        ("V", witness.cache.v_cache, expected_v),
    ):
        wrong = (cache != expected) & ~(cache.isnan() & expected.isnan())
        places = wrong.any(dim=(2, 3)).nonzero().tolist()
        assert not places, f"{name} is wrong at [layer, slot] {places}; {witness!r}"


def test_padding_is_not_stored(stage: ModuleType) -> None:
    """A batch padded to a fixed size: tokens with slot -1 write nothing, the last slot included."""
    witness = Witness(stage, num_blocks=3, max_seq_len=8)
    witness.add("A", 3, max_tokens=8)
    batch = witness.reserve({"A": 3})
    q, k, v = witness.inputs(batch, 0)
    batch.token_ids = pad(batch.token_ids, (0, 2))
    batch.positions = pad(batch.positions, (0, 2))
    batch.slot_mapping = pad(batch.slot_mapping, (0, 2), value=-1)
    padded = [torch.cat((t, torch.full_like(t[:2], 7.0))) for t in (q, k, v)]
    out = batch.attend(0, *padded)
    written = (~witness.cache.k_cache[0].isnan()).any(dim=(1, 2)).nonzero()[:, 0].tolist()
    assert written == [0, 1, 2], (
        f"the slots {written} were written, expected [0, 1, 2]: slot -1 belongs to padding; "
        f"{witness!r}"
    )
    history = witness.histories["A"]
    expected = attention(history.q[0], history.k[0], history.v[0])
    assert torch.allclose(out[:3], expected, rtol=0, atol=1e-12)
    assert not out[3:].any(), f"padding looks at nothing, so its output is 0, not {out[3:]}"


# The cache as a whole.


def test_usage_by_hand(stage: ModuleType) -> None:
    """A reserves 16 slots and uses 5; B reserves all that a sequence may have, 24, and uses 2."""
    witness = Witness(stage)
    witness.add("A", 7, max_tokens=16)
    witness.add("B", 2)
    witness.step({"A": 5, "B": 2})
    usage = witness.cache.usage()
    found = (usage.total, usage.used, usage.reserved, usage.wasted, usage.free)
    assert found == (120, 7, 40, 33, 80), f"{usage}; {witness!r}"
    witness.free("A")
    usage = witness.cache.usage()
    found = (usage.total, usage.used, usage.reserved, usage.wasted, usage.free)
    assert found == (120, 2, 24, 22, 96), f"{usage}; {witness!r}"


def test_add_takes_the_slab_and_reserve_takes_nothing(stage: ModuleType) -> None:
    witness = Witness(stage)
    assert witness.cache.need([1, 2, 3], 3) == (0, 24)
    witness.add("A", 3)
    usage = witness.cache.usage()
    assert usage.reserved == 24
    witness.reserve({"A": 3})
    assert witness.cache.usage() == usage


def test_a_long_sequence_finds_no_piece(stage: ModuleType) -> None:
    """40 of 120 slots are free, 20 in each of two pieces; a sequence of 24 is refused."""
    witness = Witness(stage)
    for seq_id in "ABCDEF":
        witness.add(seq_id, 3, max_tokens=20)
    witness.free("B")
    witness.free("E")
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as refused:
        witness.cache.add("G", [1, 2, 3], max_tokens=24)
    assert (refused.value.needed, refused.value.free) == (24, 40)
    witness.assert_unchanged(before, "a refused add")
    witness.free("C")
    witness.add("G", 24)
    witness.step({"G": 24, "A": 3})


def test_the_arena_in_words(stage: ModuleType) -> None:
    witness = Witness(stage, num_blocks=17)
    witness.add("A", 3, max_tokens=24)
    witness.add("B", 3, max_tokens=8)
    witness.add("C", 3, max_tokens=16)
    witness.free("B")
    assert repr(witness.cache) == "[0-23:A 24-31:free 32-47:C 48-63:free]"


def test_broken_invariants_are_found(stage: ModuleType) -> None:
    """What `check_invariants` is for: each of these is a mistake, and each is named."""
    witness = Witness(stage)
    witness.add("A", 6, max_tokens=8)
    witness.step({"A": 4})
    cache = witness.cache
    holes = cache.arena.holes

    for broken in (
        [(4, 116)],
        [(9, 111)],
        [(8, 111)],
        [],
        [(8, 12), (20, 100)],
        [(8, 0), (8, 112)],
    ):
        cache.arena.holes = broken
        with pytest.raises(InvariantError, match="I1"):
            cache.check_invariants()
    cache.arena.holes = holes

    cache.k_cache[0, 5] = 1.0
    with pytest.raises(InvariantError, match="I7: K in slot 5 is dead but not NaN"):
        cache.check_invariants()
    cache.k_cache[0, 5] = torch.nan
    cache.v_cache[1, 2, 0, 3] = torch.nan
    with pytest.raises(InvariantError, match="I7: V in slot 2 is computed but not finite"):
        cache.check_invariants()
    cache.v_cache[1, 2, 0, 3] = 1.0

    cache.sequences["A"].num_computed_tokens = 7
    with pytest.raises(InvariantError, match="7 tokens computed, 6 known"):
        cache.check_invariants()


def test_slots_fit_into_the_block_table(stage: ModuleType) -> None:
    """The first slot of a slab is an int32 number. Nothing is allocated before that is checked."""
    config = Config(num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=2**27 + 1, max_seq_len=16)
    with pytest.raises(ValueError, match="2147483648 slots"):
        stage.build_cache(config)
