"""Ways to break the JSON files of a checkpoint. Each changes ``files`` in place, or raises ``Unfit``."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from checkpoint.fuzz_models import CONFIG, GENERATION, INDEX, Files


class Unfit(Exception):
    """A break that doesn't apply to these files."""


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
