"""``qgemm convert`` of other libraries' samples, into every format that it writes: the same model, or a refusal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import needs_the_library, relative, same_tensors
from checkpoint.samples import IDS, NAMES, SAMPLES, USUAL, every_sample, load_sample
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import qgemm
from cli.command import run, run_failing, run_json
from qgemm.nn import QuantExperts, QuantLayer

# What a format has no place for, and the scheme that says so.
REFUSED = {
    "qgemm": {},
    "compressed-tensors": {
        "bnb-fp4": "bnb-fp4",
        "bnb-nf4": "nf4",
        "bnb-nf4-double": "nf4",
        "gptq-4bit-g32-desc-act": "int4-32-ordered",
        "gptq-4bit-g64-asym-desc-act": "int4-64-asymmetric-ordered",
        "hqq-4bit-g64": "int4-64-float-zeros",
        "hqq-8bit-g32": "int8-weight-32-float-zeros",
        "metal-4bit": "int4-32-float-zeros",
        "mlx-mixed": "int4-64-float-zeros",
        "quanto-mixed": "int4-channel-float-zeros",
        "torchao-int4": "int4-32-float-zeros",
    },
    "gptq": {
        "bnb-fp4": "bnb-fp4",
        "bnb-nf4": "nf4",
        "bnb-nf4-double": "nf4",
        "ct-fp8-block": "fp8-block",
        "ct-fp8-dynamic": "fp8",
        "ct-fp8-kv": "fp8",
        "ct-fp8-static": "fp8-static",
        "ct-mixed": "fp8",
        "ct-mxfp4a16": "mxfp4",
        "ct-mxfp8": "mxfp8",
        "ct-nvfp4": "nvfp4",
        "ct-nvfp4a16": "nvfp4",
        "ct-w4a8-int": "int4-int8",
        "ct-w4a8-int-packed": "int4-channel-int8",
        "fbgemm-fp8": "fp8",
        "fp8-block128": "fp8-block",
        "fp8-block128-ue8m0": "fp8-block",
        "fp8-tensor-static": "fp8-static",
        "hqq-4bit-g64": "int4-64-float-zeros",
        "hqq-8bit-g32": "int8-weight-32-float-zeros",
        "metal-4bit": "int4-32-float-zeros",
        "mlx-mixed": "int4-64-float-zeros",
        "mxfp4-gpt-oss": "mxfp4",
        "nvfp4-modelopt": "nvfp4",
        "quanto-mixed": "int4-channel-float-zeros",
        "quark-fp8-kv": "fp8-static",
        "quark-int8-asym": "int8-static-asymmetric",
        "quark-mixed": "fp8-weight",
        "torchao-fp8wo": "fp8-weight",
        "torchao-int4": "int4-32-float-zeros",
    },
}
# All others run with --complete.
USUALLY = {
    *(("qgemm", name) for name in ("auto-round-gptq", "bnb-nf4-double", "ct-mixed", "torchao-fp8wo")),
    *(("compressed-tensors", name) for name in ("mxfp4-gpt-oss", "bnb-nf4", "fp8-block128", "nvfp4-modelopt")),
    *(("gptq", name) for name in ("awq-gemm-g32-skip", "gptq-4bit-g64-asym-desc-act", "ct-w4a8-int")),
}
INT8 = {("nvfp4-modelopt", "qgemm"), ("awq-gemm-g32-skip", "compressed-tensors")}
PAIRS = [
    pytest.param(name, to, marks=[] if (to, name) in USUALLY else pytest.mark.complete)
    for to in REFUSED
    for name in NAMES
]
pytestmark = pytest.mark.filterwarnings("ignore:.*tests/data/formats", "ignore:transformers reads no files")


def load(folder: Path, **options: Any) -> Any:
    return qgemm.load_quantized(folder, **options).float()


@pytest.mark.parametrize(("name", "to"), PAIRS)
@torch.no_grad()
def test_into_every_format(name: str, to: str, tmp_path: Path) -> None:
    source, out = SAMPLES / name, tmp_path / "out"
    if name in REFUSED[to]:
        message = run_failing("convert", source, out, "--to", to)
        layer, _, rest = message.removeprefix("qgemm: ").partition(" has the scheme ")
        assert isinstance(load_sample(name)[0].get_submodule(layer), QuantLayer)
        assert rest.startswith(f"'{REFUSED[to][name]}', ")
        assert 'save it with --to "qgemm", or load or quantize it with --scheme "' in rest
        way_out = rest.partition("--scheme ")[2].split('"')[1]
        run("convert", source, out, "--to", to, "--scheme", way_out)
        assert run_json("inspect", out)["format"] == to
        shutil.rmtree(out)
        assert not out.exists()
        return
    run("convert", source, out, "--to", to)
    found = run_json("inspect", out)
    assert (found["format"], found["loads"], found["problems"]) == (to, True, [])
    model, wanted = load(out), load_sample(name)[0]
    if (name, to) == ("nvfp4-modelopt", "compressed-tensors"):  # the reciprocal of its global scale is rounded
        assert relative(model(IDS).logits, wanted(IDS).logits) < 1e-6
        return
    assert same_tensors(model, wanted)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    # And as the command itself sees it.
    compared = run_json("compare", source, out, "--tolerance", 0)
    assert compared["same"] == len(compared["layers"]) > 7
    # What said how the weights were quantized isn't true of these.
    assert not list(out.glob("quant*_config.json"))


# By how much the library's logits differ where it rounds activations in another way: int8 ones are the maximum / 127.5,
# and a value between two of fp8 may become the other.
COARSE = {"ct-w4a8-int": 0.05, "ct-w4a8-int-packed": 0.05, "fp8-tensor-static": 0.001}
# The library makes these bfloat16, whatever the dtype of the model.
BFLOAT16 = {"ct-mxfp4a16", "ct-mxfp8", "ct-nvfp4", "ct-nvfp4a16", "nvfp4-modelopt", "quark-mixed"}


@needs_the_library
@pytest.mark.parametrize(
    "name",
    [
        parameter
        for parameter in every_sample(["auto-round-gptq", "torchao-fp8wo"])
        # GPT-OSS's experts, and groups of activations that aren't whole: save_quantized warns of both.
        if parameter.values[0] not in {*REFUSED["compressed-tensors"], "mxfp4-gpt-oss", "fp8-block128"}
    ],
)
@torch.no_grad()
def test_the_library_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    run("convert", SAMPLES / name, tmp_path / "out", "--to", "compressed-tensors")
    dtype = torch.bfloat16 if name in BFLOAT16 else torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    ours = load_sample(name)[0]
    error = relative(theirs(IDS).logits.float(), ours(IDS).logits)  # this is also when it dequantizes
    for path, module in ours.named_modules():
        if isinstance(module, QuantLayer):
            assert torch.equal(theirs.get_submodule(path).weight, module.dequantize(dtype).weight), path
    assert error < (0.02 if name in BFLOAT16 else COARSE.get(name, 1e-5))


@pytest.mark.filterwarnings("error:.*groups of 128")
def test_groups_of_activations_that_are_not_whole(tmp_path: Path) -> None:
    # The library, transformers and vLLM raise where 320 columns are to be quantized in groups of 128.
    for name in ("fp8-block128-ue8m0", "fp8-block128"):
        model = load(SAMPLES / name)
        if name == "fp8-block128-ue8m0":
            qgemm.save_quantized(model, tmp_path / name, format="compressed-tensors")
        else:
            with pytest.warns(UserWarning, match=r"model.layers.0.mlp.down_proj has 320 input columns, and .* of 128"):
                qgemm.save_quantized(model, tmp_path / name, format="compressed-tensors")


def weights(module: nn.Module) -> dict[str, Tensor]:
    assert isinstance(module, QuantLayer)
    found = module.dequantize(torch.float32)
    return found if isinstance(module, QuantExperts) else {"weight": found.weight}


@pytest.mark.parametrize(
    ("name", "to"),
    [
        pytest.param(name, to, marks=[] if (name, to) in INT8 else pytest.mark.complete)
        for to in ("qgemm", "compressed-tensors")
        for name in USUAL
    ],
)
@torch.no_grad()
def test_into_int8(name: str, to: str, tmp_path: Path) -> None:
    run("convert", SAMPLES / name, tmp_path / "out", "--to", to, "--scheme", "int8")
    model, source = load(tmp_path / "out"), load_sample(name)[0]
    wanted = load(SAMPLES / name, scheme="int8")
    assert same_tensors(model, wanted)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    layers = {path for path, module in source.named_modules() if isinstance(module, QuantLayer)}
    assert layers == {path for path, module in model.named_modules() if isinstance(module, QuantLayer)}
    for path in layers:
        assert model.get_submodule(path).scheme.name == "int8"
        was = weights(source.get_submodule(path))
        for leaf, weight in weights(model.get_submodule(path)).items():
            if weight.ndim > 1 and "bias" not in leaf:
                step = was[leaf].abs().amax(-1) / 127
                assert bool(((weight - was[leaf]).abs().amax(-1) <= 0.5001 * step).all()), (path, leaf)
