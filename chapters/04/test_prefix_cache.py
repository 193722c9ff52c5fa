"""The cache that remembers: what a hit is, what the rest of the prompt sees, what is registered.

K and V of a token follow from all that stands before it, as in a model, and outputs are compared
with attention that has no cache: a wrong hit shows as wrong numbers. Blocks have 4 slots.
"""

import pytest
import torch

from pagedattn.course.witness import TOLERANCE, Witness

PROMPT = list(range(100, 113))  # 13 tokens
OTHER = list(range(200, 224))


def digests(witness, seq_id):
    """What each block of a sequence is registered under, or None."""
    blocks = witness.cache.pool.blocks
    return [blocks[i].block_hash for i in witness.cache.block_ids(seq_id)]


def compute(witness, *seq_ids):
    """All tokens of these sequences that are not computed yet, in one batch."""
    witness.step({seq_id: witness.waiting(seq_id) for seq_id in seq_ids})


@pytest.mark.parametrize(
    "length, hit",
    [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)],
)
def test_whole_blocks_and_never_the_last_token(stage, length, hit):
    """Canonical: GeeeekExplorer/nano-vllm#144. A prompt that is found whole leaves no token to
    compute, and no scores."""
    witness = Witness(stage)
    prompt = PROMPT[:length]
    assert witness.live(prompt) == 0, "the cache was empty"
    found = witness.add("A", prompt)
    assert found == hit, f"{length} tokens, blocks of 4: the hit is {hit}, not {found}; {witness!r}"
    assert witness.cache.num_computed_tokens("A") == hit
    compute(witness, "A")
    witness.check_contents()


@pytest.mark.parametrize("block_size, hit", [(1, 12), (2, 12), (3, 12), (5, 10), (16, 0)])
def test_block_sizes(stage, block_size, hit):
    witness = Witness(stage, block_size=block_size)
    assert (witness.live(PROMPT), witness.live(PROMPT)) == (0, hit)


def test_sharing_with_one_that_lives(stage):
    witness = Witness(stage)
    witness.add("A", PROMPT[:10])
    compute(witness, "A")
    free = witness.cache.pool.num_free_blocks
    assert witness.add("B", PROMPT[:8] + OTHER[:4]) == 8
    cache = witness.cache
    assert cache.block_ids("B") == cache.block_ids("A")[:2], repr(witness)
    assert cache.ref_cnts("A") == [2, 2, 1], repr(witness)
    assert cache.pool.num_free_blocks == free, f"a hit in use takes no free block: {witness!r}"
    compute(witness, "B")
    assert cache.pool.num_free_blocks == free - 1, f"4 tokens, one block: {witness!r}"
    witness.free("A")
    witness.decode("B")
    witness.check_contents()


def test_sharing_with_one_that_has_ended(stage):
    witness = Witness(stage)
    witness.add("A", PROMPT[:10])
    compute(witness, "A")
    blocks = witness.cache.block_ids("A")[:2]
    witness.free("A")
    cache = witness.cache
    assert cache.pool.num_free_blocks == 30, f"what can be found is free, too: {witness!r}"
    assert cache.usage().used == 0, cache.usage()
    assert witness.add("B", PROMPT[:8] + OTHER[:4]) == 8
    assert cache.block_ids("B") == blocks, repr(witness)
    assert cache.ref_cnts("B") == [1, 1], repr(witness)
    assert cache.pool.num_free_blocks == 28, f"both left the free queue: {witness!r}"
    compute(witness, "B")
    witness.check_contents()


def test_only_the_beginning_counts(stage):
    """The same 8 tokens behind another first one: other positions, other K and V."""
    witness = Witness(stage)
    witness.live(PROMPT)
    assert witness.live([7, *PROMPT[:8]]) == 0
    assert witness.live([*OTHER[:4], *PROMPT[4:]]) == 0, "an equal second block is no beginning"


