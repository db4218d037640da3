"""Rows of other libraries, run on the same model as their own documents say, where they are installed.

Each quantizes the linear layers of the blocks, as qgemm does, and leaves the head alone.

- torchao: ``Int8DynamicActivationInt8WeightConfig`` (a scale per token and per channel, as scheme ``int8``) and
  ``Float8DynamicActivationFloat8WeightConfig(PerRow())``.
- bitsandbytes: ``Linear8bitLt`` with its default threshold of 6: columns of the input with a larger value are computed
  in 16 bits. It computes in float16.
- llm-compressor: ``SmoothQuantModifier`` then ``GPTQModifier(scheme="W8A8")`` (dynamic activations, as scheme
  ``int8``), and ``GPTQModifier(scheme="W4A16")`` (groups of 128, as scheme ``int4``). What is measured is the model
  that ``oneshot`` leaves: it rounds activations as the scheme says, and computes in bfloat16. Its size is that of the
  checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from benchmarks.accuracy.results import OUTLIERS, PLAIN
from benchmarks.accuracy.variants import IN_16_BITS, Variant

_LANGUAGE = (PLAIN, OUTLIERS)


def installed_peers() -> tuple[list[Variant], list[str]]:
    """The rows of the libraries that are installed, and a line for each of the others."""
    installed = {package: importlib.util.find_spec(package) is not None for package in _PACKAGES}
    rows = [row for package, table in _PACKAGES.items() if installed[package] for row in table]
    missing = [
        f"{', '.join(row.name for row in table)}: {package} is not installed"
        for package, table in _PACKAGES.items()
        if not installed[package]
    ]
    return rows, missing


def _torchao_int8(model: nn.Module, batches: list[Any]) -> nn.Module:
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig(), filter_fn=_is_chosen)
    return model


def _torchao_fp8(model: nn.Module, batches: list[Any]) -> nn.Module:
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    quantization.quantize_(model, config, filter_fn=_is_chosen)
    return model


def _bitsandbytes(model: nn.Module, batches: list[Any]) -> nn.Module:
    modules = importlib.import_module("bitsandbytes.nn")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says at every call that it casts to float16
    for name, linear in list(model.named_modules()):
        if not _is_chosen(linear, name):
            continue
        N, K = linear.weight.shape
        layer = modules.Linear8bitLt(
            K, N, bias=linear.bias is not None, has_fp16_weights=False, threshold=6.0, device="meta"
        )
        # It quantizes a weight that moves to a device.
        layer.weight = modules.Int8Params(linear.weight.data.cpu(), has_fp16_weights=False, requires_grad=False)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        model.set_submodule(name, layer.to(linear.weight.device).eval())
    return model


def _smoothquant_gptq(model: nn.Module, batches: list[Any]) -> nn.Module:
    smoothing = importlib.import_module("llmcompressor.modifiers.transform.smoothquant")
    return _oneshot(model, batches, [smoothing.SmoothQuantModifier(smoothing_strength=0.8), _gptq("W8A8")])


def _gptq_4_bits(model: nn.Module, batches: list[Any]) -> nn.Module:
    return _oneshot(model, batches, [_gptq("W4A16")])


def _gptq(scheme: str) -> Any:
    module = importlib.import_module("llmcompressor.modifiers.gptq")
    return module.GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])


def _oneshot(model: nn.Module, batches: list[Any], recipe: list[Any]) -> nn.Module:
    llmcompressor = importlib.import_module("llmcompressor")
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    compressed: nn.Module = llmcompressor.oneshot(
        model=model, dataset=loader, recipe=recipe, num_calibration_samples=len(batches)
    )
    return compressed


def _saved_bytes(model: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_compressed=True)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _is_chosen(module: nn.Module, name: str = "") -> bool:
    return type(module) is nn.Linear and "lm_head" not in name


_PACKAGES: dict[str, list[Variant]] = {
    "torchao": [
        Variant("torchao int8", _torchao_int8, seeded=False),
        Variant("torchao fp8", _torchao_fp8, seeded=False),
    ],
    "bitsandbytes": [Variant("bitsandbytes int8", _bitsandbytes, seeded=False)],
    "llmcompressor": [
        Variant(
            "llm-compressor SmoothQuant + GPTQ, W8A8", _smoothquant_gptq, subjects=_LANGUAGE, bytes_of=_saved_bytes
        ),
        Variant("llm-compressor GPTQ, W4A16", _gptq_4_bits, subjects=_LANGUAGE, note=IN_16_BITS, bytes_of=_saved_bytes),
    ],
}
PEERS = [row for table in _PACKAGES.values() for row in table]
"""All rows, installed or not."""
