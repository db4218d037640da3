"""qgemm inside vLLM: serves qgemm's folders, and runs vLLM's own int8 checkpoints with qgemm's kernels.

vLLM calls ``register`` through the entry point ``qgemm`` of the group ``vllm.general_plugins``, in each of its
processes. For a model that doesn't use qgemm nothing changes: its loader's ``get_all_weights`` is only extended when a
model of the method "qgemm" is requested.
"""

from __future__ import annotations

import importlib

from qgemm.integrations.vllm.versions import installed_version, problem_with
from qgemm.warn import warn_user


def register() -> None:
    """Registers the method ``"qgemm"``, which the ``config.json`` of a quantized folder names, with vLLM.

    In an unsupported version of vLLM, a request for the method raises a ``ValueError`` that says so. This function
    itself raises nothing, because vLLM then couldn't start with any model; it warns if an import fails.
    """
    version = installed_version()
    try:
        if problem_with(version) is None:
            importlib.import_module("qgemm.integrations.vllm.config")
        else:
            importlib.import_module("qgemm.integrations.vllm.refused")
    except Exception as error:  # third-party modules may raise anything
        warn_user(
            f"vLLM {version} isn't built as this qgemm expects ({error}), so it serves no model of qgemm's: update "
            "qgemm, or install a vLLM of docs/vllm.md; other models are served as ever"
        )
