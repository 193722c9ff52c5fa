"""From the scores of the next token to a token."""

import math

import torch
from torch import Tensor

from pagedattn.whole_number import whole_number


class Sampler:
    """Chooses the next token of one sequence; every sequence has a sampler of its own.

    ``temperature`` 0 is greedy: the token with the highest score, the first of equals. Above 0 a
    token is drawn with probability softmax(logits / temperature). Equal ``seed`` and equal logits
    give equal tokens, whatever other sequences run beside this one; without a seed every sampler
    draws differently, and 0 is a seed like any other.

    Raises ValueError for a temperature that is negative or not finite, and for a seed that is no
    whole number or outside 0 .. 2**64 - 1.
    """

    def __init__(self, temperature: float = 0.0, seed: int | None = None) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
        self.temperature = temperature
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
            return
        seed = whole_number(seed, "seed")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must lie between 0 and 2**64 - 1, got {seed}")
        self._generator.manual_seed(seed)

    def sample(self, logits: Tensor) -> int:
        """The next token from its scores, logits [vocab_size].

        Raises ValueError when there is no score, and when the greatest is not a finite number:
        something that was never computed has reached the model's output.
        """
        if logits.dim() != 1 or not len(logits):
            raise ValueError(f"logits must be [vocab_size], got {list(logits.shape)}")
        best = logits.max()
        if not torch.isfinite(best):
            raise ValueError(f"cannot choose a token: the greatest of the logits is {best.item()}")
        if self.temperature == 0:
            return int(logits.argmax())
        # Subtracting first keeps the quotient at or below 0: nothing overflows, however small the
        # temperature.
        scores = (logits - best).double().cpu() / self.temperature
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))
