"""optimum-quanto's checkpoints: the library's sample, layers written value by value, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command import run_json
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import qgemm
from checkpoint.foreign import same_tensors
from checkpoint.packers import linears
from checkpoint.samples import SAMPLES, load_sample, logit_error, wrong_weights
from qgemm import CheckpointError
from qgemm.nn.quant_layer import QuantLayer

NAME = "quanto-mixed"


def test_the_sample() -> None:
    model, warned = load_sample(NAME)
    assert warned == []
    schemes = {path.rpartition(".")[2]: m.scheme.name for path, m in model.named_modules() if isinstance(m, QuantLayer)}
    assert schemes == {
        "q_proj": "int4-channel-float-zeros",  # of 2 bits
        "k_proj": "fp8-weight",
        **dict.fromkeys(("v_proj", "o_proj"), "int8-weight"),
        **dict.fromkeys(("gate_proj", "up_proj"), "int4-channel-float-zeros"),
        "down_proj": "int4-float-zeros",
    }
    assert wrong_weights(NAME) == []
    assert logit_error(NAME) < 1e-6


@pytest.mark.slow
def test_the_sample_in_transformers_and_without_its_map(tmp_path: Path) -> None:
    folder, wanted = Path(shutil.copytree(SAMPLES / NAME, tmp_path / "copy")), load_sample(NAME)[0]
    for _ in range(2):
        config = qgemm.QGemmConfig()
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        assert same_tensors(loaded, wanted)
        assert same_tensors(qgemm.load_quantized(folder).float(), wanted)
        found = run_json("inspect", folder)
        assert (found["format"], found["loads"], found["problems"]) == ("quanto", True, [])
        (folder / "quanto_qmap.json").unlink(missing_ok=True)


def test_inspect_needs_the_model_of_groups(tmp_path: Path) -> None:
    tensors, _ = packed(4, 16, 64, 32)
    write(tmp_path, tensors)
    found = run_json("inspect", tmp_path)
    assert found["loads"] is False
    assert "pass the float model" in found["refusal"]


def packed(
    bits: int, N: int, K: int, size: int, whole: bool = False, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer ``a`` in 2 or 4 bits, and its weight, float64. ``whole``: shifts in whole numbers."""
    torch.manual_seed(seed)
    G, count = N * K // size, 8 // bits
    groups, scale = torch.randint(1 << bits, (G, size), dtype=torch.uint8), torch.rand(G, 1).half() + 0.5
    if whole:
        shift = torch.randint(1 << bits, (G, 1), dtype=torch.uint8)
        weight = (groups - shift.double()) * scale.double()
    else:
        shift = torch.rand(G, 1).half() * 4
        weight = groups * scale.double() - shift.double()
    rows = -(-G // count)
    padded = torch.cat((groups, torch.zeros(count * rows - G, size, dtype=torch.uint8)))
    octets = sum(part << bits * i for i, part in enumerate(padded.split(rows)))
    tensors = {"weight._data._data": octets, "weight._scale": scale, "weight._shift": shift}
    return {f"a.{name}": tensor for name, tensor in tensors.items()}, weight.view(N, K)


def write(folder: Path, tensors: dict[str, Tensor], own: Any = None, config: Any = None) -> None:
    scales = {f"a.{name}_scale": torch.ones(()) for name in ("input", "output")}
    save_file({**tensors, **scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    if own is not None:
        (folder / "quanto_qmap.json").write_text(json.dumps({"a": own}))


def load(folder: Path, tensors: dict[str, Tensor], N: int, K: int, own: Any = None, config: Any = None) -> Any:
    write(folder, tensors, own, config)
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("bits", "N", "K", "size", "scheme"),
    [
        (4, 6, 64, 32, "int4-32"),
        (4, 5, 96, 96, "int4-channel"),  # five groups in three bytes
        (4, 7, 192, 64, "int4-64"),  # the parts end within a row
        (2, 4, 256, 128, "int4"),
        (2, 5, 96, 32, "int4-32"),
        (2, 3, 20, 20, "int4-channel"),
    ],
)
def test_packed_layers(bits: int, N: int, K: int, size: int, scheme: str, whole: bool, tmp_path: Path) -> None:
    tensors, weight = packed(bits, N, K, size, whole)
    layer = load(tmp_path, tensors, N, K)
    assert layer.scheme.name == scheme + ("-asymmetric" if whole else "-float-zeros")
    assert torch.equal(layer.weight_scale, tensors["a.weight._scale"].view(N, K // size))
    error = (layer.dequantize(torch.float64).weight - weight).abs().amax()
    assert error <= (0 if whole or bits == 2 else 2.0**-23 * 16)


@pytest.mark.parametrize("kind", ["qint4", "qint2"])
def test_what_the_map_is_needed_for(kind: str, tmp_path: Path) -> None:
    # Two groups in a byte, of 2 bits or of 4.
    tensors, weight = packed(4 if kind == "qint4" else 2, 2, 32, 32)
    with pytest.raises(
        CheckpointError, match=r"a.weight._data._data is .* 2 groups of 2 or 4 bits, as quanto_qmap.json"
    ):
        load(tmp_path, tensors, 2, 32)
    layer = load(tmp_path, tensors, 2, 32, {"weights": kind, "activations": "none"})
    assert (layer.dequantize(torch.float64).weight - weight).abs().amax() < 1e-6


@pytest.mark.parametrize("shape", [(16, 1), (1,), ()])
@pytest.mark.parametrize(("dtype", "scheme"), [(torch.int8, "int8-weight"), (torch.float8_e4m3fn, "fp8-weight")])
def test_layers_of_8_bits(dtype: torch.dtype, scheme: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values, scale = (torch.randn(16, 32) * 40).to(dtype), torch.full(shape, 0.5, dtype=torch.bfloat16)
    layer = load(tmp_path, {"a.weight._data": values, "a.weight._scale": scale}, 16, 32)
    assert layer.scheme.name == scheme
    assert torch.equal(layer.dequantize(torch.float32).weight, values.float() / 2)


@pytest.mark.parametrize(
    ("own", "config", "count"),
    [
        ({"weights": "qint4", "activations": "qint8"}, None, 1),
        ({"weights": "qint4", "activations": "none"}, None, 0),
        (None, {"quant_method": "quanto", "weights": "int4", "activations": "int8"}, 1),
        (None, {"quant_method": "quanto", "weights": "int4", "activations": None}, 0),
    ],
)
def test_activations_stay_in_float(own: Any, config: Any, count: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path, packed(4, 8, 64, 32)[0], 8, 64, own, config)
    assert ["activations stay in float, where the" in str(each.message) for each in caught] == [True] * count


GOOD = packed(4, 8, 64, 32)[0]
I8 = {"a.weight._data": torch.ones(8, 64, dtype=torch.int8), "a.weight._scale": torch.ones(8, 1)}
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "e5m2": (
        {**I8, "a.weight._data": torch.ones(8, 64).to(torch.float8_e5m2)},
        "a.weight._data is .*; of quanto, qgemm",
    ),
    "a convolution": (
        {**I8, "a.weight._data": torch.ones(8, 4, 4, 4).char()},
        r"reads int8 and e4m3, \[N, K\], so deq",
    ),
    "no scale": ({"a.weight._data": I8["a.weight._data"]}, "a.weight._scale is missing"),
    "scales of groups": ({**I8, "a.weight._scale": torch.ones(8, 2)}, r"a.weight._scale is .*\[8, 2\]"),
    "no scales": ({k: v for k, v in GOOD.items() if k != "a.weight._scale"}, "a.weight._scale is missing"),
    "no shift": (
        {k: v for k, v in GOOD.items() if k != "a.weight._shift"},
        "a.weight._shift is missing; it must be of",
    ),
    "int32": ({**GOOD, "a.weight._data._data": torch.ones(8, 32).int()}, "a.weight._data._data is torch.int32"),
    "fewer rows": (
        {**GOOD, "a.weight._data._data": GOOD["a.weight._data._data"][:6].clone()},
        "16 groups of 2 or 4 bits",
    ),
    "another model": (packed(4, 8, 128, 32)[0], r"layer a has 32 groups of 32 columns; the model's shape is \[8, 64\]"),
    "groups over rows": (
        packed(4, 4, 128, 128)[0],
        r"layer a has 4 groups of 128 columns; the model's shape is \[8, 64\]",
    ),
    "groups of 8": (packed(4, 8, 64, 8)[0], "a has groups of 8 columns; qgemm computes groups of any multiple of 16"),
    "too large": (
        {**packed(2, 8, 64, 32, True)[0], "a.weight._shift": torch.full((16, 1), 4, dtype=torch.uint8)},
        "shifts go up to 4; those of 2 bits go up to 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, 8, 64)


def test_a_layer_that_is_not_linear(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    for model, message in (
        (nn.ModuleDict({"a": nn.Conv1d(8, 8, 8)}), "quantizes a, a Conv1d, which qgemm can't compute"),
        (nn.ModuleDict({"b": nn.Linear(64, 8)}), "holds a quantized layer 'a', which the model doesn't have"),
    ):
        with pytest.raises(CheckpointError, match=message):
            qgemm.load_quantized(tmp_path, model=model)


@pytest.mark.parametrize("leaf", ["weight._scale", "weight._shift"])
def test_nan(leaf: str, tmp_path: Path) -> None:
    tensors = packed(4, 8, 64, 32)[0]
    tensors[f"a.{leaf}"][3] = torch.nan
    with pytest.raises(CheckpointError, match=r"a\.weight\._(scale|shift|data\._data) holds NaN"):
        load(tmp_path, tensors, 8, 64)
