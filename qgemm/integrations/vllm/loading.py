"""``extend_loader``: makes vLLM read qgemm's folders under the names that it knows (``names.for_vllm``).

Not every version has a hook for names, so the loader's generator of tensors is wrapped; for models of other methods it
yields what it always did. Fused experts take their parameters from it before the model sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.integrations.vllm.experts import QGemmExpertsMethod, are_experts
from qgemm.integrations.vllm.linear import QGemmLinearMethod
from qgemm.integrations.vllm.names import OLD_MIXTURE, for_vllm, manifest_of

_METHODS = (QGemmLinearMethod, QGemmExpertsMethod)


def extend_loader() -> None:
    """Makes vLLM's loader yield tensors of qgemm's folders as ``for_vllm`` does; has no effect when called again."""
    own = DefaultModelLoader.get_all_weights
    if getattr(own, "_knows_qgemm", False):
        return

    @functools.wraps(own)
    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        tensors: Iterator[tuple[str, Tensor]] = own(self, model_config, model)
        manifest = manifest_of(model_config.hf_config) if model_config.quantization == QUANT_METHOD else None
        if manifest is None:
            return tensors
        refuse_float(model, manifest)
        old_mixture = any(OLD_MIXTURE in name for name, _ in model.named_modules())
        return for_vllm(tensors, manifest, experts_of(model), old_mixture, model_config.hf_config.model_type == "gpt2")

    get_all_weights._knows_qgemm = True  # type: ignore[attr-defined]
    DefaultModelLoader.get_all_weights = get_all_weights


def experts_of(model: nn.Module) -> dict[str, Callable[[str, Tensor], None]]:
    """The functions that load parameters of the fused experts of ``model``, by the parameters' names in the files."""
    found: dict[str, Callable[[str, Tensor], None]] = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if are_experts(layer) and isinstance(method, QGemmExpertsMethod):
            found[method.name_in_files] = functools.partial(method.load, layer)
    return found


def refuse_float(model: nn.Module, manifest: Manifest) -> None:
    """Raises ``ValueError`` for a quantized layer that ``model`` requests no method for, such as GPT-OSS's head."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if name in manifest.layers and method is not None and not isinstance(method, _METHODS):
            raise ValueError(
                f"{name} is quantized, but vLLM's {type(model).__name__} has it in float only: leave it in float (skip)"
            )
