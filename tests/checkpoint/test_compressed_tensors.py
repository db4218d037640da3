"""Checkpoints that the compressed-tensors library wrote, run in int8; damaged ones, refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors, logits, needs_the_library, relative
from checkpoint.models import tiny_llama
from checkpoint.rewriting import edited
from qgemm import QuantLinear
from qgemm.checkpoint import CheckpointError

pytestmark = needs_the_library  # it writes every checkpoint here

LAYER = "model.layers.0.self_attn.q_proj"


def write_with_library(
    folder: Path, *, static: bool = False, strategy: str = "channel", symmetric: bool = True, tied: bool = False
) -> None:
    """A bfloat16 Llama quantized by compressed-tensors, saved by transformers."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    model = tiny_llama(tied).to(torch.bfloat16).eval()
    activations = {"num_bits": 8, "symmetric": symmetric, "strategy": "tensor" if static else "token"}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": strategy},
        "input_activations": {**activations, "dynamic": not static},
    }
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head", "re:.*layers.1.mlp.up_proj"])
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            dim = None if strategy == "tensor" else 1
            weight = module.weight.detach()
            low, high = weight.amin(dim, keepdim=True), weight.amax(dim, keepdim=True)
            scale, _ = calculate_qparams(low, high, scheme.weights)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if static:
                module.input_scale.data.fill_(0.04)
                if not symmetric:
                    module.input_zero_point.data.fill_(-20)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@pytest.fixture(scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    write_with_library(folder)
    return folder


@pytest.fixture
def folder(_written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_written, tmp_path / "copy"))


CASES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"static": True},
    "static asymmetric": {"static": True, "symmetric": False},
    "per tensor": {"strategy": "tensor"},
    "tied": {"tied": True},
}


