"""What every generation demands before it begins, and how it frees its memory however it ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pagedattn.cache import KVCache, SeqId
from pagedattn.model.llama import Llama
from pagedattn.whole_number import at_least_1, whole_number


def check_cache(model: Llama, cache: KVCache) -> None:
    """Raise ValueError for a cache that was built for another model."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(model.config, name), getattr(cache.config, name)
        if ours != theirs:
            raise ValueError(f"the cache has {name} {theirs}, the model {ours}")


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, *, vocab_size: int, max_seq_len: int
) -> list[list[int]]:
    """The prompts as lists of Python ints, once ``generate`` can answer them.

    Raises ValueError for a prompt that is empty, too long together with its answer, or holds
    something else than tokens of the vocabulary.
    """
    max_new_tokens = at_least_1(max_new_tokens, "max_new_tokens")
    checked = []
    for index, prompt in enumerate(prompts):
        try:
            tokens = list(prompt)
        except TypeError:
            raise ValueError(f"prompt {index} is {prompt!r}; it must be a list of tokens") from None
        if not tokens:
            raise ValueError(f"prompt {index} is empty")
        if len(tokens) + max_new_tokens > max_seq_len:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens; with max_new_tokens {max_new_tokens} "
                f"it would exceed max_seq_len {max_seq_len}"
            )
        checked.append([whole_number(token, f"a token of prompt {index}") for token in tokens])
        for token_id in checked[-1]:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt {index} holds token {token_id}; the vocabulary has {vocab_size} tokens"
                )
    return checked


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
