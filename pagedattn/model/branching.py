"""What parallel sampling and beam search share: a request that goes on as several sequences.

The prompt is a sequence named after its request, "A". It is computed once; then it is forked, and
its branches are "A.1", "A.2" and so on.
"""

import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import cast

from torch import Tensor

from pagedattn.cache import Batch, KVCache, SeqId
from pagedattn.model.llama import Llama
from pagedattn.model.sampling_params import listed
from pagedattn.sharing import PagedKVCache

BRANCH = re.compile(r"(.*)\.[1-9][0-9]*", re.DOTALL)


def request_names(names: Sequence[str] | None, cache: KVCache, count: int) -> list[str]:
    """The names of ``count`` requests: those given, or A, B, … Z, A1, B1 and so on.

    Raises ValueError for another number of names, for two that are equal, and for one that is taken
    or whose branches' names may be: in the cache, or by another request.
    """
    if names is None:
        rounds = (divmod(index, len(ascii_uppercase)) for index in range(count))
        names = [f"{ascii_uppercase[letter]}{number or ''}" for number, letter in rounds]
    names = list(listed(names, "names"))
    different = {name for name in names if isinstance(name, str)}
    if not len(names) == len(different) == count:
        raise ValueError(f"{count} prompts need as many different names, got {names}")
    for name in names:
        if (parent := _request_of(name)) in different:
            raise ValueError(f"{name!r} is a name for branches of {parent!r}")
    for seq_id in cache.seq_ids:
        if seq_id in different or _request_of(seq_id) in different:
            raise ValueError(f"sequence {seq_id!r} is in the cache already")
    return names


def _request_of(seq_id: SeqId) -> str | None:
    """Whose branch a sequence is, if it is named like one."""
    match = BRANCH.fullmatch(seq_id) if isinstance(seq_id, str) else None
    return match and match[1]


def can_fork(cache: KVCache) -> bool:
    """Whether the cache has the verbs of chapter 03."""
    return hasattr(cache, "fork") and hasattr(cache, "replace")


def forking(cache: KVCache) -> PagedKVCache:
    """The cache, as one that can fork. Raises ValueError for one that cannot."""
    if not can_fork(cache):
        kind = f"{type(cache).__module__}.{type(cache).__qualname__}"
        raise ValueError(
            f"branches share blocks, which the caches of chapters 03 to 05 can; not {kind}"
        )
    return cast(PagedKVCache, cache)


def check_room(cache: KVCache, num_seqs: int, why: str) -> None:
    """Raise ValueError unless the cache may hold so many more sequences. ``why`` says who they
    are."""
    held, most = len(cache.seq_ids), cache.config.max_num_seqs
    if held + num_seqs > most:
        raise ValueError(
            f"max_num_seqs is {most}, and {held} sequences are in the cache: {why} need {num_seqs}"
        )


def compute_step(
    model: Llama,
    cache: KVCache,
    seq_ids: Sequence[SeqId],
    on_step: Callable[[Batch], None] | None,
) -> Tensor:
    """Compute all tokens of these sequences that are not computed yet, in one batch.

    Returns the scores of the token after the last of each: [len(seq_ids), columns].
    """
    batch = cache.reserve({s: cache.num_tokens(s) - cache.num_computed_tokens(s) for s in seq_ids})
    hidden = model(batch.token_ids, batch.positions, batch.attend)
    batch.commit()
    if on_step is not None:
        on_step(batch)
    return model.compute_logits(hidden[(batch.query_start_loc[1:] - 1).long()])
