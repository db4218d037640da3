"""What a group of the config becomes: a scheme, a scheme and a note, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.library import FP8_GROUPS, FP8_STATIC, FP8_TOKENS, INT8_TOKENS, group_of, weights
from qgemm.checkpoint.compressed_tensors_groups import Unsupported, parse_group

FP4_LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
FP8_MX = {**FP8_GROUPS, "group_size": 32}
NVFP4 = weights(4, "tensor_group", 16, "float")
MXFP8 = weights(8, "group", 32, "float", scale_dtype="torch.uint8")
FP8_ROWS = weights(8, "channel", kind="float")
FP8_BLOCK = weights(8, "block", kind="float", block_structure=[128, 128])


@pytest.mark.parametrize(
    ("group", "scheme", "left_out"),
    [
        (group_of("pack-quantized", weights(4, "group", 48)), "int4-48", ""),
        (group_of("pack-quantized", {"num_bits": 4, "group_size": 128}), "int4", ""),
        (group_of("pack-quantized", {"num_bits": 8, "group_size": -1}), "int8-weight", ""),
        (group_of("pack-quantized", {"group_size": -1}), "int8-weight", ""),
        (
            group_of("int-quantized", weights(4, "channel", symmetric=False), INT8_TOKENS),
            "int4-channel-asymmetric-int8",
            "",
        ),
        (group_of("pack-quantized", weights(4, "channel"), FP8_TOKENS), "int4-channel", "fp8"),
        (group_of("float-quantized", {**FP8_BLOCK, "block_structure": "128x128"}, FP8_GROUPS), "fp8-block", ""),
        (group_of("naive-quantized", weights(8, "tensor", kind="float")), "fp8-weight", ""),
        (group_of("float-quantized", weights(8, "channel", kind="float"), FP8_STATIC), "fp8-static", ""),
        (group_of("mxfp8-quantized", MXFP8, FP8_MX), "mxfp8", "fp8"),
        (group_of("mxfp4-pack-quantized", weights(4, "group", 32, "float"), FP8_GROUPS), "mxfp4", "fp8"),
        (group_of("nvfp4-pack-quantized", NVFP4, FP4_LOCAL), "nvfp4", "fp4"),
    ],
)
def test_what_a_group_becomes(group: dict[str, Any], scheme: str, left_out: str) -> None:
    parsed = parse_group("group_0", group, None)
    assert parsed.scheme == scheme
    assert parsed.note == (f"activations stay in float, where the checkpoint asks for {left_out}" if left_out else "")
    # The format of the whole config counts where the group has none.
    assert parse_group("group_0", {**group, "format": None}, group["format"]) == parsed


@pytest.mark.parametrize(
    ("group", "scheme"),
    [
        (group_of("float-quantized", FP8_ROWS, {**FP8_STATIC, "dynamic": True}), "fp8"),
        (group_of("int-quantized", FP8_ROWS, {**FP8_TOKENS, "strategy": "tensor"}), "fp8"),
        (group_of("int-quantized", weights(8, "channel"), {**INT8_TOKENS, "strategy": "tensor"}), "int8"),
    ],
)
def test_one_scale_for_all_activations_becomes_one_for_each_token(group: dict[str, Any], scheme: str) -> None:
    parsed = parse_group("group_0", group, None)
    assert parsed.scheme == scheme
    assert parsed.note == "activations get a scale for each token, where the checkpoint asks for one for all of them"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (group_of("pack-quantized", weights(3, "channel")), "weights of 3 bits"),
        (group_of("pack-quantized", weights(4, "group", 24)), "int4 weights that qgemm has no scheme for"),
        (group_of("pack-quantized", weights(4, "block", block_structure=[128, 128])), r"per block of \(128, 128\)"),
        (group_of("pack-quantized", weights(4, "channel", dynamic=True)), "dynamic weights"),
        (group_of("pack-quantized", weights(4, "channel"), {**INT8_TOKENS, "symmetric": False}), "asymmetric input"),
        (group_of("int-quantized", weights(4, "channel"), {**FP8_STATIC, "type": "int"}), "int8 .*, static per tensor"),
        (group_of("int-quantized", weights(8, "group", 128), INT8_TOKENS), "int8 weights per group of 128"),
        (group_of("int-quantized", weights(8, "channel", symmetric=False), INT8_TOKENS), "asymmetric int8 weights"),
        (group_of("int-quantized", weights(8, "channel"), FP8_TOKENS), "fp8 input_activations, .* with int8 weights"),
        (group_of("float-quantized", weights(8, "channel", kind="float"), INT8_TOKENS), "int8 input_.* fp8 weights"),
        (group_of("float-quantized", FP8_BLOCK), "leaves the input_activations in float, with fp8 weights in blocks"),
        (group_of("float-quantized", FP8_BLOCK, FP8_MX), "group of 32, with fp8 weights per block"),
        (
            group_of("float-quantized", {**FP8_BLOCK, "block_structure": [64, 64]}, FP8_GROUPS),
            r"per block of \(64, 64\)",
        ),
        (group_of("float-quantized", {**FP8_BLOCK, "block_structure": [128, 64]}), r"per block of \(128, 64\)"),
        (
            group_of("float-quantized", {**FP8_BLOCK, "block_structure": "128xK"}),
            "fp8 weights scaled per block, stored",
        ),
        (
            group_of("float-quantized", {**FP8_BLOCK, "block_structure": [128] * 3}),
            "fp8 weights scaled per block, stored",
        ),
        (group_of("float-quantized", {**FP8_BLOCK, "strategy": "row"}), "fp8 weights scaled per row"),
        (group_of("float-quantized", weights(8, "group", 32, "float"), FP8_MX), "per group of 32, stored as 'float-q"),
        (group_of("mxfp8-quantized", FP8_ROWS), "fp8 weights scaled per channel, stored as 'mxfp8"),
        (group_of("nvfp4-pack-quantized", {**NVFP4, "symmetric": False}), "asymmetric weights"),
        (group_of("nvfp4-pack-quantized", weights(4, "channel", kind="float")), "fp4 weights scaled per channel"),
        (group_of("nvfp4-pack-quantized", weights(4, "group", 32, "float")), "per group of 32, stored as 'nvfp4"),
        (group_of("mxfp6-pack-quantized", weights(6, "group", 32, "float")), "weights of 6 bits, 'float'"),
        (group_of("float-quantized", weights(8, "channel")), "stored as 'float-quantized'"),
        (group_of("marlin-24", weights(4, "channel")), "stored as 'marlin-24'"),
        (
            {**group_of("int-quantized", weights(8, "channel")), "output_activations": {}},
            "quantizes output_activations",
        ),
        (group_of("int-quantized", [8]), "weights that are no object"),  # type: ignore[arg-type]
        ({"targets": ["Linear"]}, "leaves the weights in float"),
        (group_of("int-quantized", weights([8], "channel")), r"weights of \[8\] bits"),  # type: ignore[arg-type]
        (group_of("pack-quantized", weights(4, "channel", symmetric="no")), "symmetric 'no'"),
        (group_of("pack-quantized", weights(4, "channel"), {**INT8_TOKENS, "dynamic": "all"}), "dynamic 'all'"),
        (group_of("pack-quantized", weights(4, "group", "128")), "weights of 4 bits"),  # type: ignore[arg-type]
        (group_of("int-quantized", weights(8, "channel"), {**INT8_TOKENS, "num_bits": None}), "of None bits"),
        (group_of("int-quantized", weights(8, ["group"])), r"scaled per \['group'\]"),  # type: ignore[arg-type]
        (group_of([], weights(8, "channel")), r"stored as \[\]|stored as None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        parse_group("group_0", group, None)


@pytest.mark.parametrize("inputs", [None, INT8_TOKENS])
def test_layers_with_an_order_of_columns(inputs: dict[str, Any] | None) -> None:
    parsed = parse_group("group_0", group_of("int-quantized", weights(4, "group", 32), inputs), None)
    activations = "" if inputs is None else "-int8"
    assert parsed.scheme_of(is_ordered=True).name == f"int4-32-ordered{activations}"
    assert parsed.scheme_of(is_ordered=False).name == f"int4-32{activations}"
