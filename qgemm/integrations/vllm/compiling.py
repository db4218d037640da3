"""``extend_compiler``: makes vLLM's compiler put qgemm's fused kernels into a model's graphs (``fusion.fuse``)."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import get_current_vllm_config

from qgemm.integrations.vllm import fusion
from qgemm.warn import warn_user

_PASS = "post_grad_custom_post_pass"
"""The pass that vLLM calls after its own passes, before its operators become kernels."""


class FusionPass(InductorPass):
    """``fuse`` as a pass of vLLM's compiler."""

    def __call__(self, graph: Any) -> None:
        """Changes ``graph``. If that fails, it warns; whatever is fused by then is correct, like the unchanged rest."""
        try:
            fusion.fuse(graph)
        except Exception as error:  # graphs belong to vLLM and PyTorch, and change between versions
            warn_user(f"a model is compiled with fewer fused kernels than it could have ({error})")

    def uuid(self) -> str:
        """The key for caching compiled graphs; it changes with the sources."""
        return str(self.hash_source(inspect.getsource(fusion)))


def extend_compiler() -> None:
    """Makes vLLM compile the current model with fused kernels, unless the user has a pass of their own."""
    passes = get_current_vllm_config().compilation_config.inductor_compile_config
    passes.setdefault(_PASS, FusionPass())
