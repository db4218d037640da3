"""Every argument that the kernels can't take is refused in one sentence: its name, what came, what was wanted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qgemm.kernels import GemmConfig, checks, dispatch
from qgemm.kernels.norms import Norm
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only.dispatch import weight_only_linear
from qgemm.numerics.formats import FP8, INT8
from qgemm.ops import linear

F32, F16, BF16, I8, F64 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64


def ones(*shape: int, dtype: torch.dtype = I8, device: str = "cpu") -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=device)


def scaled_mm(**changed: Any) -> torch.Tensor:
    arguments = {
        "a": ones(3, 4),
        "b": ones(4, 5),
        "a_scale": ones(3, dtype=F32),
        "b_scale": ones(5, dtype=F32),
        "bias": ones(5, dtype=F32),
        "out_dtype": F32,
    }
    return dispatch.scaled_mm(**{**arguments, **changed})


def matmul(**changed: Any) -> torch.Tensor:
    return dispatch.matmul(**{"a": ones(3, 4, dtype=F32), "b": ones(4, 5, dtype=F32), **changed})


def quant_linear(**changed: Any) -> torch.Tensor:
    arguments = {"x": ones(3, 4, dtype=F32), "weight": ones(5, 4), "weight_scale": ones(5, dtype=F32)}
    return dispatch.quant_linear(**{**arguments, **changed})


def norm_quantize(kind: str = "rms", **changed: Any) -> Any:
    arguments = {"x": ones(3, 4, dtype=BF16), "weight": ones(4, dtype=BF16), "bias": None, "norm": Norm(kind)}
    return dispatch.norm_quantize(**{**arguments, **changed})


def add_norm_quantize(**changed: Any) -> Any:
    x, weight = ones(3, 4, dtype=BF16), ones(4, dtype=BF16)
    arguments = {"x": x, "residual": x, "branch_weight": None, "weight": weight, "bias": None, "norm": Norm()}
    return dispatch.add_norm_quantize(**{**arguments, **changed})


def multiply(**changed: Any) -> torch.Tensor:
    arguments = {
        "q": ones(3, 4),
        "row_scale": ones(3, dtype=F32),
        "weight": ones(5, 4),
        "weight_scale": ones(5, dtype=F32),
        "bias": None,
        "residual": ones(3, 5, dtype=BF16),
        "out_dtype": BF16,
    }
    return linear.multiply(**{**arguments, **changed})


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # norms
    (lambda: norm_quantize(x=ones(3, 4)), TypeError, "x is torch.int8; norm_quantize accepts"),
    (
        lambda: norm_quantize(weight=ones(4, dtype=F32)),
        ValueError,
        "weight is torch.float32 [4]; it must be torch.bfloat16 [4] or [3, 4], as x is",
    ),
    (lambda: norm_quantize(weight=ones(5, dtype=BF16)), ValueError, "weight is torch.bfloat16 [5]; it must be"),
    (
        lambda: norm_quantize(bias=ones(4, dtype=BF16)),
        ValueError,
        "bias is for the norm 'layer', with a weight; norm is 'rms': pass None",
    ),
    (lambda: norm_quantize("layer", bias=ones(4, dtype=F16)), ValueError, "bias is torch.float16 [4]; it must be"),
    (
        lambda: norm_quantize(input_scale=ones(2, dtype=F32)),
        ValueError,
        "input_scale is torch.float32 [2]; a static scale is one float32 number",
    ),
    (
        lambda: add_norm_quantize(residual=ones(3, 4, dtype=F32)),
        ValueError,
        "residual is torch.float32 [3, 4]; it must be torch.bfloat16 [3, 4]",
    ),
    (lambda: add_norm_quantize(residual=ones(1, 4, dtype=BF16)), ValueError, "residual is torch.bfloat16 [1, 4]"),
    (lambda: add_norm_quantize(branch_weight=ones(3, dtype=BF16)), ValueError, "branch_weight is torch.bfloat16 [3]"),
    (lambda: add_norm_quantize(norm=Norm("layer"), weight=None, bias=ones(4, dtype=BF16)), ValueError, "bias is for"),
    (
        lambda: dispatch.add_norm(ones(3, 4, dtype=F64), None, None, None, None, Norm()),
        TypeError,
        "x is torch.float64; add_norm accepts",
    ),
    (
        lambda: dispatch.add_norm(ones(3, 4, dtype=F32), ones(3, 4, dtype=F32), None, ones(5, dtype=F32), None, Norm()),
        ValueError,
        "weight is torch.float32 [5]; it must be torch.float32 [4] or [3, 4], as x is",
    ),
    (
        lambda: dispatch.post_norm(ones(3, 4, dtype=F32), ones(4, dtype=F32), ones(4, dtype=F32), None, Norm()),
        ValueError,
        "residual is torch.float32 [4]; it must be torch.float32 [3, 4]",
    ),
    (
        lambda: dispatch.post_norm_quantize(ones(3, 4), ones(3, 4), ones(4), None, Norm()),
        TypeError,
        "x is torch.int8; post_norm_quantize accepts",
    ),
    # activation_quantize
    (
        lambda: dispatch.activation_quantize(ones(3, 4, dtype=F32), "silu", False, prefix=ones(2, 4, dtype=F32)),
        ValueError,
        "prefix is torch.float32 [2, 4]; it must be torch.float32 [3, 'P'], as x is",
    ),
    (
        lambda: dispatch.add_norm(
            ones(3, 4, dtype=F32), None, ones(4, dtype=F32), None, None, Norm(), ones(3, 4, dtype=F32)
        ),
        ValueError,
        "gate and branch_weight exclude each other",
    ),
    (
        lambda: dispatch.add_norm(ones(3, 4, dtype=F32), None, None, None, None, Norm(), ones(2, 4, dtype=F32)),
        ValueError,
        "gate is torch.float32 [2, 4]; it must be torch.float32 [4] or [3, 4], as x is",
    ),
    (
        lambda: add_norm_quantize(branch_weight=None, gate=ones(4, dtype=BF16), factor=0.5),
        ValueError,
        "factor is 0.5 and there is a gate; they exclude each other",
    ),
    (lambda: add_norm_quantize(factor=float("nan")), ValueError, "factor is nan; it must be a finite number"),
    (
        lambda: dispatch.add_norm(
            ones(3, 4, dtype=F32), None, None, None, None, Norm(), total_factor=ones(4, dtype=F32)
        ),
        ValueError,
        "total_factor is torch.float32 [4]; it must be torch.float32 [1]",
    ),
    (
        lambda: add_norm_quantize(norm=Norm("layer"), weight=ones(4, dtype=F64)),
        ValueError,
        "weight is torch.float64 [4]; it must be torch.bfloat16 or torch.float32 [4] or [3, 4], as x is",
    ),
    (
        lambda: add_norm_quantize(norm=Norm("layer"), weight=ones(4, dtype=F32), bias=ones(4, dtype=BF16)),
        ValueError,
        "bias is torch.bfloat16 [4] and weight torch.float32 [4]: they must be alike",
    ),
    (
        lambda: dispatch.activation_quantize(ones(3, 5, dtype=F32), "silu", True),
        ValueError,
        "x has 5 columns; gates and ups side by side are an even number of them",
    ),
    (
        lambda: dispatch.activation_quantize(ones(3, 4, dtype=F32), "swish", True),
        ValueError,
        "activation is 'swish'; it must be one of ['gelu',",
    ),
    (
        lambda: dispatch.activation_quantize(ones(3, 4, dtype=F32), "silu", False, up_first=True),
        ValueError,
        "up_first says where the gates are, but there are none without gated",
    ),
    (
        lambda: dispatch.activation_quantize(ones(3, 4, dtype=F32), "silu", True, ones(2, dtype=F32)),
        ValueError,
        "input_scale is torch.float32 [2]; a static scale is one float32 number",
    ),
    # multiply
    (lambda: multiply(q=ones(3, 4, dtype=F32)), TypeError, "q is torch.float32 and weight torch.int8"),
    (lambda: multiply(q=ones(3, 6)), ValueError, "q is [3, 6] but the weight's in_features is 4"),
    (
        lambda: multiply(row_scale=ones(1, dtype=F32)),
        ValueError,
        "row_scale is torch.float32 [1]; it must be torch.float32 [3]",
    ),
    (
        lambda: multiply(weight=ones(5, 4, dtype=F32)),
        TypeError,
        "weight is torch.float32; it must be one of int8, float8_e4m3fn",
    ),
    (lambda: multiply(weight_scale=ones(4, dtype=F32)), ValueError, "weight_scale is [4]; it must be [5]"),
    (lambda: multiply(bias=ones(4, dtype=F32)), ValueError, "bias is [4]; it must be [5]"),
    (lambda: multiply(residual=ones(3, 5, dtype=F32)), ValueError, "residual is torch.float32 [3, 5]; it must be"),
    (lambda: multiply(residual=ones(5, dtype=BF16)), ValueError, "residual is torch.bfloat16 [5]; it must be"),
    (lambda: multiply(out_dtype=F64), TypeError, "out_dtype is torch.float64; multiply returns"),
    # quantize_rows
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F64)),
        TypeError,
        "x is torch.float64; quantize_rows accepts float16, bfloat16, float32: convert it first",
    ),
    (lambda: dispatch.quantize_rows(ones(3, 4)), TypeError, "x is torch.int8; quantize_rows accepts"),
    (
        lambda: dispatch.quantize_rows(torch.tensor(1.0)),
        ValueError,
        "x is a scalar; quantize_rows needs at least one dimension",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32).to_sparse()),
        ValueError,
        "x is torch.sparse_coo; it must be a dense tensor: pass x.to_dense()",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32), ones(3, dtype=F32)),
        ValueError,
        "scale is torch.float32 [3]; a static scale is one float32 number",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32), torch.tensor(1.0, dtype=F16)),
        ValueError,
        "scale is torch.float16 []; a static scale is one float32 number",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32), 0.5),  # type: ignore[arg-type]
        TypeError,
        "scale is a float; it must be a float32 tensor: torch.tensor(0.5)",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32), torch.ones((), device="meta")),
        ValueError,
        "x is on cpu but scale is on meta: move them to one device",
    ),
    (
        lambda: dispatch.quantize_rows(ones(3, 4, dtype=F32, device="meta")),
        ValueError,
        "the tensors are on meta; qgemm runs on cuda (NVIDIA and AMD) and cpu: move them there",
    ),
    # int_mm
    (
        lambda: dispatch.int_mm(ones(3, 4, dtype=F32), ones(4, 5)),
        TypeError,
        "a is torch.float32; it must be torch.int8",
    ),
    (
        lambda: dispatch.int_mm(ones(3, 4), ones(4, 5, dtype=torch.uint8)),
        TypeError,
        "b is torch.uint8; it must be torch.int8",
    ),
    (
        lambda: dispatch.int_mm(ones(2, 3, 4), ones(4, 5)),
        ValueError,
        "a has shape [2, 3, 4]; it must have two dimensions: reshape it",
    ),
    (lambda: dispatch.int_mm(ones(3, 4), ones(4)), ValueError, "b has shape [4]; it must have two dimensions"),
    (
        lambda: dispatch.int_mm(ones(3, 4), ones(5, 4)),
        ValueError,
        "a is [3, 4] and b is [5, 4]: a's columns must equal b's rows",
    ),
    (
        lambda: dispatch.int_mm(ones(1, INT8.max_k + 1), ones(INT8.max_k + 1, 1)),
        ValueError,
        f"K is {INT8.max_k + 1}; int32 holds sums of int8 products up to K = {INT8.max_k}",
    ),
    (lambda: dispatch.int_mm(ones(3, 4), ones(4, 5, device="meta")), ValueError, "a is on cpu but b is on meta"),
    (lambda: dispatch.int_mm(ones(3, 4).to_sparse(), ones(4, 5)), ValueError, "a is torch.sparse_coo"),
    # scaled_mm
    (
        lambda: scaled_mm(a=ones(3, 4, dtype=F32), b=ones(4, 5, dtype=F32)),
        TypeError,
        "a is torch.float32; it must be one of int8, float8_e4m3fn (quantize_rows makes it)",
    ),
    (
        lambda: scaled_mm(b=ones(4, 5, dtype=F32).to(FP8.storage)),
        TypeError,
        "b is torch.float8_e4m3fn; it must be torch.int8",
    ),
    (lambda: scaled_mm(a_scale=0.5), TypeError, "a_scale is a float; it must be a float32 tensor: torch.tensor(0.5)"),
    (lambda: scaled_mm(b_scale=ones(5, dtype=F16)), TypeError, "b_scale is torch.float16; scales are torch.float32"),
    (lambda: scaled_mm(a_scale=ones(5, dtype=F32)), ValueError, "a_scale is [5]; it must be [3] or a single number"),
    (lambda: scaled_mm(b_scale=ones(3, dtype=F32)), ValueError, "b_scale is [3]; it must be [5] or a single number"),
    (lambda: scaled_mm(a_scale=ones(3, 1, dtype=F32)), ValueError, "a_scale is [3, 1]; it must be [3]"),
    (lambda: scaled_mm(a_scale=ones(0, dtype=F32)), ValueError, "a_scale is [0]; it must be [3]"),
    (lambda: scaled_mm(bias=ones(5, dtype=F64)), TypeError, "bias is torch.float64; it must be one of float16"),
    (
        lambda: scaled_mm(bias=ones(3, dtype=F32)),
        ValueError,
        "bias is [3]; it must be [5], one value per output column",
    ),
    (lambda: scaled_mm(bias=ones(5, 1, dtype=F32)), ValueError, "bias is [5, 1]; it must be [5]"),
    (lambda: scaled_mm(bias=ones(1, dtype=F32)), ValueError, "bias is [1]; it must be [5]"),
    (
        lambda: scaled_mm(out_dtype=I8),
        TypeError,
        "out_dtype is torch.int8; scaled_mm returns float16, bfloat16, float32",
    ),
    # matmul
    (lambda: matmul(a=ones(3, 4)), TypeError, "a is torch.int8; matmul accepts float16"),
    (lambda: matmul(b=ones(4, 5, dtype=F16)), TypeError, "a is torch.float32 and b is torch.float16; convert one"),
    (
        lambda: matmul(b=ones(3, 5, dtype=F32)),
        ValueError,
        "a is [3, 4] and b is [3, 5]: a's columns must equal b's rows",
    ),
    (
        lambda: matmul(activation="tanh"),
        ValueError,
        "activation is 'tanh'; it must be one of ['gelu', 'relu', 'silu'] or None",
    ),
    (lambda: matmul(bias=ones(4, dtype=F32)), ValueError, "bias is [4]; it must be [5]"),
    (lambda: matmul(out_dtype=I8), TypeError, "out_dtype is torch.int8; matmul returns float16"),
    # quant_linear
    (
        lambda: quant_linear(x=ones(3, 4095, dtype=F32), weight=ones(5, 4096)),
        ValueError,
        "x has 4095 columns but the layer's in_features is 4096",
    ),
    (
        lambda: quant_linear(x=ones(1, INT8.max_k + 1, dtype=F32), weight=ones(5, INT8.max_k + 1)),
        ValueError,
        f"K is {INT8.max_k + 1}; int32 holds sums of int8 products",
    ),
    (lambda: quant_linear(x=torch.tensor(1.0)), ValueError, "x has no columns but the layer's in_features is 4"),
    (lambda: quant_linear(x=ones(3, 4)), TypeError, "x is torch.int8; a quantized layer accepts"),
    (
        lambda: quant_linear(weight=ones(5, 4, dtype=F32)),
        TypeError,
        "weight is torch.float32; it must be one of int8, float8_e4m3fn",
    ),
    (lambda: quant_linear(weight=ones(4)), ValueError, "weight is [4]; it must be [out_features, in_features]"),
    (lambda: quant_linear(weight_scale=ones(4, dtype=F32)), ValueError, "weight_scale is [4]; it must be [5]"),
    (lambda: quant_linear(weight_scale=ones(5, dtype=BF16)), TypeError, "weight_scale is torch.bfloat16; scales are"),
    (lambda: quant_linear(bias=ones(4, dtype=F32)), ValueError, "bias is [4]; it must be [5]"),
    (lambda: quant_linear(input_scale=ones(3, dtype=F32)), ValueError, "scale is torch.float32 [3]; a static scale is"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[message[:60] for _, _, message in REFUSED])
def test_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def weight_only(**given: Any) -> torch.Tensor:
    """Of an int4 weight, or if there is a global scale of nvfp4."""
    x, residual = given.pop("x"), given.pop("residual")
    K, form, step = x.shape[1], "fp4" if "global_scale" in given else "int4", given.pop("step", None)
    weight = ScaledWeight(**{name: given.get(name) for name in ScaledWeight._fields})
    weight = weight._replace(in_features=K, format=form, group_size=16, int8_activations=step is not None, step=step)
    return weight_only_linear(x, weight, residual)


VECTOR, ROWS, OUT = ones(4, dtype=F32), ones(3, 4, dtype=F32), ones(3, 5, dtype=F32)
LINEAR = {"x": ROWS, "weight": ones(5, 4), "weight_scale": ones(5, dtype=F32), "bias": ones(5, dtype=F32)}
PACKED = {"x": ROWS, "values": ones(5, 128, dtype=torch.uint8), "scale": ones(5, 1, dtype=F32), "residual": OUT}
TAKEN: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "scaled_mm": (scaled_mm, {"a": ones(3, 4), "b": ones(4, 5), "a_scale": ones(3, dtype=F32),
                              "b_scale": ones(5, dtype=F32), "bias": ones(5, dtype=F32), "residual": OUT}),
    "matmul": (matmul, {"a": ROWS, "b": ones(4, 5, dtype=F32), "bias": ones(5, dtype=F32)}),
    "multiply": (multiply, {"q": ones(3, 4), "row_scale": ones(3, dtype=F32), "weight": ones(5, 4),
                            "weight_scale": ones(5, dtype=F32), "bias": VECTOR.new_ones(5), "residual": OUT.to(BF16)}),
    "quant_linear": (quant_linear, {**LINEAR, "input_scale": torch.tensor(1.0), "residual": OUT}),
    "block_scaled_linear": (dispatch.block_scaled_linear, {**LINEAR, "weight": LINEAR["weight"].to(FP8.storage),
                                                           "weight_scale": ones(1, 1, dtype=F32), "residual": OUT}),
    "add_norm_quantize": (add_norm_quantize, {"x": ROWS, "residual": ROWS, "branch_weight": VECTOR, "weight": VECTOR}),
    "layer norm": (norm_quantize, {"x": ROWS, "weight": VECTOR, "bias": VECTOR, "input_scale": torch.tensor(1.0)}),
    "int4": (weight_only, {**PACKED, "zero_point": ones(5, 1), "input_order": torch.arange(4, dtype=torch.int32),
                           "bias": ones(5, dtype=F32)}),
    "int4-int8": (weight_only, {**PACKED, "step": ones(5, dtype=F32)}),
    "nvfp4": (weight_only, {**PACKED, "scale": PACKED["scale"].to(FP8.storage), "global_scale": ones(2, dtype=F32)}),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_tensors_are_on_one_device(case: str) -> None:
    call, taken = TAKEN[case]
    options = {"norm": Norm("layer")} if case == "layer norm" else {}
    call(**taken, **options)
    for name, tensor in taken.items():
        with pytest.raises(ValueError, match=r" is on (cpu|meta) but \w+ is on (cpu|meta): move them to one device$"):
            call(**{**taken, name: tensor.to("meta")}, **options)


def test_steps_are_for_weights_without_zero_points() -> None:
    call, taken = TAKEN["int4-int8"]
    with pytest.raises(ValueError, match="step is for int8_activations, and weights without a zero_point: leave it"):
        call(**taken, zero_point=ones(5, 1))


def test_what_is_refused_when_changed_is_taken_otherwise() -> None:
    # Without this, REFUSED could pass because of a mistake in its own arguments.
    assert torch.equal(scaled_mm(), torch.full((3, 5), 5.0))
    assert torch.equal(matmul(), torch.full((3, 5), 4.0))
    assert torch.equal(quant_linear().round(), torch.full((3, 5), 4.0))


def test_one_number_is_a_scale_of_all() -> None:
    number = ones(1, dtype=F32)
    assert torch.equal(scaled_mm(a_scale=number, b_scale=number), scaled_mm())


def test_only_gates_and_ups_are_an_even_number_of_columns() -> None:
    for columns, gated in ((5, False), (6, True), (8, True)):
        q, _ = dispatch.activation_quantize(ones(3, columns, dtype=F32), "silu", gated)
        assert q.shape == (3, columns // 2 if gated else columns)


@pytest.mark.parametrize("config", [None, GemmConfig(16, 32, 64, num_warps=2, num_stages=2)])
def test_a_constant_b_gives_the_same_bits(config: GemmConfig | None, device: torch.device) -> None:
    tensors = {
        "a": ones(3, 4),
        "b": ones(4, 5),
        "a_scale": torch.rand(3),
        "b_scale": torch.rand(5),
        "bias": ones(5, dtype=F32),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    out = scaled_mm(**tensors, config=config)
    assert torch.equal(scaled_mm(**tensors, config=config, constant_b=True), out)


def test_a_config_on_cpu_tensors_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from qgemm.kernels import stages

    monkeypatch.setattr(stages, "INTERPRETING", False)
    with pytest.raises(ValueError, match="accepts CPU tensors only with TRITON_INTERPRET=1: omit it"):
        dispatch.int_mm(ones(16, 16), ones(16, 16), config=GemmConfig(16, 16, 32, num_warps=1, num_stages=1))


def test_float8_e4m3fn_needs_hardware_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise Triton's compiler says so, from deep inside.
    monkeypatch.setattr(checks, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    fp8 = {"a": ones(3, 4, dtype=F32).to(torch.float8_e4m3fn), "b": ones(4, 5, dtype=F32).to(torch.float8_e4m3fn)}
    for changed in (fp8, {"out_dtype": torch.float8_e4m3fn}):
        with pytest.raises(ValueError, match=r"float8_e4m3fn needs compute capability 8\.9, and cpu has 8\.6: convert"):
            matmul(**changed)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4)])
def test_quant_linear_keeps_leading_dimensions(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device)
    weight, scale = torch.randint(-127, 128, (5, 4), dtype=I8, device=device), torch.rand(5, device=device)
    out = dispatch.quant_linear(x, weight, scale)
    assert out.shape == (*shape[:-1], 5)
    rows = [dispatch.quant_linear(row[None], weight, scale)[0] for row in x.reshape(-1, 4)]
    assert torch.equal(out.reshape(-1, 5), torch.stack(rows) if rows else out.reshape(-1, 5))


@pytest.mark.parametrize(("features_in", "features_out"), [(0, 5), (4, 0), (1, 1), (1, 40), (40, 1)])
def test_quant_linear_degenerate_sizes(features_in: int, features_out: int, device: torch.device) -> None:
    x = torch.randn(2, 3, features_in, device=device)
    weight = torch.randint(-127, 128, (features_out, features_in), dtype=I8, device=device)
    scale, bias = torch.rand(features_out, device=device), torch.randn(features_out, device=device)
    out = dispatch.quant_linear(x, weight, scale, bias)
    exact = x.double() @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    assert out.shape == exact.shape
    # Half a step of each activation, at most.
    if exact.numel():
        step = x.abs().amax(-1, keepdim=True) / 127 if features_in else torch.zeros(2, 3, 1, device=device)
        allowed = 0.51 * step * (weight.double().abs() * scale.double()[:, None]).sum(1) + 1e-5
        assert ((out - exact).abs() <= allowed).all()


def test_negative_views_are_refused() -> None:
    # Their memory holds the opposite values: a kernel that reads it would be wrong without a word.
    x = torch.view_as_complex(torch.randn(3, 8, 2)).conj().imag
    with pytest.raises(ValueError, match=r"x is a negative view.*resolve_neg"):
        dispatch.quantize_rows(x)
