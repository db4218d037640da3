"""The packed 4-bit weights of compressed-tensors: format ``pack-quantized``, int4 with activations in float (W4A16).

``<layer>.weight_packed`` int32 ``[N, ceil(K / 8)]``, value k in bits ``4 * (k % 8)`` to ``4 * (k % 8) + 3`` of number
``k // 8``, as ``q + 8``; ``<layer>.weight_scale`` in any float dtype, ``[N, K / 128]`` for groups of 128 or ``[N, 1]``
for a scale per channel; ``<layer>.weight_shape`` int64 ``[2]``, which is ``[N, K]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import FLOAT_DTYPES
from qgemm.nn import WeightOnlyLinear
from qgemm.numerics.formats import INT4
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes, packed_width, unpack_codes
from qgemm.scheme import SCHEMES, TensorScheme

FORMAT = "pack-quantized"
GROUP_SIZE = SCHEMES["int4"].weight.group_size
_PER_WORD = 32 // INT4.bits


def strategy_of(weights: dict[str, Any]) -> Any:
    """How finely weights are scaled: what they say, or what their group size means."""
    size = weights.get("group_size")
    return weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")


def scheme_of_group(group: dict[str, Any], whole_format: object) -> str | None:
    """The scheme of the layers of a group in ``config_groups``; None for one that qgemm doesn't run packed."""
    weights = group.get("weights")
    if (group.get("format") or whole_format) != FORMAT or not isinstance(weights, dict):
        return None
    if group.get("input_activations") is not None or group.get("output_activations") is not None:
        return None
    bits, size = weights.get("num_bits"), weights.get("group_size")
    plain = weights.get("type", "int") == "int" and weights.get("symmetric", True) is True
    if isinstance(bits, bool) or bits != INT4.bits or not plain or weights.get("dynamic", False) is not False:
        return None
    strategy = strategy_of(weights)
    if strategy == "channel":
        return "int4-channel"
    return "int4" if strategy == "group" and size == GROUP_SIZE and not isinstance(size, bool) else None


def note_layer(contents: Contents, layer: str, packed: StoredTensor, schemes: set[str]) -> None:
    """Notes a layer that has a ``weight_packed``. ``schemes``: those that the config names.

    Raises ``CheckpointError`` unless its tensors are as above.
    """
    if not schemes & {"int4", "int4-channel"}:
        raise CheckpointError(f"{packed.path}: {layer} has a weight_packed, which the config doesn't mention")
    if f"{layer}.weight_g_idx" in contents.stored:
        raise CheckpointError(
            f"{packed.path}: {layer} has a weight_g_idx: its groups aren't contiguous columns, which "
            "qgemm doesn't compute"
        )
    scale, shape = contents.stored.get(f"{layer}.weight_scale"), contents.stored.get(f"{layer}.weight_shape")
    if packed.dtype != torch.int32 or len(packed.shape) != 2:
        raise unfit(packed.path, f"{layer}.weight_packed", packed, "int32, [N, K / 8]")
    if scale is None or scale.dtype not in FLOAT_DTYPES or len(scale.shape) != 2 or scale.shape[0] != packed.shape[0]:
        raise unfit(packed.path, f"{layer}.weight_scale", scale, f"of a float dtype, [{packed.shape[0]}, groups]")
    if shape is None or shape.dtype not in (torch.int64, torch.int32) or shape.shape != (2,):
        raise unfit(packed.path, f"{layer}.weight_shape", shape, "int64, [2]")
    # One group is one scale per channel, where both are in use.
    by_channel = scale.shape[1] == 1 and "int4-channel" in schemes
    contents.manifest.layers[layer] = SCHEMES["int4-channel" if by_channel or "int4" not in schemes else "int4"]
    if scale.dtype == torch.float64:
        contents.convert(f"{layer}.weight_scale", f"{layer}.weight_scale", scale.shape, Tensor.float)

    def convert(shape: Tensor, words: Tensor) -> list[Tensor]:
        N, K = shape.tolist()
        if (N, cdiv(K, _PER_WORD)) != words.shape:
            raise ValueError(f"it says [{N}, {K}], and weight_packed is {list(words.shape)}")
        return [pack_codes(unpack_words(words, K) ^ 8)]

    # As wide for all K that have as many words.
    wide = packed.shape[0], packed_width(_PER_WORD * packed.shape[1])
    sources = f"{layer}.weight_shape", f"{layer}.weight_packed"
    contents.convert_together(sources, {f"{layer}.weight": (sources[1], wide, torch.uint8)}, convert)


def pack_words(fields: Tensor) -> Tensor:
    """uint8 ``[N, K]``, from 0 to 15, as int32 ``[N, ceil(K / 8)]``, the first in the lowest bits."""
    octets = F.pad(fields, (0, -fields.shape[1] % _PER_WORD))
    return (octets[:, ::2] | octets[:, 1::2] << 4).contiguous().view(torch.int32)


def unpack_words(words: Tensor, K: int) -> Tensor:
    """uint8 ``[N, K]`` from int32 ``[N, ceil(K / 8)]``."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)[:, :K]


def tensors_to_write(name: str, layer: WeightOnlyLinear) -> dict[str, Tensor]:
    """What the files hold of a layer in place of its ``weight``. Raises ``ValueError`` for groups that aren't whole."""
    if layer.scheme.weight.group_size is not None and layer.in_features % layer.group_size:
        raise ValueError(
            f"{name} has {layer.in_features} input columns, not a multiple of the group size {layer.group_size}, which "
            'compressed-tensors doesn\'t support: save it with format="qgemm"'
        )
    fields = unpack_codes(layer.stored("weight").detach(), layer.in_features) ^ 8
    return {
        f"{name}.weight_packed": pack_words(fields),
        f"{name}.weight_shape": torch.tensor([layer.out_features, layer.in_features]),
    }


def to_arguments(scheme: TensorScheme) -> dict[str, Any]:
    """What a group in ``config_groups`` says of weights with ``scheme``."""
    by_group = scheme.granularity == "group"
    sizes = {"strategy": "group", "group_size": scheme.group_size} if by_group else {"strategy": "channel"}
    return {"num_bits": scheme.format.bits, "type": "int", "symmetric": True, "dynamic": False, **sizes}
