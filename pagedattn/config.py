"""How large a KV cache is and what it holds; the same for every stage."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedattn.attention import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Config:
    """The size and kind of a KV cache; the same for every stage.

    ``num_blocks`` counts block 0, which holds no sequence, so ``num_slots`` is (num_blocks - 1) *
    block_size. ``max_seq_len`` is the most tokens of one sequence, ``max_num_seqs`` the most
    sequences at a time. ``layer_specs`` has one entry a layer; left empty, every layer is plain
    causal attention. With ``poison`` on, K and V that are dead are overwritten with NaN, so that
    reading them shows.

    Raises ValueError for a size below its least value, a dtype that is not one of ``DTYPES``, a
    device that torch does not know, or ``layer_specs`` that are not one AttentionSpec a layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    max_seq_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    dtype: torch.dtype = torch.float32
    device: str | torch.device = field(default_factory=torch.get_default_device)
    poison: bool = False
    layer_specs: tuple[AttentionSpec, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "max_seq_len",
            "max_num_seqs",
        )
        for name, least in {**dict.fromkeys(sizes, 1), "num_blocks": 2}.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number, at least {least}"
                )
        if self.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"dtype is {self.dtype}; K and V are kept in one of {names}")
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device is {self.device!r}: {error}") from error
        if not self.layer_specs:
            object.__setattr__(self, "layer_specs", (AttentionSpec(),) * self.num_layers)
        if len(self.layer_specs) != self.num_layers:
            raise ValueError(f"{len(self.layer_specs)} layer_specs for {self.num_layers} layers")
        if not all(isinstance(spec, AttentionSpec) for spec in self.layer_specs):
            raise ValueError(f"layer_specs are {self.layer_specs}; each must be an AttentionSpec")

    @property
    def num_slots(self) -> int:
        """Slots that sequences can use. One slot holds K and V of one token, for all layers."""
        return (self.num_blocks - 1) * self.block_size
