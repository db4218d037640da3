"""torchao's weights of 4 bits with float zero points, against their layouts written out value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import qgemm
from checkpoint.packers import linears
from checkpoint.rewriting import edited
from checkpoint.samples import layers_in, logit_error
from checkpoint.test_torchao import attributes, write
from qgemm import CheckpointError


def test_the_sample() -> None:
    layers = layers_in("int4-32-float-zeros", "torchao-int4").values()
    assert {layer.weight_zero_point.dtype for layer in layers} == {torch.bfloat16}
    assert logit_error("torchao-int4") < 1e-6


def values(N: int, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, scales and zero points of groups of 32, ``[groups, N]``, and the weight."""
    torch.manual_seed(0)
    q = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    scale, zero = torch.randn(2, K // 32, N).bfloat16()
    return q, scale, zero, q * spread(scale) + spread(zero)


def spread(factors: Tensor) -> Tensor:
    return factors.float().t().repeat_interleave(32, 1)


def plain(q: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    pairs = q[:, ::2] & 15 | q[:, 1::2] << 4
    return {"a._weight_qdata": pairs, "a._weight_scale": scale, "a._weight_zero_point": zero}


def tiles(q: Tensor, scale: Tensor, zero: Tensor, rows: int, columns: int, parts: int = 4) -> dict[str, Tensor]:
    """Padded to ``[rows, columns]``, as PyTorch's ``_convert_weight_to_int4pack`` orders them on a CUDA GPU."""
    padded = torch.zeros(rows, columns, dtype=torch.int64)
    padded[: q.shape[0], : q.shape[1]] = q.long() + 8
    octets = padded[:, ::2] << 4 | padded[:, 1::2]
    words = torch.zeros(rows // 8, columns // (32 * parts), 32, parts, dtype=torch.int64)
    for n, k, lane, part in torch.ones_like(words).nonzero().tolist():
        first = (k * parts + part) * 16 + lane % 4
        own = [int(octets[n * 8 + lane // 4, first + 4 * i]) for i in range(4)]
        for i, octet in enumerate(own):
            words[n, k, lane, part] |= octet >> 4 << 4 * i | (octet & 15) << 16 + 4 * i
    both = torch.zeros(columns // 32, rows, 2, dtype=scale.dtype)
    both[: len(scale), : q.shape[0]] = torch.stack((scale, zero), -1)
    words = torch.where(words < 2**31, words, words - 2**32)
    return {"a._weight_qdata": words.int(), "a._weight_scale_and_zero": both}


def read(folder: Path, N: int, K: int) -> Any:
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


def int4(**data: Any) -> str:
    return attributes("Int4Tensor", **{"block_size": [1, 32], **data})


def tile_packed(N: int, K: int, size: int = 32) -> str:
    return attributes("Int4TilePackedTo4dTensor", block_size=[1, size], shape=[N, K])


def test_plain(tmp_path: Path) -> None:
    q, scale, zero, weight = values(16, 96)
    layer = read(write(tmp_path, plain(q, scale, zero), int4()), 16, 96)
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    assert torch.equal(layer.weight_zero_point, zero.t())


def test_zero_points_of_0_make_it_symmetric(tmp_path: Path) -> None:
    q, scale, zero, _ = values(16, 96)
    about = int4(activation_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"})
    folder = write(tmp_path, plain(q, scale, torch.zeros_like(zero)), about)
    with pytest.warns(UserWarning, match="activations stay in float, where the checkpoint asks for fp8"):
        layer = read(folder, 16, 96)
    assert layer.scheme.name == "int4-32"
    assert torch.equal(layer.dequantize(torch.float32).weight, q * spread(scale))


@pytest.mark.parametrize(("N", "K", "columns", "parts"), [(13, 160, 256, 4), (16, 64, 64, 2), (8, 32, 128, 4)])
def test_tiles(N: int, K: int, columns: int, parts: int, tmp_path: Path) -> None:
    q, scale, zero, weight = values(N, K)
    folder = write(tmp_path, tiles(q, scale, zero, -(-N // 8) * 8, columns, parts), tile_packed(N, K))
    layer = read(folder, N, K)
    assert layer.scheme.name == ("int4-channel-float-zeros" if K == 32 else "int4-32-float-zeros")
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1,)])
def test_inputs_that_awq_scales(shape: tuple[int, ...], tmp_path: Path) -> None:
    q, scale, zero, weight = values(16, 96)
    factors = torch.rand(shape).bfloat16()
    layer = read(write(tmp_path, {**plain(q, scale, zero), "a._weight_act_pre_scale": factors}, int4()), 16, 96)
    assert layer.scheme.name == "int4-32-float-zeros-prescaled"
    assert torch.equal(layer.input_prescale, factors.flatten().expand(96))
    x = torch.randn(3, 96)
    torch.testing.assert_close(layer(x), nn.functional.linear(x * factors.float(), weight))


# Of the first layer the others would take the scheme.
@pytest.mark.parametrize("symmetric", [None, "0.w1", "1.w2"])
def test_experts(symmetric: str | None, tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=32))
    experts = "model.layers.0.block_sparse_moe.experts"
    names = [f"{experts}.{i}.{leaf}" for i in range(2) for leaf in ("w1", "w2", "w3")]
    tensors = {name: each for name, each in model.state_dict().items() if "experts" not in name}
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): each for name, each in tensors.items()}
    q, scale, zero, weight = values(64, 64)
    for name in names:
        # Zero points of 0 make a layer symmetric, which those of others don't.
        own = zero * 0 if name == f"{experts}.{symmetric}" else zero
        tensors |= {key.replace("a.", f"{name}.", 1): each.clone() for key, each in plain(q, scale, own).items()}
    save_file(tensors, tmp_path / "model.safetensors", {f"{name}.weight": int4() for name in names})
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as config:
        config["quantization_config"] = {"quant_method": "torchao"}
    layer = qgemm.load_quantized(tmp_path).model.layers[0].mlp.experts
    assert layer.scheme.name == "int4-32-float-zeros"
    assert layer.down_proj_zero_point.dtype == torch.bfloat16
    made, wanted = layer.dequantize(torch.float32), dict.fromkeys(names, weight)
    if symmetric is not None:
        wanted[f"{experts}.{symmetric}"] = q * spread(scale)
    for i in range(2):
        gate, up, down = (wanted[f"{experts}.{i}.{leaf}"] for leaf in ("w1", "w3", "w2"))
        assert torch.equal(made["gate_up_proj"][i], torch.cat((gate, up)))
        assert torch.equal(made["down_proj"][i], down)
    factors = {f"{name}._weight_act_pre_scale": torch.rand(64) for name in names}
    save_file({**tensors, **factors}, tmp_path / "model.safetensors", {f"{name}.weight": int4() for name in names})
    with pytest.raises(CheckpointError, match=r"an expert in int4-32.*-prescaled, which qgemm doesn't compute: give a"):
        qgemm.load_quantized(tmp_path)
    converted = qgemm.load_quantized(tmp_path, scheme="int8").model.layers[0].mlp.experts.dequantize(torch.float32)
    for i in range(2):
        down = wanted[f"{experts}.{i}.w2"] * factors[f"{experts}.{i}.w2._weight_act_pre_scale"]
        assert (converted["down_proj"][i] - down).norm() < 0.01 * down.norm()


Q, SCALE, ZERO, _ = values(16, 64)
PLAIN, TILES = plain(Q, SCALE, ZERO), tiles(Q, SCALE, ZERO, 16, 128)
QDATA = PLAIN["a._weight_qdata"]
SMALL = plain(Q, *(each.repeat_interleave(4, 0) for each in (SCALE, ZERO)))
REFUSED: dict[str, tuple[dict[str, Tensor], str, str]] = {
    "no block size": (PLAIN, int4(block_size=None), r"block_size of a.weight is None; it must be \[1, group size\]"),
    "other groups": (PLAIN, int4(block_size=[1, 64]), r"_scale is torch.bfloat16 \[2, 16\]; .*, \[1, 16\]"),
    "groups of 8": (SMALL, int4(block_size=[1, 8]), "a has groups of 8 columns; qgemm computes groups of any multiple"),
    "no zero points": ({k: v for k, v in PLAIN.items() if "zero" not in k}, int4(), r"_weight_zero_point is missing"),
    "whole numbers": ({**PLAIN, "a._weight_zero_point": ZERO.to(torch.int8)}, int4(), r"_zero_point is torch.int8"),
    "of experts": ({**PLAIN, "a._weight_qdata": QDATA[None]}, int4(), r"it must be torch.int8, \[N, K / 2\]"),
    "scaled inputs": ({**PLAIN, "a._weight_act_pre_scale": torch.ones(32)}, int4(), r"_act_pre_scale is .* \[32\]; it"),
    "tiles of bytes": (PLAIN, tile_packed(16, 64), r"_qdata is torch.int8 \[16, 32\]; it must be torch.int32, \[N / 8"),
    "few tiles": (TILES, tile_packed(17, 64), r"it must be tiles for \[17, 64\]"),
    "no shape": (TILES, attributes("Int4TilePackedTo4dTensor", block_size=[1, 32]), r"shape of a.weight is None"),
    "tiles of other groups": (TILES, tile_packed(16, 64, 64), r"_scale_and_zero is .* \[4, 16, 2\]; .* \[2, 16, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, about, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()}, about), 16, 64)


def test_nan(tmp_path: Path) -> None:
    zero = ZERO.clone()
    zero[1, 3] = torch.nan
    with pytest.raises(CheckpointError, match=r"a\._weight_zero_point holds NaN"):
        read(write(tmp_path, plain(Q, SCALE, zero), int4()), 16, 64)


def test_another_scheme(tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, int4())
    layer = qgemm.load_quantized(folder, model=linears(a=(16, 64)), scheme="int8")["a"]
    like: Any = nn.Linear(64, 16, bias=False)
    like.weight.data = Q * spread(SCALE) + spread(ZERO)
    assert torch.equal(layer.weight_scale, qgemm.QuantLinear.from_linear(like).weight_scale)
