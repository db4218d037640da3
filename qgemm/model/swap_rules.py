"""The layers that stay in float because the code around them needs their float weight.

Most code calls a linear layer, and any module that can be called the same way will do. Some code reads ``layer.weight``
itself: given int8 values, it crashes, or continues with wrong numbers. A layer doesn't show that, so the places are
listed here: the class that contains the layer, by glob, and the layer's path below it. A rule applies to classes of the
Python modules that it names, and to classes that inherit from them, but not to other classes of the same name. The
places were found by reading every modeling file of transformers; a test reads them again and fails if one is missing
here. For other libraries, only some models were read or run. T5 and its relatives also ask for the dtype of
``wo.weight``, but know int8, so they need no rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from torch import nn

# Code that a checkpoint contains (trust_remote_code) has the same names as transformers' own.
_TRANSFORMERS = ("transformers.models.*", "transformers_modules.*")
_PEFT = ("peft.*",)
_DIFFUSERS = ("diffusers.*",)
_SENTENCES = ("sentence_transformers.*",)


@dataclass(frozen=True)
class SwapRule:
    """Layers at ``paths`` below a module of a class named like ``holder`` stay in float, for ``reason``.

    ``modules``: the Python modules of such classes, by glob. ``only_with``: an attribute of the holder; if that is
    missing or None, the code that needs the weight doesn't run.
    """

    holder: str
    paths: tuple[str, ...]
    reason: str
    modules: tuple[str, ...] = _TRANSFORMERS
    only_with: str = ""


_CASTS = "its input is cast to its weight's dtype"
_FUSED = "its weight goes to a fused kernel"
_READ = "its weight is read directly"
_ROUTER = "it routes tokens to experts: small and sensitive"
SWAP_RULES = (
    # State space models pass projections to a CUDA kernel (some only in training), and multiply by dt_proj's weight
    # elsewhere.
    SwapRule("MambaMixer", ("x_proj", "dt_proj", "out_proj"), _FUSED),
    SwapRule("FalconMambaMixer", ("x_proj", "dt_proj", "out_proj"), _FUSED),
    SwapRule("JambaMambaMixer", ("dt_proj",), _READ),
    SwapRule("*Mamba2Mixer", ("out_proj",), _FUSED),
    SwapRule("Zamba2MambaMixer", ("out_proj",), _FUSED),
    SwapRule("BambaMixer", ("out_proj",), _FUSED),
    SwapRule("FalconH1Mixer", ("out_proj",), _FUSED),
    SwapRule("GraniteMoeHybridMambaLayer", ("out_proj",), _FUSED),
    SwapRule("WavLMAttention", ("q_proj", "k_proj", "v_proj", "out_proj"), _FUSED),
    SwapRule("MobileBertLMPredictionHead", ("dense", "decoder"), _READ),
    SwapRule("DisentangledSelfAttention", ("in_proj",), _READ),
    SwapRule("Gemma3nTextAltUp", ("prediction_coefs", "correction_coefs"), _READ),
    SwapRule("LayoutLMv[23]Encoder", ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"), _READ),
    SwapRule("PPDocLayoutV2ReadingOrderEncoder", ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"), _READ),
    SwapRule("LSHSelfAttention", ("query_key", "value"), _READ),
    SwapRule("NeoMMEForMaskedLM", ("unembedding_projection",), _READ),
    SwapRule("RwkvBlock", ("attention.output", "feed_forward.value"), _READ),
    SwapRule("TDNNLayer", ("kernel",), _READ),
    SwapRule("*MHAttentionMap", ("k_proj", "k_linear"), _READ),
    SwapRule("*FlashAttention2", ("q_proj", "query_key_value"), _CASTS),
    SwapRule("*Indexer", ("weights_proj",), _CASTS),
    SwapRule("Blip2*", ("text_projection", "vision_projection", "itm_head"), _CASTS),
    SwapRule("Col*ForRetrieval", ("embedding_proj_layer",), _CASTS),
    SwapRule("EsmFold2*", ("atom_linear", "coords_linear", "distogram_head", "embed", "noise_proj"), _CASTS),
    SwapRule("EsmFold2*", ("pae_head", "pair_proj", "token_bonds"), _CASTS),
    SwapRule("GraniteSpeech5Encoder", ("input_linear",), _CASTS),
    SwapRule("NeoMMEMultiVectorHead", ("proj",), _CASTS),
    SwapRule("*VisionEmbeddings", ("patch_embedding",), _CASTS),
    SwapRule("*Patch*Embed*", ("proj", "patch_embedding"), _CASTS),
    SwapRule("Swin*SelfAttention", ("continuous_position_bias_mlp.*",), _CASTS),
    SwapRule("TimesFm2_5ResidualBlock", ("input_layer",), _CASTS),
    SwapRule("*ForPreTraining", ("project_q",), _CASTS),
    SwapRule("JevForDecision", ("proj",), _CASTS),
    SwapRule("*TTSModel", ("audio_prompt_proj", "audio_latent_proj"), _CASTS),
    SwapRule("*Router", ("*",), _ROUTER),
    SwapRule("*Gate", ("*",), _ROUTER),
    SwapRule("*M[oO][eE]*", ("gate", "router", "shared_expert_gate"), _ROUTER),
    # Adapters (LoRA) are small and are still trained, and the input is cast to their dtype.
    SwapRule("*", ("*lora_[AB].*",), "it is an adapter", _PEFT),
    # diffusers casts to the dtype of the first parameter, which isn't a ``StoredWeight``.
    SwapRule("*Time*Embedding*", ("time_embedder.*", "delta_embedder.*"), _CASTS, _DIFFUSERS),
    SwapRule("*Transformer*", ("time_embedder.*", "time_embedding.*"), _CASTS, _DIFFUSERS),
    SwapRule("MiniMaxH3*", ("linear", "proj_in", "audio_proj_in", "context_embedder*", "proj_out"), _CASTS, _DIFFUSERS),
    SwapRule("Kandinsky6*", ("timestep_embedder.*", "out_layer"), _CASTS, _DIFFUSERS),
    SwapRule("TimestepEmbedder", ("mlp.*",), _CASTS, _DIFFUSERS),
    SwapRule("StableAudioNumberConditioner", ("time_positional_embedding.*",), _CASTS, _DIFFUSERS),
    SwapRule("ImageProjection", ("image_embeds",), _CASTS, _DIFFUSERS),
    SwapRule("HunyuanDiTAttentionPool", ("[qkvc]_proj",), _READ, _DIFFUSERS),
    SwapRule("*Transformer", ("resblocks.0.mlp.c_fc",), "text is cast to its weight's dtype", ("open_clip.*",)),
    SwapRule("AttentionPool2d", ("[qkvc]_proj",), _READ, ("open_clip.*", "clip.model")),
    SwapRule("ShiftedWindowAttention*", ("qkv", "proj"), _READ, ("torchvision.models.*",)),
    SwapRule("*Attention", ("qkv",), _READ, ("timm.models.beit", "timm.models.eva"), "q_bias"),
    SwapRule("WindowAttention", ("qkv",), _READ, ("timm.models.swin_transformer_v2",), "q_bias"),
    SwapRule("*", ("input_proj",), _CASTS, ("timm.models.gemma4_vit",)),
    SwapRule("StreamingSpanModel", ("token_projection", "labels_encoder.*"), _CASTS, ("gliner.*",)),
    SwapRule("SparseAutoEncoder", ("encoder", "decoder"), _READ, _SENTENCES),
    SwapRule("Dense", ("linear",), "sentence-transformers loads it in float only", _SENTENCES),
    # PEFT merges an adapter by adding it to the weight in place. The other wrapper keeps a whole copy to train.
    SwapRule("BaseTunerLayer", ("base_layer",), "it has an adapter: quantize first, then attach the adapter", _PEFT),
    SwapRule("AuxiliaryTrainingWrapper", ("*",), "it trains beside an adapter", _PEFT),
)


def modules_around(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Each module around the layer ``name``, the nearest first, with the layer's dotted path below it."""
    parts = name.split(".")
    return [
        (model.get_submodule(".".join(parts[:depth])), ".".join(parts[depth:]))
        for depth in range(len(parts) - 1, -1, -1)
    ]


def find_rule(ancestors: Iterable[tuple[nn.Module, str]]) -> SwapRule | None:
    """The rule that keeps a layer in float, or None.

    ``ancestors``: each module around the layer, with the layer's dotted path below it.
    """
    for holder, path in ancestors:
        for is_at, rule in _RULES:
            if is_at(path) and _is_for(rule, holder):
                return rule
    return None


# Of each the paths in one regular expression: a model's every layer is looked up below every module around it.
_RULES = [(re.compile("|".join(map(translate, rule.paths))).match, rule) for rule in SWAP_RULES]


def _is_for(rule: SwapRule, holder: nn.Module) -> bool:
    if rule.only_with and getattr(holder, rule.only_with, None) is None:
        return False
    return any(
        fnmatchcase(cls.__name__, rule.holder) and any(fnmatchcase(cls.__module__, glob) for glob in rule.modules)
        for cls in type(holder).__mro__
    )
