"""One beam search, as arithmetic: which beams go on, which hypotheses are kept, when it ends.

No model and no cache: ``BeamSearch.advance`` takes scores and says which beam continues which.

Sources: Sutskever, Vinyals and Le, "Sequence to Sequence Learning with Neural Networks" (2014),
section 3.2; the length penalty and the rules of early stopping are those of ``transformers``
(generation/utils.py, ``_beam_search``), so that results can be compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pagedattn.model.sampling_params import finite_number, token_set
from pagedattn.model.stopping import FinishReason
from pagedattn.sharing import Heir
from pagedattn.whole_number import at_least_1

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What one request asks of its beam search.

    - ``width``: so many beams run at a time, and so many hypotheses are returned.
    - ``max_new_tokens``: the longest hypothesis.
    - ``end_token_ids``: a token of these ends its hypothesis; it is part of it.
    - ``length_penalty``: the score of a hypothesis is the sum of its tokens' log-probabilities,
      divided by their number to this power. 0 compares sums; the greater it is, the more it
      favours long hypotheses.
    - ``early_stopping``: when a search ends that has ``width`` hypotheses. True: at once. "never":
      when no beam can still beat the worst of them (see ``best_possible_score``). False: when the
      best beam, if it ended where it is, would not.

    Raises ValueError, naming the value and its limits.
    """

    width: int
    max_new_tokens: int
    end_token_ids: Iterable[int] = ()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        for name in ("width", "max_new_tokens"):
            object.__setattr__(self, name, at_least_1(getattr(self, name), name))
        object.__setattr__(self, "end_token_ids", token_set(self.end_token_ids, "end_token_ids"))
        mode = self.early_stopping
        if not (mode is True or mode is False or mode == "never"):
            raise ValueError(f'early_stopping must be True, False or "never", got {mode!r}')
        penalty = finite_number(self.length_penalty, "length_penalty")
        object.__setattr__(self, "length_penalty", penalty)
        try:
            float(self.max_new_tokens) ** abs(penalty)
        except OverflowError:
            raise ValueError(
                f"length_penalty must be a finite number, and {self.max_new_tokens} to its power "
                f"too, got {penalty}"
            ) from None

    def score(self, total: float, length: int) -> float:
        """The score of ``length`` tokens whose log-probabilities add up to ``total``."""
        return total / length**self.length_penalty

    def best_possible_score(self, total: float, length: int) -> float:
        """What a running beam is taken to be able to reach; the search goes on while this is better
        than the worst hypothesis.

        A sum can only fall. Divided by more tokens it may still become a better score, if the
        penalty is positive: at best, the sum stays what it is up to ``max_new_tokens``. That is the
        bound for "never"; the other modes take the present length. With a penalty of 0 or below,
        length does not help, and the present score is the bound for all.
        """
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens
        return self.score(total, length)


@dataclass(frozen=True)
class Hypothesis:
    """A result: its tokens without the prompt, its score, and why it ended.

    ``finish_reason`` is "stop" when its last token is an end token, else "length".
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Beam:
    """A running sequence: its name in the cache, its tokens without the prompt, the sum of their
    log-probabilities."""

    seq_id: str
    token_ids: tuple[int, ...] = ()
    total: float = 0.0


class BeamSearch:
    """The search of one request, between two steps.

    ``beams`` are the running ones, the best first; at the beginning the prompt alone, named
    ``name``. ``hypotheses`` are the best that have ended, at most ``width``, the best first. Beams
    are named in the order in which they are chosen: "A.1", "A.2", …; no name comes twice.
    """

    def __init__(self, name: str, params: BeamSearchParams) -> None:
        self.name = name
        self.params = params
        self.beams = [Beam(name)]
        self.hypotheses: list[Hypothesis] = []
        self._num_named = 0

    @property
    def is_done(self) -> bool:
        """Whether the search has ended: no beam runs any more."""
        return not self.beams

    def advance(self, logits: Tensor) -> list[Heir]:
        """One step, from the scores of the next token after each beam: [len(beams), vocab_size].

        The continuations of all beams compete with their sums. One that ends is a hypothesis if it
        is among the ``width`` best of them; of the others, the best ``width`` run on. Returns these
        as heirs of the beams before; none when the search is done.

        Raises ValueError for scores that are not finite, where they matter.
        """
        width = self.params.width
        chosen: list[Beam] = []
        heirs: list[Heir] = []
        for rank, (parent, token_id, total) in enumerate(self._candidates(logits)):
            token_ids = (*parent.token_ids, token_id)
            reason = self._finish_reason(token_ids)
            if reason is None and len(chosen) < width:
                self._num_named += 1
                beam = Beam(f"{self.name}.{self._num_named}", token_ids, total)
                chosen.append(beam)
                heirs.append(Heir(parent.seq_id, beam.seq_id, token_id))
            elif reason is not None and rank < width:
                score = self.params.score(total, len(token_ids))
                self.hypotheses.append(Hypothesis(token_ids, score, reason))
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[width:]
        self.beams = chosen
        if self._should_stop():
            self.beams, heirs = [], []
        return heirs

    def _candidates(self, logits: Tensor) -> list[tuple[Beam, int, float]]:
        """The best continuations of all beams: the beam, the token, the new sum; the best first.

        Each beam has one continuation for each end token, so of (1 + end tokens) * width at least
        ``width`` do not end.
        """
        vocab_size = logits.shape[1]
        totals = torch.tensor([beam.total for beam in self.beams], dtype=torch.float64)
        sums = totals.to(logits.device)[:, None] + logits.double().log_softmax(dim=1)
        count = (1 + len(frozenset(self.params.end_token_ids))) * self.params.width
        best, indices = sums.flatten().topk(min(count, sums.numel()))
        if not best.isfinite().all():
            raise ValueError(f"the scores of the tokens after {self.name}'s beams are not finite")
        return [
            (self.beams[index // vocab_size], index % vocab_size, total)
            for total, index in zip(best.tolist(), indices.tolist(), strict=True)
        ]

    def _finish_reason(self, token_ids: tuple[int, ...]) -> FinishReason | None:
        if token_ids[-1] in self.params.end_token_ids:
            return "stop"
        return "length" if len(token_ids) == self.params.max_new_tokens else None

    def _should_stop(self) -> bool:
        if not self.beams:
            return True
        if len(self.hypotheses) < self.params.width:
            return False
        if self.params.early_stopping is True:
            return True
        leader = self.beams[0]
        best_possible = self.params.best_possible_score(leader.total, len(leader.token_ids))
        return best_possible <= self.hypotheses[-1].score
