"""What ``compile_kernels.py`` compiles of attention."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels.attention import launcher
from qgemm.kernels.attention.call import AttentionCall, PagedCall, StoreCall

ATTEND, PAGED = ("_attend_kernel",), ("_attend_paged_kernel",)
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


def attention_cases() -> Iterator[Case]:
    """Float16 and bfloat16 are the same code, and keys and values that aren't int8 are no more code than float32's."""
    for dtype, D, int8 in (
        (BF16, 128, False),
        (BF16, 128, True),
        (HALF, 80, True),
        (HALF, 256, False),
        (HALF, 256, True),
        (HALF, 512, False),
        (HALF, 512, True),
        (FLOAT, 512, False),
        (FLOAT, 128, False),
    ):
        label = f"attention {D} {str(dtype).removeprefix('torch.')}{' int8' if int8 else ''}"
        yield Case(label, lambda t=dtype, i=int8, d=D: attend(1, 32, 8, d, t, i), only=ATTEND)
    # Every option at once, and more rows than a program takes.
    for int8 in (False, True):
        label = f"attention options{' int8' if int8 else ''}"
        yield Case(label, lambda i=int8: attend(16, 64, 8, 128, BF16, i, window=1024, softcap=30.0), only=ATTEND)
    # Few keys, in larger blocks, and in one part.
    yield Case("attention few", lambda: attend(1, 32, 8, 128, BF16, True, B=1))
    yield Case("attention one block", lambda: attend(16, 64, 8, 256, BF16, False, B=1, L=32), only=ATTEND)
    # Decoding, prompts, every option at once, and the largest heads.
    yield Case("attention pages", lambda: attend_pages(1, 16, 128, BF16))
    yield Case("attention tables", lambda: attend_pages(1, 64, 128, BF16, page=256), only=PAGED)
    yield Case("attention tables int8", lambda: attend_pages(1, 64, 128, BF16, page=256, int8=True), only=PAGED)
    yield Case("attention pages store", lambda: store_pages(64, 128, BF16))
    yield Case("attention pages store int8", lambda: store_pages(64, 128, BF16, int8=True))
    yield Case("attention pages prompt", lambda: attend_pages(2048, 1, 128, BF16, paged=False), only=PAGED)
    yield Case("attention pages prompt int8", lambda: attend_pages(512, 64, 128, BF16, int8=True), only=PAGED)
    yield Case("attention pages options", lambda: attend_pages(64, 64, 80, HALF, window=1024, softcap=30.0), only=PAGED)
    yield Case("attention pages 256", lambda: attend_pages(64, 64, 256, HALF), only=PAGED)
    yield Case("attention pages 512", lambda: attend_pages(64, 64, 512, BF16), only=PAGED)
    yield Case("attention pages float32", lambda: attend_pages(64, 64, 128, FLOAT), only=PAGED)


def attend(
    S: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype, int8: bool,
    window: int = 0, softcap: float = 0.0, B: int = 16, L: int = 4096,
) -> None:  # fmt: skip
    q = torch.empty(B, S, Hq, D, dtype=dtype, device=META)
    k, v = torch.empty(2, B, Hkv, L, D, dtype=torch.int8 if int8 else dtype, device=META)
    scale = torch.empty(B, Hkv, L, device=META) if int8 else None
    length = torch.empty(1, dtype=torch.int32, device=META)
    start = torch.empty(B, dtype=torch.int32, device=META) if window else None
    sinks = torch.empty(Hq, device=META) if window else None
    call = AttentionCall(q, k, v, scale, scale, length, start, sinks, D**-0.5, softcap, window, L)
    launcher.decode_attention(call)


def attend_pages(
    queries: int, B: int, D: int, dtype: torch.dtype,
    paged: bool = True, page: int = 0, window: int = 0, softcap: float = 0.0, int8: bool = False,
) -> None:  # fmt: skip
    q = torch.empty(B * queries, 32, D, dtype=dtype, device=META)
    k, v = torch.empty(2, *([512, page] if page else [8192]), 8, D, dtype=torch.int8 if int8 else dtype, device=META)
    scale = torch.empty(k.shape[:-1], device=META) if int8 else None
    starts = torch.empty(B + 1, dtype=torch.int32, device=META)
    pages = torch.empty(B * 4096, dtype=torch.int64, device=META) if paged else None
    if page:
        pages = torch.empty(B, 32, dtype=torch.int32, device=META)
    sinks = torch.empty(32, device=META) if window else None
    call = PagedCall(q, k, v, scale, scale, starts, starts, pages, sinks, D**-0.5, softcap, window, queries, 4096)
    launcher.paged_attention(call)


def store_pages(B: int, D: int, dtype: torch.dtype, int8: bool = False) -> None:
    key, value = torch.empty(2, B, 8, D, dtype=dtype, device=META)
    k, v = torch.empty(2, 512, 256, 8, D, dtype=torch.int8 if int8 else dtype, device=META)
    scale = torch.empty(k.shape[:-1], device=META) if int8 else None
    starts = torch.empty(B + 1, dtype=torch.int32, device=META)
    tables = torch.empty(B, 32, dtype=torch.int32, device=META)
    launcher.store_in_pages(StoreCall(key, value, k, v, scale, scale, starts, tables))
