"""Many prompts at once through one model and any cache that has the verbs.

Every step computes one batch: the next chunk of each prompt that is not finished yet, and one token
of each answer that is being written. A sequence gives its memory back in the step in which it ends.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pagedattn.cache import Batch, KVCache
from pagedattn.model.llama import Llama
from pagedattn.model.sampling import Sampler


@dataclass(frozen=True)
class Token:
    """One generated token: of which prompt, which token, and whether it is the last of its answer.

    ``finish_reason`` is "stop" after a token of ``stop_ids``, "length" after ``max_new_tokens``.
    """

    index: int
    token_id: int
    finish_reason: Literal["stop", "length"] | None


def generate(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    samplers: Sequence[Sampler] | None = None,
    stop_ids: Collection[int] = (),
    chunk_size: int | None = None,
    seq_ids: Sequence[Hashable] | None = None,
    on_step: Callable[[Batch], None] | None = None,
) -> Iterator[Token]:
    """Answer all prompts together; yields every token as soon as its step is done.

    ``samplers``: one for each prompt, greedy by default. A token of ``stop_ids`` ends its answer
    and is yielded too. ``chunk_size``: at most so many tokens of a prompt a step (default: all).
    ``seq_ids``: the sequences' names in the cache (default: 0, 1, …). ``on_step(batch)`` is called
    after each commit, while the cache still holds the sequences that end in this step.

    The rule of length: prompt + max_new_tokens <= max_seq_len, that of the model and of the cache.
    The last token of an answer is never computed, so its K and V take no slot.

    Raises ValueError before anything changes: an empty or too long prompt, a token outside the
    vocabulary, max_new_tokens or chunk_size below 1, lists of different lengths, a cache built for
    another model. Later errors (OutOfBlocks, say) come out of the iterator. However it ends, by an
    error or because the caller stops iterating, its sequences are freed and no batch stays open.
    """
    samplers = [Sampler() for _ in prompts] if samplers is None else samplers
    seq_ids = range(len(prompts)) if seq_ids is None else seq_ids
    _check_cache(model, cache)
    _check_prompts(model, cache, prompts, max_new_tokens)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    for name, given in (("samplers", samplers), ("seq_ids", seq_ids)):
        if len(given) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(given)} {name}")

    def run() -> Iterator[Token]:
        running: dict[Hashable, int] = {}  # seq_id -> index of its prompt
        num_generated = [0] * len(prompts)
        try:
            for index, seq_id in enumerate(seq_ids):
                cache.add(seq_id, prompts[index], max_tokens=len(prompts[index]) + max_new_tokens)
                running[seq_id] = index
            while running:
                batch = cache.reserve({s: _next_tokens(cache, s, chunk_size) for s in running})
                try:
                    hidden = model(batch.token_ids, batch.positions, batch.attend)
                    batch.commit()
                except BaseException:
                    batch.abort()
                    raise
                if on_step is not None:
                    on_step(batch)
                last_rows = (batch.query_start_loc[1:] - 1).tolist()
                ready = {
                    seq_id: row
                    for seq_id, row in zip(batch.seq_ids, last_rows, strict=True)
                    if cache.num_computed_tokens(seq_id) == cache.num_tokens(seq_id)
                }
                logits = model.compute_logits(hidden[list(ready.values())])  # [ready, vocab_size]
                tokens = []
                for seq_id, row in zip(ready, logits, strict=True):
                    index = running[seq_id]
                    token_id = samplers[index].sample(row)
                    num_generated[index] += 1
                    reason: Literal["stop", "length"] | None = None
                    if token_id in stop_ids:
                        reason = "stop"
                    elif num_generated[index] == max_new_tokens:
                        reason = "length"
                    if reason is None:
                        cache.append(seq_id, [token_id])
                    else:
                        cache.free(seq_id)
                        del running[seq_id]
                    tokens.append(Token(index, token_id, reason))
                yield from tokens
        finally:
            for seq_id in running:
                cache.free(seq_id)

    return run()


def complete(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    samplers: Sequence[Sampler] | None = None,
    stop_ids: Collection[int] = (),
    chunk_size: int | None = None,
) -> list[list[int]]:
    """The answers of ``generate`` as lists of tokens, in the order of the prompts."""
    answers: list[list[int]] = [[] for _ in prompts]
    for token in generate(
        model,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        samplers=samplers,
        stop_ids=stop_ids,
        chunk_size=chunk_size,
    ):
        answers[token.index].append(token.token_id)
    return answers


def _next_tokens(cache: KVCache, seq_id: Hashable, chunk_size: int | None) -> int:
    """How many tokens of a sequence the next step computes: 1 while it answers."""
    waiting = cache.num_tokens(seq_id) - cache.num_computed_tokens(seq_id)
    return waiting if chunk_size is None else min(waiting, chunk_size)


def _check_cache(model: Llama, cache: KVCache) -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(model.config, name), getattr(cache.config, name)
        if ours != theirs:
            raise ValueError(f"the cache has {name} {theirs}, the model {ours}")


def _check_prompts(
    model: Llama, cache: KVCache, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limit = min(model.config.max_seq_len, cache.config.max_seq_len)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens {max_new_tokens} "
                f"it would exceed max_seq_len {limit}"
            )
        for token_id in prompt:
            if not 0 <= token_id < model.config.vocab_size:
                raise ValueError(
                    f"prompt {index} holds token {token_id}; "
                    f"the vocabulary has {model.config.vocab_size} tokens"
                )
