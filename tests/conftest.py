"""What the tests of the whole share: the real model, loaded once, and caches that fit a model."""

from typing import Any

import pytest

from pagedattn import paged
from pagedattn.model import Llama, Tokenizer, cache_config, load_model


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
