"""The `stage` fixture: whose code a chapter's tests run on; `pagedattn.course.plugin` chooses."""

from types import ModuleType

import pytest

from pagedattn.course.plugin import COURSE


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test: the library's stage, a student's file, or a stage with a bug in it."""
    return request.config.stash[COURSE].module(request.param)
