"""The versions of vLLM that the plugin works with: between these, its interfaces for plugins are what is used here."""

from __future__ import annotations

import importlib
import re

OLDEST = (0, 22)
NEWEST = (0, 33)


def installed_version() -> str:
    """That of the vLLM that is imported. Its package has several names, so the module is asked."""
    return str(importlib.import_module("vllm").__version__)


def problem_with(version: str) -> str | None:
    """A sentence that says why ``version`` isn't supported; None if it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    first, last = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return f"vLLM {version} isn't supported by this qgemm, which runs in {first} to {last}: install one of these"
