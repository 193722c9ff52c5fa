"""Parallel sampling: every sample is the answer that its prompt gets alone, with its own seed, on a
cache of chapter 02, where each sample owns a full copy of the prompt."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn import contiguous, paged
from pagedattn.cache import Batch, KVCache, OutOfBlocks
from pagedattn.model import Llama, SamplingParams, Token, Tokenizer, cache_config, generate
from pagedattn.model.parallel_sampling import sample_in_parallel

HOT = SamplingParams(temperature=1.0, seed=7)


@pytest.fixture
def samples(assert_untouched: Callable[[KVCache], None], sharing_cache_for: Any) -> Any:
    """``samples(model, prompts, num_samples=…, …)``: for each prompt and sample its tokens, from a
    cache that is looked at after every step."""

    def run(model: Llama, prompts: Sequence[list[int]], **options: Any) -> list[list[list[Token]]]:
        cache = sharing_cache_for(model)
        answers: list[list[list[Token]]] = [
            [[] for _ in range(options["num_samples"])] for _ in prompts
        ]
        tokens = sample_in_parallel(
            model, cache, prompts, on_step=lambda batch: cache.check_invariants(), **options
        )
        for token in tokens:
            answers[token.index][token.sample].append(token)
        assert_untouched(cache)
        return answers

    return run


def tokens_of(answers: list[list[list[Token]]]) -> list[list[list[int]]]:
    return [[[token.token_id for token in answer] for answer in group] for group in answers]


def alone(
    model: Llama,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    num_samples: int,
    **options: Any,
) -> list[list[list[tuple[Any, ...]]]]:
    """What ``generate`` answers when each sample is a request with a prompt of its own."""
    cache = paged.build_cache(cache_config(model.config, num_blocks=200, block_size=4))
    answers: list[list[tuple[Any, ...]]] = [[] for _ in prompts for _ in range(num_samples)]
    for token in generate(
        model,
        cache,
        [prompt for prompt in prompts for _ in range(num_samples)],
        sampling_params=[p.child(i) for p in params for i in range(num_samples)],
        **options,
    ):
        answers[token.index].append(facts(token))
    return [answers[i * num_samples : (i + 1) * num_samples] for i in range(len(prompts))]


def facts(token: Token) -> tuple[Any, ...]:
    return token.token_id, token.text, token.finish_reason, token.stop_reason, token.logprob


def test_three_texts_the_same_three_on_every_run(samples: Any, model: Llama) -> None:
    """vllm-project/vllm#10980: children that get their parent's seed say all the same."""
    options = {"num_samples": 3, "max_new_tokens": 20, "sampling_params": HOT}
    first = tokens_of(samples(model, [[1, 2, 3, 4, 5]], **options))[0]
    assert len({tuple(answer) for answer in first}) == 3
    assert [len(answer) for answer in first] == [20, 20, 20]
    assert tokens_of(samples(model, [[1, 2, 3, 4, 5]], **options))[0] == first
    other = options | {"sampling_params": SamplingParams(temperature=1.0, seed=8)}
    assert not set(map(tuple, first)) & set(
        map(tuple, tokens_of(samples(model, [[1, 2, 3, 4, 5]], **other))[0])
    )


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_each_sample_equals_a_request_with_a_prompt_of_its_own(
    samples: Any, model: Llama, num_samples: int
) -> None:
    """Prompts around the ends of blocks of 4; samples that end by a token or by their length."""
    prompts = [[5, 1, 60], [7, 8, 9, 10], [11, 12, 13, 14, 15]]
    params = [
        SamplingParams(temperature=1.0, seed=seed, stop_token_ids=[3, 17, 30], logprobs=2)
        for seed in (0, 1, 2)
    ]
    found = samples(
        model, prompts, num_samples=num_samples, max_new_tokens=14, sampling_params=params
    )
    wanted = alone(model, prompts, params, num_samples, max_new_tokens=14)
    told = [[[facts(token)[:4] for token in answer] for answer in group] for group in found]
    assert told == [[[token[:4] for token in answer] for answer in group] for group in wanted]
    # float32 in another order
    for token, (*_, logprob) in zip(flat(found), flat(wanted), strict=True):
        assert token.logprob.logprob == pytest.approx(logprob.logprob, abs=1e-4)
    reasons = {answer[-1].finish_reason for group in found for answer in group}
    if num_samples == 5:
        assert reasons == {"stop", "length"}


