"""``quant_linear`` on a GPU: the plan that calls of a kind share, and where it runs.

Without a GPU the launches run in Triton's interpreter, on CPU tensors, with stand-ins for what asks CUDA for a device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels.launch import memory
from qgemm.kernels.launch import plans as launch_plans
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.linear import launcher as linear
from qgemm.kernels.reference import quantize_rows_reference
from tests.kernels.devices import H200, RTX_3090
from tests.kernels.one_layer import K, N, Parameters, on_cpu, plans  # noqa: F401


@pytest.mark.slow(quick=["5-dtype1"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_reference_s_bits_every_time(
    m: int, dtype: torch.dtype, bias: bool, static: bool, device: torch.device
) -> None:
    layer = Parameters(device, static=static, bias=bias)
    for _ in range(3):  # compiled, then by the plan
        x = torch.randn(m, K, device=device).to(dtype)
        assert torch.equal(layer(x), layer.expected(x))
    assert len(plans()) == 1


# A whole block of K, more than one, a tail, rows that 16 bytes don't divide; tiles that stick out.
@pytest.mark.slow(quick=["32-512"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(32, 512), (40, 1024), (33, 1300), (7, 1535), (100, 2048)])
def test_one_row_in_one_launch(n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    layer = Parameters(device, n, k)
    for scale in (0.0, 1e-30, 1.0, 1e30):  # float16 rounds the second to zeros; the last one has Inf there
        x = (torch.randn(1, k, device=device) * scale).to(dtype)
        assert torch.allclose(layer(x), layer.expected(x), rtol=0, atol=0, equal_nan=True), scale
    (plan,) = plans()
    assert len(plan.usual.steps) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_row_with_nan_or_inf_gives_nan(value: float, device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(1, K, device=device)
    assert layer(x).isfinite().all()
    x[0, 3] = value
    assert layer(x).isnan().all()


def test_one_row_of_any_strides(device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(K, 3, device=device)
    for row in (x[:, 1], x.t()[1:2], x.t()[None, 2:], torch.randn(1, 1, device=device).expand(1, K)):
        for _ in range(2):
            assert torch.equal(layer(row), layer.expected(row))
    assert all(len(plan.usual.steps) == 1 for plan in plans())


def test_programs_quantize_the_row_into_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    buffers = []
    empty = memory.empty

    def kept(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = empty(shape, strides, dtype)
        if dtype == torch.int8:
            buffers.append(out)
            out.zero_ = lambda: out.fill_(-128)  # type: ignore[method-assign]
        return out

    monkeypatch.setattr(memory, "empty", kept)
    layer = Parameters(device, n=100, k=67)
    x = torch.randn(1, 67, device=device)
    layer(x)
    q, scale = quantize_rows_reference(x)
    parts = buffers[0][memory.COUNTS_BYTES :].view(
        4, 128
    )  # one for each tile of 32 columns; 80 + 4 bytes fill a cache line
    assert torch.equal(parts[:, :67], q.expand(4, 67))
    assert torch.equal(parts[:, 80:84].contiguous().view(torch.float32), scale.expand(4, 1))
    assert (parts[:, 67:80] == -128).all()
    assert (parts[:, 84:] == -128).all()


@pytest.mark.parametrize(
    ("n", "k", "itemsize", "limits", "one"),
    [
        (4096, 4096, 2, H200, True),
        (4224, 4096, 2, H200, True),
        (4225, 4096, 2, H200, False),  # more tiles than multiprocessors
        (1024, linear.MAX_FUSED_ROW_BYTES // 2, 2, H200, True),
        (1024, linear.MAX_FUSED_ROW_BYTES // 2 + 1, 2, H200, False),
        (1024, linear.MAX_FUSED_ROW_BYTES // 2, 4, H200, False),
        (1024, 0, 2, H200, False),
        (1024, 1024, 2, RTX_3090, False),
    ],
)
def test_when_one_launch_is_made(n: int, k: int, itemsize: int, limits: DeviceLimits, one: bool) -> None:
    assert linear.fits_fused_kernel(n, k, itemsize, limits) == one


def test_several_rows_are_two_launches(device: torch.device) -> None:
    layer = Parameters(device)
    layer(torch.randn(2, K, device=device))
    (plan,) = plans()
    assert len(plan.usual.steps) == 2


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a vector": lambda x: x[0, 0],
    "two dimensions": lambda x: x[0],
    "three dimensions": lambda x: x,
    "one row": lambda x: x[0, :1],
    "no rows": lambda x: x[0, :0],
    "no rows, three dimensions": lambda x: x[:, :0],
    "rows apart": lambda x: x[0, ::2],
    "what can't be viewed as rows": lambda x: x.transpose(0, 1),
    "columns first": lambda x: x[0].t().contiguous().t(),
    "one row for all": lambda x: x[:1, :1].expand(4, 3, K),
}


@pytest.mark.parametrize("view", SHAPES.values(), ids=SHAPES)
def test_shapes_and_strides(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    layer = Parameters(device)
    for _ in range(3):
        x = view(torch.randn(3, 6, K, device=device))
        out = layer(x)
        assert out.shape == (*x.shape[:-1], N)
        assert out.is_contiguous()
        assert torch.equal(out, layer.expected(x))


def test_strides_of_the_same_shape_are_told_apart(device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(3, 6, K, device=device)
    for same in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, x[:1].expand(3, 6, K)):
        assert torch.equal(layer(same), layer.expected(same))


@pytest.mark.parametrize(("n", "k"), [(0, 8), (8, 0), (1, 1), (3, 17)])
def test_degenerate_sizes(n: int, k: int, device: torch.device) -> None:
    layer = Parameters(device, n, k)
    for _ in range(2):
        x = torch.randn(5, k, device=device)
        assert torch.equal(layer(x), layer.expected(x))


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("m", [1, 6])
def test_residuals(m: int, device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(m, 2, K, device=device)[:, :1].bfloat16()
    product, wide = layer(x), torch.randn(m, 3, N + 24, device=device).bfloat16()
    for residual in (
        wide[:, :1, :N].contiguous(),  # as the output lies
        wide[:, 1:2, 3 : N + 3],  # rows apart
        wide.permute(2, 1, 0).contiguous().permute(2, 1, 0)[:, :1, :N],  # columns apart: copied
        wide[:1, :1, :1].expand(m, 1, N),
    ):
        for _ in range(2):
            assert torch.equal(layer(x, residual), product + residual)
    assert torch.equal(layer(x), product)
    for wrong in (residual.float(), residual[..., 1:], residual[:, 0]):
        with pytest.raises(ValueError, match=r"residual is .* it must be torch.bfloat16"):
            layer(x, wrong)


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("m", [1, 5])
def test_unaligned_pointers_after_aligned_ones(m: int, device: torch.device) -> None:
    layer = Parameters(device)
    memory = torch.randn(m * K + 8, device=device)
    for offset in (0, 1, 0, 2, 1, 4):  # 16 bytes are 4 values
        x = memory[offset : offset + m * K].view(m, K)
        assert torch.equal(layer(x), layer.expected(x)), offset
    assert len(plans()) == 1, "the address of x is no part of a plan"
    layer.bias = torch.randn(N + 1, device=device)[1:]
    assert torch.equal(layer(x), layer.expected(x))
    weights = torch.randint(-127, 128, (N * K + 16,), dtype=torch.int8, device=device)
    for offset in (0, 1, 0, 8, 16):
        layer.weight = weights[offset : offset + N * K].view(N, K)
        assert torch.equal(layer(x), layer.expected(x)), offset


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("m", [1, 5])
def test_parameters_may_be_replaced(m: int, device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(m, K, device=device)
    layer(x)
    for replace in (
        lambda: setattr(layer, "weight", torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)),
        lambda: layer.weight.copy_(-layer.weight),
        lambda: setattr(layer, "weight", layer.weight.t().contiguous().t()),
        lambda: setattr(layer, "weight_scale", torch.rand(2 * N, device=device)[::2]),
        lambda: setattr(layer, "weight_scale", torch.tensor(0.5, device=device)),
        lambda: setattr(layer, "weight_scale", torch.tensor(0.25, device=device).expand(N)),
        lambda: setattr(layer, "bias", torch.randn(2 * N, device=device)[::2]),
        lambda: setattr(layer, "bias", layer.bias.half()),
        lambda: setattr(layer, "bias", None),
        lambda: setattr(layer, "input_scale", torch.tensor(0.1, device=device)),
    ):
        replace()
        for _ in range(2):
            assert torch.equal(layer(x), layer.expected(x))


def test_memory_of_another_dtype_in_the_same_place_is_noticed(device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(5, K, device=device)
    layer(x)
    for name, wrong, message in (
        ("weight", layer.weight.view(torch.uint8), "weight is torch.uint8; it must be one of int8, float8_e4m3fn"),
        ("weight_scale", layer.weight_scale.view(torch.int32), "weight_scale is torch.int32; scales are torch.float32"),
        ("bias", layer.bias.view(torch.int32), "bias is torch.int32; it must be one of float16"),
        ("bias", layer.bias[:-1], r"bias is \[39\]; it must be \[40\]"),
        ("weight", layer.weight[:, :-1], "x has 64 columns but the layer's in_features is 63"),
        # Only what is on a GPU gets here otherwise; the number of meta is that of the CPU.
        *([("weight", layer.weight.to("meta"), "x is on .* but weight is on meta")] if device.type == "cuda" else []),
    ):
        right = getattr(layer, name)
        setattr(layer, name, wrong)
        for _ in range(2):  # a refusal isn't remembered as a plan
            with pytest.raises((TypeError, ValueError), match=message):
                layer(x)
        setattr(layer, name, right)
    assert torch.equal(layer(x), layer.expected(x))


def test_sparse_tensors_are_refused(device: torch.device) -> None:
    layer = Parameters(device)
    x = torch.randn(5, K, device=device)
    layer(x)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(ValueError, match=r"x is torch.sparse_(coo|csr); it must be a dense tensor"):
            layer(sparse)


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(launch_plans, "MAX_PLANS", 3)
    layer = Parameters(device)
    for m in range(1, 9):
        x = torch.randn(m, K, device=device)
        assert torch.equal(layer(x), layer.expected(x))
        assert len(plans()) <= 3


@pytest.mark.slow
def test_a_workspace_is_given(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A Stream-K kernel, which adds into zeros, runs by the plan too."""
    from qgemm.kernels.gemm import config
    from qgemm.kernels.gemm import launcher as gemm

    def streamk(*arguments: Any) -> config.GemmConfig:
        return config.GemmConfig(16, 16, 32, num_warps=2, num_stages=2, schedule="streamk")

    monkeypatch.setattr(gemm, "select_config", streamk)
    monkeypatch.setattr(gemm, "plans", PlanCache())
    layer = Parameters(device)
    for _ in range(3):
        x = torch.randn(5, K, device=device)
        assert torch.equal(layer(x), layer.expected(x))
    (plan,) = plans()
    assert isinstance(plan.usual.steps[1].launch, gemm.StreamKLaunch)


# On a GPU


def test_a_plan_that_is_recalled_refuses_a_weight_that_it_is_not_for(device: torch.device) -> None:
    # What finds it compares no addresses.
    layer = Parameters(device)
    x = torch.randn(5, K, device=device)
    layer(x)
    (plan,) = plans()
    assert plan.aligned
    layer.weight = torch.empty(N * K + 1, dtype=torch.int8, device=device)[1:].view(N, K).copy_(layer.weight)
    assert plan.run(x, layer.weight, layer.weight_scale, layer.bias, None) is None
    assert torch.equal(layer(x), layer.expected(x))
    assert len(plans()) == 2
