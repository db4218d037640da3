"""Good checkpoints of GPTQ, AWQ, AutoRound, BitNet, bitsandbytes' nf4, EETQ, HQQ, MLX, quanto, Quark, torchao.

What can be wrong with them is here, too. What a loaded layer must be is computed from the files by the formats'
descriptions: the float weight that its values stand for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from checkpoint.fuzz_breaks import Break
from checkpoint.fuzz_eetq import check_eetq, layers_of_eetq
from checkpoint.fuzz_hqq import check_hqq, layers_of_hqq
from checkpoint.fuzz_json import NUMBERS, OTHERS, Unfit, content_of, dump, pick
from checkpoint.fuzz_models import CONFIG, INDEX, Files, FuzzNet, Good, load_saved
from checkpoint.fuzz_quanto import check_quanto, layers_of_quanto
from checkpoint.fuzz_quark import QUARK, break_steps, check_quark, layers_of_quark
from checkpoint.mlx_layers import affine, small_floats, weight_of
from checkpoint.packers import Layer
from qgemm.checkpoint import load_quantized
from qgemm.nn import LinearLayer
from qgemm.numerics.formats import BNB_FP4, NF4, Format

Tensors = dict[str, Tensor]
OWN_CONFIG, _KEY = "quantize_config.json", "quantization_config"
WIDTH, ODD_WIDTH = 64, 48
_OF_MLX = {"bits": 4, "group_size": 32, "layers.1": {"bits": 6, "group_size": 64}, "layers.2": {"mode": "mxfp4"}}

_OF_METAL = {"bits": 4, "group_size": 32}


class PackedFuzzNet(FuzzNet):
    """Three layers of 64 x 64."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)


class OddFuzzNet(FuzzNet):
    """Two layers whose rows aren't whole blocks."""

    def __init__(self) -> None:
        super().__init__(ODD_WIDTH, 2)