@pytest.mark.slow(quick=["dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_the_library_runs_in_int8(case: str, tmp_path: Path) -> None:
    write_with_library(tmp_path, **CASES[case])
    loaded = qgemm.load_quantized(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    compressed = {name: value.clone() for name, value in reference.state_dict().items()}
    # The library rounds each operation of its own to bfloat16, about 0.4 %, on top of int8 activations.
    bounds = {"static": 0.06, "static asymmetric": 0.12}  # which it adds zero points in, too
    assert relative(logits(loaded), logits(reference)) < bounds.get(case, 0.015)
    if "static" in case:
        exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert relative(logits(qgemm.load_quantized(tmp_path).float()), logits(exact)) < 1e-5
    layer = loaded.get_submodule(LAYER)
    assert isinstance(layer, QuantLinear)
    schemes = {"static": "int8-static", "static asymmetric": "int8-static-asymmetric"}
    assert layer.scheme.name == schemes.get(case, "int8")
    assert layer.weight.dtype == torch.int8
    assert layer.weight_scale.dtype == torch.float32
    assert torch.equal(layer.weight, compressed[f"{LAYER}.weight"])
    scale = compressed[f"{LAYER}.weight_scale"]
    assert scale.dtype == torch.bfloat16
    assert torch.equal(layer.weight_scale, scale.float().reshape(-1).expand(32))
    if "static" in case:
        assert layer.input_scale is not None
        assert layer.input_scale.item() == torch.tensor(0.04, dtype=torch.bfloat16).item()
    kept = [name for name, module in loaded.named_modules() if isinstance(module, nn.Linear)]
    assert kept == ["model.layers.1.mlp.up_proj", "lm_head"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (case == "tied")


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_dequantized_weights_in_plain_pytorch_give_the_same(case: str, tmp_path: Path) -> None:
    write_with_library(tmp_path, **CASES[case])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    int8 = {name: value.clone() for name, value in theirs.state_dict().items()}
    logits(theirs)  # upon which the library puts float weights in the int8 ones' place
    plain = tiny_llama(tied=case == "tied").eval()
    weights = {name: theirs.state_dict()[name].float() for name in plain.state_dict()}
    for name in weights:
        if int8[name].dtype == torch.int8:
            exact = int8[name].float() * int8[f"{name}_scale"].float()
            assert torch.equal(weights[name], exact.bfloat16().float())
            weights[name] = exact
    plain.load_state_dict(weights)
    loaded = qgemm.load_quantized(tmp_path).float()
    float_logits = logits(plain)

    def to_int8_and_back(scale: Tensor | None, zero: Tensor | None) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor]) -> Tensor:
            (x,) = args
            step = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale
            if zero is not None:
                return ((x / step).round() + zero).clamp(-128, 127).sub(zero) * step
            return (x / step).round().clamp(-127, 127) * step

        return hook

    for name, layer in loaded.named_modules():
        if isinstance(layer, QuantLinear):
            plain.get_submodule(name).register_forward_pre_hook(
                to_int8_and_back(layer.input_scale, getattr(layer, "input_zero_point", None))
            )
    assert relative(logits(loaded), logits(plain)) < 1e-5
    # Activations in int8 are all the difference that is left; one scale for all layers is coarse.
    assert relative(logits(loaded), float_logits) < (0.12 if "static" in case else 0.015)


def test_the_weights_in_float32_give_the_same_within_int8_activations(folder: Path) -> None:
    loaded = qgemm.load_quantized(folder).float()
    dequantized = qgemm.load_quantized(folder).float()
    for name, module in list(dequantized.named_modules()):
        if isinstance(module, QuantLinear):
            parent, _, leaf = name.rpartition(".")
            setattr(dequantized.get_submodule(parent), leaf, module.dequantize(torch.float32))
    assert 1e-5 < relative(logits(loaded), logits(dequantized)) < 0.01


def test_scales_of_a_wide_layer_take_no_more_memory_than_they_have_values(folder: Path) -> None:
    n = 300_000  # n * n floats are 360 GB

    def replace(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors["0.weight"] = torch.ones(n, 1, dtype=torch.int8)
        tensors["0.weight_scale"] = torch.ones(n, 1)

    edit_tensors(folder, replace)
    loaded = qgemm.load_quantized(folder, model=lambda: nn.Sequential(nn.Linear(1, n, bias=False)))
    assert loaded[0].weight_scale.untyped_storage().nbytes() == 4 * n


def test_older_configs(folder: Path) -> None:
    with edited(folder / "config.json") as config:
        config["torch_dtype"] = config.pop("dtype")
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        del weights["strategy"], weights["type"], weights["symmetric"]
        weights["group_size"] = -1
    edit_tensors(folder, lambda t: t.update({f"{LAYER}.weight_zero_point": torch.zeros(32, 1, dtype=torch.int8)}))
    assert isinstance(qgemm.load_quantized(folder).get_submodule(LAYER), QuantLinear)


def group(part: str | None = None, **values: Any) -> Callable[[dict[str, Any]], None]:
    def edit(quantization: dict[str, Any]) -> None:
        target = quantization["config_groups"]["group_0"]
        (target if part is None else target[part]).update(values)

    return edit


def whole(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda quantization: quantization.update(values)


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "asymmetric": (
        group("weights", symmetric=False),
        r"group_0, such as layer model.layers.0\S+, has int8 input_activations, .* with asymmetric int8 weights",
    ),
    "4 bits": (
        group("weights", num_bits=4),
        r"values go from -\d+ to \d+; those of 4 bits",
    ),
    "3 bits": (group("weights", num_bits=3), r"group_0, such as layer model.layers.0\S+, has weights of 3 bits"),
    "fp8": (group("weights", type="float"), r"has int8 input_activations, dynamic per token, with fp8 weights"),
    "groups": (group("weights", strategy="group", group_size=16), r"with int8 weights per group of 16"),
    "groups by size": (group("weights", strategy=None, group_size=16), r"with int8 weights per group of 16"),
    "dynamic weights": (group("weights", dynamic=True), r"dynamic weights"),
    "16 bits": (group("input_activations", num_bits=16), r"has int16 input_activations"),
    "asymmetric input": (group("input_activations", symmetric=False), r"has asymmetric input_activations"),
    "static says the config": (
        group("input_activations", strategy="tensor", dynamic=False),
        r"activations are static, but layer \S+ has no input_scale",
    ),
    "outputs": (group(output_activations={"num_bits": 8}), r"output_activations"),
    "packed": (group(format="pack-quantized"), r"weight_packed is missing; it must be torch.int32"),
    "scale of a tensor": (
        group("weights", strategy="tensor"),
        r"weight_scale is torch.bfloat16 \[\d+, 1\]; it must be",
    ),
    "no object": (group(weights=[1]), r"weights that are no object"),
    "odd values": (group("weights", num_bits=[8], strategy={}), r"has weights of \[8\] bits"),
    "initialized": (whole(quantization_status="initialized"), r"quantization_status is 'initialized'"),
    "transform": (whole(transform_config={"config_groups": {"u": {}}}), r"transform_config"),
    "sparse": (whole(sparsity_config={"format": "sparse-bitmask"}), r"sparsity_config"),
    "no groups": (whole(config_groups={}), r"config_groups must be"),
    "preset": (whole(config_groups={"W8A8": ["Linear"]}), r"config_groups.W8A8 must be an object"),
    "another library": (
        whole(quant_method="vptq"),
        r"quant_method is 'vptq'; the formats supported are 'qgemm', 'compressed-tensors', .*'bitsandbytes'",
    ),
    "no name": (whole(quant_method=["awq"]), r"quant_method is \['awq'\]; the formats supported"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_refused_configs(case: str, folder: Path) -> None:
    edit, message = CONFIGS[case]
    edit_quantization(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder)


def put(leaf: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = make(tensors[f"{LAYER}.{leaf}"])

    return edit


def add(leaf: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{leaf}": value})


def only_floats(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "NaN": (put("weight_scale", lambda s: s * torch.nan), rf"{LAYER}.weight_scale holds NaN"),
    "negative": (put("weight_scale", lambda s: -s), r"weight: holds -128 in rows with a negative scale"),
    "infinite in float32": (put("weight_scale", lambda s: s.double() + 1e300), r"holds NaN, Inf"),
    "no scale": (lambda t: t.pop(f"{LAYER}.weight_scale"), rf"{LAYER}.weight is torch.int8; the model's is"),
    "no weight": (lambda t: t.pop(f"{LAYER}.weight"), rf"{LAYER}.weight is missing; it must be torch.int8"),
    "float weight": (put("weight", Tensor.float), rf"{LAYER}.weight is torch.float32 .*; it must be torch.int8"),
    "transposed weight": (put("weight", lambda w: w[:, :16].t()), r"weight_scale is .* \[32, 1\]; it must be"),
    "another shape": (put("weight", lambda w: w[:, :16]), rf"{LAYER}.weight has shape \[32, 16\]"),
    "whole numbers": (put("weight_scale", Tensor.int), r"weight_scale is torch.int32"),
    "per group": (put("weight_scale", lambda s: s.expand(-1, 4)), r"weight_scale is .* \[32, 4\]"),
    "zero point": (
        add("weight_zero_point", torch.ones(32, 1, dtype=torch.int8)),
        r"zero point is not 0, but the config says",
    ),
    "input_scale": (add("input_scale", torch.ones(1)), rf"are dynamic, but layer {LAYER} has an input_scale"),
    "lone input_scale": (
        lambda t: t.update({"model.norm.input_scale": torch.ones(1)}),
        r"model.norm has an input_scale but no weight_scale",
    ),
    "packed": (
        add("weight_packed", torch.ones(32, 8, dtype=torch.int32)),
        rf"holds tensors that the model doesn't have: {LAYER}.weight_packed",
    ),
    "no layer": (only_floats, r"no file holds a quantized layer"),
    "unknown layer": (
        lambda t: t.update({"a.weight": torch.ones(2, 2, dtype=torch.int8), "a.weight_scale": torch.ones(2, 1)}),
        r"quantized layer 'a', which the model doesn't have",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_refused_tensors(case: str, folder: Path) -> None:
    edit, message = TENSORS[case]
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder)


def test_asymmetric_activations_for_each_token_are_refused_with_the_layer(tmp_path: Path) -> None:
    write_with_library(tmp_path, symmetric=False)
    with pytest.raises(CheckpointError, match=r"such as layer \S+_proj, has asymmetric input_activations"):
        qgemm.load_quantized(tmp_path)


def test_layers_whose_weight_is_read_directly_are_restored_to_float(folder: Path) -> None:
    class MambaMixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dt_proj = nn.Linear(4, 4, bias=False)

    MambaMixer.__module__ = "transformers.models.mamba.modeling_mamba"

    def replace(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors["mixer.dt_proj.weight"] = torch.ones(4, 4, dtype=torch.int8)
        tensors["mixer.dt_proj.weight_scale"] = torch.ones(4, 1)

    edit_tensors(folder, replace)
    with pytest.warns(
        UserWarning, match=r"can't run quantized are restored to float as they are loaded: mixer.dt_proj"
    ):
        model: Any = qgemm.load_quantized(folder, model=lambda: nn.ModuleDict({"mixer": MambaMixer()}))
    assert type(model.mixer.dt_proj) is nn.Linear
    assert torch.equal(model.mixer.dt_proj.weight, torch.ones(4, 4))
    edit_tensors(folder, lambda tensors: tensors["mixer.dt_proj.weight_scale"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"mixer.dt_proj.weight.*weight_scale holds NaN"):
        qgemm.load_quantized(folder, model=lambda: nn.ModuleDict({"mixer": MambaMixer()}))


def test_an_embedding_is_restored_to_float(folder: Path) -> None:
    values, scale = torch.randint(-127, 128, (97, 32), dtype=torch.int8), torch.rand(97, 1)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: values, f"{name}_scale": scale}))
    with pytest.warns(UserWarning, match=r"restored to float as they are loaded: model.embed_tokens"):
        model = qgemm.load_quantized(folder)
    wanted = (values.float() * scale).to(model.get_parameter(name).dtype)
    assert torch.equal(model.get_parameter(name), wanted)


def test_an_untouched_module_after_an_error(folder: Path) -> None:
    edit_tensors(folder, put("weight_scale", lambda s: s * torch.nan))
    model = tiny_llama(tied=False)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError):
        qgemm.load_quantized(folder, model=model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_a_frozen_checkpoint_holds_what_its_tensors_say(folder: Path) -> None:
    # Versions of 2024 said so of files with quantized values, too.
    edit_quantization(folder, whole(quantization_status="frozen"))
    assert isinstance(qgemm.load_quantized(folder).get_submodule(LAYER), QuantLinear)
    edit_tensors(folder, put("weight", Tensor.float))
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight is torch.float32 .*; it must be torch.int8"):
        qgemm.load_quantized(folder)
