"""Models of text: decoders, encoders, both, and state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from models.example import DEPTH, VOCABULARY, Example, example, tokens

_TEXT = {**DEPTH, "vocab_size": VOCABULARY, "initializer_range": 0.1}
# Some families' own ids are beyond this vocabulary.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}
_LLAMA = {**_TEXT, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
_DECODER = {**_LLAMA, **_NO_IDS, "pad_token_id": None}
_ENCODER = {**_TEXT, "intermediate_size": 128, "max_position_embeddings": 32}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 32,
    "init_std": 0.1,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}
# Multi-head latent attention: queries, keys and values through narrow projections.
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}


def _of(name: str, **settings: Any) -> Callable[[], Example]:
    """A causal or masked language model: ``name`` is its class, ``settings`` are its config's."""

    def build() -> Example:
        cls = getattr(transformers, name)
        return example(cls, cls.config_class(**settings), input_ids=tokens())

    return build


def _from_text_to_text(name: str, **settings: Any) -> Callable[[], Example]:
    def build() -> Example:
        cls = getattr(transformers, name)
        return example(cls, cls.config_class(**settings), input_ids=tokens(), decoder_input_ids=tokens(3))

    return build


LANGUAGE: dict[str, Callable[[], Example]] = {
    "llama": _of("LlamaForCausalLM", **_LLAMA),
    "mistral": _of("MistralForCausalLM", **_DECODER, sliding_window=4),
    "qwen2": _of("Qwen2ForCausalLM", **_DECODER),
    # Tied, as the small Qwen3 models are.
    "qwen3": _of("Qwen3ForCausalLM", **_LLAMA, head_dim=16, tie_word_embeddings=True, max_window_layers=2),
    "gemma2": _of("Gemma2ForCausalLM", **_DECODER, head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "gemma3": _of(
        "Gemma3ForCausalLM",
        **_TEXT,
        intermediate_size=96,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
    ),
    "phi": _of("PhiForCausalLM", **_DECODER),
    "phi3": _of("Phi3ForCausalLM", **_DECODER),
    "olmo2": _of("Olmo2ForCausalLM", **_DECODER),
    "stablelm": _of("StableLmForCausalLM", **_DECODER),
    "cohere": _of("CohereForCausalLM", **{**_DECODER, "pad_token_id": 0}),
    # The layers before the first with experts, which all DeepSeek models begin with.
    "deepseek_v3": _of(
        "DeepseekV3ForCausalLM",
        **{**_DECODER, "num_key_value_heads": 4},
        **_LATENT,
        first_k_dense_replace=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    ),
    "falcon": _of(
        "FalconForCausalLM", **_TEXT, **_NO_IDS, ffn_hidden_size=96, new_decoder_architecture=True, num_kv_heads=2
    ),
    "bloom": _of(
        "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1, **_NO_IDS
    ),
    "gpt2": _of("GPT2LMHeadModel", **_GPT, **_NO_IDS),
    "gpt_neox": _of("GPTNeoXForCausalLM", **_TEXT, **_NO_IDS, intermediate_size=96, max_position_embeddings=64),
    # Casts to the dtype of a weight's float parameters, and has masks as large as its config says.
    "gpt_neo": _of(
        "GPTNeoForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        window_size=4,
        attention_types=[[["global", "local"], 1]],
        initializer_range=0.1,
        **_NO_IDS,
    ),
    # word_embed_proj_dim differs from hidden_size, as in opt-350m: two more linears, project_in and project_out.
    "opt": _of("OPTForCausalLM", **_TEXT, ffn_dim=128, max_position_embeddings=32, word_embed_proj_dim=32),
    "bert": _of("BertForMaskedLM", **_ENCODER),
    "bert_classifier": _of("BertForSequenceClassification", **_ENCODER, num_labels=5),
    "roberta": _of("RobertaForMaskedLM", **{**_ENCODER, "max_position_embeddings": 34}),
    "distilbert": _of(
        "DistilBertForMaskedLM",
        vocab_size=VOCABULARY,
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=32,
        initializer_range=0.1,
    ),
    # One block that is used twice: each of its layers has one name and runs twice.
    "albert": _of("AlbertForMaskedLM", **_ENCODER, embedding_size=32),
    "t5": _from_text_to_text("T5ForConditionalGeneration", **_T5),
    "bart": _from_text_to_text("BartForConditionalGeneration", **_BART),
    "mamba": _of("MambaForCausalLM", **_MAMBA, time_step_rank=4),
    "falcon_mamba": _of("FalconMambaForCausalLM", **_MAMBA, time_step_rank=4),
    # One layer of attention, one of state spaces.
    "jamba": _of(
        "JambaForCausalLM",
        **{**_DECODER, "pad_token_id": 0},
        num_experts=1,
        num_experts_per_tok=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
}
