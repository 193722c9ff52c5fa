"""What is generated in a checkout, and whether it is current.

The handlers of `pagedattn exercises`, `pagedattn figures` and `pagedattn check`.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from pagedattn.book import code
from pagedattn.course import evidence, exercise, notebook
from pagedattn.course.chapters import find_root
from pagedattn.course.tasks import load_all_tasks


def add_exercises_arguments(parser: ArgumentParser) -> None:
    """The arguments of `pagedattn exercises`."""
    parser.add_argument(
        "--force", action="store_true", help="overwrite exercises that have been edited"
    )


def run_exercises(args: Namespace) -> int:
    """Writes every exercise and the code in the texts; 1 if an edited exercise is kept."""
    root = find_root()
    kept = 0
    for chapter in load_all_tasks(root):
        for name, written in exercise.write(chapter, args.force).items():
            print(f"chapters/{chapter.chapter}/{name}: {written.value}")
            if written is exercise.Written.EDITED:
                kept += 1
                print("  it differs from what was generated, so it may be somebody's work;")
                print("  `pagedattn exercises --force` overwrites it")
    for path in code.refresh(_texts(root), root):
        print(f"{path.relative_to(root)}: code refreshed")
    return 1 if kept else 0


def run_figures(args: Namespace) -> int:
    """Draws every figure of the book again."""
    root = find_root()
    problems = _draw(root, root / "figures")
    return _report(problems, "figures drawn")


def run_check(args: Namespace) -> int:
    """Whether everything that is generated and committed is what would be generated now."""
    root = find_root()
    problems = [
        *exercise.check(load_all_tasks(root)),
        *code.check(_texts(root), root),
        *check_figures(root),
        *notebook.check(root),
        *evidence.check(root),
    ]
    return _report(problems, "exercises, code, figures, notebooks and evidence are current")


def _report(problems: list[str], success: str) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(success)
    return 1 if problems else 0


def _texts(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("chapters/**/*.md")])


def check_figures(root: Path) -> list[str]:
    """The figures whose bytes are not those that their scripts draw now."""
    committed = {path.name: path for path in (root / "figures").glob("*.svg")}
    with TemporaryDirectory() as folder:
        problems = _draw(root, Path(folder))
        drawn = {path.name: path for path in Path(folder).glob("*.svg")}
        for name in sorted(committed.keys() | drawn.keys()):
            if name not in committed:
                problems.append(f"figures/{name} is missing (make figures draws it)")
            elif name not in drawn:
                problems.append(f"figures/{name}: no script in figures/ draws it")
            elif committed[name].read_bytes() != drawn[name].read_bytes():
                problems.append(f"figures/{name} differs from what is drawn (make figures)")
    return problems


def _draw(root: Path, folder: Path) -> list[str]:
    """Runs every script `figures/NAME.py FOLDER`, several at a time; returns the failures."""
    scripts = sorted((root / "figures").glob("*.py"))

    def draw(script: Path) -> str | None:
        command = [sys.executable, str(script), str(folder)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        return f"figures/{script.name} failed:\n{done.stderr}" if done.returncode else None

    with ThreadPoolExecutor(os.cpu_count()) as runners:
        return [failure for failure in runners.map(draw, scripts) if failure]