def make_packed(folder: Path, breaks: list[Break]) -> list[Good]:
    """A folder of each format, written into ``folder``; ``breaks``: those of ``fuzz_foreign.py``."""
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    sizes = {"N": WIDTH, "K": WIDTH}
    mixed = [
        Layer(**sizes, g_idx=(torch.arange(WIDTH) // 32)[order]).gptq(1),
        Layer(**sizes, bits=8, seed=1, g_idx=torch.arange(WIDTH) // 32).gptq(1),
        Layer(**sizes, symmetric=True, seed=2, g_idx=torch.arange(WIDTH) // 32).gptq(1),
    ]
    plain = [Layer(**sizes, symmetric=True, seed=seed) for seed in range(3)]
    asymmetric = [Layer(**sizes, seed=seed) for seed in range(3)]
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    auto_round = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    written = [
        ("gptq", mixed, {**gptq, "sym": False, "desc_act": True, "checkpoint_format": "gptq"}, check_gptq),
        ("gptq2", [each.gptq(2) for each in plain], {**gptq, "sym": True, "checkpoint_format": "gptq"}, check_gptq),
        ("awq", [each.awq() for each in asymmetric], awq, check_awq),
        ("auto-round", [each.gptq(1) for each in plain], auto_round, check_gptq),
        ("torchao", [_int8(0), _intx(1), _fp8(2)], {"quant_method": "torchao"}, check_torchao),
        ("bitnet", [_ternary(seed) for seed in range(3)], {"quant_method": "bitnet"}, check_bitnet),
        ("mlx", [affine(4, 32, WIDTH, WIDTH), affine(6, 64, WIDTH, WIDTH), small_floats("mxfp4", WIDTH, WIDTH)])
        + (_OF_MLX, check_mlx),
        ("eetq", layers_of_eetq(WIDTH), {"quant_method": "eetq", "weights": "int8"}, check_eetq),
        ("hqq", layers_of_hqq(WIDTH), {"quant_method": "hqq"}, check_hqq),
        ("metal", [_metal(seed) for seed in range(3)], {"quant_method": "metal", **_OF_METAL}, check_mlx),
        ("quanto", layers_of_quanto(WIDTH), {"quant_method": "quanto", "weights": "int4"}, check_quanto),
        ("quark", layers_of_quark(WIDTH), QUARK, check_quark),
    ]
    made = []
    for name, layers, config, check in written:
        _write(folder / name, PackedFuzzNet(), layers, config, in_two=name == "gptq", own_file=name == "gptq2")
        made.append(_good(folder / name, PackedFuzzNet, check, breaks))
    layers = [_bitsandbytes(0, "nf4", NF4, False), _bitsandbytes(1, "fp4", BNB_FP4, True)]
    _write(folder / "bitsandbytes", OddFuzzNet(), layers, {"load_in_4bit": True})
    made.append(_good(folder / "bitsandbytes", OddFuzzNet, check_bitsandbytes, breaks))
    return made


def _good(
    folder: Path,
    build: Callable[[], nn.Module],
    check: Callable[[nn.Module, Tensors, dict[str, Any]], None],
    breaks: list[Break],
) -> Good:
    saved = load_saved(folder, build)
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    own = folder / OWN_CONFIG
    config = json.loads(own.read_text()) if own.exists() else {}
    check(load_quantized(folder, model=build), tensors, config or json.loads((folder / CONFIG).read_text())[_KEY])
    return Good(saved.files, saved.state, saved.output, build, of_float_parts, breaks + 4 * OWN_BREAKS, check=check)


def of_float_parts(files: Tensors) -> Tensors:
    """What is in the model as it is in the files; what is quantized has names of its own, or another form."""
    return {name: tensor for name, tensor in files.items() if ".weight" not in name or "layers" not in name}


def _write(
    folder: Path,
    model: FuzzNet,
    layers: list[Tensors],
    config: dict[str, Any],
    in_two: bool = False,
    own_file: bool = False,
) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn_like(value) for name, value in model.state_dict().items() if name != "head.weight"}
    tensors["head.weight"] = tensors["embed.weight"].clone()
    metadata = {"format": "pt"}
    for index, own in enumerate(layers):
        del tensors[f"layers.{index}.weight"]
        tensors |= {f"layers.{index}.{leaf}": value.contiguous() for leaf, value in own.items()}
        if (qdata := own.get("_weight_qdata")) is not None:
            kind = "Int8Tensor" if qdata.dtype == torch.int8 else "Float8Tensor"
            about = {"_type": kind, "_data": {"block_size": [1, WIDTH], "act_quant_kwargs": None}}
            if (count := own["_weight_scale"].shape[1]) > 1:
                target = {"_type": "torch.dtype", "_data": "int4"}
                data = {"block_size": [1, WIDTH // count], "target_dtype": target, "activation_quantization": None}
                about = {"_type": "IntxUnpackedToInt8Tensor", "_data": data}
            metadata[f"layers.{index}.weight"] = json.dumps(about)
    folder.mkdir(parents=True)
    if in_two:  # a layer's tensors in both files
        names = sorted(tensors, key=lambda name: name[::-1])
        shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        places = {name: shard for shard, own in shards.items() for name in own}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        shards = {"model.safetensors": list(tensors)}
    for shard, names in shards.items():
        (folder / shard).write_bytes(save({name: tensors[name] for name in names}, metadata))
    (folder / CONFIG).write_text(json.dumps({} if own_file else {"quantization_config": config}))
    if own_file:
        (folder / OWN_CONFIG).write_text(json.dumps(config))


def _int8(seed: int) -> Tensors:
    torch.manual_seed(seed)
    qdata = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
    zeros = torch.zeros(WIDTH, 1, dtype=torch.int8)
    return {"_weight_qdata": qdata, "_weight_scale": torch.rand(WIDTH, 1), "_weight_zero_point": zeros}


def _intx(seed: int) -> Tensors:
    torch.manual_seed(seed)
    qdata, zeros = (torch.randint(-8, 8, (WIDTH, count), dtype=torch.int8) for count in (WIDTH, 2))
    return {"_weight_qdata": qdata, "_weight_scale": torch.rand(WIDTH, 2), "_weight_zero_point": zeros}


def _fp8(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {
        "_weight_qdata": torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn),
        "_weight_scale": torch.rand(WIDTH, 1).bfloat16(),
    }


def _ternary(seed: int) -> Tensors:
    torch.manual_seed(seed)
    parts = torch.randint(3, (4, WIDTH // 4, WIDTH))
    octets = (parts * torch.tensor([1, 4, 16, 64])[:, None, None]).sum(0)
    return {"weight": octets.to(torch.uint8), "weight_scale": torch.rand(1).bfloat16()}


def _metal(seed: int) -> Tensors:
    tensors = affine(4, 32, WIDTH, WIDTH, seed=seed)
    biases = tensors.pop("biases")
    return {**tensors, "qbiases": biases}


def _bitsandbytes(seed: int, kind: str, form: Format, double: bool) -> Tensors:
    torch.manual_seed(seed)
    count = ODD_WIDTH * ODD_WIDTH
    blocks = count // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [ODD_WIDTH, ODD_WIDTH]}
    found = {
        "weight": torch.randint(256, (count // 2, 1), dtype=torch.uint8),
        "weight.quant_map": torch.tensor(form.table),
        "weight.absmax": torch.rand(blocks),
    }
    if double:
        state |= {"nested_blocksize": 16, "nested_offset": 0.5}
        found["weight.absmax"] = torch.randint(256, (blocks,), dtype=torch.uint8)
        found["weight.nested_absmax"] = torch.rand(-(-blocks // 16))
        found["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**found, f"weight.quant_state.bitsandbytes__{kind}": text}


# What the files stand for.


def _layers(model: nn.Module, files: Tensors) -> list[tuple[LinearLayer, Tensors]]:
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, LinearLayer):
            own = {key.removeprefix(f"{name}."): tensor for key, tensor in files.items() if key.startswith(f"{name}.")}
            found.append((layer, own))
    return found


def _assert_weight(layer: LinearLayer, weight: Tensor) -> None:
    found = layer.dequantize(torch.float32).weight.detach()
    assert torch.equal(found, weight), f"{layer.layer_name} is not what its file holds"


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """int64 ``[n, count]``, the fields of rows of words, by shifts."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :count]


def _grouped(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (values - zeros[:, groups]).float() * scales.float()[:, groups]


def check_gptq(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    layers = []
    for layer, own in _layers(model, files):
        N, K = layer.out_features, layer.in_features
        bits = 32 * own["qweight"].shape[0] // K
        layers.append((layer, own, bits, _fields(own["qzeros"], bits, N)))
    constants = {2 ** (bits - 1) - int(zeros[0, 0]) for *_, bits, zeros in layers if bool((zeros == zeros[0, 0]).all())}
    version_1 = config.get("checkpoint_format") not in ("gptq_v2",)
    symmetric = config.get("sym", True) is True
    if symmetric and constants & {0, 1}:
        version_1 = 1 in constants
    for layer, own, bits, zeros in layers:
        N, K, count = layer.out_features, layer.in_features, zeros.shape[0]
        middle, words = 2 ** (bits - 1), own["qzeros"].long()
        if symmetric and bool((zeros == zeros[0, 0]).all()) and int(zeros[0, 0]) in (middle, middle - 1):
            zeros = torch.full_like(zeros, middle)
        elif version_1:
            ones = sum(1 << bits * place for place in range(32 // bits))
            zeros = _fields((words + ones).remainder(2**32), bits, N)
        size = config.get("group_size") or -1
        size = size if size > 0 and -(-K // size) == count else K // count
        groups = own["g_idx"].long() if "g_idx" in own else torch.arange(K) // size
        _assert_weight(layer, _grouped(_fields(own["qweight"].t(), bits, K), zeros.t(), own["scales"].t(), groups))


def check_awq(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of eight columns in a word
    for layer, own in _layers(model, files):
        N, K = layer.out_features, layer.in_features

        def columns(words: Tensor, N: int = N) -> Tensor:
            return _fields(words, 4, N).view(-1, N // 8, 8)[:, :, places].flatten(1)

        count = own["scales"].shape[0]
        size = config.get("group_size") or -1
        size = size if size > 0 and -(-K // size) == count else K // count
        values, zeros = columns(own["qweight"]).t(), columns(own["qzeros"]).t()
        _assert_weight(layer, _grouped(values, zeros, own["scales"].t(), torch.arange(K) // size))


def check_bitnet(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for layer, own in _layers(model, files):
        values = torch.cat([own["weight"].int() // 4**place % 4 - 1 for place in range(4)])
        scale = own["weight_scale"].float()
        _assert_weight(layer, values * (1 / scale))


def check_mlx(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for layer, own in _layers(model, files):
        said = config.get(layer.layer_name)
        said = said if isinstance(said, dict) else config
        mode = said.get("mode", "affine")
        if "qbiases" in own:  # of transformers' MetalConfig
            own["biases"], said, mode = own["qbiases"], config, "affine"
        size, bits = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
        _assert_weight(layer, weight_of(own, mode, said.get("bits", bits), said.get("group_size", size), torch.float32))


def check_torchao(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for layer, own in _layers(model, files):
        qdata, scale = own["_weight_qdata"].float(), own["_weight_scale"].float()
        scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
        zeros = own.get("_weight_zero_point", torch.zeros(1)).float()
        zeros = zeros if bool(zeros.any()) else torch.zeros_like(scale)
        zeros, scale = (each.repeat_interleave(layer.in_features // each.shape[1], dim=1) for each in (zeros, scale))
        _assert_weight(layer, (qdata - zeros) * scale)


def check_bitsandbytes(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for layer, own in _layers(model, files):
        (text,) = (value for name, value in own.items() if name.startswith("weight.quant_state."))
        state = json.loads(bytes(text.tolist()))
        octets = own["weight"].contiguous().view(-1).view(torch.uint8)
        codes = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()[: layer.in_features * layer.out_features]
        absmax = own["weight.absmax"].flatten()
        if "nested_blocksize" in state:
            nested = own["weight.nested_absmax"].flatten()[torch.arange(len(absmax)) // state["nested_blocksize"]]
            absmax = own["weight.nested_quant_map"].flatten()[absmax.int()] * nested + state["nested_offset"]
        values = own["weight.quant_map"].flatten()[codes.int()]
        weight = values * absmax[torch.arange(len(codes)) // state["blocksize"]]
        _assert_weight(layer, weight.view(layer.out_features, layer.in_features))


# Breaks.


def load_shard(rng: random.Random, files: Files) -> tuple[str, Tensors]:
    from safetensors.torch import load

    name = pick(rng, files, ".safetensors")
    try:
        return name, {key: value.clone() for key, value in load(content_of(files, name)).items()}
    except Unfit:
        raise
    except Exception as error:
        raise Unfit from error


def put_shard(files: Files, name: str, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Writes a file's tensors anew, with the metadata that it had."""
    if metadata is None:
        metadata = metadata_of(files, name)
    files[name] = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata)


def metadata_of(files: Files, name: str) -> dict[str, str]:
    content = content_of(files, name)
    try:
        found = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    except (ValueError, RecursionError, AttributeError) as error:
        raise Unfit from error
    return found if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()) else {}


_PACKED = (
    "qweight",
    "qzeros",
    "g_idx",
    "scales",
    "biases",
    "qbiases",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "bitsandbytes__nf4",
    "bitsandbytes__fp4",
    "_weight_qdata",
    "_weight_scale",
    "_weight_zero_point",
    "weight_zero_point",
    "input_zero_point",
    "weight_scales",
    "_data",
    "_scale",
    "_shift",
    "W_q",
    "scale",
    "zero",
    "nbits",
    "group_size",
    "shape",
)


def break_part(rng: random.Random, files: Files) -> None:
    """A part of a layer: its dtype, its shape, some of its values, another layer's, or it is gone."""
    shard, tensors = load_shard(rng, files)
    names = sorted(name for name in tensors if name.rpartition(".")[2] in _PACKED)
    if not names:
        raise Unfit
    name = rng.choice(names)
    value = tensors.pop(name)
    what = rng.randrange(6)
    if what == 0:
        dtypes = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
        tensors[name] = value.to(rng.choice([*dtypes, torch.float64, torch.bool]))
    elif what == 1:
        value = value.reshape(1) if value.ndim == 0 else value
        shapes = [value.flatten(), value[:1], value[:-1], value[None], torch.cat([value, value]), value.t()[:0]]
        tensors[name] = rng.choice([*shapes, value.t() if value.ndim == 2 else value.reshape(-1, 1)])
    elif what == 2:
        tensors[name] = _with_odd_values(rng, value)
    elif what == 3:
        other = rng.choice(names)
        tensors[name] = tensors.get(other, value).clone()
    elif what == 4:
        tensors[name] = torch.zeros_like(value)
    put_shard(files, shard, tensors)


def _with_odd_values(rng: random.Random, value: Tensor) -> Tensor:
    flat = value.flatten()
    for _ in range(rng.choice([1, 1, 2, 50])):
        if not flat.numel():
            break
        place = rng.randrange(flat.numel())
        if flat.dtype.is_floating_point:
            odd = rng.choice([float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 3e38, 5.0])
            flat[place] = torch.tensor(odd).to(flat.dtype)
        else:
            limits = torch.iinfo(flat.dtype)
            flat[place] = rng.choice([limits.min, limits.max, 0, 1, rng.randint(limits.min, limits.max)])
    return flat.view(value.shape)


def break_state(rng: random.Random, files: Files) -> None:
    """The JSON that tells the sizes of a layer of 4 bits, or what a tensor of torchao's is."""
    shard, tensors = load_shard(rng, files)
    metadata = metadata_of(files, shard)
    states = sorted(name for name in tensors if ".quant_state." in name)
    about = sorted(name for name in metadata if name.endswith(".weight"))
    if not states + about:
        raise Unfit
    name = rng.choice(states + about)
    try:
        text = bytes(tensors[name].tolist()).decode() if name in states else metadata[name]
        values = json.loads(text)
        place = values["_data"] if name in about and rng.random() < 0.5 else values
        key = rng.choice(sorted(place))
        odd: list[Any] = [None, [], {}, [4, 4], [2**40, 2**40], [-48, -48], "nf4", "Int8Tensor", "Int4Tensor", 64, 128]
        place[key] = rng.choice([*odd, rng.choice(NUMBERS), rng.choice(OTHERS)])
        changed = dump(values)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Unfit from error
    changed = rng.choice([changed] * 8 + ["", "[" * 50_000, changed[: len(changed) // 2], "\0"])
    if name in states:
        encoded = changed.encode("utf-8", "surrogatepass")
        tensors[name] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else tensors[name][:0]
    else:
        try:
            changed.encode()
        except UnicodeError as error:
            raise Unfit from error
        metadata[name] = changed
    put_shard(files, shard, tensors, metadata)


_FIELDS: dict[str, list[Any]] = {
    "quant_method": ["gptq", "awq", "auto-round", "intel/auto-round", "torchao", "bitsandbytes", "compressed-tensors"],
    "bits": [2, 3, 4, 5, 8, 16, 4.0, True, "4", None, -1, 0, 2**63],
    "w_bit": [4, 8, None],
    "group_size": [-1, 0, 1, 16, 24, 32, 64, 128, None, "32", True, 2**40],
    "q_group_size": [32, 64, -1],
    "sym": [True, False, None, 1],
    "desc_act": [True, False, None],
    "checkpoint_format": ["gptq", "gptq_v2", "gptq_p", "marlin", "bitblas", None, [], {}, 2],
    "format": ["gptq", "gptq_v2", "marlin", None],
    "is_marlin_format": [True, False],
    "pack_dtype": ["int32", "int16", None, []],
    "version": ["gemm", "GEMM", "gemv", "gemv_fast", None, 1, []],
    "zero_point": [True, False, None, 0],
    "packing_format": ["auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:marlin", None, 3, []],
    "data_type": ["int", "mx_fp", None, []],
    "act_bits": [16, 8, None, "x"],
    "dynamic": [{"-:.*": {}}, {"(a+)+$": {"bits": 8}}, [], None],
    "extra_config": [{"layers.0": {"bits": 8}}, 1],
    "lm_head": [True],
    "mode": ["affine", "mxfp4", "mxfp8", "nvfp4", "nf4", None, []],
    "layers.1": [{"bits": 6}, {"bits": 3, "group_size": 64}, {"mode": "mxfp8"}, {"group_size": 32}, {}, True, None, []],
    "meta": [None, [], {"x": [[[[[1]]]]]}],
}


def break_fields(rng: random.Random, files: Files) -> None:
    """A field of the format's config, in ``config.json`` or in a file of its own; or that file itself."""
    name = OWN_CONFIG if OWN_CONFIG in files and rng.random() < 0.7 else CONFIG
    try:
        config = json.loads(content_of(files, name))
        place = config if name == OWN_CONFIG else config["quantization_config"]
        if name == OWN_CONFIG and rng.random() < 0.1:
            config = rng.choice([None, [], {}, {"quantization_config": config}, 1, "gptq"])
        else:
            for _ in range(rng.choice([1, 1, 2])):
                field = rng.choice(sorted(_FIELDS))
                place[field] = rng.choice(_FIELDS[field] * 3 + [rng.choice(NUMBERS), rng.choice(OTHERS)])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Unfit from error
    files[name] = dump(config).encode("utf-8", "surrogatepass")


OWN_BREAKS: list[Break] = [break_part, break_part, break_state, break_fields, break_steps]
