"""Broken checkpoints by the thousand: each is refused with a ``CheckpointError`` or loads as what its files say.

    python tests/checkpoint/fuzz.py --cases 10000 --seed 0

Every case starts from one of four good folders, breaks it in one to three ways, and loads it. What may happen then:

- ``CheckpointError``;
- a model whose output equals the good one's;
- a model with other values, if a break changed values *and* their checksums: then every tensor is what an independent
  reader finds in the files.

Anything else is a failure: another exception, more than ``SECONDS``, more than ``MEMORY`` bytes, a file opened outside
of the folder. Case ``i`` of a seed is always the same; ``--only i`` runs it alone and shows what became of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from qgemm import QuantLinear
from qgemm.checkpoint import CheckpointError, load_quantized, safetensors_file, save_quantized
from qgemm.checkpoint.tensors import FLOAT_DTYPES, named_tensors

CONFIG, INDEX, GENERATION = "config.json", "model.safetensors.index.json", "generation_config.json"
SECONDS, MEMORY = 10, 512 << 20


class FuzzNet(nn.Module):
    """Four linear layers of 8 x 8, one of them static, a tied head, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 0) for i in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 8))
        self.register_buffer("warp", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.warp + self.offset
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def quantized_fuzz_net() -> FuzzNet:
    torch.manual_seed(0)
    model = FuzzNet()
    for i in range(3):
        static = i == 1
        layer = QuantLinear.from_linear(model.layers[i], "int8-static" if static else "int8", 0.05 if static else None)
        model.layers[i] = layer
    return model.eval()


def quantized_gpt_neo() -> nn.Module:
    """Has a mask as large as its config says, made in every layer."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "window_size": 4}
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(vocab_size=8, max_position_embeddings=16, attention_types=kinds, **sizes)
    model = GPTNeoForCausalLM(config)
    for layer in model.transformer.h:
        layer.mlp.c_fc = QuantLinear.from_linear(layer.mlp.c_fc)
    return model.eval()


def quantized_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=16, tie_word_embeddings=True, **sizes))
    for layer in model.model.layers:
        layer.mlp.up_proj = QuantLinear.from_linear(layer.mlp.up_proj)
        layer.self_attn.q_proj = QuantLinear.from_linear(layer.self_attn.q_proj)
    return model.eval()


@dataclass(frozen=True)
class Link:
    """A symbolic link, in place of a file's bytes. ``{outside}`` in the target is the folder of forbidden files."""

    target: str


Files = dict[str, "bytes | Link"]


@dataclass(frozen=True)
class Good:
    """A whole checkpoint: its files, how to load it, its output."""

    files: Files
    build: Callable[[], nn.Module] | None
    output: Tensor


def output_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(torch.arange(8)[None])
    return out if isinstance(out, Tensor) else out.logits


def make_good(folder: Path) -> list[Good]:
    """The good checkpoints: several shards, one file, two transformers models; written into ``folder`` on the way."""
    made = []
    plain = quantized_fuzz_net()
    for name, model, build, shard_size in (
        ("shards", plain, FuzzNet, 500),
        ("single", plain, FuzzNet, "5GB"),
        ("llama", quantized_llama(), None, 1500),
        ("gpt_neo", quantized_gpt_neo(), None, 5000),
    ):
        save_quantized(model, folder / name, max_shard_size=shard_size)
        files: Files = {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}
        made.append(Good(files, build, output_of(load_quantized(folder / name, model=build))))
    return made


# Breaks: each changes the files in place, or raises ``Unfit`` where it finds nothing to break.


class Unfit(Exception):
    """A break that doesn't apply to these files."""


Break = Callable[[random.Random, Files], None]


def pick(rng: random.Random, files: Files, suffix: str = "") -> str:
    names = sorted(name for name, content in files.items() if name.endswith(suffix) and isinstance(content, bytes))
    if not names:
        raise Unfit
    return rng.choice(names)


def content_of(files: Files, name: str) -> bytes:
    content = files.get(name)
    if not isinstance(content, bytes) or not content:
        raise Unfit
    return content


def split_shard(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and values of a safetensors file; ``Unfit`` if an earlier break left none."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
    except (struct.error, ValueError, RecursionError) as error:
        raise Unfit from error
    if not isinstance(header, dict) or len(content) < 8 + length:
        raise Unfit
    return header, content[8 + length :]


def join_shard(header: Any, values: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def truncate(rng: random.Random, files: Files) -> None:
    name = pick(rng, files)
    content = content_of(files, name)
    files[name] = content[: rng.choice([0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))])]


def extend(rng: random.Random, files: Files) -> None:
    name = pick(rng, files)
    files[name] = content_of(files, name) + rng.choice([b"\0", b" ", b"{}", rng.randbytes(rng.randrange(1, 100))])


def flip_bits(rng: random.Random, files: Files) -> None:
    """A bit or a few, anywhere in any file."""
    name = pick(rng, files)
    content = bytearray(content_of(files, name))
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)


