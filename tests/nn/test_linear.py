"""``QuantLinear``: what it computes, and that its values survive everything that is done to modules."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import qgemm
from qgemm.kernels.reference import quantize_rows_reference, scaled_mm_reference
from qgemm.nn import QuantLinear

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@pytest.fixture
def layer(device: torch.device) -> QuantLinear:
    return QuantLinear.from_linear(nn.Linear(70, 40, device=device))


@pytest.fixture
def static_layer(device: torch.device) -> QuantLinear:
    return QuantLinear.from_linear(nn.Linear(70, 40, device=device), "int8-static", input_scale=0.03)


def assert_same_values(a: nn.Module, b: nn.Module) -> None:
    """The same int8 values and float32 scales, bit for bit, as parameters that need no gradient."""
    names = [name for name, _ in a.named_parameters() if name != "bias"]
    assert names == [name for name, _ in b.named_parameters() if name != "bias"]
    for name in names:
        mine, theirs = getattr(a, name), getattr(b, name)
        assert isinstance(theirs, nn.Parameter)
        assert not theirs.requires_grad
        assert mine.dtype == theirs.dtype == (torch.int8 if name == "weight" else torch.float32)
        assert torch.equal(mine.cpu(), theirs.cpu())


def expected(layer: QuantLinear, x: Tensor) -> Tensor:
    """The layer's output by the plain PyTorch specification."""
    q, scale = quantize_rows_reference(x.reshape(x.shape[:-1].numel(), layer.in_features), layer.input_scale)
    out = scaled_mm_reference(q, layer.stored("weight").t(), scale, layer.weight_scale, layer.bias, x.dtype)
    return out.view(*x.shape[:-1], layer.out_features)


# Construction


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_new_layer(scheme: str, bias: bool, device: torch.device) -> None:
    layer = QuantLinear(70, 40, bias=bias, device=device, dtype=torch.bfloat16, scheme=scheme)
    static = scheme == "int8-static"
    wanted = {"weight": ((40, 70), torch.int8), "weight_scale": ((40,), torch.float32)}
    if bias:
        wanted["bias"] = ((40,), torch.bfloat16)
    if static:
        wanted["input_scale"] = ((), torch.float32)
    assert {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()} == wanted
    assert not list(layer.buffers())
    assert not any(p.requires_grad for p in layer.parameters())
    assert all(p.device == device for p in layer.parameters())
    assert layer.is_static is static
    assert layer.scheme is qgemm.QuantLinear(1, 1, scheme=scheme).scheme
    out = layer(torch.randn(3, 70, device=device))
    assert out.isnan().all(), "a layer that never got any values has no plausible answer"


def test_bias_has_the_default_dtype(device: torch.device) -> None:
    assert QuantLinear(4, 4, device=device).bias.dtype == torch.get_default_dtype()


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"scheme is 'int3' \(.*\); it must be one of \[.*'int4', .*, 'int8', .*'int8-static'"
    ):
        QuantLinear(4, 4, scheme="int3")


def test_a_scheme_of_another_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheme 'int4' isn't for QuantLinear: its class is qgemm\.nn\.linear_class"):
        QuantLinear(4, 4, scheme="int4")


def test_extra_repr(layer: QuantLinear, static_layer: QuantLinear) -> None:
    assert repr(layer) == "QuantLinear(in_features=70, out_features=40, bias=True, scheme='int8')"
    assert "scheme='int8-static'" in repr(static_layer)
    assert "bias=False" in repr(QuantLinear(4, 4, bias=False))


# From and to float layers


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_and_back(dtype: torch.dtype, bias: bool, device: torch.device) -> None:
    linear = nn.Linear(70, 40, bias=bias, device=device, dtype=dtype).eval()
    before = copy.deepcopy(linear.state_dict())
    layer = QuantLinear.from_linear(linear)
    q, scale = quantize_rows_reference(linear.weight.detach())
    assert torch.equal(layer.weight, q)
    assert torch.equal(layer.weight_scale, scale)
    assert not layer.training
    assert all(torch.equal(value, before[name]) for name, value in linear.state_dict().items())

    back = layer.dequantize()
    assert type(back) is nn.Linear
    assert not back.training
    assert back.weight.dtype == (dtype if bias else torch.float32)
    step = scale[:, None] * (0.5 + 1e-3) + linear.weight.abs() * torch.finfo(back.weight.dtype).eps
    assert ((back.weight - linear.weight).abs() <= step).all()
    if bias:
        assert torch.equal(back.bias, linear.bias)
        assert not layer.bias.requires_grad
    assert layer.dequantize(torch.float64).weight.dtype == torch.float64


