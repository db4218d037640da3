"""Outlier channels are there, in the same few channels, and the model computes the same bits as without them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.accuracy.outliers import DOWN_FACTORS, NORM_FACTORS, add_outliers


def tiny_llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def inputs_of_layers(model: Any, windows: Tensor) -> dict[str, Tensor]:
    """The largest magnitude of each channel of each linear layer's input, by the layer's name."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda module, args, name=name: found.__setitem__(name, args[0].abs().flatten(0, -2).amax(0))
            )
    model(windows)
    return found


WINDOWS = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_function_stays_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    with torch.no_grad():
        before = model(WINDOWS).logits
        after = add_outliers(copy.deepcopy(model))(WINDOWS).logits
    assert before.dtype == dtype
    assert torch.equal(before, after)


def test_the_channels_are_larger_by_the_factors() -> None:
    model = tiny_llama()
    before = inputs_of_layers(copy.deepcopy(model), WINDOWS)
    after = inputs_of_layers(add_outliers(model), WINDOWS)
    chosen = set()
    for name, amax in after.items():
        ratio = amax / before[name]
        outliers = (ratio != 1).nonzero().flatten().tolist()
        if name == "lm_head" or name.endswith("o_proj"):
            assert not outliers
        elif name.endswith("down_proj"):
            assert sorted(ratio[outliers].tolist()) == sorted(DOWN_FACTORS)
        else:
            assert sorted(ratio[outliers].tolist()) == sorted(NORM_FACTORS)
            chosen.add(tuple(outliers))
    assert len(chosen) == 1, "the same channels in all blocks"
