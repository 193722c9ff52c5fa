"""Any order of the verbs: what a cache computes and counts stays right, step after step.

Hypothesis draws the steps; where one fails, it looks for the shortest run that fails and prints it.
Every later stage runs this test too.
"""

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pagedattn.course.schedule import Schedule


@pytest.mark.contract
def test_any_schedule(stage: ModuleType) -> None:
    run_state_machine_as_test(
        lambda: Schedule(stage),  # type: ignore[arg-type]
        settings=settings(max_examples=50, stateful_step_count=25),
    )
