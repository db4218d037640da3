"""Layers of other libraries, bfloat16 in and out, where they are installed. A GPU is needed.

Each is used as its own documents say: torchao under ``torch.compile`` in its default mode, gemlite with the tuned
configs that it ships and its own autotuning where it has none, bitsandbytes without outlier columns (threshold 0).
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.providers import FP8, FP8_ERROR, INT8_ERROR, Provider, linear_of


def installed_peers(names: set[str] | None = None) -> tuple[list[Provider], list[str]]:
    """The peers that can be imported, of those in ``names`` if given; and a line for each that can't."""
    providers: list[Provider] = []
    missing: list[str] = []
    for name, (package, build) in PEERS.items():
        if names is not None and name not in names:
            continue
        if importlib.util.find_spec(package) is None:
            missing.append(f"{name}: {package} is not installed, so it is left out")
            continue
        try:
            providers.append(build())
        except Exception as error:  # a peer that breaks at import must not stop the others
            missing.append(f"{name}: {package} can't be used here, so it is left out ({first_line(error)})")
    return providers, missing


def first_line(error: BaseException) -> str:
    """The type and the first line of an error's message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _torchao_int8() -> Provider:
    quantization = importlib.import_module("torchao.quantization")
    return _torchao("torchao int8", torch.int8, INT8_ERROR, quantization.Int8DynamicActivationInt8WeightConfig())


def _torchao_fp8() -> Provider:
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    return _torchao("torchao fp8", FP8, FP8_ERROR, config)


def _torchao(name: str, dtype: torch.dtype, max_error: float, config: Any) -> Provider:
    quantize = importlib.import_module("torchao.quantization").quantize_
    # One compiled function for every copy of a weight; it is compiled again for every M.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096

    @torch.compile(dynamic=False)
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def prepare_weight(weight: Tensor) -> Tensor:
        layer = nn.Sequential(linear_of(weight.clone()))
        quantize(layer, config)
        quantized: Tensor = layer[0].weight  # type: ignore[assignment]
        return quantized

    return _layer_provider(name, dtype, max_error, prepare_weight, linear)


def _gemlite() -> Provider:
    helper = importlib.import_module("gemlite.helper")

    def prepare_weight(weight: Tensor) -> Any:
        return helper.A8W8_int8_dynamic(device=weight.device).from_linear(linear_of(weight), del_orig=False)

    return _layer_provider("gemlite int8", torch.int8, INT8_ERROR, prepare_weight, lambda x, layer: layer(x))


def _bitsandbytes() -> Provider:
    modules = importlib.import_module("bitsandbytes.nn")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says at every call that it casts to float16

    def prepare_weight(weight: Tensor) -> Any:
        N, K = weight.shape
        layer = modules.Linear8bitLt(K, N, bias=False, has_fp16_weights=False, threshold=0.0, device="meta")
        # It quantizes a weight that moves from the CPU to the GPU.
        layer.weight = modules.Int8Params(weight.cpu(), has_fp16_weights=False, requires_grad=False)
        return layer.to(weight.device).eval()

    return _layer_provider("bitsandbytes int8", torch.int8, INT8_ERROR, prepare_weight, lambda x, layer: layer(x))


PEERS: dict[str, tuple[str, Callable[[], Provider]]] = {
    "torchao int8": ("torchao", _torchao_int8),
    "torchao fp8": ("torchao", _torchao_fp8),
    "gemlite int8": ("gemlite", _gemlite),
    "bitsandbytes int8": ("bitsandbytes", _bitsandbytes),
}
"""By name: the package, and what makes its provider."""


def _layer_provider(
    name: str,
    weight_dtype: torch.dtype,
    max_error: float,
    prepare_weight: Callable[[Tensor], Any],
    run: Callable[[Any, Any], Tensor],
) -> Provider:
    bf16 = torch.bfloat16
    return Provider(name, ("layer",), bf16, weight_dtype, bf16, max_error, lambda x: x.to(bf16), prepare_weight, run)
