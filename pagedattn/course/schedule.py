"""Any order of the verbs: a state machine whose steps hypothesis draws.

What a cache computes and counts stays right, step after step. Where a run fails, hypothesis looks
for the shortest that does and prints it. `Schedule` has the verbs of chapter 01, `ForkingSchedule`
those that chapter 03 adds; later chapters add theirs in the same way.
"""

from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedattn.cache import Batch, OutOfBlocks
from pagedattn.course.witness import Witness

lengths = st.integers(1, 12)


def run_schedules(
    schedule: type["Schedule"], request: pytest.FixtureRequest, num_runs: int, num_steps: int
) -> None:
    """So many runs on the stage of the test. A stage of a later chapter gets a tenth of them: it
    has schedules of its own."""
    stage, case = request.getfixturevalue("stage"), request.node.callspec.params["stage"]
    if case.chapter > request.path.parent.name:
        num_runs //= 10
    run_state_machine_as_test(
        lambda: schedule(stage),  # type: ignore[arg-type]
        settings=settings(max_examples=num_runs, stateful_step_count=num_steps),
    )


class Schedule(RuleBasedStateMachine):
    """A small pool, poison on, and at most five sequences of at most 12 tokens."""

    options: ClassVar = {"num_blocks": 9, "max_seq_len": 12, "max_num_seqs": 5}

    def __init__(self, stage: ModuleType) -> None:
        super().__init__()
        self.witness = Witness(stage, **self.options)
        self.batch: Batch | None = None
        self.attended: set[int] = set()
        self.limits: list[int] = []  # of all sequences ever added; their names count from 0

    @property
    def seq_ids(self) -> list[Any]:
        return list(self.witness.histories)

    @property
    def waiting(self) -> list[Any]:
        return [s for s in self.seq_ids if self.witness.waiting(s)]

    def is_idle(self) -> bool:
        return self.batch is None

    def has_room(self) -> bool:
        return self.batch is None and len(self.seq_ids) < 5

    def has_sequences(self) -> bool:
        return self.batch is None and bool(self.seq_ids)

    def has_waiting(self) -> bool:
        return self.batch is None and bool(self.waiting)

    def has_batch(self) -> bool:
        return self.batch is not None

    @precondition(has_room)
    @rule(num_tokens=lengths, extra=st.integers(0, 4))
    def add(self, num_tokens: int, extra: int) -> None:
        """A new sequence, or a refusal that changes nothing."""
        before = self.witness.snapshot()
        seq_id, limit = len(self.limits), min(12, num_tokens + extra)
        self.limits.append(limit)
        try:
            self.witness.add(seq_id, num_tokens, limit)
        except OutOfBlocks:
            assert self.seq_ids, f"an empty pool refused {limit} tokens: {self.witness!r}"
            self.witness.assert_unchanged(before, "a refused add")

    @precondition(has_sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        """Tokens for a sequence; beyond its limit a refusal that changes nothing."""
        seq_id = data.draw(st.sampled_from(self.seq_ids))
        before = self.witness.snapshot()
        if len(self.witness.histories[seq_id].token_ids) + num_tokens <= self.limits[seq_id]:
            self.witness.append(seq_id, num_tokens)
        else:
            with pytest.raises(ValueError, match="exceed its limit"):
                self.witness.append(seq_id, num_tokens)
            self.witness.assert_unchanged(before, "a refused append")

    @precondition(has_waiting)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """A batch of some waiting tokens of some sequences, or a refusal that changes nothing."""
        chosen = data.draw(st.lists(st.sampled_from(self.waiting), min_size=1, unique=True))
        counts = {s: data.draw(st.integers(1, self.witness.waiting(s))) for s in chosen}
        before = self.witness.snapshot()
        try:
            self.batch = self.witness.reserve(counts)
        except OutOfBlocks:
            assert len(self.seq_ids) > 1, f"one sequence alone did not fit: {self.witness!r}"
            self.witness.assert_unchanged(before, "a refused reserve")
        self.attended.clear()

    @precondition(has_batch)
    @rule(layer=st.integers(0, 1))
    def attend(self, layer: int) -> None:
        """One layer's attention of the batch, in any order and as often as drawn."""
        assert self.batch is not None
        self.witness.attend_layer(self.batch, layer)
        self.attended.add(layer)

    @precondition(has_batch)
    @rule()
    def commit(self) -> None:
        """The batch ends; layers that were not computed yet are, before."""
        assert self.batch is not None
        for layer in {0, 1} - self.attended:
            self.witness.attend_layer(self.batch, layer)
        self.witness.commit(self.batch)
        self.batch = None

    @precondition(has_batch)
    @rule()
    def abort(self) -> None:
        """The batch ends as if it had never been."""
        assert self.batch is not None
        self.batch.abort()
        self.batch = None

    @precondition(has_sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A sequence ends."""
        self.witness.free(data.draw(st.sampled_from(self.seq_ids)))

    @invariant()
    def all_is_well(self) -> None:
        """After every step."""
        self.witness.check()

    def teardown(self) -> None:
        """Whatever has happened: after abort and free the pool is whole again."""
        if self.batch is not None:
            self.batch.abort()
        for seq_id in self.seq_ids:
            self.witness.free(seq_id)
        self.witness.check()
        usage = self.witness.cache.usage()
        assert usage.free == usage.total, f"all sequences ended, but {usage}; {self.witness!r}"


class ForkingSchedule(Schedule):
    """The schedule with `fork` and `replace`. After each step every sequence must find through its
    table the K and V that were stored for it, bit by bit: those that two sequences share, and those
    in which they differ."""

    def can_fork(self) -> bool:
        return self.has_room() and self.has_sequences()

    @precondition(can_fork)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A second sequence with the tokens of the first, and its limit."""
        parent, child = data.draw(st.sampled_from(self.seq_ids)), len(self.limits)
        self.witness.fork(parent, child)
        self.limits.append(self.limits[parent])

    @precondition(can_fork)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Some sequences end, and heirs go on from some of these at once."""
        old = data.draw(st.lists(st.sampled_from(self.seq_ids), min_size=1, unique=True))
        parents = [s for s in old if self.known(s) < self.limits[s]]
        room = 5 - len(self.seq_ids)
        chosen = data.draw(st.lists(st.sampled_from(parents), max_size=room)) if parents else []
        heirs = list(zip(chosen, range(len(self.limits), 10**9), strict=False))
        self.witness.replace(old, heirs)
        self.limits += [self.limits[parent] for parent in chosen]

    def known(self, seq_id: int) -> int:
        return len(self.witness.histories[seq_id].token_ids)

    @invariant()
    def everybody_finds_what_was_stored(self) -> None:
        """Between two batches."""
        if self.batch is None:
            self.witness.check_contents()
