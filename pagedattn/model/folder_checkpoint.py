"""A model in a folder of Hugging Face's form: its numbers, and the names of its weights.

Sources: the keys of config.json and their meaning, transformers' models/llama, models/qwen2 and
models/qwen3 (configuration_*.py), modeling_rope_utils.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pagedattn.model.families import check_family, make_config
from pagedattn.model.folder_tokenizer import read_tokenizer
from pagedattn.model.json_file import JsonFile
from pagedattn.model.llama import ModelConfig
from pagedattn.model.metadata import ModelFileError
from pagedattn.model.rope_scaling import llama3_rope_factors
from pagedattn.model.safetensors_folder import SafetensorsFolder
from pagedattn.model.tokenizer import Tokenizer

HEAD = "lm_head.weight"
# Some folders keep what config.json says anyhow: the rotary frequencies.
HARMLESS = ".rotary_emb.inv_freq"


class FolderCheckpoint:
    """A folder with config.json, safetensors files and tokenizer.json as a ``Checkpoint``.

    Raises ModelFileError, naming file and key or tensor, for an architecture that is not
    supported, a missing or impossible number, what the decoder does not compute (a sliding window,
    rotary scaling other than "llama3", quantised weights), and as ``SafetensorsFolder`` does.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = JsonFile(self.path / "config.json")
        architecture = check_family(file, "model_type")
        _refuse_unknown_arithmetic(file)
        self._weights = SafetensorsFolder(path)
        self.config = _read_config(file, architecture, has_head=HEAD in self._weights.shapes)
        self.shapes = {
            name: shape
            for name, shape in self._weights.shapes.items()
            if not name.endswith(HARMLESS)
        }

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises ModelFileError when it is missing or not supported."""
        return read_tokenizer(self.path, self.config.vocab_size)

    def stored_name(self, name: str) -> str:
        return name if name == HEAD else f"model.{name}"

    def tensor(self, name: str) -> Tensor:
        return self._weights.tensor(self.stored_name(name))

    def error(self, message: str, stored_name: str | None = None) -> ModelFileError:
        return self._weights.error(message, stored_name)


def _read_config(file: JsonFile, architecture: str, *, has_head: bool) -> ModelConfig:
    """The model's numbers. A head among the weights is used, whether or not the file ties it."""
    num_heads = file.value("num_attention_heads", int)
    # transformers' value for a Qwen3 without one is a number of its own, not that of the others.
    explicit = file.has("head_dim") or architecture == "qwen3"
    head_dim = file.value("head_dim", int) if explicit else None
    config = make_config(
        file,
        architecture,
        num_layers=file.value("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=file.value("num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        d_model=file.value("hidden_size", int),
        d_ff=file.value("intermediate_size", int),
        vocab_size=file.value("vocab_size", int),
        max_seq_len=file.value("max_position_embeddings", int),
        rope_theta=file.value(_rope_key(file, "rope_theta"), float, 10000.0),
        rms_norm_eps=file.value("rms_norm_eps", float),
        tie_word_embeddings=file.value("tie_word_embeddings", bool, False) and not has_head,
    )
    return _with_rope_scaling(file, config)


def _with_rope_scaling(file: JsonFile, config: ModelConfig) -> ModelConfig:
    kind_key = _rope_key(file, "rope_type")
    kind = file.value(kind_key, str, "default")
    if kind == "default":
        return config
    if kind != "llama3":
        raise file.error(f"rotary scaling {kind_key} = {kind!r} is not supported, only 'llama3'")
    numbers = {
        name: file.value(_rope_key(file, name), float)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    }
    original = file.value(_rope_key(file, "original_max_position_embeddings"), int)
    try:
        factors = llama3_rope_factors(
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            original_max_seq_len=original,
            **numbers,
        )
        return replace(config, rope_factors=factors)
    except ValueError as reason:
        raise file.error(f"rotary scaling: {reason}") from reason


def _rope_object(file: JsonFile) -> str:
    """The key of the object with the rotary settings: rope_parameters or, in older files,
    rope_scaling. Where both hold something the older one counts alone, as it does in transformers.
    """
    file.value("rope_parameters", dict, {})  # no other type, even where it does not count
    return "rope_scaling" if file.value("rope_scaling", dict, {}) else "rope_parameters"


def _rope_key(file: JsonFile, name: str) -> str:
    """Where the file says ``name``: in the object or, where that is silent, as older files may."""
    place = _rope_object(file)
    older = {"rope_theta": "rope_theta", "rope_type": f"{place}.type"}
    key = f"{place}.{name}"
    return key if file.has(key) else older.get(name, key)


def _refuse_unknown_arithmetic(file: JsonFile) -> None:
    """Raise for settings that would change results and that this decoder does not follow."""
    if file.has("quantization_config"):
        raise file.error("quantization_config: quantised weights are not supported in a folder")
    file.require("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        file.require(key, False)
    file.require("is_causal", True)
    place = _rope_object(file)
    settings: dict[str, Any] = file.value(place, dict, {})
    for name, setting in settings.items():
        if isinstance(setting, dict):
            raise file.error(f"{place}.{name}: settings for some layers only are not supported")
    for key in ("partial_rotary_factor", _rope_key(file, "partial_rotary_factor")):
        file.require(key, 1.0)
    for kind in file.values("layer_types", str, []):
        if kind != "full_attention":
            raise file.error(f"layer_types holds {kind!r}, only 'full_attention' is supported")
