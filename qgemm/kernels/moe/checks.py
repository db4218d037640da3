"""Checks of the arguments of experts and their routers, in the form of ``kernels/checks.py``."""

import torch
from torch import Tensor

from qgemm.kernels.checks import (
    GROUP_SCALE_DTYPES,
    check_form,
    check_length,
    check_residual,
    check_same_device,
    check_strided,
    check_tensor,
    conversion,
    names_of,
    takes_float_zeros,
)
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.routing import Routing
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FLOAT_DTYPES, FORMATS, FP8, INT8, OPERANDS
from qgemm.numerics.groups import stored_weight
from qgemm.numerics.integers import cdiv


def check_grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Raises if ``grouped_mm`` doesn't accept these."""
    if a.dtype != INT8.storage:
        raise TypeError(f"a is {a.dtype}; it must be {INT8.storage} (quantize_rows makes it)")
    check_strided("a", a)
    if a.ndim != 2:
        raise ValueError(f"a has shape {list(a.shape)}; it must be [T, K]: reshape it")
    _check_grouped_weight("b", b, b_scale, bias, "[G, N, K]")
    if a.shape[1] != b.shape[2]:
        raise ValueError(f"a is {list(a.shape)} and b is {list(b.shape)}: a's columns must equal b's last dimension")
    check_length(a.shape[1])
    if offsets.dtype != torch.int32 or offsets.shape != b.shape[:1]:
        raise ValueError(
            f"offsets is {offsets.dtype} {list(offsets.shape)}; it must be torch.int32 [{b.shape[0]}], where each "
            "group ends"
        )
    check_form("a_scale", a_scale, (torch.float32,), a.shape[:1])
    check_same_device(a=a, b=b, offsets=offsets, a_scale=a_scale, b_scale=b_scale, bias=bias)
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; grouped_mm returns {names_of(FLOAT_DTYPES)}")


def check_route(logits: Tensor, routing: Routing, bias: Tensor | None) -> None:
    """Raises if ``route`` doesn't accept these."""
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits is {logits.dtype}; route accepts {names_of(FLOAT_DTYPES)}: {conversion(logits)}")
    if logits.ndim != 2 or logits.shape[1] < routing.top_k:
        raise ValueError(
            f"logits is {list(logits.shape)}; it must be [T, E] with at least top_k = {routing.top_k} experts"
        )
    E = logits.shape[1]
    if E % routing.groups or (routing.kept_groups < routing.groups and 2 * routing.groups > E):
        raise ValueError(f"logits has {E} experts; they must be {routing.groups} groups of as many, of two at least")
    if E // routing.groups * routing.kept_groups < routing.top_k:
        raise ValueError(
            f"top_k is {routing.top_k}, more than {routing.kept_groups} of {routing.groups} groups have of {E}"
        )
    if bias is not None:
        if bias.dtype not in FLOAT_DTYPES or bias.shape != (E,):
            raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be floats, [{E}]")
        if routing.chooses_by_logits:
            raise ValueError(f"bias is given; {routing.kind} chooses by the logits alone")
    check_strided("logits", logits)


def check_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> None:
    """Raises if ``experts`` doesn't accept these."""
    gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation = weights
    shape = "[E, 2I, H]" if activation.gated else "[E, I, H]"
    _check_grouped_weight("gate_up", gate_up, gate_up_scale, gate_up_bias, shape, (*OPERANDS,))
    _check_grouped_weight("down", down, down_scale, down_bias, "[E, H, I]", (gate_up.dtype,))
    if weights.has_blocks != (down_scale.ndim == 3):
        raise ValueError(
            f"gate_up's scale is {list(gate_up_scale.shape)} and down's {list(down_scale.shape)}; both must be of "
            "rows, or both of blocks"
        )
    E, H, intermediate = down.shape
    if gate_up.shape != (E, activation.columns(intermediate), H):
        wanted = [E, activation.columns(intermediate), H]
        raise ValueError(
            f"gate_up is {list(gate_up.shape)}; with down {list(down.shape)} and gated={activation.gated} it must be "
            f"{wanted}"
        )
    if not intermediate:
        raise ValueError(f"down is {list(down.shape)}; its last dimension must be at least 1")
    check_length(max(H, intermediate), gate_up.dtype)
    _check_routed(x, H, top_k_index, top_k_weights, residual, gate_up, down)


