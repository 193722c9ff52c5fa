"""What a digest covers besides tokens: a salt, the adapter, images, prompt embeddings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]  # 4 blocks of 4


def different(before, after):
    """Which blocks have another digest."""
    return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def test_the_salt_enters_the_first_block_and_the_chain_carries_it(stage):
    hasher = stage.BlockHasher(4, "seed")
    digests = [hasher.hash_blocks(TOKENS, salt=s) for s in ("a", "b", b"a", "", b"", None)]
    assert len({chain[0] for chain in digests}) == 6, "six salts, none among them: six names"
    assert len({chain[3] for chain in digests}) == 6, "the last block differs with the first"
    assert hasher.hash_blocks(TOKENS, salt="a") == digests[0], "equal salts share"
    first = digests[0][:1]
    assert hasher.hash_blocks(TOKENS, first, salt="a") == hasher.hash_blocks(TOKENS, first), (
        "behind the first block only the chain tells salts apart"
    )


def test_every_adapter_has_digests_of_its_own(stage):
    hasher = stage.BlockHasher(4, "seed")
    adapters = ["1", 1, b"1", "", b"", 0, "A", -1, "-1"]
    chains = [
        hasher.hash_blocks(TOKENS, extra_keys=stage.ExtraKeys(adapter)) for adapter in adapters
    ]
    chains.append(hasher.hash_blocks(TOKENS))
    for block in range(4):
        assert len({chain[block] for chain in chains}) == len(chains), f"block {block}"
    again = hasher.hash_blocks(TOKENS, extra_keys=stage.ExtraKeys("A"))
    assert again == chains[adapters.index("A")], "equal adapters share"


def test_an_adapter_enters_every_block(stage):
    hasher = stage.BlockHasher(4, "seed")
    first = hasher.hash_blocks(TOKENS[:4])
    rest = [
        hasher.hash_blocks(TOKENS, first, extra_keys=stage.ExtraKeys(adapter))
        for adapter in (None, "A")
    ]
    assert different(*rest) == [0, 1, 2]
    assert hasher.hash_blocks(TOKENS, first) == rest[0], "no keys are as empty ones"


def test_a_salt_is_no_adapter(stage):
    hasher = stage.BlockHasher(4, "seed")
    salted = hasher.hash_blocks(TOKENS, salt="A")
    adapted = hasher.hash_blocks(TOKENS, extra_keys=stage.ExtraKeys("A"))
    assert different(salted, adapted) == [0, 1, 2, 3]


def test_which_blocks_an_image_enters(stage):
    """Blocks of 4; one image lies at 2 … 7, a second at 10 and 11."""

    def chain(first=("cat", 2, 6), second=("dog", 10, 2)):
        keys = stage.ExtraKeys(images=(stage.Image(*first), stage.Image(*second)))
        return stage.BlockHasher(4, "seed").hash_blocks(TOKENS, extra_keys=keys)

    assert different(chain(), chain(first=("cow", 2, 6))) == [0, 1, 2, 3]
    assert different(chain(), chain(second=("cow", 10, 2))) == [2, 3]
    assert different(chain(), chain(first=("cat", 3, 5))) == [0, 1, 2, 3], "it begins elsewhere"
    assert different(chain(), chain(second=("dog", 11, 1))) == [2, 3]
    assert different(chain(), chain(second=("dog", 10, 5))) == [3], "it reaches into block 3"
    assert different(chain(), chain(first=("cat", 2, 7))) == [2, 3], "it reaches into block 2"


def own(stage, block, *images):
    """The digest of one block with these images; before it stands the same digest always."""
    keys = stage.ExtraKeys(images=tuple(stage.Image(*image) for image in images))
    tokens = TOKENS[: 4 * block + 4]
    return stage.BlockHasher(4, "seed").hash_blocks(tokens, [bytes(32)] * block, extra_keys=keys)[0]


def test_what_of_an_image_enters_a_block(stage):
    """As above, block for block: where the image begins, counted from the block's own first token;
    nothing of one that lies elsewhere."""
    images = [("cat", 2, 6), ("dog", 10, 2)]
    assert own(stage, 0, *images) == own(stage, 0, ("cat", 2, 1))
    assert own(stage, 1, *images) == own(stage, 1, ("cat", 2, 9))
    assert own(stage, 1, *images) != own(stage, 1, ("cat", 6, 2)), "it begins before: offset -2"
    assert own(stage, 2, *images) == own(stage, 2, ("dog", 10, 2))
    assert own(stage, 2, *images) != own(stage, 2), "the second one lies in block 2"
    assert own(stage, 3, *images) == own(stage, 3), "neither lies in block 3"


def test_the_order_in_which_images_are_named_is_nothing(stage):
    images = [("cat", 4, 2), ("dog", 6, 1)]
    assert own(stage, 1, *images) == own(stage, 1, *reversed(images))
    assert own(stage, 1, *images) != own(stage, 1, ("dog", 4, 2), ("cat", 6, 1))
    images = [("cat", 4, 2), ("dog", 4, 2), (b"cat", 4, 1)]
    assert own(stage, 1, *images) == own(stage, 1, *reversed(images)), "at one offset"


def test_identifiers_and_offsets_do_not_run_together(stage):
    images = [
        [],
        [("", 0, 4)],
        [(b"", 0, 4)],
        [("a", 0, 4)],
        [(b"a", 0, 4)],
        [("a", 1, 3)],
        [("a1", 0, 4)],
        [("ab", 0, 4)],
        [("a", 0, 4), ("b", 1, 3)],
        [("a", 0, 4), ("", 1, 3)],
    ]
    assert len({own(stage, 0, *some) for some in images}) == len(images)


def test_the_whole_identifier_of_an_image_enters(stage):
    """5 and 37 are the same number modulo 32, and modulo 2**16 the others are the same, too."""
    numbers = [5, 37, 5 + 2**16, 5 + 2**32, 5 + 2**64, 5 + 2**255]
    for identifiers in (
        (numbers_as_bytes := [n.to_bytes(32, "big") for n in numbers]),
        [digest.hex() for digest in numbers_as_bytes],
    ):
        digests = {own(stage, 0, (identifier, 0, 4)) for identifier in identifiers}
        assert len(digests) == len(numbers), "each picture has a name of its own"


def test_the_keys_of_the_parent_enter_its_children(stage):
    """vllm-project/vllm#12603: equal tokens, and an equal second image behind another first one."""
    hasher = stage.BlockHasher(3, "seed")
    chains = [
        hasher.hash_blocks(
            [7, 7, 7, 7, 7, 7],
            extra_keys=stage.ExtraKeys(images=(stage.Image(a, 0, 3), stage.Image(b, 3, 3))),
        )
        for a, b in [("h1", "h3"), ("h2", "h3")]
    ]
    assert different(*chains) == [0, 1], "the second block follows another picture"


