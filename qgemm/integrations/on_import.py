"""``when_imported``: does something once a library has been imported, whoever imports it, and whenever.

transformers and PEFT have to be told of qgemm before they meet a quantized layer, and have no way for a package to
announce itself. Importing them for that would take seconds, of everybody; waiting for a call into qgemm would be too
late for a script that goes on with ``from_pretrained`` alone, which then takes int8 values for weights.

So ``sys.meta_path`` gets a finder that answers for the awaited modules only. It asks the other finders for the module,
has the action run after the module's own code, and leaves when it has nothing to wait for.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(module: str, action: Callable[[], object]) -> None:
    """Calls ``action`` once ``module`` has been imported: now, if it is, and otherwise right after.

    An ``ImportError`` in ``action`` is dropped: it means a version of the library that has no place for qgemm, and is
    nothing that the import of that library should fail for.
    """
    if module in sys.modules:
        _run(action)
    else:
        sys.meta_path.insert(0, _Finder(module, action))


def _run(action: Callable[[], object]) -> None:
    with contextlib.suppress(ImportError):
        action()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, action: Callable[[], object]) -> None:
        self._module = module
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module or self not in sys.meta_path:
            return None
        # Only those that come after this one: they are who would have been asked without it.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            if module.__name__ != fullname:  # some loaders (zipimport) serve many modules
                execute(module)
                return
            # The loader's own method is back in its place before: a reload doesn't act again.
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # once, however often the module was looked for
                sys.meta_path.remove(self)
                _run(self._action)

        # On this one loader, which stays what it was for everybody who looks at it (resources, source, tracebacks).
        loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
