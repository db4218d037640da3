"""Writes the format of compressed-tensors: the tensors of each layer, and the config that describes them.

Every scheme is written in the format that the library itself chooses for it, so that its readers, transformers and
vLLM, find what they expect. Scales keep their dtype, so none is rounded: qgemm's own are float32, where the library's
have the model's dtype. transformers reads them in the model's dtype, as if they had been stored in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint import gptq_writer
from qgemm.checkpoint.compressed_tensors_groups import (
    FLOAT,
    INT,
    MXFP4,
    MXFP8,
    NAIVE,
    NVFP4,
    PACKED,
    QUANT_METHOD,
    target_of_experts,
)
from qgemm.checkpoint.files_for_others import (
    SAVE_IT,
    is_target,
    leave_in_float,
    shapes_of,
    single_layers,
    take_another_scheme,
    tensors_for_others,
    ways_out,
)
from qgemm.checkpoint.pretrained import built_again, is_pretrained
from qgemm.checkpoint.words import pack_nibbles, pack_words
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer
from qgemm.nn.linear_layer import is_conv1d
from qgemm.numerics.packing import unpack_codes
from qgemm.numerics.zero_points import correction
from qgemm.scheme import QuantScheme, TensorScheme
from qgemm.warn import warn_user

_MIXED = "mixed-precision"
# The library's names for the dtypes of scales.
_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}


def format_of(scheme: QuantScheme) -> str | None:
    """The library's format for layers of ``scheme``; None if it has none."""
    weight = scheme.weight
    if weight.is_ordered or weight.is_prescaled or weight.float_zeros or weight.format.has_codebook:
        return None
    if scheme.rotates or scheme.outlier_columns or scheme.down is not None:
        return None
    if weight.scale_dtype in _SCALE_DTYPES:
        return NVFP4 if weight.scale_dtype == "e4m3" else MXFP4 if weight.dtype == "fp4" else MXFP8
    if weight.dtype == "fp8":
        return NAIVE if scheme.is_weight_only else FLOAT
    return PACKED if scheme.is_weight_only else INT


def tensors_to_write(
    model: nn.Module, layers: dict[str, QuantLayer], tensors: dict[str, Tensor], ties: dict[str, str]
) -> dict[str, Tensor]:
    """The tensors of ``model`` in the form of the library's files.

    Of two tensors in ``ties``, only those that transformers ties itself are left out; so are buffers that
    ``state_dict`` leaves out. Fused experts become a layer each, under the names that files of the model's family use.
    Raises ``ValueError`` for layers that transformers builds as ``Conv1D``, which the library doesn't know, for
    projections of an ``nn.MultiheadAttention``, and for schemes that the library has no format for.
    """
    if transposed := _conv1d_names(model, layers):
        raise ValueError(
            f"{transposed[0]} is a Conv1D in {type(model).__name__}, and compressed-tensors supports only nn.Linear: "
            f"{', or '.join([SAVE_IT, *_take_gptq(layers), *leave_in_float(transposed, layers)])}"
        )
    written = tensors_for_others(model, layers, tensors, ties, "compressed-tensors")
    for name, layer in layers.items():
        if format_of(layer.scheme) is None:
            raise ValueError(
                f"{name} has the scheme {layer.scheme.name!r}, which compressed-tensors can't store: "
                f"{ways_out(layer.scheme, layers, _fits)}"
            )
        _check_sizes(name, layer, layers)
    _warn_of_experts({name: layer for name, layer in layers.items() if isinstance(layer, QuantExperts)})
    _warn_of_broken_groups(layers)
    for name, layer, shape, own in single_layers(model, layers, written):
        made = _tensors_of(layer.scheme, shape, own)
        if isinstance(layer, LinearLayer):
            if layer.folds_bias and layer.has_bias:
                made["bias"] = _unfolded_bias(own)
        elif "bias" in own:
            made["bias"] = own["bias"]
        written.update({f"{name}.{leaf}": tensor for leaf, tensor in made.items()})
    return written


