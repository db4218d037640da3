"""A layer, or a model, of every scheme: with what the scheme wants to be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.model.selection import select_layers
from qgemm.model.swap import put
from qgemm.nn import LinearLayer, linear_class
from qgemm.nn.linear_layer import InputScale, linear_weight
from qgemm.numerics.groups import SCALE_DTYPES, global_scale_of, round_scale
from qgemm.scheme import QuantScheme, resolve_scheme

EVERY_SCHEME = [
    "int8",
    "int8-static",
    "int8-static-asymmetric",
    "int8-hadamard",
    "int8-static-hadamard",
    "int8-outliers-16",
    "int8-static-outliers-32",
    "fp8",
    "fp8-static",
    "fp8-block",
    "int4",
    "int4-channel",
    "int4-int8",
]
"""One of each family."""

EVERY_LAYER = [
    *EVERY_SCHEME,
    "int4-32-asymmetric-ordered",
    "int4-64-asymmetric-ordered-int8",
    "int8-weight",
    "int8-weight-64-asymmetric",
    "int4-32-float-zeros",
    "fp8-weight",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "nf4",
    "bnb-fp4",
    "nvfp4-prescaled",
]
"""And of each format of weights, and each kind of state: zero points, an order, factors, exponents, a global scale."""

OF_WEIGHTS = ["int4-32", "int4-channel", "int4-32-asymmetric", "int4-channel-asymmetric", "int8-weight", "fp8-weight"]
OF_WEIGHTS += ["int4-32-float-zeros", "int8-weight-float-zeros"]
OF_WEIGHTS += ["int8-weight-64-asymmetric", "mxfp4", "mxfp8", "nvfp4", "nf4", "bnb-fp4"]
# Whose scales are in steps, or of blocks; activations are quantized too, which rounding a weight knows nothing of.
OF_WEIGHTS += ["int4-32-int8", "int4-64-asymmetric-int8", "fp8-block"]
"""Schemes of every format and kind of scale that a weight has."""

# What each has is in another scheme, too.
_FEW_IN_MODELS = {"int4-64-asymmetric-ordered-int8", "int8-weight-64-asymmetric", "int4-32-float-zeros", "fp8-weight"}
_FEW_IN_MODELS |= {"int8-static-hadamard", "int8-static-outliers-32", "fp8-static", "bnb-fp4"}


def in_models(schemes: list[str]) -> list[Any]:
    """Parameters of a test of whole models: ``schemes``, some of them for ``--complete`` alone."""
    return [
        pytest.param(scheme, marks=[pytest.mark.complete] if scheme in _FEW_IN_MODELS else []) for scheme in schemes
    ]


ERRORS = {"int8": 0.03, "int4": 0.15, "fp8": 0.05, "fp4": 0.2, "nf4": 0.2, "bnb-fp4": 0.2}
"""The most that rounding to a format changes a product of random values, as a share of it."""


def quantized_layer(linear: nn.Module, scheme: str, weight: tuple[Tensor, ...] | None = None) -> LinearLayer:
    """``linear`` under ``scheme``; a static one gets a scale for inputs of about -4 to 4."""
    found = resolve_scheme(scheme)
    columns = outlier_columns_for(found, linear_weight(linear).shape[1])
    return linear_class(found).from_linear(
        linear, found, input_scale_for(found), weight=weight, outlier_columns=columns
    )


def outlier_columns_for(scheme: QuantScheme, K: int) -> Tensor | None:
    """Every other one of the last columns."""
    count = 0 if scheme.activation is None else scheme.activation.outlier_columns
    return torch.arange(K)[K - 2 * count :: 2] if count else None


def input_scale_for(scheme: QuantScheme) -> InputScale | None:
    if scheme.activation is None or not scheme.is_static:
        return None
    # Of an asymmetric one, for -4 to 4.5.
    form = scheme.activation.format
    return 4 / form.steps if scheme.activation.symmetric else (8.5 / form.steps, -8)


def quantized_model(model: nn.Module, scheme: str) -> nn.Module:
    """Swaps the layers that ``quantize_model`` would, with neither calibration nor report."""
    for layer in select_layers(model, None):
        if not layer.reason:
            put(model, layer, quantized_layer(model.get_submodule(layer.name), scheme))
    return model.eval()


def decided_weight(linear: nn.Module, scheme: str) -> tuple[Tensor, ...]:
    """Values and scales, and maybe zero points, that no rounding to nearest would give."""
    N, K = linear_weight(linear).shape
    found = resolve_scheme(scheme).weight
    form = found.format
    values = form.store(torch.empty(N, K).uniform_(form.low, form.high))
    scale = torch.rand(N, *(() if found.group_size is None else (-(-K // found.group_size),))) + 0.5
    if found.block is not None:
        scale = scale[:: found.block[0]].repeat_interleave(found.block[0], dim=0)[:N]
    unit = global_scale_of(scale.amax() * form.steps, form) if found.scale_dtype == "e4m3" else None
    scale = round_scale(scale, found.scale_dtype, form, unit)
    if found.symmetric:
        return values, scale
    if found.float_zeros:
        return values, scale, torch.randn(scale.shape).to(SCALE_DTYPES[found.scale_dtype])
    return values, scale, torch.randint(int(form.low), int(form.high) + 1, scale.shape, dtype=torch.int8)
