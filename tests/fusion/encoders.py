"""Tiny encoders of text, images and sound, built in ways that ``families`` has no model of."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import transformers
from families.example import DEPTH, VOCABULARY, Example, example, language_model, random, tokens
from torch import Tensor

_IMAGE = {**DEPTH, "intermediate_size": 96, "image_size": 16, "patch_size": 8, "initializer_range": 0.1}


def _model(name: str, inputs: Callable[[], dict[str, Tensor]], **settings: Any) -> Callable[[], Example]:
    def build() -> Example:
        cls = getattr(transformers, name)
        found = example(cls, cls.config_class(**settings), **inputs())
        with torch.no_grad():
            for own, parameter in found.model.named_parameters():
                if "lambda" in own:  # ones, or next to nothing, in a new model
                    parameter.copy_(torch.rand(parameter.shape) + 0.5)
        return found

    return build


def _tower(module: str, name: str, config: str, **settings: Any) -> Callable[[], Example]:
    """Of images of 4 x 4 patches, one behind another, each of two frames, three colours and 4 x 4 pixels."""

    def build() -> Example:
        there = import_module(f"transformers.models.{module}.modeling_{module}")
        inputs = {"hidden_states": random(32, 3 * 2 * 4 * 4), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
        sizes = {"depth": 2, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64}
        return example(getattr(there, name), getattr(there, config)(**sizes, **settings), **inputs)

    return build


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": random(2, 3, 16, 16)}


LAYER_SCALES: dict[str, Callable[[], Example]] = {
    # Modules, with a path that training drops.
    "dinov2": _model("Dinov2Model", _pixels, **_IMAGE, drop_path_rate=0.1),
    # Rotated queries and keys without a dimension of the batch.
    "dinov3": _model("DINOv3ViTModel", _pixels, **_IMAGE),
    # Parameters of the layer.
    "beit": _model("BeitModel", _pixels, **_IMAGE, drop_path_rate=0.1),
    "internvl": _model("InternVLVisionModel", _pixels, **{**_IMAGE, "image_size": (16, 16), "patch_size": (8, 8)}),
}

_TEXT = {
    **DEPTH,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 34,
    "initializer_range": 0.1,
    "pad_token_id": 1,
}
_SPECTROGRAM = {**DEPTH, "intermediate_size": 96, "num_mel_bins": 16, "max_source_positions": 32}
_SOUND = {
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
NORMS_FIRST: dict[str, Callable[[], Example]] = {
    "roberta_prelayernorm": language_model("RobertaPreLayerNormForMaskedLM", **_TEXT),
    "xlm_roberta_xl": language_model("XLMRobertaXLForMaskedLM", **_TEXT),
    "dpt": _model("DPTModel", _pixels, **_IMAGE, is_hybrid=False),
    # mlp(norm(x)): the code comes to the norm behind the MLP.
    "hubert": _model(
        "HubertModel",
        lambda: {"input_values": random(2, 400)},
        **{**_TEXT, **_SOUND},
        do_stable_layer_norm=True,
    ),
}
# Attention of their own, and a layer behind it that is another module's.
CALLED: dict[str, Callable[[], Example]] = {
    "deberta_v2": language_model("DebertaV2ForMaskedLM", **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "roformer": language_model("RoFormerForMaskedLM", **_TEXT),
    "tapas": language_model("TapasForMaskedLM", **_TEXT),  # whose layers return one value in a tuple
}
# Attention in code of their own that has operators alone, with a bias of positions or without.
OPERATORS: dict[str, Callable[[], Example]] = {
    "mpnet": language_model("MPNetForMaskedLM", **_TEXT),
    "visual_bert": language_model("VisualBertModel", **{**_TEXT, "visual_embedding_dim": 8}),
    "flava": _model("FlavaImageModel", _pixels, **_IMAGE),
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 32,
    "init_std": 0.1,
}
DECODERS_ALONE: dict[str, Callable[[], Example]] = {
    "bart_decoder": language_model("BartForCausalLM", **_DECODER),
    "marian_decoder": language_model("MarianForCausalLM", **_DECODER, pad_token_id=0),
}


def nllb(**settings: Any) -> Example:
    """With attention to its encoder by another name, and mixtures that are told which tokens are padding."""
    encoder = {name.replace("decoder", "encoder"): value for name, value in _DECODER.items()}
    build = language_model("NllbMoeForConditionalGeneration", **{**encoder, **_DECODER}, num_experts=4, **settings)
    found = build()
    found.inputs = {**found.inputs, "decoder_input_ids": found.inputs["input_ids"][:, :3]}
    return found


def t5gemma() -> Example:
    """With norms before and after each branch of its decoder."""
    sizes = {"vocab_size": VOCABULARY, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96}
    part = {**DEPTH, **sizes, "sliding_window": 4, "initializer_range": 0.1, "query_pre_attn_scalar": 16}
    settings = {"encoder": part, "decoder": part, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2}
    return _with_decoder("T5GemmaForConditionalGeneration", {"input_ids": tokens()}, **settings)


def moonshine() -> Example:
    """With a gated MLP in its decoder whose gate comes second."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCABULARY, "initializer_range": 0.1}
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    numbers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in names}
    found = {"input_values": random(2, 3200)}
    return _with_decoder("MoonshineForConditionalGeneration", found, **sizes, **numbers)