def test_the_batch_of_what_is_left(stage):
    """Canonical: Wenyueh/MinivLLM#98. The second time one token of 9 is computed, at its position
    and with 9 keys to look at."""
    witness = Witness(stage)
    witness.add("A", PROMPT[:9])
    first = torch.stack(witness.step({"A": 9}))
    assert witness.add("B", PROMPT[:9]) == 8
    batch = witness.reserve({"B": 1})
    blocks = witness.cache.block_ids("B")
    assert batch.token_ids.tolist() == [PROMPT[8]]
    assert batch.positions.tolist() == [8], f"positions go on behind the hit: {batch.positions}"
    assert batch.seq_lens.tolist() == [9], f"it attends to 9 keys: {batch.seq_lens}"
    assert batch.query_start_loc.tolist() == [0, 1]
    assert batch.block_table.tolist() == [blocks], f"hits stand in the table, too: {witness!r}"
    assert batch.slot_mapping.tolist() == [blocks[2] * 4], repr(witness)
    second = torch.stack(witness.attend(batch))
    witness.commit(batch)
    error = (second[:, 0] - first[:, 8]).abs().max().item()
    assert error <= TOLERANCE[torch.float64], f"the last token differs by {error:.3g}"


# What is registered, and when.


def test_full_blocks_are_registered_as_they_fill(stage):
    """Canonical: GeeeekExplorer/nano-vllm#30. Computed length 3 to 9: so many full blocks. The
    token just sampled is known, and not computed."""
    witness = Witness(stage)
    witness.add("A", 3)
    compute(witness, "A")
    found = [witness.cache.pool.num_cached_blocks]
    for _ in range(6):
        witness.append("A")
        found.append(witness.cache.pool.num_cached_blocks)
        compute(witness, "A")
    found.append(witness.cache.pool.num_cached_blocks)
    assert found == [0, 0, 1, 1, 1, 1, 2, 2], f"registered after each step: {found}; {witness!r}"


def test_generated_tokens_are_found(stage):
    """The next question of a chat: all that was said before is its beginning."""
    witness = Witness(stage)
    witness.add("A", PROMPT[:3])
    compute(witness, "A")
    for _ in range(7):
        witness.decode("A")
    said = list(witness.histories["A"].token_ids)
    witness.append("A")  # not computed
    witness.free("A")
    assert witness.add("B", [*said, *OTHER[:4]]) == 8, "10 tokens were computed, two full blocks"
    compute(witness, "B")
    witness.check_contents()


def test_a_prompt_in_chunks_is_registered_block_by_block(stage):
    """After 3, 6 and 9 of its tokens: the next one finds 0, 4, 8. Those behind are only known."""
    witness = Witness(stage)
    witness.add("A", PROMPT)
    for chunk, hit in enumerate([0, 4, 8]):
        witness.step({"A": 3})
        found = witness.add(chunk, PROMPT)
        assert found == hit, f"{3 * chunk + 3} tokens are computed, {found} found; {witness!r}"
    compute(witness, "A", 0, 1, 2)
    witness.check_contents()


def test_a_partly_filled_block_is_never_found(stage):
    witness = Witness(stage)
    witness.add("A", PROMPT[:6])
    compute(witness, "A")
    assert digests(witness, "A")[1] is None, f"2 of 4 slots are filled: {witness!r}"
    assert witness.add("B", PROMPT[:9]) == 4
    compute(witness, "B")
    witness.check_contents()


@pytest.mark.parametrize("how", ["never reserved", "aborted", "aborted after attend"])
def test_what_was_never_computed_is_never_found(stage, how):
    """Canonical: huggingface/text-generation-inference#2489."""
    witness = Witness(stage)
    witness.add("A", PROMPT[:8])
    if how != "never reserved":
        batch = witness.reserve({"A": 8})
        if how == "aborted after attend":
            witness.attend(batch)
        batch.abort()
    witness.free("A")
    found = witness.live(PROMPT[:9])
    assert found == 0, f"nothing was computed, and {found} tokens are found; {witness!r}"
    assert witness.live(PROMPT[:9]) == 8


def test_an_aborted_chunk_is_not_found(stage):
    witness = Witness(stage)
    witness.add("A", PROMPT)
    witness.step({"A": 5})
    batch = witness.reserve({"A": 8})
    witness.attend(batch)
    batch.abort()
    assert witness.live(PROMPT) == 4, "4 of the 5 computed tokens fill a block"


