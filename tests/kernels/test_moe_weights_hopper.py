"""Hopper's kernels of experts with quantized weights, compiled, against the specification; they run on Hopper only.

Which of them a call takes, and with which tiles, is checked everywhere.
"""

from __future__ import annotations

import pytest
import torch

from kernels.test_moe_weights import relative_error
from kernels.test_weight_only_hopper import skip_elsewhere
from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.kernels.expert_weights import WeightOnlyExperts
from qgemm.kernels.grouped.weight_hopper import select_many_tokens
from qgemm.kernels.moe import few_tokens
from qgemm.kernels.moe import weight_launcher as moe
from qgemm.kernels.moe.few_tokens import hopper_forms
from qgemm.kernels.reference import weight_only_experts_reference
from qgemm.kernels.stored_form import WHOLE_ROW, StoredForm
from qgemm.nn import QuantExperts
from qgemm.nn.experts import expert_weights
from qgemm.nn.quant_layer import frozen

E, TOP_K, H, INTERMEDIATE = 5, 2, 320, 704  # more than one block of K and a part of one; rows beyond a whole tile
_ENDS = ("", "_scale", "_zero_point", "_global_scale", "_bias")


def weights(
    scheme: str,
    dtype: torch.dtype,
    device: torch.device,
    activation: GatedActivation = GPT_OSS,
    sizes: tuple[int, int] = (H, INTERMEDIATE),
) -> WeightOnlyExperts:
    layer = QuantExperts(E, *sizes, activation, True, device, dtype, scheme)
    for name in layer.weight_names:
        made = []
        for _ in range(E):
            one = layer.linear_of(name).to_empty(device=device)
            one.take_weight(torch.randn(one.out_features, one.in_features, device=device) / one.in_features**0.5)
            made.append(one)
        for end in _ENDS[:4]:
            if made[0]._parameters.get(f"weight{end}") is not None:
                stacked = torch.stack([one._parameters[f"weight{end}"].detach() for one in made])
                setattr(layer, f"{name}{end}", frozen(stacked))
        layer.get_parameter(f"{name}_bias").data.normal_()
    held = expert_weights(layer.scheme, activation, layer.stored)
    assert isinstance(held, WeightOnlyExperts)
    return held


