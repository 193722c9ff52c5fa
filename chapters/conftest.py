"""What every chapter's tests share: whose code they run on, and on which device."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from pagedattn.course.plugin import COURSE


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test: the library's stage, a student's file, or a stage with a bug in it.

    `pagedattn.course.plugin` chooses.
    """
    return request.config.stash[COURSE].module(request.param)


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    """Tensors and caches that name no device are on the GPU where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
