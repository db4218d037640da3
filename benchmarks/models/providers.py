"""What becomes of a float model of transformers before it is timed, and how its ``generate`` is called."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.results import DECODE, ENCODE, FIRST_TOKEN, HTTP, PREFILL, SERVE

STATIC_CACHE: Mapping[str, Any] = {"cache_implementation": "static"}
"""With it transformers compiles the steps of decoding, on a GPU."""
DEFAULT = (PREFILL, DECODE, SERVE, FIRST_TOKEN, ENCODE)
_OF_LAYERS = (PREFILL, DECODE, SERVE, FIRST_TOKEN)


@dataclass(frozen=True)
class Provider:
    """One way to run a model.

    - ``prepare``: changes the float model in place; returns sentences that a reader of its figures has to know.
    - ``options``: of ``generate``.
    - ``package``: what must be installed.
    - ``is_coarse``: whether its weights are so coarse that outputs of random layers have little in common with the
      float model's: then they are compared with float products of those weights.
    """

    name: str
    prepare: Callable[[Any], list[str]]
    options: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = DEFAULT
    package: str = "torch"
    is_coarse: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return importlib.util.find_spec(self.package) is not None


def _float(model: Any) -> list[str]:
    return []


def _qgemm(model: Any, scheme: str = "int8", **options: Any) -> list[str]:
    """``options``: of ``fast_generate``."""
    import qgemm

    qgemm.quantize_model(model, scheme, fuse=True, progress=False)
    if model.can_generate():
        qgemm.fast_generate(model, **options)
    return [str(qgemm.fusion_report(model)).splitlines()[-1]]


def _qgemm_host_embeddings(model: Any) -> list[str]:
    import qgemm

    notes = _qgemm(model)
    return [*notes, f"{qgemm.offload_embeddings(model) / 1e9:.2f} GB of embeddings in the host's memory"]


def _torchao(model: Any) -> list[str]:
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig(), filter_fn=_is_in_a_layer)
    return []


def _gemlite(model: Any) -> list[str]:
    helper = importlib.import_module("gemlite.helper")
    for name, module in list(model.named_modules()):
        if _is_in_a_layer(module, name):
            parent, _, child = name.rpartition(".")
            quantized = helper.A8W8_int8_dynamic(device=module.weight.device).from_linear(module)
            setattr(model.get_submodule(parent), child, quantized)
    return []


def _is_in_a_layer(module: nn.Module, name: str) -> bool:
    """Linear layers but for output heads, which qgemm leaves in 16 bits too."""
    return isinstance(module, nn.Linear) and "lm_head" not in name


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("bf16", _float, measures=(*DEFAULT, HTTP)),
        Provider("bf16 compiled", _float, STATIC_CACHE, (DECODE, FIRST_TOKEN)),
        Provider("qgemm", _qgemm, measures=(*DEFAULT, HTTP)),
        Provider("qgemm int8 cache", partial(_qgemm, cache_dtype=torch.int8), measures=(DECODE, SERVE)),
        Provider("qgemm host embeddings", _qgemm_host_embeddings, measures=(PREFILL, DECODE, SERVE)),
        *(
            Provider(f"qgemm {scheme}", partial(_qgemm, scheme=scheme), measures=_OF_LAYERS, is_coarse=True)
            for scheme in ("int4", "int4-int8")
        ),
        Provider("torchao int8", _torchao, STATIC_CACHE, _OF_LAYERS, "torchao"),
        Provider("gemlite int8", _gemlite, STATIC_CACHE, _OF_LAYERS, "gemlite"),
        # ``vllm_worker.py`` measures these; they have weights of their own.
        *(
            Provider(f"vllm {kind}", _float, {}, (PREFILL, DECODE, SERVE, HTTP), "vllm")
            for kind in ("bf16", "int8", "fp8")
        ),
        Provider("vllm qgemm", _float, {}, (PREFILL, DECODE, SERVE), "vllm"),
    )
}
BASE = "bf16"
"""Ratios are to it; on a CPU it is float32."""
