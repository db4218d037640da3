"""Padding doesn't count: batches that are padded give the statistics of their sequences without padding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
from calibration.blocks import block_of
from qgemm.calibration import AWQ, GPTQ, Call, Method, OutlierColumns, SmoothQuant
from qgemm.calibration.expert_work import counted_experts
from qgemm.calibration.padding import Batch, Masks
from qgemm.calibration.sensitivity import sensitivity
from qgemm.model.selection import select_layers

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
SLOW = AWQ(), SmoothQuant()
DECODER_MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()


def test_rows_of_every_shape() -> None:
    masks, x = Masks(MASK), torch.randn(2, 5, 8)
    tokens = torch.cat((x[0, :3], x[1]))
    assert torch.equal(masks.tokens(x, "layer"), tokens)
    assert torch.equal(masks.tokens(x.reshape(10, 8), "layer"), tokens)  # experts and routers
    assert torch.equal(masks.tokens(x.reshape(10, 2, 4), "layer"), tokens.view(8, 2, 4))
    assert torch.equal(masks.tokens(x.view(2, 5, 2, 4), "layer"), tokens.view(8, 2, 4))  # heads
    swapped = masks.tokens(x.transpose(0, 1), "layer")  # tokens first, as XLNet has them
    assert torch.equal(swapped, tokens)
    # A pooled token of each sequence, patches of an image, K as many as tokens, another length, one row.
    for shape in ((2, 8), (1, 16, 8), (2, 5), (2, 6, 8), (8,)):
        other = torch.randn(shape)
        assert masks.tokens(other, "layer") is other
    assert Masks().tokens(x, "layer") is x


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("encoder.block.0.layer.0.SelfAttention.k", MASK),
        ("model.encoder.layers.0.fc1", MASK),
        ("decoder.block.0.layer.0.SelfAttention.k", DECODER_MASK),
        ("decoder.block.0.layer.1.EncDecAttention.q", DECODER_MASK),
        ("decoder.block.0.layer.1.EncDecAttention.k", MASK),
        ("model.decoder.layers.0.encoder_attn.v_proj", MASK),
        ("model.decoder.layers.0.encoder_attn.out_proj", DECODER_MASK),
        ("model.decoder.layers.0.fc1", DECODER_MASK),
        ("decoder.bert.encoder.layer.0.crossattention.self.key", MASK),
        ("decoder.bert.encoder.layer.0.crossattention.output.dense", DECODER_MASK),
        ("decoder.bert.encoder.layer.0.attention.self.key", DECODER_MASK),
        ("decoder.transformer.h.0.crossattention.c_attn", MASK),
        ("adapter", MASK | DECODER_MASK),
    ],
)
def test_lengths_that_are_alike_are_told_apart_by_name(name: str, mask: Tensor) -> None:
    x = torch.randn(2, 5, 8)
    assert torch.equal(Masks(MASK, DECODER_MASK, True).tokens(x, name), x[mask])
    # Without a mask, all of a decoder's tokens count.
    kept = Masks(MASK, None, True).tokens(x, name)
    assert torch.equal(kept, x[MASK]) if mask is MASK else kept is x
    # Where there is no decoder, names of that kind mean nothing.
    assert torch.equal(Masks(MASK).tokens(x, name), x[MASK])


class Model(nn.Module):
    def forward(self, x: Any, attention_mask: Tensor | None = None, **more: Any) -> None: ...


def test_masks_are_found_among_arguments() -> None:
    model, ids = Model(), torch.ones(2, 5)

    def own(*args: Any, **kwargs: Any) -> Tensor | None:
        return Masks.of(model, args, kwargs).own

    for mask in (MASK, MASK.long(), MASK.float()):
        for found in (own(ids, mask), own(ids, attention_mask=mask), own({"input_ids": ids, "attention_mask": mask})):
            assert found is not None
            assert torch.equal(found, MASK)
    # Nothing left out, one for each pair of tokens, on meta, more arguments than there may be.
    for args in ((ids, MASK | True), (ids, MASK[:, None, None]), (ids, MASK.to("meta")), (ids,), (ids, MASK, 1)):
        assert own(*args) is None
    assert not Masks.of(model, (ids, MASK), {}).has_decoder
    both = Masks.of(model, (ids,), {"decoder_attention_mask": DECODER_MASK, "attention_mask": MASK})
    assert both.has_decoder
    assert both.decoder is not None
    assert torch.equal(both.decoder, DECODER_MASK)


def padded(family: str) -> tuple[Any, dict[str, Tensor], list[dict[str, Tensor]]]:
    """A model in which padding is loud, a batch of two sequences, and each without padding."""
    example = {**FAMILIES, **MIXTURES}[family]()
    model = example.model
    ids = torch.randint(5, 97, (2, 9))
    ids[0, 6:] = 1
    batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    alone = [{"input_ids": ids[:1, :6]}, {"input_ids": ids[1:]}]
    if model.config.is_encoder_decoder:
        decoder = torch.randint(5, 97, (2, 9))
        decoder[1, 4:] = 1
        batch |= {"decoder_input_ids": decoder, "decoder_attention_mask": (decoder != 1).long()}
        alone[0]["decoder_input_ids"], alone[1]["decoder_input_ids"] = decoder[:1], decoder[1:, :4]
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = 3.0 * torch.randn(model.get_input_embeddings().weight.shape[1])
    return model, batch, alone


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize("family", ["llama", "bert", "t5", "bart", "mixtral"])
def test_scales_are_those_of_sequences_without_padding(family: str) -> None:
    model, batch, alone = padded(family)
    with qgemm.calibrate(model, "percentile") as wanted, torch.no_grad():
        for each in alone:
            model(**each)
    with qgemm.calibrate(model, "percentile") as got, torch.no_grad():
        model(**batch)
    with qgemm.calibrate(model, "percentile") as loud, torch.no_grad():
        model(**{key: value for key, value in batch.items() if "mask" not in key})
    assert list(got.statistics) == list(wanted.statistics)
    for name, seen in got.statistics.items():
        expected = wanted.statistics[name]
        assert seen.tokens == expected.tokens, name
        assert loud.statistics[name].tokens >= seen.tokens
        torch.testing.assert_close(seen.channel_max, expected.channel_max, rtol=1e-4, atol=1e-5)
        assert seen.scale() == pytest.approx(expected.scale(), rel=0.01)
    # And of batches, by the model as a whole and block by block.
    for settings in ({}, {"recipe": []}):
        quantized = copy.deepcopy(model), copy.deepcopy(model)
        for each, calibration in zip(quantized, ([batch], alone), strict=True):
            qgemm.quantize_model(each, "int8-static", calibration=calibration, progress=False, **settings)
        scales = [dict(each.named_parameters()) for each in quantized]
        for name in scales[0]:
            if name.endswith("input_scale"):
                # Block by block, a value may be rounded to the next step in one of them.
                torch.testing.assert_close(scales[0][name], scales[1][name], rtol=0.05, atol=0)


# All read tokens in one way, so that two show which of a decoder's and an encoder's count; all with --complete.
@pytest.mark.slow(quick=["llama-method0"])
@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[pytest.mark.complete] if family == "t5" and method in SLOW else [])
        for family in ("llama", "t5")
        for method in (GPTQ(), AWQ(), SmoothQuant(), OutlierColumns(count=16))
    ],
)
def test_methods_see_no_padding(family: str, method: Method) -> None:
    model, batch, alone = padded(family)
    weights = []
    for calibration in ([batch], alone, [{key: value for key, value in batch.items() if "mask" not in key}]):
        block = block_of(copy.deepcopy(model), *calibration)
        method.apply(block)
        weights.append(
            torch.cat(
                [
                    w.outlier_columns.float()
                    if w.outlier_columns is not None
                    else w.module.weight.detach().flatten()
                    if w.weight is None
                    else w.weight.values.float().flatten()
                    for w in block.layers.values()
                ]
            )
        )
    different, loud = (float((each != weights[1]).float().mean()) for each in (weights[0], weights[2]))
    if isinstance(method, SmoothQuant):
        different, loud = (float((each - weights[1]).norm() / weights[1].norm()) for each in (weights[0], weights[2]))
    assert different < 0.02 < loud


# Llama 4's experts are given rows for each.
@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_tokens_of_experts_are_counted_without_padding(family: str) -> None:
    model, batch, alone = padded(family)
    names = [layer.name for layer in select_layers(model, None) if layer.is_experts]
    counts = []
    for calibration in ([batch], alone):
        running = Batch()
        with running.watching(model), counted_experts(model, names, running) as tokens, torch.no_grad():
            for each in calibration:
                model(**each)
        counts.append({name: count.tolist() for name, count in tokens.items()})
    assert counts[0] == counts[1]
    assert all(sum(count) % 15 == 0 for count in counts[0].values())


def test_sensitivity_leaves_padding_out() -> None:
    model, batch, alone = padded("llama")
    results = [sensitivity(model, data, progress=False) for data in ([batch], alone)]
    assert results[0].tokens == results[1].tokens == 15
    for one, other in zip(*(result.records for result in results), strict=True):
        assert one.layer_error == pytest.approx(other.layer_error, rel=1e-3)


def test_a_batch_of_nothing_but_padding_counts_nothing() -> None:
    model, batch, _ = padded("llama")
    nothing = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros_like(batch["attention_mask"])}
    block = block_of(model, batch)
    seen: Sequence[Any] = [block.collect(rows=4, second_moment=True)]
    block.calls = [Call((), nothing), Call((), batch)]
    seen = [*seen, block.collect(rows=4, second_moment=True)]
    for name, each in seen[0].items():
        assert torch.equal(each.second_moment, seen[1][name].second_moment)


def test_masks_of_one_call_are_not_those_of_the_next() -> None:
    model, batch, _ = padded("llama")
    with qgemm.calibrate(model) as seen, torch.no_grad():
        model(**batch)
        model.model(batch["input_ids"])  # past the model, whose masks are known
    assert {each.tokens for each in seen.statistics.values()} == {15 + 18}
