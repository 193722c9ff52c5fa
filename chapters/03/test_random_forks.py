"""Any order of the verbs, `fork` and `replace` among them: `ForkingSchedule` in
pagedattn/course/schedule.py."""

from types import ModuleType

import pytest

from pagedattn.course.schedule import ForkingSchedule, run_schedules


@pytest.mark.contract
def test_any_schedule_with_forks(stage: ModuleType, request: pytest.FixtureRequest) -> None:
    """200 runs of 50 steps."""
    run_schedules(ForkingSchedule, request, 200, 50)


@pytest.mark.slow
def test_very_many_schedules_with_forks(stage: ModuleType, request: pytest.FixtureRequest) -> None:
    """2000 runs of 50 steps."""
    run_schedules(ForkingSchedule, request, 2000, 50)