def flat(answers: list[list[list[Any]]]) -> list[Any]:
    return [token for group in answers for answer in group for token in answer]


def test_text_and_end_tokens_with_the_real_model(
    samples: Any, real_model: tuple[Llama, Tokenizer], sharing_cache_for: Any
) -> None:
    model, tokenizer = real_model
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Name a colour."}])
    options: dict[str, Any] = {"max_new_tokens": 8, "tokenizer": tokenizer}
    params = SamplingParams(temperature=0.8, seed=1)
    cache = sharing_cache_for(model, block_size=16)
    found: list[list[Token]] = [[], []]
    for token in sample_in_parallel(
        model, cache, [prompt], num_samples=2, sampling_params=params, **options
    ):
        found[token.sample].append(token)
    told = [[facts(token) for token in answer] for answer in found]
    assert told == alone(model, [prompt], [params], 2, **options)[0]
    assert all(text for answer in found if (text := "".join(token.text for token in answer)))


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(
    model: Llama, sharing_cache_for: Any
) -> None:
    """A prompt of 10 tokens in blocks of 4, three samples: two full blocks and one with 2 tokens.
    Then each sample writes its own third block: two copies, and one in place."""
    cache = sharing_cache_for(model)
    batches: list[Batch] = []
    tokens = sample_in_parallel(
        model,
        cache,
        [[*range(1, 11)]],
        num_samples=3,
        max_new_tokens=4,
        sampling_params=HOT,
        on_step=batches.append,
    )
    first = [next(tokens) for _ in range(3)]
    assert [(token.index, token.sample) for token in first] == [(0, 0), (0, 1), (0, 2)]
    assert cache.seq_ids == ["A.1", "A.2", "A.3"]
    assert [cache.ref_cnts(seq_id) for seq_id in cache.seq_ids] == [[3, 3, 3]] * 3
    assert cache.num_copies == 0
    next(tokens)
    assert [cache.ref_cnts(seq_id) for seq_id in cache.seq_ids] == [[3, 3, 1]] * 3
    assert cache.num_copies == 2
    list(tokens)
    assert cache.num_copies == 2
    assert [len(batch.token_ids) for batch in batches] == [10, 3, 3, 3]


def test_greedy_samples_are_alike(samples: Any, model: Llama, sharing_cache_for: Any) -> None:
    (group,) = tokens_of(samples(model, [[1, 2, 3]], num_samples=3, max_new_tokens=6))
    assert group[0] == group[1] == group[2]
    assert group[:1] == [
        [
            token.token_id
            for token in generate(model, sharing_cache_for(model), [[1, 2, 3]], max_new_tokens=6)
        ]
    ]


def test_no_prompts_no_tokens(samples: Any, model: Llama) -> None:
    assert samples(model, [], num_samples=2, max_new_tokens=3) == []


def test_one_token_needs_no_second_step(samples: Any, model: Llama) -> None:
    found = samples(model, [[1], [2]], num_samples=2, max_new_tokens=1, sampling_params=HOT)
    assert [[token.finish_reason for token in answer] for group in found for answer in group] == [
        ["length"]
    ] * 4


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1]], {"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ([[1]], {"num_samples": 2.5}, "num_samples is 2.5"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[]], {}, "prompt 0 is empty"),
        ([[64]], {}, "token 64; the vocabulary has 64"),
        ([[1], [2]], {"sampling_params": [HOT]}, "2 prompts, but 1 sampling_params"),
        ([[1], [2]], {"names": ["A", "A"]}, "2 prompts need as many different names"),
        ([[1], [2]], {"names": ["A", "A.1"]}, "'A.1' is a name for branches of 'A'"),
        ([[1], [2]], {"names": ["A.12", "A"]}, "'A.12' is a name for branches of 'A'"),
        ([[1]], {"names": 5}, "names must be a list, got 5"),
        ([[1]], {"names": [5]}, r"1 prompts need as many different names, got \[5\]"),
        ([[1]], {"sampling_params": None}, "sampling_params must be a list, got None"),
        (None, {}, "prompts must be a list, got None"),
        ([[1], [2]], {"num_samples": 4}, "max_num_seqs is 8, and 0 .* need 9"),
        ([[1]], {"sampling_params": SamplingParams(stop="x")}, "need a tokenizer"),
    ],
)
def test_wrong_input_changes_nothing(
    model: Llama,
    prompts: list[list[int]],
    options: dict[str, Any],
    words: str,
    assert_untouched: Callable[[KVCache], None],
    sharing_cache_for: Any,
) -> None:
    cache = sharing_cache_for(model, max_num_seqs=8)
    with pytest.raises(ValueError, match=words):
        sample_in_parallel(
            model, cache, prompts, **{"num_samples": 2, "max_new_tokens": 5} | options
        )
    assert_untouched(cache)


