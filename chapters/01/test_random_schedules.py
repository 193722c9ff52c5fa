"""Any order of the verbs: what a cache computes and counts stays right, step after step.

Hypothesis draws the steps; where one fails, it looks for the shortest run that fails and prints it.
Every later stage runs this test too.
"""

from types import ModuleType

import pytest

from pagedattn.course.schedule import Schedule, run_schedules


@pytest.mark.contract
def test_any_schedule(stage: ModuleType, request: pytest.FixtureRequest) -> None:
    run_schedules(Schedule, request, num_runs=50, num_steps=25)
