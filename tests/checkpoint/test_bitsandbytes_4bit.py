"""bitsandbytes' nf4 and fp4: samples, sizes that aren't multiples of its blocks by the library itself, damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qgemm
from checkpoint.foreign import edit_tensors
from checkpoint.packers import linears
from checkpoint.samples import SAMPLES, layers_in, logit_error
from qgemm import CheckpointError
from qgemm.numerics.packing import unpack_codes

LAYER = "model.layers.1.mlp.up_proj"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
KIND = pytest.mark.parametrize("kind", ["nf4", "fp4"])
SCHEMES = {"nf4": "nf4", "fp4": "bnb-fp4"}


@pytest.mark.parametrize(("name", "scheme"), [("bnb-nf4", "nf4"), ("bnb-nf4-double", "nf4"), ("bnb-fp4", "bnb-fp4")])
def test_samples(name: str, scheme: str) -> None:
    layers = layers_in(scheme, name).values()
    assert {layer.weight_scale.dtype for layer in layers} == {torch.float32}
    assert logit_error(name) < 1e-6


def by_the_library(weight: Tensor, folder: Path, storage: torch.dtype = torch.uint8, **options: Any) -> Tensor:
    """Writes ``weight`` as the only one of a model, as transformers would; returns what the library's values mean.

    Its own ``dequantize_4bit`` on a CPU is wrong where blocks go over the ends of rows (0.50.2).
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, quant_storage=storage, **options)
    parts = {f"a.weight.{leaf}": value for leaf, value in state.as_dict(packed=True).items()}
    save_file({"a.weight": packed, **parts}, folder / "model.safetensors")
    quantization = {**CONFIG, "bnb_4bit_quant_type": state.quant_type}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    octets, absmax = packed.flatten().view(torch.uint8), state.absmax
    if state.nested:
        absmax = dequantize_blocks(state.state2, absmax) + state.offset
    codes = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()[: weight.numel()]
    found = dequantize_blocks(SimpleNamespace(code=state.code, absmax=absmax, blocksize=state.blocksize), codes)
    found = found.reshape(weight.shape)
    if weight.shape[1] % state.blocksize == 0:
        assert torch.equal(found, dequantize_4bit(packed, state))
    return found


