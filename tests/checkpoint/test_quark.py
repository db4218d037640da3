"""AMD Quark's checkpoints: the library's samples, layers written value by value, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qgemm
from checkpoint.foreign import same_tensors
from checkpoint.packers import linears
from checkpoint.quark_layers import (
    FP4,
    MXFP4,
    TOKENS,
    Tensors,
    fp8,
    integers,
    mxfp4,
    step,
    weight_of,
    write_gpt_oss,
)
from checkpoint.samples import load_sample, logit_error, wrong_weights
from qgemm import CheckpointError
from qgemm.nn.quant_layer import QuantLayer

CACHE = "its scales of keys and values are not used"
SAMPLES = {
    "quark-fp8-kv": ({"fp8-static"}, "logits_executed", [CACHE]),
    "quark-int8-asym": ({"int8-static-asymmetric"}, "logits_executed", []),
    "quark-mixed": ({"mxfp4", "fp8-weight", "int4-32-asymmetric"}, "logits", []),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str) -> None:
    schemes, reference, notes = SAMPLES[name]
    model, warned = load_sample(name)
    assert {layer.scheme.name for layer in model.modules() if isinstance(layer, QuantLayer)} == schemes
    assert wrong_weights(name) == []
    assert logit_error(name, reference) < 1e-6
    assert [note in text for note, text in zip(notes, warned, strict=True)] == [True] * len(notes)


STATIC = {"qscheme": "per_tensor", "ch_axis": None, "is_dynamic": False}


def load(folder: Path, tensors: Tensors, N: int, K: int, weight: Any, inputs: Any = None, **others: Any) -> Any:
    """The layer ``a`` of a folder with these tensors of it."""
    save_file({f"a.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    quantization = {"quant_method": "quark", "global_quant_config": config, **others}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


@pytest.mark.parametrize("packing", ["reorder", "order"])
@pytest.mark.parametrize(
    ("said", "N", "K", "scheme"),
    [
        (step("int4", 32), 24, 96, "int4-32"),
        (step("int4", 32, symmetric=False), 24, 96, "int4-32-asymmetric"),
        (step("uint4", 64), 21, 128, "int4-64-asymmetric"),  # the last word of a row has five values
        (step("uint4", 128), 8, 128, "int4-asymmetric"),
        (step("int4"), 5, 64, "int4-channel"),
        (step("uint4"), 20, 64, "int4-channel-asymmetric"),
        (step("int4", qscheme="per_tensor"), 8, 64, "int4-channel"),
        (step("uint4", qscheme="per_tensor"), 8, 64, "int4-channel-asymmetric"),
        (step("int8"), 5, 20, "int8-weight"),
        (step("int8", symmetric=False), 5, 20, "int8-weight-asymmetric"),
        (step("uint8"), 5, 20, "int8-weight-asymmetric"),
        (step("int8", qscheme="per_tensor"), 5, 20, "int8-weight"),
        (step("int8", 32), 5, 96, "int8-weight-32"),
        (step("uint8", 48), 5, 96, "int8-weight-48-asymmetric"),
    ],
)
def test_whole_numbers(said: dict[str, Any], N: int, K: int, scheme: str, packing: str, tmp_path: Path) -> None:
    tensors, weight = integers(said, N, K, packing == "order")
    assert torch.equal(weight_of(tensors, said, packing == "order"), weight)
    layer = load(tmp_path, tensors, N, K, said, export={"pack_method": packing})
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    assert layer.weight_scale.dtype == torch.bfloat16


def test_pieces_of_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.checkpoint.words._PIECE", 256)
    for said in (step("uint4", 32), step("int4")):
        tensors, weight = integers(said, 40, 64)
        assert torch.equal(load(tmp_path, tensors, 40, 64, said).dequantize(torch.float32).weight, weight)


@pytest.mark.parametrize(
    ("inputs", "scheme", "note"),
    [
        (None, "fp8-weight", ""),
        ({"dtype": "fp8_e4m3", **TOKENS}, "fp8", ""),
        ({"dtype": "fp8_e4m3", **STATIC, "is_dynamic": True}, "fp8", "activations get a scale for each token, where"),
        ({"dtype": "fp8_e4m3", **STATIC}, "fp8-static", ""),
        ({"dtype": "int8", **TOKENS}, "fp8-weight", "activations stay in float, where the checkpoint asks for int8"),
        ({"dtype": "fp8_e4m3", **TOKENS, "ch_axis": 2}, "fp8-weight", "where the checkpoint asks for fp8"),
    ],
)
def test_fp8(inputs: Any, scheme: str, note: str, tmp_path: Path) -> None:
    tensors = fp8(32, 64)
    if scheme == "fp8-static":
        tensors["input_scale"] = torch.tensor(0.25).bfloat16()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = load(tmp_path, tensors, 32, 64, step("fp8_e4m3"), inputs)
    assert layer.scheme.name == scheme
    assert [note in str(each.message) for each in caught] == [True] * bool(note)
    assert torch.equal(layer.dequantize(torch.float32).weight, weight_of(tensors, step("fp8_e4m3"), False))


def test_blocks_of_fp8(tmp_path: Path) -> None:
    scale = torch.tensor([[0.5, 2.0]])
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128], "is_dynamic": False}
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_group", "ch_axis": -1, "group_size": 128, "is_dynamic": True}
    for leaf in ("weight_scale", "weight_scale_inv"):
        tensors = {"weight": torch.ones(16, 256).to(torch.float8_e4m3fn), leaf: scale}
        layer = load(tmp_path, tensors, 16, 256, weight, inputs)
        assert layer.scheme.name == "fp8-block"
        assert torch.equal(layer.dequantize(torch.float32).weight, scale.repeat_interleave(128, 1).expand(16, 256))
    with pytest.raises(CheckpointError, match="a has fp8 weights in blocks, with activations other than fp8 in groups"):
        load(tmp_path, tensors, 16, 256, weight)


@pytest.mark.parametrize("inputs", [None, {**MXFP4, "is_dynamic": True}, {"dtype": "fp8_e4m3", **STATIC}])
@pytest.mark.filterwarnings("ignore:.*activations stay in float")
def test_mxfp4(inputs: Any, tmp_path: Path) -> None:
    tensors = mxfp4(32, 64)
    wanted = weight_of(tensors, MXFP4, False)
    if inputs is not None and not inputs["is_dynamic"]:
        tensors["input_scale"] = torch.ones(())
    layer = load(tmp_path, tensors, 32, 64, MXFP4, inputs)
    assert layer.scheme.name == "mxfp4"
    assert torch.equal(layer.dequantize(torch.float32).weight, wanted)


NVFP4 = [{**FP4, "group_size": 16, "scale_format": "float32"}, {"dtype": "fp8_e4m3", **STATIC, "is_scale_quant": True}]


def test_nvfp4(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.full((32, 32), 0x21, dtype=torch.uint8),
        "weight_scale": torch.full((32, 4), 2.0).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
        "input_scale_2": torch.tensor(1.0),
    }
    inputs = [{**NVFP4[0], "is_dynamic": True}, NVFP4[1]]
    with pytest.warns(UserWarning, match="activations stay in float, where the checkpoint asks for fp4$"):
        layer = load(tmp_path, tensors, 32, 64, NVFP4, inputs)
    assert layer.scheme.name == "nvfp4"
    assert torch.equal(layer.dequantize(torch.float32).weight, torch.tensor([0.25, 0.5]).repeat(32, 32))


def test_int4_of_fp8(tmp_path: Path) -> None:
    tensors, weight = integers(step("int4"), 16, 64)
    both = {"weight_scale_2": tensors.pop("weight_scale").float(), "weight_scale": torch.tensor(0.25)}
    tensors["weight_zero_point_2"] = tensors.pop("weight_zero_point")
    with pytest.warns(UserWarning, match="activations stay in float, where the checkpoint asks for fp8$"):
        layer = load(
            tmp_path,
            tensors | both,
            16,
            64,
            [{"dtype": "fp8_e4m3", **STATIC}, step("int4")],
            {"dtype": "fp8_e4m3", **TOKENS},
        )
    assert layer.scheme.name == "int4-channel"
    assert torch.equal(layer.dequantize(torch.float32).weight, weight * 0.25)


@pytest.mark.parametrize(
    ("inputs", "scheme"),
    [
        ({"dtype": "int8", **TOKENS}, "int8"),
        ({"dtype": "int8", **STATIC}, "int8-static"),
        ({"dtype": "int8", **STATIC, "symmetric": False}, "int8-static-asymmetric"),
        ({"dtype": "uint8", **STATIC, "symmetric": False}, "int8-static-asymmetric"),
    ],
)
def test_int8_by_int8(inputs: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    tensors, weight = integers(step("int8"), 16, 32)
    zero_point = {"int8-static": 0, "int8-static-asymmetric": 131 if inputs["dtype"] == "uint8" else 3}.get(scheme)
    if zero_point is not None:
        dtype = torch.uint8 if inputs["dtype"] == "uint8" else torch.int8
        tensors |= {"input_scale": torch.tensor(0.5), "input_zero_point": torch.tensor(zero_point, dtype=dtype)}
    layer = load(tmp_path, tensors, 16, 32, step("int8"), inputs)
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    if zero_point is not None:
        x = torch.arange(-16.0, 16.0).view(1, 32) / 2  # multiples of the scale
        assert (layer(x) - x @ weight.T).abs().max() < 1e-4 * (x @ weight.T).abs().max()


@pytest.mark.parametrize(
    ("weight", "scheme"), [(step("int4", 32), "int4-32-int8"), (step("uint4", 32), "int4-32-asymmetric")]
)
@pytest.mark.filterwarnings("ignore:.*activations stay in float")
def test_int4_by_int8(weight: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    tensors, wanted = integers(weight, 16, 64)
    layer = load(tmp_path, tensors, 16, 64, weight, {"dtype": "int8", **TOKENS})
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, wanted)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    own = write_gpt_oss(tmp_path)
    assert same_tensors(qgemm.load_quantized(tmp_path).float(), load_sample("mxfp4-gpt-oss")[0])
    odd = next(key for key in own if key.endswith("0.gate_up_proj.weight"))
    for key in (odd, f"{odd}_scale"):
        own[key] = own[key][:-1].clone()
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"0.gate_up_proj.weight is .* it must be of an even number of rows"):
        qgemm.load_quantized(tmp_path)


def test_what_attention_and_outputs_would_round(tmp_path: Path) -> None:
    fp8_static = {"dtype": "fp8_e4m3", **STATIC}
    for others, leaf, note in (
        ({"kv_cache_quant_config": {"*k_proj": {}}}, "", CACHE),
        ({"export": {"kv_cache_group": ["*k_proj"]}}, "", CACHE),
        ({}, "k_proj.output_scale", CACHE),
        ({}, "output_scale", r"outputs of layers, such as a, are not quantized \(output_tensors\)"),
        ({"softmax_quant_spec": fp8_static}, "", r"attention's probabilities are not quantized \(softmax_quant_spec\)"),
    ):
        tensors = {**fp8(16, 32), **({leaf: torch.ones(())} if leaf else {})}
        with pytest.warns(UserWarning, match=note):
            assert load(tmp_path, tensors, 16, 32, step("fp8_e4m3"), **others).scheme.name == "fp8-weight"


INT4, INT8 = integers(step("int4", 32), 16, 64)[0], integers(step("int8"), 16, 64)[0]
I4, I8, STATIC8 = step("int4", 32), step("int8"), {"dtype": "int8", **STATIC}
E5M3 = [NVFP4[0], {**NVFP4[1], "dtype": "fp8_e5m3"}]
SHIFTED = {"input_scale": torch.ones(()), "input_zero_point": torch.ones((), dtype=torch.int8)}
# The tensors, what the config says of the weight and of the input, and the error.
REFUSED: dict[str, tuple[Tensors, Any, Any, str]] = {
    "int2": (INT8, step("int2"), None, r"a has a weight in int2 per_channel \(axis 0\); of Quark, qgemm reads int4"),
    "e5m2": (fp8(16, 64), step("fp8_e5m2"), None, "a has a weight in fp8_e5m2 per_channel .*, so dequantize it"),
    "groups of rows": (INT8, step("int8", 16, ch_axis=0), None, r"a has a weight in int8 per_group \(16\);"),
    "a scale a column": (INT8, step("int8", ch_axis=1), None, r"a has a weight in int8 per_channel \(axis 1\);"),
    "groups of 8": (INT4, step("int4", 8), None, "a has groups of 8 columns; qgemm computes groups of any multiple of"),
    "scales in e5m3": (mxfp4(16, 64), {**MXFP4, "scale_format": "e5m3"}, None, r"a has a weight in fp4 per_group"),
    "scales of scales": (mxfp4(16, 64), E5M3, None, r"a has a weight in fp4 per_group \(16\) and then fp8_e5m3"),
    "in float": (INT8, None, None, "a has scales, but the config leaves its weight in float"),
    "no object": (INT8, "int8", None, "a has a weight that is no object"),
    "dynamic": (INT8, {**I8, "is_dynamic": True}, None, "a has a dynamic weight"),
    "an odd axis": (INT8, {**I8, "ch_axis": "0"}, None, "a has a weight of dtype 'int8', ch_axis '0'"),
    "odd blocks": (INT8, {**I8, "block_size": ["x"]}, None, r"a has a weight with block_size \['x'\]"),
    "a bias": ({**INT8, "bias_scale": torch.ones(())}, I8, None, "a has a quantized bias"),
    "rotated": ({**INT8, "input_rotation": torch.ones(4)}, I8, None, "a has an input_rotation, by which its input"),
    "scaled": ({**INT8, "input_prescale": torch.ones(4)}, I8, None, "a has an input_prescale, by which its input"),
    "a zero point": (
        {**INT8, "weight_zero_point": INT8["weight_zero_point"] + 1},
        I8,
        None,
        "weight_zero_point: the zero point is not 0, but the config says",
    ),
    "a signed zero point": (
        {**INT8, "weight": INT8["weight"].view(torch.uint8)},
        step("uint8"),
        None,
        r"a.weight_zero_point is torch.int8 \[16\]; it must be torch.uint8, \[\] or \[16\]",
    ),
    "an input's zero point": ({**INT8, **SHIFTED}, I8, STATIC8, "zero point of the input is not 0"),
    "no input_scale": (INT8, I8, STATIC8, "a.input_scale is missing"),
    "no zero point of inputs": (INT8, I8, {**STATIC8, "dtype": "uint8"}, "a.input_zero_point is missing; it must be t"),
    "an old layout": (
        {**INT4, "weight_scale": INT4["weight_scale"].t().contiguous()},
        I4,
        None,
        r"a.weight is torch.int32 \[64, 2\]; it must be torch.int32, \[K, 1\]",
    ),
    "broken groups": (INT4, step("int4", 48), None, r"a.weight is .* it must be \[K, ...\], in groups of 48"),
    "other groups": (INT4, step("int4", 64), None, r"a.weight_scale is .* \[2, 16\]; it must be .*\[1, 16\]"),
    "float zero points": (
        {**INT4, "weight_zero_point": torch.ones(2, 16)},
        {**I4, "symmetric": False},
        None,
        r"a.weight_zero_point is torch.float32 \[2, 16\]; it must be torch.int32, \[2, 2\]",
    ),
    "another dtype": (INT8, step("int4"), None, r"a.weight is torch.int8 \[16, 64\]; it must be torch.int32, \[N, K\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, weight, inputs, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, 16, 64, weight, inputs)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"export": {"weight_format": "fake_quantized"}}, "weight_format is 'fake_quantized', of weights in float"),
        ({"export": {"pack_method": "x"}}, "pack_method is 'x'; qgemm reads 'reorder' and 'order'"),
        ({"pack_method": "x"}, "pack_method is 'x'; qgemm reads"),  # of older files
        (
            {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]},
            "algo_config has rotation with r4, which tran",
        ),
        ({"algo_config": {"name": "rotation", "online_r1_rotation": True}}, "has rotation with online_r1_rotation"),
        (
            {"algo_config": [{"name": "svdquant"}]},
            "algo_config has svdquant, which transforms inputs as the model runs",
        ),
    ],
)
def test_what_the_config_asks_for(others: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, INT8, 16, 64, I8, **others)
    # These change weights before they are stored.
    harmless = [{"name": "rotation", "r1": True, "r4": False}, {"name": "awq"}, None]
    assert load(tmp_path, INT8, 16, 64, I8, algo_config=harmless).scheme.name == "int8-weight"


@pytest.mark.parametrize(("leaf", "problem"), [("weight_scale", "holds NaN"), ("input_scale", "is not finite")])
def test_nan(leaf: str, problem: str, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {**fp8(16, 32), "input_scale": torch.ones(())}
    tensors[leaf] = torch.full_like(tensors[leaf], torch.nan)
    with pytest.raises(CheckpointError, match=rf"a\.{leaf} {problem}"):
        load(tmp_path, tensors, 16, 32, step("fp8_e4m3"), {"dtype": "fp8_e4m3", **STATIC})
