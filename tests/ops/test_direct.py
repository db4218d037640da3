"""``qgemm.ops.quant_linear``: past the dispatcher where only the implementation would see the call."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import qgemm.ops
from qgemm.kernels import cpu, dispatch
from qgemm.kernels.launch import plans
from qgemm.nn.kinds import linear_class

ops = torch.ops.qgemm


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of the calls that went past the dispatcher."""
    seen: list[Any] = []
    implementation, recall = dispatch.quant_linear, qgemm.ops.linear.recall

    def record(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(x)
        return implementation(x, *rest, **options)

    def record_recall(*call: Any) -> Any:
        found = recall(*call)
        return None if found is None else lambda x, *rest: seen.append(x) or found(x, *rest)

    # The operator keeps the implementation itself, so this is out of its way.
    monkeypatch.setattr(dispatch, "quant_linear", record)
    monkeypatch.setattr(qgemm.ops.linear, "recall", record_recall)
    return seen


def quant_linear_arguments(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
    weight = torch.randint(-127, 128, (8, 16), dtype=torch.int8, device=device)
    return torch.randn(5, 16, device=device), weight, torch.rand(8, device=device), torch.randn(8, device=device), None


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


AUTOCAST: dict[str, Any] = {
    "autocast": lambda f, x, *rest: torch.autocast(x.device.type, torch.bfloat16)(f)(x, *rest),
    "autocast of its dtype": lambda f, x, *rest: torch.autocast(x.device.type, torch.bfloat16)(f)(x.bfloat16(), *rest),
}
DIRECT: dict[str, Any] = {
    **AUTOCAST,
    "plainly": lambda f, x, *rest: f(x, *rest),
    "no bias": lambda f, x, weight, scale, bias, none: f(x, weight, scale, None, none),
    "under no_grad, of what requires gradients": lambda f, x, *rest: torch.no_grad()(f)(x.requires_grad_(), *rest),
    "in inference mode": lambda f, x, *rest: torch.inference_mode()(f)(x, *rest),
    "of inference tensors": lambda f, x, *rest: f(torch.inference_mode()(x.clone)(), *rest),
    "of parameters": lambda f, x, *rest: f(nn.Parameter(x, requires_grad=False), *rest),
    "of a negative view": lambda f, x, *rest: f(torch.complex(x, -x).conj().imag, *rest),
    "with a residual": lambda f, x, *rest: f(x, *rest, torch.ones(5, 8, device=x.device)),
    "with a residual that is a negative view": lambda f, x, *rest: f(
        x, *rest, torch.ones(5, 8, device=x.device, dtype=torch.complex64).mul(1j).conj().imag
    ),
}


@pytest.mark.parametrize("how", DIRECT)
def test_a_call_past_the_dispatcher(how: str, direct: list[Any], device: torch.device) -> None:
    arguments = quant_linear_arguments(device)
    for _ in range(2):
        out = DIRECT[how](qgemm.ops.quant_linear, *arguments)
        wanted = DIRECT[how](ops.quant_linear, *arguments)
        assert torch.equal(out, wanted)
        assert (out.requires_grad, out.is_inference()) == (wanted.requires_grad, wanted.is_inference())
    assert len(direct) == 2


def within(context: Any, f: Any, *arguments: Any) -> Any:
    with context:
        return f(*arguments)


def forward_gradient(f: Any, x: Tensor, *rest: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), *rest)


WITH_GRADIENTS: dict[str, Any] = {
    "gradients of x": lambda f, x, *rest: f(x.requires_grad_(), *rest),
    "gradients of the bias": lambda f, x, weight, scale, bias, none: f(x, weight, scale, bias.requires_grad_(), none),
    "gradients of the residual": lambda f, x, *rest: f(x, *rest, torch.ones(5, 8, device=x.device, requires_grad=True)),
    "gradients under autocast": lambda f, x, *rest: AUTOCAST["autocast"](f, x.requires_grad_(), *rest),
    "gradients of the scale": lambda f, x, weight, scale, *rest: f(x, weight, scale.requires_grad_(), *rest),
}


@pytest.mark.parametrize("what", WITH_GRADIENTS)
def test_a_call_with_gradients_goes_past_the_dispatcher(what: str, direct: list[Any], device: torch.device) -> None:
    """To the implementation, once; and the gradients are those of the operator."""

    def result(f: Any) -> Any:
        torch.manual_seed(0)
        given: list[Any] = []

        def call(*arguments: Any) -> Tensor:
            given[:] = arguments
            out: Tensor = f(*arguments)
            return out

        out = WITH_GRADIENTS[what](call, *quant_linear_arguments(device))
        sources = [each for each in given if each is not None and each.requires_grad]
        try:
            return out, torch.autograd.grad(out.square().sum(), sources, create_graph=True)
        except RuntimeError as error:  # scales have none
            return out, str(error)

    (out, found), (wanted, grads) = result(qgemm.ops.quant_linear), result(ops.quant_linear)
    assert len(direct) == 1
    assert torch.equal(out, wanted)
    assert found == grads if isinstance(grads, str) else all(map(torch.equal, found, grads))


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8-block", "int4-32-asymmetric-ordered"])
def test_a_layer_can_be_differentiated_twice(scheme: str, device: torch.device) -> None:
    layer = linear_class(scheme).from_linear(nn.Linear(128, 128).to(device), scheme)
    x = torch.randn(3, 128, device=device, requires_grad=True)
    out = layer(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    weight = layer.dequantize().weight.detach()
    expected = 2 * out.detach() @ weight
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(again, 4 * (expected @ weight.T) @ weight)


SEEN_BY_OTHERS: dict[str, Any] = {
    "forward gradients": forward_gradient,
    "a function mode": lambda f, *rest: within(FunctionMode(), f, *rest),
    "a dispatch mode": lambda f, *rest: within(DispatchMode(), f, *rest),
    "a subclass": lambda f, x, *rest: f(x.as_subclass(Subclass), *rest).as_subclass(Tensor),
    "a subclass among the parameters": lambda f, x, w, *rest: f(x, w.as_subclass(Subclass), *rest).as_subclass(Tensor),
    "meta tensors": lambda f, *rest: torch.zeros(
        f(*(value if value is None else value.to("meta") for value in rest)).shape
    ),
    "torch.func": lambda f, x, *rest: torch.func.grad(lambda x: f(x, *rest).sum())(x),
    "functionalization": lambda f, x, *rest: torch.func.functionalize(lambda x: f(x, *rest))(x),
    "a trace": lambda f, x, *rest: torch.jit.trace(lambda x: f(x, *rest), x, check_trace=False)(x),
    "make_fx": lambda f, x, *rest: make_fx(lambda x: f(x, *rest))(x)(x),
    "make_fx with symbols": lambda f, *rest: make_fx(lambda *given: f(*given), tracing_mode="symbolic")(*rest)(*rest),
    "torch.compile": lambda f, *rest: torch.compile(lambda *rest: f(*rest), backend="eager", fullgraph=True)(*rest),
    "a profiler": lambda f, *rest: within(torch.profiler.profile(), f, *rest),
}


@pytest.mark.parametrize("what", SEEN_BY_OTHERS)
def test_a_call_that_others_see(what: str, direct: list[Any], device: torch.device) -> None:
    def result(f: Any) -> Any:
        torch.manual_seed(0)
        try:
            return SEEN_BY_OTHERS[what](f, *quant_linear_arguments(device))
        except (NotImplementedError, RuntimeError) as error:  # what the operator can't do: forward gradients
            return type(error)

    out, wanted = result(qgemm.ops.quant_linear), result(ops.quant_linear)
    assert not direct
    assert torch.equal(out, wanted) if isinstance(out, Tensor) else out is wanted


@pytest.fixture
def remembered(device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """A plan, and the arguments of the call that it is remembered for."""
    arguments = quant_linear_arguments(device)
    plans._guarded.clear()
    plans.remember(ops.quant_linear, *arguments)
    assert plans.recall(*arguments) is ops.quant_linear
    return ops.quant_linear, arguments


UNLIKE = WITH_GRADIENTS | SEEN_BY_OTHERS | AUTOCAST


@pytest.mark.parametrize("what", [what for what in UNLIKE if what != "torch.compile"])
def test_a_plan_is_not_recalled_for_a_call_that_others_see(what: str, remembered: tuple[Any, tuple[Any, ...]]) -> None:
    run, arguments = remembered
    found: list[Any] = []

    def call(*given: Any) -> Tensor:
        found.append(plans.recall(*given))
        out: Tensor = run(*given)
        return out

    with contextlib.suppress(NotImplementedError, RuntimeError):  # what the operator can't do: forward gradients
        UNLIKE[what](call, *arguments)
    assert found
    assert not any(found)


def test_a_plan_is_recalled_for_tensors_like_those_alone(
    remembered: tuple[Any, tuple[Any, ...]], device: torch.device
) -> None:
    run, (x, weight, scale, bias, none) = remembered
    assert plans.recall(torch.randn_like(x), weight.clone(), scale.clone(), bias.clone(), none) is run
    residual = torch.ones(5, 8, device=device)
    assert plans.recall(x, weight, scale, bias, none, residual) is None
    plans.remember(run, x, weight, scale, bias, none, residual)
    assert plans.recall(x, weight, scale, bias, none, residual.clone()) is run
    assert plans.recall(x, weight, scale, bias, none, residual.t().contiguous().t()) is None
    wide = torch.empty(x.shape[0], 2 * x.shape[1], device=device)
    for other in (
        (x[1:], weight, scale, bias, none),
        (x.half(), weight, scale, bias, none),
        (wide[:, ::2], weight, scale, bias, none),
        (x, weight.t().contiguous().t(), scale, bias, none),
        (x, weight, scale.double(), bias, none),
        (x, weight, scale, bias.half(), none),
        (x, weight, scale, None, none),
        (x, weight, scale, bias, scale[0]),
        (x.to("meta"), weight, scale, bias, none),
        (x.to_sparse(), weight, scale, bias, none),
        (nn.Parameter(x, requires_grad=False), weight, scale, bias, none),
    ):
        assert plans.recall(*other) is None


def test_a_call_on_the_cpu_is_remembered() -> None:
    x, weight, scale, bias, none = quant_linear_arguments(torch.device("cpu"))
    plans._guarded.clear()
    out = qgemm.ops.quant_linear(x, weight, scale, bias, none)
    assert plans.recall(x, weight, scale, bias, none) is cpu.quant_linear
    assert torch.equal(qgemm.ops.quant_linear(x, weight, scale, bias, none), out)
    # Anything else is checked as ever.
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        qgemm.ops.quant_linear(x.double(), weight, scale, bias, none)


def test_what_requires_gradients_is_recalled_without_them_alone(device: torch.device) -> None:
    x, *rest = quant_linear_arguments(device)
    plans._guarded.clear()
    plans.remember(ops.quant_linear, x.requires_grad_(), *rest)
    assert plans.recall(x, *rest) is None
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            plans.remember(ops.quant_linear, x, *rest)
            assert plans.recall(x, *rest) is ops.quant_linear
        assert plans.recall(x, *rest) is None
        assert plans.recall(x.detach(), *rest) is None


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-int8", "nvfp4", "fp8-block", "int4-32-asymmetric-ordered"])
def test_a_call_with_gradients_is_recalled(scheme: str, device: torch.device) -> None:
    """And only for a call like it, with the same gradients."""
    layer = linear_class(scheme).from_linear(nn.Linear(128, 128).to(device), scheme)
    found: list[Any] = []
    plans._guarded.clear()
    for _ in range(2):
        torch.manual_seed(0)
        x = torch.randn(3, 128, device=device, requires_grad=True)
        out = layer(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        kept = [run for (records, _), runs in plans._guarded.items() if records for _, run in runs]
        assert len(kept) == 1
    assert all(map(torch.equal, *found))
    plain = layer(x.detach())
    assert not plain.requires_grad
    assert torch.equal(plain, layer(x).detach())


def test_a_recalled_call_with_gradients_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again inside the autograd function."""
    x, *rest = quant_linear_arguments(torch.device("cpu"))
    plans._guarded.clear()
    out = qgemm.ops.quant_linear(x.requires_grad_(), *rest)
    looked: list[Any] = []
    monkeypatch.setattr(qgemm.ops.linear, "recall", lambda *call: looked.append(call) or plans.recall(*call))
    again = qgemm.ops.quant_linear(x, *rest)
    assert len(looked) == 1
    assert torch.equal(again, out)
    assert again.requires_grad


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(plans, "MAX_SIZES", 3)
    monkeypatch.setattr(plans, "MAX_GUARDS", 2)
    plans._guarded.clear()
    x, *rest = quant_linear_arguments(device)
    for rows in range(1, 8):
        some = x[:1].expand(rows, -1).contiguous()
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            plans.remember(ops.quant_linear, some.to(dtype), *rest)
            assert plans.recall(some.to(dtype), *rest) is ops.quant_linear
        assert len(plans._guarded) <= 3
        assert all(len(found) <= 2 for found in plans._guarded.values())


def guards_that_want_more(*tensors: Tensor) -> None:
    """Those of another PyTorch."""


@pytest.mark.parametrize("guards", [None, guards_that_want_more, lambda *tensors, **dims: object()])
def test_without_pytorch_s_guards_nothing_is_recalled(
    guards: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(plans, "_Guards", guards)
    plans._guarded.clear()
    arguments = quant_linear_arguments(device)
    plans.remember(ops.quant_linear, *arguments)
    assert plans.recall(*arguments) is None


def test_a_profile_names_the_operator(device: torch.device) -> None:
    arguments = quant_linear_arguments(device)
    with torch.profiler.profile() as profile:
        qgemm.ops.quant_linear(*arguments)
    assert "qgemm::quant_linear" in {event.name for event in profile.events()}


def test_the_same_errors_past_the_dispatcher(device: torch.device) -> None:
    x, weight, scale, bias, _ = quant_linear_arguments(device)
    for wrong in (
        (x.double(), weight, scale, bias, None),
        (x[:, :-1], weight, scale, bias, None),
        (x, weight.float(), scale, bias, None),
        (x, weight, scale[:-1], bias, None),
        (x, weight, scale, bias[:-1], None),
        (x, weight, scale, bias, scale),
        (x, weight.to("meta"), scale, bias, None),
        (x.to("meta"), weight, scale, bias, None),
        (x, weight, scale, bias.to("meta"), None),
    ):
        with pytest.raises((TypeError, ValueError)) as one:
            qgemm.ops.quant_linear(*wrong)
        with pytest.raises((TypeError, ValueError)) as other:
            ops.quant_linear(*wrong)
        assert (one.type, str(one.value)) == (other.type, str(other.value))
