"""Rows of other libraries, run on the same model as their own documents say, where they are installed.

Each quantizes the linear layers of the blocks, as qgemm does, and leaves the head alone.

- torchao: ``Int8DynamicActivationInt8WeightConfig`` (a scale per token and per channel, as scheme ``int8``),
  ``Float8DynamicActivationFloat8WeightConfig(PerRow())`` and ``Int8WeightOnlyConfig`` (as ``int8-weight``).
- bitsandbytes: ``Linear8bitLt`` with its default threshold of 6: columns of the input with a larger value are computed
  in 16 bits. It computes in float16. ``Linear4bit`` in nf4, with doubly quantized scales as is its default, computes in
  bfloat16.
- AutoRound: ``W4A16`` (groups of 128, as scheme ``int4``), its default of 200 steps a block, on the batches. What is
  measured is the model that ``quantize`` leaves, whose weights are rounded.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.accuracy.measure import weight_bytes
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


def _torchao(config: Callable[[Any], Any]) -> Callable[[nn.Module, list[Any]], nn.Module]:
    """``config``: makes the configuration from the module ``torchao.quantization``."""

    def build(model: nn.Module, batches: list[Any]) -> nn.Module:
        torchao = importlib.import_module("torchao.quantization")
        torchao.quantize_(model, config(torchao), filter_fn=_is_chosen)
        return model

    return build


def _bitsandbytes_int8(model: nn.Module, batches: list[Any]) -> nn.Module:
    modules = importlib.import_module("bitsandbytes.nn")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says at every call that it casts to float16

    def layer(N: int, K: int, bias: bool, weight: Tensor) -> Any:
        made = modules.Linear8bitLt(K, N, bias=bias, has_fp16_weights=False, threshold=6.0, device="meta")
        made.weight = modules.Int8Params(weight, has_fp16_weights=False, requires_grad=False)
        return made

    return _with_layers(model, layer)


def _bitsandbytes_nf4(model: nn.Module, batches: list[Any]) -> nn.Module:
    modules = importlib.import_module("bitsandbytes.nn")

    def layer(N: int, K: int, bias: bool, weight: Tensor) -> Any:
        made = modules.Linear4bit(K, N, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        made.weight = modules.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
        return made

    return _with_layers(model, layer)


def _with_layers(model: nn.Module, make: Callable[[int, int, bool, Tensor], Any]) -> nn.Module:
    """The model with bitsandbytes' layers, which quantize a weight that moves to a device."""
    for name, linear in list(model.named_modules()):
        if not _is_chosen(linear, name):
            continue
        N, K = linear.weight.shape
        layer = make(N, K, linear.bias is not None, linear.weight.data.cpu())
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        model.set_submodule(name, layer.to(linear.weight.device).eval())
    return model


def _auto_round(model: nn.Module, batches: list[Any]) -> nn.Module:
    auto_round = importlib.import_module("auto_round")
    rows = [row for batch in batches for row in batch["input_ids"].cpu()]
    method = auto_round.AutoRound(
        model,
        scheme="W4A16",
        tokenizer=object(),  # wanted, and of no use for data that are tokens
        dataset=DataLoader([{"input_ids": row} for row in rows], batch_size=1),  # type: ignore[arg-type]
        nsamples=len(rows),
        seqlen=len(rows[0]),
        device_map=str(next(model.parameters()).device),
    )
    rounded: nn.Module = method.quantize()[0]
    return rounded


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


def _in_4_bits(model: Any) -> int:
    """Bytes of a bfloat16 model as AutoRound stores it: int4, and for each group a float16 scale and an int4 zero."""
    rounded: int = sum(linear.weight.numel() for name, linear in model.named_modules() if _is_chosen(linear, name))
    return weight_bytes(model) - rounded * 2 + rounded * (128 * 4 + 16 + 4) // (128 * 8)


def _saved_bytes(model: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_compressed=True)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _is_chosen(module: nn.Module, name: str = "") -> bool:
    return type(module) is nn.Linear and "lm_head" not in name


_PACKAGES: dict[str, list[Variant]] = {
    "torchao": [
        Variant("torchao int8", _torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig()), seeded=False),
        Variant(
            "torchao fp8",
            _torchao(lambda ao: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())),
            seeded=False,
        ),
        Variant("torchao int8 weights", _torchao(lambda ao: ao.Int8WeightOnlyConfig()), seeded=False, note=IN_16_BITS),
    ],
    "bitsandbytes": [
        Variant("bitsandbytes int8", _bitsandbytes_int8, seeded=False),
        Variant("bitsandbytes nf4", _bitsandbytes_nf4, seeded=False, note=IN_16_BITS),
    ],
    "auto_round": [
        Variant("AutoRound, W4A16", _auto_round, subjects=_LANGUAGE, note=IN_16_BITS, bytes_of=_in_4_bits),
    ],
    "llmcompressor": [
        Variant(
            "llm-compressor SmoothQuant + GPTQ, W8A8", _smoothquant_gptq, subjects=_LANGUAGE, bytes_of=_saved_bytes
        ),
        Variant("llm-compressor GPTQ, W4A16", _gptq_4_bits, subjects=_LANGUAGE, note=IN_16_BITS, bytes_of=_saved_bytes),
    ],
}
PEERS = [row for table in _PACKAGES.values() for row in table]
"""All rows, installed or not."""
