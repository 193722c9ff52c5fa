"""What a test says about a bug: it must fail by an assertion, so that a student reads words."""

from collections.abc import Iterator
from typing import NoReturn

import pytest

from pagedattn.course.implementations import Bug

_NO_VERDICT = (KeyboardInterrupt, SystemExit, GeneratorExit, pytest.skip.Exception)


def judge(bug: Bug, test: str, error: BaseException | None) -> None:
    """Returns if `error`, raised by the test on the bug, is an assertion; else the test fails.

    `pytest.fail` and an exception that did not come (`pytest.raises`) are assertions. In a group
    every member must be one.
    """
    if error is None:
        _fail(
            f"the bug {bug.name} lives: {test} passes on it.\n"
            f"Its symptom should be: {bug.symptom}\n"
            f"Sharpen the test, or name another one in KILLED_BY of {bug.path}."
        )
    if isinstance(error, (*_NO_VERDICT, pytest.exit.Exception)):
        raise error
    for cause in _causes(error):
        if not isinstance(cause, (AssertionError, pytest.fail.Exception)):
            raise AssertionError(
                f"the bug {bug.name} makes {test} crash with {type(cause).__name__}: {cause}\n"
                "It must fail by an assertion that says what was expected. Let the test check it, "
                f"or name another one in KILLED_BY of {bug.path}."
            ) from error


def _fail(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, or the members of a group and of groups in it: Hypothesis reports several so."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error
