"""Copy-on-write: whoever writes into a block that others read gets a copy of it first."""

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import DEVICE, Witness


def family(stage, num_tokens, children, **options):
    """A has computed so many tokens, in blocks of 4, and was forked for each child."""
    witness = Witness(stage, **options)
    witness.add("A", num_tokens)
    witness.step({"A": witness.waiting("A")})
    for child in children:
        witness.fork("A", child)
    return witness


@pytest.mark.contract
def test_two_that_diverge(stage):
    """Both write position 6, each its own token. Each must find its own later on."""
    witness = family(stage, 6, "B")
    witness.decode("A", "B")
    witness.check_contents()
    witness.decode("B", "A")
    witness.check_contents()


@pytest.mark.contract
def test_only_one_of_two_writes(stage):
    witness = family(stage, 6, "B")
    witness.decode("B")
    cache = witness.cache
    assert cache.num_copies == 1, f"A still reads the half full block: {witness!r}"
    assert cache.block_ids("A")[0] == cache.block_ids("B")[0], repr(witness)
    assert cache.block_ids("A")[1] != cache.block_ids("B")[1], repr(witness)
    assert (cache.ref_cnts("A"), cache.ref_cnts("B")) == ([2, 1], [2, 1]), repr(witness)
    witness.check_contents()
    witness.decode("A")
    assert cache.num_copies == 1, f"A is alone with its block now: {witness!r}"


@pytest.mark.contract
def test_the_last_sharer_writes_in_place(stage):
    """Canonical: apache/tvm#16666. 7 tokens, three sharers that all write: two copies."""
    witness = family(stage, 7, "BC", num_blocks=7)
    assert witness.cache.ref_cnts("A") == [3, 3], repr(witness)
    assert witness.cache.pool.num_free_blocks == 4, repr(witness)
    last = witness.cache.block_ids("A")[1]
    witness.decode("A", "B", "C")
    cache = witness.cache
    assert cache.num_copies == 2, f"3 sharers write: 2 copies, not 3: {witness!r}"
    assert cache.block_ids("C")[1] == last, f"C stands last in the batch: {witness!r}"
    assert cache.ref_cnts("B") == [3, 1], repr(witness)
    assert cache.pool.num_free_blocks == 2, repr(witness)
    witness.check_contents()
    for seq_id in "ABC":
        witness.append(seq_id)
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as failure:
        cache.reserve({"A": 1, "B": 1, "C": 1})
    assert (failure.value.needed, failure.value.free) == (3, 2), str(failure.value)
    witness.assert_unchanged(before, "a refused reserve")
    witness.step({"A": 1, "B": 1})
    for seq_id in "CAB":
        witness.free(seq_id)
    assert cache.pool.num_free_blocks == 6, repr(witness)


@pytest.mark.contract
def test_copies_count_as_needed_blocks(stage):
    """Canonical: huggingface/transformers#46117. Five sharers, three free blocks."""
    witness = family(stage, 7, "BCDE", num_blocks=6)
    for seq_id in "ABCDE":
        witness.append(seq_id)
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as failure:
        witness.cache.reserve(dict.fromkeys("ABCDE", 1))
    assert (failure.value.needed, failure.value.free) == (4, 3), (
        f"5 sharers that write need 4 copies, 3 blocks are free: {failure.value}"
    )
    witness.assert_unchanged(before, "a refused reserve")
    for seq_id in "BCD":
        witness.step({seq_id: 1})
    for seq_id in "AE":
        with pytest.raises(OutOfBlocks):
            witness.cache.reserve({seq_id: 1})
    witness.free("B")
    witness.step({"E": 1})  # into B's block
    witness.step({"A": 1})  # in place
    assert witness.cache.num_copies == 4, repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_copies_and_new_blocks_are_counted_together(stage):
    """Each of two sharers writes 4 tokens from position 6: one copy, and a new block each."""
    witness = family(stage, 6, "B", num_blocks=5)
    witness.append("A", 4)
    witness.append("B", 4)
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as failure:
        witness.cache.reserve({"A": 4, "B": 4})
    assert (failure.value.needed, failure.value.free) == (3, 2), str(failure.value)
    witness.assert_unchanged(before, "a refused reserve")
    witness.step({"A": 4})
    witness.check_contents()


