"""Layers of models of images and sounds are verified on made inputs, also those that the model's forward leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, Example
from families.example import DEPTH, VOCABULARY, example, random, tokens

from fusion.encoders import ENCODERS_BY_INPUT, PACKED
from fusion.test_fuse import BOTH, fused_parts
from qgemm import fuse, fusion_report, quantize_model
from qgemm.fusion.inputs import made_inputs

_TEXT = {**DEPTH, "vocab_size": VOCABULARY, "intermediate_size": 96, "max_position_embeddings": 64}
_IMAGE = {**DEPTH, "intermediate_size": 96, "image_size": 96, "patch_size": 8}


def _llava(vision: str) -> Example:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    parts = {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": {"model_type": vision, **_IMAGE}}
    config = LlavaConfig(**parts, image_token_index=VOCABULARY - 1)
    return example(LlavaForConditionalGeneration, config, input_ids=tokens())


@pytest.mark.parametrize("vision", ["clip_vision_model", "siglip_vision_model", "pixtral"])
def test_the_vision_tower_of_a_model_of_text(vision: str) -> None:
    model: Any = quantize_model(_llava(vision).model)
    tower, pixels = model.model.vision_tower, random(2, 3, 96, 96)
    sizes = {"image_sizes": torch.tensor([[96, 96], [96, 96]])} if vision == "pixtral" else {}
    with torch.no_grad():
        expected = tower(pixels, **sizes).last_hidden_state
        seen: list[Any] = []
        handle = tower.register_forward_hook(lambda *_: seen.append(1))
        fuse(model)
        handle.remove()
        found = tower(pixels, **sizes).last_hidden_state
    assert fused_parts(model).count(BOTH) == 4
    assert len(seen) == 1  # even if the whole model then refused the image
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["vit", "swin", "clip", "whisper", "wav2vec2", *ENCODERS_BY_INPUT, *PACKED])
def test_models_of_images_and_sounds_need_no_inputs(family: str) -> None:
    found = {**FAMILIES, **ENCODERS_BY_INPUT, **PACKED}[family]()
    quantize_model(found.model)
    expected = found.output()
    fuse(found.model)
    assert fusion_report(found.model).records
    assert not any("verified" in record.reason for record in fusion_report(found.model).records)
    assert torch.equal(found.output(), expected)


def test_a_large_image_is_made_small_or_not_at_all() -> None:
    from transformers import SamVisionConfig, SiglipVisionConfig, SiglipVisionModel
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    with torch.device("meta"):
        siglip = SiglipVisionModel(SiglipVisionConfig(**{**_IMAGE, "image_size": 4096}))
        sam = SamVisionEncoder(SamVisionConfig(num_hidden_layers=1))
    sizes = [inputs["pixel_values"].shape[-1] for part in (siglip, sam) for inputs in made_inputs(part)]
    assert max(sizes) < 200


def test_a_config_that_makes_no_sense() -> None:
    model: Any = quantize_model(_llava("clip_vision_model").model)
    model.model.vision_tower.config.num_channels = model.config.vision_config.num_channels = -1
    fuse(model)
    assert fused_parts(model) == ((), (), BOTH, BOTH)


def test_wrong_inputs_are_not_replaced() -> None:
    model = fuse(quantize_model(_llava("clip_vision_model").model), {"sounds": torch.ones(2)})
    assert {record.parts for record in fusion_report(model).records} == {()}