def test_equal_prompts_in_one_step(stage):
    """Canonical: sgl-project/mini-sglang#142. Both compute, both blocks take the digest, and no
    table changes, however much others overwrite what is free."""
    witness = Witness(stage, num_blocks=9)
    assert [witness.add(s, PROMPT[:8]) for s in "AB"] == [0, 0], "neither is computed yet"
    compute(witness, "A", "B")
    cache = witness.cache
    tables = {s: cache.block_ids(s) for s in "AB"}
    assert tables == {"A": [1, 2], "B": [3, 4]}, tables
    assert digests(witness, "A") == digests(witness, "B"), repr(witness)
    assert cache.pool.num_cached_blocks == 4 and None not in digests(witness, "A")
    witness.decode("B")  # takes block 5
    witness.add("C", 12)
    compute(witness, "C")  # and these are all others
    assert cache.pool.num_free_blocks == 0, repr(witness)
    assert cache.block_ids("B") == [3, 4, 5], f"B's table must not change: {witness!r}"
    witness.decode("B")
    witness.check_contents()
    for seq_id in "CA":
        witness.free(seq_id)
    witness.live(24 - 4)  # overwrites what A had
    assert cache.block_ids("B") == [3, 4, 5], repr(witness)
    witness.decode("B")
    witness.check_contents()
    assert witness.add("D", PROMPT[:9]) == 8, "B's blocks carry the digests still"
    assert cache.block_ids("D") == [3, 4], repr(witness)


# Forks and copies.


@pytest.mark.parametrize("length", [9, 11, 12])
def test_parent_and_child_register_their_own(stage, length):
    """Each goes on with other tokens and fills blocks of its own, after a hit of 8."""
    witness = Witness(stage)
    witness.live(PROMPT[:9])
    witness.add("A", PROMPT[:length])
    compute(witness, "A")
    witness.fork("A", "B")
    for seq_id in "ABBBAAABAABBAB":
        witness.decode(seq_id)
    said = {s: list(witness.histories[s].token_ids) for s in "AB"}
    hit = (length + 7) // 4 * 4
    blocks = {s: witness.cache.block_ids(s)[: hit // 4] for s in "AB"}
    assert blocks["A"][2:] != blocks["B"][2:], repr(witness)
    for seq_id in "AB":
        witness.free(seq_id)
    for seq_id in "AB":
        found = witness.add(seq_id, [*said[seq_id], 1])
        assert found == hit, f"{length + 7} tokens of {seq_id} were computed, {found} found"
        assert witness.cache.block_ids(seq_id) == blocks[seq_id], repr(witness)
        compute(witness, seq_id)
        witness.check_contents()


def test_a_fork_before_anything_is_computed(stage):
    witness = Witness(stage)
    witness.add("A", PROMPT[:9], salt="us")
    witness.fork("A", "B")
    witness.decode("B", "A")
    for seq_id in "ABABAB":
        witness.append(seq_id)
        compute(witness, seq_id)
    witness.check_contents()
    for seq_id in "AB":
        said = [*witness.histories[seq_id].token_ids[:12], 1]
        assert witness.live(said, salt="us") == 12, f"as {seq_id} computed it; {witness!r}"
        assert witness.cache.need(said, 13)[0] == 0, f"{seq_id} is salted as A was; {witness!r}"


def test_a_copy_never_has_a_digest(stage):
    """Two sharers of a half full block part: neither source nor copy is registered, and later each
    is under its own digest."""
    witness = Witness(stage)
    witness.add("A", PROMPT[:6])
    compute(witness, "A")
    witness.fork("A", "B")
    witness.decode("A", "B")
    assert witness.cache.num_copies == 1
    assert [digests(witness, s)[1] for s in "AB"] == [None, None], repr(witness)
    witness.decode("A", "B")
    ours, theirs = digests(witness, "A"), digests(witness, "B")
    assert ours[0] == theirs[0] and None not in ours + theirs, repr(witness)
    assert ours[1] != theirs[1], f"A and B hold different tokens: {witness!r}"


def test_what_is_registered_is_never_written(stage):
    """Six sequences go on behind the same hit. The blocks stay as they were, bit by bit."""
    witness = Witness(stage)
    witness.add("A", PROMPT[:8])
    compute(witness, "A")
    cache = witness.cache
    ids = cache.block_ids("A")
    before = cache.k_cache[:, ids].clone(), cache.v_cache[:, ids].clone()
    witness.free("A")
    for i in range(5):
        assert witness.add(i, PROMPT[:8] + OTHER[i : i + 3]) == 8
    compute(witness, *range(5))
    witness.fork(0, 5)
    for i in range(6):
        witness.decode(i)
    assert cache.num_copies == 1, f"only 0 and 5 share a block that is not full: {witness!r}"
    for now, then in zip((cache.k_cache[:, ids], cache.v_cache[:, ids]), before, strict=True):
        assert torch.equal(now, then), f"blocks {ids} have digests and were written; {witness!r}"
    witness.check_contents()
