"""From scores to the probabilities that a token is drawn with: temperature, min-p, top-k, top-p.

Sources: min-p is MinPLogitsProcessor of vllm/v1/sample/logits_processor/builtin.py (Nguyen et al.,
"Turning Up the Heat: Min-p Sampling", 2024), top-k and top-p are ``apply_top_k_top_p`` of
vllm/v1/sample/ops/topk_topp_sampler.py (top-p: Holtzman et al., "The Curious Case of Neural Text
Degeneration", 2019, section 3.1).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn.model.sampling_params import SamplingParams


def probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The probability of each token, float64 [num_seqs, vocab_size], from its scores.

    In this order: the scores are divided by the temperature; min-p drops tokens, then top-k, then
    top-p, which measures p in what the other two have left. At least the likeliest token stays.

    No parameter may be greedy, and every row needs a finite greatest score. A row's result does
    not depend on the other rows.
    """
    temperature = _column([p.temperature for p in params], scores)
    min_p = _column([p.min_p for p in params], scores)
    # Subtracting first keeps the quotient at or below 0: nothing overflows, however small the
    # temperature. The likeliest token weighs 1, so a weight is already relative to it.
    best = scores.amax(dim=1, keepdim=True)
    weights = ((scores.double() - best) / temperature).exp()  # [num_seqs, vocab_size]
    weights = weights.masked_fill(weights < min_p, 0)
    rows = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        weights[rows] = _top_k_top_p(weights[rows], scores[rows], [params[i] for i in rows])
    # On a CPU a running sum adds a row's numbers one after the other, so that the total of a row is
    # the same to the last bit in a batch of any size; sum() splits a lone row among threads.
    return weights / weights.cumsum(dim=1)[:, -1:]


def _top_k_top_p(weights: Tensor, scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights with 0 for tokens that top-k or top-p drops. One sort serves both.

    Scores are sorted, not weights: at a high temperature different scores may weigh the same.
    Among equal scores the lower token comes first.
    """
    vocab_size = scores.shape[1]
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    weights = weights.gather(1, order)
    last = [min(p.top_k, vocab_size) - 1 if p.top_k > 0 else vocab_size - 1 for p in params]
    kth = scores.gather(1, torch.tensor(last, device=scores.device).unsqueeze(1))
    weights = weights.masked_fill(scores < kth, 0)
    # A token is kept while those before it have not reached p: the one that crosses p stays. A
    # limit of inf is off for certain; 1 would drop a tail that rounding loses in the sum.
    top_p = _column([p.top_p if p.top_p < 1 else math.inf for p in params], scores)
    running = weights.cumsum(dim=1)
    before = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], dim=1)
    weights = weights.masked_fill(before >= top_p * running[:, -1:], 0)
    return torch.zeros_like(weights).scatter_(1, order, weights)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """One number a sequence, float64 [num_seqs, 1]."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
