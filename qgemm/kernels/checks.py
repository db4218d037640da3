"""Checks of the kernels' arguments: each ``check_*`` raises ``TypeError`` or ``ValueError`` for what isn't accepted.

A message names the argument, what came, what was wanted and the way out. The checks look at metadata only, so they also
run under ``torch.compile`` and on fake tensors.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.activations import ACTIVATIONS, MATMUL_ACTIVATIONS
from qgemm.kernels.norms import NormCall
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.formats import FLOAT_DTYPES, FORMATS, FP8, FP8_DTYPES, INT8, OPERANDS
from qgemm.numerics.groups import stored_weight
from qgemm.numerics.integers import cdiv

GROUP_SCALE_DTYPES = (*FLOAT_DTYPES, torch.uint8, torch.float8_e4m3fn)


def check_quantize_rows(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None, dtype: torch.dtype = INT8.storage
) -> None:
    """Raises if ``quantize_rows`` doesn't accept these."""
    _check_rows("quantize_rows", x)
    _check_quantized("quantize_rows", dtype)
    _check_static_scale("scale", scale, x)
    if zero_point is not None:
        if scale is None:
            raise ValueError("zero_point needs a scale: with a scale per row there is no zero point")
        if dtype != INT8.storage:
            raise ValueError(f"zero_point is for int8; dtype is {dtype}: leave it out")
        _check_zero_point(zero_point, x)


def check_quantize_groups(x: Tensor) -> None:
    """Raises if ``quantize_groups`` doesn't accept it."""
    _check_rows("quantize_groups", x)


def check_norm(operation: str, call: NormCall) -> None:
    """Raises if ``operation``, one of those with a norm, doesn't accept ``call``."""
    x, residual, branch_weight, gate, weight, bias, norm, input_scale, dtype, factor, total_factor = call
    _check_rows(operation, x)
    if dtype is not None:
        _check_quantized(operation, dtype)
    check_residual(residual, x.shape, x.dtype)
    if bias is not None and (not norm.is_layer or weight is None):
        raise ValueError(f"bias is for the norm 'layer', with a weight; norm is {norm.kind!r}: pass None")
    if gate is not None and branch_weight is not None:
        raise ValueError("gate and branch_weight exclude each other: pass one of them")
    if factor != 1.0 and gate is not None:
        raise ValueError(f"factor is {factor} and there is a gate; they exclude each other: multiply the gate by it")
    if not math.isfinite(factor):
        raise ValueError(f"factor is {factor}; it must be a finite number")
    check_form("total_factor", total_factor, (x.dtype,), (1,))
    one, of_samples = x.shape[-1:], torch.Size((x.shape[0], x.shape[-1]))  # for all rows, for those of a sample
    either = (one, of_samples) if x.ndim > 1 else (one,)
    vectors = {"branch_weight": branch_weight, "weight": weight, "bias": bias, "gate": gate}
    for (name, vector), shapes in zip(vectors.items(), ((one,), either, either, either), strict=True):
        may_be_float = name == "gate" or (norm.is_layer and name != "branch_weight")
        dtypes = (x.dtype, torch.float32) if may_be_float and x.dtype != torch.float32 else (x.dtype,)
        if vector is not None and (vector.dtype not in dtypes or vector.shape not in shapes):
            kinds, wanted = (" or ".join(map(str, each)) for each in (dtypes, map(list, shapes)))
            raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}; it must be {kinds} {wanted}, as x is")
    if bias is not None and weight is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        given = (f"{name} {each.dtype} {list(each.shape)}" for name, each in (("bias is", bias), ("weight", weight)))
        raise ValueError(f"{' and '.join(given)}: they must be alike")
    check_same_device(x=x, residual=residual, total_factor=total_factor, **vectors)
    _check_static_scale("input_scale", input_scale, x)


def check_activate(x: Tensor, activation: str, gated: bool, up_first: bool) -> None:
    """Raises if ``activate`` doesn't accept these."""
    _check_rows("activate", x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {sorted(ACTIVATIONS)}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns; gates and ups side by side are an even number of them")
    if up_first and not gated:
        raise ValueError("up_first says where the gates are, but there are none without gated")


def check_activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None,
    dtype: torch.dtype,
    prefix: Tensor | None,
    up_first: bool,
) -> None:
    """Raises if ``activation_quantize`` doesn't accept these."""
    _check_quantized("activation_quantize", dtype)
    check_activate(x, activation, gated, up_first)
    if prefix is not None:
        if prefix.dtype != x.dtype or prefix.shape[:-1] != x.shape[:-1] or prefix.ndim != x.ndim:
            wanted = f"{x.dtype} {[*x.shape[:-1], 'P']}, as x is"
            raise ValueError(f"prefix is {prefix.dtype} {list(prefix.shape)}; it must be {wanted}")
        check_strided("prefix", prefix)
        check_same_device(x=x, prefix=prefix)
    _check_static_scale("input_scale", input_scale, x)


