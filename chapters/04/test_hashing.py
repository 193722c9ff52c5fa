"""The names of blocks: equal where all tokens up to the end of the block are equal, nowhere else.

The bytes that are hashed are written out here once more, by hand.
"""

import os
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]  # 4 blocks of 4


def different(before, after):
    """Which blocks have another digest."""
    return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def field(name, kind, payload):
    return name + kind + struct.pack("<Q", len(payload)) + payload


def hashed(parent, token_ids, extra=b""):
    return sha256(parent + b"".join(struct.pack("<q", t) for t in token_ids) + extra).digest()


def root(block_size, seed):
    return sha256(field(b"b", b"i", b"%d" % block_size) + field(b"r", b"s", seed.encode())).digest()


# The bytes.


def test_digests_by_hand(stage):
    first = hashed(root(4, "seed"), TOKENS[:4])
    second = hashed(first, TOKENS[4:8])
    hasher = stage.BlockHasher(4, "seed")
    assert hasher.root == root(4, "seed")
    assert hasher.hash_blocks(TOKENS[:8]) == [first, second]


def test_digests_of_large_and_negative_tokens_by_hand(stage):
    tokens = [0, 2**63 - 1, -1, 2**40 + 5]
    expected = hashed(root(2, "seed"), tokens[:2])
    expected = [expected, hashed(expected, tokens[2:])]
    assert stage.BlockHasher(2, "seed").hash_blocks(tokens) == expected


def test_digests_with_every_extra_key_by_hand(stage):
    embeds = [[0.5, -1.0], [2.0, 0.25], [8.0, 3.0]]  # 3 prompt tokens, the fourth is generated

    def entered(rows):
        raw = b"".join(struct.pack("<2f", *row) for row in rows)
        kind = field(b"d", b"s", b"torch.float32") + field(b"w", b"i", b"2")
        return field(b"e", b"b", sha256(kind + raw).digest())

    adapter = field(b"a", b"i", b"7")
    image = field(b"i", b"b", b"\x00cat")
    first = (
        adapter + image + field(b"o", b"i", b"1") + field(b"s", b"s", b"us") + entered(embeds[:2])
    )
    second = adapter + image + field(b"o", b"i", b"-1") + entered(embeds[2:])
    digest = hashed(root(2, "seed"), TOKENS[:2], first)
    keys = stage.ExtraKeys(7, (stage.Image(b"\x00cat", 1, 2),), torch.tensor(embeds))
    found = stage.BlockHasher(2, "seed").hash_blocks(TOKENS[:4], salt="us", extra_keys=keys)
    assert found == [digest, hashed(digest, TOKENS[2:4], second)]


def test_a_digest_is_32_bytes(stage):
    digests = stage.BlockHasher(4).hash_blocks(TOKENS)
    assert [(type(digest), len(digest)) for digest in digests] == [(bytes, 32)] * 4


# The chain.


def test_a_chain_covers_all_that_came_before(stage):
    parent = bytes(range(32))
    first = sha256(parent + b"one").digest()
    second = sha256(first + b"two").digest()
    assert stage.hashing.hash_chain(parent, [b"one", b"two"]) == [first, second]
    assert stage.hashing.hash_chain(parent, []) == []


