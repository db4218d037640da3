"""``torch.ops.qgemm.quant_linear`` and ``weight_only_linear``: gradients, tracing, checks."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.schemes import quantized_layer
from torch import Tensor, nn
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from ops.test_declare import DTYPES, int8, operands, operators_in
from qgemm.numerics import groups
from qgemm.numerics.formats import INT4
from qgemm.numerics.groups import dequantize

ops = torch.ops.qgemm


@DTYPES
@pytest.mark.parametrize("shape", [(6, 16), (16,), (2, 3, 16), (0, 16)])
def test_weight_only_linear_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    _, weight, scale, zero, unit, order, _, *sizes = operands(dtype, device)["weight_only_linear"]
    bias = torch.randn(8, device=device).to(dtype).requires_grad_()
    out = ops.weight_only_linear(x, weight, scale, zero, unit, order, bias, *sizes)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_x = grad.double() @ dequantize(weight, scale, zero, unit, INT4, 10, 16, torch.float64)[:, order.argsort()]
    exact_bias = grad.double().reshape(-1, 8).sum(0)
    torch.testing.assert_close(
        x.grad.double(), exact_x, rtol=3 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps * scale.max().item()
    )
    torch.testing.assert_close(bias.grad.double(), exact_bias, rtol=torch.finfo(dtype).eps, atol=1e-5)
    with pytest.raises(RuntimeError, match="gradients for x and bias only"):
        ops.weight_only_linear(x, weight, scale.requires_grad_(), zero, unit, order, bias, *sizes).sum().backward()


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


LAYERS = pytest.mark.parametrize("kind", ["quant_linear", "block_scaled_linear", "weight_only_linear int8"])


def layer_of(kind: str, device: torch.device) -> Callable[..., Tensor]:
    """A layer of 8 by 16 values, of x and maybe a residual."""
    given = operands(torch.bfloat16, device)[kind]
    count = len(given) if kind == "quant_linear" else -1  # without the residual
    return lambda x, residual=None: getattr(ops, kind.split()[0])(x, *given[1:count], residual)


@LAYERS
def test_the_gradient_of_a_residual_is_that_of_the_output(kind: str, device: torch.device) -> None:
    x, residual = (torch.randn(4, n, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (16, 8))
    f, grad = layer_of(kind, device), torch.randn(4, 8, device=device, dtype=torch.bfloat16)
    apart = lambda x, r: f(x) + r  # noqa: E731
    out, separate = f(x, residual), apart(x, residual)
    assert torch.equal(out, separate)
    wanted = torch.autograd.grad(separate, (x, residual), grad)
    assert all(map(torch.equal, torch.autograd.grad(out, (x, residual), grad), wanted))
    # The residual alone, and in forward mode.
    assert torch.equal(torch.autograd.grad(f(x.detach(), residual), residual, grad)[0], grad)
    values, along = (x.detach(), residual.detach()), (x.detach() * 2, grad)
    assert all(map(torch.equal, torch.func.jvp(f, values, along), torch.func.jvp(apart, values, along)))


@LAYERS
@pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (0, None), (None, 1)])
def test_a_batch_of_residuals(in_dims: tuple[int | None, int | None], kind: str, device: torch.device) -> None:
    x, residual = torch.randn(3, 3, 16, device=device), torch.randn(3, 3, 8, device=device)
    x, residual = (t[0] if dim is None else t for t, dim in zip((x, residual), in_dims, strict=True))
    f = layer_of(kind, device)
    apart = lambda x, r: f(x) + r  # noqa: E731
    assert torch.equal(torch.func.vmap(f, in_dims)(x, residual), torch.func.vmap(apart, in_dims)(x, residual))


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


class Storages(TorchDispatchMode):
    """Keeps the storage of every tensor that is made, by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.setdefault(out.untyped_storage().data_ptr(), out)
        return out