@pytest.mark.parametrize("taken", ["B", "A.2"])
def test_names_that_are_in_the_cache(model: Llama, taken: str, sharing_cache_for: Any) -> None:
    cache = sharing_cache_for(model)
    cache.add(taken, [1, 2])
    with pytest.raises(ValueError, match=f"'{taken}' is in the cache already"):
        sample_in_parallel(model, cache, [[1], [2]], num_samples=2, max_new_tokens=2)
    assert cache.seq_ids == [taken]


def test_names_with_dots_that_are_no_branches(model: Llama, sharing_cache_for: Any) -> None:
    cache = sharing_cache_for(model)
    cache.add("A.x", [1, 2])
    cache.add(7, [1, 2])
    names = ["A", "A.", "A.b", "A.01", "B.1", ".1"]
    tokens = sample_in_parallel(
        model, cache, [[1]] * 6, num_samples=2, max_new_tokens=2, names=names
    )
    assert len(list(tokens)) == 24
    assert cache.seq_ids == ["A.x", 7]


def test_a_narrow_integer_as_the_length(model: Llama, sharing_cache_for: Any) -> None:
    """200 + 100 is 44 in 8 bits, which a prompt of 200 tokens exceeds."""
    torch.manual_seed(5)
    long_model = Llama(dataclasses.replace(model.config, max_seq_len=300))
    for parameter in long_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cache = sharing_cache_for(long_model, num_blocks=200)
    length: Any = np.uint8(100)
    tokens = sample_in_parallel(
        long_model, cache, [[1] * 200], num_samples=1, max_new_tokens=length
    )
    assert len(list(tokens)) == 100


def test_the_limit_that_the_error_names_is_enough(model: Llama, sharing_cache_for: Any) -> None:
    cache = sharing_cache_for(model, max_num_seqs=9)
    tokens = sample_in_parallel(model, cache, [[1], [2]], num_samples=4, max_new_tokens=2)
    assert len(list(tokens)) == 16


@pytest.mark.parametrize("stage", [contiguous, paged])
def test_a_cache_that_cannot_share(model: Llama, stage: Any) -> None:
    cache = stage.build_cache(cache_config(model.config, num_blocks=9, block_size=4))
    with pytest.raises(ValueError, match=f"of chapters 03 to 05 can; not {stage.__name__}"):
        sample_in_parallel(model, cache, [[1]], num_samples=2, max_new_tokens=5)


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 6])
def test_pool_too_small(
    model: Llama,
    num_blocks: int,
    assert_untouched: Callable[[KVCache], None],
    sharing_cache_for: Any,
) -> None:
    cache = sharing_cache_for(model, num_blocks=num_blocks)
    with pytest.raises(OutOfBlocks):
        list(
            sample_in_parallel(model, cache, [[1, 2, 3, 4, 5, 6]], num_samples=3, max_new_tokens=12)
        )
    assert_untouched(cache)


@pytest.mark.parametrize("num_seen", [1, 3, 8])
def test_caller_stops_early(
    model: Llama, num_seen: int, assert_untouched: Callable[[KVCache], None], sharing_cache_for: Any
) -> None:
    cache = sharing_cache_for(model)
    tokens = sample_in_parallel(
        model, cache, [[1, 2], [3]], num_samples=2, max_new_tokens=5, sampling_params=HOT
    )
    for _ in range(num_seen):
        next(tokens)
    assert len(cache.seq_ids) == 4
    tokens.close()  # type: ignore[attr-defined]
    assert_untouched(cache)
