"""A request: its tokens, and the digests of its full blocks."""

import pytest

from pagedattn.prefix import BlockHasher, ExtraKeys, Image

KEYS = ExtraKeys("L", (Image("img", 3, 6),))


@pytest.mark.parametrize(("num_tokens", "full"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_full_blocks_alone_have_digests(stage, num_tokens, full):
    request = stage.Request("r", range(num_tokens), BlockHasher(4))
    assert (request.num_tokens, len(request.block_hashes)) == (num_tokens, full)
    assert request.num_computed_tokens == 0


@pytest.mark.parametrize("pieces", [[14], [3, 1, 7, 3], [1] * 14, [5, 0, 9]])
def test_digests_do_not_depend_on_how_it_grew(stage, pieces):
    hasher = BlockHasher(4, "seed")
    tokens = [7, 1, 5, 9, 2, 2, 8, 0, 3, 1, 4, 6, 6, 2]
    request = stage.Request("r", [], hasher, salt="s", extra_keys=KEYS)
    for n in pieces:
        request.append(tokens[request.num_tokens : request.num_tokens + n])
    assert request.token_ids == tokens
    assert request.block_hashes == hasher.hash_blocks(tokens, salt="s", extra_keys=KEYS)
    assert len(request.block_hashes) == 3


def test_salt_and_keys_separate(stage):
    hasher = BlockHasher(4, "seed")
    digests = {
        stage.Request("r", [1, 2, 3, 4], hasher, **options).block_hashes[0]
        for options in ({}, {"salt": "a"}, {"salt": "b"}, {"extra_keys": ExtraKeys("L")})
    }
    assert len(digests) == 4


def test_without_a_hasher_there_are_none(stage):
    request = stage.Request("r", range(9))
    request.append([1, 2, 3])
    assert (request.num_tokens, request.block_hashes) == (12, [])


def test_the_callers_list_is_left_alone(stage):
    tokens = [1, 2, 3]
    request = stage.Request("r", tokens, BlockHasher(2))
    request.append([4])
    assert tokens == [1, 2, 3]


@pytest.mark.parametrize("token", [-1, 2**63, 1.5, True, "1", None])
def test_a_token_that_is_none_is_refused(stage, token):
    request = stage.Request("r", [1, 2, 3], BlockHasher(2))
    before = list(request.token_ids), list(request.block_hashes)
    with pytest.raises(ValueError, match="token id"):
        request.append([5, token])
    assert (request.token_ids, request.block_hashes) == before
    with pytest.raises(ValueError, match="token id"):
        stage.Request("r", [5, token], BlockHasher(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"salt": 3}, "salt is 3"),
        ({"extra_keys": "L"}, "extra_keys are 'L'"),
        ({"num_encoder_tokens": -1}, "num_encoder_tokens of request r is -1"),
        ({"num_preemptions": -2}, "num_preemptions of request r is -2"),
        ({"num_encoder_tokens": 1.5}, "num_encoder_tokens is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(stage, options, message):
    with pytest.raises(ValueError, match=message):
        stage.Request("r", [1], BlockHasher(2), **options)


def test_it_shows_itself(stage):
    request = stage.Request("r", range(9))
    request.num_computed_tokens = 4
    assert repr(request) == "Request('r', 9 tokens, 4 computed)"
