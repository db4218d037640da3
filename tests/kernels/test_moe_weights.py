"""Experts whose weights alone are quantized: the kernels against the specification, for every form of a weight.

The kernels run in Triton's interpreter here, compiled on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import GPT_OSS, GatedActivation, dispatch
from qgemm.kernels.expert_weights import WeightOnlyExperts
from qgemm.kernels.grouped import weight_launcher
from qgemm.kernels.grouped.weight_launcher import BY_ROWS, WeightConfig, fits
from qgemm.kernels.launch import plans as launch_plans
from qgemm.kernels.launch.device import device_limits
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.moe import launcher
from qgemm.kernels.moe import weight_launcher as moe
from qgemm.kernels.moe.checks import check_weight_only_experts
from qgemm.kernels.moe.few_tokens import list_pairs_launch
from qgemm.kernels.reference import weight_only_experts_reference
from qgemm.kernels.stored_form import StoredForm
from qgemm.nn import QuantExperts
from qgemm.nn.experts import expert_weights
from qgemm.nn.quant_layer import frozen
from tests.kernels.devices import A100, H200, MI300X

E, H, INTERMEDIATE = 3, 48, 144
_ENDS = ("", "_scale", "_zero_point", "_global_scale", "_bias")


def weights(
    scheme: str, dtype: torch.dtype, device: torch.device, activation: GatedActivation = GPT_OSS, bias: bool = True
) -> WeightOnlyExperts:
    """Random ones. Rows of 48 and 144 values: part of a block, and more than half of one."""
    layer = QuantExperts(E, H, INTERMEDIATE, activation, bias, "cpu", dtype, scheme)
    for name in layer.weight_names:
        parts: dict[str, list[Tensor]] = {}
        for _ in range(E):
            one = layer.linear_of(name)
            one.take_weight(torch.randn(one.out_features, one.in_features) / one.in_features**0.5)
            for end in _ENDS[:4]:
                if (made := one._parameters.get(f"weight{end}")) is not None:
                    parts.setdefault(f"{name}{end}", []).append(made.detach())
        for full, tensors in parts.items():
            setattr(layer, full, frozen(torch.stack(tensors)))
        if bias:
            layer.get_parameter(f"{name}_bias").data.normal_()
    made = expert_weights(layer.to(device).scheme, activation, layer.stored)
    assert isinstance(made, WeightOnlyExperts)
    return made


def routed(T: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two experts of each, one of them elsewhere, and their weights."""
    index = torch.rand(T, E, device=device).topk(2).indices
    index[0, 0] = E
    return torch.randn(T, H, device=device).to(dtype), index, torch.rand(T, 2, device=device)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("mxfp4", torch.bfloat16),
        ("int4-32-asymmetric", torch.bfloat16),  # float16's scales are of another dtype
        ("int4-channel-asymmetric", torch.float16),
        ("int4-32-float-zeros", torch.bfloat16),
        ("int4-32-float-zeros+int8-weight-16", torch.bfloat16),
        ("int8-weight-float-zeros", torch.float16),  # whose scales and zero points are float32
        ("nvfp4", torch.bfloat16),
        ("int8-weight-48", torch.float16),  # groups of no power of two
        ("fp8-weight", torch.bfloat16),
    ],
)
def test_kernels_compute_the_specification(scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    activation = GPT_OSS if scheme == "mxfp4" else GatedActivation("relu2", gated=False)
    held = weights(scheme, dtype, device, activation)
    arguments = routed(3, dtype, device)
    out = moe.weight_only_experts(*arguments, held)
    assert out.dtype == dtype
    # A weight times its scale is rounded to the dtype; one of a power of two, or of a row's, isn't.
    assert relative_error(out, weight_only_experts_reference(*arguments, held)) < 2 * torch.finfo(dtype).eps
    assert torch.equal(moe.weight_only_experts(*arguments, held), out)


def test_the_longer_way_for_many_pairs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights("mxfp4", torch.bfloat16, device, GatedActivation("relu2", gated=False), bias=False)
    x, index, top_k_weights = routed(9, torch.bfloat16, device)
    residual = torch.randn_like(x)
    wanted = weight_only_experts_reference(x, index, top_k_weights, held, residual)
    monkeypatch.setattr(launch_plans, "plans", PlanCache())
    monkeypatch.setattr(moe, "plans", PlanCache())
    few = moe.weight_only_experts(x, index, top_k_weights, held, residual)
    monkeypatch.setattr(moe, "plans", PlanCache())
    monkeypatch.setattr(launcher, "MAX_PAIRS_TO_COUNT", 4)
    many = moe.weight_only_experts(x, index, top_k_weights, held, residual)
    assert torch.equal(few, many)
    assert relative_error(many, wanted) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("config", [BY_ROWS[1][1][0], WeightConfig(64, 32, 64, 4, 2)], ids=str)
def test_other_configs(config: WeightConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights("int4-32", torch.bfloat16, device, GatedActivation())
    arguments = routed(4, torch.bfloat16, device)
    monkeypatch.setattr(moe, "plans", PlanCache())
    monkeypatch.setattr(moe, "select_weight_config", lambda *_: config)
    out = moe.weight_only_experts(*arguments, held)
    assert relative_error(out, weight_only_experts_reference(*arguments, held)) < 2 * torch.finfo(torch.bfloat16).eps


def test_nothing_to_compute(device: torch.device) -> None:
    held = weights("mxfp4", torch.bfloat16, device)
    x, index, top_k_weights = routed(3, torch.bfloat16, device)
    assert moe.weight_only_experts(x[:0], index[:0], top_k_weights[:0], held).shape == (0, H)
    none = index[:, :0], top_k_weights[:, :0]
    assert not moe.weight_only_experts(x, *none, held).any()
    assert torch.equal(moe.weight_only_experts(x, *none, held, x), x)


def test_a_row_with_nan_gives_nan_there_alone(device: torch.device) -> None:
    held = weights("mxfp4", torch.bfloat16, device)
    x, index, top_k_weights = routed(3, torch.bfloat16, device)
    alone = moe.weight_only_experts(x, index, top_k_weights, held)
    x[1, 7] = torch.nan
    out = moe.weight_only_experts(x, index, top_k_weights, held)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], alone[::2])


