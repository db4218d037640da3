"""``fast_generate`` of models of PEFT: the tokens are those of transformers' own loop."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from transformers import PreTrainedModel

import qgemm

peft = pytest.importorskip("peft")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = (torch.arange(3, 24).reshape(3, 7) * 11 % 90 + 5).to(DEVICE)
NO_END = {"eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def llama() -> PreTrainedModel:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    return model


@pytest.mark.filterwarnings("error:generate runs", "error:generate's steps run")
def test_peft_models_are_fast_by_their_base(llama: PreTrainedModel) -> None:
    model = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    qgemm.fast_generate(model)
    options = {"input_ids": PROMPTS, "max_new_tokens": 8, "do_sample": False, **NO_END}
    own: Callable[..., Tensor] = functools.partial(type(llama).generate, llama)
    assert torch.equal(model.generate(**options), own(**options))
    with model.disable_adapter():
        assert torch.equal(model.generate(**options), own(**options))


def test_prefixes_of_peft_are_left_to_transformers(llama: PreTrainedModel) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(llama, config).eval()
    options = {
        "input_ids": PROMPTS,
        "attention_mask": torch.ones_like(PROMPTS),
        "max_new_tokens": 8,
        "do_sample": False,
    }
    expected = model.generate(**options, **NO_END)
    qgemm.fast_generate(model)
    with pytest.warns(UserWarning, match="prepared by something else than its class"):
        found = model.generate(**options)
    assert torch.equal(found, expected)