def test_from_conv1d(device: torch.device) -> None:
    conv1d = Conv1D(40, 70).to(device)
    layer = QuantLinear.from_linear(conv1d)
    assert (layer.in_features, layer.out_features) == (70, 40)
    x = torch.randn(5, 70, device=device)
    torch.testing.assert_close(layer(x), conv1d(x), rtol=0, atol=0.01)
    assert torch.equal(layer(x), expected(layer, x))


def test_from_a_linear_layer_that_is_only_called_conv1d() -> None:
    mine = type("Conv1D", (nn.Linear,), {})(70, 70)
    x = torch.randn(5, 70)
    torch.testing.assert_close(QuantLinear.from_linear(mine)(x), mine(x), rtol=0, atol=0.02)
    with pytest.raises(TypeError, match="or transformers' Conv1D"):
        QuantLinear.from_linear(type("Conv1D", (nn.Module,), {})())


def test_from_float64(device: torch.device) -> None:
    layer = QuantLinear.from_linear(nn.Linear(70, 40, device=device, dtype=torch.float64))
    assert layer.bias.dtype == torch.float32
    x = torch.randn(5, 70, device=device)
    assert torch.equal(layer(x), expected(layer, x))


def test_from_linear_on_meta() -> None:
    layer = QuantLinear.from_linear(nn.Linear(70, 40, device="meta"), "int8-static", input_scale=0.5)
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(3, 70, device="meta")).shape == (3, 40)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_from_linear_refuses_a_weight_that_is_not_finite(value: float, device: torch.device) -> None:
    linear = nn.Linear(70, 40, device=device)
    with torch.no_grad():
        linear.weight[7, 3] = value
    with pytest.raises(ValueError, match=r"weight holds NaN or Inf.*: repair the checkpoint or skip the layer"):
        QuantLinear.from_linear(linear)


