"""What can be wrong with checkpoints of other libraries alone: scales, packed values and ``quantization_config``."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from torch import Tensor

from checkpoint.fuzz_breaks import BREAKS, Break, add_to_layers, retie, rewrite_values
from checkpoint.fuzz_json import NUMBERS, OTHERS, Unfit, break_manifest, content_of, dump
from checkpoint.fuzz_models import CONFIG, INDEX, Files
from checkpoint.fuzz_packed import load_shard, put_shard

Tensors = dict[str, Tensor]


def _layer_in(rng: random.Random, tensors: Tensors, *leaves: str) -> tuple[str, str]:
    """A layer's name and a tensor's, one of ``leaves`` of a layer."""
    names = sorted(name for name in tensors if name.rpartition(".")[2] in leaves)
    if not names:
        raise Unfit
    name = rng.choice(names)
    return name.rpartition(".")[0], name


_SCALES = ("weight_scale", "input_scale", "SCB", "weight_scale_inv", "weight_global_scale", "weight_scale_2")
_SCALES += ("weight_zero_point", "activation_scale", "input_zero_point")
_SCALES += tuple(f"{name}_proj_{end}" for name in ("gate_up", "down") for end in ("scale", "scale_inv", "scales"))
_VALUES = ("gate_up_proj", "gate_up_proj_blocks", "gate_up_proj_bias", "down_proj", "down_proj_blocks")


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
    layer, name = _layer_in(rng, tensors, "weight_packed", "weight_shape", "weight_zero_point", *_VALUES)
    value = tensors.pop(name)
    what = rng.randrange(5)
    if what == 0:
        tensors[name] = value.to(rng.choice([torch.int8, torch.int32, torch.int64, torch.float32]))
    elif what == 1:
        tensors[name] = rng.choice(
            [
                value.flatten(),
                value[:1],
                value[None],
                torch.cat([value, value]),
                value.T if value.ndim < 3 else value.mT,
            ]
        )
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
        "bias": [torch.ones(n), torch.zeros(n)],
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
        "auto-round",
        "bitnet",
        "quark",
        "quanto",
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
    "bnb_4bit_quant_type": ["nf4", "fp4"],
    "weight_block_size": [[128, 128], [64, 64], [128], 128, None, "128x128", [], [2**63, 1]],
    "activation_scheme": ["dynamic", "static", None, []],
    "fmt": ["e4m3", "e5m2", 8],
    "activation_scale_ub": [1200.0, None, float("nan"), "x", []],
    "modules_to_not_convert": [None, [], ["lm_head"], "re:(a+)+$", 3],
    "data_type": ["fp", "fp8", "int", "mx_fp", None, []],
    "bits": [4, 8, 16, 8.0, "8"],
    "act_bits": [8, 16, None, "8"],
    "act_dynamic": [True, False, None, 1],
    "act_group_size": [-1, 0, 128, None, [128, 128]],
    "extra_config": [{"layers.0": {"bits": 4}}, {"layers.0": {"bits": 16}}, {"": 1}, []],
    "linear_class": ["bitlinear", "autobitlinear", None, []],
    "quantization_mode": ["offline", "online", None],
    "use_rms_norm": [True, False, None],
    "quant_algo": ["W4A8_MXFP4_FP8", "NVFP4", "FP8", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_AWQ", None, []],
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
