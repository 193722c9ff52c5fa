"""Names of tests and of symbols, as `tasks.toml` and bug files write them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class NamedTest:
    """A test: `test_pool.py::test_order`, or one of its cases: `test_pool.py::test_order[3]`.

    The case is the id that pytest would give without the `stage`. Without a case, all are meant.
    """

    file: Path
    function: str
    case: str | None = None

    @classmethod
    def parse(cls, entry: str, folder: Path) -> NamedTest:
        """Reads a name whose file is seen from `folder`. Raises ValueError if it names no test."""
        file, _, rest = entry.partition("::")
        function, bracket, case = rest.partition("[")
        if not file.endswith(".py") or not function or (bracket and not case.endswith("]")):
            raise ValueError(f"{entry!r} should read test_file.py::test_name or …::test_name[case]")
        return cls((folder / file).resolve(), function, case[:-1] if bracket else None)

    def __str__(self) -> str:
        case = f"[{self.case}]" if self.case else ""
        return f"{self.file.name}::{self.function}{case}"

    def names(self, file: Path, function: str) -> bool:
        """Whether this is the name of the test, of one of its cases or of its class."""
        return file == self.file and f"{function}::".startswith(f"{self.function}::")

    def covers(self, file: Path, function: str, case: str) -> bool:
        """Whether this case of this test is meant."""
        return self.names(file, function) and self.case in (None, case)

    def exists(self) -> bool:
        """Whether the file defines this test. Cases are known only when pytest collects it."""
        if not self.file.is_file():
            return False
        return len(find_functions(parse_file(self.file), self.function.replace("::", "."))) > 0


def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def find_functions(tree: ast.Module, symbol: str) -> list[Function]:
    """The definitions of `function` or `Class.method`; several where it is defined repeatedly."""
    *classes, function = symbol.split(".")
    scope: list[ast.stmt] = tree.body
    for name in classes:
        scope = [
            inner
            for node in scope
            if isinstance(node, ast.ClassDef) and node.name == name
            for inner in node.body
        ]
    return [node for node in scope if isinstance(node, Function) and node.name == function]
