"""``RecalledLaunch``: what the driver is given, by CPU tensors; and on a GPU operators by it, bit for bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels.launch import memory, plans, recalled
from qgemm.kernels.launch.recalled import RecalledLaunch
from qgemm.kernels.norms import Norm
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.ops import norms, rotary
from qgemm.ops.linear import multiply
from qgemm.ops.router import router_logits
from qgemm.ops.rows import activate, activation_quantize, gate_heads, xielu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """The launches: stream and pointers."""
    seen: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(memory, "empty", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
    return seen


def aligned(*shape: int) -> Tensor:
    values = torch.zeros(torch.Size(shape).numel() + 4)
    start = -values.data_ptr() % 16 // 4
    return values[start : start + torch.Size(shape).numel()].view(shape)


def launch_into(seen: list[Any]) -> Any:
    return SimpleNamespace(aligned=lambda *given: seen.append(given))


def test_the_driver_is_given_the_tensors_in_the_kernel_s_order(on_cpu: list[Any]) -> None:
    x, weight, total, scale = aligned(2, 8), aligned(8), aligned(2, 8), aligned(2)
    run = RecalledLaunch.of(launch_into(on_cpu), (weight, None, scale, x, total), (x, weight), (total, scale))
    other_x, other_weight = aligned(2, 8), aligned(8)
    made = run((other_x, other_weight))
    assert [(each.shape, each.dtype) for each in made] == [(total.shape, total.dtype), (scale.shape, scale.dtype)]
    wanted = (other_weight, made[1], other_x, made[0])
    assert on_cpu == [(7, tuple(each.data_ptr() for each in wanted))]


def test_what_no_such_launch_is_for(on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = aligned(2, 8), aligned(2, 8)
    launch = launch_into(on_cpu)
    assert RecalledLaunch.of(launch, (x.clone(), out), (x,), (out,)) is None  # a copy was made
    assert RecalledLaunch.of(SimpleNamespace(aligned=None), (x, out), (x,), (out,)) is None
    assert RecalledLaunch.of(launch, (x, x), (x,), (x,)) is None  # in place
    run = RecalledLaunch.of(launch, (x, out), (x,), (out,))
    assert run((aligned(17)[1:].view(2, 8),)) is None
    monkeypatch.setattr(recalled, "hooked", lambda: True)
    assert run((x,)) is None
    monkeypatch.setattr(recalled, "hooked", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    assert run((x,)) is None
    assert not on_cpu


def calls(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    weight, bias = (torch.randn(256, device=device).to(dtype) for _ in range(2))
    scale = torch.tensor(0.02, device=device)
    w, w_scale = torch.ops.qgemm.quantize_rows(torch.randn(64, 256, device=device), None)
    norm, layer = Norm("rms", 1e-5), Norm("layer", 1e-5)
    turns, k, v = torch.rand(2, 5, 8, device=device), *torch.zeros(2, 2, 4, 9, 16, device=device).to(dtype)
    rotated = lambda x: RotaryCall(x, *turns[:, None], None, weight[:16], "rms", 1e-5, 8, 4, True)  # noqa: E731
    positions, coefficients = torch.arange(5, device=device)[None] * 40, Coefficients(*weight[:64].view(4, 16)[:, :1])
    of_heads = lambda x: x.unflatten(-1, (8, 32))  # noqa: E731
    rows = torch.ops.qgemm.quantize_rows(torch.randn(2, 5, 256, device=device), None)
    return {
        "norm_quantize": lambda x, r: norms.norm_quantize(x, weight, None, norm),
        "norm_quantize static": lambda x, r: norms.norm_quantize(x, weight, bias, layer, scale),
        "add_norm_quantize": lambda x, r: norms.add_norm_quantize(x, r, None, weight, None, norm),
        "add_norm_quantize branch": lambda x, r: norms.add_norm_quantize(x, r, weight, bias, None, norm),
        "add_norm_quantize sum": lambda x, r: norms.add_norm_quantize(x, r, None, None, None, norm),
        "add_norm_quantize fp8": lambda x, r: norms.add_norm_quantize(
            x, r, None, weight, None, norm, None, torch.float8_e4m3fn
        ),
        "add_norm": lambda x, r: norms.add_norm(x, r, None, weight, None, norm),
        "add_norm branch": lambda x, r: norms.add_norm(x, r, weight, None, None, norm)[0],
        "add_norm factors": lambda x, r: norms.add_norm(x, r, None, None, None, norm, None, 0.5, bias[:1])[0],
        "add_norm_quantize factor": lambda x, r: norms.add_norm_quantize(x, r, None, weight, None, norm, factor=0.5),
        "router_logits": lambda x, r: router_logits(x[0], r[0], bias[:5], torch.float32),
        "add_norm alone": lambda x, r: norms.add_norm(x, None, None, weight, bias, layer)[1],
        "activate": lambda x, r: activate(x, "gelu_tanh", True),
        "post_norm": lambda x, r: norms.post_norm(x, r, weight, bias, layer),
        "post_norm_quantize": lambda x, r: norms.post_norm_quantize(x, r, weight, bias, layer),
        "activation_quantize": lambda x, r: activation_quantize(x, "silu", True),
        "activation_quantize ups first": lambda x, r: activation_quantize(x, "gelu", True, up_first=True),
        "activation_quantize plain": lambda x, r: activation_quantize(x, "gelu", False, scale),
        "gate_heads": lambda x, r: gate_heads(of_heads(x), of_heads(r), "sigmoid"),
        "gate_heads each": lambda x, r: gate_heads(of_heads(x), of_heads(r)[..., :1], "softplus"),
        "xielu": lambda x, r: xielu(x, coefficients),
        "rotate": lambda x, r: rotary.rotate(rotated(x)),
        "rotate factors": lambda x, r: rotary.rotate(
            rotated(x)._replace(scale=0.3, period=16.0, growth=0.1, positions=positions)
        ),
        "rotate by head": lambda x, r: rotary.rotate(
            RotaryCall(x[..., :240], *turns[:, None], None, None, "rms", 0.0, 5, 5, False, layout="by head")
        ),
        "rotate_and_store": lambda x, r: (
            rotary.rotate_and_store(rotated(x), KeyValueStore(k[:, :, 1:6], v[:, :, 1:6], None, None, None)),
            k.clone(),
            v.clone(),
        ),
        "multiply": lambda x, r: multiply(*rows, w, w_scale, None, None, dtype),
        "multiply all": lambda x, r: multiply(*rows, w, w_scale, bias[:64], r[..., :64].contiguous(), dtype),
    }


NAMES = list(calls(torch.device("cpu"), torch.float32))


def tensors_of(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_operators_by_it(name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = calls(device, dtype)[name], []
    run = RecalledLaunch.__call__

    def record(self: RecalledLaunch, given: tuple[Tensor, ...]) -> Any:
        made.append(out := run(self, given))
        return out

    monkeypatch.setattr(RecalledLaunch, "__call__", record)
    plans._guarded.clear()
    x, residual = (torch.randn(2, 5, 256, device=device).to(dtype) for _ in range(2))
    with torch.no_grad():
        first = tensors_of(call(x, residual))
        assert not made
        again = tensors_of(call(x.clone(), residual.clone()))
        assert len(made) == 1
        others = torch.randn_like(x), torch.randn_like(residual)
        found = tensors_of(call(*others))
        assert len(made) == 2
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = tensors_of(call(*others))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tensors_of(call(*others))
        graph.replay()
        assert len(made) == 4
        # Of memory that isn't aligned, of other strides, and of more rows: computed as ever.
        odd = torch.empty(x.numel() + 1, device=device, dtype=dtype)[1:].view(x.shape).copy_(others[0])
        unaligned = tensors_of(call(odd, others[1]))
        strided = tensors_of(call(others[0].mT.contiguous().mT, others[1]))
        plans._guarded.clear()
        wanted = tensors_of(call(*others))
    for result in (again, found, elsewhere, captured, unaligned, strided):
        for one, other in zip(result, first if result is again else wanted, strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one.float(), other.float())
    assert len({*(each.data_ptr() for each in (*again, *found))}) == 2 * len(first)


@needs_gpu
def test_others_see_calls_as_ever(device: torch.device) -> None:
    x, residual = (torch.randn(2, 5, 256, device=device) for _ in range(2))
    weight = torch.ones(256, device=device)
    call = lambda x: norms.post_norm(x, residual, weight, None, Norm())  # noqa: E731
    call(x)
    call(x)
    tracked = x.clone().requires_grad_()
    call(tracked).sum().backward()
    assert tracked.grad is not None
    with torch.profiler.profile() as profile:
        call(x)
    assert "qgemm::post_norm" in {event.name for event in profile.events()}
    with torch.autocast("cuda"):
        assert torch.equal(call(x), call(x.clone()))