def _warn_of_experts(experts: dict[str, QuantExperts]) -> None:
    """Warns about experts that transformers would read as something else, mostly without an error."""
    if unread := [
        name for name, each in experts.items() if format_of(each.scheme) == INT and not each.activation.gated
    ]:
        warn_user(
            "transformers reads no int8 experts of compressed-tensors, and would fill those without gates, such as "
            f"{unread[0]}, with random numbers, without an error. qgemm.load_quantized reads them. For "
            'from_pretrained, save the model with format="qgemm"'
        )
    if lossy := [name for name in experts if format_of(experts[name].scheme) == NVFP4]:
        warn_user(
            f"transformers leaves out the global scales of nvfp4 experts, such as {lossy[0]}, where it reads "
            "compressed-tensors, and would give wrong outputs without an error. qgemm.load_quantized reads them. For "
            'from_pretrained, save the model with format="qgemm"'
        )
    weights = {layer.scheme.weight: name for name, layer in experts.items()}
    if len(weights) > 1 and any(weight.dtype != "fp8" for weight in weights):
        first, second = list(weights.values())[:2]
        warn_user(
            "transformers reads all experts of compressed-tensors in one scheme. "
            f"{first} has {experts[first].scheme.name!r}, and {second} {experts[second].scheme.name!r}, so it would "
            "fail, or give wrong outputs without an error. qgemm.load_quantized reads them. For from_pretrained, save "
            'the model with format="qgemm"'
        )


def _warn_of_broken_groups(layers: dict[str, QuantLayer]) -> None:
    for name, layer in layers.items():
        activation = layer.scheme.activation
        size = None if activation is None or activation.granularity != "group" else activation.group_size
        if isinstance(layer, LinearLayer) and size is not None and layer.in_features % size:
            warn_user(
                f"{name} has {layer.in_features} input columns, and compressed-tensors and vLLM round activations in "
                f"whole groups of {size}: they will raise an error there. qgemm.load_quantized reads and runs it; for "
                "them, convert the layers to another scheme, such as fp8"
            )
            return


def _group_size(scheme: QuantScheme) -> int:
    return scheme.weight.group_size or 1 if scheme.weight.granularity == "group" else 1


def _fits(scheme: QuantScheme, N: int, K: int) -> bool:
    return format_of(scheme) is not None and not K % _group_size(scheme)


def _check_sizes(name: str, layer: QuantLayer, layers: dict[str, QuantLayer]) -> None:
    size = _group_size(layer.scheme)
    for _, K, _ in shapes_of(layer):
        if K % size:
            raise ValueError(
                f"{name} has {K} input columns, not a multiple of the group size {size}, which compressed-tensors "
                f"doesn't support: {ways_out(layer.scheme, layers, _fits)}"
            )
    block = layer.scheme.weight.block
    if block is not None and isinstance(layer, QuantExperts) and layer.activation.gated:
        if (wide := layer.intermediate_size) % block[0]:
            raise ValueError(
                f"{name} has blocks of {block[0]} rows that hold both gates and ups, of {wide} rows each, which "
                'compressed-tensors can\'t store: save it with format="qgemm"'
            )


