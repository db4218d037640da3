"""Writes GPTQ files, version 2: int4 and int8 weights with activations in float, for GPTQModel and vLLM.

``packed_layers.py`` describes the layout. Zero points are stored unchanged; in symmetric layers they are the middle of
the range. Scales keep their dtype: readers cast them to the model's. Every layer has a ``g_idx``, which isn't ascending
in an ordered layer. Layers that differ from most, and those in float, are named in ``dynamic``, by patterns that each
match one name.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint.files_for_others import (
    SAVE_IT,
    is_target,
    shapes_of,
    single_layers,
    tensors_for_others,
    ways_out,
)
from qgemm.checkpoint.gptq import QUANT_METHOD, VERSIONS
from qgemm.checkpoint.packed_layers import WORD_BITS
from qgemm.checkpoint.words import pack_words
from qgemm.nn import QuantExperts, QuantLayer
from qgemm.numerics.packing import unpack_codes
from qgemm.scheme import QuantScheme


def can_store(scheme: QuantScheme) -> bool:
    """Whether GPTQ's format can hold layers of ``scheme``."""
    weight = scheme.weight
    is_plain = scheme.is_weight_only and scheme.down is None and not (weight.float_zeros or weight.is_prescaled)
    return is_plain and weight.dtype in ("int4", "int8")


def tensors_to_write(
    model: nn.Module, layers: dict[str, QuantLayer], tensors: dict[str, Tensor], ties: dict[str, str]
) -> dict[str, Tensor]:
    """The tensors of ``model`` in the form of GPTQ's files.

    Of two tensors in ``ties``, only those that transformers ties itself are left out; so are buffers that
    ``state_dict`` leaves out. Fused experts become a layer each. Raises ``ValueError``, naming the layer, for schemes
    other than ``int4`` and ``int8-weight``, for projections of an ``nn.MultiheadAttention``, and for sizes that don't
    fill words or groups.
    """
    written = tensors_for_others(model, layers, tensors, ties, "GPTQ")
    for name, layer in layers.items():
        if not can_store(layer.scheme):
            what = ", one for all of a module's experts" if layer.scheme.down is not None else ""
            what = " with whole zero points" if layer.scheme.weight.float_zeros else what
            what = " whose inputs aren't multiplied first" if layer.scheme.weight.is_prescaled else what
            raise ValueError(
                f"{name} has the scheme {layer.scheme.name!r}, and GPTQ stores int4 and int8-weight schemes{what}: "
                f"{ways_out(layer.scheme, layers, fits)}"
            )
        _check_sizes(name, layer, layers)
    for name, layer, (_, K), own in single_layers(model, layers, written):
        made = _tensors_of(name, layer.scheme, K, own)
        written.update({f"{name}.{leaf}": tensor for leaf, tensor in made.items()})
    return written


def _misfits(scheme: QuantScheme, N: int, K: int) -> list[tuple[int, str, int]]:
    """Sizes of a layer ``[N, K]`` that don't fill words or groups: the size, its name, and the multiple it must be."""
    per_word = WORD_BITS // scheme.weight.format.bits
    units = (K, "input", per_word), (N, "output", per_word), (K, "input", scheme.weight.group_size or 1)
    return [(count, what, unit) for count, what, unit in units if count % unit]


def fits(scheme: QuantScheme, N: int, K: int) -> bool:
    """Whether GPTQ's format can hold a layer ``[N, K]`` of ``scheme``."""
    return can_store(scheme) and not _misfits(scheme, N, K)


def _check_sizes(name: str, layer: QuantLayer, layers: dict[str, QuantLayer]) -> None:
    for N, K, _ in shapes_of(layer):
        for count, what, unit in _misfits(layer.scheme, N, K):
            raise ValueError(
                f"{name} has {count} {what} columns, not a multiple of {unit}, which GPTQ doesn't support: "
                f"{ways_out(layer.scheme, layers, fits)}"
            )


def _tensors_of(name: str, scheme: QuantScheme, K: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
    weight, bits = scheme.weight, scheme.weight.format.bits
    size = weight.group_size or max(K, 1)
    middle, stored = 1 << (bits - 1), own["weight"].detach()
    fields = unpack_codes(stored, K) ^ 8 if bits == 4 else stored.view(torch.uint8) ^ 128
    groups = torch.arange(K, device=fields.device) // size
    if (order := own.get("input_order")) is not None:
        columns = order.detach().long()
        fields = torch.empty_like(fields).index_copy_(1, columns, fields)
        groups = torch.empty_like(groups).index_copy_(0, columns, groups)
    scale = own["weight_scale"].detach()
    if (zero_point := own.get("weight_zero_point")) is None:
        zeros = torch.full(scale.shape, middle, dtype=torch.int16, device=scale.device)
    else:
        zeros = zero_point.detach().to(torch.int16) + middle
        if zeros.numel() and not 0 <= int(zeros.min()) <= int(zeros.max()) < 1 << bits:
            raise ValueError(f"{name} has a zero point of {middle}, which GPTQ can't store: {SAVE_IT}")
    return {
        "qweight": pack_words(fields, bits).t().contiguous(),
        "qzeros": pack_words(zeros.t().to(torch.uint8), bits),
        "scales": scale.t().contiguous(),
        "g_idx": groups.int(),
        **({"bias": own["bias"]} if "bias" in own else {}),
    }


def quantization_config(model: nn.Module, layers: dict[str, QuantLayer]) -> dict[str, Any]:
    """The ``quantization_config`` of ``model`` with the quantized ``layers``."""
    about = {name: _about(layer.scheme) for name, layer in layers.items()}
    common = dict(Counter(tuple(values.items()) for values in about.values()).most_common(1)[0][0])
    dynamic: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in about and about[name] != common:
            end = r"\.\d+\." if isinstance(module, QuantExperts) else "$"
            dynamic[f"+:^{re.escape(name)}{end}"] = about[name]
        elif name and is_target(module):
            dynamic[f"-:^{re.escape(name)}$"] = {}
    return {
        "quant_method": QUANT_METHOD,
        **common,
        "checkpoint_format": VERSIONS[1],
        "format": VERSIONS[1],
        "pack_dtype": "int32",
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in layers),
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _about(scheme: QuantScheme) -> dict[str, Any]:
    weight = scheme.weight
    return {
        "bits": weight.format.bits,
        "group_size": -1 if weight.group_size is None else weight.group_size,
        "sym": weight.symmetric,
        "desc_act": weight.is_ordered,
    }
