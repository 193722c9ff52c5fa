"""A kernel with one line changed: how a bug gets into what Triton compiles.

Triton reads the source of a kernel, not its bytecode, so a bug cannot wrap a kernel or patch what
it calls. Instead the source is changed and read again.
"""

import inspect
import linecache
import sys
from itertools import count
from types import ModuleType

_rewritten = count(1)


def rewrite(stage: ModuleType, kernel: str, old: str, new: str) -> None:
    """Replaces a kernel of a package, ``attend._walk`` say, by one with ``new`` in place of
    ``old``; whatever in its module calls it then calls that one.

    Raises ValueError unless ``old`` stands in its source exactly once.
    """
    name, _, function = kernel.rpartition(".")
    module = sys.modules[f"{stage.__name__}.{name}"]
    source = inspect.getsource(getattr(module, function).fn)
    if (found := source.count(old)) != 1:
        raise ValueError(f"{old!r} stands {found} times in {kernel}, not once")
    changed = source.replace(old, new)
    # Triton asks `inspect` for the source of what it is to compile, and `inspect` asks `linecache`.
    file = f"<{stage.__name__}.{kernel}, rewritten {next(_rewritten)}>"
    linecache.cache[file] = (len(changed), None, changed.splitlines(keepends=True), file)
    exec(compile(changed, file, "exec"), vars(module))
