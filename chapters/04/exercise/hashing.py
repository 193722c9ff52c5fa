# Chapter 04, yours to write: pagedattn/prefix/hashing.py without the bodies of its tasks.
#   pytest chapters/04 --student                all its tests on this folder
#   pytest chapters/04 --student --task 4.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 3b3cd07591c3dc5aedf09950720993e82bd054c44204468e67b8bfa38f5749fc

"""The names of blocks: a chain of hashes.

K and V of a token depend on all tokens before it, so two blocks may be exchanged only if everything
up to their ends is equal. The digest of a block therefore covers the digest of the block before
it: equal digests mean equal beginnings, all the way back.

What else changes K and V enters, too: the adapter, images, prompt embeddings. A salt separates
those who must not share. Every part is written with its kind and its length, so that no two inputs
give the same bytes.

Source: ``vllm/v1/core/kv_cache_utils.py``, ``hash_block_tokens`` and ``generate_block_hash_extra_
keys``; the bytes are our own.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from pagedattn.whole_number import at_least_1, whole_number

DIGEST_SIZE = 32  # bytes
_TOKEN_SIZE = 8

# Drawn anew in each process (one that is forked keeps it): who does not know it cannot prepare two
# prompts with one digest.
_PROCESS_SEED = os.urandom(32)


@dataclass(frozen=True)
class Image:
    """An image in a prompt: ``length`` tokens from position ``offset`` on stand for it.

    ``identifier`` names its contents, all of them: a full digest, not a short number. So images
    with one identifier are one image, and have one length. Raises
    ValueError for an identifier that is neither str nor bytes, or numbers that cannot be.
    """

    identifier: str | bytes
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_kind("an image's identifier", self.identifier, (str, bytes))
        for name in ("offset", "length"):  # an integer of NumPy becomes an int
            object.__setattr__(self, name, whole_number(getattr(self, name), f"an image's {name}"))
        if self.offset < 0:
            raise ValueError(f"an image's offset is {self.offset}; positions begin at 0")
        at_least_1(self.length, "an image's length")


@dataclass(frozen=True, eq=False)
class ExtraKeys:
    """What K and V of a sequence depend on besides its tokens.

    ``adapter`` identifies the loaded weights, so it must change when others are loaded under an old
    name. ``prompt_embeds`` [num_prompt_tokens, hidden_size] are given in the place of token
    embeddings. Raises ValueError for a value of another type or shape.
    """

    adapter: str | int | bytes | None = None
    images: tuple[Image, ...] = ()
    prompt_embeds: Tensor | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            _check_kind("adapter", self.adapter, (str, int, bytes))
        if not isinstance(self.images, tuple) or not all(
            isinstance(image, Image) for image in self.images
        ):
            raise ValueError(f"images are {self.images!r}; a tuple of Image is needed")
        embeds = self.prompt_embeds
        if embeds is not None and not (isinstance(embeds, Tensor) and embeds.dim() == 2):
            what = list(embeds.shape) if isinstance(embeds, Tensor) else repr(embeds)
            raise ValueError(
                f"prompt_embeds are {what}; a tensor [num_prompt_tokens, hidden_size] is needed"
            )
        if embeds is not None and (embeds.is_meta or embeds.layout != torch.strided):
            raise ValueError(
                f"prompt_embeds are {embeds.layout} on {embeds.device}; numbers are needed"
            )
        in_order = sorted(self.images, key=lambda image: (image.offset, _value(image.identifier)))
        object.__setattr__(self, "images", tuple(in_order))


_NO_KEYS = ExtraKeys()


class BlockHasher:
    """Digests of full blocks of ``block_size`` tokens.

    ``root`` stands for the block before the first one. It depends on the block size and on
    ``seed``; without one, on 32 random bytes of this process. With equal seeds two processes agree.

    Raises ValueError for a block size below 1, or a seed that is neither str nor bytes.
    """

    def __init__(self, block_size: int, seed: str | bytes | None = None) -> None:
        self.block_size = at_least_1(block_size, "block_size")
        if seed is None:
            seed = _PROCESS_SEED
        _check_kind("seed", seed, (str, bytes))
        self.root = sha256(_field(b"b", self.block_size) + _field(b"r", seed)).digest()

    def hash_blocks(
        self,
        token_ids: Sequence[int],
        block_hashes: Sequence[bytes] = (),
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> list[bytes]:
        """The digests of the full blocks of ``token_ids`` that follow those in ``block_hashes``.

        Tokens behind the last full block have no digest. The salt enters the first block, and with
        the chain all the others. Raises ValueError for a token id that is no whole number of 64
        bits, a salt that is neither str nor bytes, extra keys that are not ExtraKeys, or a last
        digest that is not one.
        """
        raise NotImplementedError(
            "task 4.1: check first: check_identity and check_digest are given; a digest covers the "
            "digest before it; pack the tokens of all new full blocks once, and go on where "
            "block_hashes ends"
        )

    def _extra_bytes(
        self, index: int, salt: str | bytes | None, extra_keys: ExtraKeys | None
    ) -> bytes:
        """What enters block ``index`` behind its tokens."""
        begin, end = index * self.block_size, (index + 1) * self.block_size
        keys = extra_keys or _NO_KEYS
        fields = []
        if keys.adapter is not None:
            fields.append(_field(b"a", keys.adapter))
        for image in keys.images:
            if image.offset < end and image.offset + image.length > begin:
                fields.append(_field(b"i", image.identifier) + _field(b"o", image.offset - begin))
        if salt is not None and index == 0:
            fields.append(_field(b"s", salt))
        if keys.prompt_embeds is not None:
            fields.append(_field(b"e", tensor_digest(keys.prompt_embeds[begin:end])))
        return b"".join(fields)


def hash_chain(parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
    """The digest of each block, which covers its own content and the digest of the block before it;
    before the first stands ``parent``."""
    raise NotImplementedError(
        "task 4.1: check first: check_identity and check_digest are given; a digest covers the "
        "digest before it; pack the tokens of all new full blocks once, and go on where "
        "block_hashes ends"
    )


def check_digest(block_hash: object) -> None:
    """Raises ValueError unless this is a digest: ``DIGEST_SIZE`` bytes."""
    if not isinstance(block_hash, bytes) or len(block_hash) != DIGEST_SIZE:
        raise ValueError(f"a digest is {block_hash!r}; {DIGEST_SIZE} bytes are needed")


def check_identity(salt: object, extra_keys: object) -> None:
    """Raises ValueError unless these are a salt and extra keys, or None."""
    if salt is not None:
        _check_kind("salt", salt, (str, bytes))
    if extra_keys is not None and not isinstance(extra_keys, ExtraKeys):
        raise ValueError(f"extra_keys are {extra_keys!r}; ExtraKeys are needed")


def _pack(token_ids: Sequence[int]) -> bytes:
    """8 bytes a token, the lowest first: for a whole prompt in one call, not for each block."""
    try:
        packed = array("q", list(token_ids))  # of bytes an array would take the memory as it is
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a token id is no whole number of 64 bits: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _field(name: bytes, value: str | int | bytes) -> bytes:
    """A value with its name, its kind and its length before it: nothing else has these bytes."""
    return name + _value(value)


def _value(value: str | int | bytes) -> bytes:
    if isinstance(value, str):
        kind, payload = b"s", value.encode()
    elif isinstance(value, int):
        kind, payload = b"i", str(value).encode()
    else:
        kind, payload = b"b", value
    return kind + len(payload).to_bytes(8, "little") + payload


def tensor_digest(tensor: Tensor) -> bytes:
    """The digest of the dtype, the width and the bytes of a tensor [n, width]."""
    raw = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    kind = _field(b"d", str(tensor.dtype)) + _field(b"w", tensor.shape[1])
    return sha256(kind + raw).digest()


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {value!r} of type {type(value).__name__}; {words} is needed")
    try:
        str(value).encode()
    except ValueError as error:  # a lone surrogate, or more digits than Python writes
        raise ValueError(f"{name} cannot be written: {error}") from error
