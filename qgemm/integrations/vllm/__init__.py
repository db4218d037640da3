"""qgemm inside of vLLM: its folders are served, and its kernels run vLLM's own int8 checkpoints.

vLLM calls ``register`` by the entry point ``qgemm`` of the group ``vllm.general_plugins``, in each of its processes.
Nothing changes for a model that qgemm has nothing to do with: the modules here that import vLLM are imported, and
``get_all_weights`` of its loader is extended, where a model of the method "qgemm" is asked for.
"""

from __future__ import annotations

import importlib

from qgemm.integrations.vllm.versions import installed_version, problem_with


def register() -> None:
    """Has vLLM know the method ``"qgemm"``, with which ``config.json`` of a quantized folder names it.

    In a version of vLLM that isn't supported, asking for the method raises ``ValueError``, which says so.
    """
    if problem_with(installed_version()) is None:
        importlib.import_module("qgemm.integrations.vllm.config")
    else:
        importlib.import_module("qgemm.integrations.vllm.refused")