@pytest.mark.contract
def test_a_pool_that_holds_exactly_the_copies(stage):
    """Every free block becomes a copy, and no source is handed out."""
    witness = family(stage, 6, "BC", num_blocks=5)
    witness.decode("A", "B", "C")
    assert witness.cache.pool.num_free_blocks == 0, repr(witness)
    ends = [witness.cache.block_ids(s)[1] for s in "ABC"]
    assert len(set(ends)) == 3, f"three sequences diverged, their last blocks are {ends}"
    witness.check_contents()


@pytest.mark.contract
def test_what_is_read_but_not_written_is_not_copied(stage):
    """Chunks of a long prompt: only the half full block is copied, however much is written."""
    witness = family(stage, 10, "B")
    witness.append("B", 9)
    witness.step({"B": 9})
    cache = witness.cache
    assert cache.num_copies == 1, repr(witness)
    assert cache.ref_cnts("B") == [2, 2, 1, 1, 1], repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_families_do_not_mix(stage):
    """Two families in one batch: each keeps one block and copies for the other sharers."""
    witness = family(stage, 5, "B")
    witness.add("P", 7)
    witness.step({"P": witness.waiting("P")})
    for child in "QR":
        witness.fork("P", child)
    witness.decode("P", "A", "Q", "B", "R")
    assert witness.cache.num_copies == 1 + 2, repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_the_batch_writes_into_the_copies(stage):
    witness = family(stage, 6, "B")
    witness.append("A")
    witness.append("B")
    batch = witness.reserve({"A": 1, "B": 1})
    ids = [witness.cache.block_ids(s) for s in "AB"]
    assert batch.block_table.tolist() == ids, f"the table names the old block: {witness!r}"
    assert batch.slot_mapping.tolist() == [row[1] * 4 + 2 for row in ids], repr(witness)
    assert len(set(batch.slot_mapping.tolist())) == 2, "both would write the same slot"
    witness.attend(batch)
    witness.commit(batch)
    witness.check_contents()


@pytest.mark.contract
def test_abort_keeps_the_copies(stage):
    """A copy once made stays with its sequence: counts differ from before, contents do not."""
    witness = family(stage, 6, "B")
    witness.append("A", 4)
    witness.append("B", 4)
    free = witness.cache.pool.num_free_blocks
    witness.cache.reserve({"A": 4, "B": 4}).abort()
    cache = witness.cache
    assert cache.num_copies == 1, repr(witness)
    assert cache.pool.num_free_blocks == free - 1, f"the two new blocks came back: {witness!r}"
    assert cache.num_computed_tokens("A") == cache.num_computed_tokens("B") == 6
    witness.check()
    witness.check_contents()
    witness.step({"A": 4, "B": 4})
    assert cache.num_copies == 1, f"each had its own block already: {witness!r}"
    witness.check_contents()


def test_all_copies_of_a_step_are_one_call(stage, monkeypatch):
    calls, copy_blocks = [], stage.copy_blocks

    def counted(k_cache, v_cache, sources, destinations):
        calls.append((sources.tolist(), destinations.tolist()))
        copy_blocks(k_cache, v_cache, sources, destinations)

    monkeypatch.setattr(stage, "copy_blocks", counted)
    witness = family(stage, 6, "BCD")
    witness.decode("A", "B", "C", "D")
    assert len(calls) == 1, f"3 copies, one call: {calls}"
    sources, destinations = calls[0]
    assert len(destinations) == 3 and len(set(destinations)) == 3, calls
    assert not set(sources) & set(destinations), f"a destination is also a source: {calls}"
    witness.decode("A", "B", "C", "D")
    assert len(calls) == 1, f"nothing is shared that is written, so nothing is copied: {calls}"