def check_weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> None:
    """Raises if ``weight_only_experts`` doesn't accept these."""
    gate_up, down, activation = weights.gate_up, weights.down, weights.activation
    for name, format, size in (("gate_up", *weights[11:13]), ("down", *weights[13:])):
        if format not in FORMATS:
            raise ValueError(f"{name}_format is {format!r}; it must be one of {sorted(FORMATS)}")
        if size < 0:
            raise ValueError(f"{name}_group_size is {size}; it must be at least 1, or 0 for a scale for each row")
    if gate_up.ndim != 3 or down.ndim != 3 or len(gate_up) != len(down):
        found = f"{list(gate_up.shape)} and {list(down.shape)}"
        raise ValueError(f"gate_up and down are {found}; they must be [E, N, ...] and [E, H, ...], for as many experts")
    E, (H, intermediate) = len(down), weights.sizes
    if not intermediate or (activation.gated and gate_up.shape[1] % 2):
        wanted = "an even number, of gates and ups" if activation.gated else "at least 1"
        raise ValueError(f"gate_up is {list(gate_up.shape)}; its rows must be {wanted}")
    for name, own in zip(("gate_up", "down"), weights.parts, strict=True):
        weight, scale, zero_point, global_scale, bias, format, size, K = own
        rows = tuple(weight.shape[:2])
        whole, stored = stored_weight(rows[1], K, own.form)
        scales = (*rows, cdiv(K, size or K))
        for part, tensor, allowed, shape in (
            ("", weight, (stored,), (E, *whole)),
            ("'s scale", scale, GROUP_SCALE_DTYPES, scales),
            ("'s zero point", zero_point, (torch.int8, *FLOAT_DTYPES), scales),
            ("'s global scale", global_scale, (torch.float32,), (E, 2)),
            ("'s bias", bias, FLOAT_DTYPES, rows),
        ):
            check_form(f"{name}{part}", tensor, allowed, shape)
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name}{part} has strides {tensor.stride()}; it must be contiguous")
        if (global_scale is None) == (scale.dtype == torch.float8_e4m3fn):
            has = "no global scale" if global_scale is None else "a global scale"
            raise ValueError(f"{name}'s scale is {scale.dtype}, with {has}: one goes with float8_e4m3fn alone")
        if zero_point is not None and zero_point.is_floating_point() and not takes_float_zeros(format, scale):
            found = f"{name}'s zero point is {zero_point.dtype}, of {format} with scales in {scale.dtype}"
            raise ValueError(f"{found}; floats are for int4 and int8 with float scales")
        check_same_device(
            **{name: weight, f"{name}'s scale": scale, f"{name}'s zero point": zero_point},
            **{f"{name}'s global scale": global_scale, f"{name}'s bias": bias},
        )
    _check_routed(x, H, top_k_index, top_k_weights, residual, gate_up, down)


def _check_routed(
    x: Tensor,
    H: int,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    residual: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
) -> None:
    """Raises unless ``x`` and its routing are for experts with rows of ``H``."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {x.dtype}; experts accept {names_of(FLOAT_DTYPES)}: {conversion(x)}")
    check_strided("x", x)
    if x.ndim != 2 or x.shape[1] != H:
        raise ValueError(f"x is {list(x.shape)}; it must be [T, {H}]: reshape it")
    if top_k_index.dtype != torch.int64 or top_k_index.ndim != 2 or top_k_index.shape[0] != x.shape[0]:
        raise ValueError(
            f"top_k_index is {top_k_index.dtype} {list(top_k_index.shape)}; it must be torch.int64 [{x.shape[0]}, k]"
        )
    if top_k_weights.dtype not in FLOAT_DTYPES or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights is {top_k_weights.dtype} {list(top_k_weights.shape)}; it must be one of "
            f"{names_of(FLOAT_DTYPES)} {list(top_k_index.shape)}, as top_k_index"
        )
    check_strided("top_k_index", top_k_index)
    check_strided("top_k_weights", top_k_weights)
    check_residual(residual, x.shape, x.dtype)
    check_same_device(
        x=x, top_k_index=top_k_index, top_k_weights=top_k_weights, gate_up=gate_up, down=down, residual=residual
    )


def _check_grouped_weight(
    name: str,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    shape: str,
    dtypes: tuple[torch.dtype, ...] = (INT8.storage,),
) -> None:
    if weight.dtype not in dtypes:
        raise TypeError(f"{name} is {weight.dtype}; it must be {names_of(dtypes)} (quantize_rows makes it)")
    if weight.ndim != 3 or not weight.is_contiguous():
        raise ValueError(
            f"{name} is {list(weight.shape)} with strides {weight.stride()}; it must be {shape}, contiguous"
        )
    check_tensor(f"{name}'s scale", scale)
    scales = [tuple(weight.shape[:2])]
    if weight.dtype == FP8.storage:
        scales.append((weight.shape[0], *(cdiv(size, BLOCK) for size in weight.shape[1:])))
    if scale.dtype != torch.float32 or tuple(scale.shape) not in scales:
        wanted = " or ".join(str(list(each)) for each in scales)
        raise ValueError(f"{name}'s scale is {scale.dtype} {list(scale.shape)}; it must be torch.float32 {wanted}")
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or bias.shape != weight.shape[:2]):
        wanted = str(list(weight.shape[:2]))
        raise ValueError(f"{name}'s bias is {bias.dtype} {list(bias.shape)}; it must be a float {wanted}")
    check_same_device(**{name: weight, f"{name}'s scale": scale, f"{name}'s bias": bias})