@pytest.mark.parametrize("scheme", ["int8", "fp8-block", "nf4", "int4-32-asymmetric-ordered"])
def test_a_backward_makes_one_float_weight(scheme: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_PIECE", 4 * 256)  # temporaries of four rows
    layer = quantized_layer(nn.Linear(256, 192, device=device, dtype=torch.bfloat16), scheme)
    x = torch.randn(3, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    with Storages() as storages:
        out.backward(torch.ones_like(out))
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    # Scales are repeated, too, for each row or value.
    large = [t for at, t in storages.made.items() if at not in own and t.untyped_storage().nbytes() > 256 * 192 // 4]
    assert [(t.dtype, t.untyped_storage().nbytes()) for t in large] == [(torch.bfloat16, 2 * 256 * 192)]
    wanted = torch.ones(3, 192, device=device).double() @ layer.dequantize(torch.float64).weight
    torch.testing.assert_close(x.grad.double(), wanted, rtol=0.02, atol=0.02)


def test_quant_linear_scales_have_no_gradient(device: torch.device) -> None:
    x, weight = torch.randn(4, 16, device=device), int8(8, 16, device=device)
    scale = torch.rand(8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients for x and bias only; set requires_grad=False on its weight"):
        ops.quant_linear(x, weight, scale, None, None).sum().backward()


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


class Layer(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(int8(8, 16, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(ops.quant_linear(x, self.weight, self.scale, None, None)) + 1


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


@pytest.mark.complete
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="PyTorch compiles C++ for a CPU")
@pytest.mark.parametrize("trains", [False, True])
def test_compiled_by_the_default_backend(trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own code runs between qgemm's operators; its gradient through both is the eager one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    int8_layer, int4_layer = (quantized_layer(nn.Linear(48, 48), scheme) for scheme in ("int8", "int4"))
    model = nn.Sequential(int8_layer, nn.GELU(), int4_layer, nn.Softmax(-1))
    metrics.reset()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of caches that are off
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for rows in (5, 9):
            x = torch.randn(rows, 48)
            ours, eager = x.clone().requires_grad_(trains), x.clone().requires_grad_(trains)
            out, wanted = compiled(ours), model(eager)
            torch.testing.assert_close(out, wanted)
            if trains:
                out.square().sum().backward()
                wanted.square().sum().backward()
                torch.testing.assert_close(ours.grad, eager.grad)
    assert metrics.generated_kernel_count >= 2 + trains  # GELU, softmax, a gradient


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.empty(3, 15)}, "x has 15 columns but the layer's in_features is 16"),
        ({"weight": torch.empty(8, 16)}, "weight is torch.float32; it must be one of int8, float8_e4m3fn"),
        ({"weight_scale": torch.empty(7)}, r"weight_scale is \[7\]; it must be \[8\]"),
        ({"bias": torch.empty(7)}, r"bias is \[7\]; it must be \[8\]"),
        ({"input_scale": torch.empty(3)}, r"scale is torch.float32 \[3\]"),
        ({"x": torch.empty(3, 16, dtype=torch.float64)}, "x is torch.float64"),
        ({"residual": torch.empty(3, 16)}, r"residual is torch.float32 \[3, 16\]; it must be torch.float32 \[3, 8\]"),
        ({"residual": torch.empty(3, 8).half()}, "residual is torch.float16 .* it must be torch.float32"),
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


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 5])
def test_mixed_devices_are_refused(position: int, device: torch.device) -> None:
    # A weight left on meta by an offloading hook must not reach the fake implementation and answer nonsense.
    arguments = [
        torch.randn(3, 16, device=device),
        int8(8, 16, device=device),
        torch.rand(8, device=device),
        torch.randn(8, device=device),
        torch.rand((), device=device),
        torch.randn(3, 8, device=device),
    ]
    arguments[position] = arguments[position].to("meta")
    with pytest.raises(ValueError, match=r"is on .* but .* is on .*: move them to one device"):
        ops.quant_linear(*arguments)