@pytest.mark.parametrize("row", [0, 5, 15])
def test_prompt_embeds_enter_their_block(stage, row):
    hasher = stage.BlockHasher(4, "seed")
    embeds = torch.randn(16, 3)
    other = embeds.clone()
    other[row, 1] += 0.5
    chains = [hasher.hash_blocks(TOKENS, extra_keys=stage.ExtraKeys(prompt_embeds=e)) for e in
              (embeds, embeds.clone(), other)]  # fmt: skip
    assert chains[0] == chains[1], "equal numbers, equal digests"
    assert different(chains[0], chains[2]) == list(range(row // 4, 4))


def test_prompt_embeds_by_kind_and_form(stage):
    """The same bytes as other numbers, and the same numbers in other rows."""
    numbers = torch.arange(1.0, 9.0).view(4, 2)
    forms = [
        numbers,
        numbers.view(torch.int32),
        numbers.double(),
        numbers.half(),
        numbers.bfloat16(),
        numbers.view(2, 4),
        numbers.flip(0),
    ]
    hasher = stage.BlockHasher(4, "seed")

    def digest(embeds):
        keys = None if embeds is None else stage.ExtraKeys(prompt_embeds=embeds)
        return hasher.hash_blocks(TOKENS[:4], extra_keys=keys)[0]

    assert len({digest(embeds) for embeds in [*forms, None]}) == 8
    strided = numbers.T.contiguous().T
    assert digest(strided) == digest(numbers), "how it lies in memory is nothing"
    assert digest(numbers.clone().requires_grad_()) == digest(numbers)


def test_tokens_behind_the_prompt_have_no_embeds(stage):
    """A prompt of 6 tokens, blocks of 4: blocks 2 and 3 hold generated tokens alone."""
    keys = stage.ExtraKeys(prompt_embeds=torch.randn(6, 3))
    digests = stage.BlockHasher(4, "seed").hash_blocks(TOKENS, extra_keys=keys)
    assert len(set(digests)) == 4


texts = st.sampled_from(["", "1", "12", b"", b"1"])
values = st.sampled_from([0.0, 1.0])
inputs = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, 1), min_size=4, max_size=4),
        "salt": st.none() | texts,
        "adapter": st.none() | texts | st.sampled_from([1, 12]),
        "images": st.lists(
            st.tuples(texts, st.integers(0, 3), st.integers(1, 3)),
            max_size=2,
            unique_by=lambda i: i[1],
        ),
        "embeds": st.none() | st.lists(values, min_size=4, max_size=4),
    }
)


