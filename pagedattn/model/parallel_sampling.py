"""Parallel sampling: several answers to one prompt, over a cache that shares blocks.

The prompt is computed once. Then every sample forks it: the samples' tables name the blocks of the
prompt, and each sample copies the last one, if it is partly filled, when it writes its first token.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.4.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pagedattn.cache import Batch, KVCache
from pagedattn.model.branching import (
    check_room,
    compute_step,
    forking,
    request_names,
)
from pagedattn.model.generate import GREEDY, Token
from pagedattn.model.guards import (
    check_requests,
    check_sampling_params,
    freed_on_failure,
    vocabulary,
)
from pagedattn.model.llama import Llama
from pagedattn.model.sampling import Sampled, SamplingState
from pagedattn.model.sampling import sample as choose
from pagedattn.model.sampling_params import SamplingParams
from pagedattn.model.stopping import AnswerStream
from pagedattn.model.tokenizer import TextStream, Tokenizer
from pagedattn.whole_number import at_least_1


@dataclass(frozen=True)
class SampleToken(Token):
    """A token of one sample. ``index`` is that of its prompt; ``sample`` counts from 0."""

    sample: int = 0


@dataclass
class _Sample:
    """One answer that is being written: its name in the cache, its sampler, its text."""

    seq_id: str
    index: int
    sample: int
    state: SamplingState
    answer: AnswerStream

    def push(self, chosen: Sampled) -> SampleToken:
        """The answer's next token."""
        piece = self.answer.push(chosen.token_id)
        return SampleToken.of(self.index, chosen, piece, sample=self.sample)


def sample_in_parallel(
    model: Llama,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    num_samples: int,
    max_new_tokens: int,
    sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    tokenizer: Tokenizer | None = None,
    names: Sequence[str] | None = None,
    on_step: Callable[[Batch], None] | None = None,
) -> Iterator[SampleToken]:
    """Answer each prompt ``num_samples`` times, all together; yields every token when its step is
    done.

    Sample i of a prompt draws with the parameters ``sampling_params.child(i)``: with a seed of its
    own, which a seed of the request fixes. ``names``: the requests' names (default: A, B, …); the
    samples of request A are "A.1", "A.2" and so on, and "A" is its prompt, until it is forked. The
    other arguments, and the rule of length, are those of ``generate``.

    A prompt is freed when all its samples have forked it, so for a moment there is one sequence
    more than there are samples: ``max_num_seqs`` must allow num_samples for each prompt, and one.

    Raises ValueError before anything changes: a cache that cannot fork, one that allows too few
    sequences, num_samples below 1, a name that is taken, and whatever ``generate`` would refuse.
    Later errors (OutOfBlocks, say) come out of the iterator. However it ends, its sequences are
    freed; a batch that is open then is aborted.
    """
    max_new_tokens = at_least_1(max_new_tokens, "max_new_tokens")
    sharing_cache = forking(cache)
    prompts = check_requests(model, cache, prompts, max_new_tokens)
    num_samples = at_least_1(num_samples, "num_samples")
    params = check_sampling_params(sampling_params, len(prompts))
    if tokenizer is not None:
        params = [p.with_stop_token_ids(tokenizer.eos_token_ids) for p in params]
    check_room(
        cache,
        num_samples * len(prompts) + 1,
        f"{num_samples} samples of {len(prompts)} prompts, and a prompt that is forked,",
    )
    vocab_size = vocabulary(model, tokenizer)
    names = request_names(names, cache, len(prompts))
    samples = []
    for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        for i in range(num_samples):
            child = params[index].child(i)
            text = TextStream(tokenizer, prompt) if tokenizer else None
            answer = AnswerStream(child, max_new_tokens, text)
            state = SamplingState(child, prompt)
            samples.append(_Sample(f"{name}.{i + 1}", index, i, state, answer))

    def run() -> Iterator[SampleToken]:
        """The steps themselves. A caller that stops in between frees all sequences."""
        if not samples:
            return
        with freed_on_failure(sharing_cache) as running:
            for name, prompt in zip(names, prompts, strict=True):
                sharing_cache.add(name, prompt, max_tokens=len(prompt) + max_new_tokens)
                running.append(name)
            logits = compute_step(model, sharing_cache, names, on_step)
            for name, group in groupby(samples, lambda sample: names[sample.index]):
                for sample in group:
                    sharing_cache.fork(name, sample.seq_id)
                    running.append(sample.seq_id)
                sharing_cache.free(name)
                running.remove(name)
            logits = logits.repeat_interleave(num_samples, dim=0)  # [samples, columns]
            writing = samples
            while writing:
                states = [sample.state for sample in writing]
                chosen = choose(logits, states, vocab_size=vocab_size)
                tokens = [sample.push(c) for sample, c in zip(writing, chosen, strict=True)]
                for sample, token in zip(writing, tokens, strict=True):
                    if token.finish_reason is None:
                        sharing_cache.append(sample.seq_id, [token.token_id])
                    else:
                        sharing_cache.free(sample.seq_id)
                        running.remove(sample.seq_id)
                writing = [sample for sample in writing if sample.seq_id in running]
                yield from tokens
                if writing:
                    logits = compute_step(model, sharing_cache, running, on_step)

    return run()
