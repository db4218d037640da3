"""``QuantLinear``: a linear layer with an int8 weight.

``y = x @ (weight * weight_scale[:, None]).T + bias``, with ``x`` quantized to int8 on the way in, int32 sums, and ``y``
in the dtype of ``x``. The weight takes a quarter of float32's memory, half of bfloat16's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qgemm.kernels import quantize_rows
from qgemm.nn.quant_layer import QuantLayer, frozen
from qgemm.ops import quant_linear
from qgemm.scheme import QuantScheme, resolve_scheme


class QuantLinear(QuantLayer):
    """A quantized ``nn.Linear``: float ``[..., in_features]`` to ``[..., out_features]``.

    Parameters, none of which require a gradient:

    - ``weight``: int8 ``[out_features, in_features]``.
    - ``weight_scale``: float32 ``[out_features]``.
    - ``bias``: ``[out_features]`` in ``dtype``, or None.
    - ``input_scale``: one float32 number, for a static scheme only; None otherwise.

    The weight counts as constant while the layer runs: a Hopper GPU may begin to load it before the kernel ahead in the
    stream has ended, unless that is an ordinary one. Only a kernel that lets others start early (programmatic dependent
    launch) must not write it right ahead of a call.

    A new layer holds zeros, waiting for a ``state_dict``; ``input_scale`` holds NaN, so that a layer that never got one
    answers NaN. ``from_linear`` makes one from a float layer.
    """

    weight_names = ("weight",)
    scale_names = ("weight_scale", "input_scale")
    made_by = "from_linear"
    in_features: int
    out_features: int
    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None
    input_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scheme: str | QuantScheme = "int8",
    ) -> None:
        """``dtype``: of the bias, PyTorch's default dtype if None. ``scheme``: a name from ``SCHEMES``, or a scheme."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = resolve_scheme(scheme)
        self.weight = frozen(torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        # Before the scale: a transformers model takes its first float parameter's dtype for its own.
        self.bias = frozen(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.weight_scale = frozen(torch.ones(out_features, dtype=torch.float32, device=device))
        self.input_scale = (
            frozen(torch.full((), torch.nan, dtype=torch.float32, device=device)) if self.is_static else None
        )

    @classmethod
    def from_linear(
        cls, linear: nn.Module, scheme: str | QuantScheme = "int8", input_scale: Tensor | float | None = None
    ) -> QuantLinear:
        """A layer quantized from ``linear``, on its device: an ``nn.Linear``, or transformers' ``Conv1D``.

        ``input_scale``: the activation's scale, for a static scheme. Raises ``ValueError`` if the weight holds NaN or
        Inf, or if ``input_scale`` and ``scheme`` don't go together; ``TypeError`` if ``linear`` is no linear layer.
        ``linear`` is left as it is; the bias is shared.
        """
        if not (isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"):
            raise TypeError(f"linear is a {type(linear).__name__}; from_linear takes an nn.Linear or a Conv1D")
        weight = linear_weight(linear)
        if not weight.is_floating_point() or weight.dtype.itemsize == 1:
            raise TypeError(f"linear's weight is {weight.dtype}; from_linear quantizes float16, bfloat16 and wider")
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, bias is not None, "meta", weight.dtype, scheme)
        if layer.is_static != (input_scale is not None):
            wants = "needs an input_scale" if layer.is_static else "takes no input_scale"
            raise ValueError(f"scheme {layer.scheme.name!r} {wants}")
        if weight.device.type != "meta":
            q, scale = quantize_rows(weight.detach().float() if weight.dtype == torch.float64 else weight.detach())
            if not scale.isfinite().all():
                raise ValueError(
                    "weight holds NaN or Inf, which can't be quantized: mend the checkpoint or skip the layer"
                )
            layer.weight = frozen(q)
            layer.weight_scale = frozen(scale)
        if bias is not None:
            layer.bias = frozen(bias.detach().float() if bias.dtype == torch.float64 else bias.detach())
        if input_scale is not None:
            value = torch.as_tensor(input_scale, dtype=torch.float32, device=weight.device).detach()
            if value.numel() != 1:
                raise ValueError(f"input_scale has shape {list(value.shape)}; it must be a single number")
            value = value.reshape(())
            if value.device.type != "meta" and not (value > 0 and value.isfinite()):
                raise ValueError(f"input_scale is {value.item()}; it must be finite and greater than 0")
            layer.input_scale = frozen(value)
        return layer.train(linear.training)

    def dequantize(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """The float layer with the weight that this one stands for, in ``dtype``: by default the bias's, or float32."""
        dtype = dtype or (torch.float32 if self.bias is None else self.bias.dtype)
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter((self.weight * self.weight_scale[:, None]).to(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` in float16, bfloat16 or float32 to ``[..., out_features]`` in the same dtype.

        ``input`` is what ``nn.Linear`` calls it, for models that pass it by name.
        """
        parameters: dict[str, Any] = self._parameters
        try:  # past nn.Module.__getattr__, which takes the host 0.1 us a parameter
            weight, weight_scale = parameters["weight"], parameters["weight_scale"]
        except KeyError:  # plain tensors in their place, as nn.DataParallel and parametrizations have
            weight, weight_scale = self.weight, self.weight_scale
        return quant_linear(input, weight, weight_scale, self.bias, self.input_scale)

    def extra_repr(self) -> str:
        """Sizes and scheme, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name!r}"
        )


def linear_weight(linear: nn.Module) -> Tensor:
    """The weight ``[out_features, in_features]`` of a linear layer; transformers' ``Conv1D`` stores its transpose."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.t() if type(linear).__name__ == "Conv1D" else weight
