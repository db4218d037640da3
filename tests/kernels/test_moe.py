"""Experts: against their specification, and that against float64; every way tokens may be routed.

The kernels run in Triton's interpreter here, compiled on a GPU; ``cpu.py``'s way to the same numbers runs everywhere.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import GPT_OSS, GatedActivation, dispatch, quantize_rows
from qgemm.kernels import experts as public_experts
from qgemm.kernels.activation import launcher as activate
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.kernels.launch import plans as launch_plans
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.moe import launcher as experts_launch
from qgemm.kernels.reference import experts_reference
from qgemm.numerics.formats import FP8, INT8

Experts = Callable[..., Tensor]

SILU = GatedActivation()
ACTIVATIONS = [
    SILU,
    GPT_OSS,
    GatedActivation("gelu"),
    GatedActivation("gelu_tanh", limit=1.5),
    GatedActivation("relu"),
    GatedActivation("relu2", gated=False),
    GatedActivation("silu", gated=False, limit=0.5),
]


def as_value(**arguments: Any) -> dict[str, Any]:
    """The arguments of ``dispatch.experts`` as those below it take them."""
    weights = ExpertWeights(**{name: arguments.pop(name) for name in ExpertWeights._fields})
    return {**arguments, "weights": weights}


def kernel_experts(**arguments: Any) -> Tensor:
    return experts_launch.experts(**as_value(**arguments))


FUNCTIONS = pytest.mark.parametrize("function", [public_experts, kernel_experts], ids=["dispatch", "kernels"])


def layer(
    T: int = 3,
    top_k: int = 2,
    E: int = 5,
    H: int = 48,
    intermediate: int = 40,
    dtype: torch.dtype = torch.bfloat16,
    activation: GatedActivation = SILU,
    bias: bool = False,
    device: torch.device | str = "cpu",
    form: torch.dtype = INT8.storage,
    blocks: bool = False,
) -> dict[str, Any]:
    """Arguments of ``experts`` with random values and routing; ``form``, ``blocks``: of weights and their scales."""
    columns = activation.columns(intermediate)
    gate_up, gate_up_scale = quantize_rows(torch.randn(E, columns, H, device=device) / H**0.5, dtype=form)
    down, down_scale = quantize_rows(torch.randn(E, H, intermediate, device=device) / intermediate**0.5, dtype=form)
    if blocks:
        gate_up_scale, down_scale = (
            (1 + torch.rand(E, *(-(-size // 128) for size in weight.shape[1:]), device=device)) * 0.002
            for weight in (gate_up, down)
        )
    return {
        "x": torch.randn(T, H, device=device).to(dtype),
        "top_k_index": torch.rand(T, E, device=device).topk(min(top_k, E)).indices
        if E
        else torch.zeros(T, top_k, dtype=torch.int64, device=device),
        "top_k_weights": torch.rand(T, min(top_k, E) if E else top_k, device=device),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "gate_up_bias": torch.randn(E, columns, device=device).to(dtype) if bias else None,
        "down": down,
        "down_scale": down_scale,
        "down_bias": torch.randn(E, H, device=device).to(dtype) if bias else None,
        "activation": activation,
    }


def assert_close(out: Tensor, arguments: dict[str, Any], most: float | None = None) -> None:
    """As the specification, but for values that another ``exp`` rounds to another step of int8, or of the dtype."""
    expected = experts_reference(**as_value(**arguments))
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    if expected.numel():
        difference = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        assert difference <= (most or (3e-3 if out.dtype == torch.bfloat16 else 1e-3))


def float_experts(arguments: dict[str, Any]) -> Tensor:
    """The layer in float64, from the dequantized weights: nothing is rounded between."""
    a = arguments
    gate_up = a["gate_up"].double() * a["gate_up_scale"].double()[..., None]
    down = a["down"].double() * a["down_scale"].double()[..., None]
    x, activation = a["x"].double(), a["activation"]
    out = torch.zeros_like(x)
    for (t, j), expert in zip(
        itertools.product(*map(range, a["top_k_index"].shape)), a["top_k_index"].flatten().tolist(), strict=True
    ):
        if 0 <= expert < len(down):
            g = gate_up[expert] @ x[t] + (0 if a["gate_up_bias"] is None else a["gate_up_bias"][expert].double())
            y = down[expert] @ activation(g).double() + (
                0 if a["down_bias"] is None else a["down_bias"][expert].double()
            )
            out[t] += a["top_k_weights"][t, j].double() * y
    return out


@pytest.mark.slow(quick=["torch.float32-kernels"])
@FUNCTIONS
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [*((activation, torch.bfloat16) for activation in ACTIVATIONS), (SILU, torch.float16), (GPT_OSS, torch.float32)],
    ids=str,
)
def test_activations_and_dtypes(
    activation: GatedActivation, dtype: torch.dtype, function: Experts, device: torch.device
) -> None:
    arguments = layer(dtype=dtype, activation=activation, bias=activation is not SILU, device=device)
    assert_close(function(**arguments), arguments)


@FUNCTIONS
@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(
    ("T", "activation", "bias", "dtype"),
    [
        (3, SILU, False, torch.bfloat16),
        (3, GPT_OSS, True, torch.float32),
        (12, GatedActivation("relu2", gated=False), True, torch.float16),  # counted in chunks
    ],
)
def test_fp8(
    T: int,
    activation: GatedActivation,
    bias: bool,
    dtype: torch.dtype,
    blocks: bool,
    function: Experts,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_launch, "MAX_PAIRS_TO_COUNT", 16)
    monkeypatch.setattr(experts_launch, "plans", PlanCache())
    # Sizes that Hopper's kernel takes; of blocks, the last have 16 and 32 values.
    sizes = {"H": 144, "intermediate": 160} if blocks else {"H": 48, "intermediate": 32}
    options: dict[str, Any] = {"activation": activation, "bias": bias, "dtype": dtype, "device": device, **sizes}
    arguments = layer(T=T, form=FP8.storage, blocks=blocks, **options)
    arguments["x"][T // 2] = 0
    arguments["top_k_index"][0, 0] = 5  # of no expert
    # A sum with other bits may be rounded to another value of e4m3, of which neighbours are 6 to 12 % apart.
    assert_close(function(**arguments), arguments, 2e-2 if device.type == "cuda" else None)
    arguments["x"][1, 7] = torch.nan
    assert function(**arguments).isnan().any(-1).tolist() == [t == 1 for t in range(T)]


@FUNCTIONS
@pytest.mark.parametrize(("T", "E"), [(3, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_residual_is_added_to_the_rounded_sum(
    T: int, E: int, dtype: torch.dtype, function: Experts, device: torch.device
) -> None:
    arguments = layer(T=T, E=E, dtype=dtype, device=device)
    residual = torch.randn(T, 96, device=device).to(dtype)[:, ::2]
    expected = residual + function(**arguments)
    out = function(**arguments, residual=residual)
    assert torch.equal(out, expected)
    assert out.data_ptr() != residual.data_ptr() or not T


def test_a_residual_of_another_kind_is_refused(device: torch.device) -> None:
    arguments = layer(device=device)
    with pytest.raises(ValueError, match=r"residual is torch.bfloat16 \[2, 48\]; it must be torch.bfloat16 \[3, 48\]"):
        public_experts(**arguments, residual=arguments["x"][:2])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_specification_against_float64(activation: GatedActivation) -> None:
    arguments = layer(T=20, H=256, intermediate=192, dtype=torch.float32, activation=activation, bias=True)
    exact = float_experts(arguments)
    out = experts_reference(**as_value(**arguments))
    # Two quantizations of rows to int8, each of which makes about 0.008 on such data.
    assert (out - exact).norm() / exact.norm() < 0.02


@FUNCTIONS
@pytest.mark.parametrize(
    ("T", "top_k", "E"),
    [
        (0, 2, 4),
        (1, 1, 1),
        (1, 2, 4),  # a row for an expert
        (2, 4, 4),  # every token to every expert
        (40, 1, 2),  # several tiles an expert
        (3, 3, 130),  # most experts are empty; not a power of 2
        (5, 0, 4),
        (4, 2, 0),
    ],
)
def test_sizes(T: int, top_k: int, E: int, function: Experts, device: torch.device) -> None:
    arguments = layer(T, top_k, E, device=device)
    assert_close(function(**arguments), arguments)


@FUNCTIONS
@pytest.mark.parametrize(("H", "intermediate"), [(1, 1), (33, 17), (130, 1), (16, 300)])
def test_widths_that_nothing_divides(H: int, intermediate: int, function: Experts, device: torch.device) -> None:
    arguments = layer(H=H, intermediate=intermediate, bias=True, device=device)
    assert_close(function(**arguments), arguments)


# Either side of where pairs are counted in chunks.
@pytest.mark.slow(quick=["7-chunks"])
@pytest.mark.parametrize("most", [0, 10**6], ids=["chunks", "at once"])
@pytest.mark.parametrize("T", [7, 13])
def test_both_ways_of_routing(T: int, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_launch, "MAX_PAIRS_TO_COUNT", most)
    monkeypatch.setattr(experts_launch, "CHUNK", 32)
    monkeypatch.setattr(experts_launch, "plans", PlanCache())
    arguments = layer(T, top_k=3, E=6, H=16, intermediate=16, device=device)
    arguments["top_k_index"] = torch.randint(-2, 8, (T, 3), device=device)
    assert_close(kernel_experts(**arguments), arguments)


@FUNCTIONS
def test_one_expert_gets_all_tokens(function: Experts, device: torch.device) -> None:
    arguments = layer(T=12, device=device)
    arguments["top_k_index"] = torch.full_like(arguments["top_k_index"], 3)
    assert_close(function(**arguments), arguments)


@FUNCTIONS
def test_ids_of_other_devices_contribute_nothing(function: Experts, device: torch.device) -> None:
    arguments = layer(T=4, bias=True, device=device)
    index, weights = arguments["top_k_index"], arguments["top_k_weights"]
    index[0] = 5
    index[1] = torch.tensor([-1, 2], device=device)
    index[2] = torch.tensor([2**40 + 1, -(2**40)], device=device)  # not even as int32
    weights[0] = math.nan
    weights[1, 0] = math.inf
    out = function(**arguments)
    assert not out[0].any()
    assert not out[2].any()
    assert_close(
        out[1:], {**arguments, "x": arguments["x"][1:], "top_k_index": index[1:], "top_k_weights": weights[1:]}
    )
    index.fill_(-1)
    assert not function(**arguments).any()


@FUNCTIONS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_gives_nan(value: float, function: Experts, device: torch.device) -> None:
    arguments = layer(T=5, device=device)
    arguments["x"][4, 7] = value
    out = function(**arguments)
    assert out[4].isnan().all()
    assert out.isnan().any(dim=1).sum() == 1


@FUNCTIONS
def test_zeros(function: Experts, device: torch.device) -> None:
    arguments = layer(bias=True, device=device)
    arguments["x"].zero_()
    assert_close(function(**arguments), arguments)
    arguments["gate_up_bias"] = arguments["down_bias"] = None
    assert not function(**arguments).any()


@FUNCTIONS
def test_magnitudes_that_float16_just_holds(function: Experts, device: torch.device) -> None:
    arguments = layer(T=5, dtype=torch.float16, device=device)
    arguments["x"][3] *= 2.0**-14
    arguments["x"][4] *= 2.0**5
    assert_close(function(**arguments), arguments)


def test_a_long_row_is_computed_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activate, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(activate, "LONG_ROW_BLOCK", 128)
    monkeypatch.setattr(experts_launch, "plans", PlanCache())
    arguments = layer(T=3, intermediate=300, device=device)
    assert_close(kernel_experts(**arguments), arguments)


@pytest.mark.slow(quick=["x"])
@pytest.mark.parametrize("view", ["x", "top_k_index", "top_k_weights", "gate_up_scale", "down_bias"])
def test_views(view: str, device: torch.device) -> None:
    arguments = layer(bias=True, device=device)
    wide = torch.stack([arguments[view]] * 2, dim=-1)
    arguments[view] = wide[..., 0]
    assert not arguments[view].is_contiguous()
    assert_close(kernel_experts(**arguments), arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_weights_of_a_narrow_dtype(dtype: torch.dtype, device: torch.device) -> None:
    arguments = layer(device=device)
    arguments["top_k_weights"] = arguments["top_k_weights"].to(dtype)
    for function in (public_experts, kernel_experts):
        assert_close(function(**arguments), arguments)


@pytest.mark.slow
def test_the_same_bits_every_time(device: torch.device) -> None:
    arguments = layer(T=300 if device.type == "cuda" else 3, top_k=4, E=9, device=device)
    out = kernel_experts(**arguments)
    for _ in range(10 if device.type == "cuda" else 1):
        assert torch.equal(kernel_experts(**arguments), out)


def test_a_negative_view() -> None:
    arguments = layer(T=5)
    negative = torch.view_as_complex(torch.randn(5, 48, 2)).conj().imag
    assert negative.is_neg()
    arguments["x"] = negative
    out = public_experts(**arguments)
    assert torch.equal(out, public_experts(**{**arguments, "x": negative.resolve_neg()}))


def test_no_gradient_is_recorded() -> None:
    arguments = layer(dtype=torch.float32)
    arguments["x"].requires_grad_()
    assert not public_experts(**arguments).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(5, 48, dtype=torch.float64)}, "x is torch.float64"),
        ({"x": torch.zeros(5, 47)}, r"x is \[5, 47\]; it must be \[T, 48\]"),
        ({"x": torch.zeros(48)}, r"x is \[48\]"),
        ({"x": torch.zeros(5, 48).to_sparse()}, "to_dense"),
        ({"x": torch.zeros(5, 48, device="meta")}, "one device"),
        ({"top_k_index": torch.zeros(5, 2, dtype=torch.int32)}, r"top_k_index is torch.int32.*int64 \[5, k\]"),
        ({"top_k_index": torch.zeros(4, 2).long()}, r"top_k_index is .*\[4, 2\].*\[5, k\]"),
        ({"top_k_weights": torch.zeros(5, 3)}, r"top_k_weights is .*\[5, 3\].*\[5, 2\]"),
        ({"top_k_weights": torch.zeros(5, 2).long()}, "top_k_weights is torch.int64"),
        ({"top_k_weights": torch.zeros(5, 2).to_sparse()}, "top_k_weights is torch.sparse_coo.*to_dense"),
        ({"top_k_weights": torch.zeros(5, 2, dtype=torch.cfloat).conj().imag}, "top_k_weights is a negative view"),
        ({"gate_up": torch.zeros(5, 80, 48)}, "gate_up is torch.float32"),
        ({"gate_up": torch.zeros(5, 48, 80).char().mT}, r"gate_up is \[5, 80, 48\] with strides.*contiguous"),
        ({"gate_up": torch.zeros(80, 48).char()}, r"gate_up is \[80, 48\].*\[E, 2I, H\]"),
        ({"gate_up_scale": torch.zeros(5, 80).double()}, r"gate_up's scale is torch.float64.*\[5, 80\]"),
        ({"gate_up_scale": torch.zeros(5, 80, 1)}, r"gate_up's scale is .*\[5, 80, 1\]"),
        ({"gate_up_bias": torch.zeros(5, 40)}, r"gate_up's bias is .*\[5, 40\].*\[5, 80\]"),
        ({"activation": GatedActivation(gated=False)}, r"gate_up is \[5, 80, 48\].*gated=False.*\[5, 40, 48\]"),
        (
            {"down": torch.zeros(4, 48, 40).char(), "down_scale": torch.zeros(4, 48)},
            r"gate_up is \[5, 80, 48\].*\[4, 80, 48\]",
        ),
        (
            {
                **{"gate_up": torch.zeros(5, 0, 48).char(), "gate_up_scale": torch.zeros(5, 0), "gate_up_bias": None},
                "down": torch.zeros(5, 48, 0).char(),
            },
            r"down is \[5, 48, 0\]; its last dimension must be at least 1",
        ),
        ({"down_scale": torch.zeros(48)}, r"down's scale is .*\[5, 48\]"),
        ({"down_bias": torch.zeros(5, 48).char()}, "down's bias is torch.int8"),
    ],
    ids=str,
)
@FUNCTIONS
def test_refused_arguments(changes: dict[str, Any], message: str, function: Experts) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        function(**{**layer(T=5), **changes})


def test_a_long_sum_is_refused() -> None:
    E, H = 1, INT8.max_k + 1
    arguments = layer(T=1, top_k=1, E=1)
    arguments |= {"x": torch.zeros(1, H), "gate_up": torch.zeros(E, 2, H).char(), "gate_up_scale": torch.ones(E, 2)}
    arguments |= {"down": torch.zeros(E, H, 1).char(), "down_scale": torch.ones(E, H)}
    with pytest.raises(ValueError, match=f"K is {INT8.max_k + 1}"):
        public_experts(**arguments)


@pytest.mark.slow
def test_a_plan_for_every_kind_of_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = PlanCache()
    monkeypatch.setattr(experts_launch, "plans", plans)
    monkeypatch.setattr(launch_plans, "MAX_PLANS", 3)
    arguments = layer(device=device)
    for _ in range(2):
        kernel_experts(**arguments)
        assert len(plans) == 1
    for change in (
        {"x": arguments["x"].half()},
        {"top_k_weights": arguments["top_k_weights"].bfloat16()},
        {"activation": dataclasses.replace(SILU, limit=1.0)},
    ):
        changed = {**arguments, **change}
        assert_close(kernel_experts(**changed), changed)
    assert len(plans) <= 3


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("T", [1, 16, 300, 2000])
@pytest.mark.parametrize("sizes", [(8, 2, 512, 1024), (128, 8, 256, 128), (32, 4, 720, 720)], ids=str)
def test_sizes_of_models(T: int, sizes: tuple[int, int, int, int]) -> None:
    E, top_k, H, intermediate = sizes
    arguments = layer(T, top_k, E, H, intermediate, activation=GPT_OSS, bias=True, device="cuda")
    out = public_experts(**arguments)
    assert_close(out, arguments)
    for _ in range(5):
        torch.full((1 << 22,), torch.nan, device="cuda")  # what free memory holds
        assert torch.equal(public_experts(**arguments), out)


@needs_gpu
def test_a_capture_follows_the_routing() -> None:
    arguments = layer(200, 4, 16, 256, 128, device="cuda")
    public_experts(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public_experts(**arguments)
    arguments["top_k_index"].random_(0, 16)
    arguments["x"].normal_()
    graph.replay()
    assert_close(out, arguments)


def test_the_public_name_survives_the_kernels() -> None:
    # A module of the same name would take the function's place when it is imported.
    assert public_experts is dispatch.experts
