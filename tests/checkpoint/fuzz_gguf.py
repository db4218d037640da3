"""GGUF files that are broken in one to three ways: a setting, a tensor, or a byte of the header is another."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_COUNTS = [0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 96, 1000, 65535, 2**31, 2**32 - 1]
_FLOATS = [0.0, -1.0, 0.5, 64.0, 1e-30, 1e38, float("nan"), float("inf")]
_TEXTS = ["", "x", "64", "yarn", "longrope", "linear", "llama", "../../x", "\u00fc" * 30]
# What files may state of any model.
_SETTINGS = [
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "attention.sliding_window", "block_count"),
    *("attention.key_length", "attention.value_length", "attention.head_count_kv", "attention.scale", "vocab_size"),
    *("attention.sliding_window_pattern", "expert_count", "expert_used_count", "expert_weights_scale", "logit_scale"),
    *("final_logit_softcapping", "attn_logit_softcapping", "attention.causal", "context_length", "ssm.inner_size"),
    *("attention.temperature_scale", "rope.scaling.yarn_log_multiplier", "residual_scale", "embedding_scale"),
    *("attention.shared_kv_layers", "attention.key_length_swa", "rope.dimension_count_swa", "feed_forward_length"),
    *("attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank", "attention.kv_lora_rank"),
    *("expert_group_count", "expert_group_used_count", "expert_gating_func", "leading_dense_block_count"),
    *("ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.conv_kernel", "full_attention_interval"),
    *("attention.recurrent_layers", "expert_shared_feed_forward_length", "rope.dimension_sections"),
    *("nextn_predict_layers", "expert_weights_norm", "expert_shared_count", "rope.scaling.yarn_beta_fast"),
]
_NAMES = [
    *("", "x" * 70, "rope_freqs.weight", "output.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_up_exps.weight"),
    *(
        "blk.0.attn_q.bias",
        "blk.0.attn_q.scale",
        "blk.0.ffn_up_exps.scale",
        "blk.-1.attn_q.weight",
        "blk.99.attn_q.weight",
        "blk.0.ffn_up.0.weight",
        "blk.0.attn_gate.weight",
        "blk.0.ssm_in.weight",
        "blk.1.attn_kv_b.weight",
        "blk.2.exp_probs_b.bias",
    ),
]


@dataclass
class Header:
    """A file's header: settings by name, each a type and bytes; tensors, each a name, sizes, a type and an offset."""

    settings: dict[str, tuple[int, bytes]]
    tensors: list[tuple[str, list[int], int, int]]

    def pack(self) -> bytes:
        """The bytes of the header."""
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.settings))]
        for name, (kind, value) in self.settings.items():
            parts += [_text(name), struct.pack("<I", kind), value]
        for name, sizes, kind, offset in self.tensors:
            parts += [_text(name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)]
        return b"".join(parts)


def parse(content: bytes) -> tuple[Header, bytes]:
    """The header of a good file, and the values behind it."""
    at = 4

    def take(layout: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{layout}", content, at)
        at += struct.calcsize(f"<{layout}")
        return found

    def take_text() -> str:
        (length,) = take("Q")
        return take(f"{length}s")[0].decode()

    def pass_over(kind: int) -> None:
        if kind == _TEXT:
            take_text()
        elif kind == _LIST:
            inside, count = take("IQ")
            for _ in range(count):
                pass_over(inside)
        else:
            take(f"{_SIZES[kind]}s")

    _, tensors, settings = take("IQQ")
    header = Header({}, [])
    for _ in range(settings):
        name, (kind,) = take_text(), take("I")
        begin = at
        pass_over(kind)
        header.settings[name] = kind, content[begin:at]
    for _ in range(tensors):
        name, (count,) = take_text(), take("I")
        *sizes, kind, offset = take(f"{count}QIQ")
        header.tensors.append((name, list(sizes), kind, offset))
    return header, content[_aligned(at) :]


def broken(content: bytes, architecture: str, rng: random.Random) -> bytes:
    """The good file ``content``, broken."""
    header, values = parse(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what, names = rng.random(), sorted(header.settings)
        if what < 0.4:
            name = rng.choice([rng.choice(names), f"{architecture}.{rng.choice(_SETTINGS)}"])
            header.settings[name] = _any_setting(rng, header.settings.get(name, (None,))[0])
        elif what < 0.5:
            header.settings.pop(rng.choice(names))
        else:
            _break_tensor(header, rng)
    packed = bytearray(header.pack())
    if rng.random() < 0.15:
        packed[rng.randrange(4, len(packed))] ^= rng.choice([1, 2, 16, 128, 255])
    return bytes(packed) + bytes(_aligned(len(packed)) - len(packed)) + values


def _break_tensor(header: Header, rng: random.Random) -> None:
    index = rng.randrange(len(header.tensors))
    name, sizes, kind, offset = header.tensors[index]
    what = rng.random()
    if what < 0.3:
        del header.tensors[index]
        return
    if what < 0.5:
        name = rng.choice([*_NAMES, name.replace("blk.0", "blk.1"), name.replace("weight", "bias"), f"{name}x"])
    elif what < 0.8 and sizes:
        sizes[rng.randrange(len(sizes))] = rng.choice([*_COUNTS, 2**40, 2**63])
    elif what < 0.9:
        kind = rng.choice([0, 1, 2, 6, 8, 10, 14, *range(16, 25), 29, 30, 39, 40, 41])
    else:
        offset = rng.choice([0, 32, 64, 1 << 40, 1 << 63])
    header.tensors[index] = name, sizes, kind, offset


def _any_setting(rng: random.Random, like: int | None) -> tuple[int, bytes]:
    """A type, often that which it had, and a value."""
    kind = like if like in (4, 6) and rng.random() < 0.5 else rng.choice([4, 4, 5, 6, 7, _TEXT, _LIST, 10, 12])
    if kind == _TEXT:
        return kind, _text(rng.choice(_TEXTS))
    if kind == _LIST:
        count = rng.choice([0, 1, 2, 97])
        return kind, struct.pack("<IQ", 4, count) + struct.pack("<I", rng.choice(_COUNTS)) * count
    if kind in (6, 12):
        return kind, struct.pack("<f" if kind == 6 else "<d", rng.choice(_FLOATS))
    if kind == 5:
        return kind, struct.pack("<i", rng.choice([-(2**31), -1, 0, 64]))
    return kind, rng.choice([*_COUNTS, 2**64 - 1]).to_bytes(8, "little")[: _SIZES[kind]]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(place: int) -> int:
    return -(-place // 32) * 32