def _check_quantized(operation: str, dtype: torch.dtype) -> None:
    if dtype not in OPERANDS:
        raise TypeError(f"dtype is {dtype}; {operation} returns {names_of(tuple(OPERANDS))}")


def check_multiply(
    q: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Raises if ``multiply`` doesn't accept these."""
    _check_weight(weight)
    N, K = weight.shape
    if q.dtype != weight.dtype:
        raise TypeError(f"q is {q.dtype} and weight {weight.dtype}; pass quantize_rows {weight.dtype} for its dtype")
    if q.ndim == 0 or q.shape[-1] != K:
        raise ValueError(f"q is {list(q.shape)} but the weight's in_features is {K}; it must be [..., {K}]")
    check_form("row_scale", row_scale, (torch.float32,), q.shape[:-1])
    check_length(K, weight.dtype)
    _check_scale("weight_scale", weight_scale, N)
    _check_bias(bias, N)
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; multiply returns {names_of(FLOAT_DTYPES)}")
    check_residual(residual, (*q.shape[:-1], N), out_dtype)
    check_same_device(q=q, row_scale=row_scale, weight=weight, weight_scale=weight_scale, bias=bias, residual=residual)


def check_int_mm(a: Tensor, b: Tensor) -> None:
    """Raises if ``int_mm`` doesn't accept these."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != INT8.storage:
            raise TypeError(f"{name} is {operand.dtype}; it must be {INT8.storage} (quantize_rows makes it)")
    _check_product(a, b)
    check_length(a.shape[1])


def check_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> None:
    """Raises if ``scaled_mm`` doesn't accept these."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in OPERANDS or operand.dtype != a.dtype:
            wanted = a.dtype if a.dtype in OPERANDS else f"one of {names_of(tuple(OPERANDS))}"
            raise TypeError(f"{name} is {operand.dtype}; it must be {wanted} (quantize_rows makes it)")
    _check_product(a, b)
    check_length(a.shape[1], a.dtype)
    _check_scale("a_scale", a_scale, a.shape[0])
    _check_scale("b_scale", b_scale, b.shape[1])
    _check_bias(bias, b.shape[1])
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; scaled_mm returns {names_of(FLOAT_DTYPES)}")
    check_residual(residual, (a.shape[0], b.shape[1]), out_dtype)
    check_same_device(a=a, a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual)


def check_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None, out_dtype: torch.dtype | None
) -> None:
    """Raises if ``matmul`` doesn't accept these."""
    if a.dtype not in FLOAT_DTYPES + FP8_DTYPES:
        raise TypeError(f"a is {a.dtype}; matmul accepts {names_of(FLOAT_DTYPES + FP8_DTYPES)}; scaled_mm accepts int8")
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}; convert one of them")
    _check_product(a, b)
    _check_bias(bias, b.shape[1])
    check_same_device(a=a, bias=bias)
    if activation is not None and activation not in MATMUL_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {list(MATMUL_ACTIVATIONS)} or None")
    if out_dtype is not None and out_dtype not in FLOAT_DTYPES + FP8_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; matmul returns {names_of(FLOAT_DTYPES + FP8_DTYPES)}")


def check_quant_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    residual: Tensor | None = None,
) -> None:
    """Raises if ``quant_linear`` doesn't accept these."""
    _check_weight(weight)
    N, K = weight.shape
    check_input(x, K)
    check_length(K, weight.dtype)
    check_quantize_rows(x, input_scale)
    _check_scale("weight_scale", weight_scale, N)
    _check_bias(bias, N)
    check_residual(residual, (*x.shape[:-1], N), x.dtype)
    check_same_device(x=x, weight=weight, weight_scale=weight_scale, bias=bias, residual=residual)


def check_quant_linear_asymmetric(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, input_scale: Tensor, zero_point: Tensor
) -> None:
    """Raises if ``quant_linear_asymmetric`` doesn't accept these."""
    check_quant_linear(x.resolve_neg(), weight, weight_scale, bias, input_scale)
    if weight.dtype != torch.int8:
        raise TypeError(f"weight is {weight.dtype}; with a zero point it must be torch.int8")
    _check_zero_point(zero_point, x)