def routed(
    T: int, dtype: torch.dtype, device: torch.device, hidden: int = H
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, two experts of each, the first token's first elsewhere, and their weights."""
    index = torch.rand(T, E, device=device).topk(TOP_K).indices
    index[0, 0] = E
    return torch.randn(T, hidden, device=device).to(dtype), index, torch.rand(T, TOP_K, device=device)


@pytest.mark.parametrize("T", [1, 2, 4, 10, 30, 60, 300, 1000])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("mxfp4", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("int4-asymmetric", torch.float16),
        ("int4-channel-asymmetric", torch.bfloat16),
        ("int4-float-zeros", torch.bfloat16),
        ("int4-float-zeros+int8-weight", torch.bfloat16),
        ("int8-weight-float-zeros", torch.float16),
        ("int8-weight", torch.bfloat16),
        ("fp8-weight", torch.float16),
        ("mxfp4", torch.float16),
        ("nvfp4", torch.bfloat16),
        ("nf4", torch.bfloat16),
        ("mxfp8", torch.bfloat16),
        ("int4-32-float-zeros", torch.bfloat16),
        ("int8-weight-32", torch.bfloat16),
    ],
)
def test_kernels_compute_the_specification(T: int, scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    skip_elsewhere(device)
    activation = GatedActivation("relu2", gated=False) if scheme == "int8-weight" else GPT_OSS
    held = weights(scheme, dtype, device, activation)
    assert hopper_forms(held, dtype) is not None
    x, index, top_k_weights = routed(T, dtype, device)
    residual = torch.randn_like(x) if T == 2 else None
    out = moe.weight_only_experts(x, index, top_k_weights, held, residual)
    wanted = weight_only_experts_reference(x, index, top_k_weights, held, residual)
    assert relative_error(out, wanted) < 2 * torch.finfo(dtype).eps
    assert torch.equal(moe.weight_only_experts(x, index, top_k_weights, held, residual), out)


@pytest.mark.parametrize("T", [1, 4, 30])
@pytest.mark.parametrize("scheme", ["int4", "mxfp4", "nvfp4", "int4-32-float-zeros", "int8-weight-32"])
def test_rows_of_whole_blocks(T: int, scheme: str, device: torch.device) -> None:
    skip_elsewhere(device)
    held = weights(scheme, torch.bfloat16, device, GatedActivation(), (512, 768))
    forms = hopper_forms(held, torch.bfloat16)
    assert forms is not None
    assert all(form.whole or form.paired for form in forms)
    x, index, top_k_weights = routed(T, torch.bfloat16, device, 512)
    out = moe.weight_only_experts(x, index, top_k_weights, held)
    wanted = weight_only_experts_reference(x, index, top_k_weights, held)
    assert relative_error(out, wanted) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("T", [4, 30, 60, 300])
def test_a_row_with_nan_gives_nan_there_alone(T: int, device: torch.device) -> None:
    skip_elsewhere(device)
    held = weights("mxfp4", torch.bfloat16, device)
    x, index, top_k_weights = routed(T, torch.bfloat16, device)
    alone = moe.weight_only_experts(x, index, top_k_weights, held)
    x[1, 7] = torch.nan
    out = moe.weight_only_experts(x, index, top_k_weights, held)
    assert out[1].isnan().all()
    others = torch.arange(T, device=device) != 1
    assert torch.equal(out[others], alone[others])


def test_more_tokens_of_an_expert_than_a_program_takes_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_elsewhere(device)
    held = weights("mxfp4", torch.bfloat16, device)
    x, index, top_k_weights = routed(9, torch.bfloat16, device)
    index[:, 0] = 3
    index[:, 1] = 1
    tile = few_tokens.EIGHT
    monkeypatch.setattr(moe, "select_few_tokens", lambda *_: tile)
    out = moe.weight_only_experts(x, index, top_k_weights, held)
    wanted = weight_only_experts_reference(x, index, top_k_weights, held)
    assert relative_error(out, wanted) < 2 * torch.finfo(torch.bfloat16).eps


def test_every_scale_of_8_bits_is_exact(device: torch.device) -> None:
    skip_elsewhere(device)
    held = weights("mxfp4", torch.bfloat16, device)
    scale = torch.arange(held.gate_up_scale.numel(), device=device) % 250 + 2
    held.gate_up_scale.copy_(scale.view(held.gate_up_scale.shape).to(torch.uint8))
    held.gate_up_bias.zero_()  # type: ignore[union-attr]
    for T in (1, 300):
        x, index, top_k_weights = routed(T, torch.bfloat16, device)
        x.zero_()
        x[:, 5] = 1.0
        found = moe.weight_only_experts(x, index, top_k_weights, held)
        wanted = weight_only_experts_reference(x, index, top_k_weights, held)
        assert relative_error(found, wanted) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("scheme", "dtype", "forms"),
    [
        ("mxfp4", torch.bfloat16, [StoredForm("fp4", 32), StoredForm("fp4", 32, whole=True)]),
        ("mxfp4", torch.float32, None),
        ("int4", torch.float16, [StoredForm("int4", 128), StoredForm("int4", 128, paired=True)]),
        (
            "int4-asymmetric",
            torch.bfloat16,
            [StoredForm("int4", 128, True), StoredForm("int4", 128, True, paired=True)],
        ),
        ("int8-weight-float-zeros", torch.float16, [StoredForm("int8", WHOLE_ROW, True, float_zeros=True)] * 2),
        ("int4+int4-32", torch.bfloat16, [StoredForm("int4", 128), StoredForm("int4", 32, whole=True)]),
        ("int8-weight", torch.bfloat16, [StoredForm("int8", 0)] * 2),
        ("mxfp8", torch.bfloat16, [StoredForm("fp8", 32, whole=True)] * 2),
    ],
)
def test_which_weights_the_kernel_takes(scheme: str, dtype: torch.dtype, forms: list[StoredForm] | None) -> None:
    layer = QuantExperts(2, 128, 512, GPT_OSS, True, "meta", dtype, scheme)
    held = expert_weights(layer.scheme, GPT_OSS, layer.stored)
    assert isinstance(held, WeightOnlyExperts)
    assert hopper_forms(held, dtype) == forms


@pytest.mark.parametrize(("scheme", "dtype"), [("mxfp4", torch.float16), ("nvfp4", torch.bfloat16)])
def test_many_tokens_take_a_kernel_for_mxfp4_in_bfloat16(scheme: str, dtype: torch.dtype) -> None:
    for name, wanted in ((scheme, False), ("mxfp4", dtype == torch.bfloat16)):
        layer = QuantExperts(2, 192, 320, GPT_OSS, True, "meta", dtype, name)
        held = expert_weights(layer.scheme, GPT_OSS, layer.stored)
        assert isinstance(held, WeightOnlyExperts)
        assert moe.fits_many_tokens(held, dtype) is wanted


def columns_of(T: int, top_k: int, experts: int, K: int, form: StoredForm) -> int:
    """Of the tile that is chosen; 0 if another kernel is."""
    tile = few_tokens.select_few_tokens(T, top_k, experts, K, form)
    return 0 if tile is None else tile.columns


def test_tiles_by_the_rows_of_an_expert() -> None:
    # GPT-OSS's 32 experts, 4 a token, whose rows end within a block; Qwen3's 128, 8 a token.
    values, int4, int8 = StoredForm("fp4", 32), StoredForm("int4", 128), StoredForm("int8", 0)
    tokens = (1, 16, 64, 128, 512, 1024)
    assert [columns_of(T, 4, 32, 2880, values) for T in tokens] == [8, 8, 16, 32, 0, 0]
    assert [columns_of(T, 8, 128, 2048, int4) for T in tokens] == [8, 8, 8, 16, 16, 0]
    assert [columns_of(T, 8, 128, 2048, int8) for T in tokens] == [8, 8, 8, 0, 0, 0]
    assert [select_many_tokens(4 * T, 32) is not None for T in (1, 64, 512, 2048)] == [False] * 2 + [False, True]


def test_a_single_token_has_tiles_of_few_rows_and_short_rows_have_tiles_of_many() -> None:
    rows = [few_tokens.select_few_tokens(T, 8, 128, K, StoredForm("int4", 128)) for T in (1, 16) for K in (768, 2048)]
    assert [None if tile is None else tile.rows for tile in rows] == [16, 16, 128, 64]
