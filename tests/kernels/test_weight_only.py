"""``weight_only_linear``: the product with what stored values stand for."""

from typing import Any

import pytest
import torch
from numerics.test_groups import DTYPES, stored
from torch import Tensor

from qgemm.kernels.launch import plans
from qgemm.kernels.launch.plans import recall
from qgemm.kernels.linear.launcher import LinearPlan
from qgemm.kernels.reference import weight_only_linear_reference
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.kernels.weight_only import dispatch, float_launcher
from qgemm.kernels.weight_only.dispatch import weight_only_linear
from qgemm.numerics.formats import FORMATS
from qgemm.numerics.groups import SCALE_DTYPES, round_scale, spread, store_scale
from qgemm.numerics.packing import unpack_codes

K, N = 300, 40
KINDS = {
    "int4": ("int4", 32, "bfloat16"),
    "int4 zero points": ("int4", 128, "float16"),
    "int4 float zeros": ("int4", 64, "bfloat16"),
    "int4 ordered": ("int4", 64, "float32"),
    "int4 channel": ("int4", K, "bfloat16"),
    "int8 channel": ("int8", K, "float32"),
    "int8 zero points": ("int8", 128, "bfloat16"),
    "int8 channel float zeros": ("int8", K, "float16"),
    "fp8": ("fp8", K, "float32"),
    "mxfp8": ("fp8", 32, "e8m0"),
    "mxfp4": ("fp4", 32, "e8m0"),
    "nvfp4": ("fp4", 16, "e4m3"),
    "nf4": ("nf4", 64, "float32"),
    "bnb-fp4": ("bnb-fp4", 64, "float32"),
}
KIND = pytest.mark.parametrize("kind", KINDS)


