"""What ``compile_kernels.py`` compiles of norms of queries and keys, rotary embedding and the writing to a cache."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels.rotary import launcher
from qgemm.kernels.rotary.call import KeyValueStore, RotaryCall

INT8, BF16, FLOAT = torch.int8, torch.bfloat16, torch.float32


def rotary_cases() -> Iterator[Case]:
    """With and without norms, to caches in float and int8, of one token and of many, with pairs apart or adjacent."""

    def store(
        tokens: int, heads: tuple[int, int], D: int, norm: tuple[str, str] | None, stored: torch.dtype, pairs: bool
    ) -> None:
        B, S = (1, 1) if tokens == 1 else (8, tokens // 8)
        kind, over = norm or ("rms", "")
        widths = [{"head": D, "all": count * D}.get(over) for count in heads]
        weights = [None if width is None else torch.empty(width, dtype=BF16, device=META) for width in widths]
        turns = [torch.empty(B, S, D // 2, dtype=FLOAT if over == "all" else BF16, device=META) for _ in range(2)]
        k, v = (torch.empty(B, heads[1], 4096, D, dtype=stored, device=META) for _ in range(2))
        scales = [torch.empty(B, heads[1], 4096, device=META) if stored == INT8 else None for _ in range(2)]
        qkv = torch.empty(B, S, (heads[0] + 2 * heads[1]) * D, dtype=BF16, device=META)
        length = torch.empty(1, dtype=torch.int32, device=META)
        values = "normalized" if D == 512 else "plain"
        call = RotaryCall(qkv, *turns, *weights, kind, 1e-6, *heads, pairs, values)
        launcher.rotate_and_store(call, KeyValueStore(k, v, *scales, length))

    for tokens, heads, D, norm, stored, pairs in (
        (1, (32, 8), 128, None, INT8, False),
        (16_384, (32, 8), 128, None, BF16, False),
        (16_384, (32, 8), 128, ("rms", "head"), INT8, False),
        (16_384, (40, 40), 128, ("rms_once", "all"), BF16, False),
        (16_384, (40, 40), 128, ("rms_once", "all"), BF16, True),
        (1, (8, 4), 256, ("rms_plus_one", "head"), BF16, False),
        (64, (12, 4), 80, ("layer", "head"), INT8, True),
        (1, (16, 2), 512, ("rms_once", "head"), INT8, False),
    ):
        words = "pairs " if pairs else ""
        label = f"rotary {words}{tokens} x {heads[0]} x {D} {norm} {str(stored).removeprefix('torch.')}"
        yield Case(label, lambda t=tokens, h=heads, d=D, n=norm, s=stored, p=pairs: store(t, h, d, n, s, p))

    def rotate(heads: int, layout: str, *factors: float) -> None:
        qkv = torch.empty(1, 1, 3 * heads * 80, dtype=BF16, device=META)
        turns = [torch.empty(1, 1, 16, dtype=BF16, device=META) for _ in range(2)]
        positions = torch.empty(1, 1, dtype=torch.int64, device=META) if factors else None
        given = (qkv, *turns, None, None, "rms", 1e-6, heads, heads, False, "plain", layout)
        launcher.rotate(RotaryCall(*given, *factors, positions=positions))

    yield Case("rotary by head", lambda: rotate(32, "by head"))
    yield Case("rotary factors", lambda: rotate(32, "in turn", 0.3, 16384.0, 0.1))

    def store_key_value() -> None:
        key = torch.empty(8, 1, 8, 128, dtype=BF16, device=META).transpose(1, 2)
        k, v = (torch.empty(8, 8, 4096, 128, dtype=INT8, device=META) for _ in range(2))
        scales = [torch.empty(8, 8, 4096, device=META) for _ in range(2)]
        length = torch.empty(1, dtype=torch.int32, device=META)
        launcher.store_key_value(key, key, KeyValueStore(k, v, *scales, length))

    yield Case("rotary store_key_value", store_key_value)

    def angles() -> None:
        positions, frequencies = torch.empty(1, 1, dtype=torch.int64, device=META), torch.empty(64, device=META)
        launcher.rotary_angles(positions, frequencies, 1.0, "twice", BF16)

    yield Case("rotary angles", angles)

    def angles_of_axes() -> None:
        positions, frequencies = torch.empty(3, 1, 1, dtype=torch.int64, device=META), torch.empty(64, device=META)
        axes = torch.empty(64, dtype=torch.int32, device=META)
        launcher.rotary_angles(positions, frequencies, 1.0, "twice", BF16, axes)

    yield Case("rotary axes", angles_of_axes)