def flip_header_bits(rng: random.Random, files: Files) -> None:
    """A bit or a few in a shard's header or in its length."""
    name = pick(rng, files, ".safetensors")
    content = bytearray(content_of(files, name))
    end = len(content) - len(split_shard(bytes(content))[1])
    for _ in range(rng.choice([1, 1, 2])):
        content[rng.randrange(end)] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)


def flip_value_bits(rng: random.Random, files: Files) -> None:
    """A bit of a tensor's values."""
    name = pick(rng, files, ".safetensors")
    content = bytearray(content_of(files, name))
    start = len(content) - len(split_shard(bytes(content))[1])
    if start == len(content):
        raise Unfit
    content[rng.randrange(start, len(content))] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)


def cut_or_double(rng: random.Random, files: Files) -> None:
    """A piece of a file is gone, or there twice, or replaced by noise that is often not UTF-8."""
    name = pick(rng, files)
    content = content_of(files, name)
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randrange(1, 40))
    middle = rng.choice([b"", content[start:end] * 2, rng.randbytes(end - start), b"\xff\xfe\xc3\x28"])
    files[name] = content[:start] + middle + content[end:]


def header_length(rng: random.Random, files: Files) -> None:
    name = pick(rng, files, ".safetensors")
    content = content_of(files, name)
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\0"))
    absurd = [0, 1, 2, length - 1, length + 1, len(content), 100_000_001, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    files[name] = struct.pack("<Q", max(rng.choice(absurd), 0)) + content[8:]


NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, 9, 127, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)),
    *(10**9, 10**12, 10**30, 10**300, 0.5, -0.5, 1e308, float("nan"), float("inf"), float("-inf"), 8.0),
]


def nested(depth: int, opening: str = "[") -> str:
    return opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth


class Raw(str):
    """Text to be put into JSON as it is."""


OTHERS: list[Any] = [
    *(None, True, False, "", "x", "8", "int8", "../x", "/etc/hostname", "\ud800", "\0", "é" * 300, "x" * 5000),
    *([], {}, [[]], [1, 2], {"a": {}}, [None], {"": ""}, ["x"], {"x": "int8"}, [[8, 8]], [-1], [2**63]),
    *(Raw(nested(50)), Raw(nested(3000)), Raw(nested(200_000)), Raw(nested(3000, '{"a":'))),
    *(
        Raw("1" * 4000),
        Raw("1" * 5000),
        Raw("1e999999"),
        Raw("-0"),
        Raw("NaN"),
        Raw("[1,]"),
        Raw("0x8"),
        Raw('"\\u12"'),
    ),
]


def dump(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Doubled):
        pairs = [f"{json.dumps(key)}: {dump(part)}" for key, part in value.items()]
        return "{" + ", ".join([*pairs, f"{json.dumps(value.key)}: {dump(value.second)}"]) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value)


class Doubled(dict):  # type: ignore[type-arg]
    """An object with one key twice."""

    key: str
    second: Any


