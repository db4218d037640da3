"""The config of a transformers model from the settings of a GGUF file, as transformers itself derives it.

What transformers passes over, and the model depends on, is added here, or refused: some sizes, and how rotary positions
are scaled for long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, said_by, unsupported
from qgemm.checkpoint.gguf_architectures import ARCHITECTURES, BASE, own_config, own_settings, scaling_of_mistral3
from qgemm.checkpoint.gguf_deepseek import DEEPSEEK2, GLM4MOE, deepseek_config, glm_config, scaling_of_deepseek
from qgemm.checkpoint.gguf_gemma4 import GEMMA4, gemma4_config
from qgemm.checkpoint.gguf_qwen import MIXTURES, QWEN3NEXT, QWENS, qwen_config, scaling_of_qwen

ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor by whose values rotary frequencies are divided, in files of Llama 3.1 and later."""

LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors by whose values they are divided for short and for long inputs, in files of Phi 3."""

# What Llama 3.1 to 3.3 say about long contexts, but for the factor, which is 8 or 32.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)
_SCALINGS = ("linear", "yarn")
_MIXTRAL = "mixtral"  # whose files say llama
# By architecture: settings that transformers doesn't read, and what its configs call them.
_UNREAD: dict[str, dict[str, str]] = {
    "falcon": {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "gemma2": {
        "attention.key_length": "query_pre_attn_scalar",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {
        "attention.key_length": "query_pre_attn_scalar",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt-oss": {
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
    },
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps"},
    _MIXTRAL: {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "stablelm": {"rope.freq_base": "rope_theta"},
    "starcoder2": {"rope.freq_base": "rope_theta"},
}
# Where only the first values of a head are rotated, and where transformers reads by itself how many are.
_PARTLY_ROTATED = ("nemotron", "phi3", "stablelm")
_READS_ROTATED = (DEEPSEEK2, GLM4MOE, *QWENS, "llama", "minimax-m2")
# Where transformers' own base of rotary frequencies is another one.
_WITH_OTHER_BASES = ("gemma3", "gpt-oss", "lfm2", "minimax-m2", _MIXTRAL)
# Where some layers attend to a window: each of these has none.
_WITHOUT_WINDOW = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
_SIGMOID = 2
# Of the largest model, by its number of layers, queries are scaled by the size of a head that the others have.
_OF_27B = {"gemma2": 46, "gemma3": 62}
# Settings that change what is computed, and the values with which they don't; none is read for these architectures.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "ssm.dt_b_c_rms": (False,),
}
# Architectures that transformers has in its tables, although it doesn't read files as llama.cpp writes them.
_MISREAD = ("deci",)
_OF_MIXTURES = (DEEPSEEK2, GEMMA4, GLM4MOE, "gpt-oss", "llama", "minimax-m2", "qwen2moe", "qwen3moe", *MIXTURES)
# Of those above, the ones that an architecture computes.
_COMPUTED = {
    DEEPSEEK2: ("expert_weights_scale", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    GLM4MOE: ("expert_weights_scale",),
    **{name: tuple(own.factors) for name, own in ARCHITECTURES.items()},
}
OWN_CONFIGS: dict[str, Callable[[Path, dict[str, Any], Container[str]], dict[str, Any]]] = {
    **{DEEPSEEK2: deepseek_config, GEMMA4: gemma4_config, GLM4MOE: glm_config},
    **dict.fromkeys(QWENS, qwen_config),
    **dict.fromkeys(ARCHITECTURES, own_config),
}
"""By architecture: what makes a config from the file's path, settings and names, where transformers doesn't."""

# What GPT-OSS says about long contexts, and its files don't.
_GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def model_config(
    path: Path, settings: dict[str, Any], header: bytes, dtype: str, names: Container[str] = ()
) -> dict[str, Any]:
    """The config, as in a ``config.json``, of the model in the file at ``path``, whose ``settings`` these are.

    ``header``: a file with these settings, and tensors without values, of all parts. It is what transformers reads: it
    takes seconds for the tokens of a vocabulary, and looks for the head in the first part of a model alone.
    ``names``: those of the tensors, for an architecture that transformers doesn't read.

    Raises ``CheckpointError`` for an architecture that transformers doesn't read from GGUF, and for settings that
    aren't valid; ``ImportError`` without transformers or the package gguf.
    """
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} doesn't say of which architecture its model is")
    if architecture in _MISREAD:
        raise unsupported(f"{path}: transformers doesn't read {architecture} as llama.cpp writes it")
    config = _read_config(path, architecture, settings, header, names)
    own = own_settings(settings, architecture)
    kind = _MIXTRAL if architecture == "llama" and own.get("expert_count", 0) else architecture
    if architecture == "llama":  # where transformers says mistral, it has no names
        config["model_type"] = kind
    if "architectures" not in config:
        config["architectures"] = _classes_of(config)
    _check_is_computed(path, own, architecture)
    for setting, name in _UNREAD.get(kind, {}).items():
        if own.get(setting) is not None:
            config[name] = own[setting]
    if architecture == "phi3":  # 0 stands for none, and a window of 0 tokens would be one
        config["sliding_window"] = config.get("sliding_window") or None
    if kind in _WITH_OTHER_BASES:
        config.setdefault("rope_theta", BASE)
    _add_of_heads(path, config, own, architecture)
    if config.get("is_gated_act"):  # T5's, all of whose files have gates; transformers would take relu for gelu
        config["feed_forward_proj"] = "gated-gelu"
    config["dtype"] = dtype
    if (scaling := _own_scaling(path, config, own, architecture)) is not None:
        config["rope_scaling"] = scaling
    return config


def _read_config(
    path: Path, architecture: str, settings: dict[str, Any], header: bytes, names: Container[str]
) -> dict[str, Any]:
    """The config that transformers, or this package for an ``architecture`` of ``OWN_CONFIGS``, makes of settings."""
    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.utils.import_utils import is_gguf_available
    except ImportError as error:
        raise ImportError(f'{path} is read with transformers: pip install "transformers>=5.17" "gguf>=0.10"') from error
    if not is_gguf_available():
        raise ImportError(f'{path} is read with the package gguf: pip install "gguf>=0.10"')
    try:
        if architecture in OWN_CONFIGS:
            return OWN_CONFIGS[architecture](path, settings, names)
        with TemporaryDirectory() as folder:
            (small := Path(folder) / path.name).write_bytes(header)
            config: dict[str, Any] = load_gguf_checkpoint(str(small))["config"]
            return config
    except CheckpointError:
        raise
    except Exception as error:  # transformers' code may raise anything for unexpected settings
        raise unsupported(f"{path}: transformers can't read the settings of its model: {said_by(error)}") from error


def _classes_of(config: dict[str, Any]) -> list[str]:
    """transformers' class for models of this type that make texts, if there is one."""
    from transformers.models.auto import modeling_auto

    classes = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    found = classes.get(str(config.get("model_type")))
    return [] if found is None else [found]


