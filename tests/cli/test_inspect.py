"""``qgemm inspect``: every format by its headers, every kind of damage, files that mean harm."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.foreign import edit_tensors
from checkpoint.rewriting import edited, rewrite_file
from checkpoint.samples import SAMPLES, every_sample, reference_weights
from safetensors.torch import load_file
from torch import Tensor

import qgemm
from cli.command import run, run_failing, run_json, write_checkpoint, zeros
from qgemm import CheckpointError
from qgemm.checkpoint.name_ranges import expand
from qgemm.nn import QuantExperts, QuantLayer
from qgemm_cli.checkpoint import open_checkpoint
from qgemm_cli.soundness import find_problems

UP = "model.layers.0.mlp.up_proj"
INDEX = "model.safetensors.index.json"
I8, I32, U8, F8 = torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, F32, F16, I64 = torch.bfloat16, torch.float32, torch.float16, torch.int64

# Format, config, tensors of the one quantized layer, and what they stand for: a weight of 64 x 32, 128 x 256 in blocks.
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Tensor], str, list[int]]] = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {"weight": zeros(I8, 64, 32), "weight_scale": torch.ones(64, 1, dtype=BF16)},
        "int8",
        [64, 32],
    ),
    "compressed-tensors, packed": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"weight_packed": zeros(I32, 64, 8), "weight_scale": torch.ones(64, 1), "weight_shape": zeros(I64, 2)},
        "int8",
        [64, 32],
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": zeros(I8, 64, 32), "SCB": torch.zeros(64), "weight_format": zeros(U8)},  # a row of zeros has SCB 0
        "int8",
        [64, 32],
    ),
    "bitsandbytes, 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": zeros(U8, 1024, 1),
            "weight.absmax": torch.ones(32),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__nf4": zeros(U8, 80),
        },
        "nf4",
        [2048],
    ),
    "bitsandbytes, fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": zeros(U8, 1024, 1),
            "weight.absmax": torch.ones(32),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__fp4": zeros(U8, 80),
        },
        "bnb-fp4",
        [2048],
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16},
        {
            "qweight": zeros(I32, 4, 64),
            "qzeros": zeros(I32, 2, 8),
            "scales": torch.ones(2, 64),
            "g_idx": zeros(I32, 32),
        },
        "int4",
        [64, 32],
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16},
        {"qweight": zeros(I32, 32, 8), "qzeros": zeros(I32, 2, 8), "scales": torch.ones(2, 64)},
        "int4",
        [64, 32],
    ),
    "compressed-tensors, nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {
            "weight_packed": zeros(U8, 64, 16),
            "weight_scale": zeros(F32, 64, 2).to(F8),
            "weight_global_scale": torch.ones(1),
        },
        "fp4",
        [64, 32],
    ),
    "modelopt": (
        {"quant_method": "modelopt"},
        {"weight": zeros(U8, 64, 16), "weight_scale": zeros(F32, 64, 2).to(F8), "weight_scale_2": torch.ones(())},
        "fp4",
        [64, 32],
    ),
    "eetq": (
        {"quant_method": "eetq"},
        {"weight": zeros(I8, 64, 32), "weight_scales": torch.ones(32)},
        "int8",
        [32, 64],
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": zeros(F32, 128, 256).to(F8), "weight_scale_inv": torch.ones(1, 2)},
        "fp8",
        [128, 256],
    ),
}


# What the headline calls each sample; its layers' schemes are those that they are loaded in.
SAMPLES_OF_LIBRARIES = {
    "auto-round-asym": "auto-round (4 bits, groups of 32)",
    "auto-round-gptq": "auto-round (4 bits, groups of 32)",
    "awq-gemm-g128": "awq (4 bits, groups of 128)",
    "awq-gemm-g32-skip": "awq (4 bits, groups of 32)",
    "bnb-fp4": "bitsandbytes (fp4)",
    "bnb-nf4": "bitsandbytes (nf4)",
    "bnb-nf4-double": "bitsandbytes (nf4)",
    "ct-fp8-block": "compressed-tensors (float-quantized)",
    "ct-fp8-dynamic": "compressed-tensors (float-quantized)",
    "ct-fp8-kv": "compressed-tensors (float-quantized)",
    "ct-fp8-static": "compressed-tensors (float-quantized)",
    "ct-mixed": "compressed-tensors (mixed-precision)",
    "ct-mxfp4a16": "compressed-tensors (mxfp4-pack-quantized)",
    "ct-mxfp8": "compressed-tensors (mxfp8-quantized)",
    "ct-nvfp4": "compressed-tensors (nvfp4-pack-quantized)",
    "ct-nvfp4a16": "compressed-tensors (nvfp4-pack-quantized)",
    "ct-w4a16-actorder-weight": "compressed-tensors (pack-quantized)",
    "ct-w4a16-g128": "compressed-tensors (pack-quantized)",
    "ct-w4a16-g32-asym": "compressed-tensors (pack-quantized)",
    "ct-w4a8-int": "compressed-tensors (int-quantized)",
    "ct-w4a8-int-packed": "compressed-tensors (pack-quantized)",
    "ct-w4afp8-packed": "compressed-tensors (pack-quantized)",
    "ct-w8a16-channel": "compressed-tensors (pack-quantized)",
    "ct-w8a16-g128-asym": "compressed-tensors (pack-quantized)",
    "eetq-int8": "eetq",
    "fbgemm-fp8": "fbgemm_fp8",
    "fp8-block128": "fp8 (blocks)",
    "fp8-block128-ue8m0": "fp8 (blocks)",
    "fp8-tensor-static": "fp8",
    "gptq-4bit-g128-sym": "gptq (4 bits, groups of 128)",
    "gptq-4bit-g32-desc-act": "gptq (4 bits, groups of 32)",
    "gptq-4bit-g64-asym-desc-act": "gptq (4 bits, groups of 64)",
    "gptq-8bit-channel": "gptq (8 bits)",
    "gptq-8bit-g128-asym": "gptq (8 bits, groups of 128)",
    "gptq-v2-4bit-g64-asym": "gptq (4 bits, groups of 64)",
    "hqq-4bit-g64": "hqq",
    "hqq-8bit-g32": "hqq",
    "metal-4bit": "metal (4 bits, groups of 32)",
    "mlx-mixed": "mlx (4 bits, groups of 64)",
    "mxfp4-gpt-oss": "mxfp4",
    "nvfp4-modelopt": "modelopt (NVFP4)",
    "quanto-mixed": "quanto",
    "quark-fp8-kv": "quark (fp8_e4m3)",
    "quark-int8-asym": "quark (int8)",
    "quark-mixed": "quark (fp4, uint4, fp8_e4m3)",
    "torchao-fp8wo": "torchao",
    "torchao-int4": "torchao",
    "torchao-int8wo": "torchao",
}


@pytest.mark.parametrize("name", every_sample())
def test_samples_of_other_libraries_are_what_is_loaded(name: str) -> None:
    found = run_json("inspect", SAMPLES / name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = qgemm.load_quantized(SAMPLES / name)
    assert (found["loads"], found["refusal"], found["problems"]) == (True, None, [])
    assert [str(each.message) for each in caught] == [f"{SAMPLES / name}: {note}" for note in found["notes"]]
    layers = [layer for layer in found["layers"] if layer["quantized"]]
    assert {layer["name"]: layer["shape"] for layer in layers} == {
        layer: wanted["shape"] for layer, wanted in reference_weights(name).items()
    }
    loaded = {path: module for path, module in model.named_modules() if isinstance(module, QuantLayer)}
    for path, experts in [(path, module) for path, module in loaded.items() if isinstance(module, QuantExperts)]:
        del loaded[path]
        loaded |= {f"{path}.gate_up_proj": experts, f"{path}.down_proj": experts}
    assert {layer["name"]: layer["scheme"] for layer in layers} == {
        path: module.scheme.name for path, module in loaded.items()
    }
    assert found["bytes"]["memory"] == sum(tensor.nbytes for tensor in {*model.state_dict(keep_vars=True).values()})
    headline = f"{SAMPLES_OF_LIBRARIES[name]}, {type(model).__name__}\n"
    shown = run("inspect", SAMPLES / name).stdout
    assert shown.startswith(headline)
    assert "\nqgemm loads it\n" in shown


def test_a_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {f"{UP}.{leaf}": value for leaf, value in FOREIGN["awq"][1].items()})
    (folder / "config.json").write_text("{}")
    assert run_json("inspect", folder)["variant"] == ""
    (folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 16, "version": "GEMM"}')
    found = run_json("inspect", folder)
    assert (found["format"], found["variant"], found["loads"]) == ("awq", "4 bits, groups of 16", True)
    (folder / "quant_config.json").write_text("{")
    assert any("quant_config.json" in problem for problem in run_json("inspect", folder, exit_code=1)["problems"])


@pytest.mark.parametrize("name", FOREIGN)
def test_formats_of_other_libraries(name: str, tmp_path: Path) -> None:
    quantization, layer, storage, shape = FOREIGN[name]
    tensors = {f"{UP}.{leaf}": tensor for leaf, tensor in layer.items()}
    weights = torch.Size(shape).numel()
    tensors["lm_head.weight"] = zeros(BF16, weights // 32, 32)
    tensors["model.embed_tokens.weight"] = zeros(BF16, 10, 32)
    tensors["model.norm.weight"] = zeros(BF16, 32)
    found = run_json("inspect", write_checkpoint(tmp_path / "it", tensors, quantization))
    assert found["format"] == quantization["quant_method"]
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert (layers[UP]["storage"], layers[UP]["shape"], layers[UP]["kind"]) == (storage, shape, "linear")
    assert layers[UP]["bytes"] == sum(tensor.nbytes for tensor in layer.values())
    assert found["coverage"] == 0.5  # the head is as large, the embedding doesn't count
    assert found["weights"] == 2 * weights + 320
    assert {name: layer["kind"] for name, layer in layers.items()} == {
        "lm_head": "linear",
        "model.embed_tokens": "embedding",
        UP: "linear",
        "model.norm": "other",
    }
    assert found["problems"] == []


def test_experts_in_one_tensor_count(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj": zeros(I8, 4, 16, 8),
        f"{experts}.gate_up_proj_scale": torch.ones(4, 16),
        f"{experts}.down_proj": zeros(BF16, 4, 8, 8),
        f"{experts}.down_proj_bias": zeros(BF16, 4, 8),
    }
    found = run_json("inspect", write_checkpoint(tmp_path, tensors))
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers[f"{experts}.gate_up_proj"]["bytes"] == 4 * 16 * 8 + 4 * 16 * 4
    assert layers[f"{experts}.down_proj"]["bytes"] == 2 * 4 * 8 * 9
    assert found["coverage"] == pytest.approx(512 / (512 + 256))


def test_a_checkpoint_of_qgemm(int8_folder: Path) -> None:
    found = run_json("inspect", int8_folder)
    model = qgemm.load_quantized(int8_folder)
    assert (found["format"], found["architecture"], found["loads"]) == ("qgemm", "LlamaForCausalLM", True)
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    quantized = [layer["name"] for layer in found["layers"] if layer["scheme"] == "int8"]
    assert set(quantized) == {name for name, m in model.named_modules() if isinstance(m, qgemm.QuantLinear)}
    assert found["coverage"] == 1.0
    files = list(int8_folder.glob("*.safetensors"))
    assert len(files) == 3
    assert found["bytes"]["disk"] == sum(file.stat().st_size for file in files)
    held = {*model.parameters(), *model.buffers()}
    assert found["bytes"]["memory"] == sum(tensor.nbytes for tensor in held)
    assert found["verified"]["bytes"] == found["bytes"]["tensors"]


def test_a_float_checkpoint(float_folder: Path) -> None:
    found = run_json("inspect", float_folder)
    assert (found["format"], found["loads"], found["coverage"]) == ("float", False, 0.0)


def test_the_table_has_a_row_for_a_kind_of_layer(int8_folder: Path) -> None:
    short = run("inspect", int8_folder).stdout
    assert "model.layers.{0..1}.mlp.up_proj" in short
    assert "no problems found" in short
    full = run("inspect", int8_folder, "--all").stdout
    assert "{0..1}" not in full
    assert "model.layers.1.mlp.up_proj" in full


def test_a_folder_its_index_and_one_file(int8_folder: Path) -> None:
    whole = run_json("inspect", int8_folder / INDEX)
    assert whole["layers"] == run_json("inspect", int8_folder)["layers"]
    file = sorted(int8_folder.glob("*.safetensors"))[0]
    assert "qgemm doesn't load it: it is a single file, without the config of its folder" in run("inspect", file).stdout
    part = run_json("inspect", file)
    assert len(part["files"]) == 1
    assert part["format"] in ("qgemm", "float")
    assert len(part["layers"]) < len(whole["layers"])


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    with edited(folder / INDEX) as values:
        edit(values["weight_map"])


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with edited(folder / "config.json") as values:
        edit(values)


def unlist(config: dict[str, Any]) -> None:
    layers = config["quantization_config"]["layers"]
    layers["int8"] = [name for name in expand(layers["int8"]) if name != UP]


def edit_tensor(folder: Path, name: str, edit: Callable[[Tensor], Tensor | None]) -> None:
    """As a program that knows no checksums would: they are gone."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    value = edit(tensors.pop(name))
    if value is not None:
        tensors[name] = value
    else:
        edit_index(folder, lambda names: names.pop(name))
    rewrite_file(path, tensors)


