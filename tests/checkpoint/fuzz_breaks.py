"""Ways to break a checkpoint, and the cases made of them. Each changes ``files`` in place, or raises ``Unfit``."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from families.schemes import EVERY_LAYER
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from checkpoint.fuzz_json import (
    NUMBERS,
    Unfit,
    add_to_config,
    break_config,
    break_generation_config,
    break_index,
    break_manifest,
    break_object,
    break_sizes,
    content_of,
    dump,
    join_shard,
    pick,
    split_shard,
)
from checkpoint.fuzz_models import CONFIG, GENERATION, INDEX, Files, Good, Link, Special
from qgemm.checkpoint.safetensors_file import SAVE
from qgemm.checkpoint.safetensors_writer import write_safetensors

Break = Callable[[random.Random, Files], None]


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
    files[name] = shard_bytes(tensors, content_of(files, name))


def shard_bytes(tensors: dict[str, Tensor], before: bytes = b"") -> bytes:
    """A shard of ``tensors``, of the same save as the shard ``before``."""
    metadata = split_shard(before)[0].get("__metadata__") if before else None
    save = metadata.get(SAVE) if isinstance(metadata, dict) else None
    file = io.BytesIO()
    write_safetensors(file, tensors, lambda count: None, {SAVE: save} if isinstance(save, str) else None)
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
            manifest["layers"][name.rpartition(".")[0]] = rng.choice([*EVERY_LAYER, "int8-outliers-16"])
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
    files[shard] = shard_bytes(tensors, content_of(files, shard))
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")


def any_of(rng: random.Random, files: Files) -> str:
    if not files:
        raise Unfit
    return rng.choice(sorted(files))


def remove_file(rng: random.Random, files: Files) -> None:
    del files[any_of(rng, files)]


def add_file(rng: random.Random, files: Files) -> None:
    extra = rng.choice(
        ["model.safetensors", INDEX, GENERATION, "model-00009-of-00009.safetensors", "pytorch_model.bin"]
    )
    files[extra] = rng.choice([b"", b"{}", b"\x80\x04\x95pickle", files[any_of(rng, files)]])


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
    name = any_of(rng, files)
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


def special(rng: random.Random, files: Files) -> None:
    """A file is a pipe, which nobody ever writes to, a socket or a folder."""
    files[any_of(rng, files)] = Special(rng.choice(["pipe", "pipe", "socket", "folder"]))


BREAKS: list[Break] = [
    *(truncate, extend, flip_bits, flip_header_bits, flip_value_bits, cut_or_double, header_length, break_config),
    *(break_sizes, add_to_config),
    *(break_manifest, break_index, break_generation_config, break_header, break_entry, swap_tensors, swap_files),
    *(swap_places, rewrite_values, add_to_layers, retie, remove_file, add_file, lead_away, link, special),
]
# What has the most ways to be wrong is broken oftener.
WEIGHTS = [
    3 if one in (break_config, break_sizes, break_manifest, break_entry, rewrite_values) else 1 for one in BREAKS
]


# Breaks by which no value changes, so that nothing but one of the saves may be loaded, whole.


@dataclass(frozen=True)
class Change:
    """Something that happens to the folder while it is loaded: before the ``step``-th opening or reading of a file.

    ``files``: what the folder then holds. Those that are other ones are replaced, or cut short in place.
    """

    step: int
    files: Files
    in_place: bool = False


def mix_saves(rng: random.Random, case: Case) -> None:
    """Some files are those of another save of the same model: shards of equal shapes, config, index, in any mixture."""
    assert case.start.other is not None
    others = case.start.other.files if rng.random() < 0.7 else case.start.overwriting[-1]
    names = sorted(case.files.keys() | others.keys())
    for name in rng.sample(names, rng.randrange(1, len(names))):
        case.files.pop(name, None)
        if name in others:
            case.files[name] = others[name]


def swap_shards(rng: random.Random, case: Case) -> None:
    """Shards of another save, each under the name of this one's."""
    assert case.start.other is not None
    others = case.start.other.files
    shards = [name for name in case.files if name.endswith(".safetensors")]
    for name in rng.sample(shards, rng.randrange(1, len(shards) + 1)):
        case.files[name] = others[name]


def killed_saver(rng: random.Random, case: Case) -> None:
    """What another save left that ended in the middle of replacing this one."""
    case.files.clear()
    case.files.update(rng.choice(case.start.overwriting))


def saved_meanwhile(rng: random.Random, case: Case) -> None:
    """Another process replaces the checkpoint while it is loaded, a part of it now and the rest a little later."""
    moments = sorted(
        rng.sample(range(len(case.start.overwriting)), min(len(case.start.overwriting), rng.choice([1, 2, 3])))
    )
    if rng.random() < 0.5:
        moments[-1] = len(case.start.overwriting) - 1
    steps = sorted(rng.randrange(40) for _ in moments)
    case.changes += [Change(step, case.start.overwriting[m]) for step, m in zip(steps, moments, strict=True)]


def cut_meanwhile(rng: random.Random, case: Case) -> None:
    """A file becomes shorter while it is read, or is gone, or another one."""
    name = any_of(rng, case.files)
    content = content_of(case.files, name)
    files = dict(case.files)
    what = rng.randrange(4)
    if what == 0:
        del files[name]
    elif what == 1:
        files[name] = Special("pipe")
    else:
        files[name] = content[: rng.choice([0, 8, len(content) // 2, len(content) - 1])]
    case.changes.append(Change(rng.randrange(40), files, in_place=what == 3))


WHOLE_OR_NOTHING: list[Callable[[random.Random, Case], None]] = [
    *(mix_saves, mix_saves, swap_shards, killed_saver, saved_meanwhile, saved_meanwhile, cut_meanwhile)
]


@dataclass
class Case:
    """``files`` to load, made from ``start`` by the breaks named in ``breaks``; ``changes`` come while it is loaded.

    ``is_whole``: whether nothing but one of the saves that there were may come of it, bit for bit.
    """

    start: Good
    files: Files
    breaks: list[str]
    changes: list[Change] = field(default_factory=list)
    is_whole: bool = False


def make_case(good: list[Good], seed: int, number: int) -> Case:
    """Case ``number`` of ``seed``."""
    rng = random.Random(f"{seed} {number}")
    start = rng.choice(good)
    files, names = dict(start.files), []
    if start.other is not None and rng.random() < 0.25:
        return _whole_or_nothing(rng, start)
    wanted = rng.choice([1, 1, 1, 2, 3])
    while len(names) < wanted:
        (one,) = rng.choices(start.breaks) if start.breaks else rng.choices(BREAKS, WEIGHTS)
        broken = dict(files)
        try:
            one(rng, broken)
        except Unfit:
            if names:
                break
            continue
        files = broken
        names.append(one.__name__)
    return Case(start, files, names)


def _whole_or_nothing(rng: random.Random, start: Good) -> Case:
    while True:
        case = Case(start, dict(start.files), [], is_whole=True)
        one = rng.choice(WHOLE_OR_NOTHING)
        try:
            one(rng, case)
            case.breaks.append(one.__name__)
            if rng.random() < 0.1:
                special(rng, case.files)
                case.breaks.append("special")
        except Unfit:
            continue
        return case
