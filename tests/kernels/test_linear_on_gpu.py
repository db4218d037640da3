"""``quant_linear``, what only a GPU has: the driver, CUDA graphs, streams, threads, a profiler, two devices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.one_layer import K, Parameters, on_cpu, plans, wrong_in_threads  # noqa: F401

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_gpu
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_launch_is_the_driver_s(
    bias: bool, static: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Parameters(device, 256, 256, static=static, bias=bias)
    x = torch.randn(1, 256, device=device)
    layer(x)
    (plan,) = plans()
    assert len(plan.usual.steps) == 1
    (step,) = plan.usual.steps
    assert step.launch.aligned is not None
    monkeypatch.setattr(type(step.launch), "__call__", lambda *_: pytest.fail("by way of Triton"))
    assert torch.equal(layer(x), layer.expected(x))


@needs_gpu
def test_launches_are_the_driver_s(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on; without this the tests here could pass by Triton's launcher alone."""
    layer = Parameters(device, 256, 256)
    x = torch.randn(512, 256, device=device)
    layer(x)
    (plan,) = plans()
    assert len(plan.usual.steps) == 2
    for step in plan.usual.steps:
        assert step.launch.aligned is not None
        monkeypatch.setattr(type(step.launch), "__call__", lambda *_: pytest.fail("by way of Triton"))
    assert torch.equal(layer(x), layer.expected(x))


@needs_gpu
@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_weights_that_change_right_ahead_of_the_call(m: int, device: torch.device) -> None:
    # Their product is launched before what is ahead in the stream has ended.
    layer = Parameters(device, 8192, 4096)
    x = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
    weights = [layer.weight.clone(), torch.randint_like(layer.weight, -127, 128)]
    expected = []
    for weight in weights:
        layer.weight.copy_(weight)
        expected.append(layer(x))
        assert torch.equal(expected[-1], layer.expected(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for i in range(20):
            torch.add(weights[i % 2], 0, out=layer.weight)  # a kernel, where copy_ would be none
            outs.append(layer(x))
    graph.replay()
    for i, out in enumerate(outs):
        assert torch.equal(out, expected[i % 2])


@needs_gpu
@pytest.mark.parametrize("m", [1, 16, 300])
def test_graphs(m: int, device: torch.device) -> None:
    layer = Parameters(device, 528, 1024)
    x = torch.randn(m, 1024, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(x)  # PyTorch's rule: a warm-up on another stream
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, layer.expected(x))
    layer.weight.neg_()
    graph.replay()
    assert torch.equal(out, layer.expected(x)), "a graph reads the parameters that are there when it is replayed"


@needs_gpu
def test_a_graph_captured_before_anything_is_compiled(device: torch.device) -> None:
    layer = Parameters(device, 200, 456)  # no other test's sizes
    x = torch.randn(7, 456, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, layer.expected(x))


@needs_gpu
def test_streams(device: torch.device) -> None:
    """Work goes to the current stream: it waits for what is ahead there, and for nothing on another one."""
    layer = Parameters(device, 512, 512)
    layers = [(layer, torch.cuda.Stream()) for _ in range(3)]
    inputs = [torch.randn(64, 512, device=device) for _ in layers]
    torch.cuda.synchronize()
    layer(inputs[0])
    outs: list[Tensor] = []
    torch.cuda.synchronize()
    for (current, stream), x in zip(layers, inputs, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.mul_(2)  # behind the sleep: a launch on another stream would read the old values
            outs.append(current(x))
    torch.cuda.synchronize()
    for x, out in zip(inputs, outs, strict=True):
        assert torch.equal(out, layer.expected(x))


@needs_gpu
def test_threads(device: torch.device) -> None:
    """Threads with streams of their own, through the same plans and through different ones."""
    inputs = [torch.randn(1 + m % 5, 512, device=device) for m in range(16)]
    assert not wrong_in_threads(Parameters(device, 256, 512), inputs, own_streams=True)


@needs_gpu
@pytest.mark.parametrize(
    ("m", "kernels"), [(1, ["_quant_linear_kernel"]), (512, ["_quantize_rows_kernel", "_gemm_kernel"])]
)
def test_a_profiler_s_hooks_are_called(m: int, kernels: list[str], device: torch.device) -> None:
    import triton

    layer = Parameters(device, 256, 256)
    x = torch.randn(m, 256, device=device)
    layer(x)
    names: list[str] = []

    def hook(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        out = layer(x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == kernels
    assert torch.equal(out, layer.expected(x))
    layer(x)
    assert len(names) == len(kernels)


@needs_two_gpus
def test_devices() -> None:
    """Each tensor's own device, whichever is current."""
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        layer = Parameters(device)
        x = torch.randn(5, K, device=device)
        for current in (0, 1):
            with torch.cuda.device(current):
                for _ in range(3):
                    out = layer(x)
                    assert torch.cuda.current_device() == current
                assert out.device == device
                assert torch.equal(out, layer.expected(x))
