"""What every generation demands before it begins, and how it frees its memory however it ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

from pagedattn.cache import KVCache, SeqId
from pagedattn.model.llama import Llama
from pagedattn.model.sampling_params import SamplingParams, listed
from pagedattn.model.tokenizer import Tokenizer
from pagedattn.whole_number import whole_number


def check_cache(model: Llama, cache: KVCache) -> None:
    """Raise ValueError for a cache that was built for another model."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(model.config, name), getattr(cache.config, name)
        if ours != theirs:
            raise ValueError(f"the cache has {name} {theirs}, the model {ours}")


def check_prompts(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    vocab_size: int,
    max_seq_len: int,
    labels: Sequence[str] | None = None,
) -> list[list[int]]:
    """The prompts as lists of Python ints, once ``generate`` can answer them.

    ``max_new_tokens`` is a Python int, checked before: those of NumPy may be too narrow for sums.
    ``labels``: what errors call the prompts (default: 0, 1, …). Raises ValueError for a prompt that
    is empty, too long together with its answer, or holds something else than tokens of the
    vocabulary.
    """
    checked = []
    for label, prompt in zip(labels or count(), listed(prompts, "prompts"), strict=False):
        try:
            tokens = list(prompt)
        except TypeError:
            raise ValueError(f"prompt {label} is {prompt!r}; it must be a list of tokens") from None
        if not tokens:
            raise ValueError(f"prompt {label} is empty")
        if len(tokens) + max_new_tokens > max_seq_len:
            raise ValueError(
                f"prompt {label} has {len(tokens)} tokens; with max_new_tokens {max_new_tokens} "
                f"it would exceed max_seq_len {max_seq_len}"
            )
        checked.append([whole_number(token, f"a token of prompt {label}") for token in tokens])
        for token_id in checked[-1]:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt {label} holds token {token_id}; the vocabulary has {vocab_size} tokens"
                )
    return checked


def check_requests(
    model: Llama, cache: KVCache, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The prompts as ``check_prompts`` gives them, by the limits of model and cache. Raises
    ValueError as ``check_cache`` and ``check_prompts`` do."""
    check_cache(model, cache)
    return check_prompts(
        prompts,
        max_new_tokens,
        vocab_size=model.config.vocab_size,
        max_seq_len=min(model.config.max_seq_len, cache.config.max_seq_len),
    )


def vocabulary(model: Llama, tokenizer: Tokenizer | None) -> int:
    """How many tokens can be chosen. The model may have more columns than there are tokens."""
    columns = model.config.vocab_size
    return columns if tokenizer is None else min(columns, len(tokenizer))


def check_sampling_params(
    given: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """The sampling parameters of each prompt. Raises ValueError for another number of them, and for
    something else."""
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    params = list(listed(given, "sampling_params"))
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params must hold SamplingParams, got {each!r}")
    return params


@contextmanager
def freed_on_failure(cache: KVCache) -> Iterator[list[SeqId]]:
    """A list in which the caller keeps its sequences. When it fails, or is left early, those that
    are still in the cache are freed, and a batch that is open is aborted."""
    running: list[SeqId] = []
    try:
        yield running
    except BaseException as error:
        failures = _free_all(cache, running)
        if failures and isinstance(error, GeneratorExit):
            raise failures[0] from None
        raise


def _free_all(cache: KVCache, seq_ids: Iterable[SeqId]) -> list[Exception]:
    """Free those of the sequences that are still in the cache; whatever fails, the others are
    freed. Returns the errors."""
    left = [seq_id for seq_id in seq_ids if seq_id in cache.seq_ids]
    verbs: list[Callable[[], None]] = [partial(cache.free, seq_id) for seq_id in left]
    if left and cache.open_batch is not None:
        verbs.insert(0, cache.open_batch.abort)
    failures = []
    for verb in verbs:
        try:
            verb()
        except Exception as failure:
            failures.append(failure)
    return failures
