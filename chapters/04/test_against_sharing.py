"""Equal to chapter 03, which computes every prompt from its first token.

With caching off, equal in everything: ids, order, and outputs bit by bit. With caching on, the same
requests go through both in the same order, and the outputs of every token that both compute are
compared. What goes into them is equal bit by bit, since a found block holds what this sequence
would have stored; but behind a hit fewer queries are left, and a product of matrices of another
shape may add in another order. So the outputs agree as closely as either agrees with attention that
has no cache: ``TOLERANCE``, a few units in the last place.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from pagedattn import sharing
from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import TOLERANCE, Witness

TEXTS = [list(range(100 * n, 100 * n + 14)) for n in (1, 2, 3)]
OPTIONS = {"num_blocks": 14, "max_num_seqs": 6}


def without_caching(stage):
    """The stage, as `Witness` takes one, with caching off."""

    def build_cache(config):
        return stage.build_cache(config, enable_prefix_caching=False)

    return SimpleNamespace(build_cache=build_cache)


class Pair:
    """Two caches that get the same requests, and random decisions what these are.

    ``upper`` may find beginnings, so it may be ahead of ``lower``; every step computes the same
    tokens of both, but for those that ``upper`` has already.
    """

    def __init__(self, upper, lower, seed):
        self.upper, self.lower, self.choose = upper, lower, random.Random(seed)
        self.num_begun = self.num_hit_tokens = 0

    @property
    def seq_ids(self):
        return list(self.lower.histories)

    def turn(self):
        """One random verb, on both."""
        verbs = [self.step] * 5 + [self.append] * 3
        if len(self.seq_ids) < 6:
            verbs += [self.add] * 3 + [self.fork] * (2 if self.seq_ids else 0)
        if self.seq_ids:
            verbs += [self.free] * (1 if len(self.seq_ids) < 4 else 4)
        self.choose.choice(verbs)()

    def add(self):
        prompt = self.choose.choice(TEXTS)[: self.choose.randint(1, 14)]
        prompt = prompt + self.choose.choices(range(3), k=self.choose.randint(0, 2))
        self.num_begun += 1
        self.num_hit_tokens += self.upper.add(self.num_begun, prompt)
        assert self.lower.add(self.num_begun, prompt) == 0

    def fork(self):
        parent = self.choose.choice(self.seq_ids)
        self.num_begun += 1
        for witness in (self.upper, self.lower):
            witness.fork(parent, self.num_begun)

    def append(self):
        growing = [s for s in self.seq_ids if len(self.lower.histories[s].token_ids) < 24]
        if growing:
            seq_id, token = self.choose.choice(growing), self.choose.randrange(3)
            for witness in (self.upper, self.lower):
                witness.append(seq_id, [token])

    def free(self):
        seq_id = self.choose.choice(self.seq_ids)
        for witness in (self.upper, self.lower):
            witness.free(seq_id)

    def step(self):
        """The next tokens of some sequences: the same last token on both, not the same first."""
        waiting = [s for s in self.seq_ids if self.lower.waiting(s)]
        if not waiting:
            return
        chosen = self.choose.sample(waiting, k=self.choose.randint(1, len(waiting)))
        ends = {
            s: self.lower.histories[s].num_computed
            + self.choose.choice([self.lower.waiting(s), self.choose.randint(1, 5)])
            for s in chosen
        }
        batches = []
        for witness in (self.lower, self.upper):
            counts = {}
            for seq_id, end in ends.items():
                history = witness.histories[seq_id]
                n = min(end, len(history.token_ids)) - history.num_computed
                if n > 0:
                    counts[seq_id] = n
            try:
                batches.append(witness.reserve(counts) if counts else None)
            except OutOfBlocks:  # then neither takes this step
                for batch in filter(None, batches):
                    batch.abort()
                self.free()
                return
        lower, upper = (
            self.computed(witness, batch)
            for witness, batch in zip((self.lower, self.upper), batches, strict=True)
        )
        self.compare(upper, lower)

    def computed(self, witness, batch):
        """The batch's outputs by sequence and position, each [num_layers, num_heads, head_dim]."""
        if batch is None:
            return {}
        outputs = torch.stack(witness.attend(batch), dim=1)
        owners = [seq_id for seq_id, n in batch.num_new_tokens.items() for _ in range(n)]
        witness.commit(batch)
        witness.check()
        witness.check_contents()
        return dict(zip(zip(owners, batch.positions.tolist(), strict=True), outputs, strict=True))

    def compare(self, upper, lower):
        tolerance = TOLERANCE[self.upper.config.dtype]
        for (seq_id, position), output in upper.items():
            error = (output - lower[seq_id, position]).abs().max().item()
            assert error <= tolerance, (
                f"sequence {seq_id!r}, position {position}: the output differs by {error:.3g} from "
                f"that of chapter 03 (allowed: {tolerance:g}); {self.upper!r}"
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_random_requests_with_common_prefixes(stage, dtype):
    """Forks, chunks and evictions among them."""
    hits = evictions = copies = 0
    for seed in range(12):
        pair = Pair(
            Witness(stage, dtype=dtype, **OPTIONS), Witness(sharing, dtype=dtype, **OPTIONS), seed
        )
        for _ in range(100):
            pair.turn()
        hits += pair.num_hit_tokens
        evictions += pair.upper.cache.pool.num_evictions
        copies += pair.upper.cache.num_copies
    assert hits > 400 and evictions > 80 and copies > 20, (hits, evictions, copies)


class Twins(Pair):
    """Caching is off: what one does the other does, to the block and to the bit."""

    def turn(self):
        super().turn()
        upper, lower = (
            (
                [block.block_id for block in witness.cache.pool.free_queue],
                {s: witness.cache.block_ids(s) for s in witness.cache.seq_ids},
                witness.cache.num_copies,
            )
            for witness in (self.upper, self.lower)
        )
        assert upper == lower, "free order, tables and copies must be those of chapter 03"

    def compare(self, upper, lower):
        assert upper.keys() == lower.keys()
        for token, output in upper.items():
            assert torch.equal(output, lower[token]), f"{token}: not the bits of chapter 03"


def test_with_caching_off(stage):
    copies = 0
    for seed in range(10):
        twins = Twins(Witness(without_caching(stage), **OPTIONS), Witness(sharing, **OPTIONS), seed)
        for _ in range(100):
            twins.turn()
        cache = twins.upper.cache
        assert twins.num_hit_tokens == 0 and cache.need(TEXTS[0], 1)[0] == 0
        assert cache.pool.num_cached_blocks == cache.pool.num_evictions == 0
        copies += cache.num_copies
    assert copies > 10


def test_equal_prompts_with_caching_off(stage):
    """The plainest case by itself: the same prompt three times, and nothing is found."""
    witness = Witness(without_caching(stage))
    assert [witness.live(TEXTS[0]) for _ in range(3)] == [0, 0, 0]
    cache = witness.cache
    assert cache.need(TEXTS[0], 14) == (0, 4)
    assert cache.k_cache.isnan().all(), "what nobody can find is dead"
    cache.reset_prefix_cache()