def seamless_m4t() -> Example:
    """Whose attention to the encoder has another name for its output."""
    parts = ("encoder", "decoder")
    names = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    sizes = {f"{part}_{name}": value for part in parts for name, value in names.items()}
    settings = {"hidden_size": 64, "vocab_size": VOCABULARY, "initializer_range": 0.1, "pad_token_id": 0}
    return _with_decoder("SeamlessM4TForTextToText", {"input_ids": tokens()}, **settings, **sizes)


def _with_decoder(name: str, inputs: dict[str, Tensor], **settings: Any) -> Example:
    cls = getattr(transformers, name)
    return example(cls, cls.config_class(**settings), **inputs, decoder_input_ids=tokens(3))


WITH_ENCODER: dict[str, Callable[[], Example]] = {
    "nllb": nllb,
    "t5gemma": t5gemma,
    "moonshine": moonshine,
    "seamless_m4t": seamless_m4t,
}
_NUMBERED = {"hidden_size": 64, "intermediate_size": 96, "num_position_embeddings": 16}
PACKED: dict[str, Callable[[], Example]] = {
    "qwen2_vl": _tower("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", embed_dim=64),
    # Windows in one layer, with gated MLPs.
    "qwen2_5_vl": _tower(
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        **{"hidden_size": 64, "intermediate_size": 96, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _tower(
        "qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", **_NUMBERED, deepstack_visual_indexes=[0]
    ),
}
OTHER_ATTENTION: dict[str, Callable[[], Example]] = {
    # Queries, keys and values in one layer.
    "blip_2": _model("Blip2VisionModel", _pixels, **_IMAGE),
    # Queries that are scaled, and rotated; an activation that is a function.
    "esm": language_model("EsmForMaskedLM", **_TEXT, position_embedding_type="rotary", token_dropout=False),
    # Cosines and sines without a dimension of the batch.
    "pixtral": _model(
        "PixtralVisionModel",
        lambda: {**_pixels(), "image_sizes": torch.tensor([[16, 16], [16, 16]])},
        **{**DEPTH, "intermediate_size": 96, "head_dim": 16, "image_size": 16, "patch_size": 8},
    ),
}

# What models of images and sounds may read instead of images of one size.
ENCODERS_BY_INPUT: dict[str, Callable[[], Example]] = {
    # Patches of an image of any size.
    "siglip2": _model(
        "Siglip2VisionModel",
        lambda: {
            "pixel_values": random(2, 16, 3 * 8 * 8),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
        },
        **{**_IMAGE, "num_patches": 16},
        vision_use_head=False,
    ),
    # Frames of a spectrogram, and a time for each.
    "voxtral": _model("VoxtralEncoder", lambda: {"input_features": random(2, 16, 64)}, **_SPECTROGRAM),
    "wav2vec2_bert": _model(
        "Wav2Vec2BertModel",
        lambda: {"input_features": random(2, 20, 16)},
        **{**DEPTH, "intermediate_size": 96, "feature_projection_input_dim": 16, "vocab_size": VOCABULARY},
    ),
    "ast": _model(
        "ASTModel",
        lambda: {"input_values": random(2, 32, 16)},
        **{**DEPTH, "intermediate_size": 96, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
    ),
}
