"""Models of text: decoders, encoders, both, and state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from families.example import DEPTH, LATENT, VOCABULARY, Example, example, language_model, tokens

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


def _from_text_to_text(name: str, **settings: Any) -> Callable[[], Example]:
    def build() -> Example:
        cls = getattr(transformers, name)
        return example(cls, cls.config_class(**settings), input_ids=tokens(), decoder_input_ids=tokens(3))

    return build


LANGUAGE: dict[str, Callable[[], Example]] = {
    "llama": language_model("LlamaForCausalLM", **_LLAMA),
    "mistral": language_model("MistralForCausalLM", **_DECODER, sliding_window=4),
    "qwen2": language_model("Qwen2ForCausalLM", **_DECODER),
    # Tied, as the small Qwen3 models are.
    "qwen3": language_model("Qwen3ForCausalLM", **_LLAMA, head_dim=16, tie_word_embeddings=True, max_window_layers=2),
    "gemma2": language_model("Gemma2ForCausalLM", **_DECODER, head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "gemma3": language_model(
        "Gemma3ForCausalLM",
        **_TEXT,
        intermediate_size=96,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
    ),
    "phi": language_model("PhiForCausalLM", **_DECODER),
    "phi3": language_model("Phi3ForCausalLM", **_DECODER),
    "olmo2": language_model("Olmo2ForCausalLM", **_DECODER),
    "stablelm": language_model("StableLmForCausalLM", **_DECODER),
    "cohere": language_model("CohereForCausalLM", **{**_DECODER, "pad_token_id": 0}),
    # The layers before the first with experts, which all DeepSeek models begin with.
    "deepseek_v3": language_model(
        "DeepseekV3ForCausalLM",
        **{**_DECODER, "num_key_value_heads": 4},
        **LATENT,
        first_k_dense_replace=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    ),
    "falcon": language_model(
        "FalconForCausalLM", **_TEXT, **_NO_IDS, ffn_hidden_size=96, new_decoder_architecture=True, num_kv_heads=2
    ),
    "bloom": language_model(
        "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1, **_NO_IDS
    ),
    "gpt2": language_model("GPT2LMHeadModel", **_GPT, **_NO_IDS),
    "gpt_neox": language_model(
        "GPTNeoXForCausalLM", **_TEXT, **_NO_IDS, intermediate_size=96, max_position_embeddings=64
    ),
    # Casts to the dtype of a weight's float parameters, and has masks as large as its config says.
    "gpt_neo": language_model(
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
    "opt": language_model("OPTForCausalLM", **_TEXT, ffn_dim=128, max_position_embeddings=32, word_embed_proj_dim=32),
    "bert": language_model("BertForMaskedLM", **_ENCODER),
    "bert_classifier": language_model("BertForSequenceClassification", **_ENCODER, num_labels=5),
    "roberta": language_model("RobertaForMaskedLM", **{**_ENCODER, "max_position_embeddings": 34}),
    "distilbert": language_model(
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
    "albert": language_model("AlbertForMaskedLM", **_ENCODER, embedding_size=32),
    "t5": _from_text_to_text("T5ForConditionalGeneration", **_T5),
    "bart": _from_text_to_text("BartForConditionalGeneration", **_BART),
    "mamba": language_model("MambaForCausalLM", **_MAMBA, time_step_rank=4),
    "falcon_mamba": language_model("FalconMambaForCausalLM", **_MAMBA, time_step_rank=4),
    # One layer of attention, one of state spaces.
    "jamba": language_model(
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
