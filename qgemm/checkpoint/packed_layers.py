"""Layers of 4- or 8-bit whole numbers in int32 words, as GPTQ, AWQ and AutoRound store them: ``W = (q - z) * s``.

In a layer ``[N, K]`` with groups of columns, ``<layer>.scales`` is ``[groups, N]`` in float16 or bfloat16,
``<layer>.qzeros`` is int32 ``[groups, words of N]``, and ``<layer>.qweight`` is int32, in one of two layouts:

- ``"gptq"``: ``[words of K, N]``, packed along K. Version 1 stores zero points minus 1, version 2 stores them
  unchanged. There may be a ``<layer>.g_idx``, int32 ``[K]``: the group of each column, in any order (``desc_act``).
- ``"awq"``: ``[K, words of N]``, packed along N, with the eight columns of a word in the order 0 2 4 6 1 3 5 7, in
  ``qzeros`` too.

The files are trusted more than the config: bits and groups follow from shapes, a layer is ordered if its ``g_idx`` is,
and zero points in the middle of the range, which all of a symmetric layer have, tell the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qgemm.checkpoint.contents import Contents, Made
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.safetensors_file import StoredTensor, read_values, unfit
from qgemm.checkpoint.tensors import BIAS_DTYPES, split_name
from qgemm.checkpoint.words import select_columns, unpack_words
from qgemm.nn.kinds import meta_linear
from qgemm.numerics.integers import cdiv
from qgemm.numerics.packing import pack_codes
from qgemm.scheme import QuantScheme, resolve_scheme

WORD_BITS = 32
READ_BITS = (4, 8)
_CPU = torch.device("cpu")
# Values that are unpacked at a time.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Said:
    """What a config says about its layers; ``layouts``: the possible ones. ``group_size``: -1 for a whole row.

    ``is_version_1``: None if only the zero points of symmetric layers may tell. ``orders``: whether columns were put
    into an order of their own.
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool
    layouts: tuple[str, ...]
    is_version_1: bool | None = False
    orders: bool = False


@dataclass(frozen=True)
class PackedLayer:
    """A layer in the files. ``group_size``: None for one scale per row. ``adds_one``: to stored zero points."""

    name: str
    layout: str
    bits: int
    N: int
    K: int
    group_size: int | None
    symmetric: bool = False
    ordered: bool = False
    adds_one: bool = False

    @property
    def middle(self) -> int:
        """The zero point of a symmetric layer."""
        return 1 << (self.bits - 1)

    @property
    def groups(self) -> int:
        """The number of scales in a row."""
        return 1 if self.group_size is None else cdiv(self.K, self.group_size)

    def name_of(self, leaf: str) -> str:
        """The full name of one of its tensors."""
        return f"{self.name}.{leaf}"


def integers_scheme(
    bits: int, group_size: int | None, symmetric: bool, ordered: bool = False, float_zeros: bool = False
) -> QuantScheme:
    """The scheme for weights in whole numbers of 4 or 8 bits, with activations in float; ``group_size`` None is a row.

    Raises ``ValueError`` for groups that no scheme has.
    """
    parts = ["int4"] if bits == 4 else ["int8-weight"]
    if group_size is None:
        parts += ["channel"] if bits == 4 else []
    elif (bits, group_size) != (4, 128):
        parts.append(str(group_size))
    parts += [] if symmetric else ["float-zeros" if float_zeros else "asymmetric"]
    parts += ["ordered"] if ordered else []
    return resolve_scheme("-".join(parts))


def scheme_in_file(
    path: Path,
    layer: str,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    ordered: bool = False,
    float_zeros: bool = False,
) -> QuantScheme:
    """``integers_scheme`` of a layer in the file, or by the config, at ``path``; raises ``CheckpointError``."""
    try:
        return integers_scheme(bits, group_size, symmetric, ordered, float_zeros)
    except ValueError:
        raise unsupported(
            f"{path}: {layer} has groups of {group_size} columns; qgemm computes groups of any multiple of 16"
        ) from None


def read_packed(said: Said, stored: dict[str, StoredTensor], config_path: object) -> Contents:
    """Reads the contents of files with packed layers; reads zero points and ``g_idx`` to determine what layers are.

    Raises ``CheckpointError``, naming file and tensor, for a layer in another layout or with other bits.
    """
    layers = [_from_headers(split_name(name)[0], said, stored) for name in stored if split_name(name)[1] == "qweight"]
    contents = Contents.of_files(stored)
    for layer in _with_facts(layers, said, stored, config_path):
        path = stored[layer.name_of("scales")].path
        scheme = scheme_in_file(path, layer.name, layer.bits, layer.group_size, layer.symmetric, layer.ordered)
        contents.manifest.layers[layer.name] = scheme
        contents.shapes[layer.name] = layer.N, layer.K
        _note(contents, layer, scheme)
    return contents


