"""A decoder with full and sliding-window layers, run through the cache in every way there is.

What it is compared with knows no cache: the same weights over the whole sequence at once, with
attention written out in float64 below. Weights are random, so a layer that sees one key too many or
too few gives other scores. Poison is on: what has left the window, and the null block in its place,
holds NaN.
"""

import random

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.cache import OutOfBlocks
from pagedattn.model import Llama, ModelConfig, SamplingParams, cache_config, complete

# The norms of the model compute in float32, the rest in float64. Two sums in another order may
# round to neighbouring float32 numbers (6e-8 apart); a few layers and scores of up to 10 make that
# less than 1e-5. One key too many or too few moves the scores by more than 1e-2.
TOLERANCE = 1e-5
FULL, SHORT, LONG = AttentionSpec(), AttentionSpec(window=6), AttentionSpec(window=11)
ALTERNATING = (SHORT, FULL, SHORT, FULL)
KINDS = {
    "alternating": ALTERNATING,
    "five to one": (SHORT, SHORT, FULL, SHORT, SHORT, SHORT),
    "two windows": (FULL, SHORT, LONG, SHORT),
    "windows only": (SHORT, SHORT),
    "window 1": (AttentionSpec(window=1), FULL),
    "soft caps": (AttentionSpec(window=6, soft_cap=3.0), AttentionSpec(soft_cap=3.0, scale=0.5)),
    "a window wider than all": (AttentionSpec(window=1000), FULL),
}


