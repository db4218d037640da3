"""A linear layer of small sizes, and launches of its own for each test, without a GPU in Triton's interpreter."""

import contextlib
import threading

import pytest
import torch
from torch import Tensor

from qgemm.kernels.launch import memory
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.linear import launcher as linear
from qgemm.kernels.linear.launcher import LinearPlan, quant_linear
from qgemm.kernels.reference import quantize_rows_reference, scaled_mm_reference

N, K = 40, 64


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "plans", PlanCache())
    memory._stream_buffers.clear()
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        monkeypatch.setattr(memory, "_on_stream", lambda device, stream: contextlib.nullcontext())
        monkeypatch.setattr(memory, "is_capturing", lambda: False)
        monkeypatch.setattr(memory, "empty", lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))


def plans() -> list[LinearPlan]:
    """Those of layers."""
    return list(linear.plans.values())


class Parameters:
    """Of a layer."""

    def __init__(self, device: torch.device, n: int = N, k: int = K, static: bool = False, bias: bool = True) -> None:
        self.weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        self.weight_scale = torch.rand(n, device=device)
        self.bias = torch.randn(n, device=device) if bias else None
        self.input_scale = torch.tensor(0.03, device=device) if static else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return quant_linear(x, self.weight, self.weight_scale, self.bias, self.input_scale, residual)

    def expected(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        q, scale = quantize_rows_reference(rows, self.input_scale)
        out = scaled_mm_reference(q, self.weight.t(), scale, self.weight_scale, self.bias, x.dtype)
        return out.view(*x.shape[:-1], -1) if out.numel() else out.view(*x.shape[:-1], self.weight.shape[0])


def wrong_in_threads(layer: Parameters, inputs: list[Tensor], own_streams: bool) -> list[object]:
    """What goes wrong where each input has a thread, on a stream of its own or all on one."""
    expected = [layer.expected(x) for x in inputs]
    torch.cuda.synchronize()
    start = threading.Barrier(len(inputs))
    wrong: list[object] = []

    def work(x: Tensor, wanted: Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if own_streams else contextlib.nullcontext():
                start.wait(60)
                for _ in range(200):
                    if not torch.equal(layer(x), wanted):
                        wrong.append(x.shape)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
