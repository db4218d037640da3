"""What launches keep between calls: a buffer for each stream."""

import contextlib

import pytest
import torch

from qgemm.kernels.launch import memory


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_stream_buffers", {})
    monkeypatch.setattr(memory, "_on_stream", lambda device, stream: contextlib.nullcontext())
    monkeypatch.setattr(memory, "empty", lambda shape, strides, dtype: torch.full(shape, 7, dtype=dtype))


def test_a_stream_has_a_buffer_of_its_own() -> None:
    """Two streams run at a time, and so may streams of the same number on two devices."""
    streams = [(0, 0), (0, 1), (1, 0), (1, 1)]
    buffers = [memory.stream_buffer(*stream, 256) for stream in streams]
    assert len({buffer.data_ptr() for buffer in buffers}) == 4
    for stream, buffer in zip(streams, buffers, strict=True):
        assert memory.stream_buffer(*stream, 256) is buffer
        assert memory.stream_buffer(*stream, 16) is buffer
    assert not any(buffer[: memory.COUNTS_BYTES].any() for buffer in buffers)


def test_a_buffer_grows() -> None:
    small = memory.stream_buffer(0, 0, 256)
    large = memory.stream_buffer(0, 0, 257)
    assert (small.numel(), large.numel()) == (256, 257)
    assert not large.any()
    assert memory.stream_buffer(0, 0, 256) is large


def test_buffers_are_bounded() -> None:
    for stream in range(memory.MAX_STREAM_BUFFERS + 1):
        memory.stream_buffer(0, stream, 1)
    assert len(memory._stream_buffers) == 1
