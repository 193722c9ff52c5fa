"""Beam search and its cache: what is shared and copied, when a request leaves, what an error leaves
behind."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedattn import contiguous, paged
from pagedattn.cache import KVCache, OutOfBlocks
from pagedattn.model import cache_config
from pagedattn.model.beam_search import beam_search, beam_steps
from pagedattn.model.beams import BeamSearch, BeamSearchParams


def test_children_continue_the_prompt_and_not_each_other(
    table_model: Any, sharing_cache_for: Any
) -> None:
    """vllm-project/vllm#1101: a parent that takes its token before it is forked hands it on."""
    model = table_model(torch.tensor([[[1e-9, 0.5, 0.3, 0.2]] * 4]))
    cache, prompt = sharing_cache_for(model), [1, 2, 3, 1, 2, 3]
    params = BeamSearchParams(width=3, max_new_tokens=2, end_token_ids=[0])
    steps = beam_steps(model, cache, [prompt], params)
    first = next(steps)
    assert [cache.sequences[h.seq_id].token_ids for h in first.heirs] == [
        [*prompt, token_id] for token_id in (1, 2, 3)
    ]
    (found,) = next(steps).results.values()
    # 0.25, then 0.15 twice, whose order is open.
    assert found[0].token_ids == (1, 1) and {h.token_ids for h in found[1:]} == {(1, 2), (2, 1)}
    sums = [h.score * 2 for h in found]
    assert sums == pytest.approx([math.log(p) for p in (0.25, 0.15, 0.15)], abs=1e-6)


@pytest.mark.parametrize("ends", [[], [0]])
def test_it_ends_at_the_limit_when_the_end_never_comes(
    ends: list[int],
    assert_untouched: Callable[[KVCache], None],
    table_model: Any,
    sharing_cache_for: Any,
) -> None:
    """vllm-project/vllm#7965: two beams, early stopping, ten tokens."""
    table = torch.rand(7, 6, 6, generator=torch.Generator().manual_seed(4))
    table[:, :, 0] = 1e-30
    model, num_steps = table_model(table), 0

    def count(batch: object) -> None:
        nonlocal num_steps
        num_steps += 1

    cache = sharing_cache_for(model)
    params = BeamSearchParams(width=2, max_new_tokens=10, end_token_ids=ends, early_stopping=True)
    (found,) = beam_search(model, cache, [[1, 2, 3]], params, on_step=count)
    assert num_steps == 10
    assert [(len(h.token_ids), h.finish_reason) for h in found] == [(10, "length")] * 2
    assert_untouched(cache)


def test_two_end_tokens_leave_enough_beams(table_model: Any, sharing_cache_for: Any) -> None:
    """Either of two end tokens is likelier than all else after every beam: in the second step the
    six best continuations of three beams end, and three others run on."""
    model: Any = table_model(torch.tensor([[[0.4, 0.4, 0.05, 0.05, 0.05, 0.05]] * 6]))
    params = BeamSearchParams(
        width=3, max_new_tokens=9, end_token_ids=[0, 1], early_stopping="never"
    )
    steps = beam_steps(model, sharing_cache_for(model), [[2]], params)
    assert [len(next(steps).heirs) for _ in range(2)] == [3, 3]


def levels() -> Tensor:
    """Probabilities: tokens 2k + 1 and 2k + 2 are level k. Either of level k - 1 follows on one of
    level k, the end, token 0, on one of level 0: from level k it takes k + 1 steps."""
    table = torch.full((17, 17), 1e-9)
    table[1:3, 0] = table[0, 0] = 1
    for level in range(1, 8):
        table[2 * level + 1 : 2 * level + 3, 2 * level - 1] = 0.6
        table[2 * level + 1 : 2 * level + 3, 2 * level] = 0.4
    return table[None]


