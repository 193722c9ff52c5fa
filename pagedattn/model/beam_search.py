"""Beam search over a cache that shares blocks: several requests at once in one batch.

Beams of a request share the blocks of their common beginning. When a beam has several heirs, they
fork it; the one that has a single heir hands its blocks on, and the heir writes in place.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.4.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagedattn.cache import Batch, KVCache
from pagedattn.model.beams import BeamSearch, BeamSearchParams, Hypothesis
from pagedattn.model.branching import (
    check_room,
    compute_step,
    forking,
    request_names,
)
from pagedattn.model.guards import check_requests, freed_on_failure, vocabulary
from pagedattn.model.llama import Llama
from pagedattn.model.tokenizer import Tokenizer
from pagedattn.sharing import Heir


@dataclass(frozen=True)
class BeamStep:
    """What one step decided: the beams that run on, each with its parent and its token, and the
    hypotheses, the best first, of each request that ended, by the index of its prompt.

    The cache then holds exactly these beams; their new tokens are not computed yet.
    """

    heirs: tuple[Heir, ...]
    results: dict[int, list[Hypothesis]]


def beam_search(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    *,
    tokenizer: Tokenizer | None = None,
    names: Sequence[str] | None = None,
    on_step: Callable[[Batch], None] | None = None,
) -> list[list[Hypothesis]]:
    """For each prompt its ``params.width`` best hypotheses, the best first.

    Arguments and errors are those of ``beam_steps``.
    """
    steps = beam_steps(
        model, cache, prompts, params, tokenizer=tokenizer, names=names, on_step=on_step
    )
    results: dict[int, list[Hypothesis]] = {}
    for step in steps:
        results |= step.results
    return [results[index] for index in range(len(prompts))]


def beam_steps(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    *,
    tokenizer: Tokenizer | None = None,
    names: Sequence[str] | None = None,
    on_step: Callable[[Batch], None] | None = None,
) -> Iterator[BeamStep]:
    """Search all prompts together; yields after every step, when the next beams are chosen.

    The first step computes the prompts, each later one the newest token of every beam. A request
    gives its memory back in the step in which it ends. ``tokenizer``: with it hypotheses end at its
    end tokens, too, and only tokens that it knows are chosen. ``names``: the requests' names
    (default: A, B, …); a beam of request A is "A.1", "A.2" and so on. ``on_step(batch)`` is called
    after each commit, before the next beams are chosen.

    For a moment two generations of beams are in the cache, since forks come before the parents are
    freed: ``max_num_seqs`` must allow 2 * width sequences for each prompt.

    Raises ValueError before anything changes: a cache that cannot fork, one that allows too few
    sequences, a width for which the vocabulary has too few tokens that do not end, an end token
    outside it, a name that is taken, prompts that ``generate`` would refuse. Later errors
    (OutOfBlocks, say) come out of the iterator. However it ends, its sequences are freed; a batch
    that is open then is aborted.
    """
    sharing_cache = forking(cache)
    prompts = check_requests(model, cache, prompts, params.max_new_tokens)
    vocab_size = vocabulary(model, tokenizer)
    if tokenizer is not None:
        ends = {*params.end_token_ids, *tokenizer.eos_token_ids}
        params = dataclasses.replace(params, end_token_ids=ends)
    _check_width(params, vocab_size)
    check_room(
        cache,
        2 * params.width * len(prompts),
        f"two generations of {params.width} beams for each of {len(prompts)} prompts",
    )
    searches = [BeamSearch(name, params) for name in request_names(names, cache, len(prompts))]

    def run() -> Iterator[BeamStep]:
        """The steps themselves. A caller that stops in between frees all sequences."""
        with freed_on_failure(sharing_cache) as running:
            for search, prompt in zip(searches, prompts, strict=True):
                max_tokens = len(prompt) + params.max_new_tokens
                sharing_cache.add(search.name, prompt, max_tokens=max_tokens)
                running.append(search.name)
            active = dict(enumerate(searches))
            while active:
                logits = compute_step(model, sharing_cache, running, on_step)[:, :vocab_size]
                rows = logits.split([len(search.beams) for search in active.values()])
                heirs: list[Heir] = []
                for search, scores in zip(active.values(), rows, strict=True):
                    heirs += search.advance(scores)
                results = {i: search.hypotheses for i, search in active.items() if search.is_done}
                active = {i: search for i, search in active.items() if not search.is_done}
                sharing_cache.replace(running, heirs)
                running[:] = [heir.seq_id for heir in heirs]
                yield BeamStep(tuple(heirs), results)

    return run()


def _check_width(params: BeamSearchParams, vocab_size: int) -> None:
    ends = set(params.end_token_ids)
    if ends and max(ends) >= vocab_size:
        raise ValueError(f"end token {max(ends)}; the vocabulary has {vocab_size} tokens")
    if params.width > vocab_size - len(ends):
        raise ValueError(
            f"width is {params.width}; a prompt has {vocab_size - len(ends)} continuations that do "
            f"not end: {vocab_size} tokens, {len(ends)} of them end tokens"
        )
