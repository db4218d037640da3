"""Layers in every format of compressed-tensors: the sample checkpoints, single layers of the library, and old files."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qgemm
from checkpoint.foreign import needs_the_library
from checkpoint.library import (
    FP8_GROUPS,
    FP8_STATIC,
    FP8_TOKENS,
    INT8_SHIFTED,
    INT8_TOKENS,
    compressed,
    decompressed,
    group_of,
    linears,
    weights,
    write,
)
from checkpoint.samples import IDS, SAMPLES, load_sample, logit_error, wrong_weights
from qgemm import CheckpointError
from qgemm.checkpoint.words import pack_words
from qgemm.nn import QuantLayer

# The schemes of each sample. Where activations are float as the file asks, logits are the reference's; else they are
# off by as much as rounding activations does, of which each library has its own way.
FLOAT = {
    "ct-w4a16-g128": {"int4"},
    "ct-w4a16-g32-asym": {"int4-32-asymmetric"},
    "ct-w4a16-actorder-weight": {"int4-64"},
    "ct-w8a16-channel": {"int8-weight"},
    "ct-w8a16-g128-asym": {"int8-weight-128-asymmetric"},
    "ct-mxfp4a16": {"mxfp4"},
    "ct-nvfp4a16": {"nvfp4"},
}
LEFT_FLOAT = {"ct-w4afp8-packed": "int4", "ct-mxfp8": "mxfp8", "ct-nvfp4": "nvfp4"}
ROUNDED = {
    "ct-w4a8-int": {"int4-int8"},
    "ct-w4a8-int-packed": {"int4-channel-int8"},
    "ct-fp8-dynamic": {"fp8"},
    "ct-fp8-static": {"fp8-static"},
    "ct-fp8-block": {"fp8-block"},
    "ct-fp8-kv": {"fp8"},
    "ct-mixed": {"fp8", "int4"},
}


def schemes_of(model: Any) -> set[str]:
    return {layer.scheme.name for layer in model.modules() if isinstance(layer, QuantLayer)}


@pytest.mark.parametrize("name", FLOAT)
def test_samples_with_activations_in_float(name: str) -> None:
    model, warnings = load_sample(name)
    assert schemes_of(model) == FLOAT[name]
    assert wrong_weights(name) == []
    assert logit_error(name) < 1e-5
    assert warnings == []


@pytest.mark.parametrize("name", LEFT_FLOAT)
def test_samples_whose_activations_stay_in_float(name: str) -> None:
    model, warnings = load_sample(name)
    assert schemes_of(model) == {LEFT_FLOAT[name]}
    assert wrong_weights(name) == []
    assert logit_error(name) < 1e-5
    (warning,) = warnings
    assert f"{name}: activations stay in float, where the checkpoint asks for fp" in warning


@pytest.mark.parametrize("name", ROUNDED)
def test_samples_with_rounded_activations(name: str) -> None:
    model, warnings = load_sample(name)
    assert schemes_of(model) == ROUNDED[name]
    assert wrong_weights(name) == []
    assert 1e-5 < logit_error(name) < 0.1
    # qgemm has a scale of max / 127 for int8 activations, the library of max / 127.5; and it rounds keys and values.
    coarse = {"ct-w4a8-int": 0.05, "ct-w4a8-int-packed": 0.05, "ct-fp8-kv": 0.05}
    assert logit_error(name, "logits_executed") < coarse.get(name, 1e-5)
    if name == "ct-fp8-kv":
        assert "its scales of keys and values are not used" in warnings[0]
    else:
        assert warnings == []
    if name == "ct-mixed":
        assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


@torch.no_grad()
@pytest.mark.parametrize("name", ["ct-w4a8-int", "ct-w4a8-int-packed"])
def test_int8_activations_are_all_that_differs(name: str) -> None:
    model, _ = load_sample(name)
    plain = copy.deepcopy(model)
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, QuantLayer):
            plain.set_submodule(path, layer.dequantize(torch.float32))
    steps = torch.tensor(0.0)

    def to_int8_and_back(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / steps
        return (args[0] / scale).round().clamp(-128, 127) * scale

    for path, layer in plain.named_modules():
        if isinstance(model.get_submodule(path), QuantLayer):
            layer.register_forward_pre_hook(to_int8_and_back)
    steps.fill_(127)
    assert_alike(plain(IDS).logits, model(IDS).logits)
    steps.fill_(127.5)
    executed = load_file(SAMPLES / name / "reference_logits.safetensors")["logits_executed"]
    assert_alike(plain(IDS).logits, executed)


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The logits of all tokens are the same, but for one in which a value halfway between two steps takes the other.

    That depends on the order of sums in float32, which is the processor's.
    """
    errors = (found - wanted).abs().amax(-1).flatten().sort().values / wanted.abs().max()
    assert errors[-2] < 1e-5
    assert errors[-1] < 0.01