def layout_in(stored: Mapping[str, StoredTensor]) -> str:
    """``"awq"`` if a layer's words are packed along N, as the other layout's weights never are; else ``"gptq"``."""
    for name, weight in stored.items():
        layer, leaf = split_name(name)
        scales = stored.get(f"{layer}.scales")
        if leaf == "qweight" and scales is not None and weight.shape[1:] != scales.shape[1:]:
            return "awq"
    return "gptq"


def _from_headers(name: str, said: Said, stored: dict[str, StoredTensor]) -> PackedLayer:
    weight, scales = stored[f"{name}.qweight"], stored.get(f"{name}.scales")
    zeros, g_idx = stored.get(f"{name}.qzeros"), stored.get(f"{name}.g_idx")
    if weight.dtype != torch.int32 or len(weight.shape) != 2:
        raise unfit(weight.path, f"{name}.qweight", weight, "int32, two-dimensional")
    if scales is None or scales.dtype not in BIAS_DTYPES or len(scales.shape) != 2 or 0 in scales.shape:
        raise unfit(weight.path, f"{name}.scales", scales, "of a float dtype, [groups, N]")
    groups, N = scales.shape
    if zeros is None or zeros.dtype != torch.int32 or len(zeros.shape) != 2 or zeros.shape[0] != groups:
        raise unfit(weight.path, f"{name}.qzeros", zeros, f"int32, [{groups}, words]")
    # Most libraries' configs may list layers with other bits by name.
    candidates = (said.bits, *READ_BITS, 2, 3, 5, 6, 7)
    bits = next((bits for bits in candidates if zeros.shape[1] == cdiv(N * bits, WORD_BITS)), None)
    if bits is None:
        raise unfit(zeros.path, f"{name}.qzeros", zeros, f"words of N = {N} fields of {said.bits} bits")
    if bits not in READ_BITS or ("awq" in said.layouts and bits != 4):
        allowed = "4 bits" if "awq" in said.layouts else "4 and 8 bits"
        raise unsupported(f"{weight.path}: layer {name} has {bits} bits; qgemm reads {said.method} of {allowed}")
    rows, columns = weight.shape
    if "gptq" in said.layouts and columns == N:
        layout, K = "gptq", rows * (WORD_BITS // bits)
    elif "awq" in said.layouts and columns == cdiv(N * bits, WORD_BITS) and N % 8 == 0:
        layout, K = "awq", rows
    else:
        wanted = [f"[words of K, {N}]"] * ("gptq" in said.layouts) + [f"[K, {N} / 8]"] * ("awq" in said.layouts)
        raise unfit(weight.path, f"{name}.qweight", weight, " or ".join(wanted))
    if g_idx is not None and (g_idx.dtype not in (torch.int32, torch.int64) or g_idx.shape != (K,)):
        raise unfit(g_idx.path, f"{name}.g_idx", g_idx, f"int32, [{K}]")
    size = _group_size(said.group_size, K, groups)
    if size == 0:
        raise unfit(scales.path, f"{name}.scales", scales, f"scales of groups of {said.group_size} of {K} columns")
    return PackedLayer(name, layout, bits, N, K, size)


def _group_size(said: int, K: int, groups: int) -> int | None:
    """The config's group size if the number of scales fits; else that of equal groups. None: a row; 0: neither."""
    if said > 0 and cdiv(K, said) == groups:
        return said
    if groups == 1:
        return None
    return K // groups if K % groups == 0 else 0


def _with_facts(
    layers: list[PackedLayer], said: Said, stored: dict[str, StoredTensor], config_path: object
) -> Iterable[PackedLayer]:
    """The layers, completed by what the values of their zero points and ``g_idx`` show."""
    by_tensor = {layer.name_of(leaf): layer for layer in layers for leaf in ("qzeros", "g_idx")}
    wanted = {name: stored[name] for name in by_tensor if name in stored}
    constants: dict[str, int | None] = {}
    ordered = set()
    for name, value in read_values(wanted, _CPU):
        layer = by_tensor[name]
        if name.endswith("g_idx"):
            # In files of GPTQ-for-LLaMa it is all 0 if columns are in order.
            if (said.orders or bool(value.any())) and _is_ordered(layer, value, stored[name]):
                ordered.add(layer.name)
        else:
            low, high = unpack_words(value, layer.bits, layer.N).aminmax()
            constants[layer.name] = int(low) if low == high else None
    is_version_1 = said.is_version_1
    if said.symmetric:
        found = ((layer.middle, constants[layer.name]) for layer in layers)
        less_one = {middle - constant for middle, constant in found if constant is not None}
        versions = less_one & {0, 1}
        if is_version_1 is None and len(versions) != 1:
            raise CheckpointError(
                f"{config_path} has no quantization_config of {said.method}, and no symmetric layers tell whether zero "
                f"points of {said.method}'s are stored less 1 (checkpoint_format 'gptq') or as they are ('gptq_v2'): "
                "put the quantization_config there that their library wrote"
            )
        if versions:
            is_version_1 = 1 in versions
    for layer in layers:
        adds_one = bool(is_version_1) and layer.layout == "gptq"
        # Zero points of a symmetric layer; if the config says symmetric, those of either version.
        middles = {layer.middle - adds_one}
        if said.symmetric and layer.layout == "gptq":
            middles |= {layer.middle, layer.middle - 1}
        symmetric = constants[layer.name] in middles
        yield replace(layer, symmetric=symmetric, ordered=layer.name in ordered, adds_one=adds_one)


def _is_ordered(layer: PackedLayer, g_idx: Tensor, tensor: StoredTensor) -> bool:
    """Whether groups aren't of neighboring columns. Raises ``CheckpointError`` unless each group has its full size."""
    size = layer.group_size or max(layer.K, 1)
    plain = torch.arange(layer.K, device="cpu") // size
    if torch.equal(g_idx.long(), plain):
        return False
    if not torch.equal(g_idx.long().sort().values, plain):
        raise CheckpointError(
            f"{tensor.path}: {layer.name}.g_idx doesn't put {size} of {layer.K} columns into each of the "
            f"{layer.groups} groups"
        )
    return True


def _unshuffled(layer: PackedLayer, rows: Tensor) -> Tensor:
    """Reorders ``rows`` of the weight from the order of words' fields to their own."""
    if layer.layout == "gptq":
        return rows
    # Rows 0, 2, 4, 6 are the first four fields of a word, and 1, 3, 5, 7 the others.
    return rows.view(rows.shape[0] // 8, 2, 4, rows.shape[1]).transpose(1, 2).flatten(0, 2)


def _note(contents: Contents, layer: PackedLayer, scheme: QuantScheme) -> None:
    sources = {"weight": "qweight", "weight_scale": "scales"}
    sources |= {} if layer.symmetric else {"weight_zero_point": "qzeros"}
    sources |= {"input_order": "g_idx"} if layer.ordered else {}
    like = meta_linear(scheme, layer.K, layer.N)
    made: dict[str, Made] = {}
    for leaf, source in sources.items():
        parameter = like.stored(leaf)
        dtype = contents.stored[layer.name_of(source)].dtype if leaf == "weight_scale" else parameter.dtype
        made[layer.name_of(leaf)] = (layer.name_of(source), tuple(parameter.shape), dtype)
    contents.convert_together([layer.name_of(leaf) for leaf in sources.values()], made, partial(_decode, layer))
    for leaf in ("qzeros", "g_idx"):
        if layer.name_of(leaf) in contents.headers:
            contents.pass_over(layer.name_of(leaf))  # already read


def _decode(layer: PackedLayer, qweight: Tensor, scales: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The layer's parameters, in the order in which ``_note`` lists them."""
    made, rest = [scales.t().contiguous()], list(others)
    order = None
    if not layer.symmetric:
        words = rest.pop(0)
        if layer.adds_one:
            # Modulo 2^32 instead of per field: a zero point of 0 was stored as -1, and borrowed from its neighbor.
            words = words + (0x11111111 if layer.bits == 4 else 0x01010101)
        zeros = _signed(unpack_words(words, layer.bits, layer.N), layer.bits)
        made.append(_unshuffled(layer, zeros.t().contiguous()))
    if layer.ordered:
        order = rest.pop(0).argsort(stable=True)
        made.append(order.int())
    # A few rows at a time, which stay in the CPU's cache from one step to the next.
    step = cdiv(_PIECE, max(layer.K, 1) * 8) * 8
    pieces = []
    for start in range(0, layer.N, step):
        codes = _codes(layer, qweight, order, start, min(start + step, layer.N))
        stored = pack_codes(codes) if layer.bits == 4 else codes.view(torch.int8)
        pieces.append(_unshuffled(layer, stored.contiguous()))
    return torch.cat(pieces), *made


def _codes(layer: PackedLayer, qweight: Tensor, order: Tensor | None, start: int, stop: int) -> Tensor:
    """Some rows ``[n, K]`` of the weight as uint8, in two's complement of 4 or 8 bits.

    ``order``: of columns. ``start``: a multiple of 8; rows of a word are in the order of its fields.
    """
    # q + 8 and q + 128 differ from these only in the highest bit.
    highest = -0x77777778 if layer.bits == 4 else -0x7F7F7F80
    if layer.layout == "gptq":
        codes = unpack_words(qweight[:, start:stop].t() ^ highest, layer.bits, layer.K)
    else:
        codes = unpack_words(qweight[:, start // 8 : cdiv(stop, 8)] ^ highest, 4, stop - start).t()
    return codes if order is None else select_columns(codes, order)


def _signed(fields: Tensor, bits: int) -> Tensor:
    """int8 ``q`` from fields ``q + 8`` or ``q + 128``."""
    return (fields ^ 128).view(torch.int8) if bits == 8 else fields.view(torch.int8) - 8
