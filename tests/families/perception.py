"""Models of images and sound, alone and beside text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from families.example import DEPTH, VOCABULARY, Example, example, random, tokens

_IMAGE = {**DEPTH, "intermediate_size": 128, "image_size": 16, "patch_size": 8}
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_CAPTION = {
    **_TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PATCHES = {**_TOWER, "image_size": 16, "patch_size": 8}
_TEXT = {**_TOWER, "intermediate_size": 96, "num_key_value_heads": 2, "vocab_size": VOCABULARY}


def _pixels(size: int = 16) -> Tensor:
    return random(2, 3, size, size)


def vit() -> Example:
    config = transformers.ViTConfig(**_IMAGE, num_labels=5, initializer_range=0.1)
    return example(transformers.ViTForImageClassification, config, pixel_values=_pixels())


def swin() -> Example:
    # Its encoder begins with a linear layer, by which a transformers model tells its dtype.
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return example(transformers.SwinForImageClassification, config, pixel_values=_pixels(32))


def siglip() -> Example:
    # Its vision tower's pooling head holds an nn.MultiheadAttention.
    config = transformers.SiglipConfig(text_config=_CAPTION, vision_config=_PATCHES)
    return example(transformers.SiglipModel, config, input_ids=tokens(), pixel_values=_pixels())


def siglip_vision() -> Example:
    return example(transformers.SiglipVisionModel, transformers.SiglipVisionConfig(**_IMAGE), pixel_values=_pixels())


def clip() -> Example:
    config = transformers.CLIPConfig(text_config=_CAPTION, vision_config=_PATCHES, projection_dim=32)
    return example(transformers.CLIPModel, config, input_ids=tokens(), pixel_values=_pixels())


def clip_vision() -> Example:
    return example(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**_IMAGE), pixel_values=_pixels())


def whisper() -> Example:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        init_std=0.1,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    features = random(2, 16, 20)
    return example(
        transformers.WhisperForConditionalGeneration, config, input_features=features, decoder_input_ids=tokens(3)
    )


def wav2vec2() -> Example:
    # A convolution in it has a parametrized weight, whose parts are parameters of their own.
    config = transformers.Wav2Vec2Config(
        **_TOWER,
        vocab_size=32,
        conv_dim=[32, 32],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        initializer_range=0.1,
    )
    return example(transformers.Wav2Vec2ForCTC, config, input_values=random(2, 400))


def llava() -> Example:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_PATCHES),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_seq_length=4,
        image_token_id=60,
    )
    # Four patches, so four image tokens.
    ids = torch.tensor([[1, 60, 60, 60, 60, 2]])
    return example(transformers.LlavaForConditionalGeneration, config, input_ids=ids, pixel_values=_pixels()[:1])


def qwen2_5_vl() -> Example:
    config: Any = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    # 4 x 4 patches of 2 frames, 3 colours and 4 x 4 pixels; four patches make a token.
    ids = torch.tensor([[1, 92, 90, 90, 90, 90, 93, 2]])
    return example(
        transformers.Qwen2_5_VLForConditionalGeneration,
        config,
        input_ids=ids,
        mm_token_type_ids=(ids == 90).int(),
        pixel_values=random(16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    )


PERCEPTION: dict[str, Callable[[], Example]] = {
    build.__name__: build
    for build in (vit, swin, siglip, siglip_vision, clip, clip_vision, whisper, wav2vec2, llava, qwen2_5_vl)
}
