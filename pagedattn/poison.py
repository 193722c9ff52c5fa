"""Poison: K and V that are dead are NaN, so that whoever reads them shows it.

A freed slot keeps its old numbers, and a mistake that reads them gives an answer that looks almost
right. With poison on, the answer becomes NaN. xv6 fills freed pages with junk for the same reason.
"""

import math

import torch
from torch import Tensor

from pagedattn.cache import InvariantError


def poison(k_cache: Tensor, v_cache: Tensor, slots: Tensor | slice) -> None:
    """Kill K and V of these slots in all layers. Caches [num_layers, num_slots, heads,
    head_dim]."""
    k_cache[:, slots] = math.nan
    v_cache[:, slots] = math.nan


def check_poison(k_cache: Tensor, v_cache: Tensor, live: Tensor, pool: str) -> None:
    """I7: every number of a live slot is finite, every number of a dead one is NaN.

    ``live`` is bool [num_slots] on the CPU. Raises InvariantError; its message ends with ``pool``.
    """
    for name, cache in (("K", k_cache), ("V", v_cache)):
        numbers = cache.transpose(0, 1).flatten(1)  # [num_slots, all numbers of one slot]
        good = torch.where(live.to(cache.device), numbers.isfinite().all(1), numbers.isnan().all(1))
        if not good.all():
            slot = int((~good).nonzero()[0])
            state = "computed but not finite" if live[slot] else "dead but not NaN"
            raise InvariantError(f"I7: {name} in slot {slot} is {state}: {pool}")
