"""Answers that are drawn, and answers as text: each request with parameters of its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.cache import KVCache
from pagedattn.model import (
    Llama,
    SamplingParams,
    SamplingState,
    Token,
    Tokenizer,
    complete,
    generate,
    sample,
)

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]


class Letters(Tokenizer):
    """A vocabulary without a file: token i is two letters; ``eos`` are special."""

    def __init__(self, size: int = 64, eos: Sequence[int] = ()) -> None:
        self.size = size
        self.eos_token_ids = frozenset(eos)

    def __len__(self) -> int:
        return self.size

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        if token_id in self.eos_token_ids:
            return b""
        return bytes([ord("a") + token_id // 8, ord("A") + token_id % 8])


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + t // 8) + chr(ord("A") + t % 8) for t in token_ids)


def by_prompt(events: Sequence[Token], count: int = len(PROMPTS)) -> list[list[Token]]:
    return [[event for event in events if event.index == index] for index in range(count)]


def run(model: Llama, cache: KVCache, **options: Any) -> list[list[Token]]:
    options = {"max_new_tokens": 12} | options
    return by_prompt(list(generate(model, cache, PROMPTS, **options)))


def test_text_comes_with_the_tokens(model: Llama, cache: KVCache) -> None:
    plain = complete(model, cache, PROMPTS, max_new_tokens=12)
    for tokens, events in zip(plain, run(model, cache, tokenizer=Letters()), strict=True):
        assert [event.token_id for event in events] == tokens
        assert [event.text for event in events] == [text_of([token]) for token in tokens]
    assert {event.text for events in run(model, cache) for event in events} == {""}


def test_a_prompt_that_ends_inside_a_character(model: Llama, cache: KVCache) -> None:
    """The prompt's last token is the first byte of é, every other token the second: the first one
    of the answer completes the character, the next begins nothing."""

    class Halves(Letters):
        def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
            return b"\xc3" if token_id == 6 else b"\xa9"

    events = list(generate(model, cache, [[6]], max_new_tokens=2, tokenizer=Halves()))
    assert 6 not in [event.token_id for event in events]
    assert [event.text for event in events] == ["é", "\ufffd"]


def test_answers_end_at_the_end_tokens_of_the_vocabulary(model: Llama, cache: KVCache) -> None:
    plain = complete(model, cache, PROMPTS, max_new_tokens=12)
    eos, own = plain[0][3], plain[2][6]
    assert eos not in plain[2][:7] and own not in plain[0][:4]
    params = [SamplingParams(), SamplingParams(), SamplingParams(stop_token_ids=[own])]
    answers = run(model, cache, tokenizer=Letters(eos=[eos]), sampling_params=params)
    for events, length, reason in ((answers[0], 4, eos), (answers[2], 7, own)):
        assert len(events) == length
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", reason)
        tokens = [event.token_id for event in events]
        assert tokens[-1] == reason
        assert "".join(event.text for event in events) == text_of(tokens[:-1])


def test_a_stop_string_in_the_middle_of_tokens(model: Llama, cache: KVCache) -> None:
    """Five characters, from the second half of one token to the first of another. The sequence
    leaves the cache in that step; what begins like the string is never shown."""
    plain = complete(model, cache, PROMPTS, max_new_tokens=12)
    text = text_of(plain[0])
    stop = text[7:12]
    assert text.index(stop) == 7
    params = [SamplingParams(stop=["nowhere", stop]), SamplingParams(), SamplingParams()]
    held = []
    events = []
    for event in generate(
        model, cache, PROMPTS, max_new_tokens=12, tokenizer=Letters(), sampling_params=params
    ):
        events.append(event)
        if event.finish_reason == "stop":
            held = cache.seq_ids
    first, *others = by_prompt(events)
    assert held == [1, 2]
    assert [event.token_id for event in first] == plain[0][:6]
    assert (first[-1].finish_reason, first[-1].stop_reason) == ("stop", stop)
    shown = [event.text for event in first]
    assert "".join(shown) == text[:7]
    assert shown[3][-1:] == text[6]  # of the fourth token half is shown, half held back
    assert [[event.token_id for event in answer] for answer in others] == plain[1:]


def test_only_tokens_of_the_vocabulary(model: Llama, cache: KVCache) -> None:
    """The model has scores for 64 tokens, the tokenizer knows 20."""
    params = [SamplingParams(), *(SamplingParams(temperature=9, seed=i) for i in (1, 2))]
    answers = run(model, cache, tokenizer=Letters(20), sampling_params=params)
    assert max(event.token_id for answer in answers for event in answer) < 20
    wild = run(model, cache, sampling_params=params)
    assert all(max(event.token_id for event in answer) >= 20 for answer in wild)


def test_a_minimum_length(model: Llama, cache: KVCache) -> None:
    """Two end tokens that the model likes best, and 5 tokens at least."""
    plain = complete(model, cache, PROMPTS, max_new_tokens=12)
    eos, own = plain[0][0], plain[0][1]
    params = SamplingParams(min_tokens=5, stop_token_ids=[own])
    (events, *_) = run(model, cache, tokenizer=Letters(eos=[eos]), sampling_params=params)
    tokens = [event.token_id for event in events]
    assert not {eos, own} & set(tokens[:5])
    assert all(event.finish_reason is None for event in events[:5])


def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def test_logprobs_equal_those_without_a_cache(model: Llama, cache: KVCache) -> None:
    params = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=0, seed=1)]
    answers = run(model, cache, sampling_params=params)
    assert {(event.logprob, event.top_logprobs) for event in answers[1]} == {(None, ())}
    for index, num_top in ((0, 2), (2, 0)):
        tokens = list(PROMPTS[index])
        for event in answers[index]:
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), no_cache)
            expected = model.compute_logits(hidden[-1]).double().log_softmax(dim=0)
            values, ids = expected.topk(2)
            assert event.logprob
            # Two ways to add up float32 numbers of size 10: 1e-4 is some 100 roundings.
            assert event.logprob.logprob == pytest.approx(values[0].item(), abs=1e-4)
            assert (event.logprob.token_id, event.logprob.rank) == (event.token_id, 1)
            assert [t.token_id for t in event.top_logprobs] == ids[:num_top].tolist()
            tokens.append(event.token_id)


def test_seeded_samples_do_not_depend_on_neighbours(model: Llama, cache: KVCache) -> None:
    """Alone, and among unseeded neighbours (vllm-project/vllm#51226)."""
    mine, unseeded = SamplingParams(temperature=1, seed=42), SamplingParams(temperature=1)
    options: dict[str, Any] = {"max_new_tokens": 20}
    alone = complete(model, cache, PROMPTS[:1], sampling_params=mine, **options)
    for _ in range(5):
        params = [mine, unseeded, unseeded]
        beside = complete(model, cache, PROMPTS, sampling_params=params, **options)
        assert beside[0] == alone[0]
    other = SamplingParams(temperature=1, seed=43)
    assert complete(model, cache, PROMPTS[:1], sampling_params=other, **options) != alone


def test_samples_of_one_prompt(model: Llama, cache: KVCache) -> None:
    """Seed 7, three samples: three answers, the same on every run (vllm-project/vllm#10980)."""
    params = [SamplingParams(temperature=1, seed=7).child(i) for i in range(3)]
    runs = [
        complete(model, cache, PROMPTS[:1] * 3, max_new_tokens=20, sampling_params=params)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) == 3


def continue_answer(model: Llama, cache: KVCache, prompt: list[int], state: SamplingState) -> None:
    """Five more tokens of an answer, on a cache that knows nothing of it yet."""
    cache.add("A", [*prompt, *state.output_token_ids])
    for _ in range(5):
        waiting = cache.num_tokens("A") - cache.num_computed_tokens("A")
        batch = cache.reserve({"A": waiting})
        hidden = model(batch.token_ids, batch.positions, batch.attend)
        batch.commit()
        (chosen,) = sample(model.compute_logits(hidden[-1:]), [state])
        cache.append("A", [chosen.token_id])
    cache.free("A")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_is_preempted_and_resumed(
    model: Llama, cache: KVCache, temperature: float
) -> None:
    """Five tokens, then its memory is taken; computed again it goes on to ten, as if undisturbed.

    Penalties once forgot what was generated, or took it for prompt (vllm-project/vllm-metal#128).
    """
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=temperature, seed=3, frequency_penalty=2)
    (undisturbed,) = complete(model, cache, [prompt], max_new_tokens=10, sampling_params=params)
    state = SamplingState(params, prompt)
    for length in (5, 10):
        continue_answer(model, cache, prompt, state)
        assert state.output_token_ids == undisturbed[:length]

    # Both mistakes would show: without penalties, or with the first five tokens as prompt, the
    # answer is another one.
    plain = SamplingParams(temperature=temperature, seed=3)
    (unpunished,) = complete(model, cache, [prompt], max_new_tokens=10, sampling_params=plain)
    assert unpunished[5:] != undisturbed[5:]
    longer = [*prompt, *undisturbed[:5]]
    mistaken = SamplingState(params, longer)
    continue_answer(model, cache, longer, mistaken)
    assert mistaken.output_token_ids != undisturbed[5:]
