"""Keys that no digest can be made of are refused where they come in, and not when they are used."""

import pytest
import torch

HALF = "half a character: \ud800"  # a str that has no bytes


def test_text_without_bytes_is_refused(stage):
    """The error names what is wrong, and it is no UnicodeEncodeError from within."""
    hasher = stage.BlockHasher(4)
    for name, make in {
        "adapter": lambda: stage.ExtraKeys(HALF),
        "identifier": lambda: stage.Image(HALF, 0, 4),
        "salt": lambda: hasher.hash_blocks(range(4), salt=HALF),
        "seed": lambda: stage.BlockHasher(4, HALF),
    }.items():
        with pytest.raises(ValueError, match=name) as failure:
            make()
        assert type(failure.value) is ValueError, f"{name}: {failure.value!r}"
    salted = [hasher.hash_blocks(range(4), salt=salt)[0] for salt in ("é", "日本", "\U0001f600")]
    assert len(set(salted)) == 3, "every text that has bytes is a salt"


def test_a_number_that_python_does_not_write_is_no_adapter(stage):
    """It writes 4300 digits at most."""
    with pytest.raises(ValueError, match="adapter"):
        stage.ExtraKeys(10**5000)


@pytest.mark.filterwarnings("ignore:Sparse CSR")  # PyTorch calls them beta
@pytest.mark.parametrize("kind", ["meta", "sparse", "sparse rows"])
def test_prompt_embeds_without_rows_of_bytes_are_refused(stage, kind):
    embeds = torch.randn(8, 3)
    if kind == "meta":
        embeds = embeds.to("meta")
    elif kind == "sparse":
        embeds = embeds.to_sparse()
    else:
        embeds = embeds.to_sparse_csr()
    with pytest.raises(ValueError, match="prompt_embeds"):
        stage.ExtraKeys(prompt_embeds=embeds)


def test_prompt_embeds_that_are_a_view(stage):
    """The numbers count: not whether they are conjugated or negated now or when they are read, nor
    whether a gradient is wanted."""

    def digest(embeds):
        keys = stage.ExtraKeys(prompt_embeds=embeds)
        return stage.BlockHasher(4, "seed").hash_blocks(range(4), extra_keys=keys)

    numbers = torch.randn(4, 3, dtype=torch.complex64)
    wanted = numbers.real.clone().requires_grad_()
    for view, plain in (
        (numbers.conj(), numbers.conj().resolve_conj()),
        (numbers.conj().imag, -numbers.imag),
        (wanted, numbers.real),
        (wanted * 1, numbers.real),
    ):
        assert digest(view) == digest(plain)
    assert digest(numbers.conj()) != digest(numbers)
