"""What one request asks of the sampler: how its tokens are chosen and where its answer ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

import numpy as np
import torch

from pagedattn.whole_number import whole_number

GREEDY_BELOW = 1e-5
LEAST_REPETITION_PENALTY, GREATEST_REPETITION_PENALTY = 1e-3, 1e3


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen.

    Names and meanings are those of vLLM (vllm/sampling_params.py); the defaults choose greedily.

    - ``temperature``: scores are divided by it. Below 1e-5 the choice is greedy: the token with the
      highest score, the first of equals, whatever the next three and the seed say.
    - ``top_k``: only the k tokens with the highest scores, and those equal to the last of them.
      0 and -1 are off.
    - ``top_p``: only the likeliest tokens whose probabilities add up to p; the token that crosses p
      is kept. 1 is off.
    - ``min_p``: only tokens at least this probable relative to the likeliest. 0 is off.
    - ``repetition_penalty``: for tokens in the prompt or the answer, positive scores are divided by
      it and others multiplied. 1 is off. vLLM and ``transformers`` take any number above 0, and in
      practice it is between 1 and 2. Here it is at least 0.001 and at most 1000: scores are float32
      numbers, which cannot hold every product with a number far outside.
    - ``frequency_penalty``, ``presence_penalty``: subtracted from a token's score for each time,
      and once if at all, that it stands in the answer. The prompt does not count. 0 is off.
    - ``seed``: equal seeds and equal scores give equal tokens, whatever runs beside. Without one
      every sequence draws differently; 0 is a seed like any other.
    - ``min_tokens``: none of the first so many tokens ends the answer.
    - ``stop``: texts that end the answer, which is cut before them. One string stands for itself.
    - ``stop_token_ids``: tokens that end the answer, each below 2**63.
    - ``logprobs``: report the log-probability of the chosen token and of so many of the likeliest.
      None: of none.

    Raises ValueError, naming the value and its limits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Iterable[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: finite_number(getattr(self, name), name)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
            )
        }
        for name in ("top_k", "min_tokens", "seed", "logprobs"):
            value = getattr(self, name)
            optional = name in ("seed", "logprobs") and value is None
            checked[name] = None if optional else whole_number(value, name)
        checked["stop"] = _strings(self.stop)
        checked["stop_token_ids"] = tuple(sorted(token_set(self.stop_token_ids, "stop_token_ids")))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

        self._require(self.temperature >= 0, "temperature", "finite and at least 0")
        self._require(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 to be off")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        least, greatest = LEAST_REPETITION_PENALTY, GREATEST_REPETITION_PENALTY
        allowed = least <= self.repetition_penalty <= greatest
        self._require(allowed, "repetition_penalty", f"between {least:g} and {greatest:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            self._require(-2 <= getattr(self, name) <= 2, name, "between -2 and 2")
        self._require(self.min_tokens >= 0, "min_tokens", "at least 0")
        in_64_bits = self.seed is None or 0 <= self.seed < 2**64
        self._require(in_64_bits, "seed", "between 0 and 2**64 - 1, or None")
        self._require(
            self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0, or None"
        )

    def _require(self, holds: bool, name: str, limits: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {limits}, got {getattr(self, name)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the highest score wins and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    def child(self, index: int) -> "SamplingParams":
        """The same for sample number ``index`` of one prompt, with a seed of its own.

        The seed is a hash of this seed and ``index``, so that no two children of any requests
        share one; seed + index would give child 1 of seed 7 and child 0 of seed 8 the same tokens.
        Without a seed, children have none either. Raises ValueError for an index below 0.
        """
        index = whole_number(index, "index")
        if index < 0:
            raise ValueError(f"index must be at least 0, got {index}")
        if self.seed is None:
            return self
        sequence = np.random.SeedSequence(self.seed, spawn_key=(index,))
        return replace(self, seed=int(sequence.generate_state(1, np.uint64)[0]))

    def with_stop_token_ids(self, token_ids: Iterable[int]) -> "SamplingParams":
        """The same with further tokens that end the answer: those of the model, say."""
        return replace(self, stop_token_ids=(*self.stop_token_ids, *token_ids))


def finite_number(value: Any, name: str) -> float:
    """The Python float that ``value`` is: one of NumPy, and a tensor without dimensions, count too.

    Raises ValueError, naming ``name`` and the value, for anything else; True and False are answers
    to a question, no numbers.
    """
    wrong = ValueError(f"{name} must be a finite number, got {value!r}")
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) in (np.bool_, torch.bool)
    is_array = bool(getattr(value, "shape", ()))
    if is_bool or is_array or not isinstance(value, SupportsFloat):
        raise wrong
    try:
        number = float(value)
    except OverflowError:
        raise wrong from None
    if not math.isfinite(number):
        raise wrong
    return number


def token_set(token_ids: Any, name: str) -> frozenset[int]:
    """Tokens, each once, as Python ints. Raises ValueError, naming ``name``, for what is no list or
    holds a number that is not whole, negative or too large for a tensor."""
    tokens = [whole_number(token_id, f"a token of {name}") for token_id in listed(token_ids, name)]
    for token_id in tokens:
        if not 0 <= token_id < 2**63:
            raise ValueError(
                f"a token of {name} must be at least 0 and below 2**63, got {token_id}"
            )
    return frozenset(tokens)


def listed(values: Any, name: str) -> tuple[Any, ...]:
    """What ``values`` holds. Raises ValueError, naming ``name``, for a single thing."""
    try:
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name} must be a list, got {values!r}") from None


def _strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else listed(stop, "stop")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold strings of at least one character, got {string!r}")
    return strings
