"""The samples of other libraries compute what their files hold.

Some reference logits are of float parts or weights that were rounded for the file. Here a float model gets the parts
that the file holds, and the dequantized weights of the quantized layers, which the tests of each format compare with
the libraries', bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoint.samples import IDS, SAMPLES, every_sample, load_sample
from checkpoint.test_gpt_oss import in_order_of_the_file
from qgemm.nn import QuantExperts, QuantLayer

LARGEST = {"int8": 127, "fp8": 448}


def float_model(name: str, quantized: Any) -> Any:
    config = json.loads((SAMPLES / name / "config.json").read_text())
    config.pop("quantization_config", None)  # quanto writes none
    model = type(quantized)(type(quantized.config)(**config)).float().eval()
    wanted = model.state_dict() | {"model.embed_tokens.weight": quantized.model.embed_tokens.weight}
    state = {
        key: tensor.float()
        for key, tensor in load_file(SAMPLES / name / "model.safetensors").items()
        if key in wanted and tensor.dtype != torch.uint32
    }
    state.setdefault("model.embed_tokens.weight", wanted["model.embed_tokens.weight"])  # MLX's is quantized, too
    for path, layer in quantized.named_modules():
        if isinstance(layer, QuantExperts):
            weights = layer.dequantize(torch.float32)
            state[f"{path}.gate_up_proj"] = in_order_of_the_file(weights["gate_up_proj"]).transpose(1, 2)
            state[f"{path}.down_proj"] = weights["down_proj"].transpose(1, 2)
        elif isinstance(layer, QuantLayer):
            state[f"{path}.weight"] = layer.dequantize(torch.float32).weight
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def largest_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def round_activations(layer: QuantLayer, linear: nn.Linear, errors: list[float]) -> None:
    """Lets ``linear`` round its input as ``layer``'s scheme says; ``errors``: those of ``layer`` on the same input."""
    activation: Any = layer.scheme.activation
    largest = LARGEST[activation.dtype]

    def round_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        parts = []
        for part in args[0].split(activation.group_size or linear.in_features, dim=-1):
            scale = part.abs().amax(-1, keepdim=True) / largest if activation.dynamic else layer.input_scale
            zero = 0 if activation.symmetric else int(layer.input_zero_point)
            values = (part / scale + zero).clamp(-largest - (not activation.symmetric), largest)
            codes = values.round() if activation.dtype == "int8" else values.to(torch.float8_e4m3fn).float()
            parts.append((codes - zero) * scale)
        rounded = torch.cat(parts, dim=-1)
        errors.append(largest_error(layer(args[0]), nn.functional.linear(rounded, linear.weight, linear.bias)))
        return rounded

    linear.register_forward_pre_hook(round_input)


@pytest.mark.parametrize("name", every_sample())
@torch.no_grad()
def test_logits_are_those_of_what_the_file_holds(name: str) -> None:
    model: Any = load_sample(name)[0]
    plain, errors = float_model(name, model), []
    for path, layer in model.named_modules():
        if isinstance(layer, QuantLayer) and layer.scheme.activation is not None:
            round_activations(layer, plain.get_submodule(path), errors)
    wanted = plain(IDS).logits
    assert max(errors, default=0.0) < 1e-5
    # A value half-way between two that an activation can be may become the other, as sums are in another order.
    assert largest_error(model(IDS).logits, wanted) < (0.005 if errors else 1e-5)
