"""``DriverLaunch``: a compiled kernel run by CUDA's driver itself, ``cuLaunchKernelEx`` through ctypes.

At each call, Triton's launcher asks the driver about every pointer and parses every argument. Nearly all of that is the
same each time. So the memory that the driver reads is laid out once here, and a call only writes what changes: the
stream, and the pointers or the tensor maps of what they point to. PyTorch hands out the same addresses again and again,
so those bytes are kept, too.

A kernel compiled by Triton has those arguments that are left at run time, in order, then two pointers to scratch
memory, which are null if it needs none. A tensor descriptor becomes a tensor map (``tensor_map.py``), followed by the
shape, 32 bits per number, and the strides, 64 bits per number.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qgemm.kernels.launch.context import in_context, libcuda
from qgemm.kernels.launch.tensor_map import EncodedMaps

MAX_PACKED_ARGUMENTS = 512  # sets of arguments that a launch keeps
MAX_SHARED_MEMORY_BYTES = 227 * 1024  # as of any device today; more would need an attribute that isn't set here
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # of CUlaunchAttributeID
_INTEGERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``, of a kind whose value is up to three ints."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("_pad", ctypes.c_int),
        ("value", ctypes.c_int * 3),
        ("_rest", ctypes.c_char * 52),
    )


class Program(NamedTuple):
    """What all launches of a kernel have in common."""

    function: int
    """The ``CUfunction``."""
    grid: int
    threads: int
    shared_memory: int
    pdl: bool
    arguments: tuple[bytes | EncodedMaps | None, ...]
    """For each run-time argument: its bytes, None for a pointer, or the maps by pointer for a tensor map."""
    cluster: int = 1
    """How many consecutive programs start together, on neighbouring SMs."""

    def config(self) -> tuple[_Config, ctypes.Array[_Attribute]]:
        """The arguments of ``cuLaunchKernelEx`` except the stream, and the attributes that they point to."""
        attributes = []
        if self.pdl:
            attributes.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,)))
        if self.cluster > 1:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, 0, (self.cluster, 1, 1)))
        array = (_Attribute * len(attributes))(*attributes)
        config = _Config(
            (self.grid, 1, 1), (self.threads, 1, 1), self.shared_memory,
            attributes=ctypes.addressof(array), num_attributes=len(attributes),
        )  # fmt: skip
        return config, array


class DriverLaunch:
    """A launch of ``program``, to be called with a stream and pointers."""

    def __init__(self, program: Program, launch: Callable[..., int]) -> None:
        """``launch``: ``cuLaunchKernelEx``."""
        changing = [argument for argument in program.arguments if not isinstance(argument, bytes)]
        self._maps = [(index, maps) for index, maps in enumerate(changing) if maps is not None]
        self._pack = struct.Struct(_format(changing)).pack
        self._packed: dict[tuple[int, ...], bytes] = {}
        self._block = _Block(program, launch)

    def __call__(self, stream: int, pointers: tuple[int, ...]) -> None:
        """``pointers``: those of the kernel's arguments, in order."""
        packed = self._packed.get(pointers) or self._pack_new(pointers)
        config, changing, launch = self._block.parts
        config.stream = stream
        changing[:] = packed
        error = in_context(launch)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx failed: {_describe(error)}")

    def _pack_new(self, pointers: tuple[int, ...]) -> bytes:
        values: list[int | bytes] = list(pointers)
        for index, maps in self._maps:
            values[index] = maps(pointers[index])
        packed = self._pack(*values)
        if len(self._packed) >= MAX_PACKED_ARGUMENTS:
            self._packed.clear()
        self._packed[pointers] = packed
        return packed


class _Block(threading.local):
    """The memory that the driver reads; each thread that launches has its own.

    The driver has copied it when ``cuLaunchKernelEx`` returns. Until then, no other launch may write to it.
    """

    def __init__(self, program: Program, launch: Callable[..., int]) -> None:
        # What changes comes first, so that one assignment writes all of it.
        changing = [argument for argument in program.arguments if not isinstance(argument, bytes)]
        fixed = [argument.ljust(8, b"\0") for argument in program.arguments if isinstance(argument, bytes)]
        size = struct.calcsize(_format(changing))
        offset, fixed_offset = 0, size
        null = bytes(8)
        memory = ctypes.create_string_buffer(bytes(fixed_offset) + b"".join(fixed) + null)
        start = ctypes.addressof(memory)
        addresses = []
        for argument in program.arguments:
            if isinstance(argument, bytes):
                addresses.append(start + fixed_offset)
                fixed_offset += 8
            else:
                addresses.append(start + offset)
                offset += struct.calcsize(_format([argument]))
        scratch = start + fixed_offset  # where the null is
        parameters = (ctypes.c_void_p * (len(addresses) + 2))(*addresses, scratch, scratch)
        config, attributes = program.config()
        self._kept_alive = parameters, attributes
        # Pointers are made beforehand: ctypes would make them from numbers at each call.
        addresses_of = [ctypes.c_void_p(ctypes.addressof(part)) for part in (config, parameters)]
        prepared = functools.partial(launch, addresses_of[0], ctypes.c_void_p(program.function), addresses_of[1], None)
        self.parts = config, memoryview(memory).cast("B")[:size], prepared


