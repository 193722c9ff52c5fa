"""A batch: what one step of the model works on, as plain tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pagedattn.cache import KVCache

SeqId = Hashable


@dataclass(eq=False)
class Batch:
    """Slots for the next tokens of some sequences, as plain tensors: all that a forward pass needs.

    Sequences stand in the order in which they were asked for, their tokens one after another. With
    T tokens of S sequences: ``token_ids``, ``positions``, ``slot_mapping`` int64 [T];
    ``query_start_loc`` int32 [S + 1], where each sequence's tokens begin; ``seq_lens`` int32 [S],
    the length of each sequence once this batch is computed; ``block_table`` int32 [S, width],
    padded with 0.
    """

    cache: KVCache
    num_new_tokens: dict[SeqId, int]
    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    attended_layers: set[int] = field(default_factory=set)

    @property
    def seq_ids(self) -> list[SeqId]:
        return list(self.num_new_tokens)

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store K and V of the batch's tokens in one layer, then let its queries look at their
        sequences.

        Shapes: ``q`` [num_tokens, num_heads, head_dim]; ``k``, ``v`` [num_tokens, num_kv_heads,
        head_dim]. Returns [num_tokens, num_heads, head_dim]. Raises ValueError for a wrong layer,
        shape, dtype or device, or when the batch is closed.
        """
        self._check_open("attend")
        self._check_inputs(layer, q, k, v)
        out = self.cache._attend(self, layer, q, k, v)
        self.attended_layers.add(layer)
        return out

    def commit(self) -> None:
        """The batch's tokens are computed: lengths advance. Raises ValueError if a layer did not
        attend."""
        self._check_open("commit")
        missing = sorted(set(range(self.cache.config.num_layers)) - self.attended_layers)
        if missing:
            raise ValueError(f"commit before attend: layers {missing} have stored no K and V")
        self.cache._commit(self)
        self.cache.open_batch = None

    def abort(self) -> None:
        """Forget the batch: its slots are given back, lengths stay as they were."""
        self._check_open("abort")
        self.cache._abort(self)
        self.cache.open_batch = None

    def _check_open(self, verb: str) -> None:
        if self.cache.open_batch is not self:
            raise ValueError(f"{verb} on a batch that was committed or aborted before")

    def _check_inputs(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        config, num_tokens = self.cache.config, self.token_ids.shape[0]
        if not isinstance(layer, int) or not 0 <= layer < config.num_layers:
            raise ValueError(f"layer {layer} of a cache with layers 0 .. {config.num_layers - 1}")
        kv_shape = (num_tokens, config.num_kv_heads, config.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != kv_shape:
                raise ValueError(
                    f"{name} is {list(tensor.shape)}; this batch needs {list(kv_shape)}"
                )
        if q.dim() != 3 or (q.shape[0], q.shape[2]) != (num_tokens, config.head_dim):
            expected = f"[{num_tokens}, num_heads, {config.head_dim}]"
            raise ValueError(f"q is {list(q.shape)}; this batch needs {expected}")
        if q.shape[1] == 0 or q.shape[1] % config.num_kv_heads:
            raise ValueError(
                f"{q.shape[1]} query heads are not a multiple of {config.num_kv_heads} KV heads"
            )
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dtype != config.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, the cache holds {config.dtype}")
            if tensor.device != self.token_ids.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, the cache on {self.token_ids.device}"
                )
