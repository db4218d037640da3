"""qgemm inside of vLLM: its folders are served, and its kernels run vLLM's own int8 checkpoints.

vLLM calls ``register`` by the entry point ``qgemm`` of the group ``vllm.general_plugins``, in each of its processes.
Nothing changes for a model that qgemm has nothing to do with: ``get_all_weights`` of its loader is extended where a
model of the method "qgemm" is asked for.
"""

from __future__ import annotations

import importlib

from qgemm.integrations.vllm.versions import installed_version, problem_with
from qgemm.warn import warn_user


def register() -> None:
    """Has vLLM know the method ``"qgemm"``, with which ``config.json`` of a quantized folder names it.

    In a version of vLLM that isn't supported, asking for the method raises ``ValueError``, which says so. Raises
    nothing itself, with which vLLM would start for no model: what it can't import it warns of.
    """
    version = installed_version()
    try:
        if problem_with(version) is None:
            importlib.import_module("qgemm.integrations.vllm.config")
        else:
            importlib.import_module("qgemm.integrations.vllm.refused")
    except Exception as error:  # other people's modules raise anything
        warn_user(
            f"vLLM {version} isn't built as this qgemm expects ({error}), so it serves no model of qgemm's: update "
            "qgemm, or install a vLLM of docs/vllm.md; other models are served as ever"
        )
