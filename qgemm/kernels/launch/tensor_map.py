"""Tensor maps: what TMA, Hopper's copy engine, needs to know about a tensor, as arguments of kernels.

A map is 128 bytes that only the driver can write (``cuTensorMapEncodeTiled``) and that a kernel gets by value. It holds
an address, a shape, strides, the shape of the blocks that are copied, and how these are swizzled in shared memory.
Triton encodes a map at every launch. A ``Launch`` knows everything except the address beforehand (``TensorMap``), so it
keeps the maps that it has made, by address (``EncodedMaps``). Weights, and buffers that PyTorch hands out again and
again, are encoded only once.

For Triton's own launch, the same argument is a ``TensorDescriptor``, from ``triton.tools`` or, with a layout, from
Gluon. The compiler decides how blocks are swizzled and cut, and says so in its metadata.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from qgemm.kernels.launch.context import in_context

MAX_MAPS = 1024  # kept per argument
_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_NO_INTERLEAVE, _FILL_WITH_ZEROS = 0, 0
_L2_PROMOTION_128B = 2  # as in Triton
# Triton numbers element types like PTX; CUtensorMapDataType differs in these.
_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
# Up to CUDA 13.1, the driver sets a bit that maps of fewer bytes must not have; CUTLASS and Triton 3.7 clear it, too.
_SMALL = 128 * 1024
_LAST_DRIVER_WITH_SMALL_FLAW = 13010


class TensorMap(NamedTuple):
    """A kernel's argument that is a map of a tensor of ``shape``, read in ``block``s and padded with zeros.

    The tensor's address must be a multiple of 16 bytes, and so must its strides except the last, which is 1.
    ``layout``: the ``NVMMASharedLayout`` of a Gluon kernel; None for plain Triton.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None

    def descriptor(self, tensor: Tensor) -> Any:
        """The argument for Triton's own launch. Only the address and dtype of ``tensor`` matter."""
        shape, strides, block = list(self.shape), list(self.strides), list(self.block)
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(tensor, shape, strides, block)
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor(tensor, shape, strides, block, self.layout)


class EncodedMaps:
    """The maps of one argument of a compiled kernel, by address, each encoded when it is first needed."""

    def __init__(self, descriptor: Any, metadata: Mapping[str, Any], libcuda: Any) -> None:
        """``descriptor``: the argument that was passed to Triton. ``metadata``: what Triton made of it.

        ``libcuda``: CUDA's driver through ctypes. Raises ``KeyError`` or ``ValueError`` if ``metadata`` has something
        that isn't known here.
        """
        if metadata["fp4_padded"] or metadata.get("is_im2col"):
            raise ValueError(f"a tensor map of this kind isn't known here: {metadata}")
        self._libcuda = libcuda
        # CUDA counts dimensions from the innermost, and strides in bytes, without the innermost stride, which is 1.
        shape, strides = tuple(descriptor.shape[::-1]), tuple(descriptor.strides[-2::-1])
        rank, itemsize, element = len(shape), metadata["elem_size"], metadata["elem_type"]
        last = sum((size - 1) * stride for size, stride in zip(shape, (1, *strides), strict=True))
        self._small = itemsize * (last + 1) < _SMALL
        self._arguments = (
            _ELEMENT_TYPES.get(element, element),
            rank,
            (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * rank)(*[stride * itemsize for stride in strides]),
            (ctypes.c_uint32 * rank)(*metadata["block_size"][::-1]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            metadata["swizzle"],
        )
        self._maps: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        """The map of the tensor at ``address``."""
        encoded = self._maps.get(address)
        if encoded is None:
            encoded = self._encode(address)
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[address] = encoded
        return encoded

    def _encode(self, address: int) -> bytes:
        element_type, rank, shape, strides, block, steps, swizzle = self._arguments
        memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        offset = -ctypes.addressof(memory) % _ALIGNMENT
        encode = functools.partial(
            self._libcuda.cuTensorMapEncodeTiled,
            ctypes.c_void_p(ctypes.addressof(memory) + offset), element_type, rank, ctypes.c_void_p(address),
            shape, strides, block, steps, _NO_INTERLEAVE, swizzle, _L2_PROMOTION_128B, _FILL_WITH_ZEROS,
        )  # fmt: skip
        error = in_context(encode)
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with {error} for {self._arguments} at {address:#x}")
        if self._small and _driver_version(self._libcuda) <= _LAST_DRIVER_WITH_SMALL_FLAW:
            word = ctypes.c_uint64.from_buffer(memory, offset + 8)
            word.value &= ~(1 << 21)
        return memory.raw[offset : offset + _BYTES]


@functools.cache
def _driver_version(libcuda: Any) -> int:
    version = ctypes.c_int()
    libcuda.cuDriverGetVersion(ctypes.byref(version))
    return version.value