def test_float32_is_computed_without_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(moe, "_make_plan", refuse)
    held = weights("mxfp4", torch.float32, device)
    arguments = routed(3, torch.float32, device)
    out = dispatch.weight_only_experts(*arguments, held)
    assert relative_error(out, weight_only_experts_reference(*arguments, held)) < 1e-5


@pytest.mark.parametrize("limits", [A100, H200, MI300X], ids=["A100", "H200", "MI300X"])
def test_a_config_fits_every_device(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_launcher, "device_limits", lambda _: limits)
    floats = StoredForm("int4", 16, has_zeros=True, float_zeros=True)
    for form in (StoredForm("fp4", 32), StoredForm("int8", 32), floats):
        rows = [
            weight_launcher.select_weight_config(T, 32, [form], torch.device("cpu")) for T in (4, 640, 2048, 65_536)
        ]
        assert all(fits(config, form, limits) for config in rows)
        assert [config.block_m for config in rows] == sorted(config.block_m for config in rows)
        assert rows[0].block_m == 16


@pytest.mark.parametrize(("P", "experts"), [(6, 40), (40, 5), (70, 70), (300, 7)])
def test_lists_of_pairs(P: int, experts: int, device: torch.device) -> None:
    ids = torch.randint(0, experts, (P,), device=device)
    ids[::4] = experts + 1  # elsewhere
    ids[1] = -1
    by_pair = experts > P
    lists = torch.full((min(P, experts), 1 + P), -7, dtype=torch.int32, device=device)
    list_pairs_launch(P, experts, replace(device_limits(device), pdl=False))(ids, lists)
    for item, (count, *found) in enumerate(lists.tolist()):
        expert = int(ids[item]) if by_pair else item
        wanted = (ids == expert).nonzero().flatten().tolist() if 0 <= expert < experts else []
        if by_pair and item not in wanted[:1]:
            wanted = []  # another pair has the list
        assert [count, *found[:count]] == [len(wanted), *wanted]
        assert set(found[count:]) <= {-7}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up", lambda x: x[0], r"gate_up and down are \[288, 128\] and \[3, 48, 128\]; they must"),
        ("gate_up", lambda x: x[:, 1:], r"gate_up is \[3, 287, 128\]; its rows must be an even number"),
        ("gate_up", lambda x: x.mT.contiguous().mT, r"gate_up has strides \(36864, 1, 288\); it must be contiguous"),
        ("gate_up_scale", lambda x: x[..., :1], r"gate_up's scale is torch.bfloat16 \[3, 288, 1\]"),
        ("down_global_scale", lambda x: torch.ones(E, 2), "down's scale is torch.bfloat16, with a global scale"),
    ],
)
def test_what_is_refused(name: str, change: Callable[[Any], Tensor], message: str) -> None:
    device = torch.device("cpu")
    held = weights("int4-32", torch.bfloat16, device)
    with pytest.raises(ValueError, match=message):
        check_weight_only_experts(
            *routed(3, torch.bfloat16, device), held._replace(**{name: change(getattr(held, name))})
        )
