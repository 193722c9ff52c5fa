"""An error in the middle of a verb: what the cache holds then, and whether one can try again.

Memory runs out where digests are made, or where the block table is written. Blocks have 4 slots.
"""

import pytest

from pagedattn.course.witness import Witness

P, Q = list(range(100, 113)), list(range(200, 213))  # 13 tokens: 3 full blocks and one more


def fail(*args, **kwargs):
    raise MemoryError


def failing_at(call, works):
    """``works``, but for one call: the first is number 0."""
    calls = iter(range(call + 1))

    def works_or_fails(*args, **kwargs):
        if next(calls, None) == call:
            raise MemoryError
        return works(*args, **kwargs)

    return works_or_fails


def compute(witness, *seq_ids):
    witness.step({seq_id: witness.waiting(seq_id) for seq_id in seq_ids})


def test_add_fails_while_it_hashes(stage, monkeypatch):
    witness = Witness(stage)
    witness.live(P)
    witness.add("Q", Q)
    before = witness.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(stage.BlockHasher, "hash_blocks", fail)
        with pytest.raises(MemoryError):
            witness.cache.add("P", P)
    assert witness.cache.seq_ids == ["Q"], repr(witness)
    witness.assert_unchanged(before, "an add that failed")
    assert witness.add("P", P) == 12, "it can be tried again"


@pytest.mark.parametrize("hit", ["free", "in use"])
def test_add_fails_while_it_writes_the_table(stage, monkeypatch, hit):
    witness = Witness(stage)
    witness.live(P)
    if hit == "in use":
        witness.add("Q", P)
        compute(witness, "Q")
    cache = witness.cache
    counts = [block.ref_cnt for block in cache.pool.blocks]
    num_cached = cache.pool.num_cached_blocks
    with monkeypatch.context() as patch:
        patch.setattr(stage.BlockTable, "append_row", fail)
        with pytest.raises(MemoryError):
            cache.add("P", P)
    witness.check()  # tables, counts and sequences agree; "P" is none of them
    assert [block.ref_cnt for block in cache.pool.blocks] == counts, "as before"
    assert cache.pool.num_cached_blocks == num_cached, "and all can be found still"
    assert witness.add("P", P) == 12, "the same hit when it is tried again"
    compute(witness, "P")
    witness.check_contents()


@pytest.mark.parametrize("then", ["commit", "abort"])
@pytest.mark.parametrize("seq_ids, call", [("A", 0), ("AB", 0), ("AB", 1)])
def test_commit_fails_while_it_hashes(stage, monkeypatch, seq_ids, call, then):
    """The second block of each sequence fills in this step. For one of them memory runs out."""
    witness, prompts = Witness(stage), {"A": P[:6], "B": Q[:6]}
    for seq_id in seq_ids:
        witness.add(seq_id, prompts[seq_id])
    compute(witness, *seq_ids)
    for seq_id in seq_ids:
        witness.append(seq_id, 3)
    cache, pool = witness.cache, witness.cache.pool
    batch = witness.reserve(dict.fromkeys(seq_ids, 3))
    witness.attend(batch)
    digests = [block.block_hash for block in pool.blocks]
    with monkeypatch.context() as patch:
        works = stage.BlockHasher.hash_blocks
        patch.setattr(stage.BlockHasher, "hash_blocks", failing_at(call, works))
        with pytest.raises(MemoryError):
            batch.commit()
    computed = [cache.num_computed_tokens(seq_id) for seq_id in seq_ids]
    assert computed == [6] * len(seq_ids), f"nothing is committed: {computed}; {witness!r}"
    assert cache.open_batch is batch, "the batch is open still"
    assert [block.block_hash for block in pool.blocks] == digests, "and nothing is registered"
    if then == "abort":
        batch.abort()
        witness.check()
        compute(witness, *seq_ids)
    else:
        witness.commit(batch)
        witness.check()
    assert pool.num_cached_blocks == 2 * len(seq_ids), "two full blocks each"
    for seq_id in seq_ids:
        said = witness.histories[seq_id].token_ids
        found = [pool.blocks[i].block_hash for i in cache.block_ids(seq_id)]
        assert found == [*cache.hasher.hash_blocks(said), None], f"{seq_id}: {witness!r}"
        assert cache.need(said, 1) == (8, 1), "found, and in use"
    witness.check_contents()