def _own_scaling(path: Path, config: dict[str, Any], own: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """How positions are scaled, with what only this ``architecture`` has; Mistral 3's may be put into ``config``."""
    scaling = _scaling(path, own, architecture)
    if architecture == "gpt-oss":  # without any, its config would have the one that was published
        return {"rope_type": "default"} if scaling is None else scaling | _GPT_OSS
    if architecture == "mistral3":
        return scaling_of_mistral3(path, config, own, scaling)
    if architecture == DEEPSEEK2:
        return scaling_of_deepseek(path, own, scaling)
    if architecture in QWENS and architecture != QWEN3NEXT:
        return scaling_of_qwen(path, own, scaling)
    return scaling


def _check_is_computed(path: Path, own: dict[str, Any], architecture: str) -> None:
    """Raises ``CheckpointError`` for settings, without the architecture's name, that its model doesn't heed."""
    computed = _COMPUTED.get(architecture, ())
    for name, values in _NEUTRAL.items():
        if name not in computed and own.get(name, values[0]) not in values:
            raise unsupported(f"{path}: {name} is {own[name]}, which transformers doesn't compute for {architecture}")
    fixed: dict[str, object] = {"expert_gating_func": _SIGMOID} if architecture == "minimax-m2" else {}
    if (each := _WITHOUT_WINDOW.get(architecture)) is not None:
        base = BASE if architecture == "gemma3" else own.get("rope.freq_base", BASE)
        fixed = {"attention.sliding_window_pattern": each, "rope.freq_base_swa": base}
    for name, value in fixed.items():
        if name in own and own[name] != value:
            raise unsupported(f"{path}: {name} is {own[name]}, and in transformers' model of {architecture} {value}")
    # Files of Gemma 2 may state none, for which both take 4096.
    if each is not None and not own.get("attention.sliding_window", architecture == "gemma2"):
        raise unsupported(f"{path} doesn't state attention.sliding_window: transformers' model would have windows")
    if own.get("expert_count", 0) and architecture not in _OF_MIXTURES:
        raise unsupported(f"{path} is a mixture of experts, which transformers doesn't read as {architecture}")


def _add_of_heads(path: Path, config: dict[str, Any], own: dict[str, Any], architecture: str) -> None:
    """Adds to ``config`` which part of a head is rotated, and how queries are scaled.

    Raises ``CheckpointError`` for an architecture of which transformers rotates all, if that isn't so here.
    """
    width, heads = own.get("embedding_length"), own.get("attention.head_count")
    if not (type(width) is int and type(heads) is int and heads > 0):
        return
    if own.get("block_count") == _OF_27B.get(architecture, -1):
        config["query_pre_attn_scalar"] = width // heads
    rotated, head = own.get("rope.dimension_count"), own.get("attention.key_length", width // heads)
    if type(rotated) is not int or type(head) is not int or head <= 0 or architecture in _READS_ROTATED:
        return
    if architecture in _PARTLY_ROTATED or (architecture in ARCHITECTURES and ARCHITECTURES[architecture].part_of_head):
        config["partial_rotary_factor"] = rotated / head
    elif rotated != head:
        raise unsupported(
            f"{path} rotates {rotated} of a head's {head} values; transformers rotates all of {architecture}"
        )


def _scaling(path: Path, own: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """How settings say that positions are scaled."""
    # llama.cpp takes a factor without a type for that of linear scaling, and heeds the one of attention always.
    said, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor")
    of_attention = own.get("rope.scaling.attn_factor", 1.0)
    is_longrope = said == "longrope" or (architecture == "phi3" and "rope.scaling.type" not in own)
    if of_attention != 1.0 and not is_longrope:
        raise unsupported(f"{path}: rope.scaling.attn_factor is {of_attention}, which qgemm reads for LongRoPE alone")
    if said == "none" or (said == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if said == "longrope":
        return {"rope_type": said}  # tensors say how
    if said not in _SCALINGS or not isinstance(factor, float) or not math.isfinite(factor) or factor < 1:
        raise unsupported(f"{path}: positions are scaled as {said!r} by {factor}, which qgemm doesn't read from GGUF")
    scaling: dict[str, Any] = {"rope_type": said, "factor": factor}
    length = own.get("rope.scaling.original_context_length")
    if said == "yarn" and isinstance(length, int):
        scaling["original_max_position_embeddings"] = length
    return scaling


def llama3_scaling(path: Path, factors: Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3 whose factors of rotary frequencies are these; raises ``CheckpointError`` for others."""
    if factors.ndim != 1:
        raise CheckpointError(f"{path}: {ROTARY_FACTORS} has shape {list(factors.shape)}, and must be a vector")
    base = float(config.get("rope_theta") or BASE)
    steps = torch.arange(len(factors), dtype=torch.float64, device="cpu") / max(len(factors), 1)
    wavelengths = 2 * math.pi * base**steps
    low, high, length = _LLAMA3.values()
    for factor in _LLAMA3_FACTORS:
        smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if torch.allclose(factors.double().cpu(), wanted, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise unsupported(f"{path}: {ROTARY_FACTORS} holds factors that aren't those of Llama 3")


def longrope_scaling(path: Path, factors: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a config for ``LONG_FACTORS``, by name; raises ``CheckpointError`` if settings don't fit them."""
    architecture = settings["general.architecture"]
    length = settings.get(f"{architecture}.rope.scaling.original_context_length")
    if architecture != "phi3" or type(length) is not int or factors.keys() != set(LONG_FACTORS):
        raise unsupported(
            f"{path}: positions are scaled as LongRoPE does, which qgemm reads for Phi 3 alone, from "
            f"original_context_length, {' and '.join(LONG_FACTORS)}"
        )
    short, long = (factors[name].double().tolist() for name in LONG_FACTORS)
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    factor = settings.get(f"{architecture}.rope.scaling.attn_factor")
    if isinstance(factor, float):
        scaling["attention_factor"] = factor
    return {"rope_scaling": scaling, "original_max_position_embeddings": length}