def _format(changing: Sequence[EncodedMaps | None]) -> str:
    """The format for ``struct`` of a call's values. A tensor map needs no alignment here: the driver copies it."""
    return "<" + "".join("Q" if maps is None else "128s" for maps in changing)


def _takes(function: int, arguments: Sequence[bytes | EncodedMaps | None]) -> bool:
    """Whether the driver agrees that the kernel has arguments of these sizes, and two pointers."""
    sizes = [len(each) if isinstance(each, bytes) else struct.calcsize(_format([each])) for each in arguments]
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found = []
    for index in range(len(sizes) + 3):
        error = libcuda().cuFuncGetParamInfo(
            ctypes.c_void_p(function), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
        )
        if error:
            break
        found.append(size.value)
    return found == [*sizes, 8, 8]


def _run_at_once(program: Program) -> bool:
    """Whether the device has room for all clusters of ``program`` at the same time."""
    clusters = ctypes.c_int()
    config, _attributes = program.config()
    ask, function = libcuda().cuOccupancyMaxActiveClusters, ctypes.c_void_p(program.function)
    error = in_context(lambda: ask(ctypes.byref(clusters), function, ctypes.byref(config)))
    return not error and program.grid <= clusters.value * program.cluster


def driver_launch(compiled: Any, grid: int, arguments: Sequence[Any], cluster: int = 1) -> DriverLaunch | None:
    """A ``DriverLaunch`` of what Triton has compiled for ``arguments`` and loaded; None if only Triton can launch it.

    That is so on devices other than NVIDIA's, for kernels that need scratch memory, clusters or a cooperative grid, and
    for versions of Triton whose metadata isn't known here. ``cluster``: see ``Program``. It has no effect unless all
    clusters run at once: otherwise the last clusters would run after the others.
    """
    try:
        metadata = compiled.metadata
        if (
            metadata.target.backend != "cuda"
            or metadata.num_ctas != 1
            or metadata.launch_cooperative_grid
            or metadata.global_scratch_size
            or metadata.profile_scratch_size
            or metadata.shared > MAX_SHARED_MEMORY_BYTES
            or getattr(metadata, "instrumentation_mode", "")
        ):
            return None
        program = Program(
            compiled.function, grid, metadata.num_warps * metadata.target.warp_size, metadata.shared,
            bool(metadata.launch_pdl),
            _run_time_arguments(compiled.src.signature, arguments, getattr(metadata, "tensordesc_meta", None)),
        )  # fmt: skip
        if cluster > 1 and grid % cluster == 0 and _run_at_once(clustered := program._replace(cluster=cluster)):
            program = clustered
        takes = _takes(program.function, program.arguments)
    except (AttributeError, KeyError, ValueError, struct.error):
        return None
    return DriverLaunch(program, libcuda().cuLaunchKernelEx) if takes else None


def _run_time_arguments(
    signature: Mapping[str, str], arguments: Sequence[Any], maps_metadata: Sequence[Mapping[str, Any]] | None
) -> tuple[bytes | EncodedMaps | None, ...]:
    """``Program.arguments``. Triton's signature has "constexpr" for compiled-in values, which include ones and None."""
    out: list[bytes | EncodedMaps | None] = []
    metadata_left = list(maps_metadata or ())
    for kind, value in zip(signature.values(), arguments, strict=True):
        if kind.startswith("*"):
            out.append(None)
        elif kind.startswith("tensordesc<"):
            if not metadata_left:
                raise ValueError("where there are no tensor maps Triton takes a descriptor apart")
            out.append(EncodedMaps(value, metadata_left.pop(0), libcuda()))
            out.extend(struct.pack("<i", size) for size in value.shape)
            out.extend(struct.pack("<q", stride) for stride in value.strides)
        elif kind != "constexpr":
            out.append(struct.pack("<" + _INTEGERS[kind], value))
    return tuple(out)


def _describe(error: int) -> str:
    text = ctypes.c_char_p()
    libcuda().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown error").decode()