def break_object(rng: random.Random, values: Any, root: str | None = None) -> Any:
    """One place in a JSON object, at any depth, changed: another value, gone, renamed, or there twice."""
    if not isinstance(values, dict) or not values:
        raise Unfit
    place: Any = values
    parent, slot = None, None
    key: Any = root if root in values else rng.choice(sorted(values, key=str))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
        parent, slot = place, key
        place = place[key]
        key = rng.randrange(len(place)) if isinstance(place, list) else rng.choice(sorted(place, key=str))
    what = rng.random()
    if what < 0.7:
        place[key] = rng.choice([rng.choice(NUMBERS), rng.choice(OTHERS)])
    elif what < 0.8:
        del place[key]
    elif isinstance(place, dict) and what < 0.9:
        place[rng.choice(["x", "", "weight", key + "x", key.upper(), "__class__", "a.b", "layers.0"])] = place.pop(key)
    elif isinstance(place, dict):
        doubled = Doubled(place)
        doubled.key, doubled.second = key, rng.choice([place[key], rng.choice(NUMBERS), rng.choice(OTHERS)])
        if parent is None:
            return doubled
        parent[slot] = doubled
    else:
        place.insert(key, place[key])
    return values


def break_json(rng: random.Random, files: Files, name: str, root: str | None = None) -> None:
    try:
        values = json.loads(content_of(files, name))
    except (ValueError, RecursionError) as error:
        raise Unfit from error
    files[name] = dump(break_object(rng, values, root)).encode("utf-8", "surrogatepass")


def break_config(rng: random.Random, files: Files) -> None:
    break_json(rng, files, CONFIG)


def break_sizes(rng: random.Random, files: Files) -> None:
    """A number in the model's config, or one that such a config may have, is another: absurd, or only too large."""
    try:
        config = json.loads(content_of(files, CONFIG))
        names = sorted(name for name, value in config.items() if type(value) in (int, float))
        more = ["num_labels", "head_dim", "num_hidden_layers", "max_position_embeddings", "vocab_size", "pad_token_id"]
        config[rng.choice(names + more)] = rng.choice(
            [*NUMBERS, 3, 16, 64, 100, 1000, 10**4, 10**5, 10**6, 10**7, 10**8]
        )
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise Unfit from error
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


def add_to_config(rng: random.Random, files: Files) -> None:
    """What transformers acts on though qgemm never writes it: code, kernels, adapters, tokens, plans, other models."""
    try:
        config = json.loads(content_of(files, CONFIG))
        name = rng.choice(
            [
                *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
                *("auto_map", "trust_remote_code", "_name_or_path", "name_or_path", "id2label", "label2id", "dtype"),
                *(
                    "torch_dtype",
                    "base_model_tp_plan",
                    "rope_parameters",
                    "rope_scaling",
                    "layer_types",
                    "architectures",
                ),
                *(
                    "output_attentions",
                    "return_dict",
                    "use_cache",
                    "torchscript",
                    "pruned_heads",
                    "backbone",
                    "model_type",
                ),
                *("text_config", "vision_config", "sub_configs", "__class__", "__dict__", "to_dict", "attribute_map"),
                *(
                    "custom_pipelines",
                    "transformers_version",
                    "_commit_hash",
                    "generation_config",
                    "chunk_size_feed_forward",
                ),
            ]
        )
        values = [
            "kernels-community/flash-attn",
            "eager",
            "sdpa",
            "flash_attention_2",
            {"": "x/y"},
            {"rope_type": "yarn"},
        ]
        config[name] = rng.choice([*values, rng.choice(NUMBERS), rng.choice(OTHERS), {"AutoModel": "../x--evil.Model"}])
    except (ValueError, RecursionError, TypeError) as error:
        raise Unfit from error
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


def break_manifest(rng: random.Random, files: Files) -> None:
    break_json(rng, files, CONFIG, "quantization_config")


def break_index(rng: random.Random, files: Files) -> None:
    break_json(rng, files, INDEX)


def break_generation_config(rng: random.Random, files: Files) -> None:
    break_json(rng, files, GENERATION)


