"""Tiny random models of the families that quantize_model must handle, each with inputs for one forward.

Widths are 32 to 128, so that quantization errors average out as they do in a real layer; a model takes some hundred
kilobytes. Weights are larger than a library's own start values (std about 1/sqrt(K), where 0.02 is usual) and biases
aren't zero: otherwise the embedding dominates the output, and a broken layer would hardly show in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 97
TOKENS = 7
_DEPTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_DEPTH, "vocab_size": VOCABULARY, "initializer_range": 0.1}
_IMAGE = {**_DEPTH, "intermediate_size": 128, "image_size": 16, "patch_size": 8}
# GPT-2's own ids are beyond this vocabulary.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}


@dataclass
class Example:
    """A model in eval mode, and keyword arguments for its forward."""

    model: nn.Module
    inputs: dict[str, Tensor]

    def output(self) -> Tensor:
        """The logits of one forward, or the last hidden state of a model without a head."""
        with torch.no_grad():
            out = self.model(**self.inputs)
        result: Tensor = out.logits if "logits" in out else out.last_hidden_state
        return result


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_TEXT, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=64)
    return _example(LlamaForCausalLM, config, input_ids=_tokens())


def qwen3() -> Example:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Tied, as the small Qwen3 models are.
    config = Qwen3Config(
        **_TEXT, intermediate_size=96, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_window_layers=2
    )
    return _example(Qwen3ForCausalLM, config, input_ids=_tokens())


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1, **_NO_IDS
    )
    return _example(GPT2LMHeadModel, config, input_ids=_tokens())


def opt() -> Example:
    from transformers import OPTConfig, OPTForCausalLM

    # word_embed_proj_dim differs from hidden_size, as in opt-350m: two more linears, project_in and project_out.
    config = OPTConfig(**_TEXT, ffn_dim=128, max_position_embeddings=32, word_embed_proj_dim=32)
    return _example(OPTForCausalLM, config, input_ids=_tokens())


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_TEXT, intermediate_size=128, max_position_embeddings=32)
    return _example(BertForMaskedLM, config, input_ids=_tokens())


def bert_classifier() -> Example:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**_TEXT, intermediate_size=128, max_position_embeddings=32, num_labels=5)
    return _example(BertForSequenceClassification, config, input_ids=_tokens())


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return _example(T5ForConditionalGeneration, config, input_ids=_tokens(), decoder_input_ids=_tokens(3))


def gemma3() -> Example:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**_TEXT, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=4)
    return _example(Gemma3ForCausalLM, config, input_ids=_tokens())


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    return _example(
        ViTForImageClassification,
        ViTConfig(**_IMAGE, num_labels=5, initializer_range=0.1),
        pixel_values=_random(2, 3, 16, 16),
    )


def siglip() -> Example:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    # Its pooling head holds an nn.MultiheadAttention.
    return _example(SiglipVisionModel, SiglipVisionConfig(**_IMAGE), pixel_values=_random(2, 3, 16, 16))


def clip() -> Example:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return _example(CLIPVisionModel, CLIPVisionConfig(**_IMAGE), pixel_values=_random(2, 3, 16, 16))


def whisper() -> Example:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
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
    return _example(
        WhisperForConditionalGeneration, config, input_features=_random(2, 16, 20), decoder_input_ids=_tokens(3)
    )


FAMILIES: dict[str, Callable[[], Example]] = {
    build.__name__: build
    for build in (llama, qwen3, gpt2, opt, bert, bert_classifier, t5, gemma3, vit, siglip, clip, whisper)
}


def _example(model_class: Any, config: Any, **inputs: Tensor) -> Example:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return Example(model, inputs)


def _tokens(length: int = TOKENS) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) * 5 % (VOCABULARY - 5) + 5


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
