"""``operator``: what every operator of ``torch.ops.qgemm`` has, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.norms import Norm
from qgemm.kernels.rotary import dispatch as rotary
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import dispatch as weight_only
from qgemm.numerics.hadamard import hadamard
from qgemm.ops import linear

ops = torch.ops.qgemm
E4M3 = torch.float8_e4m3fn


def int8(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)


def fp8(*shape: int, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) * 100).to(torch.float8_e4m3fn)


def operands(dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, by its name and a variant."""
    x, bias = torch.randn(5, 16, device=device).to(dtype), torch.randn(8, device=device).to(dtype)
    a, weight = int8(5, 16, device=device), int8(8, 16, device=device)
    a_scale, b_scale = torch.rand(5, device=device), torch.rand(8, device=device)
    one = torch.tensor(0.02, device=device)
    y = torch.randn(16, 8, device=device).to(dtype)
    zero = torch.tensor(-30, dtype=torch.int8, device=device)
    norm, gamma = ("rms", 1e-6), torch.randn(16, device=device).to(dtype)
    packed = torch.randint(256, (8, 128), device=device).to(torch.uint8)
    zero_points, order = int8(8, 2, device=device) % 8, torch.randperm(16, device=device).int()
    exponents, unit = (
        torch.randint(120, 134, (8, 1), device=device).to(torch.uint8),
        torch.tensor([0.5, 3.0]).to(device),
    )
    in_groups, steps = (b_scale.expand(2, 8).t(), zero_points), b_scale[:, None] / 8
    qkv, turn = torch.randn(2, 3, 64, device=device).to(dtype), torch.randn(1, 3, 4, device=device).to(dtype)
    rotated = (
        qkv,
        turn,
        turn,
        y[:, 0][:8],
        None,
        "rms",
        1e-6,
        4,
        2,
        False,
        "plain",
        "in turn",
        1.0,
        0.0,
        0.0,
        False,
        None,
    )
    stores, length = torch.zeros(2, 2, 2, 9, 8, device=device), torch.tensor([5], dtype=torch.int32, device=device)
    return {
        "rotate": rotated,
        "rotate factors": (*rotated[:12], 0.3, 2.0, 0.1, True, torch.arange(3, device=device)[None]),
        "rotate by head": (qkv[..., :48], *rotated[1:7], 2, 2, True, "plain", "by head"),
        "rotary_angles": (torch.arange(6, device=device).view(2, 3), torch.rand(4, device=device), 1.0, "twice", dtype),
        "rotary_angles axes": (
            torch.arange(18, device=device).view(3, 2, 3),
            torch.rand(4, device=device),
            1.0,
            "twice",
            dtype,
            torch.tensor([0, 2, 1, 0], dtype=torch.int32, device=device),
        ),
        "rotate_and_store": (*rotated, *stores.to(dtype), None, None, length),
        "rotate_and_store first": (*rotated, *stores.to(dtype), None, None, None),
        "rotate_and_store int8": (*rotated, *stores.to(torch.int8), *stores[..., 0].contiguous(), length),
        "quantize_rows": (x, None),
        "quantize_rows static": (x.view(1, 5, 16), one),
        "activate": (x, "silu", True),
        "activate ups first": (x, "silu", True, True),
        "activate plain": (x.view(1, 5, 16), "gelu", False),
        "activation_quantize": (x, "silu", True, None),
        "activation_quantize static": (x.view(1, 5, 16), "gelu_tanh", False, one),
        "activation_quantize fp8": (x, "silu", True, None, E4M3),
        "activation_quantize prefix": (x, "gelu", False, None, None, x[:, :8]),
        "activation_quantize ups first": (x, "gelu", True, one, None, None, True),
        "activation_quantize gated prefix": (x[:, 4:], "silu", True, None, None, x[:, :4]),
        "norm_quantize": (x, gamma, None, *norm, None),
        "norm_quantize fp8": (x, gamma, None, *norm, one, E4M3),
        "add_norm_quantize fp8": (x, x.flip(0), None, gamma, None, *norm, None, E4M3),
        "norm_quantize static": (x.view(1, 5, 16), gamma, gamma, "layer", 1e-5, one),
        "norm_quantize samples": (x.view(1, 5, 16), gamma[None], gamma[None], "layer", 1e-5, None),
        "add_norm_quantize": (x, x.flip(0), None, gamma, None, *norm, None),
        "add_norm_quantize branch": (x, x.flip(0), gamma, None, None, *norm, None),
        "add_norm": (x, x.flip(0), gamma, gamma, None, *norm),
        "add_norm gate": (x.view(1, 5, 16), x.view(1, 5, 16).flip(1), None, None, None, *norm, gamma[None]),
        "add_norm one gate": (x, x.flip(0), None, gamma, None, *norm, gamma),
        "add_norm factors": (x, x.flip(0), None, gamma, None, *norm, None, 0.22, gamma[:1]),
        "add_norm_quantize factor": (x, x.flip(0), gamma, gamma, None, *norm, None, None, None, 0.22),
        "add_norm_quantize gate": (
            x.view(1, 5, 16),
            x.view(1, 5, 16).flip(1),
            None,
            gamma[None],
            None,
            *norm,
            None,
            None,
            gamma[None],
        ),
        "norm_quantize float": (x.view(1, 5, 16), *2 * [gamma[None].float()], "layer_by_steps", 1e-5, None),
        "add_norm_quantize float": (
            x.view(5, 1, 16),
            x.view(5, 1, 16).flip(0),
            None,
            gamma.float(),
            gamma.float(),
            "layer",
            1e-5,
            None,
            None,
            x.float() / 2,
        ),
        "add_norm sum": (x, x.flip(0), None, None, None, *norm),
        "add_norm norm": (x, None, None, gamma, gamma, "layer", 1e-5),
        "add_norm samples": (x.view(1, 5, 16), None, None, gamma[None], gamma[None], "layer", 1e-5),
        "post_norm": (x, x.flip(0), gamma, gamma, "layer", 1e-5),
        "post_norm_quantize": (x, x.flip(0), gamma, None, *norm, None),
        "post_norm_quantize fp8": (x, x.flip(0), gamma, gamma, "layer", 1e-5, one, E4M3),
        "multiply": (a, a_scale, weight, b_scale, bias, torch.randn(5, 8, device=device).to(dtype), dtype),
        "multiply vector": (a[0], a_scale[0], weight, b_scale, None, None, dtype),
        "int_mm": (a, weight.t()),
        "scaled_mm": (a, weight.t(), a_scale, b_scale, bias, dtype),
        "scaled_mm scalars": (a, weight.t(), one, one, None, dtype),
        "matmul": (x, y, None, None, None),
        "matmul activation": (x, y, bias, "gelu", torch.float32),
        "quant_linear": (x, weight, b_scale, bias, None),
        "quant_linear static": (x.view(1, 5, 16), weight, b_scale, None, one),
        "quant_linear vector": (x[0], weight, b_scale, bias, None),
        "quant_linear residual": (x, weight, b_scale, bias, None, y[:5]),
        "quantize_rows asymmetric": (x, one, zero),
        "quant_linear_asymmetric": (x, weight, b_scale, bias, one, zero),
        "quant_linear_asymmetric vector": (x[0], weight, b_scale, bias, one, zero),
        "weight_only_linear": (x, packed, b_scale.expand(2, 8).t(), zero_points, None, order, bias, 16, "int4", 10),
        "weight_only_linear vector": (x[0], weight, b_scale[:, None], None, None, None, None, 16, "int8", 16),
        "weight_only_linear int8": (x, packed, *in_groups, None, order, bias, 16, "int4", 10, True, None, y[:5]),
        "weight_only_linear int8 steps": (
            x,
            packed,
            steps * 3,
            None,
            None,
            None,
            bias,
            16,
            "int4",
            16,
            True,
            steps[:, 0],
        ),
        "weight_only_linear e8m0": (x, packed, exponents, None, None, None, bias, 16, "fp4", 16),
        "weight_only_linear e4m3": (x, packed, b_scale[:, None].to(E4M3), None, unit, None, bias, 16, "nf4", 16),
        "weight_only_linear fp8": (x, y.t().to(E4M3), b_scale[:, None].half(), None, None, None, bias, 16, "fp8", 16),
        "float_weight": (packed, b_scale.expand(2, 8).t(), zero_points, None, order, 16, "int4", 10, dtype),
        "quantize_rows fp8": (x, None, None, torch.float8_e4m3fn),
        "quantize_groups": (x,),
        "quantize_groups long": (torch.randn(2, 3, 150, device=device).to(dtype),),
        "multiply fp8": (fp8(5, 16, device=device), a_scale, fp8(8, 16, device=device), b_scale, bias, None, dtype),
        "scaled_mm fp8": (fp8(5, 16, device=device), fp8(8, 16, device=device).t(), a_scale, b_scale, bias, dtype),
        "quant_linear fp8": (x, fp8(8, 16, device=device), b_scale, bias, None),
        "quant_linear fp8 static": (x, fp8(8, 16, device=device), b_scale, None, one, y[:5]),
        "block_scaled_linear": (x, fp8(8, 16, device=device), one.view(1, 1), bias, y[:5]),
        "block_scaled_linear vector": (x[0], fp8(8, 16, device=device), one.view(1, 1), None),
        "hadamard": (x,),
        "hadamard batch": (x.view(1, 5, 16).transpose(0, 1),),
    }


