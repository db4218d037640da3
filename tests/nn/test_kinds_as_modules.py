"""What holds for the linear layers of every scheme as modules: how they are cast, copied, loaded and moved."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.schemes import quantized_layer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qgemm.nn import WeightOnlyLinear, linear_class
from tests.nn.test_kinds import SCHEME, K, N, assert_same, make


@SCHEME
def test_scales_are_checked_as_they_are_loaded(scheme: str) -> None:
    layer = make(scheme)
    before = copy.deepcopy(layer.state_dict())
    for name in layer.scale_names:
        values, problem = [torch.nan, torch.inf, -1.0], "holds NaN, Inf or a negative number"
        if isinstance(layer, WeightOnlyLinear):  # whose scales may be negative in other libraries' files
            values, problem = values[:2], "holds NaN or Inf"
        elif name == "input_scale":
            values, problem = [*values, 0.0], "is not finite and above 0 everywhere"
        if name in before:
            for value in values:
                bad = before[name].clone()
                bad.view(-1)[-1] = 255 if bad.dtype == torch.uint8 else torch.nan if bad.itemsize == 1 else value
                with pytest.raises(RuntimeError, match=f"{name} {problem}"):
                    layer.load_state_dict({**before, name: bad})
                if bad.dtype.itemsize > 1:
                    with pytest.raises(RuntimeError, match=f"{name} {problem}"):
                        layer.load_state_dict({**before, name: bad.bfloat16()}, assign=True)
    if "weight_global_scale" in before:
        with pytest.raises(RuntimeError, match="weight_global_scale is not finite, or 0"):
            layer.load_state_dict({**before, "weight_global_scale": torch.tensor([1.0, 0.0])})
    if "input_order" in before:
        with pytest.raises(RuntimeError, match=f"input_order isn't an order of {K} columns"):
            layer.load_state_dict({**before, "input_order": torch.zeros(K, dtype=torch.int32)})
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@SCHEME
def test_rows_of_zeros_may_have_a_scale_of_0(scheme: str) -> None:
    linear, x = nn.Linear(K, N, bias=False), torch.randn(3, K)
    linear.weight.data[:7] = 0
    layer = quantized_layer(linear, scheme)
    wanted, state = layer(x), layer.state_dict()
    scale = state["weight_scale"].clone()
    if scale.dtype == torch.uint8 or len(scale) < N:
        return  # exponents, or scales of blocks
    scale[:7] = 0
    layer.load_state_dict({**state, "weight_scale": scale})
    assert torch.equal(layer(x), wanted)
    assert not layer.dequantize(torch.float32).weight[:7].any()


@pytest.mark.parametrize("scheme", ["int4", "int8-weight", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("assign", [False, True])
def test_scales_of_groups_keep_their_dtype(scheme: str, dtype: torch.dtype, assign: bool) -> None:
    layer, state = make(scheme), make(scheme).state_dict()
    state["weight_scale"] = -state["weight_scale"].to(dtype)
    layer.load_state_dict(state, assign=assign)
    assert layer.weight_scale.dtype == layer.half().weight_scale.dtype == dtype
    assert torch.equal(layer.weight_scale, state["weight_scale"])
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(x), layer.dequantize(torch.float32)(x))


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "there and back": lambda m: m.half().float().bfloat16().double().float(),
    "inside another module": lambda m: nn.Sequential(m).half()[0],
}


@SCHEME
@pytest.mark.parametrize("cast", CASTS)
def test_casts_touch_biases_only(scheme: str, cast: str) -> None:
    layer = make(scheme)
    fixed = {name: getattr(layer, name).clone() for name in layer.fixed_names if getattr(layer, name) is not None}
    after = CASTS[cast](layer)
    assert after is layer
    for name, value in fixed.items():
        assert getattr(after, name).dtype == value.dtype
        assert torch.equal(getattr(after, name), value)
        assert not getattr(after, name).requires_grad
    out = after(torch.randn(3, K, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: through_torch_save(m),
}


def through_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@SCHEME
@pytest.mark.parametrize("how", COPIES)
def test_copies(scheme: str, how: str) -> None:
    layer, x = make(scheme), torch.randn(3, K)
    state = set(vars(layer))
    out = layer(x)
    assert set(vars(layer)) == state, "a call leaves nothing in the module"
    other = COPIES[how](layer)
    assert_same(layer, other)
    assert other.scheme == layer.scheme
    assert torch.equal(other(x), out)
    getattr(other, layer.weight_names[0]).zero_()
    assert getattr(layer, layer.weight_names[0]).any(), "the copy must have its own memory"


def test_a_shallow_copy_has_the_same_parameters() -> None:
    layer, x = make("fp8"), torch.randn(3, K)
    other = copy.copy(layer)
    assert torch.equal(other(x), layer(x))
    assert other.stored("weight") is layer.stored("weight")


@SCHEME
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(scheme: str, assign: bool) -> None:
    layer, x = make(scheme), torch.randn(3, K)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = linear_class(scheme)(K, N, device="meta" if assign else None, scheme=scheme)
    assert str(other.load_state_dict(state, strict=True, assign=assign)) == "<All keys matched successfully>"
    assert_same(layer, other)
    assert torch.equal(other(x), layer(x))


@SCHEME
def test_state_dict_reports_what_is_missing_or_foreign(scheme: str) -> None:
    layer = make(scheme)
    for name, value in layer.state_dict().items():
        rest = {other: theirs for other, theirs in layer.state_dict().items() if other != name}
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            make(scheme).load_state_dict(rest)
        if value.ndim:
            with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
                make(scheme).load_state_dict({**layer.state_dict(), name: value[1:]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*foreign"):
        make(scheme).load_state_dict({**layer.state_dict(), "foreign": torch.zeros(1)})


@SCHEME
def test_quantized_values_of_another_dtype_are_refused(scheme: str) -> None:
    layer = make(scheme)
    before = copy.deepcopy(layer)
    for name in layer.weight_names + layer.index_names:
        if getattr(layer, name) is None:
            continue
        state = {**layer.state_dict(), name: getattr(layer, name).short()}
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=rf"{name} is torch\.int16 but {type(layer).__name__} holds torch"):
                layer.load_state_dict(state, strict=strict)
    assert_same(before, layer)


@SCHEME
def test_meta_and_to_empty(scheme: str) -> None:
    layer = make(scheme)
    meta = copy.deepcopy(layer).to("meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert meta(torch.empty(2, 3, K, device="meta")).shape == (2, 3, N)
    real = meta.to_empty(device="cpu")
    real.load_state_dict(layer.state_dict())
    assert_same(layer, real)


@pytest.mark.slow
def test_fsdp_shards_all_but_single_numbers(fsdp_mesh: Any) -> None:
    x = torch.randn(3, K)
    for scheme in ("int8", "int8-static", "int8-static-asymmetric", "fp8-block", "int4"):
        layer, own = make(scheme), x.clone().requires_grad_()
        wanted = layer(own)
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), own)
        numbers = {parameter for parameter in layer.parameters() if parameter.ndim == 0}
        fully_shard(layer, mesh=fsdp_mesh, ignored_params=numbers)
        assert all(isinstance(each, DTensor) != (each.ndim == 0) for each in layer.parameters())
        out = layer(own)
        assert torch.equal(out, wanted), scheme
        assert torch.equal(torch.autograd.grad(out.sum(), own)[0], wanted_grad), scheme