def test_a_request_that_ends_leaves_in_that_step(table_model: Any, sharing_cache_for: Any) -> None:
    """vllm-project/vllm#644: one request ends in step 3, the other in step 8."""
    model, prompts = table_model(levels()), [[9, 5], [16, 15, 15, 15, 15]]
    params = BeamSearchParams(width=2, max_new_tokens=20, end_token_ids=[0], early_stopping=True)
    alone = [beam_search(model, sharing_cache_for(model), [p], params)[0] for p in prompts]

    def watched(names: str) -> list[tuple[set[str], int, list[int]]]:
        """After each step: the names in the cache, blocks in use, requests that ended."""
        chosen = {"A": prompts[0], "B": prompts[1]}
        cache = sharing_cache_for(model)
        steps = beam_steps(
            model,
            cache,
            [chosen[name] for name in names],
            params,
            names=list(names),
        )
        seen = []
        for step in steps:
            cache.check_invariants()
            assert cache.seq_ids == [heir.seq_id for heir in step.heirs]
            for index, hypotheses in step.results.items():
                assert hypotheses == alone["AB".index(names[index])]
            in_cache = {str(seq_id)[0] for seq_id in cache.seq_ids}
            used = cache.config.num_blocks - 1 - cache.pool.num_free_blocks
            seen.append((in_cache, used, list(step.results)))
        return seen

    together, second = watched("AB"), watched("B")
    assert [names for names, _, _ in together] == [{"A", "B"}] * 2 + [{"B"}] * 5 + [set()]
    assert [ended for _, _, ended in together] == [[], [], [0], [], [], [], [], [1]]
    assert [used for _, used, _ in together[2:]] == [used for _, used, _ in second[2:]]


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(8, 0), (6, 3)])
def test_four_heirs_of_a_prompt_copy_its_last_block_at_most(
    num_tokens: int, num_copies: int, table_model: Any, sharing_cache_for: Any
) -> None:
    """Blocks of 4: a prompt of 8 fills its last one, a prompt of 6 leaves the last sharer one to
    write in place."""
    model = table_model(torch.ones(1, 6, 6))
    cache = sharing_cache_for(model)
    params = BeamSearchParams(width=4, max_new_tokens=2)
    beam_search(model, cache, [[1] * num_tokens], params)
    assert cache.num_copies == num_copies


