"""Policies by the names under which their figures are published here."""

import re

from pagedattn.traces.oracles import Buddy, ExactFirstFit, PagedOracle, ReserveExact
from pagedattn.traces.policies import Paged, Policy, ReserveMax


def policy_named(name: str, num_slots: int, max_seq_len: int) -> Policy:
    """An empty pool under the policy `max`, `exact`, `exact_ff`, `buddy`, `pagedN` or `pagedRN`,
    where N is the block size. `max_seq_len` concerns `max` alone.

    Raises ValueError for another name, and for a pool that holds nothing.
    """
    if name == "max":
        return ReserveMax(num_slots, max_seq_len)
    for oracle in (ReserveExact, ExactFirstFit, Buddy):
        if name == oracle.name:
            return oracle(num_slots)
    if found := re.fullmatch(r"paged(R?)([1-9][0-9]*)", name):
        promised, block_size = found.groups()
        return (PagedOracle if promised else Paged)(num_slots, int(block_size))
    raise ValueError(
        f"no policy {name!r}; known: max, exact, exact_ff, buddy, pagedN and pagedRN with a block "
        "size N"
    )
