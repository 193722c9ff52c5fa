"""Which chapters there are, and where their files lie."""

from importlib.util import find_spec
from pathlib import Path

import torch

# The staircase, lowest first: chapter -> what it builds, a module or a package. `import` never
# goes upward.
STAGES = {
    "01": "pagedattn.contiguous",
    "02": "pagedattn.paged",
    "03": "pagedattn.sharing",
    "04": "pagedattn.prefix",
    "05": "pagedattn.kernels",
    "06": "pagedattn.manager",
}
_KERNELS = "pagedattn.kernels"
_LAST_CACHE = "05"


def missing_for(chapter: str) -> str | None:
    """Why the stage of a chapter cannot be imported here, in one sentence; None if it can."""
    if STAGES[chapter] == _KERNELS and not find_spec("triton"):
        return (
            f"chapter {chapter} needs triton, which is not installed; it exists for Linux, "
            "also without a GPU"
        )
    return None


def is_cache(chapter: str) -> bool:
    """Whether a chapter's stage is the cache of the chapter below with something more.

    Such a stage keeps the promises of all below it: their tests marked `contract` run on it, too,
    and where a cache is needed it can be taken. Chapters 01 to 05 are that. The stage of chapter 06
    gives out blocks for several kinds of layers at once: a sequence has a table in each group, the
    null block stands in tables, digests are registered before K and V are computed, and nothing
    forks. What the contracts say of one table is not true of it, so its promises are its own.
    """
    return chapter <= _LAST_CACHE


def default_chapter() -> str:
    """The last chapter whose stage is a cache, and fast here: without a GPU kernels are
    interpreted."""
    return [
        chapter
        for chapter in STAGES
        if is_cache(chapter) and (STAGES[chapter] != _KERNELS or torch.cuda.is_available())
    ][-1]


def stage_name(chapter: str) -> str:
    """The short name of a chapter's stage: `paged` for chapter 02."""
    return STAGES[chapter].rpartition(".")[2]


def stage_path(chapter: str, root: Path) -> Path:
    """A chapter's stage in a checkout: a file, or a folder where the stage is a package."""
    path = root.joinpath(*STAGES[chapter].split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def exercise_path(folder: Path) -> Path:
    """The student's own stage in a chapter's folder: `exercise.py`, or `exercise` for a package."""
    return folder / f"exercise{stage_path(folder.name, folder.parents[1]).suffix}"


def module_files(path: Path) -> list[Path]:
    """The files of a stage or of an exercise: the file itself, or all modules of the folder."""
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def find_root() -> Path:
    """The checkout's top folder: around the working directory or else around the package.

    Raises ValueError where there is none, as when the package was installed without its checkout.
    """
    here = Path.cwd()
    package = Path(__file__).resolve().parents[1]
    for folder in (here, *here.parents, package.parent):
        if any(chapter_folders(folder)):
            return folder
    raise ValueError(
        f"no chapters found around {here} nor beside {package}; "
        "this needs a checkout of the repository, not only the installed package"
    )


def chapter_folders(root: Path) -> dict[str, Path]:
    """The folders `chapters/NN` of a checkout that are chapters of `STAGES`, in order."""
    folders = {chapter: root / "chapters" / chapter for chapter in STAGES}
    return {chapter: folder for chapter, folder in folders.items() if folder.is_dir()}


def shown(path: Path, root: Path | None = None) -> str:
    """A path as a person would write it: seen from `root`, or else from the working directory."""
    absolute, root = path.resolve(), (root or Path.cwd()).resolve()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(path)
