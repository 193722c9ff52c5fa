"""What a sequence's own tokens do to its scores, before anything is chosen.

Sources: the minimum length is MinTokensLogitsProcessor of
vllm/v1/sample/logits_processor/builtin.py, the penalties are ``apply_penalties`` of
vllm/model_executor/layers/utils.py; the repetition penalty is that of Keskar et al., "CTRL", 2019,
section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pagedattn.model.sampling import SamplingState


def adjust_scores(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Scores [num_seqs, vocab_size] after minimum lengths and penalties, in this order: end tokens
    of an answer that is still too short get -inf; then repetition, frequency, presence.

    ``scores`` itself is left as it is.
    """
    short = [i for i, s in enumerate(states) if len(s.output_token_ids) < s.params.min_tokens]
    penalised = [i for i, s in enumerate(states) if _has_penalty(s)]
    if short or penalised:
        scores = scores.clone()
    if short:
        ends = _counts([states[i].params.stop_token_ids for i in short], scores)
        scores[short] = scores[short].masked_fill(ends > 0, -math.inf)
    if penalised:
        scores[penalised] = _penalise(scores[penalised], [states[i] for i in penalised])
    return scores


def _has_penalty(state: SamplingState) -> bool:
    params = state.params
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
        1.0,
        0.0,
        0.0,
    )


def _penalise(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    params = [state.params for state in states]
    repetition, frequency, presence = (
        scores.new_tensor([getattr(p, name) for p in params]).unsqueeze(1)  # [num_seqs, 1]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    prompt = _counts([state.prompt_token_ids for state in states], scores)
    output = _counts([state.output_token_ids for state in states], scores)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(prompt + output > 0, repeated, scores)
    return scores - frequency * output - presence * (output > 0)


def _counts(token_ids: Sequence[Iterable[int]], scores: Tensor) -> Tensor:
    """How often each token of the vocabulary stands in each list, as numbers of the shape
    [lists, vocab_size]. Tokens of padding columns, which have no score, are left out."""
    lists = [list(tokens) for tokens in token_ids]
    flat = torch.tensor(list(chain(*lists)), dtype=torch.int64, device=scores.device)
    lengths = torch.tensor([len(tokens) for tokens in lists], device=scores.device)
    rows = torch.arange(len(lists), device=scores.device).repeat_interleave(lengths)
    counts = scores.new_zeros(len(lists), scores.shape[1])
    inside = flat < scores.shape[1]
    one = scores.new_ones(())
    return counts.index_put_((rows[inside], flat[inside]), one, accumulate=True)
