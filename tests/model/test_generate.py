"""Many prompts in one batch: the tokens, the order of the steps, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedattn import paged
from pagedattn.attention import attention
from pagedattn.cache import KVCache
from pagedattn.model import Llama, SamplingParams, cache_config, complete, generate

LENGTHS = (1, 3, 4, 5, 17, 9)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Llama, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers with no cache at all: everything computed anew for each token."""

    def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), no_cache)
            tokens.append(int(model.compute_logits(hidden[-1]).argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
def test_answers_equal_those_without_a_cache(
    model: Llama,
    cache: KVCache,
    prompts: list[list[int]],
    expected: list[list[int]],
    chunk_size: int | None,
) -> None:
    answers = complete(model, cache, prompts, max_new_tokens=NEW_TOKENS, chunk_size=chunk_size)
    assert answers == expected


def test_steps_and_events(model: Llama, cache: KVCache, expected: list[list[int]]) -> None:
    """Prompts of 5 and 2 tokens in chunks of 2: what each step computes, and what comes out."""
    steps: list[dict[Any, int]] = []
    events = generate(
        model,
        cache,
        [[1, 2, 3, 4, 5], [6, 7]],
        max_new_tokens=3,
        chunk_size=2,
        seq_ids=["A", "B"],
        on_step=lambda batch: steps.append(dict(batch.num_new_tokens)),
    )
    assert steps == []  # nothing happens before the first token is asked for
    seen = [(token.index, len(steps), token.finish_reason) for token in events]
    # The last token of an answer is never computed: 3 tokens take 2 steps after the prompt's.
    assert steps == [{"A": 2, "B": 2}, {"A": 2, "B": 1}, {"A": 1, "B": 1}, {"A": 1}, {"A": 1}]
    assert seen == [
        (1, 1, None),
        (1, 2, None),
        (0, 3, None),
        (1, 3, "length"),
        (0, 4, None),
        (0, 5, "length"),
    ]


def test_a_sequence_is_freed_in_the_step_in_which_it_ends(model: Llama, cache: KVCache) -> None:
    held = [
        (token.index, token.finish_reason, sorted(cache.seq_ids))  # type: ignore[type-var]
        for token in generate(model, cache, [[1, 2], [3]], max_new_tokens=2)
    ]
    assert held == [(0, None, [0, 1]), (1, None, [0, 1]), (0, "length", []), (1, "length", [])]


def test_stop_token_ids(
    model: Llama, cache: KVCache, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The stop token is the last of its answer; other answers go on."""
    stop = expected[4][5]
    cut = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in expected]
    assert len(cut[4]) < NEW_TOKENS and any(len(answer) == NEW_TOKENS for answer in cut)
    params = SamplingParams(stop_token_ids=[stop])
    events = list(
        generate(model, cache, prompts, max_new_tokens=NEW_TOKENS, sampling_params=params)
    )
    last = {event.index: (event.finish_reason, event.stop_reason) for event in events}
    for index, answer in enumerate(cut):
        assert [event.token_id for event in events if event.index == index] == answer
        assert last[index] == (("stop", stop) if stop in answer else ("length", None))


def test_prompt_and_answer_up_to_the_limit(model: Llama, cache: KVCache) -> None:
    """One rule: prompt + max_new_tokens <= max_seq_len (vllm-project/vllm#16445)."""
    assert len(complete(model, cache, [[1] * 30], max_new_tokens=10)[0]) == 10
    for length, new in ((31, 10), (40, 1)):
        with pytest.raises(ValueError, match=f"prompt 0 has {length} .* {new} .* max_seq_len 40"):
            generate(model, cache, [[1] * length], max_new_tokens=new)


def test_no_prompts(model: Llama, cache: KVCache) -> None:
    assert complete(model, cache, [], max_new_tokens=1) == []


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [64]], {}, "prompt 1 holds token 64; the vocabulary has 64"),
        ([[1], [-1]], {}, "prompt 1 holds token -1"),
        ([np.array([], int)], {}, "prompt 0 is empty"),
        ([torch.tensor([1]), torch.tensor([1, 64])], {}, "prompt 1 holds token 64"),
        ([["1"]], {}, "a token of prompt 0 is '1'; it must be a whole number"),
        (["1"], {}, "a token of prompt 0 is '1'"),
        ([[1], [2.0]], {}, "a token of prompt 1 is 2.0"),
        (torch.tensor([[1.0]]), {}, "a token of prompt 0 is tensor"),
        ([[True]], {}, "a token of prompt 0 is True"),
        ([torch.tensor([True])], {}, "a token of prompt 0 is tensor"),
        ([1], {}, "prompt 0 is 1; it must be a list of tokens"),
        (torch.tensor([1]), {}, "prompt 0 is tensor.* must be a list of tokens"),
        ([[1]], {"max_new_tokens": 5.0}, "max_new_tokens is 5.0; it must be a whole number"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens is True; it must be a whole number"),
        ([[1]], {"chunk_size": 2.5}, "chunk_size is 2.5; it must be a whole number"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[1]], {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ([[1], [2]], {"sampling_params": [SamplingParams()]}, "2 prompts, but 1 sampling_params"),
        ([[1]], {"sampling_params": SamplingParams(stop="x")}, "'x'.* need a tokenizer"),
        ([[1]], {"sampling_params": SamplingParams(min_tokens=6)}, "min_tokens is 6, .* most 5"),
        ([[1]], {"seq_ids": "AB"}, "1 prompts, but 2 seq_ids"),
        ([[1]], {"seq_ids": 5}, "seq_ids must be a list, got 5"),
        (5, {}, "prompts must be a list, got 5"),
        (None, {}, "prompts must be a list, got None"),
        ([[1]], {"sampling_params": None}, "sampling_params must be a list, got None"),
        ([[1]], {"sampling_params": [None]}, "sampling_params must hold .*, got None"),
    ],
)
def test_bad_input(
    model: Llama, cache: KVCache, prompts: Any, options: dict[str, Any], words: str
) -> None:
    """Refused at the call, before the first prompt is added."""
    with pytest.raises(ValueError, match=words):
        generate(model, cache, prompts, **{"max_new_tokens": 5} | options)


def test_prompts_that_are_no_list(model: Llama, cache: KVCache) -> None:
    with pytest.raises(ValueError, match="prompts must be a list, got 5"):
        complete(model, cache, 5, max_new_tokens=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_arrays_of_whole_numbers(model: Llama, cache: KVCache, library: Any) -> None:
    lists = [[0], [3]]
    expected = complete(model, cache, lists, max_new_tokens=4)
    number = library(4)[()]  # np.int64, or a tensor of one number
    for prompts in (library(lists), [library(tokens) for tokens in lists]):
        answers = complete(model, cache, prompts, max_new_tokens=number, chunk_size=number)
        assert answers == expected


def test_a_narrow_integer_as_the_length(model: Llama) -> None:
    """200 + 100 is 44 in 8 bits, which a prompt of 200 tokens exceeds."""
    config = dataclasses.replace(model.config, max_seq_len=300)
    torch.manual_seed(5)
    long_model = Llama(config)
    for parameter in long_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cache = paged.build_cache(cache_config(config, num_blocks=20))
    (answer,) = complete(long_model, cache, [[1] * 200], max_new_tokens=np.uint8(100))  # type: ignore[arg-type]
    assert len(answer) == 100


def test_cache_of_another_model(model: Llama) -> None:
    config = cache_config(model.config, num_blocks=60)
    other = paged.build_cache(type(config)(**vars(config) | {"head_dim": 16}))
    with pytest.raises(ValueError, match="the cache has head_dim 16, the model 8"):
        generate(model, other, [[1]], max_new_tokens=1)
