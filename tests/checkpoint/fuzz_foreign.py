"""Good checkpoints of other libraries for the fuzzer; ``fuzz_foreign_breaks.py`` has what can be wrong with theirs.

Here are those of compressed-tensors, fp8, ModelOpt and bitsandbytes' int8; ``fuzz_packed.py`` has the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from families.schemes import input_scale_for
from safetensors.torch import load_file, save
from torch import Tensor, nn

from checkpoint.fuzz_foreign_breaks import FOREIGN_BREAKS
from checkpoint.fuzz_models import CONFIG, INDEX, FuzzNet, Good, load_saved, quantized_fuzz_net, quantized_llama
from checkpoint.fuzz_packed import make_packed
from checkpoint.rewriting import edited, set_save
from qgemm import QuantExperts, QuantLinear
from qgemm.checkpoint import compressed_tensors_writer, save_quantized
from qgemm.nn import linear_class
from qgemm.numerics.packing import pack_codes
from qgemm.scheme import resolve_scheme

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
        edit_shards(folder / name, _as_the_library_has_them)
        made.append(good_foreign(folder / name, build, from_compressed_tensors))
    save_quantized(packed_net(), folder / "packed", format="compressed-tensors")
    made.append(good_foreign(folder / "packed", PackedNet, from_compressed_tensors))
    for name, scheme, rename, quantization in (
        ("fp8", "fp8-block", {"weight_scale": "weight_scale_inv"}, {"weight_block_size": [128, 128]}),
        ("modelopt", "nvfp4", {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}, {}),
    ):
        save_quantized(net_of(scheme), folder / name, format="compressed-tensors")
        edit_shards(folder / name, partial(renamed, rename))
        with edited(folder / name / CONFIG) as config:
            config["quantization_config"] = {"quant_method": name, **quantization}
        made.append(good_foreign(folder / name, OneNet, from_compressed_tensors))
    _write_mixture(quantized_mixture(), folder / "mixture")
    made.append(good_foreign(folder / "mixture", None, mixture_from_compressed_tensors))
    for name, model, build, shard_size in (
        ("llama8", quantized_llama(), None, 1500),
        ("net8", quantized_fuzz_net("int8"), FuzzNet, "5GB"),
    ):
        save_quantized(model, folder / name, max_shard_size=shard_size, format="compressed-tensors")
        edit_shards(folder / name, _to_bitsandbytes)
        own = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
        with edited(folder / name / CONFIG) as config:
            config["quantization_config"] = own
        made.append(good_foreign(folder / name, build, from_bitsandbytes))
    return made + make_packed(folder, FOREIGN_BREAKS)


def good_foreign(folder: Path, build: Callable[[], nn.Module] | None, meaning: Callable[[Tensors], Tensors]) -> Good:
    """The checkpoint in ``folder``, whose tensors mean what ``meaning`` makes of them."""
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
    """One layer of ``scheme``."""
    torch.manual_seed(0)
    model, found = OneNet(), resolve_scheme(scheme)
    model.layers[0] = linear_class(found).from_linear(model.layers[0], found, input_scale_for(found))
    return model.eval()


def renamed(leaves: dict[str, str], name: str, tensor: Tensor) -> Tensors:
    """A tensor called by what ``leaves`` has for its last name."""
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
    linear = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    with edited(folder / CONFIG) as config:
        config["quantization_config"] = compressed_tensors_writer.quantization_config(model, linear)  # type: ignore[arg-type]


_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_scale)?")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(_scale|_zero_point|_global_scale)?")


def mixture_from_compressed_tensors(files: Tensors) -> Tensors:
    """As ``from_compressed_tensors``, for a model with experts."""
    found = from_compressed_tensors(files)
    experts: dict[tuple[str, str], dict[str, dict[int, Tensor]]] = {}
    for name in list(found):
        if match := _SINGLE.fullmatch(name):
            name, number, leaf, end = match.groups("")
            part = found.pop(match[0])
            part = part[:, None] if end == "_scale" and part.ndim == 1 else part  # either is read
            experts.setdefault((name, end), {}).setdefault(leaf, {})[int(number)] = part
    for (name, end), leaves in experts.items():
        if len({len(parts) for parts in leaves.values()}) > 1:
            continue  # zero points of some experts are gone, which are then symmetric
        gate, up, down = (
            torch.stack([parts for _, parts in sorted(leaves[leaf].items())]) for leaf in ("gate", "up", "down")
        )
        # A global scale is that of both.
        found[f"{name}.gate_up_proj{end}"] = gate if end == "_global_scale" else torch.cat((gate, up), dim=1)
        found[f"{name}.down_proj{end}"] = down
    return found


def edit_shards(folder: Path, edit: Callable[[str, Tensor], Tensors]) -> None:
    """Writes the files anew, with what ``edit`` makes of each tensor."""
    index = folder / INDEX
    places = {}
    for path in folder.glob("*.safetensors"):
        tensors: Tensors = {}
        for name, tensor in load_file(path).items():
            tensors.update(edit(name, tensor))
        path.write_bytes(save(tensors, {"format": "pt"}))
        places.update(dict.fromkeys(tensors, path.name))
    if index.exists():
        with edited(index) as values:
            values["weight_map"] = places
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
    found["weight_scale"] = scale if scale.dtype in (torch.uint8, torch.float8_e4m3fn) else scale.float()
    if (input_scale := own.get("input_scale", own.get("activation_scale"))) is not None:
        found["input_scale"] = input_scale.float().squeeze()
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
