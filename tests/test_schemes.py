"""Models under every scheme, from end to end: quantized, saved and loaded by each way there is, offloaded, adapted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from checkpoint.rewriting import rewrite_file
from families import FAMILIES, Example
from families.schemes import EVERY_LAYER, in_models, quantized_model
from integrations.folders import assert_same
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from streaming.files import assert_same_files, quantize_whole
from torch import nn

import qgemm
from qgemm.nn import LinearLayer
from qgemm.scheme import resolve_scheme

SCHEME = pytest.mark.parametrize("scheme", in_models(EVERY_LAYER))
# Those that need nothing but the weights.
NO_CALIBRATION = [name for name in EVERY_LAYER if not resolve_scheme(name).needs_data]
UNCALIBRATED = pytest.mark.parametrize("scheme", in_models(NO_CALIBRATION))
# Plain; weights stored transposed, in a Conv1D, and a tied head; code that asks a layer for its weight.
IN_FAMILIES = ("llama", "gpt2", "t5")


def quantized(family: str, scheme: str, dtype: torch.dtype = torch.float32) -> Example:
    example = FAMILIES[family]()
    return Example(quantized_model(example.model.to(dtype), scheme), example.inputs)


def linear_layers(model: nn.Module) -> dict[str, LinearLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearLayer)}


# Each with two of the families, in one dtype and the other; all with --complete.
SAVED = [
    pytest.param(
        *scheme.values,
        family,
        dtype,
        marks=scheme.marks if (number + place) % 3 == 1 + (number + which) % 2 else [pytest.mark.complete],
    )
    for number, scheme in enumerate(in_models(EVERY_LAYER))
    for place, family in enumerate(IN_FAMILIES)
    for which, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize(("scheme", "family", "dtype"), SAVED, ids=str)
def test_saved_and_loaded(family: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    example = quantized(family, scheme, dtype)
    model, output = example.model, example.output()
    assert output.isfinite().all()
    qgemm.save_quantized(model, tmp_path / "ours", max_shard_size="20KB")
    loaded = qgemm.load_quantized(tmp_path / "ours")
    assert_same(loaded, model)
    assert torch.equal(Example(loaded, example.inputs).output(), output)
    # Every tensor is where its dtype says, and all of them are counted.
    schemes = {module.scheme.name for module in linear_layers(loaded).values()}
    assert schemes == {scheme}
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    cls: Any = type(model)
    assert_same(cls.from_pretrained(tmp_path / "ours"), model)
    loaded.save_pretrained(tmp_path / "theirs")
    assert_same(cls.from_pretrained(tmp_path / "theirs"), model)
    assert_same(qgemm.load_quantized(tmp_path / "theirs"), model)


# Llama's with all, and of the others one with each; all with --complete.
FROM_FILES = [
    pytest.param(*scheme.values, family, marks=scheme.marks if place != number % 2 + 1 else [pytest.mark.complete])
    for number, scheme in enumerate(in_models(NO_CALIBRATION))
    for place, family in enumerate(IN_FAMILIES)
]


@pytest.mark.parametrize(("scheme", "family"), FROM_FILES)
def test_quantized_in_place_on_load_and_from_files(family: str, scheme: str, tmp_path: Path) -> None:
    FAMILIES[family]().model.to(torch.bfloat16).save_pretrained(tmp_path / "float")
    in_place = quantize_whole(tmp_path / "float", tmp_path / "whole", max_shard_size="20KB", scheme=scheme)
    cls: Any = type(in_place)
    on_load = cls.from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig(scheme))
    assert_same(on_load, in_place)
    report = qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", scheme, max_shard_size="20KB")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    assert qgemm.report(on_load).to_dict() == qgemm.report(in_place).to_dict() == report.to_dict()
    assert {record.action for record in report.quantized} == {scheme}
    on_load.save_pretrained(tmp_path / "on_load")
    assert_same(cls.from_pretrained(tmp_path / "on_load"), in_place)


@pytest.mark.parametrize("scheme", ["int8-static", "int8-static-hadamard"])
def test_given_scales_in_place_on_load_and_from_files(scheme: str, tmp_path: Path) -> None:
    model = FAMILIES["llama"]().model
    model.save_pretrained(tmp_path / "float")
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    options: dict[str, Any] = {"scheme": scheme, "input_scales": {name: 0.03 + i / 997 for i, name in enumerate(names)}}
    in_place = quantize_whole(tmp_path / "float", tmp_path / "whole", **options)
    on_load = type(model).from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig(**options))
    assert_same(on_load, in_place)
    qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", **options)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")


@SCHEME
def test_quantized_with_calibration(scheme: str, tmp_path: Path) -> None:
    example = FAMILIES["llama"]()
    wanted = example.output()
    calibration = [{"input_ids": torch.randint(0, 97, (4, 24))} for _ in range(3)]
    if scheme in NO_CALIBRATION:
        qgemm.quantize_model(example.model, scheme)
    else:
        qgemm.quantize_model(example.model, scheme, calibration=calibration, progress=False)
    assert {layer.scheme.name for layer in linear_layers(example.model).values()} == {scheme}
    output = example.output()
    limit = 0.5 if resolve_scheme(scheme).weight.format.bits == 4 else 0.2 if "fp8" in scheme else 0.12
    assert (output - wanted).norm() < limit * wanted.norm()
    example.model.save_pretrained(tmp_path)
    loaded = type(example.model).from_pretrained(tmp_path)
    assert torch.equal(Example(loaded, example.inputs).output(), output)
    assert qgemm.report(loaded).to_dict() == qgemm.report(example.model).to_dict()


REFUSED = [
    ("int8-static-asymmetric", "scheme 'int8-static-asymmetric' changes biases, which isn't possible"),
    ("int8-outliers-16", "scheme 'int8-outliers-16' keeps columns in float that are found in calibration"),
]


@pytest.mark.parametrize(("scheme", "message"), REFUSED)
def test_what_needs_the_whole_model_is_refused_elsewhere(scheme: str, message: str, tmp_path: Path) -> None:
    example = FAMILIES["llama"]()
    cls: Any = type(example.model)
    example.model.save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match=message):
        cls.from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig(scheme))
    with pytest.raises(ValueError, match=message):
        qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", scheme)
    assert not (tmp_path / "streamed").exists()
    with pytest.raises(ValueError, match=r"needs a scale|keeps columns in float"):
        qgemm.quantize_model(example.model, scheme)
    assert not linear_layers(example.model)


def test_scales_of_another_dtype_stay_what_they_are(tmp_path: Path) -> None:
    # As another library's file may have them, which own files then keep.
    model = quantized("llama", "int4-32-asymmetric").model
    for layer in linear_layers(model).values():
        layer.weight_scale = nn.Parameter(-layer.weight_scale.half() * 1.001, requires_grad=False)
    cls: Any = type(model)
    qgemm.save_quantized(model, tmp_path / "ours")
    for loaded in (qgemm.load_quantized(tmp_path / "ours"), cls.from_pretrained(tmp_path / "ours")):
        assert {layer.weight_scale.dtype for layer in linear_layers(loaded).values()} == {torch.float16}
        assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "theirs")
    assert_same(qgemm.load_quantized(tmp_path / "theirs"), model)


@UNCALIBRATED
def test_a_model_on_meta_gets_the_structure(scheme: str) -> None:
    example = FAMILIES["llama"]()
    meta = qgemm.quantize_model(copy.deepcopy(example.model).to("meta"), scheme)
    real = qgemm.quantize_model(example.model, scheme)
    shapes = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (meta, real)]
    assert shapes[0] == shapes[1]


@SCHEME
def test_the_report_of_a_model_put_together_by_hand(scheme: str) -> None:
    model = quantized("llama", scheme).model
    records = {record.name: record for record in qgemm.report(model).records}
    for name, layer in linear_layers(model).items():
        own = records[name]
        assert own.action == scheme
        assert own.kind == "Linear"
        biases = layer.out_features if layer.has_bias else 0
        assert own.bytes_before == 4 * (layer.in_features * layer.out_features + biases)
        assert own.bytes_after == sum(p.numel() * p.element_size() for p in layer.parameters())
        assert own.bytes_after < own.bytes_before


@SCHEME
def test_offloaded_to_the_cpu_and_to_disk(scheme: str, tmp_path: Path) -> None:
    example = quantized("llama", scheme)
    output = example.output()
    qgemm.save_quantized(example.model, tmp_path / "saved")
    offloaded = accelerate.cpu_offload(copy.deepcopy(example.model), torch.device("cpu"))
    assert torch.equal(Example(offloaded, example.inputs).output(), output)
    cls: Any = type(example.model)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    on_disk = cls.from_pretrained(
        tmp_path / "saved", device_map={**places, **rest}, offload_folder=str(tmp_path / "offloaded")
    )
    assert all(parameter.is_meta for parameter in on_disk.model.layers[1].mlp.up_proj.parameters())
    assert torch.equal(Example(on_disk, example.inputs).output(), output)


@UNCALIBRATED
def test_an_offloaded_model_is_quantized(scheme: str) -> None:
    example = FAMILIES["llama"]()
    wanted = Example(qgemm.quantize_model(copy.deepcopy(example.model), scheme), example.inputs).output()
    offloaded = accelerate.cpu_offload(example.model, torch.device("cpu"))
    qgemm.quantize_model(offloaded, scheme)
    assert torch.equal(Example(offloaded, example.inputs).output(), wanted)


@SCHEME
def test_adapters_train_on_it(scheme: str, tmp_path: Path) -> None:
    example = quantized("llama", scheme)
    base, ids = example.model, example.inputs["input_ids"]
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    with again.disable_adapter():
        assert torch.equal(Example(again, example.inputs).output(), example.output())
    assert all(torch.equal(parameter, before[name.replace(".base_layer", "")]) for name, parameter in parameters(again))
    with pytest.raises(NotImplementedError, match="can't be merged into a quantized weight"):
        again.merge_and_unload()


def parameters(model: PeftModel) -> list[tuple[str, torch.Tensor]]:
    named = model.base_model.model.named_parameters()
    return [(name, parameter) for name, parameter in named if "lora_" not in name]


@pytest.mark.slow(quick=["int8"])
@SCHEME
def test_damaged_values_are_found(scheme: str, tmp_path: Path) -> None:
    model = quantized("llama", scheme).model
    name, layer = next(iter(linear_layers(model).items()))
    qgemm.save_quantized(model, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for leaf, parameter in layer.named_parameters():
        for value, problem in (
            (parameter.detach().reshape(-1)[:0], "shape"),
            (parameter.detach().to(torch.float64), "dtype|is torch.float64"),
        ):
            rewrite_file(path, {**stored, f"{name}.{leaf}": value})
            with pytest.raises(qgemm.CheckpointError, match=rf"{leaf}.*({problem})"):
                qgemm.load_quantized(tmp_path)
        rewrite_file(path, {other: tensor for other, tensor in stored.items() if other != f"{name}.{leaf}"})
        with pytest.raises(qgemm.CheckpointError, match=f"lacks tensors of the model: {name}.{leaf}"):
            qgemm.load_quantized(tmp_path)
    for leaf in layer.scale_names:
        if getattr(layer, leaf) is not None:
            rewrite_file(path, {**stored, f"{name}.{leaf}": unknown(layer.stored(leaf))})
            for load in (qgemm.load_quantized, type(model).from_pretrained):
                with pytest.raises(qgemm.CheckpointError, match=f"{leaf} (is not finite|holds NaN)"):
                    load(tmp_path)
    if getattr(layer, "weight_zero_point", None) is not None and resolve_scheme(scheme).weight.format.bits == 4:
        # int8 holds them, but kernels keep q - z in 8 bits: a value of 4 bits less this one would come out positive.
        is_float = resolve_scheme(scheme).weight.float_zeros
        wrong = torch.full_like(stored[f"{name}.weight_zero_point"], torch.inf if is_float else 127)
        message = "weight_zero_point holds NaN" if is_float else "weight_zero_point go from 127 to 127; .* from -8 to 8"
        rewrite_file(path, {**stored, f"{name}.weight_zero_point": wrong})
        for load in (qgemm.load_quantized, type(model).from_pretrained):
            with pytest.raises(qgemm.CheckpointError, match=message):
                load(tmp_path)


def unknown(scale: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scale, 255 if scale.dtype == torch.uint8 else torch.nan)


@SCHEME
def test_a_scheme_that_isn_t_one_of_qgemm_s_is_refused(scheme: str, tmp_path: Path) -> None:
    qgemm.save_quantized(quantized("llama", scheme).model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for part, change in (
        ("weight", {"group_size": 40}),
        ("weight", {"dtype": "int2"}),
        ("weight", {"rotation": "hadamard"}),
        ("activation", {"dtype": "int8", "granularity": "group"}),
    ):
        changed = copy.deepcopy(config)
        values = changed["quantization_config"]["schemes"][scheme]
        values[part] = {**(values[part] or {}), **change}
        path.write_text(json.dumps(changed))
        with pytest.raises(qgemm.CheckpointError, match="schemes has one that this version of qgemm doesn't support"):
            qgemm.load_quantized(tmp_path)


def test_schemes_go_through_json() -> None:
    for name in EVERY_LAYER:
        scheme = resolve_scheme(name)
        assert scheme.name == name
        again = qgemm.QuantScheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
        assert again == scheme
        assert resolve_scheme(again) == scheme


def test_what_older_schemes_say_is_what_they_always_said() -> None:
    rest = {"dynamic": False, "symmetric": True, "group_size": None}
    assert resolve_scheme("int8-static").to_dict() == {
        "name": "int8-static",
        "weight": {"dtype": "int8", "granularity": "channel", **rest},
        "activation": {"dtype": "int8", "granularity": "tensor", **rest},
    }
