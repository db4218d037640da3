"""Good checkpoints of other libraries for the fuzzer, and what can be wrong with theirs alone.

Here are those of compressed-tensors, fp8, ModelOpt and bitsandbytes' int8; ``fuzz_packed.py`` has the others.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from checkpoint.fuzz_breaks import BREAKS, Break, add_to_layers, retie, rewrite_values
from checkpoint.fuzz_json import NUMBERS, OTHERS, Unfit, break_manifest, content_of, dump
from checkpoint.fuzz_models import CONFIG, INDEX, Files, FuzzNet, Good, load_saved, quantized_fuzz_net, quantized_llama
from checkpoint.fuzz_packed import load_shard, make_packed, put_shard
from checkpoint.rewriting import set_save
from qgemm import QuantExperts, QuantLinear
from qgemm.checkpoint import compressed_tensors_writer, save_quantized
from qgemm.nn import linear_class
from qgemm.numerics.packing import pack_codes

Tensors = dict[str, Tensor]


def make_foreign(folder: Path) -> list[Good]:
    """Both formats, of a transformers model and of another, in several files and in one; written into ``folder``.

    A layer in each of many formats; DeepSeek's fp8, ModelOpt's nvfp4; a layer for each expert, put together when read.
    """
    made = []
    for name, model, build, shard_size in (
        ("llama", quantized_llama().to(torch.bfloat16), None, 1500),
        ("net", quantized_fuzz_net(), FuzzNet, "5GB"),
    ):
        save_quantized(model, folder / name, max_shard_size=shard_size, format="compressed-tensors")
        _edit_shards(folder / name, _as_the_library_has_them)
        made.append(_good(folder / name, build, from_compressed_tensors))
    save_quantized(packed_net(), folder / "packed", format="compressed-tensors")
    made.append(_good(folder / "packed", PackedNet, from_compressed_tensors))
    for name, scheme, rename, quantization in (
        ("fp8", "fp8-block", {"weight_scale": "weight_scale_inv"}, {"weight_block_size": [128, 128]}),
        ("modelopt", "nvfp4", {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}, {}),
    ):
        save_quantized(net_of(scheme), folder / name, format="compressed-tensors")
        _edit_shards(folder / name, partial(_renamed, rename))
        path = folder / name / CONFIG
        own = {"quant_method": name, **quantization}
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": own}))
        made.append(_good(folder / name, OneNet, from_compressed_tensors))
    _write_mixture(quantized_mixture(), folder / "mixture")
    made.append(_good(folder / "mixture", None, mixture_from_compressed_tensors))
    for name, model, build, shard_size in (
        ("llama8", quantized_llama(), None, 1500),
        ("net8", quantized_fuzz_net("int8"), FuzzNet, "5GB"),
    ):
        save_quantized(model, folder / name, max_shard_size=shard_size, format="compressed-tensors")
        _edit_shards(folder / name, _to_bitsandbytes)
        path = folder / name / CONFIG
        quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
        made.append(_good(folder / name, build, from_bitsandbytes))
    return made + make_packed(folder, FOREIGN_BREAKS)


def _good(folder: Path, build: Callable[[], nn.Module] | None, meaning: Callable[[Tensors], Tensors]) -> Good:
    saved = load_saved(folder, build)
    return Good(saved.files, saved.state, saved.output, build, meaning, FOREIGN_BREAKS)


MIXED = ("int4", "int4-channel", "int8", "int4-32-asymmetric", "int8-weight-64-asymmetric", "fp8", "fp8-weight") + (
    "fp8-block",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "int4-int8",
)


class PackedNet(FuzzNet):
    """A layer in each of many formats."""

    def __init__(self) -> None:
        super().__init__(256, len(MIXED))


class OneNet(FuzzNet):
    """One layer of more than one block."""

    def __init__(self) -> None:
        super().__init__(160, 1)


def packed_net() -> FuzzNet:
    """Packed, plain, with zero points, in whole numbers and in floats."""
    torch.manual_seed(0)
    model = PackedNet()
    for i, scheme in enumerate(MIXED):
        model.layers[i] = linear_class(scheme).from_linear(model.layers[i], scheme)
    return model.eval()


def net_of(scheme: str) -> FuzzNet:
    torch.manual_seed(0)
    model = OneNet()
    model.layers[0] = linear_class(scheme).from_linear(model.layers[0], scheme)
    return model.eval()


def _renamed(leaves: dict[str, str], name: str, tensor: Tensor) -> Tensors:
    layer, _, leaf = name.rpartition(".")
    # ModelOpt multiplies by what compressed-tensors divides by.
    value = 1 / tensor if leaf == "weight_global_scale" else tensor
    return {f"{layer}.{leaves.get(leaf, leaf)}" if layer else leaf: value}


def quantized_mixture() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "head_dim": 4,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=8, max_position_embeddings=16, **sizes, **heads))
    for layer in model.model.layers:
        layer.self_attn.q_proj = QuantLinear.from_linear(layer.self_attn.q_proj)
        layer.mlp.experts = QuantExperts.from_experts(layer.mlp.experts)
    return model.eval()


def _write_mixture(model: nn.Module, folder: Path) -> None:
    save_quantized(model, folder)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (match := _FUSED.fullmatch(name)) is None:
            tensors[name] = tensor[:, None] if name.endswith("weight_scale") else tensor
            continue
        experts, fused, suffix = match.groups()
        leaves = ("gate", "up") if fused == "gate_up" else ("down",)
        for number, values in enumerate(tensor):
            for leaf, part in zip(leaves, values.chunk(len(leaves)), strict=True):
                own = part[:, None] if suffix else part
                tensors[f"{experts}.{number}.{leaf}_proj.weight{suffix or ''}"] = own.contiguous()
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    path = folder / CONFIG
    linear = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    quantization = compressed_tensors_writer.quantization_config(model, linear)  # type: ignore[arg-type]
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_scale)?")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(_scale)?")


def mixture_from_compressed_tensors(files: Tensors) -> Tensors:
    """As ``from_compressed_tensors``, for a model with experts."""
    found = from_compressed_tensors(files)
    numbers: dict[str, int] = {}
    for name in list(found):
        if match := _SINGLE.fullmatch(name):
            numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]) + 1)
    for experts, count in numbers.items():
        for suffix in ("", "_scale"):
            of = {}
            for leaf in ("gate", "up", "down"):
                parts = [found.pop(f"{experts}.{e}.{leaf}_proj.weight{suffix}") for e in range(count)]
                of[leaf] = torch.stack([part.flatten() for part in parts] if suffix else parts)
            found[f"{experts}.gate_up_proj{suffix}"] = torch.cat((of["gate"], of["up"]), dim=1)
            found[f"{experts}.down_proj{suffix}"] = of["down"]
    return found


def _edit_shards(folder: Path, edit: Callable[[str, Tensor], Tensors]) -> None:
    index = folder / INDEX
    places = {}
    for path in folder.glob("*.safetensors"):
        tensors: Tensors = {}
        for name, tensor in load_file(path).items():
            tensors.update(edit(name, tensor))
        path.write_bytes(save(tensors, {"format": "pt"}))
        places.update(dict.fromkeys(tensors, path.name))
    if index.exists():
        index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": places}))
    for path in (index, folder / CONFIG):
        if path.exists():
            set_save(path, None)


def _as_the_library_has_them(name: str, tensor: Tensor) -> Tensors:
    """Scales in bfloat16 and, as older versions wrote, zero points that are zero."""
    if name.endswith("layers.0.mlp.up_proj.weight_scale"):
        zero = torch.zeros(tensor.shape, dtype=torch.int8)
        return {name: tensor.bfloat16(), name.replace("scale", "zero_point"): zero}
    return {name: tensor.bfloat16() if "model." in name and "_scale" in name else tensor}


def _to_bitsandbytes(name: str, tensor: Tensor) -> Tensors:
    if not name.endswith(".weight_scale"):
        return {name: tensor}
    layer = name.removesuffix(".weight_scale")
    return {f"{layer}.SCB": tensor[:, 0] * 127, f"{layer}.weight_format": torch.tensor(0, dtype=torch.uint8)}


def from_compressed_tensors(files: Tensors) -> Tensors:
    """What the tensors of such files stand for in a model of qgemm; by the format's description, not by its reader.

    Those of DeepSeek's fp8 and of ModelOpt's nvfp4, too, which have other names.
    """
    layers: dict[str, Tensors] = {}
    for name, tensor in files.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = tensor
    return {
        f"{layer}.{leaf}" if layer else leaf: tensor
        for layer, own in layers.items()
        for leaf, tensor in _meaning(own).items()
    }


def _meaning(own: Tensors) -> Tensors:
    scale = own.get("weight_scale", own.get("weight_scale_inv"))
    found = {leaf: tensor for leaf, tensor in own.items() if leaf in ("weight", "bias")}
    if scale is None:
        return own
    weight = own.get("weight_packed", own.get("weight"))
    if weight is None:
        return found
    rows = weight.shape[0]
    scale = scale.repeat(rows) if scale.numel() == 1 else scale
    found["weight_scale"] = scale if scale.dtype in (torch.uint8, torch.float8_e4m3fn) else scale.float()
    if "input_scale" in own:
        found["input_scale"] = own["input_scale"].float().squeeze()
    if weight.dtype == torch.uint8:
        # Two codes in a byte, the first in its low bits.
        codes = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)
        found["weight"] = pack_codes(codes)
        if (number := own.get("weight_global_scale")) is not None:
            found["weight_global_scale"] = torch.stack((1 / number.reshape(()), torch.tensor(1.0)))
        elif (number := own.get("weight_scale_2")) is not None:
            found["weight_global_scale"] = torch.stack((number.reshape(()), torch.tensor(1.0)))
    elif weight.dtype == torch.int32 and "weight_shape" in own:
        columns = own["weight_shape"].tolist()[-1]
        bits = 4 if weight.shape[1] == -(-columns // 8) else 8
        fields = _fields(weight, bits, columns)
        signed = (fields - (1 << (bits - 1))).to(torch.int8)
        found["weight"] = pack_codes((signed & 15).view(torch.uint8)) if bits == 4 else signed
        if (zero_point := own.get("weight_zero_point")) is not None and zero_point.dtype == torch.int32:
            fields = _fields(zero_point.t(), bits, rows).t()
            found["weight_zero_point"] = (fields - (1 << (bits - 1))).to(torch.int8)
    return found


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The numbers in the words of a row, the first in the lowest bits of the first."""
    shifts = torch.arange(0, 32, bits)
    return (words.long()[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)[..., :count]


def from_bitsandbytes(files: Tensors) -> Tensors:
    """As ``from_compressed_tensors``."""
    found = {}
    for name, tensor in files.items():
        if name.endswith(".SCB"):
            least = torch.finfo(torch.float32).tiny
            found[name.replace("SCB", "weight_scale")] = torch.where(tensor == 0, least, tensor / 127)
        elif not name.endswith(".weight_format"):
            found[name] = tensor
    return found


# Breaks.


def _layer_in(rng: random.Random, tensors: Tensors, *leaves: str) -> tuple[str, str]:
    """A layer's name and a tensor's, one of ``leaves`` of a layer."""
    names = sorted(name for name in tensors if name.rpartition(".")[2] in leaves)
    if not names:
        raise Unfit
    name = rng.choice(names)
    return name.rpartition(".")[0], name


_SCALES = ("weight_scale", "input_scale", "SCB", "weight_scale_inv", "weight_global_scale", "weight_scale_2")
_SCALES += ("weight_zero_point",)


def break_scale(rng: random.Random, files: Files) -> None:
    """A scale's values, dtype or shape."""
    shard, tensors = load_shard(rng, files)
    _, name = _layer_in(rng, tensors, *_SCALES)
    scale = tensors[name]
    what = rng.randrange(5)
    if what == 0 and scale.numel() and scale.is_floating_point():
        values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e-45, 1e-38, 3e38, 5.0]
        scale.view(-1)[rng.randrange(scale.numel())] = rng.choice(values)
    elif what == 1:
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]
        scale = scale.to(rng.choice([*dtypes, torch.float8_e4m3fn, torch.uint8]))
    elif what == 2:
        some = scale.reshape(1) if scale.ndim == 0 else scale
        other = rng.choice([scale.flatten(), scale.reshape(1, -1), scale[..., None], some[:1], some[:0]])
        scale = rng.choice([other, torch.cat([scale.flatten(), scale.flatten()]), torch.ones((), dtype=scale.dtype)])
    elif what == 3:
        _, other_name = _layer_in(rng, tensors, *_SCALES)
        tensors[other_name], scale = scale, tensors[other_name]
    else:
        scale = torch.zeros_like(scale)
    tensors[name] = scale.contiguous()
    put_shard(files, shard, tensors)


