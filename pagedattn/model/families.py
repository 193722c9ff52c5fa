"""The families of models that the decoder computes, and what each adds to Llama's layer."""

from typing import Any, NamedTuple

from pagedattn.model.llama import ModelConfig
from pagedattn.model.metadata import Metadata


class Family(NamedTuple):
    """What a family adds: fields of ``ModelConfig``."""

    qkv_bias: bool = False
    qk_norm: bool = False


# Sources: the Qwen2 technical report (Yang et al., 2024), section 2.2, and that of Qwen3 (Yang et
# al., 2025), section 2.
FAMILIES = {"llama": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True)}


def check_family(source: Metadata, key: str) -> str:
    """The architecture that a file names under ``key``, if the decoder computes it.

    Raises ModelFileError, with what is supported, if it does not.
    """
    architecture = source.value(key, str)
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise source.error(f"architecture {architecture!r} is not supported, only {known}")
    return architecture


def make_config(
    source: Metadata,
    architecture: str,
    *,
    num_heads: int,
    d_model: int,
    head_dim: int | None,
    **numbers: Any,
) -> ModelConfig:
    """The ``ModelConfig`` of what a file says; without a head_dim the heads share d_model evenly.

    Raises ModelFileError for numbers that fit no model.
    """
    if head_dim is None:
        if num_heads < 1 or d_model % num_heads:
            raise source.error(f"{num_heads} heads cannot share {d_model} dimensions evenly")
        head_dim = d_model // num_heads
    try:
        return ModelConfig(
            num_heads=num_heads,
            d_model=d_model,
            head_dim=head_dim,
            **numbers,
            **FAMILIES[architecture]._asdict(),
        )
    except ValueError as reason:
        raise source.error(str(reason)) from reason


def family_of(config: ModelConfig) -> str:
    """The family whose models are like this one. Raises ValueError if there is none."""
    adds = Family(config.qkv_bias, config.qk_norm)
    for name, family in FAMILIES.items():
        if family == adds:
            return name
    raise ValueError(f"no family of models is like this one: {adds}")
