"""``load_quantized`` of models with experts: what is refused, and models of one's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.experts import ALL, inputs
from families.mixtures import MIXTURES
from integrations.folders import assert_same
from safetensors.torch import load_file
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors
from checkpoint.rewriting import edited, rewrite_file
from qgemm import CheckpointError, QuantExperts
from qgemm.checkpoint.name_ranges import expand
from qgemm.scheme import SCHEMES

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qgemm.save_quantized(qgemm.quantize_model(MIXTURES["gpt_oss"]().model), tmp_path / "int8")
    return tmp_path / "int8"


def in_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with edited(folder / "config.json") as values:
            change(values)

    return damage


def tensor(leaf: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        value = change(stored.pop(f"{EXPERTS}.{leaf}"))
        if value is not None:
            stored[f"{EXPERTS}.{leaf}"] = value.contiguous()
        rewrite_file(folder / "model.safetensors", stored)

    return damage


def static(values: dict[str, Any]) -> None:
    quantization = values["quantization_config"]
    quantization["schemes"]["int8-static"] = SCHEMES["int8-static"].to_dict()
    names = expand(quantization["layers"]["int8"])
    quantization["layers"] = {"int8": [name for name in names if name != EXPERTS], "int8-static": [EXPERTS]}


def module_around(values: dict[str, Any]) -> None:
    layers = values["quantization_config"]["layers"]
    layers["int8"] = ["model.layers.0.mlp" if name == EXPERTS else name for name in expand(layers["int8"])]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            in_config(static),
            rf"layers names {EXPERTS}, which is a GptOssExperts, scheme 'int8-static' isn't supported",
        ),
        (in_config(module_around), r"model\.layers\.0\.mlp, which is a GptOssMLP, not linear, nor experts that can be"),
        (in_config(lambda v: v.update(num_local_experts=5)), r"has shape \[4, 64\]; the model's is \[5, 64\]"),
        (in_config(lambda v: v.update(num_experts_per_tok=5)), r"0\.mlp\.router would choose 5 of 4 experts"),
        (
            tensor("gate_up_proj", lambda t: t[:, :-1]),
            rf"{EXPERTS}\.gate_up_proj has shape \[4, 191, 64\]; the model's",
        ),
        (
            tensor("gate_up_proj", lambda t: t.half()),
            rf"{EXPERTS}\.gate_up_proj is torch.float16; the model's is torch.int8",
        ),
        (
            tensor("down_proj_scale", lambda t: t.bfloat16()),
            rf"{EXPERTS}\.down_proj_scale is torch.bfloat16; the model's",
        ),
        (tensor("down_proj_scale", lambda t: -t), rf"{EXPERTS}\.down_proj_scale holds NaN, Inf or a negative"),
        (tensor("down_proj_bias", lambda t: None), rf"lacks tensors of the model: {EXPERTS}\.down_proj_bias"),
    ],
)
def test_what_is_refused(damage: Callable[[Path], None], problem: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(folder)


def test_experts_that_are_not_understood_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    monkeypatch.setattr(GptOssExperts, "_apply_gate", lambda self, h: h[..., ::2])
    with pytest.raises(CheckpointError, match="nor experts that can be quantized: its activation isn't one that qgemm"):
        qgemm.load_quantized(folder)


def saved_as(folder: Path, scheme: str, format: str) -> Any:
    model: Any = qgemm.quantize_model(MIXTURES["qwen3_moe"]().model, scheme)
    qgemm.save_quantized(model, folder, format=format)
    return model


# Of the first expert's gates the others would take the scheme.
@pytest.mark.slow
@pytest.mark.parametrize("single", ["0.gate_proj", "2.down_proj"])
@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_a_symmetric_layer_beside_asymmetric_ones(single: str, format: str, tmp_path: Path) -> None:
    model = saved_as(tmp_path, "int4-32-asymmetric", format)
    expert, leaf = single.split(".")
    experts, layer = model.get_submodule(EXPERTS), f"{EXPERTS}.{single}"
    ours = "down_proj" if leaf == "down_proj" else "gate_up_proj"
    rows = slice(None, experts.intermediate_size if leaf == "gate_proj" else None)
    zero_points = experts.get_parameter(f"{ours}_zero_point")[int(expert), rows]
    assert bool((zero_points != 0).any())
    zero_points.zero_()
    if format == "gptq":  # each zero point is 8 of 0 to 15
        edit_tensors(tmp_path, lambda tensors: tensors[f"{layer}.qzeros"].fill_(0x88888888 - 2**32))
    else:
        edit_tensors(tmp_path, lambda tensors: tensors.pop(f"{layer}.weight_zero_point"))
        tensors = load_file(tmp_path / "model.safetensors")
        names = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
        edit_quantization(tmp_path, lambda quantization: split_group(quantization["config_groups"], names, layer))
    assert_same(qgemm.load_quantized(tmp_path), model)


def split_group(groups: dict[str, Any], names: list[str], layer: str) -> None:
    group = groups["group_0"]
    groups["group_1"] = {**group, "targets": [layer], "weights": {**group["weights"], "symmetric": True}}
    group["targets"] = [name for name in names if name != layer]


@pytest.mark.slow
@pytest.mark.parametrize("leaf", ["down_proj", "up_proj"])
def test_projections_in_two_schemes(leaf: str, tmp_path: Path) -> None:
    folders = {scheme: tmp_path / scheme for scheme in ("int4-32", "int8-weight")}
    for scheme, folder in folders.items():
        saved_as(folder, scheme, "gptq")
    wide = load_file(folders["int8-weight"] / "model.safetensors")
    mixed = Path(shutil.copytree(folders["int4-32"], tmp_path / "mixed"))
    is_wide = re.compile(rf"experts\.\d+\.{leaf}")
    edit_tensors(mixed, lambda tensors: tensors.update({k: v for k, v in wide.items() if is_wide.search(k)}))
    if leaf == "up_proj":
        with pytest.raises(
            CheckpointError,
            match=rf"{EXPERTS}\.0\.gate_proj has the scheme 'int4-32', and {EXPERTS}\.0\.up_proj 'int8-weight'; "
            ".* such as scheme='int8'",
        ):
            qgemm.load_quantized(mixed)
        return
    model: Any = qgemm.load_quantized(mixed)
    assert model.get_submodule(EXPERTS).scheme.name == "int4-32+int8-weight"
    own = {scheme: qgemm.load_quantized(folder).get_submodule(EXPERTS) for scheme, folder in folders.items()}
    for name, tensor in model.get_submodule(EXPERTS).state_dict().items():
        scheme = "int8-weight" if name.startswith("down_proj") else "int4-32"
        assert torch.equal(tensor, own[scheme].state_dict()[name]), name
    qgemm.save_quantized(model, tmp_path / "own")
    assert_same(qgemm.load_quantized(tmp_path / "own"), model)
    with pytest.raises(ValueError, match=r"'int4-32\+int8-weight', and GPTQ stores .*, one for all of a module's exp"):
        qgemm.save_quantized(model, tmp_path / "gptq", format="gptq")
    loaded, *alone = (
        qgemm.load_quantized(folder, scheme="int8").get_submodule(EXPERTS).state_dict()
        for folder in (mixed, *folders.values())
    )
    for name, tensor in loaded.items():
        assert torch.equal(tensor, alone[name.startswith("down_proj")][name]), name


class Twice(nn.Module):
    """Experts under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = ALL["deepseek_v4"]()
        self.again = self.experts

    def forward(self, *arguments: Tensor) -> Tensor:
        first: Tensor = self.experts(*arguments)
        return first + self.again(*arguments)


@pytest.mark.parametrize("give", ["function", "float module", "quantized module"])
def test_a_model_of_ones_own(give: str, tmp_path: Path) -> None:
    model = qgemm.quantize_model(Twice())
    qgemm.save_quantized(model, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == [
        "experts.down_proj",
        "experts.down_proj_scale",
        "experts.gate_up_proj",
        "experts.gate_up_proj_scale",
    ]
    given: Any = Twice if give == "function" else Twice()
    loaded = qgemm.load_quantized(tmp_path, model=qgemm.quantize_model(given) if give == "quantized module" else given)
    assert isinstance(loaded.experts, QuantExperts)
    assert loaded.again is loaded.experts
    arguments = inputs(model.experts, 5)
    assert torch.equal(loaded(*arguments), model(*arguments))
