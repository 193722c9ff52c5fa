"""Who stays and who goes: admission, refusals, eviction, age, reset, and what dies when.

The numbers of most tests are those of a public report, which they name. Blocks have 4 slots.
"""

import random

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import Witness

P, Q, R = (list(range(100 * n, 100 * n + 16)) for n in (1, 2, 3))


def free_order(witness):
    """The ids of the free blocks, head first: the order of their eviction."""
    return [block.block_id for block in witness.cache.pool.free_queue]


def compute(witness, seq_id):
    witness.step({seq_id: witness.waiting(seq_id)})


def tight(stage):
    """5 usable blocks. P's first 8 tokens have been computed, and lie in two free blocks; "Q" runs
    in two others. 3 blocks are free."""
    witness = Witness(stage, num_blocks=6)
    witness.live(P[:8])
    witness.add("Q", Q[:7])
    compute(witness, "Q")
    assert free_order(witness) == [5, 2, 1], repr(witness)
    return witness


# Admission.


def test_hits_that_are_free_count_as_needed(stage):
    """Canonical: vllm-project/vllm#11562. 16 tokens with a hit of 8 take 2 new blocks, and 3 are
    free; but 2 of these are the hit."""
    witness = tight(stage)
    prompt = P[:8] + R[:8]
    before = witness.snapshot()
    needed = witness.cache.need(prompt, 8)
    witness.assert_unchanged(before, "need")
    assert needed == (8, 4), f"hit 8; 2 new blocks, and 2 hits leave the queue: {needed}"
    assert witness.cache.need(prompt, 4) == (8, 3), "this would fit"

    assert witness.add("R", prompt) == 8  # and whoever does not ask finds out
    taken = witness.snapshot()
    with pytest.raises(OutOfBlocks) as failure:
        witness.cache.reserve({"R": 8})
    assert (failure.value.needed, failure.value.free) == (2, 1), str(failure.value)
    witness.assert_unchanged(taken, "a refused reserve")
    witness.free("R")
    assert free_order(witness) == [5, 2, 1], f"as before: {free_order(witness)}"

    witness.free("Q")
    assert witness.add("R", prompt) == 8
    compute(witness, "R")
    witness.check_contents()


def test_the_hit_of_a_failed_attempt_is_forgotten(stage):
    """Canonical: vllm-project/vllm#18957. Between two attempts the blocks went to somebody else."""
    witness = tight(stage)
    prompt = P[:8] + R[:8]
    assert witness.cache.need(prompt, 8) == (8, 4), "does not fit yet"
    witness.live(12)  # takes the 3 free blocks, the hits among them
    witness.free("Q")
    assert witness.cache.need(prompt, 16) == (0, 4), "the lookup is repeated"
    assert witness.add("R", prompt) == 0, repr(witness)
    compute(witness, "R")
    witness.check_contents()


@pytest.mark.parametrize(
    "seq_id, prompt, max_tokens",
    [
        pytest.param("Q", P, None, id="the name is taken"),
        pytest.param("R", P, 15, id="its limit is too low"),
        pytest.param("R", P, 25, id="its limit is too high"),
        pytest.param("R", P + Q, None, id="it is longer than max_seq_len"),
        pytest.param("R", [*P, -1], None, id="a token is no token"),
    ],
)
def test_a_refused_add_takes_nothing(stage, seq_id, prompt, max_tokens):
    witness = tight(stage)
    before = witness.snapshot()
    with pytest.raises(ValueError):
        witness.cache.add(seq_id, prompt, max_tokens)
    witness.assert_unchanged(before, "a refused add")


def test_one_sequence_too_many_takes_nothing(stage):
    witness = Witness(stage, max_num_seqs=1)
    witness.live(P)
    witness.add("Q", Q)
    before = witness.snapshot()
    with pytest.raises(ValueError, match="max_num_seqs is 1"):
        witness.cache.add("P", P)
    witness.assert_unchanged(before, "a refused add")


