"""A module or a package from its source, under a name of its own, as often as one likes.

A package imports its own files: `from .pool import BlockPool` in `prefix_copy3.cache` takes it from
`prefix_copy3.pool`. So copies of one package stand side by side and share nothing.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType


def execute(path: Path, name: str, names: Mapping[str, object]) -> ModuleType:
    """Runs a file as the module `name`, or as the package `name` if it is an `__init__.py`.

    `names` are globals that it finds defined, and so does every submodule of a package. Raises what
    the code raises; nothing is left in `sys.modules` then.
    """
    spec = _spec(name, path.absolute(), names)
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up there
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [other for other in sys.modules if f"{other}.".startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


def _spec(name: str, path: Path, names: Mapping[str, object]) -> ModuleSpec:
    spec = spec_from_file_location(name, path, loader=_FromSource(name, path, names))
    assert spec is not None
    return spec


class _FromSource(SourceFileLoader):
    """Compiles whenever it loads.

    Cached bytecode is trusted by size and time in seconds, which an edit can keep.
    """

    def __init__(self, name: str, path: Path, names: Mapping[str, object]) -> None:
        super().__init__(name, str(path))
        self.names = names

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)
        super().exec_module(module)


class _SubmodulesFromSource(MetaPathFinder):
    """Finds the files of a package that was loaded from source, and loads them in the same way."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        loader = getattr(sys.modules.get(package), "__loader__", None)
        if not isinstance(loader, _FromSource):
            return None
        file = Path(loader.path).with_name(f"{name}.py")
        return _spec(fullname, file, loader.names) if file.is_file() else None


sys.meta_path.insert(0, _SubmodulesFromSource())
