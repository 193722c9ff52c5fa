"""From the scores of the next tokens to tokens, for a whole batch at once.

The steps and their order are those of vllm/v1/sample/sampler.py: log-probabilities of the scores
as the model gave them; minimum lengths and penalties (penalties.py); the greedy choice, or
temperature and truncation (truncation.py) and a draw.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from pagedattn.model.penalties import adjust_scores
from pagedattn.model.sampling_params import SamplingParams, token_set
from pagedattn.model.truncation import probabilities
from pagedattn.whole_number import whole_number


class SamplingState:
    """What the sampler knows of one sequence: its parameters, its tokens, its random numbers.

    It belongs to the request and not to the cache. A request that is preempted and computed again
    keeps it, so its penalties still tell prompt from answer and its next draw is the next one.
    ``output_token_ids`` is the answer so far; ``sample`` appends to it, and nobody else.

    Raises ValueError for a token of the prompt that is not whole, negative or too large.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Iterable[int]) -> None:
        self.params = params
        self.prompt_token_ids = token_set(prompt_token_ids, "the prompt")
        self.output_token_ids: list[int] = []
        # Python's generator gives the same numbers for a seed on every platform and device.
        self._random = Random(params.seed)

    def draw(self) -> float:
        """The sequence's next random number, from 0 up to but not including 1."""
        return self._random.random()


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model's own scores, before penalties and temperature.

    ``rank`` is 1 for the likeliest token: one more than there are likelier ones.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Sampled:
    """A chosen token. With ``logprobs`` k: its log-probability, and those of the k likeliest."""

    token_id: int
    logprob: Logprob | None = None
    top_logprobs: tuple[Logprob, ...] = ()


def sample(
    logits: Tensor, states: Sequence[SamplingState], *, vocab_size: int | None = None
) -> list[Sampled]:
    """The next token of each sequence from its scores, logits [num_seqs, columns].

    ``vocab_size``: columns from here on are padding; they may hold anything and are never chosen.
    Each chosen token is appended to its state's ``output_token_ids``. A sequence that is not greedy
    draws one number from its own generator, so neither its neighbours nor its place in the batch
    change its tokens.

    Raises ValueError, before any state changes, for logits of another shape, for a ``vocab_size``
    that is not whole or not among their columns, and naming the row when its greatest score is not
    a finite number: something that was never computed has reached the model's output, or no token
    is left to choose.
    """
    scores = _real_columns(logits, len(states), vocab_size)
    _check_finite(scores)
    adjusted = adjust_scores(scores, states)
    if adjusted is not scores:
        _check_finite(adjusted)
    token_ids = adjusted.argmax(dim=1)  # [num_seqs]
    random = [i for i, state in enumerate(states) if not state.params.is_greedy]
    if random:
        probs = probabilities(adjusted[random], [states[i].params for i in random])
        numbers = torch.tensor([states[i].draw() for i in random], dtype=torch.float64)
        token_ids[random] = _invert(probs, numbers.to(probs.device))
    sampled = _with_logprobs(token_ids.tolist(), scores, states)
    for state, chosen in zip(states, sampled, strict=True):
        state.output_token_ids.append(chosen.token_id)
    return sampled


def _real_columns(logits: Tensor, num_seqs: int, vocab_size: int | None) -> Tensor:
    if logits.dim() != 2 or len(logits) != num_seqs or not logits.shape[1]:
        raise ValueError(f"logits must be [{num_seqs}, vocab_size], got {list(logits.shape)}")
    if vocab_size is None:
        vocab_size = logits.shape[1]
    vocab_size = whole_number(vocab_size, "vocab_size")
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size must be between 1 and the {logits.shape[1]} columns, got {vocab_size}"
        )
    return logits[:, :vocab_size].float()


def _check_finite(scores: Tensor) -> None:
    best = scores.amax(dim=1)  # NaN if there is any in the row
    wrong = (~torch.isfinite(best)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"cannot choose a token for row {wrong[0]}: "
            f"the greatest of its scores is {best[wrong[0]].item()}"
        )


def _invert(probs: Tensor, numbers: Tensor) -> Tensor:
    """The token in whose stretch of [0, 1) each number falls, [num_seqs].

    ``probs`` [num_seqs, vocab_size] are the lengths of the stretches, ``numbers`` [num_seqs].
    """
    # Tokens without probability have no stretch, whatever rounding does to the running sum.
    ends = probs.cumsum(dim=1).masked_fill(probs == 0, 0)
    targets = numbers.unsqueeze(1) * ends.amax(dim=1, keepdim=True)
    return (ends > targets).int().argmax(dim=1)


def _with_logprobs(
    token_ids: Sequence[int], scores: Tensor, states: Sequence[SamplingState]
) -> list[Sampled]:
    """The chosen tokens with the log-probabilities that their sequences ask for."""
    sampled = [Sampled(token_id) for token_id in token_ids]
    counts = {i: s.params.logprobs for i, s in enumerate(states) if s.params.logprobs is not None}
    if not counts:
        return sampled
    logprobs = scores[list(counts)].double().log_softmax(dim=1)
    chosen = torch.tensor([token_ids[i] for i in counts], device=scores.device).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = 1 + (logprobs > own).sum(dim=1)
    width = max(counts.values())
    top, top_ids = logprobs.sort(dim=1, descending=True, stable=True)
    rows = zip(
        own.flatten().tolist(),
        ranks.tolist(),
        top[:, :width].tolist(),
        top_ids[:, :width].tolist(),
        strict=True,
    )
    for (i, count), (logprob, rank, values, ids) in zip(counts.items(), rows, strict=True):
        likeliest = tuple(
            Logprob(token_id, value, values.index(value) + 1)
            for token_id, value in zip(ids[:count], values, strict=False)
        )
        sampled[i] = Sampled(token_ids[i], Logprob(token_ids[i], logprob, rank), likeliest)
    return sampled
