"""``extend_compiler``: has vLLM's compiler put qgemm's fused kernels into the graphs of a model (``fusion.fuse``)."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import get_current_vllm_config

from qgemm.integrations.vllm import fusion
from qgemm.warn import warn_user

_PASS = "post_grad_custom_post_pass"
"""vLLM calls what is there after its own passes, and before its operators become kernels."""


class FusionPass(InductorPass):
    """``fuse`` as vLLM's compiler calls it."""

    def __call__(self, graph: Any) -> None:
        """Changes ``graph``. Warns where that fails: what has been fused by then, and the rest as it was, is right."""
        try:
            fusion.fuse(graph)
        except Exception as error:  # graphs are vLLM's and PyTorch's own, and change with their versions
            warn_user(f"a model is compiled with fewer fused kernels than it could have ({error})")

    def uuid(self) -> str:
        """By which compiled graphs are kept: another one for other sources."""
        return str(self.hash_source(inspect.getsource(fusion)))


def extend_compiler() -> None:
    """Has the model that vLLM makes now be compiled with fused kernels, but where the user has a pass of their own."""
    passes = get_current_vllm_config().compilation_config.inductor_compile_config
    passes.setdefault(_PASS, FusionPass())