def break_weight(rng: random.Random, files: Files) -> None:
    """A quantized weight: gone, of another dtype or shape, or packed."""
    shard, tensors = load_shard(rng, files)
    layer, name = _layer_in(rng, {f"{n.rpartition('.')[0]}.weight": t for n, t in tensors.items()}, "weight")
    if name not in tensors:
        raise Unfit
    weight = tensors.pop(name)
    what = rng.randrange(6)
    if what == 0:
        tensors[name] = weight.to(rng.choice([torch.uint8, torch.int16, torch.int32, torch.float32, torch.bfloat16]))
    elif what == 1 and weight.ndim:
        tensors[name] = rng.choice([weight.t() if weight.ndim == 2 else weight, weight[:0], weight[None], weight[:-1]])
    elif what == 2:
        packed = torch.zeros(8, rng.choice([1, 2, 8]), dtype=torch.int32)
        tensors[f"{layer}.weight_packed"] = packed
        lie = rng.choice([[8, 8], [2**62, 4], [-1, 8], [0, 0], [8], [2**31, 2**31]])
        tensors[f"{layer}.weight_shape"] = torch.tensor(lie)
    elif what == 3:
        tensors[name] = torch.full_like(weight, -128) if weight.dtype == torch.int8 else weight
    elif what == 4:
        tensors[name + ".quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
        tensors[name] = weight
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    put_shard(files, shard, tensors)


def break_packed(rng: random.Random, files: Files) -> None:
    """Packed values, or the shape that they say they have."""
    shard, tensors = load_shard(rng, files)
    layer, name = _layer_in(rng, tensors, "weight_packed", "weight_shape", "weight_zero_point")
    value = tensors.pop(name)
    what = rng.randrange(5)
    if what == 0:
        tensors[name] = value.to(rng.choice([torch.int8, torch.int32, torch.int64, torch.float32]))
    elif what == 1:
        tensors[name] = rng.choice([value.flatten(), value[:1], value[None], torch.cat([value, value]), value.t()])
    elif what == 2 and name.endswith("shape"):
        tensors[name] = torch.tensor(rng.choice([[256, 255], [256, 250], [255, 256], [-256, 256], [2**62, 2**62]]))
    elif what == 3:
        tensors[f"{layer}.weight"] = torch.ones(256, 256, dtype=rng.choice([torch.int8, torch.float32]))
        tensors[name] = value
    put_shard(files, shard, tensors)


def add_tensor(rng: random.Random, files: Files) -> None:
    """A tensor of one of the formats beside a layer, or an embedding or norm, that has none, or has one."""
    shard, tensors = load_shard(rng, files)
    layer = rng.choice(sorted(tensors)).rpartition(".")[0]
    n = rng.choice([1, 8, 16])
    makes: dict[str, list[Tensor]] = {
        "weight_scale": [torch.ones(n, 1), torch.ones(n), torch.ones(n, 2), torch.ones(())],
        "input_scale": [torch.ones(1), torch.ones(n), torch.full((1,), -1.0)],
        "weight_zero_point": [torch.zeros(n, 1, dtype=torch.int8), torch.ones(n, 1, dtype=torch.int8), torch.ones(n)],
        "input_zero_point": [torch.zeros(1, dtype=torch.int8), torch.tensor([3], dtype=torch.int8)],
        "weight_g_idx": [torch.zeros(n, dtype=torch.int32), torch.full((256,), -1, dtype=torch.int32)],
        "weight_global_scale": [torch.ones(1), torch.zeros(1), torch.ones(2)],
        "input_global_scale": [torch.ones(1), torch.full((1,), torch.nan)],
        "weight_scale_inv": [torch.ones(2, 2), torch.ones(()), torch.ones(1, 1)],
        "scale": [torch.ones(1, 1)],
        "activation_scale": [torch.ones(1), torch.ones(n)],
        "weight_scale_2": [torch.ones(())],
        "pre_quant_scale": [torch.ones(160)],
        "k_scale": [torch.ones(1), torch.ones(n, n)],
        "SCB": [torch.ones(n), torch.zeros(n), torch.ones(n, 1)],
        "weight_format": [torch.tensor(value, dtype=torch.uint8) for value in (0, 1, 2, 255)],
        "": [torch.ones(n)],
    }
    leaf = rng.choice(sorted(makes))
    tensors[f"{layer}.{leaf}"] = rng.choice(makes[leaf])
    if rng.random() < 0.3:
        tensors[f"{layer}.weight"] = torch.ones(rng.choice([1, 8]), 8, dtype=torch.int8)
    put_shard(files, shard, tensors)
    if INDEX in files and rng.random() < 0.9:
        try:
            index = json.loads(content_of(files, INDEX))
            index["weight_map"].update(dict.fromkeys(tensors, shard))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise Unfit from error
        files[INDEX] = dump(index).encode("utf-8", "surrogatepass")


def drop_tensor(rng: random.Random, files: Files) -> None:
    """A tensor that is nowhere, from the index to the values."""
    shard, tensors = load_shard(rng, files)
    if not tensors:
        raise Unfit
    name = rng.choice(sorted(tensors))
    del tensors[name]
    put_shard(files, shard, tensors)
    if INDEX in files:
        try:
            index = json.loads(content_of(files, INDEX))
            index["weight_map"].pop(name, None)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise Unfit from error
        files[INDEX] = dump(index).encode("utf-8", "surrogatepass")


_ARGUMENTS: dict[str, list[Any]] = {
    "num_bits": [4, 8, 16, 8.0, True, "8", [8], 2**63],
    "type": ["int", "float", "INT", None, 8],
    "strategy": ["channel", "tensor", "token", "group", "block", "tensor_group", "attn_head", None, [], {}],
    "group_size": [-1, 0, 1, 8, 16, 32, 48, 64, 128, None, 2**63],
    "symmetric": [True, False, None, 1, "true"],
    "dynamic": [True, False, "local", None, 1],
    "block_structure": [[128, 128], "128x128", [0, 0]],
    "actorder": ["group", "weight", True],
    "scale_dtype": ["torch.float16", 3],
    "zp_dtype": ["torch.int8"],
    "observer": ["../x", {}, "minmax"],
}
_GROUP: dict[str, list[Any]] = {
    "weights": [None, {}, [], 8],
    "input_activations": [None, {}, [], "int8"],
    "output_activations": [None, {}, {"num_bits": 8}, [1]],
    "targets": [[], ["Linear"], ["re:(a|a)*$", "re:(.*a){30}"], "Linear", None, ["x"] * 1000, [None], {"a": 1}],
    "format": [
        *("int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
        *("mxfp4-pack-quantized", "mxfp8-quantized", "dense", None, [], 8),
    ],
}
_WHOLE: dict[str, list[Any]] = {
    "quant_method": [
        "compressed-tensors",
        "bitsandbytes",
        "qgemm",
        "gptq",
        "awq",
        "fp8",
        "modelopt",
        "fbgemm_fp8",
        "mxfp4",
        None,
        [],
        {},
        8,
        "x" * 5000,
    ],
    "quantization_status": ["compressed", "frozen", "initialized", None, []],
    "format": ["int-quantized", "pack-quantized", "mixed-precision", None, [], {}],
    "config_groups": [{}, None, [], {"group_0": None}, {"group_0": {}}, {"group_0": ["Linear"]}],
    "ignore": [None, [], ["lm_head"], ["re:.*"], ["re:((a+)+)+b"], "lm_head", 3],
    "kv_cache_scheme": [None, {}, {"num_bits": 8}, 1],
    "sparsity_config": [None, {}, {"format": "dense"}, {"format": "sparse-24-bitmask"}, [], "dense"],
    "transform_config": [None, {}, {"config_groups": {}}, [1]],
    "load_in_8bit": [True, False, None, 1, "true"],
    "load_in_4bit": [True, False, None, 1],
    "llm_int8_threshold": [0.0, 6.0, -1, float("inf"), "x"],
    "llm_int8_has_fp16_weight": [True, False],
    "llm_int8_skip_modules": [["lm_head"], None, "re:(a+)+$"],
    "bnb_4bit_quant_type": ["nf4"],
    "weight_block_size": [[128, 128], [64, 64], [128], 128, None, "128x128", [], [2**63, 1]],
    "activation_scheme": ["dynamic", "static", None, []],
    "fmt": ["e4m3", "e5m2", 8],
    "quant_algo": ["NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_AWQ", None, []],
    "quantization": [{}, {"quant_algo": "FP8"}, []],
}


def break_quantization(rng: random.Random, files: Files) -> None:
    """A field of ``quantization_config`` is another one that such a config may have, or something absurd."""
    try:
        config = json.loads(content_of(files, CONFIG))
        quantization = config["quantization_config"]
        places: list[tuple[Any, dict[str, list[Any]]]] = [(quantization, _WHOLE)]
        for group in (quantization.get("config_groups") or {}).values():
            places.append((group, _GROUP))
            places += [(group[part], _ARGUMENTS) for part in ("weights", "input_activations") if group.get(part)]
        for _ in range(rng.choice([1, 1, 2])):
            place, fields = rng.choice(places)
            field = rng.choice(sorted(fields))
            place[field] = rng.choice(fields[field] * 3 + [rng.choice(NUMBERS), rng.choice(OTHERS)])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Unfit from error
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


# Those of qgemm's own format are left out: its manifest, and tensors written anew with checksums.
_GENERAL = [one for one in BREAKS if one not in (add_to_layers, retie, rewrite_values)]
_OWN = [break_scale, break_weight, break_packed, add_tensor, drop_tensor, break_quantization]
FOREIGN_BREAKS: list[Break] = _GENERAL + 6 * _OWN + 3 * [break_manifest]
