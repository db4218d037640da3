"""Shards of one layer, cut by hand in one process: what all of them compute adds up to what the layer does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.nn import QuantExperts, QuantLayer
from qgemm.nn.kinds import linear_class
from qgemm.nn.quant_layer import frozen
from qgemm.nn.shard import Shard, Split, Style
from qgemm.scheme import resolve_scheme

SIZE = 2
# Whole groups, blocks of 128 and blocks of packed codes in each half.
K, N = 512, 256


class Alone(Shard):
    """A shard whose process waits for nobody."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def row_maxima(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True)


def linear(scheme: str, columns: int = K, rows: int = N, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    plain = nn.Linear(columns, rows)
    nn.init.normal_(plain.bias)
    kind, options = linear_class(resolve_scheme(scheme)), {}
    if "static" in scheme:
        options["input_scale"] = (0.02, 3) if "asymmetric" in scheme else 0.02
    if "outliers" in scheme:
        options["outlier_columns"] = (torch.arange(16) * 17 + 40 * seed) % 300
        options["outlier_columns"] = options["outlier_columns"].sort().values
    return kind.from_linear(plain, scheme, **options)


def shards(layer: QuantLayer, style: Style, **options: Any) -> list[Any]:
    cut = [copy.deepcopy(layer) for _ in range(SIZE)]
    for rank, part in enumerate(cut):
        part.cut(Alone(style, None, rank, SIZE, **options))
    return cut


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def gather_from(cut: list[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``torch.distributed`` gather the parameter ``name`` of all that were cut."""

    def gather(into: list[Tensor], *_: Any, **__: Any) -> None:
        for part, own in zip(cut, into, strict=True):
            own.copy_(part.stored(name).view(torch.uint8))

    monkeypatch.setattr("torch.distributed.all_gather", gather)


# One of each class of layers, and of each way to group and to pack.
SCHEMES = ("int8", "int8-static", "int8-static-asymmetric", "int8-outliers-16", "fp8", "fp8-block", "int4", "int4-int8",
           "int4-asymmetric", "int4-float-zeros", "int8-weight", "mxfp4", "nvfp4")  # fmt: skip
# Whose activations have a scale for a row: that of a part of it is another.
ROUNDS_ROWS = ("int8", "int8-outliers-16", "fp8", "int4-int8")


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_side_by_side(scheme: str) -> None:
    layer, x = linear(scheme), torch.randn(3, K)
    one, two = shards(layer, "column")
    assert (one.in_features, one.out_features) == (K, N // SIZE)
    torch.testing.assert_close(torch.cat((one(x), two(x)), -1), layer(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_sums(scheme: str) -> None:
    layer, x = linear(scheme), torch.randn(3, K)
    cut = shards(layer, "row")
    assert [(part.in_features, part.whole_in_features, part.out_features) for part in cut] == [(K // SIZE, K, N)] * 2
    found = sum(part(own) for part, own in zip(cut, x.chunk(SIZE, -1), strict=True))
    assert error(found, layer(x)) < (0.03 if scheme in ROUNDS_ROWS else 2e-6)


@torch.no_grad()
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_shard_loads_what_a_shard_stored(scheme: str, style: Style) -> None:
    """Into one that was cut with other values, and is moved in between."""
    x = torch.randn(3, K)
    for given, taking in zip(shards(linear(scheme), style), shards(linear(scheme, seed=1), style), strict=True):
        own = x[:, : given.in_features]
        taking(own)
        taking.load_state_dict(given.state_dict())
        assert torch.equal(taking(own), given(own))
        assert torch.equal(copy.deepcopy(taking.to(torch.bfloat16))(own), taking(own))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int8-outliers-16"])
def test_shared_scales_under_autocast(scheme: str) -> None:
    part, x = shards(linear(scheme), "row", shares_scales=True)[0], torch.randn(3, K // SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        assert part(x).dtype == torch.bfloat16


def test_a_shard_is_not_a_float_layer() -> None:
    for part in (*shards(linear("int8-hadamard"), "row"), *shards(linear("int4"), "column")):
        with pytest.raises(ValueError, match=r"is split among processes: call model.save_pretrained"):
            part.dequantize()


@pytest.mark.parametrize(("scheme", "size"), [("int4", 3), ("mxfp4", 2), ("mxfp4", 3), ("nf4", 6)])
def test_codes_in_other_blocks_than_those_of_the_whole(scheme: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Halves, thirds and sixths of three blocks of 256 are whole groups, and not whole blocks of packed codes.
    layer, x = linear(scheme, 768), torch.randn(3, 768)
    cut = [copy.deepcopy(layer) for _ in range(size)]
    for rank, part in enumerate(cut):
        part.cut(Alone("row", None, rank, size))
    found = sum(part(own) for part, own in zip(cut, x.chunk(size, -1), strict=True))
    assert error(found, layer(x)) < 2e-6

    gather_from(cut, "weight", monkeypatch)
    assert torch.equal(cut[0].whole("weight"), layer.stored("weight"))


@torch.no_grad()
def test_gate_and_up_in_one_layer() -> None:
    layer, x = linear("int8"), torch.randn(3, K)
    one, two = shards(layer, "column", parts=2)
    gates, ups = zip(one(x).chunk(2, -1), two(x).chunk(2, -1), strict=True)
    torch.testing.assert_close(torch.cat((*gates, *ups), -1), layer(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("style", ["column", "expert"])
@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_experts(scheme: str, style: Style, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # Halves of 768 columns aren't whole blocks of packed codes.
    layer = QuantExperts(4, 256, 768, bias=True, device="cpu", scheme=scheme)
    for name in ("gate_up_proj", "down_proj"):
        kind = layer.linear_of(name)
        made = [
            kind.convert_rows(torch.randn(kind.out_features, kind.in_features) * 0.05) for _ in range(layer.num_experts)
        ]
        for leaf, end in (("weight", ""), ("weight_scale", "_scale")):
            setattr(layer, name + end, frozen(torch.stack([each[leaf] for each in made])))
        setattr(layer, f"{name}_bias", frozen(torch.randn(4, kind.out_features)))
    x, index, weights = torch.randn(6, 256), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    residual = torch.randn(6, 256)
    cut = shards(layer, style)
    found = sum(part(x, index, weights, residual) for part in cut)
    exact = scheme == "mxfp4" or style == "expert"
    assert error(found, layer(x, index, weights, residual)) < (2e-6 if exact else 0.03)
    for name in layer.weight_names:
        gather_from(cut, name, monkeypatch)
        assert torch.equal(cut[0].whole(name), layer.stored(name))


def test_parts_of_parameters() -> None:
    whole = torch.arange(24).reshape(2, 12)
    parts = [Shard("column", None, rank, SIZE).part_of(whole, Split(1, 2)) for rank in range(SIZE)]
    assert parts[1][0].tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(parts[0][1], torch.tensor([12, 13, 14, 18, 19, 20]))


@pytest.mark.parametrize(
    ("scheme", "style", "size", "reason"),
    [
        ("int8", "row", 3, "its 512 inputs aren't a multiple of 3"),
        ("int8", "column", 3, "its 256 outputs aren't a multiple of 3"),
        ("int4", "row", 8, "its 512 inputs aren't a multiple of 1024, 8 blocks of 128"),
        ("fp8-block", "column", 4, "its 256 outputs aren't a multiple of 512, 4 blocks of 128"),
        ("int4-ordered", "row", 2, "its columns are in an order of their own"),
        ("int8", "expert", 2, "it is no mixture of experts"),
    ],
)
def test_what_cannot_be_cut(scheme: str, style: Style, size: int, reason: str) -> None:
    assert linear(scheme).why_whole(style, size).startswith(reason)
    assert linear(scheme).why_whole("column", 2) == ""


def test_experts_that_cannot_be_cut() -> None:
    layer = QuantExperts(3, 128, 96, device="meta")
    assert layer.why_whole("expert", 2) == "it has 3 experts, for 2 processes"
    assert layer.why_whole("column", 5).startswith("its 192 outputs aren't a multiple of 10")
    assert layer.why_whole("column", 2) == ""