@pytest.mark.parametrize(
    ("make", "arguments", "kind", "message"),
    [
        (lambda: nn.Linear(4, 4), {"scheme": "int8-static"}, ValueError, "'int8-static' needs an input_scale"),
        (lambda: nn.Linear(4, 4), {"input_scale": 0.5}, ValueError, "'int8' takes no input_scale"),
        *(
            (lambda: nn.Linear(4, 4), {"scheme": "int8-static", "input_scale": value}, ValueError, "input_scale is")
            for value in (0.0, -1.0, torch.nan, torch.inf)
        ),
        (
            lambda: nn.Linear(4, 4),
            {"scheme": "int8-static", "input_scale": torch.ones(3)},
            ValueError,
            r"input_scale has shape \[3\]; it must be a single number",
        ),
        (lambda: nn.Conv2d(4, 4, 1), {}, TypeError, "linear is a Conv2d; from_linear takes an nn.Linear or"),
        (lambda: nn.Embedding(4, 4), {}, TypeError, "linear is a Embedding"),
        (lambda: QuantLinear(4, 4), {}, TypeError, "linear is a QuantLinear"),
        (
            lambda: nn.Linear(4, 4).to(torch.float8_e4m3fn),
            {},
            TypeError,
            "linear's weight is torch.float8_e4m3fn; from_linear quantizes float16",
        ),
    ],
)
def test_from_linear_refuses(
    make: Callable[[], nn.Module], arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        QuantLinear.from_linear(make(), **arguments)


# A weight that a method decided


def decided(linear: nn.Linear, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that no rounding to nearest would give, for a layer of that size."""
    values = torch.randint(-127, 128, linear.weight.shape, dtype=torch.int8, device=device)
    return values, torch.rand(linear.out_features, device=device) + 0.5


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_from_linear_takes_a_weight_that_was_decided(scheme: str, device: torch.device) -> None:
    linear = nn.Linear(70, 40, device=device)
    values, scale = decided(linear, device)
    layer = QuantLinear.from_linear(linear, scheme, 0.5 if scheme != "int8" else None, weight=(values, scale))
    assert torch.equal(layer.weight, values)
    assert torch.equal(layer.weight_scale, scale)
    assert torch.equal(layer.bias, linear.bias)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.randn(3, 70, device=device)
    torch.testing.assert_close(layer(x), expected(layer, x))


def test_a_decided_weight_need_not_be_contiguous(device: torch.device) -> None:
    linear = nn.Linear(70, 40, device=device)
    values, scale = decided(linear, device)
    layer = QuantLinear.from_linear(linear, weight=(values.t().contiguous().t(), scale.repeat_interleave(2)[::2]))
    assert layer.weight.is_contiguous()
    assert layer.weight_scale.is_contiguous()
    assert torch.equal(layer.weight, values)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda q, s: (q.int(), s), r"weight's values are torch\.int32 .*; they must be torch\.int8 \[40, 70\]"),
        (lambda q, s: (q.t(), s), r"weight's values are torch\.int8 \[70, 40\]"),
        (lambda q, s: (q, s.double()), r"weight's scale is torch\.float64 \[40\]; it must be torch\.float32 \[40\]"),
        (lambda q, s: (q, s[:, None]), r"weight's scale is torch\.float32 \[40, 1\]"),
        (lambda q, s: (q.clone().fill_(-128), s), "weight's values go from -128 to -128; they must be from -127 to"),
        (lambda q, s: (q, s * 0), "weight's scale must be finite and greater than 0"),
        (lambda q, s: (q, -s), "weight's scale must be finite and greater than 0"),
        (lambda q, s: (q, s / 0), "weight's scale must be finite and greater than 0"),
        (lambda q, s: (q, s * torch.nan), "weight's scale must be finite and greater than 0"),
        (lambda q, s: (q.to("meta"), s), "weight is on meta"),
    ],
)
def test_a_decided_weight_is_checked(spoil: Callable[..., Any], message: str, device: torch.device) -> None:
    linear = nn.Linear(70, 40, device=device)
    with pytest.raises(ValueError, match=message):
        QuantLinear.from_linear(linear, weight=spoil(*decided(linear, device)))


# Forward


@DTYPES
@pytest.mark.parametrize("shape", [(3, 70), (70,), (2, 3, 70), (0, 70), (2, 0, 70), (1, 1, 1, 70)])
@pytest.mark.parametrize("static", [False, True])
def test_forward(
    shape: tuple[int, ...], dtype: torch.dtype, static: bool, layer: QuantLinear, static_layer: QuantLinear
) -> None:
    layer = static_layer if static else layer
    x = torch.randn(shape, device=layer.weight.device).to(dtype)
    out, wanted = layer(x), expected(layer, x)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 40)
    assert out.is_contiguous()
    # A GPU may fuse the multiplication with the addition of the bias, which rounds once less.
    torch.testing.assert_close(out, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_the_input_has_the_float_layer_s_name(layer: QuantLinear, device: torch.device) -> None:
    x = torch.randn(3, layer.in_features, device=device)
    assert torch.equal(layer(input=x), layer(x))


def test_forward_is_close_to_the_float_layer(device: torch.device) -> None:
    linear = nn.Linear(512, 256, device=device)
    x = torch.randn(64, 512, device=device)
    with torch.no_grad():
        exact, out = linear(x), QuantLinear.from_linear(linear)(x)
    assert (out - exact).norm() < 0.015 * exact.norm()  # about 0.01 on Gaussian data


def test_a_non_contiguous_input(layer: QuantLinear) -> None:
    x = torch.randn(70, 3, 5, device=layer.weight.device)
    moved = x.permute(2, 1, 0)
    assert torch.equal(layer(moved), layer(moved.contiguous()))


def test_rows_that_are_zero_or_not_finite(layer: QuantLinear) -> None:
    x = torch.randn(4, 70, device=layer.weight.device)
    clean = layer(x)
    x[1], x[2, 5], x[3, 6] = 0, torch.nan, torch.inf
    out = layer(x)
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[1], layer.bias)
    assert out[2:].isnan().all()


@pytest.mark.parametrize(("features_in", "features_out"), [(0, 3), (3, 0), (1, 1), (1, 40), (40, 1), (17, 53)])
def test_degenerate_sizes(features_in: int, features_out: int, device: torch.device) -> None:
    layer = QuantLinear(features_in, features_out, device=device)
    layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape, dtype=torch.int8))
    layer.weight_scale.fill_(1)
    x = torch.randn(5, features_in, device=device)
    torch.testing.assert_close(layer(x), expected(layer, x))


def test_wrong_inputs_are_named(device: torch.device) -> None:
    layer = QuantLinear(4096, 8, device=device)
    with pytest.raises(ValueError, match=r"^x has 4095 columns but the layer's in_features is 4096$"):
        layer(torch.randn(2, 4095, device=device))
    with pytest.raises(TypeError, match=r"x is torch.float64; .*: call float\(\) on the model, or convert it"):
        layer(torch.randn(2, 4096, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match="x is on meta but weight is on"):
        layer(torch.empty(2, 4096, device="meta"))


def test_gradients_reach_x_and_nothing_else(layer: QuantLinear) -> None:
    x = torch.randn(3, 70, device=layer.weight.device, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().weight.sum(0).expand(3, 70), rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in layer.parameters())


# What is done to modules

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float16),
    "there and back": lambda m: m.half().float().bfloat16().double().float(),
    "inside another module": lambda m: nn.Sequential(m).half()[0],
}


DTYPES_OF_BIASES = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "to dtype": torch.bfloat16,
    "to device and dtype": torch.float16,
    "type": torch.float16,
    "there and back": torch.float32,
    "inside another module": torch.float16,
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_casts_touch_the_bias_only(cast: str, static: bool, layer: QuantLinear, static_layer: QuantLinear) -> None:
    layer = static_layer if static else layer
    layer(torch.randn(3, 70, device=layer.weight.device))  # what is remembered of a call must not outlive it wrongly
    before = copy.deepcopy(layer)
    after = CASTS[cast](layer)
    assert after is layer
    assert_same_values(before, after)
    assert after.bias.dtype == DTYPES_OF_BIASES[cast]
    if after.bias.dtype != torch.float64:
        x = torch.randn(3, 70, device=after.weight.device, dtype=after.bias.dtype)
        assert torch.equal(after(x), expected(after, x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_state_dict(assign: bool, static: bool, layer: QuantLinear, static_layer: QuantLinear, tmp_path: Path) -> None:
    layer = static_layer if static else layer
    state = layer.state_dict()
    assert list(state) == ["weight", "bias", "weight_scale", *(["input_scale"] if static else [])]
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    start = "meta" if assign else layer.weight.device
    other = QuantLinear(70, 40, device=start, scheme=layer.scheme)
    assert str(other.load_state_dict(state, strict=True, assign=assign)) == "<All keys matched successfully>"
    assert_same_values(layer, other)
    x = torch.randn(3, 70, device=layer.weight.device)
    assert torch.equal(other(x), layer(x))


def test_state_dict_reports_what_is_missing_or_foreign(layer: QuantLinear) -> None:
    state = layer.state_dict()
    del state["weight_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        QuantLinear(70, 40).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*zero_point"):
        QuantLinear(70, 40).load_state_dict({**layer.state_dict(), "zero_point": torch.zeros(40)})
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        QuantLinear(70, 40).load_state_dict({**layer.state_dict(), "weight_scale": torch.zeros(41)})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_a_checkpoint_are_widened(assign: bool, dtype: torch.dtype, static_layer: QuantLinear) -> None:
    # compressed-tensors writes them in the model's dtype.
    state = static_layer.state_dict()
    state["weight_scale"], state["input_scale"] = state["weight_scale"].to(dtype), state["input_scale"].to(dtype)
    other = QuantLinear(70, 40, device=static_layer.weight.device, scheme="int8-static")
    other.load_state_dict(state, assign=assign)
    assert other.weight_scale.dtype == other.input_scale.dtype == torch.float32
    assert torch.equal(other.weight_scale, state["weight_scale"].float())
    assert state["weight_scale"].dtype == dtype, "the caller's state_dict must be left as it is"


@pytest.mark.parametrize("assign", [False, True])
def test_a_float_weight_is_refused(assign: bool, layer: QuantLinear) -> None:
    model = nn.Sequential(layer)
    before = copy.deepcopy(layer)
    state = nn.Sequential(nn.Linear(70, 40)).state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"0\.weight is torch\.float32 but QuantLinear holds torch\.int8: load"):
            model.load_state_dict(state, strict=strict, assign=assign)
    assert_same_values(before, layer)


def test_meta_and_to_empty(layer: QuantLinear) -> None:
    meta = copy.deepcopy(layer).to("meta")
    assert all(p.is_meta for p in meta.parameters())
    assert {p.dtype for p in meta.half().parameters()} == {torch.int8, torch.float32, torch.float16}
    assert meta(torch.empty(2, 3, 70, device="meta")).shape == (2, 3, 40)
    real = meta.to_empty(device=layer.weight.device)
    assert [p.dtype for p in real.parameters()] == [torch.int8, torch.float16, torch.float32]
    real.load_state_dict(layer.state_dict())
    assert_same_values(layer, real)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])  # of whose weights PyTorch refuses it, and doesn't
def test_requires_grad_cannot_be_forced_on_the_weight(scheme: str) -> None:
    layer = QuantLinear(4, 3, scheme=scheme)
    with pytest.raises(RuntimeError, match=r"a layer is quantized, and its weight can't be trained: train an adapter"):
        layer.requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in layer.requires_grad_(False).parameters())


def test_shared_parameters_stay_shared_when_the_dtype_changes() -> None:
    first, second = QuantLinear(4, 3), QuantLinear(4, 3)
    second.weight, second.weight_scale = first.weight, first.weight_scale
    scale = first.weight_scale
    nn.Sequential(first, second).half()
    assert first.weight_scale is scale
    assert second.weight_scale is scale
    assert scale.dtype == torch.float32
    assert first.bias is not None
    assert first.bias.dtype == torch.float16
