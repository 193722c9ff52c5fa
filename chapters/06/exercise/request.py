# Chapter 06, given: pagedattn/manager/request.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 73cb55942db849b90ea72674374cbe39508603fc1b70465b7ec70b7e1428f5b4

"""A request, as far as the cache is concerned: its tokens, their digests, how far it has come.

Source: ``vllm/v1/request.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedattn.cache import as_token_ids
from pagedattn.prefix import BlockHasher, ExtraKeys
from pagedattn.prefix.hashing import check_identity
from pagedattn.whole_number import whole_number


class Request:
    """``token_ids`` are the prompt and, behind it, what was answered so far.

    ``block_hashes`` are the digests of its full blocks of ``hasher.block_size`` tokens; without a
    hasher there are none. ``num_computed_tokens`` is set by whoever runs the model: K and V of so
    many tokens will be in the cache when the step has run.

    ``num_encoder_tokens`` is the length of the input of an encoder. With
    ``skip_reading_prefix_cache`` every token is computed, because something is wanted of each; what
    is computed is registered all the same. ``num_preemptions`` counts how often the request lost
    its blocks. Raises ValueError for an id that is no string, tokens that are no whole
    numbers, a salt or keys of another type, or a negative number.

    >>> request = Request("r", [1, 2, 3, 4, 5], BlockHasher(2))
    >>> request.num_tokens, len(request.block_hashes)
    (5, 2)
    """

    __slots__ = (
        "block_hashes",
        "extra_keys",
        "hasher",
        "num_computed_tokens",
        "num_encoder_tokens",
        "num_preemptions",
        "request_id",
        "salt",
        "skip_reading_prefix_cache",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: Iterable[int],
        hasher: BlockHasher | None = None,
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        num_encoder_tokens: int = 0,
        skip_reading_prefix_cache: bool = False,
        num_preemptions: int = 0,
    ) -> None:
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r}; a string is needed")
        check_identity(salt, extra_keys)
        for name, value in (
            ("num_encoder_tokens", num_encoder_tokens),
            ("num_preemptions", num_preemptions),
        ):
            if whole_number(value, name) < 0:
                raise ValueError(f"{name} of request {request_id} is {value}, below 0")
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.hasher = hasher
        self.salt = salt
        self.extra_keys = extra_keys
        self.num_encoder_tokens = num_encoder_tokens
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.num_preemptions = num_preemptions
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.append(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known, computed or not."""
        return len(self.token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens at the end, and the digests of blocks that they fill.

        Raises ValueError for a token that is no whole number of 64 bits; then none is added.
        """
        self.token_ids += as_token_ids(token_ids)
        hasher = self.hasher
        if hasher and len(self.token_ids) // hasher.block_size > len(self.block_hashes):
            self.block_hashes += hasher.hash_blocks(
                self.token_ids, self.block_hashes, salt=self.salt, extra_keys=self.extra_keys
            )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed)"
        )
