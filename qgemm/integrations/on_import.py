"""``when_imported``: runs an action once a library has been imported, by whomever and whenever.

transformers and PEFT must learn about qgemm before they meet a quantized layer, and have no mechanism by which a
package announces itself. Importing them for that would take everybody seconds; waiting for a call into qgemm would be
too late for a script that only calls ``from_pretrained``, which then takes int8 values for weights.

So ``sys.meta_path`` gets a finder that only handles the awaited modules. It asks the other finders for the module, runs
the action after the module's own code, and removes itself when it has nothing left to wait for.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(module: str, action: Callable[[], object]) -> None:
    """Calls ``action`` once ``module`` has been imported: now, if it already is, and otherwise right after its import.

    An ``ImportError`` in ``action`` is dropped: it means that this version of the library doesn't support qgemm, which
    must not make the library's import fail.
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
        # Only those after this one: they would have been asked without it.
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
            # The loader's own method is restored first, so that a reload doesn't act again.
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # once only, even if the module was looked for several times
                sys.meta_path.remove(self)
                _run(self._action)

        # On this loader object, which stays the same for everything that inspects it (resources, source, tracebacks).
        loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
