"""Whose residual stream is rotated, how, and what is refused, with the model as it was."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, Example
from families.mixtures import MIXTURES

import qgemm
from qgemm.calibration.residual_rotation import ResidualRotation, rotate_residual


def build(family: str) -> Example:
    """With gains that aren't 1."""
    torch.manual_seed(0)
    example = {**FAMILIES, **MIXTURES}[family]()
    with torch.no_grad():
        for name, parameter in example.model.named_parameters():
            if "norm" in name and not name.endswith("bias"):
                parameter.uniform_(0.5, 2)
    return example


# Biases; one layer for queries, keys and values; experts, with a bias and transposed, with shared ones, without gates.
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt_oss", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_and_hidden_states_are_rotated(family: str, dtype: torch.dtype) -> None:
    example = build(family)
    model: Any = example.model.to(dtype)
    with torch.no_grad():
        before = model(**example.inputs, output_hidden_states=True)
    assert rotate_residual(model, seed=3) == ""
    with torch.no_grad():
        after = model(**example.inputs, output_hidden_states=True)
    # Every weight is rounded once more. Measured: 1e-6 and 0.015.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (after.logits - before.logits).norm() < tolerance * before.logits.norm()
    for old, new in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        assert (new - old).norm() > 0.5 * old.norm()
        torch.testing.assert_close(new.norm(dim=-1), old.norm(dim=-1), rtol=max(tolerance, 1e-4), atol=0)


def test_weights_are_the_papers() -> None:
    model: Any = build("llama").model
    old = copy.deepcopy(model)
    assert rotate_residual(model) == ""
    # What R is, by what it makes of the embeddings.
    embeddings = [each.get_input_embeddings().weight.detach().double().numpy() for each in (old, model)]
    R = np.linalg.lstsq(*embeddings, rcond=None)[0]
    np.testing.assert_allclose(R @ R.T, np.eye(64), atol=1e-5)
    np.testing.assert_allclose(np.abs(R), 1 / 8, atol=1e-5)

    def weight(source: Any, name: str) -> Any:
        return source.get_submodule(name).weight.detach().double().numpy()

    layer = "model.layers.1"
    gain = weight(old, f"{layer}.post_attention_layernorm")
    assert (weight(model, f"{layer}.post_attention_layernorm") == 1).all()
    reader, writer = f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj"
    np.testing.assert_allclose(weight(model, reader), weight(old, reader) * gain @ R, atol=1e-5)
    np.testing.assert_allclose(weight(model, writer), R.T @ weight(old, writer), atol=1e-5)
    np.testing.assert_allclose(
        weight(model, "lm_head"), weight(old, "lm_head") * weight(old, "model.norm") @ R, atol=1e-5
    )


def test_signs_are_the_seeds() -> None:
    rotated = []
    for seed in (0, 1, 0):
        model: Any = build("llama").model
        assert rotate_residual(model, seed) == ""
        rotated.append(model.get_input_embeddings().weight)
    assert torch.equal(rotated[0], rotated[2])
    assert not torch.allclose(rotated[0], rotated[1])


REFUSED = {
    "qwen3": "'lm_head' is tied to 'model.embed_tokens'",
    "gpt_neox": "'gpt_neox.layers.0.input_layernorm' is a LayerNorm, whose mean a rotation doesn't keep",
    # Norms behind attention and MLP.
    "olmo2": "its logits would change by .* of their size: not all that reads or writes is known",
    # Experts of a layout of their own, that are given scaled inputs.
    "llama4": "its logits would change by .* of their size: not all that reads or writes is known",
    # Images would be added to a stream that is rotated.
    "llava": r"'model\.vision_tower\.embeddings' has no part in what it makes of tokens alone",
    "vit": "it isn't a language model with embeddings and a head",
}


@pytest.mark.parametrize("family", REFUSED)
def test_refusals_leave_the_model_as_it_was(family: str) -> None:
    example = build(family)
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    reason = rotate_residual(example.model)
    assert all(torch.equal(value, before[name]) for name, value in example.model.state_dict().items())

    assert re.fullmatch(REFUSED[family], reason)


def test_models_that_need_more_than_tokens() -> None:
    model: Any = build("llama").model
    model.model.forward = lambda input_ids, pixels: None
    assert rotate_residual(model) == "it doesn't run on tokens alone (TypeError)"


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_outlier_channels_of_the_stream_lose_their_harm(scheme: str) -> None:
    model: Any = build("llama").model
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 5] += 20
        ids = torch.randint(5, 97, (8, 24), generator=torch.Generator().manual_seed(0))
        expected = model(ids).logits
        errors = []
        for recipe in ([], [ResidualRotation()]):
            options: dict[str, Any] = {"recipe": recipe} if recipe else {}
            if scheme == "int8-static" or recipe:
                options["calibration"] = [{"input_ids": ids}]
            quantized = qgemm.quantize_model(copy.deepcopy(model), scheme, **options)
            assert not any(record.note for record in qgemm.report(quantized).quantized)
            errors.append(float((quantized(ids).logits - expected).norm()))
    # Measured: 0.71 and 0.73.
    assert errors[1] < 0.8 * errors[0], errors


def test_a_refusal_is_in_the_report() -> None:
    example = build("qwen3")
    qgemm.quantize_model(example.model, "int8", recipe=[ResidualRotation()])
    notes = {record.note for record in qgemm.report(example.model).quantized}
    assert notes == {"residual-rotation: not rotated: 'lm_head' is tied to 'model.embed_tokens'"}


def test_settings() -> None:
    assert ResidualRotation.from_dict(ResidualRotation(7).to_dict()) == ResidualRotation(7)