def check_block_scaled_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> None:
    """Raises if ``block_scaled_linear`` doesn't accept these."""
    if weight.ndim != 2 or weight.dtype != FP8.storage:
        raise TypeError(
            f"weight is {weight.dtype} {list(weight.shape)}; it must be {FP8.storage} [out_features, in_features] "
            "(BlockScaledLinear.from_linear makes it)"
        )
    N, K = weight.shape
    check_input(x, K)
    check_strided("x", x)
    check_strided("weight", weight)
    shape = (cdiv(N, BLOCK), cdiv(K, BLOCK))
    if weight_scale.dtype != torch.float32 or weight_scale.shape != shape:
        found = f"{weight_scale.dtype} {list(weight_scale.shape)}"
        raise ValueError(f"weight_scale is {found}; it must be torch.float32 {list(shape)}, one for each 128 x 128")
    _check_bias(bias, N)
    check_residual(residual, (*x.shape[:-1], N), x.dtype)
    check_same_device(x=x, weight=weight, weight_scale=weight_scale, bias=bias, residual=residual)


def check_weight_only_linear(x: Tensor, weight: ScaledWeight, residual: Tensor | None = None) -> None:
    """Raises if ``weight_only_linear`` doesn't accept these."""
    values, scale, zero_point, global_scale, input_order, bias, in_features, format, group_size, has_int8, step = weight
    check_input(x, in_features)
    form = FORMATS.get(format)
    if form is None:
        raise ValueError(f"format is {format!r}; it must be one of {sorted(FORMATS)}")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    N, scales = values.shape[0] if values.ndim else 0, cdiv(in_features, group_size)
    whole, stored = stored_weight(N, in_features, form)
    for name, tensor, dtypes, shape in (
        ("weight", values, (stored,), whole),
        ("scale", scale, GROUP_SCALE_DTYPES, (N, scales)),
        ("zero_point", zero_point, (torch.int8, *FLOAT_DTYPES), (N, scales)),
        ("global_scale", global_scale, (torch.float32,), (2,)),
        ("input_order", input_order, (torch.int32,), (in_features,)),
        ("step", step, (torch.float32,), (N,)),
    ):
        check_form(name, tensor, dtypes, shape)
    if (global_scale is None) == (scale.dtype == torch.float8_e4m3fn):
        has = "no global_scale" if global_scale is None else "a global_scale"
        raise ValueError(f"scale is {scale.dtype}, with {has}: one goes with float8_e4m3fn, and only with that")
    if has_int8 and format != "int4":
        raise ValueError(f"format is {format!r}; int8_activations are for int4")
    if has_int8 and scale.dtype not in FLOAT_DTYPES:
        raise ValueError(f"scale is {scale.dtype}; with int8_activations it must be {names_of(FLOAT_DTYPES)}")
    if has_int8:
        check_length(min(group_size, in_features))
    if zero_point is not None and zero_point.is_floating_point():
        if has_int8 or not takes_float_zeros(format, scale):
            raise ValueError(
                f"zero_point is {zero_point.dtype}; floats are for int4 and int8 with float scales, and without "
                "int8_activations"
            )
    if step is not None and not (has_int8 and zero_point is None):
        raise ValueError("step is for int8_activations, and weights without a zero_point: leave it out")
    _check_bias(bias, N)
    check_residual(residual, (*x.shape[:-1], N), x.dtype)
    check_same_device(
        x=x,
        weight=values,
        scale=scale,
        zero_point=zero_point,
        global_scale=global_scale,
        input_order=input_order,
        bias=bias,
        step=step,
        residual=residual,
    )


def takes_float_zeros(format: str, scale: Tensor) -> bool:
    """Whether weights in ``format`` with a ``scale`` of this dtype may have float zero points."""
    return format in ("int4", "int8") and scale.dtype in FLOAT_DTYPES


