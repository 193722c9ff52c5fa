"""Who may share with whom: adapters, images, embeddings and salts enter the digests.

Each test asks for the hits and for the misses. That another key finds nothing is true of a cache
that is switched off, too.
"""

from types import SimpleNamespace

import pytest
import torch

from pagedattn.course.witness import Witness

PROMPT = list(range(100, 109))  # 9 tokens


def hits(witness, *identities, prompt=PROMPT):
    """The prompt once with each of these; what was found each time."""
    return [witness.live(prompt, **identity) for identity in identities]


def witness_of(stage, **options):
    """A witness of a cache that is built with these options."""

    def build_cache(config):
        return stage.build_cache(config, **options)

    return Witness(SimpleNamespace(build_cache=build_cache))


def test_salts(stage):
    """Canonical: vllm-project/vllm#16016."""
    a, b = {"salt": "a"}, {"salt": "b"}
    assert hits(Witness(stage), a, a, b, {}, a) == [0, 8, 0, 0, 8]


def test_a_salt_of_another_kind_is_another_salt(stage):
    assert hits(Witness(stage), {"salt": "a"}, {"salt": b"a"}, {"salt": ""}, {}) == [0] * 4


def test_adapters(stage):
    """Canonical: vllm-project/vllm#3264. Each adapter makes keys and values of its own."""
    a, b = ({"extra_keys": stage.ExtraKeys(adapter=name)} for name in "ab")
    assert hits(Witness(stage), a, b, {}, a) == [0, 0, 0, 8]


def test_other_weights_under_an_old_name(stage):
    """Canonical: vllm-project/vllm#30931. The key is the identity of the weights, not the name."""
    first, second = ({"extra_keys": stage.ExtraKeys(adapter=f"x, loaded {n}.")} for n in (1, 2))
    assert hits(Witness(stage), first, second, second, first) == [0, 0, 8, 8]


def test_adapter_1_is_not_adapter_one_in_words(stage):
    each = [{"extra_keys": stage.ExtraKeys(adapter=name)} for name in (1, "1", b"1")]
    assert hits(Witness(stage), *each, *each) == [0, 0, 0, 8, 8, 8]


def with_images(stage, *images):
    return {"extra_keys": stage.ExtraKeys(images=tuple(stage.Image(*image) for image in images))}


def test_another_first_image_and_an_equal_second(stage):
    """Canonical: vllm-project/vllm#12603. Two blocks of 3 tokens, an image in each; the tokens are
    equal, and so is the second image."""
    witness, prompt = Witness(stage, block_size=3), PROMPT[:7]
    one = with_images(stage, ("h1", 0, 3), ("h2", 3, 3))
    other = with_images(stage, ("h3", 0, 3), ("h2", 3, 3))
    assert hits(witness, one, other, prompt=prompt) == [0, 0]
    cached = witness.cache.pool.cached_blocks
    assert len(cached) == 4, f"two prompts of two blocks: 4 digests, not {len(cached)}"
    third = with_images(stage, ("h1", 0, 3), ("h3", 3, 3))
    assert hits(witness, one, other, third, prompt=prompt) == [6, 6, 3]


def test_a_hit_ends_before_another_image(stage):
    """Canonical: sgl-project/sglang#2151. The placeholders of two pictures are equal, and so are
    the digests of the pictures modulo 32; the whole digest counts."""
    witness = Witness(stage)
    prompt = [1, 2, 3, 4, 9, 9, 9, 9, 9, 5, 6, 7, 8]  # the picture stands at 4 to 8
    five, thirty_seven = (
        with_images(stage, (n.to_bytes(32, "big"), 4, 5))
        for n in (2**200 * 32 + 5, 2**200 * 32 + 37)
    )
    found = hits(witness, five, thirty_seven, five, thirty_seven, prompt=prompt)
    assert found == [0, 4, 12, 12], f"text, other picture, same picture: {found}"


def test_an_image_begins_inside_a_block(stage):
    """It enters every block that it overlaps, and no block before it."""
    witness, prompt = Witness(stage), [*range(12), 12]
    one, other = (with_images(stage, (name, 6, 2)) for name in ("one", "other"))
    assert hits(witness, one, other, one, prompt=prompt) == [0, 4, 12]


