"""The public kernel functions: they check the arguments, then compute where the tensors are.

``[M, K] @ [K, N]`` throughout. A weight stored as ``[N, K]``, as in ``nn.Linear``, is passed as its transpose. That is
the fast layout, since 8-bit tensor cores need K contiguous in both operands. Any other strides work.

The numbers are specified in ``reference.py``. On the CPU: ``cpu.py``. On a GPU: ``gpu.py``. A ``config`` asks for the
Triton kernel itself, so on CPU tensors it needs Triton's interpreter (``TRITON_INTERPRET=1``).

These functions record no gradients and can't be traced; ``torch.ops.qgemm`` has the same functions with gradients, for
``torch.compile`` and ``torch.export`` as well.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels import checks, cpu
from qgemm.kernels.activations import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.gemm.config import GemmConfig
from qgemm.kernels.launch.plans import remember
from qgemm.kernels.moe import cpu as moe_cpu
from qgemm.kernels.moe.checks import check_experts, check_grouped_mm, check_route, check_weight_only_experts
from qgemm.kernels.norms import Norm, NormCall
from qgemm.kernels.routing import Routing
from qgemm.kernels.rows import QuantizedRows


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """Quantizes each row (the last dimension) of ``x`` to int8; returns ``(q, row_scale)`` with ``x ~ q * row_scale``.

    ``x``: float16, bfloat16 or float32, ``[..., K]``, any strides. ``scale``: None for each row's own ``amax / 127``,
    or one float32 number for all rows; values beyond 127 times it saturate. Returns int8 ``[..., K]`` in [-127, 127],
    contiguous, and float32 ``[...]``. A row of zeros has scale 1; a row with NaN or Inf has scale NaN.

    ``zero_point``: for a static scale: one int8 number, which 0 becomes. Values are then in [-128, 127], and
    ``x ~ (q - zero_point) * row_scale``.

    ``dtype``: the dtype of ``q``: int8, or float8_e4m3fn, in [-448, 448] with scales ``amax / 448``.
    """
    checks.check_quantize_rows(x, scale, zero_point, dtype)
    out: tuple[Tensor, Tensor] = _backend(x).quantize_rows(x, scale, zero_point, dtype)
    return out


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each 128 values of the rows of ``x`` to float8_e4m3fn; returns ``(q, scale)``.

    ``x``: float16, bfloat16 or float32, ``[..., K]``, any strides. Returns float8_e4m3fn ``[..., K]``, contiguous, and
    float32 ``[..., ceil(K / 128)]``: the result of ``quantize_rows`` for each 128 values, with fewer at the end of a
    row.
    """
    checks.check_quantize_groups(x)
    out: tuple[Tensor, Tensor] = _backend(x).quantize_groups(x)
    return out


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor]:
    """``quantize_rows(norm(x, weight, bias), input_scale)`` to ``dtype`` in one kernel: a norm ahead of layers.

    ``x``: float16, bfloat16 or float32, ``[..., K]``, any strides. ``weight``, ``bias``: ``[K]``, or ``[B, K]`` with a
    row for each sample of ``x [B, ..., K]``; of the dtype of ``x``, or, for layer norms, float32. ``norm``: its kind
    and epsilon; the norm is rounded where the model's module rounds it. Returns ``q`` and ``row_scale`` as from
    ``quantize_rows``.
    """
    call = NormCall(x, None, None, None, weight, bias, norm, input_scale, dtype)
    checks.check_norm("norm_quantize", call)
    _, _, q, row_scale = _backend(x).norm_rows(call)
    return q, row_scale