def known(value):
    return type(value).__name__, value


def what_enters(given, block):
    """Of one block of 2 tokens, as Python values, which need no byte form to be told apart."""
    begin, end = 2 * block, 2 * block + 2
    images = sorted(given["images"], key=lambda image: image[1])
    return (
        given["tokens"][begin:end],
        known(given["adapter"]),
        [(known(name), at - begin) for name, at, n in images if at < end and at + n > begin],
        known(given["salt"]) if block == 0 else None,
        given["embeds"] and given["embeds"][begin:end],
    )


@settings(max_examples=300, deadline=None)
@given(
    one=inputs, change=st.dictionaries(st.sampled_from(["salt", "adapter"]), texts), data=st.data()
)
def _agree_only_where_all_is_equal(stage, one, change, data):
    field_of_another = data.draw(st.sampled_from(sorted(one)))
    other = one | {field_of_another: data.draw(inputs)[field_of_another]} | change

    def chain(given):
        embeds = None if given["embeds"] is None else torch.tensor(given["embeds"]).view(4, 1)
        images = tuple(stage.Image(*image) for image in given["images"])
        keys = stage.ExtraKeys(given["adapter"], images, embeds)
        hasher = stage.BlockHasher(2, "seed")
        return hasher.hash_blocks(given["tokens"], salt=given["salt"], extra_keys=keys)

    first = what_enters(one, 0) == what_enters(other, 0)
    both = first and what_enters(one, 1) == what_enters(other, 1)
    same = [a == b for a, b in zip(chain(one), chain(other), strict=True)]
    assert same == [first, both], f"{one} and {other}: blocks with equal digests {same}"


def test_digests_agree_only_where_all_is_equal(stage):
    _agree_only_where_all_is_equal(stage)


# Bad input.


@pytest.mark.parametrize("salt", [7, 1.0, ["a"], True, bytearray(b"a")])
def test_a_salt_of_another_kind(stage, salt):
    with pytest.raises(ValueError, match=r"salt is .*str or bytes"):
        stage.BlockHasher(4, "seed").hash_blocks(TOKENS, salt=salt)


@pytest.mark.parametrize("keys", ["A", ("A",), {"adapter": "A"}, 0, False])
def test_extra_keys_of_another_kind(stage, keys):
    with pytest.raises(ValueError, match="ExtraKeys"):
        stage.BlockHasher(4, "seed").hash_blocks(TOKENS, extra_keys=keys)


@pytest.mark.parametrize("adapter", [1.0, True, ["A"], ("A", 1)])
def test_an_adapter_of_another_kind(stage, adapter):
    with pytest.raises(ValueError, match=r"adapter is .*str or int or bytes"):
        stage.ExtraKeys(adapter)


@pytest.mark.parametrize(
    "image", [(5, 0, 4), (None, 0, 4), ("a", -1, 4), ("a", 1.0, 4), ("a", 0, 0), ("a", 0, "4")]
)
def test_an_image_that_cannot_be(stage, image):
    with pytest.raises(ValueError, match="image"):
        stage.Image(*image)


def test_images_that_are_none(stage):
    image = stage.Image("a", 0, 4)
    for images in (image, [image], (image, "b"), None, "a"):
        with pytest.raises(ValueError, match="images are"):
            stage.ExtraKeys(images=images)


@pytest.mark.parametrize("embeds", [[[1.0]], torch.zeros(4), torch.zeros(1, 4, 2), 1.0])
def test_prompt_embeds_that_cannot_be(stage, embeds):
    with pytest.raises(ValueError, match=r"prompt_embeds are .*num_prompt_tokens, hidden_size"):
        stage.ExtraKeys(prompt_embeds=embeds)


def test_an_image_may_come_from_numpy(stage):
    assert own(stage, 0, ("a", np.int64(1), np.int32(3))) == own(stage, 0, ("a", 1, 3))
