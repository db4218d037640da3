"""Good checkpoints for the fuzzer to break: small, in several files or one, of transformers or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families.schemes import EVERY_LAYER, input_scale_for
from torch import Tensor, nn

from checkpoint.faults import Disk
from qgemm import QuantExperts, QuantLinear
from qgemm.checkpoint import load_quantized, save_quantized
from qgemm.checkpoint.tensors import named_tensors
from qgemm.nn import linear_class
from qgemm.scheme import resolve_scheme

CONFIG, INDEX, GENERATION = "config.json", "model.safetensors.index.json", "generation_config.json"


class FuzzNet(nn.Module):
    """Four linear layers of 8 x 8, one of them static, a tied head, buffers of both kinds."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=i % 2 == 0) for i in range(count))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, width))
        self.register_buffer("warp", torch.linspace(1, 2, width), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.warp + self.offset
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def quantized_fuzz_net(middle: str = "int8-static", seed: int = 0) -> FuzzNet:
    """``middle``: the scheme of the second of its three quantized layers; the others are dynamic."""
    torch.manual_seed(seed)
    model = FuzzNet()
    for i in range(3):
        static = i == 1 and middle == "int8-static"
        layer = QuantLinear.from_linear(model.layers[i], "int8-static" if static else "int8", 0.05 if static else None)
        model.layers[i] = layer
    return model.eval()


class FuzzNetOfKinds(FuzzNet):
    """A layer for each kind there is, all of them larger than the columns that one keeps in float."""

    def __init__(self) -> None:
        super().__init__(24, len(EVERY_LAYER))


def quantized_net_of_kinds(seed: int = 0) -> FuzzNet:
    torch.manual_seed(seed)
    model = FuzzNetOfKinds()
    for i, scheme in enumerate(EVERY_LAYER):
        scheme = scheme.replace("outliers-32", "outliers-16")
        K, resolved = model.layers[i].in_features, resolve_scheme(scheme)
        keeps = resolved.activation is not None and resolved.activation.outlier_columns
        model.layers[i] = linear_class(resolved).from_linear(
            model.layers[i],
            resolved,
            input_scale_for(resolved),
            outlier_columns=torch.arange(K)[K - 16 :] if keeps else None,
        )
    return model.eval()


def quantized_gpt_neo(seed: int = 0) -> nn.Module:
    """Has a mask as large as its config says, made in every layer."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "window_size": 4}
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(vocab_size=8, max_position_embeddings=16, attention_types=kinds, **sizes)
    model = GPTNeoForCausalLM(config)
    for layer in model.transformer.h:
        layer.mlp.c_fc = QuantLinear.from_linear(layer.mlp.c_fc)
    return model.eval()


def quantized_llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=16, tie_word_embeddings=True, **sizes))
    for layer in model.model.layers:
        layer.mlp.up_proj = QuantLinear.from_linear(layer.mlp.up_proj)
        layer.self_attn.q_proj = QuantLinear.from_linear(layer.self_attn.q_proj)
    return model.eval()


def quantized_gpt_oss(seed: int = 0) -> nn.Module:
    """Experts with biases, of a layout that isn't the stored one."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    routing = {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = GptOssConfig(vocab_size=8, max_position_embeddings=16, num_key_value_heads=1, **sizes, **routing)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            nn.init.normal_(parameter)
        layer.mlp.experts = QuantExperts.from_experts(layer.mlp.experts)
    return model.eval()


@dataclass(frozen=True)
class Link:
    """A symbolic link, in place of a file's bytes. ``{outside}`` in the target is the folder of forbidden files."""

    target: str


@dataclass(frozen=True)
class Special:
    """What is no file, in place of a file's bytes: a "pipe", a "socket" or a "folder"."""

    kind: str


Files = dict[str, "bytes | Link | Special"]


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its files, and the tensors and the output of the model that they load as."""

    files: Files
    state: dict[str, Tensor]
    output: Tensor


@dataclass(frozen=True)
class Good(Saved):
    """A whole checkpoint, and how to load it.

    For another library's: ``meaning`` makes the model's tensors of the files', ``breaks`` are the ways to break it, and
    ``check`` holds the layers of a loaded model, made of other tensors and this config, against the files.

    For one of qgemm's own: ``other`` is a save of the same model with other values, and ``overwriting`` what the folder
    holds at each moment of another such save that replaces this one; its last is that save.
    """

    build: Callable[[], nn.Module] | None
    meaning: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    breaks: list[Callable[[random.Random, Files], None]] | None = None
    check: Callable[[nn.Module, dict[str, Tensor], dict[str, Any]], None] | None = None
    other: Saved | None = None
    overwriting: tuple[Files, ...] = ()


def read_folder(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def load_saved(folder: Path, build: Callable[[], nn.Module] | None) -> Saved:
    model = load_quantized(folder, model=build)
    state = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    return Saved(read_folder(folder), state, output_of(model))


def output_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(torch.arange(8)[None])
    return out if isinstance(out, Tensor) else out.logits


def make_good(folder: Path) -> list[Good]:
    """The good checkpoints, written into ``folder`` on the way.

    Several shards, one file, three transformers models, every kind of layer.
    """
    return [
        _good(folder / name, make, build, shard_size)
        for name, make, build, shard_size in (
            ("shards", lambda seed: quantized_fuzz_net(seed=seed), FuzzNet, 500),
            ("single", lambda seed: quantized_fuzz_net(seed=seed), FuzzNet, "5GB"),
            ("llama", quantized_llama, None, 1500),
            ("gpt_neo", quantized_gpt_neo, None, 5000),
            ("gpt_oss", quantized_gpt_oss, None, 5000),
            ("kinds", quantized_net_of_kinds, FuzzNetOfKinds, 5000),
        )
    ]


def _good(
    folder: Path, make: Callable[[int], nn.Module], build: Callable[[], nn.Module] | None, shard_size: int | str
) -> Good:
    elsewhere = folder.with_name(f"{folder.name}-other")
    for place, seed in ((folder, 0), (elsewhere, 1)):
        save_quantized(make(seed), place, max_shard_size=shard_size)
    good, other = load_saved(folder, build), load_saved(elsewhere, build)
    moments: list[Files] = []
    disk = Disk(folder)
    disk.listeners.append(lambda event: moments.append(read_folder(folder)))
    with disk:
        save_quantized(make(1), folder, max_shard_size=shard_size, overwrite=True)
    changed = tuple(one for one, before in zip(moments, [good.files, *moments], strict=False) if one != before)
    return Good(good.files, good.state, good.output, build, other=other, overwriting=changed)
