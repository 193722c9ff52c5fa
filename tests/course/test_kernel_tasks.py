"""Kernels in the course: copies of a package, unfinished bodies, bugs, and no triton at all."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from pagedattn.course import chapters
from pagedattn.course.chapters import STAGES, default_chapter, missing_for
from pagedattn.course.implementations import ImplementationError, load_fresh, load_stage
from pagedattn.course.rewrite import rewrite
from pagedattn.course.witness import DEVICE

pytest_plugins = ["pytester"]
needs_triton = pytest.mark.skipif(not util.find_spec("triton"), reason="needs triton")

KERNEL = '''
import torch
import triton
import triton.language as tl


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _scale_kernel(x, SIZE: tl.constexpr):
    """Doubles all numbers."""
    at = x + tl.arange(0, SIZE)
    tl.store(at, _double(tl.load(at)))


def scale(x):
    _scale_kernel[(1,)](x, SIZE=x.numel())
    return x
'''
TO_DO = KERNEL.replace(
    "return x + x", 'raise NotImplementedError(\n        "task 3.1: "\n        "add"\n    )'
)
TEST = """
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_scale(stage):
    assert stage.scale(torch.ones(4, device=DEVICE)).tolist() == [2.0] * 4, "twice as much"


def test_an_error_is_expected(stage):
    with pytest.raises(ValueError):
        stage.scale(torch.ones(4, device=DEVICE))
"""


@pytest.fixture
def doubling(archive):
    """The course's third chapter is a package of one kernel."""
    archive.write("archive/scale.py", KERNEL)
    archive.write("archive/__init__.py", "from .scale import scale\n")
    for name in ("boxes.py", "rooms.py"):
        (archive.root / "archive" / name).unlink()
    (archive.root / "chapters/03/tasks.toml").unlink()
    (archive.root / "chapters/03/test_archive.py").unlink()
    archive.write("chapters/03/test_scale.py", TEST)
    return archive


@needs_triton
def test_copies_of_kernels_share_nothing(doubling):
    one, two = load_fresh("archive"), load_fresh("archive")
    assert one.scale is not two.scale
    rewrite(one, "scale._double", "x + x", "x + x + x")
    for stage, expected in ((one, 3.0), (two, 2.0), (load_fresh("archive"), 2.0)):
        assert stage.scale(torch.ones(4, device=DEVICE)).tolist() == [expected] * 4


@needs_triton
def test_what_cannot_be_rewritten(doubling):
    stage = load_fresh("archive")
    with pytest.raises(ValueError, match=r"'x' stands 3 times in scale\._double, not once"):
        rewrite(stage, "scale._double", "x", "y")
    with pytest.raises(ValueError, match="'x - x' stands 0 times"):
        rewrite(stage, "scale._double", "x - x", "y")


@needs_triton
def test_an_unfinished_kernel_is_to_do(doubling, words):
    doubling.write("mine/__init__.py", "from .scale import scale\n")
    doubling.write("mine/scale.py", TO_DO)
    result = doubling.run("chapters/03/test_scale.py", "--impl", "mine")
    assert words(result) == {
        "test_scale.py::test_scale[archive]": "TO DO",
        "test_scale.py::test_an_error_is_expected[archive]": "TO DO",
    }
    result.stdout.fnmatch_lines(["to do: task 3.1 (2 tests)"])


@needs_triton
def test_a_bug_in_a_kernel(doubling, words):
    doubling.write(
        "chapters/03/bugs/triples.py",
        """
        '''Its story.'''

        from pagedattn.course.rewrite import rewrite

        SYMPTOM = "three times as much"
        KILLED_BY = ("test_scale.py::test_scale",)


        def apply(stage):
            rewrite(stage, "scale._double", "x + x", "x + x + x")
        """,
    )
    said = words(doubling.run("chapters/03/test_scale.py::test_scale"))
    assert said == {
        "test_scale.py::test_scale[archive]": "PASSED",
        "test_scale.py::test_scale[bug-triples]": "PASSED",
    }


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(chapters, "find_spec", lambda name: None)


def test_a_stage_that_cannot_run_here(without_triton):
    assert missing_for("04") is None
    with pytest.raises(ImplementationError, match="chapter 05 needs triton, which is not inst"):
        load_stage("05")


def test_tests_of_a_stage_that_cannot_run_here(mini, without_triton, words):
    """The chapters below run; one sentence says why this one does not."""
    STAGES["03"] = "pagedattn.kernels"
    mini.write("chapters/03/test_own.py", "def test_own(stage): pass")
    result = mini.run("chapters", "-rs")
    said = words(result)
    assert said["test_shelf.py::test_put[catalogue]"] == "PASSED"
    assert said["test_shelf.py::test_put[kernels]"] == "SKIPPED"
    assert said["test_own.py::test_own[kernels]"] == "SKIPPED"
    result.stdout.fnmatch_lines(["*chapter 03 needs triton, which is not installed*"])
    assert result.ret == 0
    mini.student("x = 1\n", "03")
    result = mini.run("chapters/03", "--student")
    result.stderr.fnmatch_lines(["ERROR: chapter 03 needs triton, which is not installed*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


NO_TRITON = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import pagedattn, pagedattn.prefix, pagedattn.course.plugin, pagedattn.demo
from pagedattn.course.implementations import load_bugs, resolve_stage
from pagedattn.course.chapters import find_root
assert "pagedattn.kernels" not in sys.modules
load_bugs(find_root())
print(resolve_stage(stage="04").__name__)
"""


def test_all_but_kernels_works_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", NO_TRITON],
        cwd=Path(chapters.__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "pagedattn.prefix", done.stderr


def test_the_stage_that_runs_unless_said_otherwise(monkeypatch):
    """Interpreted kernels are no way to serve a model, and the manager serves none."""
    for gpu, expected in ((False, "04"), (True, "05")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert default_chapter() == expected