def dequantize_blocks(state: Any, codes: Tensor) -> Tensor:
    return state.code[codes.int()] * state.absmax[torch.arange(len(codes)) // state.blocksize]


@KIND
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("K", "size"), [(48, 16), (96, 32), (192, 64), (320, 64), (144, 16)])
def test_blocks_go_over_the_ends_of_rows(K: int, size: int, double: bool, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(K)
    weight = by_the_library(torch.randn(37, K), tmp_path, quant_type=kind, compress_statistics=double)
    model: Any = qgemm.load_quantized(tmp_path, model=linears(a=(37, K)))
    assert model["a"].scheme.name == (SCHEMES[kind] if size == 64 else f"{SCHEMES[kind]}-{size}")
    assert model["a"].group_size == size
    assert torch.equal(model["a"].dequantize(torch.float32).weight, weight)


@KIND
@pytest.mark.parametrize("block", [128, 256, 4096])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_other_blocks_and_dtypes_of_bytes(block: int, storage: torch.dtype, kind: str, tmp_path: Path) -> None:
    weight = by_the_library(torch.randn(16, 128), tmp_path, storage, quant_type=kind, blocksize=block)
    model: Any = qgemm.load_quantized(tmp_path, model=linears(a=(16, 128)))
    assert model["a"].group_size == 128
    assert torch.equal(model["a"].dequantize(torch.float32).weight, weight)


def test_every_code_keeps_its_value(tmp_path: Path) -> None:
    """Of fp4 both of 0: the code is loaded as it is, and saved so."""
    by_the_library(torch.randn(16, 64), tmp_path, quant_type="fp4")
    codes = torch.arange(16, dtype=torch.uint8).repeat(64)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"a.weight": (codes[::2] << 4 | codes[1::2])[:, None]}))
    tensors = load_file(tmp_path / "model.safetensors")
    wanted = tensors["a.weight.quant_map"][codes.int()].view(16, 64) * tensors["a.weight.absmax"][:, None]
    model: Any = qgemm.load_quantized(tmp_path, model=linears(a=(16, 64)))
    assert torch.equal(unpack_codes(model["a"].weight, 64), codes.view(16, 64))
    assert torch.equal(model["a"].dequantize(torch.float32).weight, wanted)
    qgemm.save_quantized(model, tmp_path / "saved")
    again: Any = qgemm.load_quantized(tmp_path / "saved", model=linears(a=(16, 64)))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_layers_of_both_kinds(tmp_path: Path) -> None:
    weights, tensors = {}, {}
    for name, kind in (("a", "nf4"), ("b", "fp4")):
        weights[name] = by_the_library(torch.randn(16, 64), tmp_path, quant_type=kind)
        found = load_file(tmp_path / "model.safetensors")
        tensors |= {name + key[1:]: value for key, value in found.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model: Any = qgemm.load_quantized(tmp_path, model=linears(a=(16, 64), b=(16, 64)))
    assert [model[name].scheme.name for name in "ab"] == ["nf4", "bnb-fp4"]
    assert all(torch.equal(model[name].dequantize(torch.float32).weight, weight) for name, weight in weights.items())


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    by_the_library(torch.randn(16, 64), tmp_path, quant_type="nf4")
    state = "a.weight.quant_state.bitsandbytes__"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{state}af4": tensors.pop(f"{state}nf4")}))
    problem = r"layer a is bitsandbytes' 'af4'; of its 4 bits qgemm reads 'nf4' and 'fp4'"
    way_out = "so dequantize it with its own library and quantize the float model"
    with pytest.raises(CheckpointError, match=f"{problem}, {way_out}"):
        qgemm.load_quantized(tmp_path, model=linears(a=(16, 64)))


def test_a_layer_of_two_kinds_is_refused(tmp_path: Path) -> None:
    by_the_library(torch.randn(16, 64), tmp_path, quant_type="nf4")
    state = "a.weight.quant_state.bitsandbytes__"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{state}fp4": tensors[f"{state}nf4"].clone()}))
    with pytest.raises(CheckpointError, match=f"a has both {state}(fp4|nf4) and {state}(fp4|nf4); it must have one"):
        qgemm.load_quantized(tmp_path, model=linears(a=(16, 64)))


def test_a_kind_with_the_codes_of_the_other_is_refused(tmp_path: Path) -> None:
    by_the_library(torch.randn(16, 64), tmp_path, quant_type="nf4")
    state = "a.weight.quant_state.bitsandbytes__"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{state}fp4": tensors.pop(f"{state}nf4")}))
    with pytest.raises(CheckpointError, match=r"a.weight: its quant_map isn't that of fp4"):
        qgemm.load_quantized(tmp_path, model=linears(a=(16, 64)))


def test_groups_too_small_are_refused(tmp_path: Path) -> None:
    by_the_library(torch.randn(16, 40), tmp_path, quant_type="nf4")
    with pytest.raises(CheckpointError, match=r"a has 40 columns and blocks of 64, .* groups of 8 values"):
        qgemm.load_quantized(tmp_path, model=linears(a=(16, 40)))


STATE = "weight.quant_state.bitsandbytes__nf4"


def put(leaf: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        value = change(tensors.pop(f"{LAYER}.{leaf}"))
        if value is not None:
            tensors[f"{LAYER}.{leaf}"] = value.contiguous()

    return edit


def say(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(value: Tensor) -> Tensor:
        return as_bytes(json.dumps({**json.loads(bytes(value.tolist())), **changes}))

    return put(STATE, change)


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scales": (put("weight.absmax", lambda v: None), r"weight.absmax is missing; it must be torch.uint8, \[512\]"),
    "few scales": (put("weight.absmax", lambda v: v[1:]), r"weight.absmax is torch.uint8 \[511\]"),
    "no weight": (
        put("weight", lambda v: None),
        r"up_proj.weight is missing; it must be the 16384 bytes of \[256, 128\]",
    ),
    "half a weight": (put("weight", lambda v: v[::2]), r"up_proj.weight is torch.uint8 \[8192, 1\]"),
    "other codes": (put("weight.quant_map", lambda v: v * 2), r"quant_map isn't that of nf4"),
    "no codes": (put("weight.quant_map", lambda v: None), r"quant_map is missing"),
    "no nested map": (put("weight.nested_quant_map", lambda v: None), r"nested_quant_map is missing"),
    "NaN": (put("weight.nested_absmax", lambda v: v * torch.nan), r"absmax holds NaN"),
    "no text": (put(STATE, lambda v: v[:9]), r"bitsandbytes__nf4 isn't an object in JSON"),
    "a deep text": (put(STATE, lambda v: as_bytes("[" * 60000)), r"isn't an object in JSON"),
    "floats": (put(STATE, Tensor.float), r"bitsandbytes__nf4 is torch.float32"),
    "wrong shape": (say(shape=[128, 256]), r"has the shape \[128, 256\]; the model's is \[256, 128\]"),
    "one size": (say(shape=[32768]), r"has the shape \[32768\]; it must be \[N, K\]"),
    "vast": (say(shape=[2**40, 2**40]), r"has the shape"),
    "negative": (say(shape=[-256, -128]), r"has the shape"),
    "no block": (say(blocksize=0), r"has the blocksize 0"),
    "odd block": (say(blocksize=100), r"weight.absmax|nested_absmax"),
    "no offset": (say(nested_offset=None), r"nested_offset None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    edit, message = REFUSED[case]
    folder = Path(shutil.copytree(SAMPLES / "bnb-nf4-double", tmp_path / "copy"))
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder)
