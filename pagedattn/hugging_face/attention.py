"""The attention function, and the mask that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec

from .cache import NAME

# Arguments of attention functions that change the scores, and are not known here.
UNKNOWN_ARGUMENTS = ("s_aux", "position_bias", "head_mask")


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the name "pagedattn": shapes as in ``PagedCache.attend``.

    Raises ValueError for what pages do not do: no PagedCache, attention that is not causal, a
    four-dimensional mask, dropout, gradients, and scores with terms that are not known here.
    """
    cache, layer = getattr(key, "paged_cache", None), getattr(module, "layer_idx", None)
    if cache is None or not isinstance(layer, int):
        raise ValueError(
            f"attn_implementation {NAME!r} attends through a PagedCache: pass "
            "past_key_values=PagedCache(model.config, num_blocks=…)"
        )
    unknown = [name for name in UNKNOWN_ARGUMENTS if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"layer {layer} passes {unknown}: attention with these is not known here")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"layer {layer} is not causal: pages hold what came before")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"the attention mask is {list(attention_mask.shape)}; pages take [batch, columns]"
        )
    if dropout:
        raise ValueError(f"dropout is {dropout}: pages are for inference, call model.eval()")
    if query.requires_grad:
        raise ValueError("pages keep no gradients: run the model under torch.no_grad()")
    if cache.layer_types[layer : layer + 1] == ["sliding_attention"] and sliding_window is None:
        raise ValueError(f"layer {layer} has a sliding window and does not pass it")
    spec = AttentionSpec(scaling, sliding_window, softcap)
    return cache.attend(layer, query, key, value, attention_mask, spec), None


def padding_mask(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """The mask function of that name: the mask of padding, [batch, columns], as it comes.

    Raises ValueError for a mask that is more than causal and padding.
    """
    if not allow_is_causal_skip:
        raise ValueError("the model asks for a mask that is not plain causal")
    return attention_mask