def check_hardware(a: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raises if the GPU of ``a`` doesn't have the instructions for the dtypes of a ``matmul``."""
    if torch.float8_e4m3fn not in (a.dtype, out_dtype) or not on_gpu(a) or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(a.device)
    if capability < (8, 9):
        raise ValueError(
            f"float8_e4m3fn needs compute capability 8.9, and {a.device} has {'.'.join(map(str, capability))}: "
            "convert to float16"
        )


def on_gpu(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on a GPU instead of the CPU. Raises ``ValueError`` for any other device."""
    if tensor.device.type in ("cuda", "cpu"):
        return tensor.device.type == "cuda"
    raise ValueError(
        f"the tensors are on {tensor.device}; qgemm runs on cuda (NVIDIA and AMD) and cpu: move them there"
    )


def conversion(tensor: Tensor) -> str:
    """The advice about a tensor of another dtype; float64 comes from ``model.double()``."""
    return "call float() on the model, or convert it" if tensor.dtype == torch.float64 else "convert it first"


def _check_rows(function: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {x.dtype}; {function} accepts {names_of(FLOAT_DTYPES)}: convert it first")
    check_strided("x", x)
    if x.ndim == 0:
        raise ValueError(f"x is a scalar; {function} needs at least one dimension, [..., K]")


def _check_static_scale(name: str, scale: Tensor | None, x: Tensor) -> None:
    if scale is None:
        return
    check_tensor(name, scale)
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"{name} is {scale.dtype} {list(scale.shape)}; a static scale is one float32 number")
    check_same_device(x=x, **{name: scale})


def _check_zero_point(zero_point: Tensor, x: Tensor) -> None:
    if zero_point.numel() != 1 or zero_point.dtype != INT8.storage:
        raise ValueError(f"zero_point is {zero_point.dtype} {list(zero_point.shape)}; it must be one int8 number")
    check_same_device(x=x, zero_point=zero_point)


def check_residual(residual: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises unless ``residual`` is None, or dense and of this shape and dtype."""
    check_form("residual", residual, (dtype,), shape)
    if residual is not None:
        check_strided("residual", residual)


def check_form(name: str, tensor: Tensor | None, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """Raises unless ``tensor`` is None, or of one of ``dtypes`` and of this shape."""
    if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != torch.Size(shape)):
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {wanted} {list(shape)}")


def _check_weight(weight: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(f"weight is {list(weight.shape)}; it must be [out_features, in_features]")
    if weight.dtype not in OPERANDS:
        wanted = names_of(tuple(OPERANDS))
        raise TypeError(f"weight is {weight.dtype}; it must be one of {wanted} (QuantLinear.from_linear makes it)")


def check_input(x: Tensor, in_features: int) -> None:
    """Raises if ``x`` isn't an input for a layer of ``in_features``."""
    if x.dtype not in FLOAT_DTYPES:
        cast = "its code casts it to the dtype of the layer's weight, so have quantize_model skip that layer"
        way_out = cast if x.dtype in OPERANDS else conversion(x)
        raise TypeError(f"x is {x.dtype}; a quantized layer accepts {names_of(FLOAT_DTYPES)}: {way_out}")
    if x.ndim == 0 or x.shape[-1] != in_features:
        columns = x.shape[-1] if x.ndim else "no"
        raise ValueError(f"x has {columns} columns but the layer's in_features is {in_features}")
    _check_dense("x", x)


def check_length(K: int, dtype: torch.dtype = INT8.storage) -> None:
    """Raises if a sum of ``K`` products of ``dtype`` may exceed what the accumulator holds."""
    if OPERANDS[dtype].max_k < K:
        raise ValueError(f"K is {K}; int32 holds sums of int8 products up to K = {INT8.max_k}: split K and add")


def _check_product(a: Tensor, b: Tensor) -> None:
    for name, operand in (("a", a), ("b", b)):
        check_strided(name, operand)
        if operand.ndim != 2:
            raise ValueError(f"{name} has shape {list(operand.shape)}; it must have two dimensions: reshape it")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {list(a.shape)} and b is {list(b.shape)}: a's columns must equal b's rows")
    check_same_device(a=a, b=b)


def _check_scale(name: str, scale: Tensor, length: int) -> None:
    check_tensor(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} is {scale.dtype}; scales are torch.float32: convert it with .float()")
    # The length first: under torch.export it may be symbolic, and comparing it with 1 would exclude that batch size.
    if scale.ndim > 1 or (scale.ndim == 1 and scale.shape[0] != length and scale.shape[0] != 1):
        raise ValueError(f"{name} is {list(scale.shape)}; it must be [{length}] or a single number")


def _check_bias(bias: Tensor | None, length: int) -> None:
    if bias is None:
        return
    if bias.dtype not in FLOAT_DTYPES:
        raise TypeError(f"bias is {bias.dtype}; it must be one of {names_of(FLOAT_DTYPES)}: {conversion(bias)}")
    if bias.ndim != 1 or bias.shape[0] != length:
        raise ValueError(f"bias is {list(bias.shape)}; it must be [{length}], one value per output column")


def check_tensor(name: str, value: Any) -> None:
    """Raises unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a float32 tensor: torch.tensor({value!r})")


def check_strided(name: str, tensor: Tensor) -> None:
    """Raises unless ``tensor`` is dense and stores its values as they are."""
    _check_dense(name, tensor)
    if tensor.is_neg():
        raise ValueError(f"{name} is a negative view, which stores negated values: pass {name}.resolve_neg()")


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; it must be a dense tensor: pass {name}.to_dense()")


def check_same_device(**tensors: Tensor | None) -> None:
    """Raises if tensors, by their names, are on different devices."""
    first = device = None
    for name, tensor in tensors.items():
        if tensor is None or tensor.device == device:
            continue
        if device is not None:
            raise ValueError(f"{first} is on {device} but {name} is on {tensor.device}: move them to one device")
        first, device = name, tensor.device


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """The names as an error lists them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
