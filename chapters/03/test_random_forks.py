"""Any order of the verbs, `fork` and `replace` among them.

After each step the invariants are checked, and every sequence must find through its table the K and
V that were stored for it, bit by bit: those that two sequences share, and those in which they
differ.
"""

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from pagedattn.course.schedule import Schedule


class ForkingSchedule(Schedule):
    """The schedule of chapter 01 with the verbs of this chapter."""

    def can_fork(self) -> bool:
        return self.has_room() and self.has_sequences()

    @precondition(can_fork)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(self.seq_ids)), len(self.limits)
        self.witness.fork(parent, child)
        self.limits.append(self.limits[parent])

    @precondition(can_fork)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
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
        if self.batch is None:
            self.witness.check_contents()


def run(stage: ModuleType, num_examples: int) -> None:
    run_state_machine_as_test(
        lambda: ForkingSchedule(stage),  # type: ignore[arg-type]
        settings=settings(max_examples=num_examples, stateful_step_count=50),
    )


@pytest.mark.contract
def test_any_schedule_with_forks(stage: ModuleType) -> None:
    """200 runs of 50 steps."""
    run(stage, 200)


@pytest.mark.slow
def test_very_many_schedules_with_forks(stage: ModuleType) -> None:
    """2000 runs of 50 steps."""
    run(stage, 2000)
