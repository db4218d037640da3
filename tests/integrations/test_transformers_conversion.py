"""``from_pretrained`` of qgemm's own folders with a ``QGemmConfig``: what it asks for is done, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import same_tensors
from checkpoint.models import tiny_llama
from families.mixtures import MIXTURES
from transformers import AutoModelForCausalLM, LlamaModel

import qgemm
from integrations.folders import IDS, load_part
from qgemm import QGemmConfig
from qgemm.calibration import Recipe, SmoothQuant
from qgemm.nn import QuantExperts, QuantLayer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("own") / "int4"
    qgemm.save_quantized(qgemm.quantize_model(tiny_llama().eval(), "int4-16"), path)
    return path


def load(folder: Path, config: QGemmConfig, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # transformers', that the config isn't used
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def schemes(model: Any) -> set[str]:
    return {module.scheme.name for module in model.modules() if isinstance(module, QuantLayer)}


@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}])
def test_another_scheme(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    model = load(folder, QGemmConfig("int8"), **options)
    assert schemes(model) == {"int8"}
    wanted: Any = qgemm.load_quantized(folder, scheme="int8")
    assert same_tensors(model, wanted.to(options.get("dtype", torch.float32)))
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    assert qgemm.report(model).to_dict() == qgemm.report(wanted).to_dict()
    model.save_pretrained(tmp_path)
    assert same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("scheme", [None, "int4-16"])
def test_the_scheme_of_the_folder(scheme: str | None, folder: Path) -> None:
    model = load(folder, QGemmConfig(scheme))
    wanted: Any = qgemm.load_quantized(folder)
    assert same_tensors(model, wanted)
    assert qgemm.report(model).to_dict() == qgemm.report(wanted).to_dict()


def test_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    qgemm.save_quantized(qgemm.quantize_model(MIXTURES["mixtral"]().model, "int4-16-asymmetric"), tmp_path)
    model = load(tmp_path, QGemmConfig("int8"))
    assert any(isinstance(module, QuantExperts) for module in model.modules())
    assert schemes(model) == {"int8"}
    assert same_tensors(model, qgemm.load_quantized(tmp_path, scheme="int8"))


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_fused(scheme: str | None, folder: Path) -> None:
    model, plain = load(folder, QGemmConfig(scheme, fuse=True)), load(folder, QGemmConfig(scheme))
    assert len(qgemm.fusion_report(model).fused) == 2
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QGemmConfig(skip="*.k_proj"), "skip is for a float model, but the checkpoint is quantized: leave it out"),
        (QGemmConfig(include="*.k_proj"), "include is for a float model"),
        (QGemmConfig({"*.k_proj": None, "*": "int8"}), "scheme names patterns, but the checkpoint is quantized"),
        (QGemmConfig("int8-static", input_scales={"x": 1.0}), "input_scales is for a float model"),
        (QGemmConfig(recipe=Recipe([SmoothQuant()]), calibration=[IDS]), "recipe is for a float model"),
    ],
)
def test_what_is_for_float_models(config: QGemmConfig, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, config)


def test_a_scheme_that_needs_data_is_for_float_models(folder: Path) -> None:
    with pytest.raises(ValueError, match="scheme is 'int8-static', which needs data to run the model on"):
        load(folder, QGemmConfig("int8-static"))


def test_layers_that_are_not_here_whole(folder: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    message = r"scheme is 'int8', but \S+, in \S+, is {}, .* run qgemm convert .*--scheme int8"
    with pytest.raises(ValueError, match=message.format("offloaded by the device_map")):
        load(folder, QGemmConfig("int8"), device_map=places, offload_folder=str(folder.parent / "offload"))
    qgemm.save_quantized(qgemm.quantize_model(tiny_llama(), "int8-weight"), tmp_path)
    with pytest.raises(ValueError, match=message.format("split among processes")):
        load_part(tmp_path, LlamaModel, quantization_config=QGemmConfig("int8"))
