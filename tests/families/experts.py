"""Small modules of experts of transformers, in every layout that there is, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 48, 2


def mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return _filled(MixtralExperts, MixtralConfig, intermediate_size=INTERMEDIATE, num_local_experts=E)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return _filled(Qwen3MoeExperts, Qwen3MoeConfig, moe_intermediate_size=INTERMEDIATE, num_experts=E)


def qwen3_moe_gelu() -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"moe_intermediate_size": INTERMEDIATE, "num_experts": E}
    return _filled(Qwen3MoeExperts, Qwen3MoeConfig, hidden_act="gelu_pytorch_tanh", **sizes)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    return _filled(DeepseekV3Experts, DeepseekV3Config, moe_intermediate_size=INTERMEDIATE, n_routed_experts=E)


def deepseek_v4() -> nn.Module:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    # silu with limits.
    return _filled(DeepseekV4Experts, DeepseekV4Config, moe_intermediate_size=INTERMEDIATE, n_routed_experts=E)


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    # Transposed, interleaved, with biases.
    return _filled(GptOssExperts, GptOssConfig, intermediate_size=INTERMEDIATE, num_local_experts=E)


def openai_privacy_filter() -> nn.Module:
    from transformers import OpenAIPrivacyFilterConfig
    from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

    # Transposed with biases, but not interleaved.
    sizes = {"intermediate_size": INTERMEDIATE, "num_local_experts": E}
    return _filled(OpenAIPrivacyFilterExperts, OpenAIPrivacyFilterConfig, **sizes)


def nemotron_h() -> nn.Module:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    # No gate: relu(x) ** 2.
    sizes = {"moe_intermediate_size": INTERMEDIATE, "n_routed_experts": E}
    return _filled(NemotronHExperts, NemotronHConfig, **sizes)


def llama4() -> nn.Module:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    return _filled(Llama4TextExperts, Llama4TextConfig, intermediate_size=INTERMEDIATE, num_local_experts=E)


ROUTED: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (
        mixtral,
        qwen3_moe,
        qwen3_moe_gelu,
        deepseek_v3,
        deepseek_v4,
        gpt_oss,
        openai_privacy_filter,
        nemotron_h,
    )
}
ALL = {**ROUTED, "llama4": llama4}


def routing(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``top_k_index`` and ``top_k_weights`` in which the last expert gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, E - 1, generator=generator)
    weights, index = scores.topk(TOP_K, dim=-1)
    return index, weights / weights.sum(-1, keepdim=True)


def inputs(module: nn.Module, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """What ``module``, float or quantized, is called with for so many tokens."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index, weights = routing(tokens)
    if "Llama4" not in type(module).__name__ and "Sorted" not in type(module).__name__:
        return x, index, weights.to(dtype)
    # As Llama4TextMoe has it: a row for each pair of an expert and a token, zeros where they don't meet.
    scores = torch.zeros(tokens, E).scatter(1, index, weights).to(dtype)
    return ((x.repeat(E, 1) * scores.t().reshape(-1, 1)),)


def _filled(experts: Any, config: Any, **sizes: Any) -> nn.Module:
    made = config(hidden_size=HIDDEN, **sizes)
    made._experts_implementation = "eager"
    module: nn.Module = experts(made)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.1 if name.endswith("bias") else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return module.eval()
