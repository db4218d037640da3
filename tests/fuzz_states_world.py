"""A model of ``fuzz_states``, and what is done to it: ``both_...`` changes numbers, ``one_...`` changes none."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from families.example import Example
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import PreTrainedModel

import qgemm
from qgemm.calibration import GPTQ, MSEWeights, SmoothQuant
from qgemm.model.swap import put
from qgemm.nn import LinearLayer, QuantLayer
from qgemm.nn.quant_layer import float_dtype

SCHEMES = ["int8", "int8-static", "int8-hadamard", "int8-static-asymmetric", "int8-outliers-16", "fp8", "fp8-block"]
SCHEMES += ["int4", "int4-32-asymmetric", "int4-int8", "int8-weight", "mxfp4", "nvfp4", "nf4", "int4-32-ordered"]
RECIPES = [None, None, [SmoothQuant()], [GPTQ()], [MSEWeights()]]


class UnfitError(Exception):
    """The operation is not for this model, in this state."""


def needs(condition: Any) -> None:
    if not condition:
        raise UnfitError


def do_nothing(*args: Any) -> None:
    """A hook."""


@dataclass
class World:
    """``is_twin``: whether this is the model without detours. ``note``: what the last operation chose."""

    build: Callable[[], Example]
    folder: Path
    is_twin: bool
    model: Any
    inputs: dict[str, Any]
    rng: random.Random = field(default_factory=random.Random)
    note: str = ""

    @property
    def inner(self) -> Any:
        """The model inside of PEFT's."""
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model

    def holds(self, *kinds: type[nn.Module]) -> bool:
        return any(isinstance(module, kinds) for module in self.model.modules())

    @property
    def is_pretrained(self) -> bool:
        return isinstance(self.model, PreTrainedModel)  # and has no adapter

    def arguments(self, model: Any) -> dict[str, Any]:
        """The inputs, in the dtype of ``model``."""
        dtype = float_dtype(model)
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.inputs.items()}

    def choose(self, *ways: Any) -> Any:
        way = self.rng.choice(ways)
        self.note = f"{self.note} {way}".strip()
        return way

    def new_folder(self) -> Path:
        return self.folder / str(len(list(self.folder.iterdir())))

    def load_state(self, model: Any, state: dict[str, Any], assign: bool) -> None:
        needs(not assign or self.inner is self.model)  # transformers can't tie a head with an adapter
        model.load_state_dict(state, assign=assign)
        if isinstance(model, PreTrainedModel):
            model.tie_weights()
        elif hasattr(model, "embed"):
            model.head.weight = model.embed.weight

    def both_quantize(self) -> None:
        names = [name for name, m in self.inner.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
        needs(names)
        layers = f"*{self.choose(*names).rpartition('.')[2]}"
        schemes = {layers: self.choose(*SCHEMES, None), "*": self.choose(*SCHEMES)}
        options: dict[str, Any] = {"scheme": schemes, "fuse": self.choose(True, False, False)}
        if self.choose(True, False):
            options["skip"] = self.choose(*names)
        if is_calibrated := any("static" in each or "outliers" in each for each in schemes.values() if each):
            options |= {"calibration": [self.arguments(self.model)], "recipe": self.choose(*RECIPES)}
        is_float = self.is_pretrained and not self.holds(QuantLayer)
        way = self.choose("in place", *["from_pretrained"] * is_float, *["files"] * (is_float and not is_calibrated))
        if way == "in place" or self.is_twin:
            qgemm.quantize_model(self.inner, **options)
            return
        copy.deepcopy(self.model).save_pretrained(folder := self.new_folder())  # which writes to the config
        if way == "from_pretrained":
            self.model = type(self.model).from_pretrained(folder, quantization_config=qgemm.QGemmConfig(**options))
        else:
            fuse = options.pop("fuse")
            qgemm.quantize_checkpoint(folder, quantized := self.new_folder(), **options, progress=False)
            self.model = qgemm.load_quantized(quantized, fuse=fuse)

    def both_quantize_part(self) -> None:
        names = [name for name, m in self.inner.named_modules() if name and list(m.children()) and "lora" not in name]
        qgemm.quantize_model(self.inner.get_submodule(self.choose(*names)), self.choose("int8", "int4", "fp8"))

    def both_cast(self) -> None:
        stored = self.model.state_dict()
        others = {name: buffer.clone() for name, buffer in self.model.named_buffers() if name not in stored}
        self.model.to(self.choose(torch.float32, torch.float16, torch.bfloat16))
        for name, value in others.items() if isinstance(self.inner, PreTrainedModel) else ():
            self.model.get_buffer(name).data = value  # as from_pretrained computes it

    def both_dequantize(self) -> None:
        needs(isinstance(self.inner, PreTrainedModel) and self.holds(QuantLayer))
        self.inner.dequantize()

    def both_adapt(self) -> None:
        if not isinstance(self.model, peft.PeftModel):
            names = [name for name, m in self.model.named_modules() if isinstance(m, nn.Linear | LinearLayer)]
            needs(self.is_pretrained and len(names) > 1)
            config = peft.LoraConfig(target_modules=self.rng.sample(names, 2), use_dora=self.choose(True, False))
            self.model = peft.get_peft_model(self.model, config).eval()
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
            return
        result = getattr(self.model, self.choose("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload"))()
        self.model = self.model if result is None else result

    def both_change_values(self) -> None:
        state, way = copy.deepcopy(self.model.state_dict()), self.choose("in place", "copy", "assign")
        for name, value in state.items():
            if value.itemsize > 1 and value.is_floating_point() and name.endswith(("norm.weight", "bias", "_scale")):
                state[name] = (value * (1 + torch.rand(value.shape))).to(value.dtype)
        if way == "in place":
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(state[name])
        else:
            self.load_state(self.model, state, way == "assign")

    def one_fuse(self) -> None:
        if self.choose("fuse", "fuse", "unfuse") == "fuse":
            qgemm.fusion_report(qgemm.fuse(self.model, inputs=self.arguments(self.model)))
        else:
            qgemm.unfuse(self.model)

    def one_copy(self) -> None:
        way = self.choose("deepcopy", "pickle", "torch.save", "shared")
        if way == "torch.save":
            torch.save(self.model, file := io.BytesIO())
            self.model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        elif way == "shared":
            self.model.share_memory()
        else:
            self.model = copy.deepcopy(self.model) if way == "deepcopy" else pickle.loads(pickle.dumps(self.model))

    def one_save_and_load(self) -> None:
        needs(self.holds(QuantLayer) and self.inner is self.model)
        folder, size, fuse = (
            self.new_folder(),
            self.choose("5GB", 5000),
            self.is_pretrained and self.choose(True, False),
        )
        if self.is_pretrained and self.choose(True, False):
            self.model.save_pretrained(folder, max_shard_size=size)
            config = {"quantization_config": qgemm.QGemmConfig(fuse=True)} if fuse else {}
            self.model = type(self.model).from_pretrained(folder, **config)
            return
        build = None if self.is_pretrained else lambda: self.build().model
        for overwrite in (False, True):
            qgemm.save_quantized(self.model, folder, max_shard_size=size, overwrite=overwrite)
            self.model = qgemm.load_quantized(folder, fuse=fuse, model=build)

    def one_load_values(self) -> None:
        way, empty = self.choose("copy", "assign", "safetensors"), copy.deepcopy(self.model)
        for parameter in empty.parameters():
            parameter.data = torch.zeros_like(parameter)
        if way == "safetensors":
            save_model(self.model, path := str(self.new_folder()))
            load_model(empty, path)
        else:
            self.load_state(empty, self.model.state_dict(), way == "assign")
        self.model = empty

    def one_hook(self) -> None:
        self.rng.choice(list(self.model.modules())).register_forward_hook(do_nothing)

    def one_generate(self) -> None:
        needs(isinstance(self.inner, PreTrainedModel) and self.inner.can_generate() and len(self.inputs) == 1)
        qgemm.fast_generate(self.inner, self.choose(True, False))
        ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"custom_generate": qgemm.generate}]
        results = [self.model.generate(**self.inputs, max_new_tokens=5, **way) for way in self.rng.sample(ways, 2)]
        if float_dtype(self.model) == torch.float32:  # in 16 bits, scores may be equal
            assert torch.equal(*results), results

    def one_interrupted(self) -> None:
        needs(self.model is self.inner)
        with mock.patch("qgemm.model.swap.put", wraps=put, side_effect=[mock.DEFAULT, KeyboardInterrupt]):
            qgemm.quantize_model(self.model)
        raise AssertionError("it wasn't interrupted")

    def one_call(self) -> None:
        arguments, way = self.arguments(self.model), self.choose("functional", "inference", "offloaded", "fast")
        with torch.no_grad(), torch.inference_mode(way == "inference"):
            if way == "functional":
                torch.func.functional_call(self.model, dict(self.model.named_parameters()), (), arguments)
            elif way == "offloaded":
                needs(self.is_pretrained and not self.holds(nn.MultiheadAttention))
                cpu_offload(self.model, torch.device("cpu"))(**arguments)
                remove_hook_from_submodules(self.model)
                self.model.tie_weights()
            else:
                qgemm.fast_forward(self.model, way == "fast")(**arguments)