def add_norm_quantize(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    gate: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(total, q, row_scale)``: ``total = residual + x``, then ``norm(total, weight, bias)`` quantized, in one kernel.

    ``x``, ``residual``: ``[..., K]``, of one dtype, to which ``total`` is rounded before its norm. ``branch_weight``:
    for models with another norm after the branch, like Gemma 2: ``total = residual + norm(x, branch_weight)``.
    ``gate``: for diffusion models and learned scales of branches, ``[B, K]`` for ``x [B, ..., K]``, or ``[K]``:
    ``total = residual + round(gate * x)``; if it is float32, the product isn't rounded to 16 bits.
    ``factor``: for models like Granite, a number that multiplies what is added: ``total = residual + round(factor *
    x)``, behind the branch's norm and beside no gate.
    ``weight``: None if ``total`` itself goes into the layers, as in OLMo 2. The rest is as in ``norm_quantize``.
    """
    call = NormCall(x, residual, branch_weight, gate, weight, bias, norm, input_scale, dtype, factor)
    checks.check_norm("add_norm_quantize", call)
    total, _, q, row_scale = _backend(x).norm_rows(call, total=True)
    return total, q, row_scale


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    gate: Tensor | None = None,
    factor: float = 1.0,
    total_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(total, norm(total, weight, bias))`` as floats, in one kernel, for consumers that don't quantize them.

    Arguments as in ``add_norm_quantize``. ``total_factor``: for models like Gemma 4, ``[1]``, of the dtype of ``x``:
    ``total`` is rounded, multiplied by it and rounded again. Without ``residual``, nothing is added; without anything
    that changes it, ``total`` is ``x``. Without ``weight``, the second result is ``total``.
    """
    call = NormCall(x, residual, branch_weight, gate, weight, bias, norm, factor=factor, total_factor=total_factor)
    checks.check_norm("add_norm", call)
    total, normed, _, _ = _backend(x).norm_rows(call, total=call.adds, normed=weight is not None)
    total = x if total is None else total
    return total, total if normed is None else normed


def post_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """``norm(residual + x, weight, bias)`` in one kernel: the norm of a post-norm layer, such as BERT's.

    Arguments as in ``add_norm_quantize``; the sum is rounded before its norm.
    """
    call = NormCall(x, residual, None, None, weight, bias, norm)
    checks.check_norm("post_norm", call)
    out: Tensor = _backend(x).norm_rows(call, normed=True)[1]
    return out


def post_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(normed, q, row_scale)``: ``post_norm``, and its rows quantized for the next branch, in one kernel.

    ``q`` and ``row_scale`` as in ``quantize_rows``.
    """
    call = NormCall(x, residual, None, None, weight, bias, norm, input_scale, dtype)
    checks.check_norm("post_norm_quantize", call)
    _, normed, q, row_scale = _backend(x).norm_rows(call, normed=True)
    return normed, q, row_scale


def activation_quantize(
    x: Tensor,
    activation: str,
    gated: bool,
    input_scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    prefix: Tensor | None = None,
    up_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` of ``act(gate) * up`` in one kernel: the step between the two products of an MLP.

    ``x``: float16, bfloat16 or float32, ``[..., 2I]`` with all gates before the ups, or ``[..., I]`` without ``gated``:
    then ``act(x)``. ``activation``: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"relu"``, ``"relu2"`` or
    ``"quick_gelu"``; it is rounded to the dtype of ``x``, and so is the product, as float modules do. Returns
    ``q [..., I]`` and ``row_scale`` as from ``quantize_rows``.

    ``prefix``: ``[..., P]``: ``cat(prefix, ...)`` is quantized, ``[..., P + I]``. ``up_first``: all ups are before the
    gates, as in diffusers' GEGLU.
    """
    checks.check_activation_quantize(x, activation, gated, input_scale, dtype, prefix, up_first)
    out: tuple[Tensor, Tensor] = _backend(x).activation_quantize(
        x, activation, gated, input_scale, dtype, prefix, up_first
    )
    return out


def activate(x: Tensor, activation: str, gated: bool, up_first: bool = False) -> Tensor:
    """``act(gate) * up`` in one kernel: what ``activation_quantize`` quantizes, in the dtype of ``x``, ``[..., I]``.

    The arguments are as there: ``x`` is ``[..., 2I]``, or ``[..., I]`` without ``gated``.
    """
    checks.check_activate(x, activation, gated, up_first)
    out: Tensor = _backend(x).activate(x, activation, gated, up_first)
    return out


def int_mm(a: Tensor, b: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """``a @ b`` of int8 ``[M, K]`` and ``[K, N]`` as exact int32 ``[M, N]``. K may be at most 131,071.

    ``config``: tiles and schedule on a GPU; None chooses them.
    """
    checks.check_int_mm(a, b)
    out: Tensor = _backend(a, config).int_mm(a, b, **_options(config))
    return out


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    constant_b: bool = False,
    residual: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """``(a @ b) * a_scale[m] * b_scale[n] + bias[n]`` as ``out_dtype [M, N]``.

    ``a``: int8 ``[M, K]``; ``b``: int8 ``[K, N]``; K is at most 131,071. Or both float8_e4m3fn.
    ``a_scale``: float32 ``[M]``, or one number; ``b_scale``: float32 ``[N]``, or one number.
    ``bias``: float ``[N]``. ``out_dtype``: float16, bfloat16 or float32.
    The sum is exact in int32 for int8, and float32 for fp8. The rest is float32, with one rounding to ``out_dtype``.

    ``constant_b``: whether ``b`` is a weight that doesn't change while the model runs. Hopper GPUs then begin to load
    it while the previous kernel in the stream still runs, which makes products of few rows up to 1.15 times as fast.
    Previous kernels may still write ``b``, unless they let the next kernel start before they end (programmatic
    dependent launch).

    ``residual``: ``out_dtype [M, N]``, added to the rounded product, with another rounding: the bits of
    ``scaled_mm(...) + residual``. It costs no additional pass over memory. ``config``: as in ``int_mm``.
    """
    checks.check_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, residual)
    options: dict[str, Any] = {"constant_b": constant_b, "residual": residual, **_options(config)}
    out: Tensor = _backend(a, config).scaled_mm(a, b, a_scale, b_scale, bias, out_dtype, **options)
    return out


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """``activation(a @ b + bias)`` as ``out_dtype [M, N]``, by default the dtype of ``a``.

    ``a``: ``[M, K]``, ``b``: ``[K, N]``, both float16, bfloat16, float32, or either fp8. ``bias``: float ``[N]``.
    ``activation``: ``"relu"``, ``"gelu"`` (erf), ``"silu"`` or None. Sums are float32. On a GPU, float32 operands use
    TF32 only if ``torch.backends.cuda.matmul.fp32_precision`` (or ``allow_tf32``) says so.
    ``config``: as in ``int_mm``.
    """
    checks.check_matmul(a, b, bias, activation, out_dtype)
    checks.check_hardware(a, out_dtype)
    out: Tensor = _backend(a, config).matmul(a, b, bias, activation, out_dtype, **_options(config))
    return out


def quant_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recallable: bool = False,
) -> Tensor:
    """``x @ (weight * weight_scale[:, None]).T + bias`` in int8; ``[..., N]`` in the dtype of ``x``.

    ``x``: float ``[..., K]``, quantized to the dtype of ``weight``. ``weight``: int8 or float8_e4m3fn ``[N, K]``.
    ``weight_scale``: float32 ``[N]``. ``bias``: float ``[N]``. ``input_scale``: one float32 number for all of ``x``, or
    None for a scale per row. ``residual``: ``[..., N]`` in the dtype of ``x``, added to the rounded output; the sum is
    rounded again. ``recallable``: only the operator itself needs to see the call, so the function that computes it may
    be found by ``launch.plans.recall``.
    """
    if x.is_neg():
        x = x.resolve_neg()
    if residual is not None:
        residual = residual.resolve_neg()
    if x.is_cuda:
        linear: Tensor = _gpu().quant_linear(x, weight, weight_scale, bias, input_scale, residual, recallable)
        return linear
    checks.check_quant_linear(x, weight, weight_scale, bias, input_scale, residual)
    checks.on_gpu(x)
    if recallable:
        remember(cpu.quant_linear, x, weight, weight_scale, bias, input_scale, residual)
    return cpu.quant_linear(x, weight, weight_scale, bias, input_scale, residual)


