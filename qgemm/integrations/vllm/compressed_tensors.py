"""``--quantization qgemm`` for a checkpoint of compressed-tensors: vLLM's own layers, with qgemm's int8 products.

vLLM reads the checkpoint as usual. While layers of that model are made, the kernel here comes first among vLLM's int8
kernels; for other models of the process it isn't there. Everything but int8-by-int8 linear layers, including experts,
stays as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from qgemm.integrations.vllm.compiling import extend_compiler
from qgemm.nn.quant_layer import frozen
from qgemm.numerics.formats import INT8
from qgemm.numerics.zero_points import correction
from qgemm.ops import quant_linear


class QGemmInt8Kernel(Int8ScaledMMLinearKernel):
    """Products of ``CompressedTensorsW8A8Int8``: activations per token, or static with or without a zero point."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """True except on old GPUs."""
        is_old = current_platform.is_cuda() and compute_capability is not None and compute_capability < 80
        return not is_old, "qgemm needs a compute capability of 8.0" if is_old else None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """True except for zero points that are computed for each token."""
        has_them = not (config.input_symmetric or config.is_static_input_scheme)
        return not has_them, "qgemm has no zero points of single tokens" if has_them else None

    def _held(self, layer: Any) -> list[Any]:
        """The weight, its scale, and the input's scale and zero point; None for those that don't exist."""
        return [getattr(layer, name, None) for name in self.layer_param_names[:4]]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Converts scales to float32, one for each row; static scales of merged parts become a single one."""
        weight, scale, input_scale, zero_point = self._held(layer)
        names = self.layer_param_names
        rows = scale.data.float().flatten()
        if not self.config.is_channelwise:
            widths = torch.tensor(layer.logical_widths, device=rows.device)
            rows = rows.expand(len(widths)).repeat_interleave(widths)
        setattr(layer, names[0], frozen(weight.data.contiguous()))
        setattr(layer, names[1], frozen(rows.contiguous()))
        layer.register_parameter("folded_bias", None)
        if not self.config.is_static_input_scheme:
            return
        static = input_scale.data.float().max()
        if not self.config.input_symmetric:
            static, point = _one_range(input_scale.data.float(), zero_point.data)
            setattr(layer, names[3], frozen(point))
            layer.folded_bias = frozen(-correction(weight.data, rows, static, point).float())
        setattr(layer, names[2], frozen(static))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias``, in the dtype of ``x``."""
        weight, scale, input_scale, zero_point = self._held(layer)
        folded = layer.folded_bias
        if folded is None:
            return quant_linear(x, weight, scale, bias, input_scale)
        bias = folded if bias is None else folded + bias
        out: Tensor = torch.ops.qgemm.quant_linear_asymmetric(x, weight, scale, bias, input_scale, zero_point)
        return out


def _one_range(scales: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the zero point whose range contains the ranges of all ``scales`` and ``points``."""
    form, wide = INT8.asymmetric, points.to(torch.int32)
    highest, lowest = (scales * (form.high - wide)).max(), (scales * (form.low - wide)).min()
    scale = (highest - lowest) / form.steps
    return scale, (form.low - lowest / scale).round().to(form.storage)


class QGemmCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's config of a checkpoint, with ``QGemmInt8Kernel`` for its int8 layers."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """As vLLM's; the kernel is chosen when weights are made."""
        extend_compiler()
        method = super().get_quant_method(layer, prefix)
        scheme = getattr(layer, "scheme", None)
        if scheme is not None:
            scheme.create_weights = _with_our_kernel_first(scheme.create_weights)
        return method


def _with_our_kernel_first(create_weights: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``create_weights``: while it runs, ``QGemmInt8Kernel`` comes first; other models don't see it."""

    @functools.wraps(create_weights)
    def create(*arguments: Any, **options: Any) -> None:
        kernels = _POSSIBLE_INT8_KERNELS.setdefault(current_platform._enum, [])
        kernels.insert(0, QGemmInt8Kernel)
        try:
            create_weights(*arguments, **options)
        finally:
            kernels.remove(QGemmInt8Kernel)

    return create