def before_garbage(tensor: Tensor) -> Tensor:
    """The tensor, in memory that goes on with the bits of NaN, which nothing may read."""
    memory = torch.full((tensor.nbytes + 1024,), 255, dtype=torch.uint8, device=tensor.device)
    memory[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten()
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def operands(kind: str, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """The fields of a ``ScaledWeight``, and the float64 weight that they stand for.

    Scales of int4 and int8 are of either sign.
    """
    format, size, dtype = KINDS[kind]
    values, weight, scale, zero = stored(N, K, size, device, FORMATS[format])
    if format.startswith("int"):
        scale *= torch.randint(0, 2, scale.shape, device=device) * 2 - 1
    unit = torch.tensor([1.0, 3.7], device=device) if dtype == "e4m3" else None
    scale = round_scale(scale, dtype, FORMATS[format], unit)
    zero_point = zero if "zero points" in kind else None
    exact = FORMATS[format].to_float(values).double() - (0 if zero_point is None else spread(zero, size, K))
    exact *= spread(scale, size, K).double()
    if "float zeros" in kind:
        zero_point = torch.randn(zero.shape, device=device).to(SCALE_DTYPES[dtype])
        exact += spread(zero_point, size, K)
    order = torch.randperm(K, device=device).int() if "ordered" in kind else None
    arguments = {
        "values": weight,
        "scale": before_garbage(store_scale(scale, dtype, unit)),
        "zero_point": None if zero_point is None else before_garbage(zero_point),
        "global_scale": unit,
        "input_order": order,
        "bias": torch.randn(N, device=device),
        "in_features": K,
        "format": format,
        "group_size": size,
    }
    return arguments, exact if order is None else exact[:, order.argsort()]


@KIND
@DTYPES
@pytest.mark.parametrize("compute", [weight_only_linear, weight_only_linear_reference])
def test_products(compute: Any, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    arguments, weight = operands(kind, device)
    for shape in [(3, K), (K,), (2, 3, K), (0, K)]:
        x = torch.randn(shape, device=device).to(dtype)
        out = compute(x, ScaledWeight(**arguments))
        assert out.dtype == dtype
        assert out.shape == (*shape[:-1], N)
        exact = x.double() @ weight.t() + arguments["bias"].double()
        size = x.double().abs() @ weight.abs().t() + arguments["bias"].abs()
        # TF32 rounds operands to 10 bits.
        eps = 2.0**-10 if x.is_cuda and dtype == torch.float32 else torch.finfo(dtype).eps
        assert ((out.double() - exact).abs() <= 2 * eps * size).all()


@KIND
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.complete), torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("rows", [3, 70])
def test_kernels_for_every_gpu(rows: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Few rows are multiplied by the stored weight, more by the float weight, which a kernel makes."""
    arguments, weight = operands(kind, device)
    order = arguments["input_order"]
    weight = weight if order is None else weight[:, order.long()]
    # Columns of a wider tensor, whose rows aren't aligned.
    x = torch.randn(rows, K + 1, device=device).to(dtype)[:, 1:]
    residual = torch.randn(rows, N, device=device).to(dtype)
    bias = arguments["bias"].to(dtype)
    out = float_launcher.weight_only_linear(x, ScaledWeight(**{**arguments, "bias": bias}), residual)
    assert out.dtype == dtype
    exact = x.double() @ weight.t() + bias.double()
    size = x.double().abs() @ weight.abs().t() + bias.double().abs() + residual.double().abs()
    allowed = 2 * torch.finfo(dtype).eps * size
    if rows > float_launcher.MAX_PLAIN_ROWS and dtype == torch.float32 and not x.is_cuda:
        # The product is PyTorch's: with MKL and AVX-512, sums of 300 values differ by up to 2.2 eps.
        allowed += (torch.nn.functional.linear(x, weight.float()).double() - x.double() @ weight.t()).abs()
    assert ((out.double() - exact - residual.double()).abs() <= allowed).all()


@KIND
@pytest.mark.parametrize("shape", [(K,), (1, K), (1, 1, K), (4, K), (1, 4, K), (20, K)])
def test_outputs_can_be_changed_in_place(shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    """Adapters add to them with gradients; autograd forbids that for views of what was made without."""
    weight = ScaledWeight(**operands(kind, device)[0])
    with torch.no_grad():
        out = weight_only_linear(torch.randn(shape, device=device), weight)
    out += torch.ones(N, device=device, requires_grad=True)
    assert out.requires_grad


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_float_weight_has_the_bits_of_pytorchs(
    kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    weight = ScaledWeight(**operands(kind, device)[0])
    made = []
    kernel = float_launcher.float_weight
    monkeypatch.setattr(float_launcher, "float_weight", lambda *given: made.append(kernel(*given)) or made[-1])
    out = dispatch.float_weight(weight, dtype)
    assert len(made) == 1
    assert out.dtype == dtype
    assert torch.equal(out, weight.dequantize(dtype))
    assert dispatch.float_weight(weight, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("rows", [3, 70])
def test_factors_that_lie_apart(rows: int, device: torch.device) -> None:
    arguments, _ = operands("nvfp4", device)
    x, factors = torch.randn(rows, K, device=device), arguments["global_scale"]
    apart = ScaledWeight(**{**arguments, "global_scale": torch.stack((factors, factors * 2), dim=1)[:, 0]})
    beside = float_launcher.weight_only_linear(x, ScaledWeight(**arguments))
    assert torch.equal(float_launcher.weight_only_linear(x, apart), beside)


def test_negative_views_are_read_by_their_values(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    weight = ScaledWeight(**operands("int4", device)[0])
    x, residual = torch.randn(3, K, device=device), torch.randn(3, N, device=device)
    out = dispatch.weight_only_linear(torch._neg_view(-x), weight, torch._neg_view(-residual))
    assert torch.equal(out, dispatch.weight_only_linear(x, weight, residual))


@pytest.mark.parametrize(
    ("kind", "shape", "adds"),
    [("int4", (3, K), False), ("int4", (2, 2, K), True), ("nvfp4", (3, K), False), ("fp8", (3, K), True)],
)
def test_a_call_like_another_is_recalled(kind: str, shape: tuple[int, ...], adds: bool, device: torch.device) -> None:
    weight = ScaledWeight(**operands(kind, device)[0])
    weight = weight._replace(bias=weight.bias.bfloat16())
    what, other = weight[6:10], weight.zero_point if weight.global_scale is None else weight.global_scale
    tensors = weight.values, weight.scale, weight.bias, other
    x, other = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    residual = torch.randn((*shape[:-1], N), device=device).bfloat16() if adds else None
    for recallable in (False, True):
        assert recall(x, *tensors, residual, what) is None
        out = float_launcher.weight_only_linear(x, weight, residual, recallable)
    run = recall(other, *tensors, residual, what)
    assert run is not None
    assert torch.equal(run(x, *tensors, residual), out)
    assert recall(other.half(), *tensors, residual, what) is None
    # What isn't aligned must be looked at.
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(shape).copy_(x)
    assert run(shifted, *tensors, residual) is None


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("int8_activations", [False, True])
def test_a_call_is_recalled_in_the_mode_it_was_made_in(
    int8_activations: bool, has_gradients: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A call that is never recalled takes the host four times as long."""
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(plans, "_guarded", {})
    monkeypatch.setattr(LinearPlan, "run", lambda plan, x, *rest: x)
    weight = ScaledWeight(**operands("int4", device)[0])._replace(int8_activations=int8_activations)
    x = torch.randn(3, K, device=device)
    with torch.set_grad_enabled(has_gradients):
        dispatch.weight_only_linear(x, weight, recallable=True)
    for records in (False, True):
        with torch.set_grad_enabled(records):
            run = recall(x, weight.values, weight.scale, weight.bias, weight.zero_point, None, weight[6:10])
        assert (run is not None) == (records == has_gradients)


@KIND
def test_a_row_with_nan_is_one_of_nan(kind: str, device: torch.device) -> None:
    arguments, _ = operands(kind, device)
    for value in (torch.nan, torch.inf):
        x = torch.randn(4, K, device=device, dtype=torch.bfloat16)
        x[1, 5] = value
        out = weight_only_linear(x, ScaledWeight(**arguments))
        assert not out[1].isfinite().any() or "int" in kind or "fp4" in kind  # inf times a weight of 0 is NaN, of 1 Inf
        assert out[[0, 2, 3]].isfinite().all()


def test_autocast_keeps_the_dtype_of_x(device: torch.device) -> None:
    weight = ScaledWeight(**operands("int4", device)[0])
    x = torch.randn(3, K, device=device)
    for rows in (x, x.repeat(30, 1)):  # more than a GPU multiplies by the stored weight
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = weight_only_linear(rows, weight)
        assert torch.equal(out, weight_only_linear(rows, weight))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": lambda x: x.double()}, "x is torch.float64; a quantized layer accepts"),
        ({"x": lambda x: x[:, :-1]}, "x has 299 columns but the layer's in_features is 300"),
        ({"x": lambda x: x[0, 0]}, "x has no columns"),
        ({"values": lambda w: w.long()}, r"weight is torch.int64 \[40, 256\]; it must be torch.uint8 \[40, 256\]"),
        ({"values": lambda w: w[:, 1:]}, r"weight is torch.uint8 \[40, 255\]"),
        ({"scale": lambda s: s[:, 1:]}, r"scale is torch.float16 \[40, 2\]; it must be .* \[40, 3\]"),
        ({"scale": lambda s: s.double()}, "scale is torch.float64"),
        ({"scale": lambda s: s.to(torch.float8_e4m3fn)}, "scale is torch.float8_e4m3fn, with no global_scale"),
        ({"global_scale": lambda _: torch.ones(2)}, "scale is torch.float16, with a global_scale"),
        ({"zero_point": lambda z: z.int()}, "zero_point is torch.int32"),
        ({"zero_point": lambda z: z[1:]}, r"zero_point is torch.int8 \[39, 3\]"),
        ({"zero_point": lambda z: z.float(), "int8_activations": lambda _: True}, "torch.float32; floats are for int4"),
        ({"zero_point": lambda z: z.half(), "format": lambda _: "nf4"}, "zero_point is torch.float16; floats are for"),
        ({"input_order": lambda _: torch.arange(K)}, "input_order is torch.int64"),
        ({"group_size": lambda _: 0}, "group_size is 0"),
        ({"format": lambda _: "int3"}, "format is 'int3'; it must be one of"),
        ({"format": lambda _: "int8"}, "weight is torch.uint8"),
        ({"bias": lambda b: b[1:]}, r"bias is \[39\]"),
        ({"scale": lambda s: s.to("meta")}, "scale is on meta"),
        ({"format": lambda _: "nf4", "int8_activations": lambda _: True}, "format is 'nf4'; int8_activations are for"),
        ({"int8_activations": lambda _: True, "step": lambda _: torch.ones(40)}, "step is for .* without a zero_point"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, device: torch.device) -> None:
    good = {"x": torch.randn(3, K, device=device), **operands("int4 zero points", device)[0], "int8_activations": False}
    good["step"] = None
    changed = {**good, **{name: change(good[name]) for name, change in changes.items()}}
    with pytest.raises((TypeError, ValueError), match=message):
        weight_only_linear(changed.pop("x"), ScaledWeight(**changed))


@KIND
def test_pieces_on_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, exact = operands(kind, torch.device("cpu"))
    weight = ScaledWeight(**arguments)
    x = torch.randn(3, K)
    whole = weight_only_linear(x, weight)
    monkeypatch.setattr("qgemm.kernels.weight_only.cpu._PIECE", 7 * K)  # the last one has five rows
    difference = (weight_only_linear(x, weight) - whole).double().abs()
    # A product of fewer rows may be summed in another order.
    assert (difference <= 2 * torch.finfo(torch.float32).eps * (x.double().abs() @ exact.abs().t() + 1)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_stored_value_on_a_cpu(format: str) -> None:
    form = FORMATS[format]
    stored = torch.arange(256, dtype=torch.uint8).repeat(2)[None, : 256 if form.bits == 4 else None]
    stored = stored.view(form.storage) if form.bits == 8 else stored
    columns = 512
    weight = ScaledWeight(stored, torch.ones(1, 1), None, None, None, None, columns, format, columns)
    out = weight_only_linear(torch.eye(columns), weight)
    exact = form.decode(unpack_codes(stored, columns)) if form.bits == 4 else stored.float()
    for column in range(columns):
        if exact[0, column].isnan():  # 0 times NaN is NaN as well
            assert out.isnan().all()
            stored[0, column] = 0
    out = weight_only_linear(torch.eye(columns), weight)
    assert torch.equal(out[:, 0], exact[0].nan_to_num(0.0))
