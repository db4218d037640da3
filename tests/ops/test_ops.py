"""``torch.ops.qgemm.*``: registration, gradients, tracing."""

from typing import Any

import pytest
import torch
from families.schemes import quantized_layer
from torch import Tensor, nn

from qgemm.kernels import dispatch
from qgemm.kernels.linear import asymmetric
from qgemm.kernels.packed import launcher as int4
from qgemm.numerics.hadamard import hadamard
from qgemm.numerics.packing import dequantize

ops = torch.ops.qgemm


def int8(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)


def operands(dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, by its name and a variant."""
    x, bias = torch.randn(5, 16, device=device).to(dtype), torch.randn(8, device=device).to(dtype)
    a, weight = int8(5, 16, device=device), int8(8, 16, device=device)
    a_scale, b_scale = torch.rand(5, device=device), torch.rand(8, device=device)
    one = torch.tensor(0.02, device=device)
    y = torch.randn(16, 8, device=device).to(dtype)
    zero = torch.tensor(-30, dtype=torch.int8, device=device)
    packed = torch.randint(-(2**31), 2**31, (8, 2), dtype=torch.int32, device=device)
    return {
        "quantize_rows": (x, None),
        "quantize_rows static": (x.view(1, 5, 16), one),
        "int_mm": (a, weight.t()),
        "scaled_mm": (a, weight.t(), a_scale, b_scale, bias, dtype),
        "scaled_mm scalars": (a, weight.t(), one, one, None, dtype),
        "matmul": (x, y, None, None, None),
        "matmul activation": (x, y, bias, "gelu", torch.float32),
        "quant_linear": (x, weight, b_scale, bias, None),
        "quant_linear static": (x.view(1, 5, 16), weight, b_scale, None, one),
        "quant_linear vector": (x[0], weight, b_scale, bias, None),
        "quantize_rows asymmetric": (x, one, zero),
        "quant_linear_asymmetric": (x, weight, b_scale, bias, one, zero),
        "quant_linear_asymmetric vector": (x[0], weight, b_scale, bias, one, zero),
        "packed_linear": (x, packed, torch.rand(8, 2, device=device), 16, 10, bias),
        "packed_linear vector": (x[0], packed, torch.rand(8, 1, device=device), 16, 16, None),
        "hadamard": (x,),
        "hadamard batch": (x.view(1, 5, 16).transpose(0, 1),),
    }


VARIANTS = pytest.mark.parametrize("variant", operands(torch.float32, torch.device("cpu")))
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def call(variant: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(ops, variant.split()[0])(*arguments)


def function_of(variant: str) -> Any:
    name = variant.split()[0]
    elsewhere = {
        "packed_linear": int4.packed_linear,
        "hadamard": hadamard,
        "quant_linear_asymmetric": asymmetric.quant_linear_asymmetric,
    }
    return elsewhere.get(name) or getattr(dispatch, name)


@VARIANTS
@DTYPES
def test_opcheck(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    operator = getattr(ops, variant.split()[0]).default
    arguments = operands(dtype, device)[variant]
    torch.library.opcheck(operator, arguments)
    if variant.startswith(("matmul", "quant_linear", "packed_linear", "hadamard")):
        x, *rest = arguments
        torch.library.opcheck(operator, (x.clone().requires_grad_(), *rest))


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


# Gradients


@DTYPES
@pytest.mark.parametrize("shape", [(6, 16), (16,), (2, 3, 16), (0, 16)])
def test_packed_linear_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    _, weight, scale, *sizes, _ = operands(dtype, device)["packed_linear"]
    bias = torch.randn(8, device=device).to(dtype).requires_grad_()
    out = ops.packed_linear(x, weight, scale, *sizes, bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_x = grad.double() @ dequantize(weight, scale, 10, 16, torch.float64)
    exact_bias = grad.double().reshape(-1, 8).sum(0)
    torch.testing.assert_close(
        x.grad.double(), exact_x, rtol=3 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps * scale.max().item()
    )
    torch.testing.assert_close(bias.grad.double(), exact_bias, rtol=torch.finfo(dtype).eps, atol=1e-5)
    with pytest.raises(RuntimeError, match="gradients for x and bias only"):
        ops.packed_linear(x, weight, scale.requires_grad_(), *sizes, bias).sum().backward()


def test_the_gradient_of_a_rotation_is_the_rotated_gradient(device: torch.device) -> None:
    x, grad = torch.randn(2, 3, 24, device=device, requires_grad=True), torch.randn(2, 3, 24, device=device)
    ops.hadamard(x).backward(grad)
    assert torch.equal(x.grad, hadamard(grad))


@DTYPES
@pytest.mark.parametrize("shape", [(6, 16), (16,), (2, 3, 16), (0, 16)])
@pytest.mark.parametrize("static", [False, True])
def test_quant_linear_gradients(shape: tuple[int, ...], static: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight, scale = int8(8, 16, device=device), torch.rand(8, device=device) / 127
    bias = torch.randn(8, device=device).to(dtype).requires_grad_()
    out = ops.quant_linear(x, weight, scale, bias, torch.tensor(0.02, device=device) if static else None)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_x = grad.double() @ (weight.double() * scale.double()[:, None])
    exact_bias = grad.double().reshape(-1, 8).sum(0)
    tolerance = 4 * torch.finfo(dtype).eps
    assert x.grad.dtype == bias.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), exact_x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(bias.grad.double(), exact_bias, rtol=tolerance, atol=tolerance)


def test_quant_linear_gradient_of_small_values_in_float16(device: torch.device) -> None:
    # The product of this gradient and this scale is below float16's smallest number; the gradient of x is not.
    x = torch.randn(4, 16, device=device).half().requires_grad_()
    weight, scale = torch.full((8, 16), 127, dtype=torch.int8, device=device), torch.full((8,), 1e-4, device=device)
    ops.quant_linear(x, weight, scale, None, None).backward(torch.full((4, 8), 1e-4, device=device).half())
    torch.testing.assert_close(x.grad, torch.full_like(x, 8 * 1e-4 * 127 * 1e-4), rtol=0.02, atol=0)


@pytest.mark.parametrize("scheme", ["int8", "int8-static-asymmetric", "int4"])
def test_the_gradient_of_a_float32_bias_is_summed_in_float32(scheme: str, device: torch.device) -> None:
    # Of 4,096 rows in float16: that has 11 bits, and ends at 65,504.
    layer = quantized_layer(nn.Linear(16, 8, device=device), scheme)
    layer.bias.requires_grad_()
    grad = (torch.rand(4096, 8, device=device) + 20).half()
    layer(torch.randn(4096, 16, device=device).half()).backward(grad)
    torch.testing.assert_close(layer.bias.grad.double(), grad.double().sum(0), rtol=1e-6, atol=0)


def test_tangents_of_the_other_operators(device: torch.device) -> None:
    a, b = torch.randint(-9, 9, (5, 16), dtype=torch.int8), torch.randint(-9, 9, (16, 8), dtype=torch.int8)
    scales = torch.rand(5) + 0.5, torch.rand(8) + 0.5, torch.randn(8)
    along = torch.randn(5), torch.randn(8), torch.randn(8)

    def scaled(*scales: Tensor) -> Tensor:
        return ops.scaled_mm(a.to(device), b.to(device), *(each.to(device) for each in scales), torch.float32).cpu()

    def exact(a_scale: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
        return (a.double() @ b.double()).float() * a_scale[:, None] * b_scale + bias

    torch.testing.assert_close(torch.func.jvp(scaled, scales, along), torch.func.jvp(exact, scales, along))
    for activation in (None, "relu", "gelu", "silu"):
        values = torch.randn(5, 16), torch.randn(16, 8), torch.randn(8)
        along = torch.randn(5, 16), torch.randn(16, 8), torch.randn(8)

        def float_exact(a: Tensor, b: Tensor, bias: Tensor, activation: str | None = activation) -> Tensor:
            inner = a @ b + bias
            return inner if activation is None else getattr(nn.functional, activation)(inner)

        def computed(*values: Tensor, activation: str | None = activation) -> Tensor:
            return ops.matmul(*(each.to(device) for each in values), activation, None).cpu()

        wanted = torch.func.jvp(float_exact, values, along)
        torch.testing.assert_close(torch.func.jvp(computed, values, along), wanted, rtol=1e-4, atol=1e-4)


def test_what_has_no_tangent_says_so() -> None:
    x, along = torch.randn(3, 16), torch.ones(3, 16)
    with pytest.raises(NotImplementedError, match=r"quantize_rows has no derivative in forward mode.*: use reverse"):
        torch.func.jvp(lambda x: ops.quantize_rows(x, None)[1], (x,), (along,))
    q, scale = ops.quantize_rows(torch.randn(8, 16), None)
    with pytest.raises(RuntimeError, match="derivatives for x and bias only"):
        torch.func.jvp(lambda s: ops.quant_linear(x, q, s, None, None), (scale,), (scale,))
    with pytest.raises(NotImplementedError, match="takes a batch of x alone"):
        torch.func.vmap(lambda q: ops.quant_linear(x, q, scale, None, None))(q.expand(2, 8, 16))


def test_quant_linear_scales_have_no_gradient(device: torch.device) -> None:
    x, weight = torch.randn(4, 16, device=device), int8(8, 16, device=device)
    scale = torch.rand(8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients for x and bias only; set requires_grad=False on its scales"):
        ops.quant_linear(x, weight, scale, None, None).sum().backward()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_matmul_gradients(activation: str | None, device: torch.device) -> None:
    values = [torch.randn(shape, device=device) for shape in ((5, 16), (16, 8), (8,))]
    ours = [v.clone().requires_grad_() for v in values]
    exact = [v.double().requires_grad_() for v in values]
    out = ops.matmul(*ours, activation, None)
    inner = exact[0] @ exact[1] + exact[2]
    wanted = inner if activation is None else getattr(nn.functional, activation)(inner)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("a_shape", [(5,), (1,), ()])
@pytest.mark.parametrize("b_shape", [(8,), (1,), ()])
def test_scaled_mm_gradients(a_shape: tuple[int, ...], b_shape: tuple[int, ...], device: torch.device) -> None:
    a, b = int8(5, 16, device=device), int8(8, 16, device=device).t()
    values = [torch.rand(a_shape, device=device), torch.rand(b_shape, device=device), torch.randn(8, device=device)]
    ours = [v.clone().requires_grad_() for v in values]
    exact = [v.double().requires_grad_() for v in values]
    out = ops.scaled_mm(a, b, *ours, torch.float32)
    wanted = (a.double() @ b.double()) * exact[0].reshape(-1, 1) * exact[1] + exact[2]
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-2)


def test_an_adapter_on_a_frozen_layer_learns(device: torch.device) -> None:
    weight, scale = int8(8, 16, device=device), torch.full((8,), 0.005, device=device)
    down, up = nn.Linear(16, 4, bias=False, device=device), nn.Linear(4, 16, bias=False, device=device)
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=0.01)
    x, target = torch.randn(32, 16, device=device), torch.randn(32, 8, device=device)
    losses = []
    for _ in range(60):
        # The adapter comes before the layer: its gradient must pass through the quantized weight.
        loss = (ops.quant_linear(x + up(down(x)), weight, scale, None, None) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 5, 16)], ids=str)
def test_an_output_can_be_changed_in_place(shape: tuple[int, ...], device: torch.device) -> None:
    # As residual connections, nn.ReLU(inplace=True) and PEFT's mixed batches do.
    weight, scale = int8(8, 16, device=device), torch.full((8,), 0.005, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    expected = ops.quant_linear(x, weight, scale, None, None) * 2
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    out = ops.quant_linear(x, weight, scale, None, None)
    out *= 2
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


# Tracing


class Layer(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(int8(8, 16, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(ops.quant_linear(x, self.weight, self.scale, None, None)) + 1


def operators_in(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@VARIANTS
@pytest.mark.parametrize("dynamic", [False, True])
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


def test_compile_traces_forward_and_backward(device: torch.device) -> None:
    layer = Layer(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 7, 1):
        x = torch.randn(rows, 16, device=device)
        ours, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, wanted = compiled(ours), layer(eager)
        assert torch.equal(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        assert torch.equal(ours.grad, eager.grad)


@pytest.mark.parametrize("static", [False, True])
def test_export_with_a_dynamic_batch(static: bool, device: torch.device) -> None:
    class Exported(Layer):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.tensor(0.02, device=x.device) if static else None
            return ops.quant_linear(x, self.weight, self.scale, None, scale)

    layer = Exported(device)
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(layer, (torch.randn(4, 3, 16, device=device),), dynamic_shapes={"x": {0: batch}})
    assert "qgemm.quant_linear.default" in operators_in(program.graph)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 3, 16, device=device)
        assert torch.equal(program.module()(x), layer(x))


# Checks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.empty(3, 15)}, "x has 15 columns but the layer's in_features is 16"),
        ({"weight": torch.empty(8, 16)}, "weight is torch.float32; it must be torch.int8"),
        ({"weight_scale": torch.empty(7)}, r"weight_scale is \[7\]; it must be \[8\]"),
        ({"bias": torch.empty(7)}, r"bias is \[7\]; it must be \[8\]"),
        ({"input_scale": torch.empty(3)}, r"scale is torch.float32 \[3\]"),
        ({"x": torch.empty(3, 16, dtype=torch.float64)}, "x is torch.float64"),
    ],
)
@pytest.mark.parametrize("where", ["real", "meta"])
def test_fake_and_real_tensors_are_checked_alike(arguments: dict[str, Tensor], message: str, where: str) -> None:
    whole = {
        "x": torch.empty(3, 16),
        "weight": torch.empty(8, 16, dtype=torch.int8),
        "weight_scale": torch.empty(8),
        "bias": None,
        "input_scale": None,
        **arguments,
    }
    if where == "meta":
        whole = {name: None if value is None else value.to("meta") for name, value in whole.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.quant_linear(*whole.values())


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
def test_mixed_devices_are_refused(position: int, device: torch.device) -> None:
    # A weight left on meta by an offloading hook must not reach the fake implementation and answer nonsense.
    arguments = [
        torch.randn(3, 16, device=device),
        int8(8, 16, device=device),
        torch.rand(8, device=device),
        torch.randn(8, device=device),
        torch.rand((), device=device),
    ]
    arguments[position] = arguments[position].to("meta")
    with pytest.raises(ValueError, match=r"is on .* but .* is on .*: move them to one device"):
        ops.quant_linear(*arguments)
