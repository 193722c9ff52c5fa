"""The cache class: rows of a batch are sequences in pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

from pagedattn import prefix
from pagedattn.attention import AttentionSpec
from pagedattn.cache import SeqId
from pagedattn.config import Config

NAME = "pagedattn"
LAYER_TYPES = {"full_attention", "sliding_attention"}


class PagedCache(Cache):
    """K and V of a batch in ``num_blocks`` blocks of ``block_size`` tokens; block 0 is never used.

    ``config`` is the model's own, ``model.config``. Memory is taken at the first use, with the
    device and the type of the model's K. ``pages`` is then chapter 04's or 05's cache, and tells
    what lies where: ``pages.usage()``, say. While beams move on, two sequences stand there for each
    of them: ``max_num_seqs`` counts both.

    Raises ValueError for sizes out of range and for layers that are not causal attention, with or
    without a window. Later OutOfBlocks when the pool is full: then ``reset`` the cache.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
    ) -> None:
        super().__init__(layers=[])
        config = config.get_text_config(decoder=True)
        self.model_config = config
        self.layer_types = getattr(config, "layer_types", None) or []
        strange = sorted(set(self.layer_types) - LAYER_TYPES)
        if strange or getattr(config, "attention_chunk_size", None):
            raise ValueError(f"layers of {strange or 'chunked attention'}: no pages for these")
        heads = config.num_attention_heads
        self.pages_config = Config(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_blocks=num_blocks,
            max_seq_len=min(config.max_position_embeddings, num_blocks * block_size),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
        )
        self.pages: prefix.PagedKVCache | None = None
        self.seq_ids: list[SeqId] = []  # of each row; a row that is all padding has no sequence yet
        self.num_columns = 0  # tokens of a row, its padding among them
        self.stored: Tensor | None = None  # which tokens of the step are no padding; None: all
        self.new_seq_ids = count()
        # The cache is told K and V, and not of which tokens. Each gets a number that no vocabulary
        # has, so that nobody finds its block by mistake.
        self.unknown_tokens = count(2**62)

    # What may be done beside `generate`.

    def add(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> int:
        """Begin with these prompts, [batch, length], on what the pool knows of them (chapter 04).

        Without this call everything is computed. After it ``generate`` computes what is left.
        Returns how many columns that spares. It is one number for the batch, so each row must have
        found whole blocks up to the same column: a single prompt, or prompts of one length. Raises
        ValueError when the cache is in use: ``reset`` it first.
        """
        if self.seq_ids:
            raise ValueError(f"the cache holds {len(self.seq_ids)} rows: reset() it first")
        dtype = self.model_config.dtype
        if not isinstance(dtype, torch.dtype):
            dtype = torch.get_default_dtype()
        pages = self._pages(input_ids.device, dtype)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[real].tolist() for row, real in zip(input_ids, mask.bool(), strict=True)]
        length = input_ids.shape[1]
        starts = [length - len(prompt) for prompt in prompts]  # where a row's padding ends
        column = min(s + pages.need(p, 1)[0] for s, p in zip(starts, prompts, strict=True))
        hits = [column - start for start in starts]
        if any(hit < 0 or hit % pages.config.block_size for hit in hits):
            column, hits = 0, [0] * len(hits)
        self.seq_ids = self._new_rows(len(prompts))
        for seq_id, prompt, hit in zip(self.seq_ids, prompts, hits, strict=True):
            pages.add(seq_id, prompt[: hit + 1])  # so it finds this much, and no more
            pages.append(seq_id, prompt[hit + 1 :])
        self.num_columns = column
        return column

    def reset(self) -> None:
        """End all sequences. Their blocks are free; what prompts left in them can be found."""
        if self.pages is not None:
            if self.pages.open_batch is not None:
                self.pages.open_batch.abort()
            for seq_id in self.pages.seq_ids:
                self.pages.free(seq_id)
        self.seq_ids, self.num_columns = [], 0

    # What `transformers` asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New K and V, noted as ours; the attention function stores them."""
        found = self.model_config._attn_implementation
        if found != NAME:
            raise ValueError(
                f"attn_implementation is {found!r}, which cannot read pages: load the model with "
                f"{NAME!r}, and give the cache its own configuration, model.config"
            )
        key_states.paged_cache = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no limit but the pool

    @property
    def is_linear(self) -> list[bool]:
        return [False] * self.pages_config.num_layers

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("pages keep every token: a PagedCache cannot be cropped")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues the former row ``beam_idx[i]``: a step of beam search, by ``fork``."""
        self._continue(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._continue(torch.arange(len(self.seq_ids))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._continue(row for row in range(len(self.seq_ids)) for _ in range(repeats))

    # A step.

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """Store K and V of new tokens, and attend to what their rows hold.

        Shapes: ``q`` [batch, num_heads, length, head_dim]; ``k``, ``v`` [batch, num_kv_heads,
        length, head_dim]; ``mask`` bool [batch, columns so far + length], False for padding.
        Returns [batch, length, num_heads, head_dim]; 0 for padding. Layer 0 begins a step, the
        last one ends it. Raises ValueError for a batch or a mask that does not fit to what is
        stored, OutOfBlocks when the pool is full.
        """
        pages = self._pages(k.device, k.dtype)
        if layer == 0:
            self._reserve(pages, k, mask)
        if pages.open_batch is None:
            raise ValueError(f"layer {layer} attends, and layer 0 has not begun a step")
        specs = pages.config.layer_specs
        if specs[layer] != spec:  # the first time
            specs = (*specs[:layer], spec, *specs[layer + 1 :])
            pages.config = replace(pages.config, layer_specs=specs)
        batch, (batch_size, num_heads, length, head_dim) = pages.open_batch, q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [tokens, heads, head_dim]
        if self.stored is None:
            out = batch.attend(layer, q, k, v)
        else:
            new = batch.attend(layer, q[self.stored], k[self.stored], v[self.stored])
            out = torch.zeros_like(q).index_copy(0, self.stored, new)
        if layer == pages.config.num_layers - 1:
            batch.commit()
            self.num_columns += length
        return out.view(batch_size, length, num_heads, head_dim)

    def _reserve(self, pages: prefix.PagedKVCache, k: Tensor, mask: Tensor | None) -> None:
        """Slots for the new tokens of every row that are no padding."""
        batch_size, _, length, _ = k.shape
        if pages.open_batch is not None:  # of a step that failed
            pages.open_batch.abort()
        if self.seq_ids and len(self.seq_ids) != batch_size:
            raise ValueError(
                f"a batch of {batch_size} rows, and the cache holds {len(self.seq_ids)}: "
                "reset() it first, or batch_repeat_interleave() its rows"
            )
        seq_ids = self.seq_ids or self._new_rows(batch_size)
        old, new = self._num_tokens(batch_size, length, mask)
        for row, (seq_id, shown) in enumerate(zip(seq_ids, old, strict=True)):
            stored = pages.num_computed_tokens(seq_id) if seq_id in pages.sequences else 0
            if shown != stored:
                raise ValueError(
                    f"row {row}: the attention mask shows {shown} of the earlier tokens, and the "
                    f"cache has stored {stored}; pass the mask of the whole sequence"
                )
        self.seq_ids = seq_ids
        counts = {s: n for s, n in zip(seq_ids, new, strict=True) if n}
        for seq_id, n in counts.items():
            if seq_id in pages.sequences:
                n -= pages.num_tokens(seq_id) - pages.num_computed_tokens(seq_id)
                pages.append(seq_id, islice(self.unknown_tokens, max(n, 0)))
            else:
                pages.add(seq_id, islice(self.unknown_tokens, n))
        pages.reserve(counts)
        self.stored = None
        if mask is not None and sum(new) < batch_size * length:
            self.stored = mask[:, -length:].flatten().nonzero()[:, 0]

    def _new_rows(self, batch_size: int) -> list[SeqId]:
        most = self.pages_config.max_num_seqs
        if batch_size > most:
            raise ValueError(f"a batch of {batch_size} rows; max_num_seqs is {most}")
        return [next(self.new_seq_ids) for _ in range(batch_size)]

    def _num_tokens(
        self, batch_size: int, length: int, mask: Tensor | None
    ) -> tuple[list[int], list[int]]:
        """Tokens of each row that are no padding: earlier ones, new ones."""
        if mask is None:
            return [self.num_columns] * batch_size, [length] * batch_size
        shape = (batch_size, self.num_columns + length)
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"the attention mask is {list(mask.shape)}; it must be {list(shape)}: all columns "
                "so far and the new ones"
            )
        old, new = mask.bool().split([self.num_columns, length], dim=1)
        first, second = torch.stack([old.sum(1), new.sum(1)]).tolist()
        return first, second

    def _continue(self, rows: Iterable[int]) -> None:
        """Row i continues the former row ``rows[i]``."""
        pages, parents, rows = self.pages, self.seq_ids, list(rows)
        if pages is None:
            return
        if len(parents) + len(rows) > self.pages_config.max_num_seqs:
            raise ValueError(
                f"{len(rows)} rows continue {len(parents)}: for a moment both are there, and "
                f"max_num_seqs is {self.pages_config.max_num_seqs}"
            )
        self.seq_ids = self._new_rows(len(rows))
        for row, child in zip(rows, self.seq_ids, strict=True):
            if parents[row] in pages.sequences:
                pages.fork(parents[row], child)
        for seq_id in parents:
            if seq_id in pages.sequences:
                pages.free(seq_id)

    def _pages(self, device: torch.device, dtype: torch.dtype) -> prefix.PagedKVCache:
        if self.pages is None:
            config = replace(self.pages_config, device=device, dtype=dtype)
            with torch.inference_mode(False):  # or later steps outside of it could not write
                self.pages = build_pages(config)
        return self.pages


def build_pages(config: Config) -> prefix.PagedKVCache:
    """Chapter 05's cache where its kernels run, else chapter 04's."""
    if torch.device(config.device).type == "cuda" and find_spec("triton"):
        from pagedattn import kernels

        return kernels.build_cache(config)
    return prefix.build_cache(config)