def random_model(num_layers):
    config = ModelConfig(
        num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=8, d_model=32, d_ff=48,
        vocab_size=64, max_seq_len=64,
    )  # fmt: skip
    model, generator = Llama(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(generator=generator, std=0.4)
    return model.double()


def scores_without_cache(model, token_ids, specs):
    """The scores behind each token, [num_tokens, vocab_size]: all at once, every key masked or not
    by its distance."""

    def attend(layer, q, k, v):
        spec, group = specs[layer], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (spec.scale or q.shape[2] ** -0.5)
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        places = torch.arange(len(q))
        distance = places[:, None] - places
        visible = (distance >= 0) & (distance < (spec.window or len(q)))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    tokens = torch.tensor(token_ids)
    return model.compute_logits(model(tokens, torch.arange(len(tokens)), attend))


class Runner:
    """A model on a cache, and for each sequence the scores behind each token that was computed."""

    def __init__(self, stage, specs, *, num_blocks=100):
        self.specs, self.model = specs, random_model(len(specs))
        self.cache = stage.build_cache(
            cache_config(
                self.model.config, num_blocks=num_blocks, block_size=4, poison=True,
                dtype=torch.float64, device="cpu", layer_specs=specs,
            ),
            seed="test",
        )  # fmt: skip
        self.token_ids, self.scores, self.reused = {}, {}, {}

    def add(self, seq_id, token_ids):
        self.reused[seq_id] = self.cache.add(seq_id, token_ids)
        self.token_ids[seq_id], self.scores[seq_id] = list(token_ids), {}
        return self.reused[seq_id]

    def append(self, seq_id, token_id):
        self.cache.append(seq_id, [token_id])
        self.token_ids[seq_id].append(token_id)

    def waiting(self, seq_id):
        return self.cache.num_tokens(seq_id) - self.cache.num_computed_tokens(seq_id)

    def step(self, counts):
        batch = self.cache.reserve(counts)
        scores = self.model.compute_logits(
            self.model(batch.token_ids, batch.positions, batch.attend)
        )
        batch.commit()
        self.cache.check_invariants()
        owners = [seq_id for seq_id, n in counts.items() for _ in range(n)]
        for seq_id, position, row in zip(owners, batch.positions.tolist(), scores, strict=True):
            assert position not in self.scores[seq_id], "a token was computed twice"
            self.scores[seq_id][position] = row

    def check(self, seq_id):
        """Every token behind the hit was computed, and gave what it gives without a cache."""
        computed = self.cache.num_computed_tokens(seq_id)
        scores = self.scores[seq_id]
        assert sorted(scores) == list(range(self.reused[seq_id], computed))
        if not scores:  # it was never in a step
            return
        right = scores_without_cache(self.model, self.token_ids[seq_id][:computed], self.specs)
        for position, row in scores.items():
            error = (row - right[position]).abs().max().item()
            assert error <= TOLERANCE, f"sequence {seq_id!r}, position {position}: off by {error}"

    def free(self, seq_id):
        self.check(seq_id)
        self.cache.free(seq_id)
        self.cache.check_invariants()

    def held(self, seq_id, group):
        return sum(block_id != 0 for block_id in self.cache.block_ids(seq_id)[group])


def tokens(n, seed=0):
    return random.Random(seed).choices(range(64), k=n)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def specs(request):
    return request.param


def test_the_reference_sees_a_window(stage):
    """Without a window the scores differ by far more than the tolerance; so does one key more."""
    model = random_model(4)
    windowed = scores_without_cache(model, tokens(30), ALTERNATING)
    one_more = tuple(s if s is FULL else AttentionSpec(window=7) for s in ALTERNATING)
    for other in ((FULL,) * 4, one_more):
        difference = (windowed - scores_without_cache(model, tokens(30), other)).abs().amax(1)
        assert difference[:6].max() < TOLERANCE < 1e-2 < difference[7:].min()


def test_token_by_token(stage, specs):
    run = Runner(stage, specs)
    run.add("A", tokens(1))
    for token_id in [*tokens(39, seed=1), None]:
        run.step({"A": 1})
        if token_id is not None:
            run.append("A", token_id)
    run.free("A")


@pytest.mark.parametrize("chunk", [3, 4, 7, 8, 40])
def test_in_chunks(stage, specs, chunk):
    run = Runner(stage, specs)
    run.add("A", tokens(40))
    while waiting := run.waiting("A"):
        run.step({"A": min(chunk, waiting)})
    for token_id in tokens(9, seed=2):
        run.append("A", token_id)
        run.step({"A": 1})
    run.free("A")


def test_blocks_leave_the_window_while_the_sequence_runs(stage):
    """Window 6, blocks of 4: behind n tokens the next one sees n - 5 to n."""
    run = Runner(stage, ALTERNATING)
    run.add("A", tokens(1))
    full, window = (run.cache.windows.index(w) for w in (None, 6))
    for n in range(1, 41):
        run.step({"A": 1})
        tables = run.cache.block_ids("A")
        left = max(0, n - 5) // 4
        assert len(tables[full]) == len(tables[window]) == -(-n // 4)
        assert 0 not in tables[full]
        assert [block_id == 0 for block_id in tables[window]] == [
            column < left for column in range(len(tables[window]))
        ]
        run.append("A", n)
    run.check("A")


def test_what_has_left_the_window_serves_others(stage):
    """14 usable blocks hold one sequence of 44 tokens: 11 blocks of the full group, never more than
    3 of the window's. Two full groups would need 22."""
    run = Runner(stage, (SHORT, FULL), num_blocks=15)
    run.add("A", tokens(1))
    for n in range(1, 45):
        run.step({"A": 1})
        run.append("A", n)
    assert run.cache.pool.num_free_blocks in (1, 2)
    run.free("A")
    assert run.cache.pool.num_free_blocks == 14


def test_prefix_hits(stage, specs):
    """A second sequence begins on what the first has left, wherever its blocks are by now."""
    run = Runner(stage, specs, num_blocks=120)
    prompt = tokens(32)
    run.add("A", prompt)
    run.step({"A": 10})
    run.step({"A": 22})
    found = [run.add("B", [*prompt[:21], *tokens(8, seed=3)]), run.add("C", prompt)]
    assert found == [20, 28]
    run.step({"B": 3, "C": 4})
    run.free("A")
    for seq_id in "BC":
        while waiting := run.waiting(seq_id):
            run.step({seq_id: min(waiting, 3)})
        run.append(seq_id, 5)
        run.step({seq_id: 1})
    run.free("B")
    run.free("C")
    assert run.add("D", [*prompt, 1]) == 32
    run.step({"D": 1})
    run.free("D")


def test_preempted_and_begun_again(stage):
    """Free and add again, as a scheduler does it: the tokens that were answered are a prompt now,
    and most of it is found."""
    run = Runner(stage, ALTERNATING, num_blocks=30)
    run.add("A", tokens(18))
    run.step({"A": 18})
    for token_id in tokens(8, seed=4):
        run.append("A", token_id)
        run.step({"A": 1})
    run.append("A", 7)
    known = run.token_ids["A"]
    run.free("A")
    assert run.add("A", known) == 24  # 27 tokens, 6 full blocks
    run.step({"A": 3})
    for token_id in tokens(8, seed=5):
        run.append("A", token_id)
        run.step({"A": 1})
    run.free("A")


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests(stage, kind):
    found, preempted = 0, 0
    for seed in range(2):
        hits, refusals = serve(stage, KINDS[kind], random.Random(f"{kind} {seed}"))
        found, preempted = found + hits, preempted + refusals
    assert found > 20 and preempted > 1


def serve(stage, specs, choose):
    """Eight texts with common beginnings in a pool that is too small for them. Who came last loses
    its blocks when there are none left, and is added again with what it has answered so far.

    Returns how many tokens were found, and how often somebody lost its blocks.
    """
    run = Runner(stage, specs, num_blocks=1 + 13 * num_groups(stage, specs))
    texts = [tokens(24)[: choose.randint(0, 24)] + tokens(6, seed=s) for s in range(8)]
    outside = {s: (text, choose.randint(1, 12)) for s, text in enumerate(texts)}
    to_answer = {}
    found = preempted = 0
    while outside or to_answer:
        if outside and choose.random() < 0.5:
            seq_id = next(iter(outside))
            text, to_answer[seq_id] = outside.pop(seq_id)
            found += run.add(seq_id, text)
        counts = {s: min(run.waiting(s), choose.randint(1, 9)) for s in to_answer}
        if not counts:
            continue
        try:
            run.step(counts)
        except OutOfBlocks:
            assert len(to_answer) > 1, "one sequence alone must fit"
            last = list(to_answer)[-1]
            outside[last] = (run.token_ids[last], to_answer.pop(last))
            run.free(last)
            preempted += 1
            continue
        for seq_id, n in list(to_answer.items()):
            if run.waiting(seq_id):
                continue
            if n == 0:
                run.free(seq_id)
                del to_answer[seq_id]
            else:
                run.append(seq_id, choose.randrange(64))
                to_answer[seq_id] = n - 1
    assert run.cache.usage().reserved == 0
    return found, preempted


def num_groups(stage, specs):
    return len(Runner(stage, specs).cache.windows)


@pytest.mark.parametrize("window", [3, 500])
def test_a_second_answer_is_that_of_a_fresh_cache(stage, window):
    """rasbt/LLMs-from-scratch#925: what the first answer left behind must not show, with a window
    shorter and longer than the text."""
    specs = (AttentionSpec(window=window), FULL)
    first, second = tokens(20), tokens(13, seed=1)
    greedy = SamplingParams()
    used, fresh = Runner(stage, specs), Runner(stage, specs)
    complete(used.model, used.cache, [first], max_new_tokens=15, sampling_params=greedy)
    answers = [
        complete(run.model, run.cache, [second], max_new_tokens=15, sampling_params=greedy)
        for run in (used, fresh)
    ]
    assert answers[0] == answers[1]