NAMES = list(operands(torch.float32, torch.device("cpu")))
VARIANTS = pytest.mark.parametrize("variant", NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def call(variant: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(ops, variant.split()[0])(*arguments)


def add_norm(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """An operator doesn't return its input, or a tensor twice: those are empty."""
    residual, branch_weight, weight, _, kind, eps, *gate = others
    total, normed = dispatch.add_norm(x, *others[:4], Norm(kind, eps), *gate)
    adds, norms = residual is not None or branch_weight is not None or gate != [], weight is not None
    return total if adds else x.new_empty(0), normed if norms else x.new_empty(0)


def with_dtype(scale: Tensor | None, dtype: torch.dtype | None = None, *others: Any) -> tuple[Any, ...]:
    return scale, dtype or torch.int8, *others


def function_of(variant: str) -> Any:
    name = variant.split()[0]
    elsewhere = {
        "weight_only_linear": lambda x, *a: weight_only.weight_only_linear(x, ScaledWeight(*a[:11]), *a[11:]),
        "float_weight": lambda *a: weight_only.float_weight(ScaledWeight(*a[:5], None, *a[5:8]), a[8]),
        "hadamard": hadamard,
        "rotary_angles": rotary.rotary_angles,
        "rotate": lambda *a: rotary.rotate(RotaryCall(*a)),
        "rotate_and_store": lambda *a: rotary.rotate_and_store(RotaryCall(*a[:17]), KeyValueStore(*a[17:])),
        "quant_linear_asymmetric": dispatch.quant_linear_asymmetric,
        "norm_quantize": lambda *a: dispatch.norm_quantize(*a[:3], Norm(*a[3:5]), *a[5:]),
        "add_norm_quantize": lambda *a: dispatch.add_norm_quantize(*a[:5], Norm(*a[5:7]), *with_dtype(*a[7:])),
        "activation_quantize": lambda *a: dispatch.activation_quantize(*a[:3], *with_dtype(*a[3:])),
        "add_norm": add_norm,
        "post_norm": lambda *a: dispatch.post_norm(*a[:4], Norm(*a[4:])),
        "post_norm_quantize": lambda *a: dispatch.post_norm_quantize(*a[:4], Norm(*a[4:6]), *a[6:]),
        "multiply": linear.multiply,
    }
    return elsewhere.get(name) or getattr(dispatch, name)


# Of the same arguments as others, in other shapes: with --complete alone.
OTHER_SHAPES = ("vector", "scalars", "batch", "long")
CHECKED = [pytest.param(name, marks=[pytest.mark.complete] if name.endswith(OTHER_SHAPES) else []) for name in NAMES]


@pytest.mark.slow(quick=["dtype0-quant_linear", "dtype0-scaled_mm", "dtype0-quantize_rows"])
@pytest.mark.parametrize("variant", CHECKED)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="dtype0"),
        pytest.param(torch.float16, marks=pytest.mark.complete),
        pytest.param(torch.bfloat16, marks=pytest.mark.complete),
    ],
)
def test_opcheck(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    operator = getattr(ops, variant.split()[0]).default
    arguments = operands(dtype, device)[variant]
    # PyTorch's check of schemas multiplies arguments by numbers, and that of gradients adds outputs up, which float8
    # doesn't support.
    has_float8 = any(isinstance(each, Tensor) and each.dtype == E4M3 for each in arguments)
    others: Any = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, *rest = arguments
    layers = ("quant_linear", "block_scaled", "weight_only_linear")
    has_gradient = variant.startswith(("matmul", *layers, "hadamard", "add_norm", "norm_quantize"))
    if has_gradient and E4M3 in rest:  # as outputs
        torch.library.opcheck(operator, (x.clone().requires_grad_(), *rest), test_utils=others[:2])
    elif has_gradient:  # what is checked without one is checked with it, too
        arguments = (x.clone().requires_grad_(), *rest)
    torch.library.opcheck(operator, arguments, test_utils=others if has_float8 else "ALL")


@VARIANTS
@DTYPES
def test_an_operator_is_its_kernel_function(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    arguments = operands(dtype, device)[variant]
    out, wanted = call(variant, arguments), function_of(variant)(*arguments)
    for ours, theirs in zip(out, wanted, strict=True) if isinstance(out, (tuple, list)) else [(out, wanted)]:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@VARIANTS
def test_inference_mode(variant: str, device: torch.device) -> None:
    arguments = operands(torch.float32, device)[variant]
    wanted = call(variant, arguments)
    with torch.inference_mode():
        out = call(variant, arguments)
    pairs = zip(out, wanted, strict=True) if isinstance(out, (tuple, list)) else [(out, wanted)]
    assert all(torch.equal(*pair) for pair in pairs)


@VARIANTS
def test_meta_tensors_give_shapes(variant: str, device: torch.device) -> None:
    arguments = operands(torch.bfloat16, device)[variant]
    wanted = call(variant, arguments)
    out = call(variant, tuple(v.to("meta") if isinstance(v, Tensor) else v for v in arguments))
    for ours, theirs in zip(out, wanted, strict=True) if isinstance(out, (tuple, list)) else [(out, wanted)]:
        assert ours.device.type == "meta"
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_what_has_no_tangent_says_so() -> None:
    x, along = torch.randn(3, 16), torch.ones(3, 16)
    with pytest.raises(NotImplementedError, match=r"quantize_rows has no derivative in forward mode.*: use reverse"):
        torch.func.jvp(lambda x: ops.quantize_rows(x, None)[1], (x,), (along,))
    q, scale = ops.quantize_rows(torch.randn(8, 16), None)
    with pytest.raises(RuntimeError, match="derivatives for x and bias only"):
        torch.func.jvp(lambda s: ops.quant_linear(x, q, s, None, None), (scale,), (scale,))
    with pytest.raises(NotImplementedError, match="accepts a batch of x only"):
        torch.func.vmap(lambda q: ops.quant_linear(x, q, scale, None, None))(q.expand(2, 8, 16))


def operators_in(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


# The first variant of an operator with sizes that are fixed and that are not; others in turn. All with --complete.
DYNAMIC = [
    pytest.param(variant, dynamic, marks=[] if number % 2 == dynamic or " " not in variant else [pytest.mark.complete])
    for number, variant in enumerate(NAMES)
    for dynamic in (False, True)
]


@pytest.mark.slow(quick=["quant_linear-False"])
@pytest.mark.parametrize(("variant", "dynamic"), DYNAMIC)
def test_compile_keeps_the_operator_whole(variant: str, dynamic: bool, device: torch.device) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    arguments = operands(torch.float32, device)[variant]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *values: call(variant, values), fullgraph=True, dynamic=dynamic, backend=backend)
    out, wanted = compiled(*arguments), call(variant, arguments)
    pairs = zip(out, wanted, strict=True) if isinstance(out, (tuple, list)) else [(out, wanted)]
    assert all(torch.equal(*pair) for pair in pairs)
    assert any(f"qgemm.{variant.split()[0]}" in name for name in operators_in(graphs[0].graph))


def float_output(out: Any) -> Tensor:
    """The sum of what can be differentiated of an operator's outputs, with a weight for each value."""
    outs = out if isinstance(out, (tuple, list)) else [out]
    sums = [(o.float() * torch.arange(1.0, o.numel() + 1).view(o.shape).sin()).sum() for o in outs if o.requires_grad]
    return torch.stack(sums).sum()


# Those whose gradient depends on their input.
CURVED = [
    "activate",
    "activate plain",
    "add_norm",
    "add_norm factors",
    "add_norm norm",
    "add_norm_quantize branch",
    "rotate",
    "route",
]
CURVED += ["post_norm", "post_norm_quantize"]


@pytest.mark.parametrize("variant", CURVED)
@pytest.mark.parametrize("through", ["autograd", "torch.func"])
def test_second_derivatives_are_those_of_the_gradient(variant: str, through: str) -> None:
    """The gradient's change along a direction, times another one, against how it differs between two points."""
    torch.manual_seed(0)
    x, *rest = ROUTE if variant == "route" else operands(torch.float32, torch.device("cpu"))[variant]
    along, weights = torch.randn_like(x), torch.randn_like(x)

    def gradient(x: Tensor) -> Tensor:
        if through == "torch.func":
            return torch.func.grad(lambda x: float_output(call(variant, (x, *rest))))(x)
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(float_output(call(variant, (x, *rest))), x, create_graph=True)[0]

    if through == "torch.func":
        second = torch.func.grad(lambda x: (gradient(x) * weights).sum())(x)
    else:
        tracked = x.clone().requires_grad_()
        second = torch.autograd.grad((gradient(tracked) * weights).sum(), tracked)[0]
    step = 0.01
    change = (gradient(x + step * along) - gradient(x - step * along)).detach() / (2 * step)
    torch.testing.assert_close((second * along).sum(), (change * weights).sum(), rtol=0.02, atol=0.02)


# Logits that are far enough apart for the same experts at both points.
ROUTE = ((torch.arange(40) * 7 % 40 / 8).view(5, 8), None, 2, "softmax", True, True, 1.0, 0.0, 1, 1)