def test_only_full_blocks_have_a_digest(stage):
    hasher = stage.BlockHasher(4, "seed")
    whole = hasher.hash_blocks(TOKENS)
    for n in range(17):
        assert hasher.hash_blocks(TOKENS[:n]) == whole[: n // 4], f"of {n} tokens"


@pytest.mark.parametrize("position", range(16))
def test_equal_beginnings_and_nothing_else_agree(stage, position):
    hasher = stage.BlockHasher(4, "seed")
    other = TOKENS.copy()
    other[position] += 1
    before, after = hasher.hash_blocks(TOKENS), hasher.hash_blocks(other)
    assert different(before, after) == list(range(position // 4, 4)), (
        f"token {position} is another: its block and all after it are other blocks"
    )


def test_equal_blocks_behind_different_beginnings_differ(stage):
    digests = stage.BlockHasher(4, "seed").hash_blocks([1, 2, 3, 4] * 3)
    assert len(set(digests)) == 3, "the same 4 tokens, but at other positions behind other tokens"


@pytest.mark.parametrize("salt", [None, "us"])
def test_step_by_step_as_at_once(stage, salt):
    hasher = stage.BlockHasher(4, "seed")
    keys = stage.ExtraKeys("lora", (stage.Image("cat", 3, 6),), torch.randn(16, 3))
    whole = hasher.hash_blocks(TOKENS, salt=salt, extra_keys=keys)
    for n in range(17):
        begun = hasher.hash_blocks(TOKENS[:n], salt=salt, extra_keys=keys)
        rest = hasher.hash_blocks(TOKENS, begun, salt=salt, extra_keys=keys)
        assert begun + rest == whole, f"{n} tokens first"


def test_token_ids_in_bytes(stage):
    """A sequence of 64 small numbers, whatever it is made of."""
    hasher = stage.BlockHasher(4, "seed")
    digests = hasher.hash_blocks(bytes(range(64)))
    assert len(digests) == 16, "64 tokens, not 8"
    assert digests == hasher.hash_blocks(list(range(64)))


# The root.


def test_the_block_size_enters(stage):
    four, two = stage.BlockHasher(4, "seed"), stage.BlockHasher(2, "seed")
    assert not set(four.hash_blocks(TOKENS)) & set(two.hash_blocks(TOKENS))
    assert four.root != two.root


def test_the_seed_enters(stage):
    seeds = ["a", b"a", "b", "", b"", None]
    found = {stage.BlockHasher(4, seed).hash_blocks(TOKENS)[-1] for seed in seeds}
    assert len(found) == len(seeds), f"of {len(seeds)} seeds each gives other digests"


def test_a_block_size_may_come_from_numpy(stage):
    assert stage.BlockHasher(np.int64(4), "seed").root == root(4, "seed")


def test_one_process_has_one_seed(stage):
    assert stage.BlockHasher(4).hash_blocks(TOKENS) == stage.BlockHasher(4).hash_blocks(TOKENS)


def test_processes_agree_only_with_a_seed(stage):
    """Three processes, two of them with the same PYTHONHASHSEED: Python's own hash of a str would
    agree between these two and not with the third."""
    code = f"""
from pathlib import Path
from pagedattn.course.implementations import load_path
stage = load_path(Path({str(Path(stage.__file__).parent)!r}))
for seed in ("seed", None):
    print(stage.BlockHasher(4, seed).hash_blocks({TOKENS})[-1].hex())
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "1", "2")
    ]
    outputs = [process.communicate()[0].split() for process in processes]
    here = [stage.BlockHasher(4, seed).hash_blocks(TOKENS)[-1].hex() for seed in ("seed", None)]
    with_seed, without = zip(*outputs, here, strict=True)
    assert len(set(with_seed)) == 1, "the same seed gives the same digests"
    assert len(set(without)) == 4, "without one nobody can know the digests of a process"


# Bad input.


@pytest.mark.parametrize("block_size", [0, -1, 2.0, "4", None, True])
def test_a_block_size_that_cannot_be(stage, block_size):
    with pytest.raises(ValueError, match=f"block_size .*{block_size}"):
        stage.BlockHasher(block_size)


@pytest.mark.parametrize("seed", [7, 1.0, ["a"], True])
def test_a_seed_of_another_kind(stage, seed):
    with pytest.raises(ValueError, match=r"seed is .*str or bytes"):
        stage.BlockHasher(4, seed)


@pytest.mark.parametrize("token", ["a", 1.5, None, 2**63, -(2**63) - 1])
def test_what_is_no_token(stage, token):
    with pytest.raises(ValueError, match="token id"):
        stage.BlockHasher(2, "seed").hash_blocks([1, token])


@pytest.mark.parametrize("parent", [b"", bytes(31), bytes(33), "x" * 32, None, bytearray(32)])
def test_what_is_no_digest(stage, parent):
    with pytest.raises(ValueError, match=r"digest.*32 bytes"):
        stage.BlockHasher(4, "seed").hash_blocks(TOKENS, [parent])