def break_header(rng: random.Random, files: Files) -> None:
    """A shard's header, at any place: shape, dtype, offsets, names, metadata."""
    name = pick(rng, files, ".safetensors")
    header, values = split_shard(content_of(files, name))
    files[name] = join_shard(dump(break_object(rng, header)).encode("utf-8", "surrogatepass"), values)


def tensor_in_header(rng: random.Random, header: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    names = sorted(name for name, entry in header.items() if isinstance(entry, dict) and "data_offsets" in entry)
    if not names:
        raise Unfit
    name = rng.choice(names)
    return name, header[name]


def break_entry(rng: random.Random, files: Files) -> None:
    """One tensor's entry in a header: the absurd in shapes, offsets and dtypes."""
    name = pick(rng, files, ".safetensors")
    header, values = split_shard(content_of(files, name))
    _, entry = tensor_in_header(rng, header)
    what = rng.randrange(6)
    if what == 0:
        dtypes = ["F32", "I8", "U8", "BF16", "F64", "BOOL", "I64", "F4", "F8_E4M3", "F8_E8M0", "F6_E2M3", "C64", "U64"]
        entry["dtype"] = rng.choice([*dtypes, "Q4", "", "f32", 3, None])
    elif what == 1:
        absurd = [[], [0], [2**63], [2**62, 4], [2**32, 2**32], [0, 2**63], [-1, -8], [2**64], [1] * 70, [8.0, 8], [64]]
        entry["shape"] = rng.choice([*absurd, [4, 16], [8, 8, 1], [1, 8, 8], [True, 8], [8], [8, 8], "8"])
    elif what == 2:
        entry["data_offsets"] = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
    elif what == 3:
        try:
            start, end = entry["data_offsets"]
            by = rng.choice([-8, -1, 1, 4, 8, 2**62, 2**63, 2**64])
            entry["data_offsets"] = rng.choice([[start + by, end + by], [start + by, end], [start, end + by]])
        except (TypeError, ValueError) as error:
            raise Unfit from error
    elif what == 4:  # gap: bytes that belong to no tensor
        values += bytes(8)
    else:  # overlap: two tensors share their bytes
        entry["data_offsets"] = tensor_in_header(rng, header)[1]["data_offsets"]
    files[name] = join_shard(header, values)


def swap_tensors(rng: random.Random, files: Files) -> None:
    """Two tensors of one file under each other's name."""
    name = pick(rng, files, ".safetensors")
    header, values = split_shard(content_of(files, name))
    (a, first), (b, second) = tensor_in_header(rng, header), tensor_in_header(rng, header)
    header[a], header[b] = second, first
    files[name] = join_shard(header, values)


def swap_files(rng: random.Random, files: Files) -> None:
    a, b = pick(rng, files, rng.choice(["", ".safetensors"])), pick(rng, files, rng.choice(["", ".safetensors"]))
    files[a], files[b] = files[b], files[a]


def swap_places(rng: random.Random, files: Files) -> None:
    """Two tensors in the index, each in the other's file."""
    try:
        index = json.loads(content_of(files, INDEX))
        places = index["weight_map"]
        a, b = rng.choice(sorted(places)), rng.choice(sorted(places))
        places[a], places[b] = places[b], places[a]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
        raise Unfit from error
    files[INDEX] = dump(index).encode("utf-8", "surrogatepass")


def rewrite_values(rng: random.Random, files: Files) -> None:
    """A shard written anew, checksums and all, with a tensor of it changed as another program might have."""
    name = pick(rng, files, ".safetensors")
    try:
        tensors = parse_safetensors(content_of(files, name))
    except Exception as error:
        raise Unfit from error
    if not tensors:
        raise Unfit
    key = rng.choice(sorted(tensors))
    value = tensors[key].clone()
    what = rng.randrange(7)
    if what == 0 and value.numel() and value.is_floating_point():
        value.view(-1)[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf"), -1.0, 0.0, -0.0, 1e-45])
    elif what == 1 and value.numel():
        value.view(-1)[rng.randrange(value.numel())] = 5
    elif what == 2:
        value = value.to(rng.choice([torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]))
    elif what == 3:
        value = value[..., None] if rng.random() < 0.5 else value[None]
    elif what == 4:
        value = value.new_zeros(rng.choice([(0,), (0, 8), (8, 0), (16,), (8, 9), (9,), (2, 8), (8, 8, 8)]))
    elif what == 5:
        other = rng.choice(["layers.0.zero_point", "x", "", "layers.99.weight", "model.layers.0.x", key + ".weight"])
        tensors[other] = tensors.pop(key) if rng.random() < 0.5 else tensors[key].clone()
        value = tensors.get(key, value)
    else:
        del tensors[key]
    if key in tensors:
        tensors[key] = value
    files[name] = shard_bytes(tensors)


def shard_bytes(tensors: dict[str, Tensor]) -> bytes:
    import io

    file = io.BytesIO()
    safetensors_file.write_safetensors(file, tensors, lambda count: None)
    return file.getvalue()


def add_to_layers(rng: random.Random, files: Files) -> None:
    """``layers`` and ``tied`` with names of other tensors and modules of the model: plausible, and wrong."""
    try:
        config = json.loads(content_of(files, CONFIG))
        manifest = config["quantization_config"]
        names = sorted(
            name
            for shard in files
            if shard.endswith(".safetensors")
            for name in split_shard(content_of(files, shard))[0]
            if name != "__metadata__"
        )
        name, other = rng.choice(names), rng.choice(names)
        what = rng.randrange(4)
        if what == 0:
            manifest["layers"][name.rpartition(".")[0]] = rng.choice(["int8", "int8-static"])
        elif what == 1:
            manifest["tied"][name] = other
        elif what == 2:
            manifest["tied"][rng.choice(["head.weight", "lm_head.weight"])] = other
        else:
            layers = manifest["layers"]
            a, b = rng.choice(sorted(layers)), rng.choice(sorted(layers))
            layers[a], layers[b] = layers[b], layers[a]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Unfit from error
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


def retie(rng: random.Random, files: Files) -> None:
    """A tensor taken out of its file, and tied to another one."""
    try:
        config = json.loads(content_of(files, CONFIG))
        shard = pick(rng, files, ".safetensors")
        tensors = parse_safetensors(content_of(files, shard))
        name = rng.choice(sorted(tensors))
        del tensors[name]
        everywhere = [
            key for part in files if part.endswith(".safetensors") for key in split_shard(content_of(files, part))[0]
        ]
        config["quantization_config"]["tied"][name] = rng.choice(sorted(everywhere))
        if INDEX in files:
            index = json.loads(content_of(files, INDEX))
            index["weight_map"].pop(name, None)
            files[INDEX] = dump(index).encode("utf-8", "surrogatepass")
    except Unfit:
        raise
    except Exception as error:
        raise Unfit from error
    files[shard] = shard_bytes(tensors)
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


def remove_file(rng: random.Random, files: Files) -> None:
    del files[rng.choice(sorted(files))]


def add_file(rng: random.Random, files: Files) -> None:
    extra = rng.choice(
        ["model.safetensors", INDEX, GENERATION, "model-00009-of-00009.safetensors", "pytorch_model.bin"]
    )
    files[extra] = rng.choice([b"", b"{}", b"\x80\x04\x95pickle", rng.choice(list(files.values()))])


def lead_away(rng: random.Random, files: Files) -> None:
    """A tensor's file in the index is a path, a device, a folder, or a name that no file system takes."""
    try:
        index = json.loads(content_of(files, INDEX))
        places = index["weight_map"]
        victim = places[rng.choice(sorted(places))]
        away = rng.choice(
            [
                *("../outside/" + victim, "./" + victim, "/dev/zero", "..", ".", "", "~", "~/x", "sub/" + victim),
                *(
                    "{outside}/" + victim,
                    "..\\" + victim,
                    "C:" + victim,
                    "C:\\x",
                    "\\\\host\\x",
                    victim + "\0",
                    CONFIG,
                    INDEX,
                ),
                *(
                    "x" * 255,
                    "x" * 5000,
                    "\ud800",
                    "é" * 200,
                    victim.upper(),
                    " " + victim,
                    victim + "/",
                    victim + "\n",
                    "%2e%2e",
                ),
            ]
        )
        everywhere = rng.random() < 0.5
        index["weight_map"] = {
            name: away if place == victim and (everywhere or rng.random() < 0.5) else place
            for name, place in places.items()
        }
    except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Unfit from error
    files[INDEX] = dump(index).encode("utf-8", "surrogatepass")


def link(rng: random.Random, files: Files) -> None:
    """A file is a link: to the forbidden folder, to a device, to itself, to nothing, to a file of this folder."""
    name = rng.choice(sorted(files))
    targets = [
        "{outside}/" + name,
        "../outside/" + name,
        name,
        "nothing",
        "/dev/zero",
        "/dev/null",
        ".",
        "/",
        "/etc/hostname",
    ]
    files[name] = Link(rng.choice([*targets, rng.choice(sorted(files))]))


BREAKS: list[Break] = [
    *(truncate, extend, flip_bits, flip_header_bits, flip_value_bits, cut_or_double, header_length, break_config),
    *(break_sizes, add_to_config),
    *(break_manifest, break_index, break_generation_config, break_header, break_entry, swap_tensors, swap_files),
    *(swap_places, rewrite_values, add_to_layers, retie, remove_file, add_file, lead_away, link),
]
# What has the most ways to be wrong is broken oftener.
WEIGHTS = [
    3 if one in (break_config, break_sizes, break_manifest, break_entry, rewrite_values) else 1 for one in BREAKS
]


def make_case(good: list[Good], seed: int, number: int) -> tuple[Good, Files, list[str]]:
    """Case ``number`` of ``seed``: what it was made from, its files, and the names of the breaks."""
    rng = random.Random(f"{seed} {number}")
    start = rng.choice(good)
    files, names = dict(start.files), []
    wanted = rng.choice([1, 1, 1, 2, 3])
    while len(names) < wanted:
        (one,) = rng.choices(BREAKS, WEIGHTS)
        broken = dict(files)
        try:
            one(rng, broken)
        except Unfit:
            if names:
                break
            continue
        files = broken
        names.append(one.__name__)
    return start, files, names


# Running a case.


def write_files(files: Files, folder: Path, outside: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, Link):
            (folder / name).symlink_to(content.target.replace("{outside}", str(outside)))
        else:
            (folder / name).write_bytes(content.replace(b"{outside}", str(outside).encode()))


class Watch:
    """What is opened while a case runs: by Python, which audits it, and by safetensors, which doesn't."""

    def __init__(self) -> None:
        self.opened: list[str] | None = None
        sys.addaudithook(self._audit)
        plain = safetensors_file.safe_open

        def safe_open(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._audit("open", (path,))
            return plain(path, *args, **kwargs)

        safetensors_file.safe_open = safe_open  # type: ignore[misc]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.opened is None:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self.opened.append(os.fsdecode(args[0]))
        elif event.partition(".")[0] in ("socket", "subprocess") or event in (
            "os.system",
            "os.exec",
            "pickle.find_class",
        ):
            self.opened.append(f"{event} {args}")

    def outside_of(self, folder: Path) -> list[str]:
        """What was opened that doesn't lie, links followed, in ``folder``; Python's own modules don't count."""
        real, python = os.path.realpath(folder), [os.path.realpath(path) for path in sys.path if path]
        python += [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]
        # By name, not by suffix alone: a case has no modules.
        return [
            path
            for path in self.opened or []
            if os.path.dirname(os.path.realpath(path)) != real
            and not (path.endswith((".py", ".pyc")) and os.path.realpath(path).startswith(tuple(python)))
        ]


class Hang(BaseException):
    """A case took longer than ``SECONDS``."""


def run_case(case: tuple[Good, Files, list[str]], work: Path, watch: Watch) -> str:
    """``"refused"``, ``"equal"`` or ``"other values"``; anything else raises ``AssertionError``."""
    start, files, _ = case
    folder = work / "case"
    write_files(files, folder, work / "outside")
    before = memory_peak()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    watch.opened = []
    try:
        model = load_quantized(folder, model=start.build)
    except CheckpointError as error:
        str(error).encode("utf-8", "backslashreplace")
        model = None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of CheckpointError") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        strangers = watch.outside_of(folder)
        watch.opened = None
        shards = [] if strangers else [path for path in folder.iterdir() if path.name.endswith(".safetensors")]
        held = {path.name: path.read_bytes() for path in shards if path.is_file()}
        shutil.rmtree(folder)
    assert not strangers, f"opened {strangers}"
    grown = memory_peak() - before
    assert grown < MEMORY, f"memory rose by {grown >> 20} MiB"
    assert torch.get_default_dtype() == torch.float32, "the default dtype was left changed"
    if model is None:
        return "refused"
    config = json.loads(content_of(files, CONFIG))
    on_disk = read_files(files, held)
    for name, tensor in named_tensors(model).items():
        stored = on_disk.get(config["quantization_config"]["tied"].get(name, name))
        assert stored is None or same_bytes(stored, tensor.detach()), f"{name} is not what its file holds"
    try:
        output = output_of(model)
    except Exception as error:
        # A float tensor keeps the dtype of its file; PyTorch refuses to multiply those that differ.
        if len({tensor.dtype for tensor in on_disk.values() if tensor.dtype in FLOAT_DTYPES}) > 1:
            return "other values"
        raise AssertionError("loaded, but can't be run") from error
    if torch.equal(output, start.output):
        return "equal"
    untouched = read_files(start.files, start.files)
    assert config != json.loads(content_of(start.files, CONFIG)) or any(
        name not in on_disk or not same_bytes(tensor, on_disk[name]) for name, tensor in untouched.items()
    ), "another output from the same values"
    return "other values"


def read_files(files: Files, held: Mapping[str, bytes | Link]) -> dict[str, Tensor]:
    """Every tensor of the files that the index names, or of the only one, read by the safetensors library."""
    places = json.loads(content_of(files, INDEX))["weight_map"] if isinstance(files.get(INDEX), bytes) else {}
    tensors: dict[str, Tensor] = {}
    for name in set(places.values()) or {"model.safetensors"}:
        content = held[name]
        assert isinstance(content, bytes)
        tensors.update(parse_safetensors(content))
    return tensors


def same_bytes(a: Tensor, b: Tensor) -> bool:
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def memory_peak() -> int:
    """The most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prepare(work: Path) -> tuple[list[Good], Watch]:
    """The good checkpoints, and everything imported that loading one imports."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)

    def hang(*args: object) -> None:
        raise Hang(f"still running after {SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    good = make_good(work / "good")
    write_files(good[0].files, work / "outside", work)
    return good, Watch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone and show it")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.cases) if args.only is None else [args.only]
    faulthandler.enable()
    counts: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work_name:
        work = Path(work_name)
        good, watch = prepare(work)
        # Address space that a case may take on top of what PyTorch has mapped by now: what asks for more, fails.
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MEMORY, resource.RLIM_INFINITY))
        baseline = memory_peak()
        for number in numbers:
            case = make_case(good, args.seed, number)
            faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
            try:
                outcome = run_case(case, work, watch)
            except AssertionError as error:
                failures += 1
                outcome = "FAILED"
                print(f"case {number} of seed {args.seed}, {', '.join(case[2])}: {error}", flush=True)
                if failures <= 20 or args.only is not None:
                    traceback.print_exception(error.__cause__ or error, limit=-6)
            counts[outcome] += 1
            if args.only is not None:
                print(f"{', '.join(case[2])}: {outcome}")
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({**counts, "peak_memory_grown": memory_peak() - baseline}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