def test_need_is_what_add_and_reserve_take(stage):
    """In random states, for random beginnings of three texts and random continuations."""
    choose, witness, outcomes = random.Random(0), Witness(stage, num_blocks=9), set()
    for seq_id in range(300):
        running = list(witness.cache.seq_ids)
        for ended in choose.sample(running, k=max(0, len(running) - choose.randint(0, 2))):
            witness.free(ended)
        prompt = choose.choice([P, Q, R])[: choose.randint(1, 16)]
        prompt = prompt + choose.choices(range(50), k=choose.randint(1, 4))
        n = choose.randint(1, len(prompt) - witness.cache.need(prompt, 1)[0])
        before = witness.snapshot()
        hit, needed = witness.cache.need(prompt, n)
        witness.assert_unchanged(before, "need")
        free = witness.cache.pool.num_free_blocks
        assert witness.add(seq_id, prompt) == hit, f"need found {hit}; {witness!r}"
        if needed > free:
            with pytest.raises(OutOfBlocks):
                witness.cache.reserve({seq_id: n})
            witness.free(seq_id)
            outcomes.add("refused")
        else:
            witness.step({seq_id: n})
            taken = free - witness.cache.pool.num_free_blocks
            assert taken == needed, f"{taken} blocks left the queue, not {needed}; {witness!r}"
            outcomes.add("hit" if hit else "miss")
    assert outcomes == {"hit", "miss", "refused"}, "a case did not occur"


# Eviction.


def test_what_was_evicted_is_not_found(stage):
    """Canonical: GeeeekExplorer/nano-vllm#163. Two usable blocks, and Y needs both of them."""
    witness = Witness(stage, num_blocks=3)
    witness.live(P[:4])
    (digest,) = witness.cache.pool.cached_blocks
    witness.add("Y", Q[:8])
    compute(witness, "Y")
    assert witness.add("X", P[:5]) == 0, f"Y has X's block: {witness!r}"
    assert witness.cache.pool.get_cached_block(digest) is None, "the map has an entry for X still"
    witness.free("X")
    witness.free("Y")
    assert witness.live(P[:5]) == 0
    assert witness.live(P[:5]) == 4


def test_the_map_never_outgrows_the_pool(stage):
    """Canonical: a710128/nanovllm-voxcpm#62. 2000 prompts through 8 usable blocks."""
    witness = Witness(stage, num_blocks=9, num_layers=1)
    cache, pool = witness.cache, witness.cache.pool
    q, k, v = (torch.rand(4, heads, 8).to(cache.k_cache) for heads in (4, 2, 2))
    for i in range(2000):
        cache.add("A", [i, i + 1, i + 2, i + 3])
        batch = cache.reserve({"A": 4})
        batch.attend(0, q, k, v)
        batch.commit()
        cache.free("A")
        assert pool.num_cached_blocks == len(pool.cached_blocks) == min(i + 1, 8), (
            f"{i + 1} prompts: {pool.num_cached_blocks} blocks with a digest, "
            f"{len(pool.cached_blocks)} entries"
        )
    assert pool.num_evictions == 1992


def test_the_tail_goes_first(stage):
    """Canonical: llm-d/llm-d-inference-sim#704. A stranger takes the last block of the chain, and
    two thirds of it are found still."""
    witness = Witness(stage, num_blocks=4)
    witness.live(P[:12])
    assert free_order(witness) == [3, 2, 1], "the last block was freed first"
    witness.live(Q[:4])
    assert free_order(witness) == [2, 1, 3], "the stranger took c2"
    assert witness.live(P[:12]) == 8


