"""What counts as a whole number in this package: a token, a number of tokens, a seed."""

import operator
from typing import Any

import torch
from torch import Tensor


def whole_number(value: Any, name: str) -> int:
    """The Python int that ``value`` is: a NumPy integer and an integer tensor of one number count
    too.

    Raises ValueError, naming ``name`` and the value, for anything else; True and False are answers
    to a question, no numbers.
    """
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} is {value!r}; it must be a whole number")


def at_least_1(value: Any, name: str) -> int:
    """A whole number of things, of which there must be one. Raises ValueError as above."""
    number = whole_number(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
