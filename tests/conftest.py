"""What the tests of the whole share: the real model, loaded once, a random one with its tokenizer,
caches that fit a model, and the command line."""

from typing import Any

import pytest
import torch

from pagedattn import paged
from pagedattn.cli import main
from pagedattn.demo import commands
from pagedattn.model import (
    Llama,
    ModelConfig,
    Tokenizer,
    cache_config,
    default_model_path,
    load_model,
)
from pagedattn.model.gguf_file import GGUFFile
from pagedattn.model.gguf_tokenizer import read_tokenizer


@pytest.fixture(scope="session")
def real_model() -> tuple[Llama, Tokenizer]:
    """SmolLM2-135M-Instruct with its tokenizer."""
    return load_model()


def _paged_cache_for(model: Llama, num_blocks: int = 64, **options: Any) -> paged.PagedKVCache:
    return paged.build_cache(
        cache_config(model.config, num_blocks=num_blocks, **{"poison": True} | options)
    )


@pytest.fixture
def paged_cache_for() -> Any:
    """``paged_cache_for(model, num_blocks=64, **options)``: a paged cache, poison on."""
    return _paged_cache_for


@pytest.fixture(scope="session")
def tiny_model() -> tuple[Llama, Tokenizer]:
    """Random weights with SmolLM2's tokenizer: it answers nonsense in no time."""
    tokenizer = read_tokenizer(GGUFFile(default_model_path()))
    model = Llama(ModelConfig(2, 2, 1, 8, 16, 16, len(tokenizer), 512))
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, tokenizer


@pytest.fixture
def generate(
    tiny_model: tuple[Llama, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """``generate(*options)`` -> exit status, standard output, standard error."""
    monkeypatch.setattr(commands, "load_model", lambda path: tiny_model)

    def run(*options: str) -> tuple[int, str, str]:
        try:
            status = main(["generate", *options])
        except SystemExit as wrong:  # argparse
            status = int(str(wrong.code))
        return status, *capsys.readouterr()

    return run
