"""Quantizes a language model from transformers, and generates with it before and after.

The model is a small Llama with random weights, so that nothing is downloaded; one from ``from_pretrained`` takes the
same lines.

Run it with ``python examples/quantize_llama.py``.
"""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import qgemm


def generate(model: LlamaForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    """The prompt and 16 more tokens, each the likeliest."""
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        # Random weights as large as trained ones, so that the layers matter to the output.
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config).eval()
    if torch.cuda.is_available():
        model.to("cuda", torch.bfloat16)
    prompt = torch.arange(1, 9, device=model.device)[None]

    float_text = generate(model, prompt)
    with torch.no_grad():
        before = model(float_text).logits[0].float()
        qgemm.quantize_model(model)
        after = model(float_text).logits[0].float()
    int8_text = generate(model, prompt)

    print(qgemm.report(model))
    print()
    print("float:", *float_text[0, prompt.shape[1] :].tolist())
    print("int8: ", *int8_text[0, prompt.shape[1] :].tolist())
    # Once a token differs the texts part. With random weights near ties are common, and one comes soon.
    same = (before.argmax(-1) == after.argmax(-1)).sum().item()
    print(f"same next token at {same} of {len(before)} places of the float model's text")
    cosine = F.cosine_similarity(before, after).min().item()
    print(f"minimum cosine similarity of the logits: {cosine:.4f}")
    assert cosine > 0.99, "the quantized model computes something else"


if __name__ == "__main__":
    main()
