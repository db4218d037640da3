"""What a model needs and how fast it can be on several GPUs, estimated.

Sizes are those of the model itself, quantized on meta and split according to its plan of tensor parallelism. Times are
the sums of the parts of a step and of a prompt, with constants that were measured on an H200. The constants come from a
few of the figures in docs/benchmarks.md and docs/performance/models.md; tests compare the estimates with the others.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import qgemm
from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.parallel import SHAPES as PARALLEL
from benchmarks.tables import Table, render
from qgemm.nn import QuantExperts, QuantLayer

SHAPES: dict[str, ModelShape] = {
    **{name: MODELS[name] for name in ("llama-3-8b", "qwen3-30b-a3b")},
    "llama-3-70b": PARALLEL["llama-3-70b"],
    "llama-3-405b": MODELS["llama-3-8b"].resized(
        "llama-3-405b", 126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128
    ),
    "deepseek-v3": ModelShape("deepseek-v3", "DeepseekV3Config", 61),  # its config's defaults: 671 billion weights
}
LARGE = ("llama-3-70b", "llama-3-405b", "deepseek-v3")
FLOAT = "bf16"
"""The name of no scheme."""


@dataclass(frozen=True)
class Device:
    """Constants of a GPU, each from one figure; seconds and bytes.

    - ``memory``: of a GPU. ``reserve``: what PyTorch, kernels, graphs and a prompt's activations take of it.
    - ``bandwidth``: at which a step reads weights, keys and values.
    - ``per_layer``, ``per_mixture``: what a layer of a step takes beyond that. ``per_step``: what is in no layer.
    - ``rate``: products of int8 in a prompt, operations a second.
    - ``per_value``: what else a prompt takes, for each of the hidden values of a token in a layer.
    - ``sum_latency``, ``sum_bandwidth``: of adding up what two GPUs have. ``sum_doubled``: what each doubling of their
      number adds to the latency, from sums of four.
    """

    memory: float = 141e9
    reserve: float = 8e9
    bandwidth: float = 4.3e12
    per_layer: float = 23e-6
    per_mixture: float = 42e-6
    per_step: float = 60e-6
    rate: float = 1.545e15
    per_value: float = 24.2e-12
    sum_latency: float = 9.9e-6
    sum_bandwidth: float = 303e9
    sum_doubled: float = 5.3e-6

    def sum_seconds(self, gpus: int, nbytes: float) -> float:
        """How long it takes to add up ``nbytes`` of each GPU: in a ring each sends 2 (n - 1) / n of them."""
        if gpus == 1:
            return 0.0
        latency = self.sum_latency + math.log2(gpus / 2) * self.sum_doubled
        return latency + 2 * (gpus - 1) / gpus * nbytes / self.sum_bandwidth


H200 = Device()


@dataclass(frozen=True)
class Inventory:
    """What a model holds, in bytes, and does.

    - ``cut``, ``whole``: linear layers that tensor parallelism cuts, and that it leaves.
    - ``experts``: all of them. ``head``: the output's, if it isn't quantized. ``rest``: embeddings, norms, routers.
    - ``values``: weights by which a token of a prompt is multiplied, without the head; each expert's by how often it is
      chosen.
    - ``layers``; ``mixtures`` of them; ``chosen`` of ``choices`` experts a token.
    - ``token``: of keys and values a token, in 16 bits, and ``cut_token``, those of heads, which GPUs share.
    - ``hidden``: the width.
    """

    cut: int = 0
    whole: int = 0
    experts: int = 0
    head: int = 0
    rest: int = 0
    values: int = 0
    layers: int = 0
    mixtures: int = 0
    token: int = 0
    cut_token: int = 0
    hidden: int = 0
    chosen: int = 0
    choices: int = 0

    def weights(self, gpus: int = 1) -> float:
        """Bytes of weights on each of ``gpus``."""
        return self.whole + self.rest + (self.cut + self.experts + self.head) / gpus

    def cache(self, tokens: int, gpus: int = 1, bits: int = 16) -> float:
        """Bytes of keys and values of ``tokens`` on each of ``gpus``."""
        return tokens * (self.token - self.cut_token + self.cut_token / gpus) * bits / 16

    def room(self, gpus: int) -> int:
        """How many tokens fit beside the weights, of all sequences together; below 0 the weights don't."""
        left = H200.memory - H200.reserve - self.weights(gpus)
        return int(left // self.cache(1, gpus))

    def step(self, batch: int, context: int, gpus: int = 1, bits: int = 16) -> float:
        """Seconds of a step of ``batch`` sequences with ``context`` tokens each."""
        read = self.whole + (self.cut + self.head) / gpus
        if self.mixtures:  # the experts that any of the tokens chooses, each token by itself
            read += self.experts / gpus * (1 - (1 - self.chosen / self.choices) ** batch)
        read += self.cache(batch * context, gpus, bits)
        fixed = (self.layers - self.mixtures) * H200.per_layer + self.mixtures * H200.per_mixture + H200.per_step
        return read / H200.bandwidth + fixed + self._sums(batch, gpus)

    def prefill(self, tokens: int, gpus: int = 1) -> float:
        """Seconds of a prompt of ``tokens`` in all, of some thousands each, through an int8 model without mixtures."""
        if self.mixtures:
            raise ValueError("prompts through mixtures don't follow this rule: measure one")
        own = 2 * tokens * self.values / H200.rate + self.layers * tokens * self.hidden * H200.per_value
        return own / gpus + self._sums(tokens, gpus)

    def _sums(self, tokens: int, gpus: int) -> float:
        return 2 * self.layers * H200.sum_seconds(gpus, 2 * tokens * self.hidden)


def inventory(shape: ModelShape, scheme: str = "int8", layers: int | None = None, **options: Any) -> Inventory:
    """What the model ``shape`` holds with ``scheme``, or ``FLOAT``, and ``options`` of ``quantize_model``.

    Of its ``layers`` one of each kind is built, on meta.
    """
    wanted = layers or shape.layers
    few = min(wanted, getattr(shape.make_config(1), "first_k_dense_replace", 0) + 1)
    found = _count(shape, scheme, few, options)
    if wanted == few:
        return found
    # A further layer is like the last one.
    more = _count(shape, scheme, few + 1, options)
    names = [field.name for field in fields(Inventory) if field.name not in ("hidden", "chosen", "choices")]
    each = {name: getattr(more, name) - getattr(found, name) for name in names}
    return replace(found, **{name: getattr(found, name) + (wanted - few) * each[name] for name in names})


def _count(shape: ModelShape, scheme: str, layers: int, options: Mapping[str, Any]) -> Inventory:
    from transformers import AutoModelForCausalLM

    config = shape.make_config(layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qgemm.quantize_model(model, "int8" if scheme == FLOAT else scheme, **options)
    total, found, chosen, choices = sum(each.nbytes for each in model.parameters()), Inventory(), 0, 0
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLayer):
            continue
        stored = sum(each.nbytes for each in layer.parameters(recurse=False))
        if isinstance(layer, QuantExperts):
            values = layer.gate_up_proj.numel() + layer.down_proj.numel() if scheme in (FLOAT, "int8") else 0
            chosen, choices = config.num_experts_per_tok, len(layer.gate_up_proj)
            found = replace(found, experts=found.experts + (2 * values if scheme == FLOAT else stored))
            found = replace(found, mixtures=found.mixtures + 1, values=found.values + values * chosen // choices)
        else:
            values = layer.in_features * layer.out_features
            kind = "cut" if re.sub(r"\.\d+(?=\.|$)", ".*", name) in model.tp_plan else "whole"
            size = getattr(found, kind) + (2 * values if scheme == FLOAT else stored)
            found = replace(found, **{kind: size}, values=found.values + (0 if name == "lm_head" else values))
        total -= stored
    head = model.get_output_embeddings()
    head_bytes = 0 if isinstance(head, QuantLayer) else head.weight.nbytes
    if latent := getattr(config, "kv_lora_rank", None):
        token, cut_token = 2 * layers * (latent + config.qk_rope_head_dim), 0
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = cut_token = 4 * layers * config.num_key_value_heads * size
    return replace(
        found,
        head=head_bytes,
        rest=total - head_bytes,
        layers=layers,
        token=token,
        cut_token=cut_token,
        hidden=config.hidden_size,
        chosen=chosen,
        choices=choices,
    )


def memory_table(names: Sequence[str], schemes: Sequence[str], gpus: Sequence[int]) -> Table:
    """A row a model and scheme: bytes of weights; for each number of GPUs those on one, and how many tokens fit."""
    rows = []
    for name in names:
        for scheme in schemes:
            found = inventory(SHAPES[name], scheme)
            cells = [name, scheme, f"{found.weights() / 1e9:,.0f} GB"]
            for count in gpus:
                room = found.room(count)
                cells.append(f"{found.weights(count) / 1e9:,.0f} GB, {room // 1000:,}k" if room > 0 else "")
            rows.append(cells)
    return ["model", "scheme", "weights", *(f"{count} x H200" for count in gpus)], rows


def time_table(names: Sequence[str], gpus: Sequence[int], batches: Sequence[int], context: int) -> Table:
    """A row a model and number of GPUs that hold it in int8: times of steps, and of a prompt of 16,384 tokens."""
    rows = []
    for name in names:
        found = inventory(SHAPES[name])
        for count in gpus:
            if found.room(count) < max(batches) * context:
                continue
            steps = [f"{found.step(batch, context, count) * 1e3:.1f} ms" for batch in batches]
            prompt = "" if found.mixtures else f"{found.prefill(16384, count) * 1e3:,.0f} ms"
            rows.append([name, str(count), *steps, prompt])
    return ["model", "GPUs", *(f"step, batch {batch}" for batch in batches), "prompt, 8 x 2,048"], rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=SHAPES, help=f"only these ({', '.join(LARGE)})")
    parser.add_argument("--scheme", action="append", help=f"only these ({FLOAT}, int8, int4)")
    parser.add_argument("--gpus", action="append", type=int, help="only so many (1, 2, 4, 8)")
    parser.add_argument("--batch", action="append", type=int, help="only these (1, 16, 64)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence in a step (2048)")
    args = parser.parse_args(arguments)
    names, gpus = args.model or LARGE, args.gpus or (1, 2, 4, 8)
    print(render(memory_table(names, args.scheme or (FLOAT, "int8", "int4"), gpus), markdown=True))
    print()
    print(render(time_table(names, gpus, args.batch or (1, 16, 64), args.context), markdown=True))


if __name__ == "__main__":
    main()
