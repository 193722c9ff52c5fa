"""A decoder with the weights of a checkpoint, checked before any of them is used.

Weights have one set of names here, those of the decoder with q, k, v and gate, up apart:
``layers.3.self_attn.q_proj.weight``. A checkpoint knows under which name, and in which order of
rows, its file keeps each.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from pagedattn.model.llama import Llama, ModelConfig
from pagedattn.model.metadata import ModelFileError

# The decoder multiplies by these matrices at once, files keep their parts one by one.
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Checkpoint(Protocol):
    """A model as somebody saved it: its numbers, and its weights under the file's own names."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every weight that is there, rows first, by the file's names."""

    def stored_name(self, name: str) -> str:
        """The file's name of the weight ``name``."""

    def tensor(self, name: str) -> Tensor:
        """The weight ``name``, float32, its rows in the decoder's order."""

    def error(self, message: str, stored_name: str | None = None) -> ModelFileError:
        """The error that names the file; the one that ``stored_name`` lies in, if there are
        several."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of such a model, with its shape, rows first."""
    d_model, d_ff, head_dim = config.d_model, config.d_ff, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, d_model),
        "norm.weight": (d_model,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d_model)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d_model,),
        "self_attn.q_proj.weight": (q_rows, d_model),
        "self_attn.k_proj.weight": (kv_rows, d_model),
        "self_attn.v_proj.weight": (kv_rows, d_model),
        "self_attn.o_proj.weight": (d_model, q_rows),
        "post_attention_layernorm.weight": (d_model,),
        "mlp.gate_proj.weight": (d_ff, d_model),
        "mlp.up_proj.weight": (d_ff, d_model),
        "mlp.down_proj.weight": (d_model, d_ff),
    }
    if config.qkv_bias:
        of_layer["self_attn.q_proj.bias"] = (q_rows,)
        of_layer["self_attn.k_proj.bias"] = of_layer["self_attn.v_proj.bias"] = (kv_rows,)
    if config.qk_norm:
        of_layer["self_attn.q_norm.weight"] = of_layer["self_attn.k_norm.weight"] = (head_dim,)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise ModelFileError unless the checkpoint holds exactly the weights of its model."""
    found, config = checkpoint.shapes, checkpoint.config
    if config.num_layers > len(found):
        raise checkpoint.error(
            f"{config.num_layers} layers, but there are only {len(found)} tensors"
        )
    expected = {checkpoint.stored_name(n): shape for n, shape in expected_shapes(config).items()}
    for name, shape in expected.items():
        if name not in found:
            raise checkpoint.error(f"tensor {name} is missing")
        if found[name] != shape:
            raise checkpoint.error(
                f"tensor {name} has shape {list(found[name])}, expected {list(shape)}", name
            )
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise checkpoint.error(
            f"unexpected tensor {unexpected[0]} ({len(unexpected)} in all)", unexpected[0]
        )


def read_model(checkpoint: Checkpoint) -> Llama:
    """The decoder with the checkpoint's weights, float32, on torch's default device.

    ``check_tensors`` has been called. Raises ModelFileError for a weight that cannot be read.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    # To join copies, one part as well as three: nothing of the model stays in the file.
    weights = {
        name: torch.cat([checkpoint.tensor(part) for part in _parts(name)])
        for name in model.state_dict()
    }
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).to(torch.get_default_device())


def _parts(name: str) -> list[str]:
    """The weights that a parameter of the decoder is joined of."""
    for packed, parts in PACKED.items():
        if f".{packed}." in name:
            return [name.replace(packed, part) for part in parts]
    return [name]