def block_scaled_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    recallable: bool = False,
) -> Tensor:
    """``x @ (weight * its blocks' scales).T + bias`` in fp8; ``[..., N]`` in the dtype of ``x``.

    ``x``: float ``[..., K]``; each 128 values of a row get a scale. ``weight``: float8_e4m3fn ``[N, K]``.
    ``weight_scale``: float32 ``[ceil(N / 128), ceil(K / 128)]``, one for each 128 x 128 of the weight. ``bias``: float
    ``[N]``. Sums of 128 products are scaled and added in float32. ``residual``, ``recallable``: as in ``quant_linear``.
    """
    if x.is_neg():
        x = x.resolve_neg()
    if residual is not None and residual.is_neg():
        residual = residual.resolve_neg()
    if x.is_cuda:
        linear: Tensor = _gpu().quant_linear(x, weight, weight_scale, bias, None, residual, recallable, blocks=True)
        return linear
    checks.check_block_scaled_linear(x, weight, weight_scale, bias, residual)
    checks.on_gpu(x)
    out = cpu.block_scaled_linear(x, weight, weight_scale, bias)
    return out if residual is None else out.add_(residual)


@torch.no_grad()
def quant_linear_asymmetric(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, input_scale: Tensor, zero_point: Tensor
) -> Tensor:
    """``(q @ weight.T) * input_scale * weight_scale + bias``, in the dtype of ``x``; ``q`` is ``x`` quantized.

    As ``quant_linear``, with ``zero_point``, one int8 number, and a float ``bias [N]``. The zero point's contribution
    to the product is the same for every row and has been subtracted from the bias: ``qgemm.numerics.zero_points`` has
    the formula.
    """
    x = x.resolve_neg()
    checks.check_quant_linear_asymmetric(x, weight, weight_scale, bias, input_scale, zero_point)
    rows = QuantizedRows(*_backend(x).quantize_rows(x, input_scale, zero_point))
    return multiply(rows, weight, weight_scale, bias, x.dtype)


