"""The mxfp4 experts of GPT-OSS: decoded bit for bit; refused until a layer computes them."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

import qgemm
from checkpoint.samples import SAMPLES, digest, reference_weights
from qgemm import CheckpointError
from qgemm.checkpoint.gpt_oss import decode_experts
from qgemm.numerics.formats import FP4
from qgemm.numerics.groups import float_scale

NAME = "mxfp4-gpt-oss"


def test_the_decoder_is_bit_equal() -> None:
    tensors = load_file(SAMPLES / NAME / "model.safetensors")
    wanted = reference_weights(NAME)
    assert len(wanted) == 4
    for name, reference in wanted.items():
        codes, exponents = decode_experts(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        weight = FP4.decode(codes) * float_scale(exponents).repeat_interleave(32, -1)
        assert list(weight.shape) == reference["shape"]
        assert digest(weight) == reference["sha256_float32"]


def test_they_are_refused_by_name() -> None:
    with pytest.raises(
        CheckpointError, match=r"model.layers.0.mlp.experts.\w+ holds experts in mxfp4, which qgemm doesn't"
    ):
        qgemm.load_quantized(SAMPLES / NAME)
