"""``PackedLinear``: a linear layer with a weight of 4 bits, which is computed in float.

``y = x @ W.T + bias``, where ``W = q * scale`` is made for every call, in the dtype of ``x``, from values ``q`` of
which eight share an int32. It takes a quarter of bfloat16's memory, and a little for the scales. It is no faster than
the float layer: each call reads the packed weight, writes a float one, and multiplies by that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.quant_layer import frozen
from qgemm.nn.stored_weight import StoredWeight, TracedWeight
from qgemm.numerics import packing
from qgemm.numerics.formats import INT4
from qgemm.numerics.integers import cdiv
from qgemm.scheme import QuantScheme


class PackedLinear(LinearLayer):
    """A linear layer with a packed weight: float ``[..., in_features]`` to ``[..., out_features]``.

    Parameters, none of which require a gradient:

    - ``weight_packed``: int32 ``[out_features, ceil(in_features / 8)]``; ``qgemm.numerics.packing`` has the layout.
    - ``weight_scale``: float32 ``[out_features, groups]``, where ``groups`` is ``ceil(in_features / group_size)``, or 1
      for a scheme with a scale per channel.
    - ``bias``: ``[out_features]`` in ``dtype``, or None.

    A new layer has scales of NaN until it loads a ``state_dict``. ``from_linear`` makes one from a float layer.
    """

    default_scheme = "int4"
    weight_names = ("weight_packed",)
    scale_names = ("weight_scale",)
    row_names = ("weight_packed", "weight_scale")
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def make_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """``bias`` in ``dtype``."""
        shape = packed_shape(self.out_features, self.in_features)
        self.weight_packed = frozen(torch.full(shape, packing.WORD_OF_ZEROS, dtype=torch.int32, device=device))
        self.bias = self.empty_bias(device, dtype)
        scales = self.out_features, cdiv(self.in_features, self.group_size)
        self.weight_scale = frozen(torch.full(scales, torch.nan, dtype=torch.float32, device=device))

    @classmethod
    def computes(cls, scheme: QuantScheme) -> bool:
        """Whether ``scheme`` has a weight of 4 bits and leaves activations in float."""
        return scheme.weight.format is INT4 and scheme.is_weight_only

    @property
    def group_size(self) -> int:
        """How many values along K share a scale."""
        return self.scheme.weight.group_size or max(self.in_features, 1)

    @property
    def weight(self) -> Tensor:
        """The bytes of ``weight_packed``, int8 ``[out_features, 4 * ceil(in_features / 8)]``.

        For code around a layer that asks where its weight is, or whether it is in float (T5's, PEFT's).
        """
        octets: Tensor = self.stored("weight_packed").detach().view(torch.int8)
        if torch.compiler.is_compiling():
            return TracedWeight(octets, self.layer_name)  # type: ignore[return-value]
        octets._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would fill it as it loads
        return StoredWeight(octets, self.layer_name)

    def round_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """int8 ``[n, K]``, -8 to 7, and float32 ``[n, groups]``, or ``[n]`` for a scale per channel."""
        values, scale = packing.quantize_groups(weight, self.group_size)
        return values, scale if self.scheme.weight.group_size else scale.flatten()

    def store_rows(self, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """``weight_packed`` and ``weight_scale``."""
        grouped = scale.reshape(values.shape[0], cdiv(self.in_features, self.group_size))
        return {"weight_packed": packing.pack(values), "weight_scale": grouped.contiguous()}

    def restore_rows(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``q * scale``."""
        packed, scale = parameters["weight_packed"], parameters["weight_scale"]
        return packing.dequantize(packed, scale, self.group_size, self.in_features, dtype)

    def compute(self, x: Tensor) -> Tensor:
        """One operator, which makes the float weight."""
        packed, scale, bias = map(self.stored, ("weight_packed", "weight_scale", "bias"))
        out: Tensor = torch.ops.qgemm.packed_linear(x, packed, scale, self.in_features, self.group_size, bias)
        return out


def packed_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """The shape of ``weight_packed``."""
    return out_features, cdiv(in_features, packing.PER_WORD)