def multiply(
    x: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """``quant_linear`` for rows that are already quantized, with checked arguments: ``out_dtype [..., N]``.

    ``residual``: ``out_dtype [..., N]``, added to the rounded product; the sum is rounded, too.
    """
    if not checks.on_gpu(x.values):
        return cpu.multiply(x.values, x.scale, weight, weight_scale, bias, out_dtype, residual)
    *leading, K = x.values.shape
    rows, N = math.prod(leading), weight.shape[0]
    a, a_scale = x.values.view(rows, K), x.scale.view(rows)
    options: dict[str, Any] = {"constant_b": True}
    if residual is not None:
        options["residual"] = residual.reshape(rows, N)
    out: Tensor = _gpu().scaled_mm(a, weight.t(), a_scale, weight_scale, bias, out_dtype, **options)
    # Not a view for autograd, which would forbid changing it in place: nothing else holds this memory.
    return torch.ops.aten._unsafe_view(out, [*leading, N])  # type: ignore[no-any-return]


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """A product for every group of rows of ``a``, in one launch for all groups: ``out_dtype [T, N]``.

    In group ``g``: ``(a @ b[g].T) * a_scale[:, None] * b_scale[g] + bias[g]``, with the rounding of ``scaled_mm``.
    ``a``: int8 ``[T, K]``, rows sorted by group. ``b``: int8 ``[G, N, K]``, contiguous. ``offsets``: int32 ``[G]``,
    where each group ends, ascending; it stays on the device. ``a_scale``: float32 ``[T]``; ``b_scale``: float32
    ``[G, N]``; ``bias``: float ``[G, N]``. Rows beyond the last group are zeros. ``config``: as in ``int_mm``.
    """
    check_grouped_mm(a, b, offsets, a_scale, b_scale, bias, out_dtype)
    backend = _backend(a, config)
    out: Tensor = backend.grouped_mm(a, b, offsets, a_scale, b_scale, bias, out_dtype, **_options(config))
    return out


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token: weights ``[T, k]``, the largest first, and the experts' numbers, int64 ``[T, k]``.

    ``logits``: float16, bfloat16 or float32, ``[T, E]``. ``routing``: how experts are chosen, and how many. ``bias``:
    floats ``[E]`` that are part of the choice, but not of the weights. On a CPU, the results have the bits and the
    order of PyTorch's ``softmax``, ``sigmoid`` and ``topk``. On a GPU, the first of equal experts is chosen, which
    PyTorch leaves open, and a weight may differ in float32's last bits.
    """
    check_route(logits, routing, bias)
    out: tuple[Tensor, Tensor] = _backend(logits).route(logits, routing, bias)
    return out


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    activation: GatedActivation,
    residual: Tensor | None = None,
) -> Tensor:
    """A mixture of experts in int8 or fp8: ``[T, H]`` in the dtype of ``x``.

    ``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``, where an expert is
    ``activation(x @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e]``, rows quantized before each product.

    ``x``: float ``[T, H]``. ``top_k_index``: int64 ``[T, k]``; an id outside ``[0, E)`` contributes nothing, as for
    experts on another device. ``top_k_weights``: float ``[T, k]``. ``gate_up``: int8 ``[E, 2I, H]``, all rows of the
    gate before those of up, or ``[E, I, H]`` for an activation that isn't gated. ``down``: int8 ``[E, H, I]``. Both are
    contiguous; or both are float8_e4m3fn. Scales: float32, one per row of the weight (``[E, 2I]``, ``[E, H]``) or, for
    fp8, one for each block of 128 x 128 (``[E, ceil(2I / 128), ceil(H / 128)]``); then each 128 values of a row of
    ``x`` have one, too. Biases: float, one per row, or None. ``residual``: like ``x``, added to the rounded sum, which
    is rounded again; or None. The result has the same bits every time.
    """
    weights = ExpertWeights(gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation)
    return run_experts(x, top_k_index, top_k_weights, weights, residual)


def run_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """``experts``, with the weights as one value."""
    if x.is_neg():
        x = x.resolve_neg()
    if not x.is_cuda:  # the GPU's launcher checks once for every kind of call
        check_experts(x, top_k_index, top_k_weights, weights, residual)
        checks.on_gpu(x)
    out: Tensor = (_gpu() if x.is_cuda else moe_cpu).experts(x, top_k_index, top_k_weights, weights, residual)
    return out


def weight_only_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: WeightOnlyExperts, residual: Tensor | None = None
) -> Tensor:
    """A mixture of experts of which only the weights are quantized: ``[T, H]`` in the dtype of ``x``.

    ``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``, where an expert is
    ``activation(x @ W1[e].T + gate_up_bias[e]) @ W2[e].T + down_bias[e]``, and ``W = (q - zero_point) * scale``, or
    ``q * scale + zero_point`` with float zero points. Rows are rounded to the dtype of ``x`` after either product and
    after the activation.

    ``x``, ``top_k_index``, ``top_k_weights``, ``residual``: as in ``experts``. ``weights``: ``gate_up`` has ``N = 2I``
    rows (all rows of the gate before those of up), or ``I``, and ``K = H``; ``down`` has ``N = H`` rows and ``K = I``:

    - ``gate_up``, ``down``: 4-bit: uint8 ``[E, N, packed_width(K)]``; 8-bit: int8 or float8_e4m3fn ``[E, N, K]``.
    - scales: ``[E, N, ceil(K / group_size)]``, float, uint8 exponents, or float8_e4m3fn with a global scale.
    - zero points, of the shape of the scales: int8, or floats for int4 and int8 with float scales, or None.
    - global scales: float32 ``[E, 2]``, a factor and a divisor, or None.
    - biases: float ``[E, N]``, or None.
    - formats: the names of the weights' formats. Group sizes: how many values along K share a scale; 0 for all.
    """
    x = x.resolve_neg()
    # The kernels multiply 16-bit values. For float32, PyTorch does on a GPU what it does on a CPU.
    has_kernel = x.is_cuda and x.itemsize == 2
    if not has_kernel:  # the kernel's launcher checks once for every kind of call
        check_weight_only_experts(x, top_k_index, top_k_weights, weights, residual)
        checks.on_gpu(x)
    where = _gpu() if has_kernel else moe_cpu
    out: Tensor = where.weight_only_experts(x, top_k_index, top_k_weights, weights, residual)
    return out


def _backend(tensor: Tensor, config: GemmConfig | None = None) -> Any:
    """The module that computes where ``tensor`` is: ``cpu``, or ``gpu``, which is imported only when it's needed."""
    if checks.on_gpu(tensor):
        return _gpu()
    if config is None:
        return cpu
    from qgemm.kernels.stages import INTERPRETING

    if not INTERPRETING:
        raise ValueError(
            "a config is for the Triton kernel, which accepts CPU tensors only with TRITON_INTERPRET=1: omit it"
        )
    return _gpu()


@functools.cache
def _gpu() -> Any:
    from qgemm.kernels import gpu

    return gpu


def _options(config: GemmConfig | None) -> dict[str, GemmConfig]:
    return {} if config is None else {"config": config}
