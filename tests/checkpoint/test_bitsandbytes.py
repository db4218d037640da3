"""bitsandbytes' int8: made by its documented layout, and by the library itself."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import qgemm
from checkpoint.foreign import edit_quantization, edit_tensors, logits, relative
from checkpoint.models import tiny_llama
from qgemm import QuantLinear
from qgemm.checkpoint import CheckpointError
from qgemm.nn.linear_layer import linear_weight
from qgemm.numerics.formats import MIN_SCALE

LAYER = "transformer.h.0.mlp.c_fc"
NAMES = {"llama": "model.layers.0.mlp.up_proj", "gpt2": LAYER}


def float_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return tiny_llama().eval()
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


def write_by_layout(model: nn.Module, folder: Path) -> None:
    """What transformers saves of ``model`` loaded with ``load_in_8bit=True``."""
    tensors = model.state_dict()
    del tensors["lm_head.weight"]  # tied
    for name, module in model.named_modules():
        if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and name != "lm_head":
            weight = linear_weight(module).detach()
            absmax = weight.abs().amax(1)
            tensors[f"{name}.weight"] = (weight * 127 / absmax[:, None]).round().to(torch.int8).contiguous()
            tensors[f"{name}.SCB"] = absmax
            tensors[f"{name}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bitsandbytes")
    write_by_layout(float_model("gpt2"), folder)
    return folder


@pytest.fixture
def folder(_written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_written, tmp_path / "copy"))


@pytest.mark.parametrize("name", NAMES)
def test_by_the_documented_layout(name: str, tmp_path: Path) -> None:
    model = float_model(name)
    write_by_layout(model, tmp_path)
    loaded = qgemm.load_quantized(tmp_path)
    layer, linear = loaded.get_submodule(NAMES[name]), model.get_submodule(NAMES[name])
    assert isinstance(layer, QuantLinear)
    weight = linear_weight(linear).detach()
    assert layer.weight.shape == weight.shape
    assert torch.equal(layer.weight_scale, weight.abs().amax(1) / 127)
    torch.testing.assert_close(layer.float_linear().weight, weight, rtol=0, atol=weight.abs().max().item() / 253)
    assert relative(logits(loaded), logits(model)) < 0.01
    assert not any(type(module).__name__ == "Conv1D" for module in loaded.modules())
    embedding = loaded.get_input_embeddings()
    assert loaded.lm_head.weight is embedding.weight
    assert torch.equal(embedding.weight, model.get_input_embeddings().weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_by_the_library(name: str, tmp_path: Path) -> None:
    float_model(name).save_pretrained(tmp_path / "float")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    theirs.save_pretrained(tmp_path / "int8")
    loaded = qgemm.load_quantized(tmp_path / "int8")
    layer = loaded.get_submodule(NAMES[name])
    assert torch.equal(layer.weight, theirs.get_submodule(NAMES[name]).weight)
    assert relative(logits(loaded), logits(theirs)) < 0.01
    assert relative(logits(loaded), logits(theirs.dequantize(dtype=torch.float32))) < 0.01


def test_a_row_of_zeros(folder: Path) -> None:
    def clear_row(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight"][3] = 0
        tensors[f"{LAYER}.SCB"][3] = 0

    edit_tensors(folder, clear_row)
    layer = qgemm.load_quantized(folder).get_submodule(LAYER)
    y = layer(torch.randn(5, 32)) - layer.bias
    assert torch.equal(y[:, 3], torch.zeros(5))
    assert bool((y[:, 4] != 0).any())
    assert layer.weight_scale[3].item() == MIN_SCALE  # positive, as scales of such layers are


def test_older_configs_have_no_quant_method(folder: Path) -> None:
    edit_quantization(folder, lambda quantization: quantization.pop("quant_method"))
    assert isinstance(qgemm.load_quantized(folder).get_submodule(LAYER), QuantLinear)


@pytest.mark.parametrize(("threshold", "asked"), [(None, "6 "), (6.0, "6 "), (2.5, "2.5 "), (0.0, None), (0, None)])
def test_outliers_in_16_bits_are_asked_for(threshold: float | None, asked: str | None, folder: Path) -> None:
    if threshold is not None:  # without one it is transformers' default
        assert transformers.BitsAndBytesConfig().llm_int8_threshold == 6.0
        edit_quantization(folder, lambda quantization: quantization.update(llm_int8_threshold=threshold))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qgemm.load_quantized(folder)
    notes = [str(each.message) for each in caught if "llm_int8_threshold" in str(each.message)]
    assert len(notes) == (asked is not None)
    assert asked is None or f"computes columns with values above {asked}" in notes[0]


@pytest.mark.parametrize("threshold", ["x", None, True])
def test_a_threshold_that_is_no_number(threshold: object, folder: Path) -> None:
    edit_quantization(folder, lambda quantization: quantization.update(llm_int8_threshold=threshold))
    with pytest.raises(CheckpointError, match=rf"llm_int8_threshold is {threshold!r}; it must be a number"):
        qgemm.load_quantized(folder)


def put(leaf: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{leaf}": make(tensors[f"{LAYER}.{leaf}"])})


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "NaN": (put("SCB", lambda s: s * torch.nan), rf"{LAYER}.SCB holds NaN"),
    "negative": (put("SCB", lambda s: -s), r"holds NaN, Inf or a negative"),
    "half": (put("SCB", Tensor.half), rf"{LAYER}.SCB is torch.float16 \[128\]; it must be torch.float32, \[128\]"),
    "short": (put("SCB", lambda s: s[:32]), rf"{LAYER}.SCB is torch.float32 \[32\]"),
    "no SCB": (lambda t: t.pop(f"{LAYER}.SCB"), r"the model doesn't have: \S+weight_format"),
    "float": (put("weight", Tensor.float), rf"{LAYER}.SCB belongs to a weight that is missing or not int8"),
    "transposed": (put("weight", Tensor.t), rf"{LAYER}.SCB is torch.float32 \[128\]; it must be torch.float32, \[32\]"),
    "narrow": (put("weight", lambda w: w[:, :16]), rf"{LAYER}.weight has shape \[128, 16\]"),
    "two scales": (
        lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(128)}),
        rf"holds both {LAYER}.SCB and {LAYER}.weight_scale",
    ),
    "tiled": (put("weight_format", lambda f: f + 2), rf"{LAYER}.weight_format: .* laid out for one kind of GPU"),
    "odd format": (put("weight_format", lambda f: f.repeat(3)), r"weight_format is torch.uint8 \[3\]"),
    "4 bits": (
        lambda t: t.update({f"{LAYER}.weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}),
        rf"{LAYER}.weight.quant_state.bitsandbytes__nf4 isn't an object in JSON",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, folder: Path) -> None:
    edit, message = REFUSED[case]
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder)


def test_the_files_say_what_they_hold(folder: Path) -> None:
    edit_quantization(folder, lambda quantization: quantization.update(load_in_8bit=False, load_in_4bit=True))
    assert qgemm.load_quantized(folder).get_submodule(LAYER).scheme.name == "int8"