def flip_last_byte(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip_last_byte, "doesn't have the checksum"),
    "a scale of NaN": (
        lambda folder: edit_tensor(folder, f"{UP}.weight_scale", lambda t: t.fill_(torch.nan)),
        f"{UP}.weight_scale holds 48 of 48 scales that can't be",
    ),
    "a scale below 0": (
        lambda folder: edit_tensor(folder, f"{UP}.weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), -1)),
        "holds 1 of 48 scales",
    ),
    "scales of 0 alone": (
        lambda folder: edit_tensor(folder, f"{UP}.weight_scale", torch.zeros_like),
        "holds 48 of 48 scales",
    ),
    "no scale": (
        lambda folder: edit_tensor(folder, f"{UP}.weight_scale", lambda t: None),
        f"{UP}.weight is int8 but has no scale",
    ),
    "no weight": (
        lambda folder: edit_tensor(folder, f"{UP}.weight", lambda t: None),
        f"{UP}.weight_scale belongs to a weight that is missing",
    ),
    "a scale of another shape": (
        lambda folder: edit_tensor(folder, f"{UP}.weight_scale", lambda t: t[:-1].clone()),
        f"{UP}.weight_scale has shape [47], which doesn't fit a weight of [48, 32]",
    ),
    "a layer that isn't listed": (
        lambda folder: edit_config(folder, unlist),
        f"{UP} is quantized, but config.json doesn't list it",
    ),
    "a layer that isn't there": (
        lambda folder: edit_config(
            folder, lambda config: config["quantization_config"]["layers"]["int8"].append("model.layers.9.mlp")
        ),
        "config.json says that model.layers.9.mlp is quantized",
    ),
    "a tie to nothing": (
        lambda folder: edit_config(folder, lambda config: config["quantization_config"]["tied"].update(a="b")),
        "config.json ties a to b, which no file holds",
    ),
    "a block too few": (
        lambda folder: edit_config(folder, lambda config: config.update(num_hidden_layers=4)),
        "model.layers has 2 of 4 blocks: {2..3} is missing",
    ),
    "an index that leads out": (
        lambda folder: edit_index(folder, lambda names: names.update({f"{UP}.weight": "../float/model.safetensors"})),
        "'../float/model.safetensors' is not a plain file name",
    ),
    "an index with another file": (
        lambda folder: edit_index(
            folder, lambda names: names.update({f"{UP}.weight": "model-00009-of-00009.safetensors"})
        ),
        "has no file model-00009-of-00009.safetensors",
    ),
    "a shard cut off": (
        lambda folder: os.truncate(sorted(folder.glob("*.safetensors"))[1], 3000),
        "is truncated or no safetensors file",
    ),
    "a config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(name: str, int8_folder: Path) -> None:
    damage, message = DAMAGES[name]
    damage(int8_folder)
    found = run_json("inspect", int8_folder, exit_code=1)
    assert any(message in problem for problem in found["problems"]), found["problems"]
    assert found["layers"]
    shown = run("inspect", int8_folder, exit_code=1).stdout
    assert "problem: " in shown
    assert "\nqgemm loads it\n" not in shown


def test_values_are_not_read_where_that_is_not_wanted(int8_folder: Path) -> None:
    flip_last_byte(int8_folder)
    assert run_json("inspect", int8_folder, "--no-verify")["verified"] is None


def test_a_row_of_zeros_may_have_a_scale_of_0(int8_folder: Path) -> None:
    edit_tensor(int8_folder, f"{UP}.weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), 0))
    assert run_json("inspect", int8_folder)["problems"] == []


def test_every_damaged_tensor_is_named(int8_folder: Path) -> None:
    for name in ("k_proj", "q_proj"):
        edit_tensor(int8_folder, f"model.layers.0.self_attn.{name}.weight_scale", lambda t: -t)
    found = run_json("inspect", int8_folder, exit_code=1)
    assert len([problem for problem in found["problems"] if "scales that can't be" in problem]) == 2


def test_a_block_in_the_middle_is_missed(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": zeros(F32, 4, 4) for i in (0, 1, 3)}
    found = run_json("inspect", write_checkpoint(tmp_path, tensors), exit_code=1)
    assert found["problems"] == ["model.layers has 3 of 4 blocks: 2 is missing"]


def test_thousands_of_lists_of_blocks_are_not_counted(tmp_path: Path) -> None:
    # Minutes, if each block that isn't there were looked for.
    tensors = {f"m{i}.layers.99999.mlp.weight": zeros(F32, 1) for i in range(3000)}
    start = time.perf_counter()
    problems = list(find_problems(open_checkpoint(write_checkpoint(tmp_path, tensors)), []))
    assert time.perf_counter() - start < 5
    assert problems[0] == "m0.layers has 1 of 100000 blocks"
    assert len(problems) == 3000


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert "is neither a folder nor a file" in run_failing("inspect", tmp_path / "nowhere")
    assert "hf download someone/model --local-dir model" in run_failing("inspect", "someone/model")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no file model.safetensors" in run_failing("inspect", empty)
    (empty / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "holds pytorch_model.bin, a pickle, and no model.safetensors" in run_failing("inspect", empty)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(b"\xff" * 20)
    assert "is truncated or no safetensors file" in run_failing("inspect", cut)
    assert "is not a safetensors file" in run_failing("inspect", empty / "pytorch_model.bin")
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    assert "model.safetensors is a pipe; only regular files are read" in run_failing("inspect", tmp_path)
    assert "is neither a folder nor a file" in run_failing("inspect", tmp_path / "model.safetensors")


def test_names_are_shown_without_what_a_terminal_acts_on(tmp_path: Path) -> None:
    evil = "a\x1b]0;owned\x07\x1b[2J[red]b\r"
    tensors = {f"{evil}.weight_scale": zeros(F32, 4), "x" * 5000: zeros(F32, 1)}
    folder = write_checkpoint(tmp_path, tensors, {"quant_method": "fp8"})
    shown = run("inspect", folder, exit_code=1).stdout
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\x07" not in shown
    assert "[red]b" in shown  # no markup either
    assert "x" * 1000 not in shown
    assert "\x1b" not in run("inspect", folder, "--json", exit_code=1).stdout


def test_many_layers_fit_a_screen(tmp_path: Path) -> None:
    tensors = {f"layer{i}x.weight": zeros(F32, 1, 1) for i in range(300)}
    shown = run("inspect", write_checkpoint(tmp_path, tensors)).stdout
    assert "and 100 rows more: --all shows every layer" in shown
    assert "layer299x" in run("inspect", tmp_path, "--all").stdout


@pytest.mark.parametrize("bits", [0, -4, "4", True, 10**9])
def test_a_config_with_bits_that_cannot_be(bits: Any, tmp_path: Path) -> None:
    tensors = {"a.qweight": zeros(I32, 4, 64), "a.scales": torch.ones(2, 64), "a.qzeros": zeros(I32, 2, 8)}
    folder = write_checkpoint(tmp_path, tensors, {"quant_method": "gptq", "bits": bits, "group_size": "\x1b[2J"})
    assert run_json("inspect", folder)["layers"][0]["shape"] == [64, 32]
    assert "\x1b" not in run("inspect", folder).stdout


def test_layers_in_different_bits_have_their_own_shapes() -> None:
    # The config's first group has 8 bits, of which a word has 4 values and not 8.
    found = run_json("inspect", SAMPLES / "ct-mixed")
    assert found["weights"] == 2 * (2 * 256 * 128 + 256 * 128 + 2 * 128 * 128 + 2 * 64 * 128) + 256 * 128
    quantized, wanted = [each for each in found["layers"] if each["quantized"]], reference_weights("ct-mixed")
    assert {layer["storage"] for layer in quantized} == {"int4", "fp8"}
    assert all(layer["shape"] == wanted[layer["name"]]["shape"] for layer in quantized)


def test_what_does_not_go_into_the_model_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / "gptq-4bit-g128-sym", tmp_path / "copy"))
    edit_tensors(folder, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(CheckpointError) as caught:
        qgemm.load_quantized(folder)
    assert "tensors that the model doesn't have: extra" in str(caught.value)
    found = run_json("inspect", folder)
    assert (found["loads"], found["refusal"], found["problems"]) == (False, str(caught.value), [])
    # Of a model that isn't transformers', nobody knows its tensors.
    edit_config(folder, lambda config: config.update(architectures=["Another"]))
    assert run_json("inspect", folder)["loads"]
