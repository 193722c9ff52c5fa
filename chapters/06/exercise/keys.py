# Chapter 06, given: pagedattn/manager/keys.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 af4a965cfb18d780abed5b4ed4efb9fb61f2259cc2889297e6ee413537386760

"""Under which bytes a block is registered.

All groups share one pool and one map. The block of a full-attention group and that of a
sliding-window group may hold the same tokens, but they hold K and V of different layers, so the key
is the digest and, behind it, the number of the group in 4 bytes.

Digests are made once for each request, for blocks of ``hash_block_size`` tokens. A group with
larger blocks puts as many digests together as fit into one of its blocks.

Source: ``vllm/v1/core/kv_cache_utils.py``, ``make_block_hash_with_group_id`` and
``BlockHashListWithBlockSize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

GROUP_ID_BYTES = 4


def group_suffix(group_id: int) -> bytes:
    """What stands behind the digest.

    >>> group_suffix(1)
    b'\\x00\\x00\\x00\\x01'
    """
    return group_id.to_bytes(GROUP_ID_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """The digest and the number of the group of a key."""
    return key[:-GROUP_ID_BYTES], int.from_bytes(key[-GROUP_ID_BYTES:], "big")


class JoinedHashes(Sequence[bytes]):
    """The digests of blocks that are ``ratio`` times as large: each is ``ratio`` digests in a row.

    Joined when they are asked for. A last block that is not full has none.

    >>> list(JoinedHashes([b"a", b"b", b"c", b"d", b"e"], 2))
    [b'ab', b'cd']
    """

    def __init__(self, block_hashes: Sequence[bytes], ratio: int) -> None:
        self.block_hashes = block_hashes
        self.ratio = ratio

    def __len__(self) -> int:
        return len(self.block_hashes) // self.ratio

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        first = index % len(self) * self.ratio
        return b"".join(self.block_hashes[first : first + self.ratio])


def join_hashes(
    block_hashes: Sequence[bytes], hash_block_size: int, block_size: int
) -> Sequence[bytes]:
    """Digests of blocks of ``hash_block_size`` tokens as those of blocks of ``block_size``.

    Raises ValueError unless the one divides the other.
    """
    if block_size == hash_block_size:
        return block_hashes
    ratio, rest = divmod(block_size, hash_block_size)
    if rest:
        raise ValueError(
            f"digests of {hash_block_size} tokens cannot name blocks of {block_size} tokens"
        )
    return JoinedHashes(block_hashes, ratio)
