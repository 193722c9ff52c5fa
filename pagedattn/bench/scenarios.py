"""Four small scenarios of sharing, in blocks: what the tables name, and what is in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from pagedattn.bench.shared_blocks import Generation
from pagedattn.traces import Request

BLOCK_SIZE = 16
MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class Scenario:
    """Sequences that begin with one prompt, with so many new tokens in each, which no two share.
    ``own`` blocks if each kept a copy of the prompt, ``shared`` blocks with sharing."""

    name: str
    num_seqs: int
    num_prompt_tokens: int
    num_new_tokens: int
    own: int
    shared: int

    @property
    def saved(self) -> float:
        """The share of ``own`` that sharing saves."""
        return 1 - self.shared / self.own

    @property
    def slab_slots(self) -> int:
        """Slots of one slab of 4096 a sequence, as in chapter 01."""
        return self.num_seqs * MAX_SEQ_LEN


def scenario(name: str, num_seqs: int, num_prompt_tokens: int, num_new_tokens: int = 0) -> Scenario:
    """Fork the sequences from one prompt, let each compute its new tokens, and count; on the cache
    of chapter 03."""
    request = Request(num_prompt_tokens, num_new_tokens + 1)  # the last one is never computed
    generation = Generation([request], num_seqs, BLOCK_SIZE)
    if num_new_tokens:
        for seq_id in generation.running[0]:
            generation.cache.append(seq_id, [0] * num_new_tokens)
        generation.step(num_new_tokens)
    now = generation.now()
    return Scenario(name, num_seqs, num_prompt_tokens, num_new_tokens, now.own, now.shared)


def scenarios() -> list[Scenario]:
    """Beams and samples, just forked and later; and requests that share a system prompt."""
    return [
        scenario("beams", 4, 1024),
        scenario("beams", 4, 1024, 1),
        scenario("beams", 4, 2048, 256),
        scenario("samples", 5, 512),
        scenario("samples", 5, 512, 1),
        scenario("requests", 100, 1024, 768),
    ]


def scenario_table(found: Iterable[Scenario]) -> Table:
    """One row a scenario."""
    table = Table(
        "",
        title="One prompt, shared: blocks of 16",
        caption="* slots in slabs of 4096, one a sequence",
    )
    for heading in (
        "prompt",
        "then\neach",
        "own\ncopies",
        "shared",
        "saved",
        "in\nslabs *",
        "saved",
    ):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            f"{row.num_seqs} {row.name}",
            f"{row.num_prompt_tokens:,}",
            f"+{row.num_new_tokens}",
            f"{row.own:,}",
            f"{row.shared:,}",
            f"{row.saved:.1%}",
            f"{row.slab_slots:,}",
            f"{1 - row.shared * BLOCK_SIZE / row.slab_slots:.1%}",
        )
    return table