@pytest.mark.contract
@pytest.mark.parametrize(
    "prompt, copies", [(1024, 0), (1030, 3)], ids=["full blocks", "partly filled"]
)
def test_four_beams_after_one_token(stage, prompt, copies):
    witness = Witness(
        stage,
        num_blocks=80,
        block_size=16,
        max_seq_len=1100,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_heads=1,
    )
    witness.add("A", prompt)
    witness.step({"A": witness.waiting("A")})
    for child in "BCD":
        witness.fork("A", child)
    witness.decode("A", "B", "C", "D")
    cache = witness.cache
    in_use = cache.usage().reserved // 16
    assert in_use == 68, f"64 shared blocks and 4 own ones: {in_use}"
    assert cache.num_copies == copies, f"{cache.num_copies} copies were counted"
    witness.check_contents()


@pytest.mark.contract
def test_many_sharers(stage):
    names = [f"B{i}" for i in range(11)]
    witness = family(stage, 6, names, num_layers=5)
    witness.decode("A", *names)
    assert witness.cache.num_copies == 11, "12 sharers write: the last one in place"
    witness.check_contents()


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt])
def test_a_copy_that_fails_leaves_nothing_behind(stage, monkeypatch, failure):
    witness = family(stage, 6, "BC")
    for seq_id in "ABC":
        witness.append(seq_id)
    cache, copy_blocks = witness.cache, stage.copy_blocks
    before = (
        {s: (cache.block_ids(s), cache.ref_cnts(s)) for s in "ABC"},
        cache.block_table.table.tolist(),
        cache.pool.num_free_blocks,
        cache.num_copies,
    )

    def copies_and_fails(k_cache, v_cache, sources, destinations):
        copy_blocks(k_cache, v_cache, sources, destinations)
        raise failure

    monkeypatch.setattr(stage, "copy_blocks", copies_and_fails)
    with pytest.raises(failure):
        cache.reserve({"A": 1, "B": 1, "C": 1})
    after = (
        {s: (cache.block_ids(s), cache.ref_cnts(s)) for s in "ABC"},
        cache.block_table.table.tolist(),
        cache.pool.num_free_blocks,
        cache.num_copies,
    )
    assert after == before, f"no copy was made, so nothing may have changed: {witness!r}"
    witness.check()  # also that the blocks given back hold nothing
    monkeypatch.undo()
    witness.step({"A": 1, "B": 1, "C": 1})
    witness.check_contents()


@pytest.mark.contract
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 20])
def test_block_sizes(stage, block_size):
    witness = family(stage, 13, "BC", block_size=block_size, num_blocks=65)
    for _ in range(3):
        witness.decode("A", "B", "C")
        witness.check_contents()
    assert witness.cache.num_copies == (0 if block_size == 1 else 2), (
        f"13 tokens and three sharers: {witness!r}"
    )


def cache_of_numbers(num_blocks, strided=False):
    """Random K and V [num_layers, num_blocks, block_size, num_kv_heads, head_dim]."""
    shape = (5, num_blocks, 4, 2, 5)
    if not strided:
        return torch.randn(2, *shape, device=DEVICE).unbind()
    padded = torch.randn(2, 5, num_blocks, 6, 3, 5, device=DEVICE)
    return padded[..., :4, :2, :].unbind()


@pytest.mark.contract
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "padded strides"])
def test_copy_blocks_copies_k_and_v_of_all_layers(stage, strided):
    k, v = cache_of_numbers(8, strided)
    old_k, old_v = k.clone(), v.clone()
    sources, destinations = [6, 2, 6], [1, 7, 4]  # block 6 is copied twice
    stage.copy_blocks(
        k, v, torch.tensor(sources, device=DEVICE), torch.tensor(destinations, device=DEVICE)
    )
    for name, new, old in (("K", k, old_k), ("V", v, old_v)):
        for layer in range(5):
            for block in range(8):
                source = dict(zip(destinations, sources, strict=True)).get(block, block)
                assert torch.equal(new[layer, block], old[layer, source]), (
                    f"{name} of layer {layer}, block {block}, is not what block {source} held"
                )


@pytest.mark.contract
def test_copy_blocks_of_nothing(stage):
    k, v = cache_of_numbers(3)
    old_k, old_v = k.clone(), v.clone()
    nothing = torch.tensor([], dtype=torch.int64, device=DEVICE)
    stage.copy_blocks(k, v, nothing, nothing)
    assert torch.equal(k, old_k) and torch.equal(v, old_v)
