"""``extend_loader``: has vLLM read qgemm's folders under the names that it knows (``names.for_vllm``).

Since not every version has a hook for names, the loader's generator of tensors is wrapped; models of other methods get
what they always got.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.integrations.vllm.names import OLD_MIXTURE, for_vllm, manifest_of


def extend_loader() -> None:
    """Has vLLM's loader give tensors of qgemm's folders as ``for_vllm`` does; once, however often it is called."""
    own = DefaultModelLoader.get_all_weights
    if getattr(own, "_knows_qgemm", False):
        return

    @functools.wraps(own)
    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        tensors: Iterator[tuple[str, Tensor]] = own(self, model_config, model)
        manifest = manifest_of(model_config.hf_config) if model_config.quantization == QUANT_METHOD else None
        if manifest is None:
            return tensors
        old_mixture = any(OLD_MIXTURE in name for name, _ in model.named_modules())
        return for_vllm(tensors, manifest, old_mixture, model_config.hf_config.model_type == "gpt2")

    get_all_weights._knows_qgemm = True  # type: ignore[attr-defined]
    DefaultModelLoader.get_all_weights = get_all_weights
