"""Small random models of four families of Hugging Face's decoders, their prompts, and our cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.course.witness import DEVICE

transformers = pytest.importorskip("transformers")

from pagedattn.hugging_face import PagedCache  # noqa: E402

BLOCK_SIZE = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,  # scores so far apart that rounding decides nothing
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, a window in two layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, a window": ("MistralConfig", {"sliding_window": 5}),
}


def _make_model(family: str, **changes: Any) -> Any:
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **more, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(DEVICE).eval().requires_grad_(False)


def _paged(model: Any, num_blocks: int = 60, **options: Any) -> PagedCache:
    """The model attends through pages from now on; a cache for it, poison on."""
    model.set_attn_implementation("pagedattn")
    made = PagedCache(model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, **options)
    made.pages_config = replace(made.pages_config, poison=True)
    return made


def _prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random tokens, padded on the left: ids and mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, 64, (len(lengths), max(lengths)), generator=generator)
    real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return (ids * real).to(DEVICE), real.long().to(DEVICE)


def _generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Greedy tokens, the prompt among them."""
    options = {"max_new_tokens": 10, "do_sample": False} | options
    found: Tensor = model.generate(ids, attention_mask=mask, **options)
    return found


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def make_model() -> Any:
    """``make_model(family, **changes)``: with attention of its own, "eager"."""
    return _make_model


@pytest.fixture
def model() -> Any:
    """A small Llama."""
    return _make_model("llama")


@pytest.fixture(scope="session")
def paged() -> Any:
    """``paged(model, num_blocks=60, **options)``: a cache; the model attends through it."""
    return _paged


@pytest.fixture(scope="session")
def prompts() -> Any:
    """``prompts(*lengths)``: ids and mask."""
    return _prompts


@pytest.fixture(scope="session")
def generate() -> Any:
    """``generate(model, ids, mask, **options)``: ten greedy tokens after the prompts."""
    return _generate