GROUPS: dict[str, dict[str, Any]] = {
    "int4": group_of("pack-quantized", weights(4, "group", 128)),
    "int4-32": group_of("pack-quantized", weights(4, "group", 32)),
    "int4-channel": group_of("pack-quantized", weights(4, "channel")),
    "int4-64-asymmetric": group_of("pack-quantized", weights(4, "group", 64, symmetric=False)),
    "int4-channel-asymmetric": group_of("pack-quantized", weights(4, "channel", symmetric=False)),
    "int8-weight": group_of("pack-quantized", weights(8, "channel")),
    "int8-weight-32": group_of("pack-quantized", weights(8, "group", 32)),
    "int8-weight-asymmetric": group_of("pack-quantized", weights(8, "channel", symmetric=False)),
    "int8-weight-64-asymmetric": group_of("naive-quantized", weights(8, "group", 64, symmetric=False)),
    "int4-int8": group_of("int-quantized", weights(4, "group", 128), INT8_TOKENS),
    "int4-32-asymmetric-int8": group_of("int-quantized", weights(4, "group", 32, symmetric=False), INT8_TOKENS),
    "int4-channel-int8": group_of("pack-quantized", weights(4, "channel"), INT8_TOKENS),
    "int8": group_of("int-quantized", weights(8, "channel"), INT8_TOKENS),
    "int8-static-asymmetric": group_of("int-quantized", weights(8, "channel"), INT8_SHIFTED),
    "fp8": group_of("float-quantized", weights(8, "channel", kind="float"), FP8_TOKENS),
    "fp8-static": group_of("float-quantized", weights(8, "tensor", kind="float"), FP8_STATIC),
    "fp8-weight": group_of("naive-quantized", weights(8, "channel", kind="float")),
    "fp8-block": group_of("float-quantized", weights(8, "block", kind="float", block_structure=[128, 128]), FP8_GROUPS),
    "mxfp4": group_of("mxfp4-pack-quantized", weights(4, "group", 32, "float", scale_dtype="torch.uint8")),
    "mxfp8": group_of("mxfp8-quantized", weights(8, "group", 32, "float", scale_dtype="torch.uint8")),
    "nvfp4": group_of(
        "nvfp4-pack-quantized", weights(4, "tensor_group", 16, "float", scale_dtype="torch.float8_e4m3fn")
    ),
}


def shape_of(scheme: str) -> tuple[int, int]:
    """``[N, K]`` with short words and blocks, where the format has them."""
    if scheme in ("int4-channel", "int8-weight", "int4-channel-asymmetric", "int8-weight-asymmetric"):
        return 9, 30
    return (130, 200) if scheme == "fp8-block" else (9, 384)