def test_prompt_embeddings(stage):
    """All tokens are 0; what the model reads are the embeddings."""
    embeds = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    late = embeds.clone()
    late[5, 1] += 1e-6
    one, other = ({"extra_keys": stage.ExtraKeys(prompt_embeds=e)} for e in (embeds, late))
    assert hits(Witness(stage), one, other, {}, one, prompt=[0] * 9) == [0, 4, 0, 8]


@pytest.mark.parametrize("kind", ["salt", "adapter"])
def test_generated_tokens_have_the_keys_of_their_prompt(stage, kind):
    """The first block fills while the answer is written. It is as secret as the prompt."""
    ours = {"salt": "us"} if kind == "salt" else {"extra_keys": stage.ExtraKeys(adapter="us")}
    witness = Witness(stage)
    witness.add("A", PROMPT[:3], **ours)
    witness.step({"A": 3})
    for _ in range(6):
        witness.decode("A")
    said = list(witness.histories["A"].token_ids)
    witness.free("A")
    found = hits(witness, {}, ours, prompt=said)
    assert found == [0, 8], f"without the {kind} and with it: {found}; {witness!r}"


@pytest.mark.parametrize(
    "identity",
    [
        {"salt": 5},
        {"salt": ["us"]},
        {"salt": 1.5},
        {"salt": "\ud800"},
        {"extra_keys": "adapter"},
        {"extra_keys": {}},
        {"extra_keys": {"adapter": "a"}},
    ],
    ids=lambda identity: repr(*identity.values()),
)
@pytest.mark.parametrize("verb", ["add", "need"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching on", "caching off"])
def test_what_is_no_key_is_refused(stage, verb, identity, caching):
    witness = witness_of(stage, enable_prefix_caching=caching)
    witness.live(PROMPT)
    before = witness.snapshot()
    ((name, value),) = identity.items()
    with pytest.raises(ValueError) as failure:
        if verb == "add":
            witness.cache.add("A", PROMPT, **identity)
        else:
            witness.cache.need(PROMPT, 9, **identity)
    assert type(failure.value) is ValueError and name in str(failure.value), repr(failure.value)
    assert repr(value) in str(failure.value), f"the error names the value: {failure.value}"
    witness.assert_unchanged(before, f"a refused {verb}")


@pytest.mark.parametrize(
    "tokens", [[], [1, True, 2, 3], [1, -1, 2, 3], [1, 2.5, 2, 3], [1, True, -1, 2.5], [2**63], "a"]
)
@pytest.mark.parametrize("caching", [True, False], ids=["caching on", "caching off"])
def test_need_of_what_is_no_prompt_is_refused(stage, tokens, caching):
    """As by add."""
    witness = witness_of(stage, enable_prefix_caching=caching)
    before = witness.snapshot()
    for ask in (lambda: witness.cache.need(tokens, 1), lambda: witness.cache.add("A", tokens)):
        with pytest.raises(ValueError):
            ask()
    witness.assert_unchanged(before, "refused requests")


def test_need_looks_up_under_the_same_keys_as_add(stage):
    witness, ours = Witness(stage), {"extra_keys": stage.ExtraKeys(adapter="us")}
    witness.live(PROMPT, **ours)
    assert witness.cache.need(PROMPT, 1, **ours) == (8, 3), "8 tokens in 2 free blocks, 1 new"
    assert witness.cache.need(PROMPT, 9) == (0, 3), "without the adapter nothing is found"
    assert (witness.add("A", PROMPT, **ours), witness.add("B", PROMPT)) == (8, 0)


def test_caches_of_one_seed_agree(stage):
    digests = []
    for seed in ("ours", "ours", "theirs", None):
        witness = witness_of(stage, seed=seed)
        witness.live(PROMPT)
        digests.append(set(witness.cache.pool.cached_blocks))
    ours, again, *others = digests
    assert ours == again and len(ours) == 2, "two full blocks"
    for other in others:
        assert not ours & other, "another seed: no digest is equal"


def test_a_hasher_of_another_block_size(stage):
    config = Witness(stage).config
    with pytest.raises(ValueError) as failure:
        stage.PagedKVCache(config, stage.BlockPool(config.num_blocks), stage.BlockHasher(8))
    assert "8" in str(failure.value) and "4" in str(failure.value), str(failure.value)