def _tensors_of(scheme: QuantScheme, shape: tuple[int, int], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that replace a layer's parameters ``own`` in files."""
    N, K = shape
    weight, scale = own["weight"].detach(), own["weight_scale"].detach()
    stored_as = format_of(scheme)
    made = {"weight_scale": scale[:, None] if scale.ndim == 1 else scale}
    if (input_scale := own.get("input_scale")) is not None:
        made["input_scale"] = input_scale.detach().reshape(1)
    if (shift := own.get("input_zero_point")) is not None:
        made["input_zero_point"] = shift.detach().reshape(1)
    zero_point = own.get("weight_zero_point")
    if stored_as in (MXFP4, NVFP4):
        made["weight_packed"] = pack_nibbles(unpack_codes(weight, K))
        if stored_as == NVFP4:
            factor, divisor = own["weight_global_scale"].detach()
            made["weight_global_scale"] = (divisor / factor).reshape(1)
    elif stored_as == PACKED:
        bits = scheme.weight.format.bits
        codes = unpack_codes(weight, K) if bits == 4 else weight.view(torch.uint8)
        middle = 1 << (bits - 1)
        made["weight_packed"] = pack_words(codes ^ middle, bits)
        made["weight_shape"] = torch.tensor([N, K], device="cpu")
        if zero_point is not None:
            fields = (zero_point.detach().to(torch.int16) + middle).to(torch.uint8)
            made["weight_zero_point"] = pack_words(fields.t().contiguous(), bits).t().contiguous()
    else:
        is_int4 = scheme.weight.dtype == "int4"
        made["weight"] = (unpack_codes(weight, K) ^ 8).view(torch.int8) - 8 if is_int4 else weight
        if zero_point is not None:
            made["weight_zero_point"] = zero_point.detach()
    return made


def _unfolded_bias(own: dict[str, Tensor]) -> Tensor:
    """The float layer's bias, restored from one from which the zero point's contribution was subtracted."""
    names = "weight", "weight_scale", "input_scale", "input_zero_point"
    return (own["bias"].detach().double() + correction(*(own[name].detach() for name in names))).float()


def _conv1d_names(model: nn.Module, layers: dict[str, QuantLayer]) -> list[str]:
    if not is_pretrained(model):
        return []
    try:
        plain = built_again(model)
        return [name for name in layers if is_conv1d(plain.get_submodule(name))]
    except Exception:  # a user's own class that is built in another way; save_quantized warns about these
        return []


def _take_gptq(layers: dict[str, QuantLayer]) -> list[str]:
    """Suggests GPTQ's format, which can hold ``Conv1D``; empty if it can't hold ``layers`` in any scheme."""
    save, first = 'save it with format="gptq"', next(iter(layers.values()))
    if all(gptq_writer.fits(layer.scheme, N, K) for layer in layers.values() for N, K, _ in shapes_of(layer)):
        return [save]
    return [f"{way} and {save}" for way in take_another_scheme(first.scheme, layers, gptq_writer.fits)]


def quantization_config(model: nn.Module, layers: dict[str, QuantLayer]) -> dict[str, Any]:
    """The ``quantization_config`` of ``model`` with the quantized ``layers``."""
    used = {layer.scheme.name: layer.scheme for layer in layers.values()}
    groups: dict[str, dict[str, Any]] = {}
    for index, scheme in enumerate(used.values()):
        names = [
            name if isinstance(layer, LinearLayer) else target_of_experts(name)
            for name, layer in layers.items()
            if layer.scheme == scheme
        ]
        groups[f"group_{index}"] = {
            "format": format_of(scheme),
            "targets": ["Linear"] if len(used) == 1 else names,
            "weights": _to_arguments(scheme.weight),
            "input_activations": None if scheme.activation is None else _to_arguments(scheme.activation),
            "output_activations": None,
        }
    modules = model.named_modules(remove_duplicate=False)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": QUANT_METHOD,
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name for name, module in modules if name and is_target(module)],
        "kv_cache_scheme": None,
    }


def _to_arguments(scheme: TensorScheme) -> dict[str, Any]:
    strategy = "tensor_group" if scheme.scale_dtype == "e4m3" else scheme.granularity
    arguments: dict[str, Any] = {
        "num_bits": scheme.format.bits,
        "type": "int" if scheme.dtype.startswith("int") else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "dynamic": scheme.dynamic,
    }
    if scheme.granularity == "block" and scheme.block is not None:
        arguments["block_structure"] = list(scheme.block)
    elif scheme.group_size is not None:
        arguments["group_size"] = scheme.group_size
    if scheme.scale_dtype in _SCALE_DTYPES:
        arguments["scale_dtype"] = _SCALE_DTYPES[scheme.scale_dtype]
    return arguments