@needs_the_library
@pytest.mark.parametrize("scheme", GROUPS)
def test_one_layer_of_the_library(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = compressed(torch.randn(shape_of(scheme)), GROUPS[scheme], torch.float32)
    write(tmp_path, {"0": tensors}, {"group_0": GROUPS[scheme]})
    layer = qgemm.load_quantized(tmp_path, model=lambda: linears(shape_of(scheme)))[0]
    assert layer.scheme.name == scheme
    theirs, ours = decompressed(tensors, GROUPS[scheme]), layer.dequantize(torch.float32).weight
    if theirs.dtype == torch.float32:
        assert torch.equal(ours, theirs)
    else:  # it rounds, and what it rounds it multiplies
        torch.testing.assert_close(ours, theirs.float(), rtol=0.02, atol=0)


@needs_the_library
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_zero_point_of_inputs(has_bias: bool, tmp_path: Path) -> None:
    group = GROUPS["int8-static-asymmetric"]
    tensors = compressed(torch.randn(9, 384), group, torch.float32)
    bias = torch.randn(9, dtype=torch.bfloat16)
    write(tmp_path, {"0": {**tensors, "bias": bias} if has_bias else tensors}, {"group_0": group})
    layer = qgemm.load_quantized(tmp_path, model=lambda: nn.ModuleList([nn.Linear(384, 9, bias=has_bias)]))[0]
    x = torch.randn(5, 384)
    rounded = ((x / 0.03).round() - 20).clamp(-128, 127).add(20) * 0.03
    wanted = rounded @ decompressed(tensors, group).t() + (bias.float() if has_bias else 0)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
    assert layer.dequantize(torch.float32).bias is None or has_bias
    # What isn't the layer's, or isn't its size, is refused.
    if has_bias:
        with pytest.raises(CheckpointError, match=r"0\.bias"):
            qgemm.load_quantized(tmp_path, model=lambda: linears((9, 384)))
    for leaf, value, message in (
        ("input_zero_point", torch.tensor([3], dtype=torch.int32), "input_zero_point is torch.int32"),
        ("bias", torch.ones(8), r"0\.bias is torch.float32 \[8\]"),
    ):
        write(tmp_path, {"0": {**tensors, leaf: value}}, {"group_0": group})
        with pytest.raises(CheckpointError, match=message):
            qgemm.load_quantized(tmp_path, model=lambda: nn.ModuleList([nn.Linear(384, 9)]))


def old_act_order(K: int = 256, size: int = 64, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors as versions before 0.20 wrote them for ``actorder: group``, and the float weight that they stand for."""
    torch.manual_seed(seed)
    q = torch.randint(-8, 8, (24, K), dtype=torch.int8)
    scale, g_idx = torch.rand(24, -(-K // size)) + 0.5, (torch.randperm(K) // size).int()
    tensors = {
        "weight_packed": pack_words((q + 8).view(torch.uint8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([24, K]),
        "weight_g_idx": g_idx,
    }
    return tensors, q * scale[:, g_idx.long()]


def test_groups_of_columns_in_any_order(tmp_path: Path) -> None:
    tensors, weight = old_act_order()
    group = {"group_0": group_of("pack-quantized", weights(4, "group", 64, actorder="group"))}
    write(tmp_path, {"0": tensors}, group)
    layer = qgemm.load_quantized(tmp_path, model=lambda: linears((24, 256)))[0]
    assert layer.scheme.name == "int4-64-ordered"
    assert layer.stored("weight").is_contiguous()
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    x = torch.randn(3, 256)
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=1e-5, atol=1e-4)
    # Columns in order, and the -1 of a layer that has no order.
    for g_idx in (torch.arange(256).int() // 64, torch.full((256,), -1, dtype=torch.int32)):
        write(tmp_path, {"0": {**tensors, "weight_g_idx": g_idx}}, group)
        layer = qgemm.load_quantized(tmp_path, model=lambda: linears((24, 256)))[0]
        assert layer.scheme.name == "int4-64"
        codes = layer.dequantize(torch.float32).weight / tensors["weight_scale"].repeat_interleave(64, 1)
        assert torch.equal(codes.round(), (weight / tensors["weight_scale"][:, tensors["weight_g_idx"].long()]).round())


# A last group that is shorter, by much or by little; one that is shorter than a group is long.
@pytest.mark.parametrize(("K", "size"), [(136, 128), (72, 16), (80, 32), (100, 48), (104, 64), (40, 64)])
def test_groups_of_columns_in_any_order_whose_last_is_shorter(K: int, size: int, tmp_path: Path) -> None:
    tensors, weight = old_act_order(K, size)
    group = {"group_0": group_of("pack-quantized", weights(4, "group", size, actorder="group"))}
    write(tmp_path, {"0": tensors}, group)
    layer = qgemm.load_quantized(tmp_path, model=lambda: linears((24, K)))[0]
    groups = "" if size == 128 else f"-{size}"
    assert layer.scheme.name == f"int4{groups}{'-ordered' if size < K else ''}"
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (torch.zeros(256).int(), "weight_g_idx doesn't put 64 of 256 columns into each of the groups"),
        ((torch.arange(256) // 86).int(), "weight_g_idx doesn't put 64 of 256 columns into each of the groups"),
        (torch.arange(255).int() // 64, "weight_g_idx has 255 columns, which isn't the weight's K"),
        (torch.zeros(2, 128).int(), r"weight_g_idx is torch.int32 \[2, 128\]; it must be int32"),
        (torch.zeros(256), r"weight_g_idx is torch.float32 \[256\]; it must be int32"),
    ],
)
def test_an_order_that_is_none(g_idx: torch.Tensor, message: str, tmp_path: Path) -> None:
    tensors = {**old_act_order()[0], "weight_g_idx": g_idx}
    write(tmp_path, {"0": tensors}, {"group_0": group_of("pack-quantized", weights(4, "group", 64))})
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(tmp_path, model=lambda: linears((24, 256)))


def packed_layer(K: int = 128, size: int = 32, bits: int = 4) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": pack_words(torch.full((8, K), 1 << (bits - 1), dtype=torch.uint8), bits),
        "weight_scale": torch.full((8, K // size), 0.5),
        "weight_shape": torch.tensor([8, K]),
    }
    return tensors


def test_columns_that_the_model_has_and_the_files_lack(tmp_path: Path) -> None:
    # 252 columns take as many bytes and scales as 256.
    tensors = {"weight_packed": torch.zeros(8, 126, dtype=torch.uint8)}
    tensors["weight_scale"] = torch.full((8, 8), 127, dtype=torch.uint8)
    write(tmp_path, {"0": tensors}, {"group_0": GROUPS["mxfp4"]})
    (layer,) = qgemm.load_quantized(tmp_path, model=lambda: linears((8, 252)))
    assert layer.scheme.name == "mxfp4"
    with pytest.raises(CheckpointError, match=r"layer 0 has the shape \[8, 252\]; the model's is \[8, 256\]"):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 256)))


def test_a_layer_is_of_the_group_that_it_fits(tmp_path: Path) -> None:
    groups = {
        "group_0": group_of("pack-quantized", weights(4, "group", 32)),
        "group_1": group_of("pack-quantized", weights(8, "group", 32)),
        "group_2": group_of("pack-quantized", weights(4, "group", 64)),
    }
    layers = {"0": packed_layer(), "1": packed_layer(bits=8), "2": packed_layer(size=64)}
    write(tmp_path, layers, groups)
    model = qgemm.load_quantized(tmp_path, model=lambda: linears(*[(8, 128)] * 3))
    assert [layer.scheme.name for layer in model] == ["int4-32", "int8-weight-32", "int4-64"]


def test_targets_decide_where_the_files_do_not(tmp_path: Path) -> None:
    fp8 = weights(8, "channel", kind="float")
    packed = {"group_0": group_of("naive-quantized", fp8), "group_1": group_of("float-quantized", fp8, FP8_TOKENS)}
    layer = {"weight": torch.ones(8, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(8, 1)}

    def load(*targets: list[str]) -> list[str]:
        groups = {name: {**packed[name], "targets": own} for name, own in zip(packed, targets, strict=True)}
        write(tmp_path, {"0": layer, "1": layer}, groups)
        contents = qgemm.checkpoint.load.find_matching(tmp_path, linears((8, 128), (8, 128))).contents
        return [scheme.name for scheme in contents.manifest.layers.values()]

    assert load(["0"], ["1"]) == ["fp8-weight", "fp8"]
    assert load(["Linear"], ["1"]) == ["fp8-weight", "fp8"]
    for targets in ((["re:.*0"], ["re:.*1"]), (["Linear"], ["re:(a|a)*1"]), (["Linear"], ["Linear"]), (["0"], ["0"])):
        with pytest.raises(CheckpointError, match=r"layer 0 fits group_0 and group_1 alike, .* no regular expressions"):
            load(*targets)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"weight_packed": None}, "0.weight_packed is missing; it must be torch.int32"),
        ({"weight_packed": torch.zeros(8, 16)}, r"weight_packed is torch.float32 \[8, 16\]; it must be torch.int32"),
        ({"weight_packed": torch.zeros(8, 15).int()}, r"it says \[8, 128\], and weight_packed is \[8, 15\] of 4 bits"),
        ({"weight_scale": None}, r"weight_scale is missing; it must be of a float dtype, \[8, 4\]"),
        ({"weight_scale": torch.ones(8, 4).int()}, r"weight_scale is torch.int32 \[8, 4\]; it must be of a float"),
        ({"weight_scale": torch.ones(8, 2)}, r"weight_scale is torch.float32 \[8, 2\]; it must be .* \[8, 4\]"),
        ({"weight_scale": torch.full((8, 4), torch.nan)}, "0.weight_scale holds NaN or Inf"),
        ({"weight_shape": None}, "has a weight_packed but no weight_shape"),
        ({"weight_shape": torch.tensor([8, 160])}, r"it says \[8, 160\], and weight_packed is \[8, 16\]"),
        ({"weight_shape": torch.tensor([8])}, r"weight_shape is torch.int64 \[1\]; it must be int64, \[2\]"),
        ({"weight_shape": torch.tensor([-8, 128])}, r"weight_shape is \[-8, 128\]"),
        ({"weight_shape": torch.tensor([8, 126])}, r"layer 0 has the shape \[8, 126\]; the model's is \[8, 128\]"),
        ({"weight_zero_point": torch.ones(8, 4).char()}, "the zero point is not 0, but the config says"),
        ({"weight_zero_point": torch.zeros(1, 4).int()}, "the zero point is not 0, but the config says"),
        ({"weight_global_scale": torch.ones(1)}, "a weight_global_scale, which only nvfp4 has"),
        ({"input_scale": torch.ones(1)}, "activations are dynamic, but layer 0 has an input_scale"),
        ({"input_zero_point": torch.ones(1).char()}, "the zero point of the input is not 0"),
        ({"weight": torch.ones(8, 128)}, "holds both 0.weight_packed and 0.weight"),
    ],
)
def test_tensors_that_are_refused(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {leaf: tensor for leaf, tensor in {**packed_layer(), **edit}.items() if tensor is not None}
    write(tmp_path, {"0": tensors}, {"group_0": group_of("pack-quantized", weights(4, "group", 32))})
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))


def test_zero_points_of_older_versions_are_zero(tmp_path: Path) -> None:
    # int8 as they are, or packed: 8 stands for 0, and what is left over of a word is 0.
    for zero_point in (
        torch.zeros(8, 4).char(),
        pack_words(torch.full((4, 8), 8, dtype=torch.uint8), 4).t().contiguous(),
    ):
        tensors = {**packed_layer(), "weight_zero_point": zero_point, "input_zero_point": torch.zeros(1).char()}
        write(tmp_path, {"0": tensors}, {"group_0": group_of("pack-quantized", weights(4, "group", 32))})
        (layer,) = qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
        assert layer.scheme.name == "int4-32"


@pytest.mark.parametrize("stored_as", ["pack-quantized", "naive-quantized"])
def test_zero_points_with_a_byte_each(stored_as: str, tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = packed_layer(size=128)
    if stored_as == "naive-quantized":
        tensors = {"weight": torch.zeros(8, 128, dtype=torch.int8), "weight_scale": tensors["weight_scale"]}
    group = {"group_0": group_of(stored_as, weights(4, "channel", symmetric=False))}
    for scale in (torch.full((8, 1), 0.5), torch.full((8,), 0.5), torch.tensor([0.5])):
        for zero_point in (torch.full((8, 1), -8), torch.full((8,), 8), torch.tensor([-3])):
            own = {**tensors, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}
            if len(scale) == 1:
                group["group_0"]["weights"] = weights(4, "tensor", symmetric=False)
            write(tmp_path, {"0": own}, group)
            (layer,) = qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
            wanted = torch.full((8, 128), -0.5 * int(zero_point.flatten()[0]))
            assert torch.equal(layer.dequantize(torch.float32).weight, wanted)
    write(tmp_path, {"0": {**own, "weight_zero_point": torch.tensor([9], dtype=torch.int8)}}, group)
    with pytest.raises(CheckpointError, match="zero points go from 9 to 9; those of 4 bits are from -8 to 8"):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
    for wrong in (torch.zeros(8, 2, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(8, 1)):
        write(tmp_path, {"0": {**own, "weight_zero_point": wrong}}, group)
        with pytest.raises(
            CheckpointError, match=r"weight_zero_point is .*; it must be int32 \[1, 1\] or int8 \[8, 1\]"
        ):
            qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))


def test_values_beyond_four_bits_are_refused(tmp_path: Path) -> None:
    tensors = {"weight": torch.full((8, 128), 8, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    write(tmp_path, {"0": tensors}, {"group_0": group_of("naive-quantized", weights(4, "channel"))})
    with pytest.raises(CheckpointError, match=r"0.weight: its values go from 8 to 8; those of 4 bits are from -8 to 7"):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))


def test_one_scale_for_a_tensor_and_scales_of_any_float_dtype(tmp_path: Path) -> None:
    float_dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.float32)
    for dtype, (strategy, shape) in product(float_dtypes, (("tensor", (1,)), ("channel", (8, 1)))):
        tensors = {**packed_layer(size=128), "weight_scale": torch.full(shape, 0.25, dtype=dtype)}
        tensors["weight_packed"] = tensors["weight_packed"] + 1
        write(tmp_path, {"0": tensors}, {"group_0": group_of("pack-quantized", weights(4, strategy))})
        (layer,) = qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
        assert layer.weight_scale.dtype == (torch.float32 if dtype == torch.float64 else dtype)
        assert torch.equal(layer.dequantize(torch.float32).weight[:, :8], torch.eye(8)[:1].expand(8, -1) / 4)


def test_a_key_value_cache_is_left_to_the_cache(tmp_path: Path) -> None:
    layers = {"0": packed_layer(), "attn": {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}}
    groups = {"group_0": group_of("pack-quantized", weights(4, "group", 32))}
    write(tmp_path, layers, groups, kv_cache_scheme={"num_bits": 8, "type": "float"})
    with pytest.warns(UserWarning, match="its scales of keys and values are not used"):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
    # Without such a scheme, nobody says what these numbers are.
    write(tmp_path, layers, groups)
    with pytest.raises(CheckpointError, match=r"tensors that the model doesn't have: .*attn.k_scale"):
        qgemm.load_quantized(tmp_path, model=lambda: linears((8, 128)))
