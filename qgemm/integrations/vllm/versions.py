"""The versions of vLLM that the plugin supports: between these, vLLM's plugin interfaces are those used here."""

from __future__ import annotations

import importlib
import re

OLDEST = (0, 22)
NEWEST = (0, 33)


def installed_version() -> str:
    """The version of the imported vLLM. Its package has several names, so the module is asked."""
    return str(importlib.import_module("vllm").__version__)


def problem_with(version: str) -> str | None:
    """A sentence that explains why ``version`` isn't supported; None if it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    first, last = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return f"vLLM {version} isn't supported by this qgemm, which runs in {first} to {last}: install one of these"
