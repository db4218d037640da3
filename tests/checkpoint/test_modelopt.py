"""ModelOpt's checkpoints: the sample in nvfp4, other layers, its config beside the model's, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import qgemm
from checkpoint.rewriting import edited
from checkpoint.samples import SAMPLES, load_sample, logit_error, wrong_weights
from qgemm import CheckpointError

NAME = "nvfp4-modelopt"


def test_the_sample() -> None:
    model, warnings = load_sample(NAME)
    assert {layer.scheme.name for layer in model.modules() if hasattr(layer, "scheme")} == {"nvfp4"}
    assert wrong_weights(NAME) == []
    assert logit_error(NAME) < 1e-5
    assert "activations stay in float, where the checkpoint asks for fp4" in warnings[0]


def test_its_own_config_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / NAME, tmp_path / "copy"))
    with edited(folder / "config.json") as config:
        own = config.pop("quantization_config")
    text = {"producer": own["producer"], "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(text))
    with pytest.warns(UserWarning, match="asks for fp4"):
        model = qgemm.load_quantized(folder)
    wanted = load_sample(NAME)[0].state_dict()
    assert all(torch.equal(tensor.float(), wanted[name].float()) for name, tensor in model.state_dict().items())


E4M3 = torch.ones(32, 64).to(torch.float8_e4m3fn)


def load(folder: Path, tensors: dict[str, Tensor], algorithm: str = "FP8", **others: Any) -> Any:
    save_file({f"0.0.0.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm, **others}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    model: Any = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(64, 32, bias=False))))
    return qgemm.load_quantized(folder, model=model)[0][0][0]


@pytest.mark.parametrize(
    ("scales", "algorithm", "scheme"),
    [
        ({"weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}, "FP8", "fp8-static"),
        ({"weight_scale": torch.full((32,), 0.5)}, "FP8_PER_CHANNEL_PER_TOKEN", "fp8"),
        ({"weight_scale": torch.full((32, 2), 126, dtype=torch.uint8)}, "MXFP8", "mxfp8"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*activations stay in float")
def test_layers_in_fp8(scales: dict[str, Tensor], algorithm: str, scheme: str, tmp_path: Path) -> None:
    layer = load(tmp_path, {"weight": E4M3, **scales}, algorithm)
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, torch.full((32, 64), 0.5))


@pytest.mark.parametrize("name", ["0.0.0", "0.0", "0", "*", "0*"])  # its own, of modules that contain it, patterns
@pytest.mark.parametrize("method", ["modelopt", "modelopt_mixed"])
def test_the_algorithm_of_a_layer(method: str, name: str, tmp_path: Path) -> None:
    tensors = {"weight": E4M3, "weight_scale": torch.full((32,), 0.5)}
    outer, _, _ = name.rpartition(".")
    others = {each: {"quant_algo": "NVFP4"} for each in ("1", "1*", outer)}
    named = {**others, name: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    layer = load(tmp_path, tensors, "MIXED_PRECISION", quantized_layers=named, quant_method=method)
    assert layer.scheme.name == "fp8"


@pytest.mark.parametrize("method", ["modelopt_fp4", "modelopt_nvfp4"])
@pytest.mark.filterwarnings("ignore:.*activations stay in float")
def test_other_names_of_it(method: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = load(tmp_path, {**NVFP4, "weight_scale_2": torch.ones(())}, "NVFP4", quant_method=method)
    assert layer.scheme.name == "nvfp4"
    assert caught == []


NO_CACHE = {"kv_cache_scheme": None, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, 1),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, 1),
        (NO_CACHE, 0),
    ],
)
def test_a_quantized_cache_is_asked_for(asked: dict[str, Any], count: int, tmp_path: Path) -> None:
    # Scales of keys and values may be missing: a server then takes 1.
    tensors = {"weight": E4M3, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path, tensors, **asked)
    assert ["its scales of keys and values are not used" in str(each.message) for each in caught] == [True] * count


def test_a_key_value_cache_is_left_to_the_cache(tmp_path: Path) -> None:
    tensors = {"weight": E4M3, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}
    for name, shape in (("k_scale", ()), ("v_scale", (2, 1, 1)), ("k_proj.output_scale", (1,))):
        with pytest.warns(UserWarning, match="its scales of keys and values are not used"):
            load(tmp_path, {**tensors, name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=r"tensors that the model doesn't have: 0.0.0.k_scale"):
        load(tmp_path, {**tensors, "k_scale": torch.ones(2, 2)})


NVFP4 = {"weight": torch.zeros(32, 32, dtype=torch.uint8), "weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn)}


def test_fp4_with_inputs_in_fp8(tmp_path: Path) -> None:
    # E2M1's codes 1 and 2 are 0.5 and 1, low bits first; 126 is a scale of 1/2.
    codes = torch.full((32, 32), 0x21, dtype=torch.uint8)
    mxfp4 = {
        "weight": codes,
        "weight_scale": torch.full((32, 2), 126, dtype=torch.uint8),
        "input_scale": torch.ones(()),
    }
    nvfp4 = {"weight": codes, "weight_scale": NVFP4["weight_scale"], "weight_scale_2": torch.tensor(0.5)}
    for scheme, tensors in (("mxfp4", mxfp4), ("nvfp4", {**nvfp4, "input_scale": torch.ones(())})):
        with pytest.warns(UserWarning, match=r"activations stay in float, where the checkpoint asks for fp8$"):
            layer = load(tmp_path, tensors, f"W4A8_{scheme.upper()}_FP8")
        assert layer.scheme.name == scheme
        assert torch.equal(layer.dequantize(torch.float32).weight, torch.tensor([0.25, 0.5]).repeat(32, 32))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("is_prescaled", [False, True])
def test_int4_of_awq(group: int, is_prescaled: bool, tmp_path: Path) -> None:
    # A byte has two rows of a column, the first in its low bits.
    q = torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    scale, factors = torch.rand(32, 64 // group), torch.rand(64).bfloat16()
    tensors = {"weight": (q[::2] & 15 | q[1::2] << 4).view(torch.uint8), "weight_scale": scale}
    layer = load(tmp_path, tensors | ({"pre_quant_scale": factors} if is_prescaled else {}), "W4A16_AWQ")
    assert layer.scheme.name == {32: "int4-32", 64: "int4-channel"}[group] + ("-prescaled" if is_prescaled else "")
    weight, x = q * scale.repeat_interleave(group, 1), torch.randn(3, 64)
    assert torch.equal(layer.dequantize(torch.float32).weight, weight * factors.float() if is_prescaled else weight)
    wanted = nn.functional.linear(x * factors.float() if is_prescaled else x, weight)
    torch.testing.assert_close(layer(x), wanted)


def test_nvfp4_of_awq(tmp_path: Path) -> None:
    codes, factors = torch.full((32, 32), 0x21, dtype=torch.uint8), torch.rand(64).bfloat16()  # 0.5 and 1
    tensors = {"weight": codes, "weight_scale": NVFP4["weight_scale"], "weight_scale_2": torch.tensor(0.5)}
    tensors |= {"input_scale": torch.ones(()), "pre_quant_scale": factors}
    with pytest.warns(UserWarning, match=r"activations stay in float, where the checkpoint asks for fp4$"):
        layer = load(tmp_path, tensors, "NVFP4_AWQ")
    assert layer.scheme.name == "nvfp4-prescaled"
    x = torch.randn(3, 64)
    wanted = nn.functional.linear(x * factors.float(), torch.tensor([0.25, 0.5]).repeat(32, 32))
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**NVFP4, "weight_scale_2": torch.ones(2)}, r"weight_scale_2 is torch.float32 \[2\]; it must be"),
        (NVFP4, "0 has weight torch.uint8"),
        (
            {"weight": E4M3, "weight_scale": torch.tensor(0.5), "input_scale": torch.ones(())}
            | {"pre_quant_scale": torch.ones(64)},
            "0 has the scheme 'fp8-static' and a pre_quant_scale, by which its input would be multiplied first",
        ),
        (
            {**NVFP4, "weight_scale_2": torch.ones(()), "pre_quant_scale": torch.ones(32)},
            r"pre_quant_scale is torch.float32 \[32\]; it must be",
        ),
        ({"weight": E4M3, "weight_scale": torch.ones(1, 1, 1, 1)}, "0 has weight torch.float8_e4m3fn"),
        (
            {"weight": E4M3, "weight_scale": torch.ones(())},
            r"\(FP8\); of ModelOpt, qgemm reads fp8 with an input_scale",
        ),
        ({"weight_scale": torch.ones(())}, "0 has weight None"),
        (  # of W4A8_AWQ, whose weights are packed along N
            {
                **NVFP4,
                "weight_scale": torch.ones(32, 4),
                "weight_scale_2": torch.ones(()),
                "input_scale": torch.ones(()),
            },
            r"0 has weight torch.uint8 .* and weight_scale torch.float32 \[32, 4\] .*, so dequantize it with its own",
        ),
        ({"weight": E4M3, "weight_scale": torch.ones(1, 1, 1, 1)}, "qgemm reads fp8 with an input_scale or per token"),
        (
            {"weight": torch.ones(32, 64, dtype=torch.int8), "weight_scale": torch.ones(32)},
            r"0 has weight torch.int8 .*, so dequantize it with its own library and quantize the float model$",
        ),
        (
            {"weight": E4M3, "weight_scale": torch.ones(32, 1, dtype=torch.uint8)},
            r"0.weight_scale is torch.uint8 \[32, 1\]; it must be torch.uint8, \[32, 2\]",
        ),
        (
            {"weight": torch.zeros(16, 64, dtype=torch.uint8), "weight_scale": torch.ones(32, 3)},
            r"0.weight_scale is torch.float32 \[32, 3\]; it must be \[32, groups of 64 columns\]",
        ),
        (
            {"weight": torch.zeros(16, 64, dtype=torch.uint8), "weight_scale": torch.ones(16, 1)},
            r"0.weight_scale is torch.float32 \[16, 1\]; it must be \[32, groups of 64 columns\]",
        ),
    ],
)
def test_what_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors)
