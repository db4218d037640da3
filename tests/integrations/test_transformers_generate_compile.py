"""``torch.compile`` of a whole quantized model, whose steps are ours to run: one graph, compiled once."""

from typing import Any

import pytest
import torch
from families import FAMILIES

import qgemm


@pytest.mark.slow
def test_a_compiled_model_decodes_without_compiling_again() -> None:
    model: Any = qgemm.quantize_model(FAMILIES["llama"]().model)
    model.set_attn_implementation("qgemm")
    prompts = torch.arange(3, 17).reshape(2, 7) * 11 % 90 + 5
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompts, past_key_values=qgemm.KeyValueCache(model.config, 2, 32), **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = qgemm.KeyValueCache(model.config, 2, 32)
    tokens = [prompts]
    with torch.no_grad():
        logits = model(prompts, past_key_values=cache).logits
        for step in range(6):
            tokens.append(logits[:, -1:].argmax(-1))
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                logits = compiled(tokens[-1], past_key_values=cache, position_ids=torch.full((2, 1), 7 + step)).logits
    assert torch.equal(torch.cat(tokens, dim=1), expected)
