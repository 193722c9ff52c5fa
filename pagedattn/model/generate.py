"""Many prompts at once through one model and any cache that has the verbs.

Every step computes one batch: the next chunk of each prompt that is not finished yet, and one token
of each answer that is being written. A sequence gives its memory back in the step in which it ends.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pagedattn.cache import Batch, KVCache
from pagedattn.model.guards import (
    check_requests,
    check_sampling_params,
    freed_on_failure,
    vocabulary,
)
from pagedattn.model.llama import Llama
from pagedattn.model.sampling import Logprob, Sampled, SamplingState, sample
from pagedattn.model.sampling_params import SamplingParams, listed
from pagedattn.model.stopping import AnswerStream, FinishReason, Piece
from pagedattn.model.tokenizer import TextStream, Tokenizer
from pagedattn.whole_number import at_least_1


@dataclass(frozen=True)
class Token:
    """One generated token: of which prompt, which token, and whether it is the last of its answer.

    ``finish_reason`` is "stop" after an end token or a stop string, which ``stop_reason`` names,
    "length" after ``max_new_tokens``. ``text`` is what can be shown since the token before: the
    texts of an answer joined are the answer, without its end token or stop string. ``logprob`` and
    ``top_logprobs`` are there when the sampling parameters ask for them.
    """

    index: int
    token_id: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    text: str = ""
    logprob: Logprob | None = None
    top_logprobs: tuple[Logprob, ...] = ()

    @classmethod
    def of(cls, index: int, chosen: Sampled, piece: Piece, **more: Any) -> Self:
        """What was chosen, and what it adds to the text. ``more``: the fields of a subclass."""
        return cls(
            index,
            chosen.token_id,
            piece.finish_reason,
            piece.stop_reason,
            piece.text,
            chosen.logprob,
            chosen.top_logprobs,
            **more,
        )


GREEDY = SamplingParams()


def generate(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    tokenizer: Tokenizer | None = None,
    chunk_size: int | None = None,
    seq_ids: Sequence[Hashable] | None = None,
    on_step: Callable[[Batch], None] | None = None,
) -> Iterator[Token]:
    """Answer all prompts together; yields every token as soon as its step is done.

    ``sampling_params``: how tokens are chosen and where answers end, the same for all prompts or
    one for each. ``tokenizer``: with it answers end at its end tokens, too, tokens come with text,
    and only tokens that it knows are chosen. An end token is yielded like any other.
    ``chunk_size``: at most so many tokens of a prompt a step (default: all).
    ``seq_ids``: the sequences' names in the cache (default: 0, 1, …). ``on_step(batch)`` is called
    after each commit, while the cache still holds the sequences that end in this step.

    The rule of length: prompt + max_new_tokens <= max_seq_len, that of the model and of the cache.
    The last token of an answer is never computed, so its K and V take no slot.

    Raises ValueError before anything changes: an empty or too long prompt, a token outside the
    vocabulary, max_new_tokens or chunk_size below 1, a number that is not whole, lists of different
    lengths, min_tokens above max_new_tokens, stop strings without a tokenizer, a cache built for
    another model. Later errors (OutOfBlocks, say) come out of the iterator. However it ends, by an
    error or because the caller stops iterating, its sequences are freed; a batch that is open then
    is aborted.
    """
    max_new_tokens = at_least_1(max_new_tokens, "max_new_tokens")
    prompts = check_requests(model, cache, prompts, max_new_tokens)
    if chunk_size is not None:
        chunk_size = at_least_1(chunk_size, "chunk_size")
    params = check_sampling_params(sampling_params, len(prompts))
    seq_ids = range(len(prompts)) if seq_ids is None else listed(seq_ids, "seq_ids")
    if len(seq_ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(seq_ids)} seq_ids")
    vocab_size = vocabulary(model, tokenizer)
    if tokenizer is not None:
        params = [p.with_stop_token_ids(tokenizer.eos_token_ids) for p in params]
    states = [SamplingState(p, prompt) for p, prompt in zip(params, prompts, strict=True)]
    answers = [
        AnswerStream(p, max_new_tokens, TextStream(tokenizer, prompt) if tokenizer else None)
        for p, prompt in zip(params, prompts, strict=True)
    ]

    def run() -> Iterator[Token]:
        """The steps themselves. A caller that stops in between frees all sequences."""
        index_of = {seq_id: index for index, seq_id in enumerate(seq_ids)}
        with freed_on_failure(cache) as running:
            for seq_id, prompt in zip(seq_ids, prompts, strict=True):
                cache.add(seq_id, prompt, max_tokens=len(prompt) + max_new_tokens)
                running.append(seq_id)
            while running:
                batch = cache.reserve({s: _next_tokens(cache, s, chunk_size) for s in running})
                hidden = model(batch.token_ids, batch.positions, batch.attend)
                batch.commit()
                if on_step is not None:
                    on_step(batch)
                last_rows = (batch.query_start_loc[1:] - 1).tolist()
                ready = {
                    seq_id: row
                    for seq_id, row in zip(batch.seq_ids, last_rows, strict=True)
                    if cache.num_computed_tokens(seq_id) == cache.num_tokens(seq_id)
                }
                logits = model.compute_logits(hidden[list(ready.values())])  # [ready, columns]
                in_turn = [states[index_of[seq_id]] for seq_id in ready]
                sampled = sample(logits, in_turn, vocab_size=vocab_size)
                tokens = []
                for seq_id, chosen in zip(ready, sampled, strict=True):
                    index = index_of[seq_id]
                    piece = answers[index].push(chosen.token_id)
                    if piece.finish_reason is None:
                        cache.append(seq_id, [chosen.token_id])
                    else:
                        cache.free(seq_id)
                        running.remove(seq_id)
                    tokens.append(Token.of(index, chosen, piece))
                yield from tokens

    return run()


def complete(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    tokenizer: Tokenizer | None = None,
    chunk_size: int | None = None,
) -> list[list[int]]:
    """The answers of ``generate`` as lists of tokens, in the order of the prompts."""
    tokens = generate(
        model,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling_params=sampling_params,
        tokenizer=tokenizer,
        chunk_size=chunk_size,
    )
    answers: list[list[int]] = [[] for _ in prompts]
    for token in tokens:
        answers[token.index].append(token.token_id)
    return answers


def _next_tokens(cache: KVCache, seq_id: Hashable, chunk_size: int | None) -> int:
    """How many tokens of a sequence the next step computes: 1 while it answers."""
    waiting = cache.num_tokens(seq_id) - cache.num_computed_tokens(seq_id)
    return waiting if chunk_size is None else min(waiting, chunk_size)