def test_a_partial_hit_renews_only_what_it_found(stage):
    """Canonical: sgl-project/mini-sglang#124. c0 to c3 used at time 1, D at 2, c0 and c1 at 3."""
    witness = Witness(stage, num_blocks=6)
    witness.live(P[:16])
    witness.live(Q[:4])
    assert free_order(witness) == [4, 3, 2, 1, 5], repr(witness)
    assert witness.add("partly", [*P[:8], 7]) == 8
    witness.free("partly")
    assert free_order(witness) == [4, 3, 5, 2, 1], "evicted next: c3, c2, then D, and c0 last"
    witness.live(R[:8])  # two blocks
    assert witness.cache.need([*P[:12], 7], 5) == (8, 4), "c2 is gone, c0 and c1 are there"
    assert witness.cache.need([*Q[:4], 7], 1) == (4, 2), "D is there"


def test_a_hit_is_the_youngest_again(stage):
    """P was computed before Q; P is used again, so Q goes first."""
    witness = Witness(stage, num_blocks=6)
    witness.live(P[:8])
    witness.live(Q[:8])
    assert witness.live(P[:9]) == 8  # its last token lies in block 5, which is free again
    assert free_order(witness) == [4, 3, 5, 2, 1], repr(witness)
    witness.live(R[:8])
    assert (witness.cache.need(P[:9], 1)[0], witness.cache.need(Q[:9], 1)[0]) == (8, 0)


def test_blocks_in_use_are_not_evicted(stage):
    witness = Witness(stage, num_blocks=6)
    witness.live(P[:8])
    witness.add("P", P[:9])
    compute(witness, "P")
    witness.live(8)
    witness.live(8)
    witness.check_contents()
    assert witness.add("again", P[:12]) == 8


# What dies, and when.


def numbers(witness, block_id):
    """How many slots of a block hold numbers, in all layers, K and V."""
    cache = witness.cache
    dead = cache.k_cache[:, block_id].isnan() | cache.v_cache[:, block_id].isnan()
    return int((~dead).flatten(2).all(2).all(0).sum())


def test_contents_die_at_free_or_at_eviction(stage):
    """At free without a digest, at eviction with one."""
    witness = Witness(stage, num_blocks=4)
    witness.add("P", P[:10])
    compute(witness, "P")
    assert [numbers(witness, block) for block in (1, 2, 3)] == [4, 4, 2]
    witness.free("P")
    assert [numbers(witness, block) for block in (1, 2, 3)] == [4, 4, 0], repr(witness)
    witness.add("Q", Q[:8])
    batch = witness.reserve({"Q": 8})  # takes blocks 3 and 2, and has written nothing yet
    assert witness.cache.block_ids("Q") == [3, 2]
    assert [numbers(witness, block) for block in (1, 2, 3)] == [4, 0, 0], repr(witness)
    batch.abort()
    witness.check()
    assert witness.cache.need(P[:9], 1) == (4, 2), "block 2 was evicted, though Q gave it back"


def test_reset_forgets_everything(stage):
    """Canonical: vllm-project/vllm#17103. With new weights nothing of the old may be found."""
    witness = Witness(stage, num_blocks=8)
    witness.live(P[:9])
    witness.live(Q[:8])
    order = free_order(witness)
    witness.cache.reset_prefix_cache()
    assert witness.cache.pool.num_cached_blocks == 0
    assert [numbers(witness, block) for block in range(1, 8)] == [0] * 7, "the contents live on"
    assert free_order(witness) == order
    witness.check()
    assert (witness.live(P[:9]), witness.live(P[:9])) == (0, 8), "not found, and then found anew"


@pytest.mark.parametrize("state", ["a batch is open", "a block is in use", "a hit is in use"])
def test_reset_is_refused(stage, state):
    witness = Witness(stage)
    witness.live(P[:9])
    witness.add("A", Q if state != "a hit is in use" else P)
    if state == "a batch is open":
        witness.cache.reserve({"A": 2})
    elif state == "a block is in use":
        compute(witness, "A")
    before = witness.snapshot()
    with pytest.raises(ValueError):
        witness.cache.reset_prefix_cache()
    witness.assert_unchanged(before, f"a refused reset: {state}")