def test_a_sole_heir_writes_in_place(table_model: Any, sharing_cache_for: Any) -> None:
    """Two beams part after the prompt and never again: one copy in ten steps."""
    table = torch.full((4, 4), 1e-9)
    table[3, 1], table[3, 2], table[1, 1], table[2, 2] = 0.6, 0.4, 1, 1
    model = table_model(table[None])
    cache = sharing_cache_for(model)
    params = BeamSearchParams(width=2, max_new_tokens=10, end_token_ids=[0])
    (found,) = beam_search(model, cache, [[3] * 6], params)
    assert [h.token_ids for h in found] == [(1,) * 10, (2,) * 10]
    assert cache.num_copies == 1


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"width": 0}, "width must be at least 1, got 0"),
    ({"width": 1.5}, "width is 1.5"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ({"length_penalty": math.nan}, "length_penalty .* got nan"),
    ({"length_penalty": math.inf}, "length_penalty .* got inf"),
    ({"length_penalty": 1e6}, "5 to its power too, got 1000000"),
    ({"length_penalty": "1"}, "length_penalty .* got '1'"),
    ({"early_stopping": "Never"}, "early_stopping .* got 'Never'"),
    ({"early_stopping": 1}, "early_stopping .* got 1"),
    ({"early_stopping": None}, "early_stopping .* got None"),
    ({"length_penalty": True}, "length_penalty .* got True"),
    ({"length_penalty": np.array([1.0])}, "length_penalty .* got array"),
    ({"end_token_ids": [-1]}, "a token of end_token_ids must be .* got -1"),
    ({"end_token_ids": ["a"]}, "a token of end_token_ids is 'a'"),
    ({"end_token_ids": 5}, "end_token_ids must be a list, got 5"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_PARAMS)
def test_wrong_params(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**{"width": 2, "max_new_tokens": 5} | wrong)


def test_a_length_penalty_of_another_library() -> None:
    penalty: Any = np.float32(0.5)
    params = BeamSearchParams(width=2, max_new_tokens=5, length_penalty=penalty)
    assert params == BeamSearchParams(width=2, max_new_tokens=5, length_penalty=0.5)
    assert type(params.length_penalty) is float


@pytest.mark.parametrize(
    ("params", "prompts", "options", "words"),
    [
        ({"width": 6}, [[1]], {}, "width is 6; .* 5 continuations that do not end: 6 tokens, 1"),
        ({"end_token_ids": [6]}, [[1]], {}, "end token 6; the vocabulary has 6 tokens"),
        ({}, [[]], {}, "prompt 0 is empty"),
        ({}, [[6]], {}, "token 6; the vocabulary has 6"),
        ({"max_new_tokens": 63}, [[1, 2]], {}, "max_seq_len 64"),
        ({}, [[1], [2]], {"names": ["A"]}, "2 prompts need as many different names"),
        ({}, [[1], [2]], {"names": ["A", "A"]}, "2 prompts need as many different names"),
        ({}, [[1], [2]], {"names": ["A", "A.9"]}, "'A.9' is a name for branches of 'A'"),
        ({"width": 3}, [[1], [2]], {}, "max_num_seqs is 8, and 0 .* two generations .* need 12"),
    ],
)
def test_wrong_input_changes_nothing(
    params: dict[str, Any],
    prompts: list[list[int]],
    options: dict[str, Any],
    words: str,
    assert_untouched: Callable[[KVCache], None],
    table_model: Any,
    sharing_cache_for: Any,
) -> None:
    model: Any = table_model(torch.ones(1, 6, 6))
    cache = sharing_cache_for(model, max_num_seqs=8)
    usual: dict[str, Any] = {"width": 2, "max_new_tokens": 5, "end_token_ids": [0]}
    given = BeamSearchParams(**usual | params)
    with pytest.raises(ValueError, match=words):
        beam_steps(model, cache, prompts, given, **options)
    assert_untouched(cache)


@pytest.mark.parametrize("stage", [contiguous, paged])
def test_a_cache_that_cannot_share(stage: Any, table_model: Any) -> None:
    model: Any = table_model(torch.ones(1, 6, 6))
    cache = stage.build_cache(cache_config(model.config, num_blocks=9, block_size=4))
    with pytest.raises(ValueError, match=f"of chapters 03 to 05 can; not {stage.__name__}"):
        beam_steps(model, cache, [[1]], BeamSearchParams(width=2, max_new_tokens=5))


def test_two_generations_are_enough(table_model: Any, sharing_cache_for: Any) -> None:
    """The limit that the error names is the least that works."""
    model: Any = table_model(torch.rand(7, 6, 6, generator=torch.Generator().manual_seed(5)))
    cache = sharing_cache_for(model, max_num_seqs=12)
    params = BeamSearchParams(width=3, max_new_tokens=5)
    assert len(beam_search(model, cache, [[1], [2]], params)) == 2


@pytest.mark.parametrize("num_blocks", [2, 3, 5, 6])
def test_pool_too_small(
    num_blocks: int,
    assert_untouched: Callable[[KVCache], None],
    table_model: Any,
    sharing_cache_for: Any,
) -> None:
    """Blocks run out for the prompt, for the first copies, or later; nothing stays behind."""
    model: Any = table_model(torch.rand(7, 6, 6, generator=torch.Generator().manual_seed(6)))
    cache = sharing_cache_for(model, num_blocks=num_blocks)
    params = BeamSearchParams(width=4, max_new_tokens=12)
    with pytest.raises(OutOfBlocks):
        beam_search(model, cache, [[1, 2, 3, 4, 5, 1]], params)
    assert_untouched(cache)


def test_caller_stops_early(
    assert_untouched: Callable[[KVCache], None], table_model: Any, sharing_cache_for: Any
) -> None:
    model: Any = table_model(torch.ones(1, 6, 6))
    cache = sharing_cache_for(model)
    steps = beam_steps(model, cache, [[1], [2]], BeamSearchParams(width=2, max_new_tokens=5))
    next(steps)
    next(steps)
    assert len(cache.seq_ids) == 4
    steps.close()  # type: ignore[attr-defined]
    assert_untouched(cache)


def test_a_model_that_fails_while_a_batch_is_open(
    assert_untouched: Callable[[KVCache], None], table_model: Any, sharing_cache_for: Any
) -> None:
    model: Any = table_model(torch.ones(1, 6, 6))
    cache = sharing_cache_for(model)
    steps = beam_steps(model, cache, [[1], [2]], BeamSearchParams(width=2, max_new_tokens=5))
    next(steps)

    def fail(token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        raise RuntimeError("the model fails")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table_model, "__call__", lambda self, *args: fail(*args))
        with pytest.raises(RuntimeError, match="the model fails"):
            next(steps)
    assert_untouched(cache)


def test_another_sequence_of_that_name_is_left_alone(
    table_model: Any, sharing_cache_for: Any
) -> None:
    """A.3 is in the cache already, which the second step would need: refused at the call."""
    model: Any = table_model(torch.ones(1, 6, 6))
    cache = sharing_cache_for(model)
    cache.add("A.3", [1, 2])
    with pytest.raises(ValueError, match=r"'A\.3' is in the cache already"):
        beam_steps(model, cache, [[1]], BeamSearchParams(width=2, max_new_tokens=5))
    assert cache.seq_ids == ["A.3"]
    cache.check_invariants()


def test_contents_that_were_never_computed_are_noticed() -> None:
    search = BeamSearch("A", BeamSearchParams(width=2, max_new_tokens=5))
    with pytest.raises(ValueError, match="the scores of the tokens after A's beams are not finite"):
        search.advance(torch.tensor([[0.5, math.nan, 0.5]]))
