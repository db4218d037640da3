"""The weights of a checkpoint in float, whatever they are stored as, some rows at a time.

Tensors of a float checkpoint, and of another library's, go by the names that the model gives them, or by those in the
files, whichever the other checkpoint shares; those of qgemm's own have the names of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from qgemm.checkpoint.contents import Contents, check_unheld, read_converted
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.load import find_matching
from qgemm.checkpoint.recognition import FP8_DTYPES
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name
from qgemm.nn import QuantExperts, QuantLinear, linear_class
from qgemm.nn.block_scaled import BlockScaledLinear
from qgemm.nn.float_experts import UnknownExperts, describe_experts
from qgemm.nn.quant_layer import frozen
from qgemm.numerics.formats import INT8
from qgemm.scheme import QuantScheme
from qgemm.streaming.float_tensors import FloatTensor, ordered_experts, stored_float
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.source import Source
from qgemm_cli.layers import StoredLayer, find_layers
from qgemm_cli.reading import FLOAT, Checkpoint

MOST_PREFIXES = 32


class Dequantized(FloatTensor):
    """An int8 or float8 weight, multiplied by its scales: one for all, one a row, or one a block."""

    def __init__(self, source: Source, layer: StoredLayer, weight: StoredTensor, scale_name: str) -> None:
        """``weight``: ``[..., N, K]``; ``scale_name``: the tensor in ``source`` that scales it."""
        super().__init__(weight.shape, torch.float32, self._read)
        self._source = source
        self._name = layer.full_name("" if layer.kind == "experts" else "weight")
        self._scale_name = scale_name
        self._scale: Tensor | None = None

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads them; the scales the first time."""
        if self._scale is None:
            self._scale = self._read_scale()
        scale = self._scale if self._scale.shape[0] == 1 else self._scale[start:stop]
        return self._source.read_rows(self._name, start, stop).float() * scale

    def _read_scale(self) -> Tensor:
        stored = self._source.tensors[self._scale_name]
        scale = self._source.read_rows(self._scale_name, 0, stored.shape[0] if stored.shape else 1).float()
        if self._scale_name.endswith(".SCB"):
            scale = scale / INT8.steps
        if scale.numel() == 1:
            return scale.reshape([1] * len(self.shape))
        if scale.shape == self.shape[:-1]:
            return scale[..., None]
        if scale.ndim == len(self.shape) and scale.numel():  # for each row, or each block of rows and columns
            for dim, (blocks, whole) in enumerate(zip(scale.shape, self.shape, strict=True)):
                if blocks not in (1, whole):
                    scale = scale.repeat_interleave(_block_size(whole, blocks), dim).narrow(dim, 0, whole)
            return scale
        raise CheckpointError(
            f"{stored.path}: {self._scale_name} has shape {list(scale.shape)}, which doesn't fit a weight of "
            f"{list(self.shape)}"
        )


class Restored(FloatTensor):
    """The weight of a layer whose scheme has more to it than a scale: packed, rotated, or with columns in float."""

    def __init__(self, source: Source, stored: StoredLayer, scheme: QuantScheme) -> None:
        """``source``: holds the tensors of ``stored``."""
        N, K = stored.shape
        super().__init__((N, K), torch.float32, self._read)
        self._source, self._stored = source, stored
        self._layer = linear_class(scheme)(K, N, False, "meta", scheme=scheme)
        self._check_shapes(scheme)
        for leaf in set(self._layer.index_names) - set(self._layer.row_names):
            if (tensor := stored.tensors.get(leaf)) is not None and tensor.shape:
                values = source.read_rows(stored.full_name(leaf), 0, tensor.shape[0])
                if problem := self._layer.problem_with(leaf, values):
                    raise CheckpointError(f"{tensor.path}: {stored.full_name(leaf)} {problem}")
                setattr(self._layer, leaf, frozen(values))

    def _check_shapes(self, scheme: QuantScheme) -> None:
        for leaf, wanted in self._layer.named_parameters(recurse=False):
            tensor = self._stored.tensors.get(leaf)
            found = None if tensor is None else tensor.shape
            if leaf in self._layer.fixed_names and found != wanted.shape:
                raise CheckpointError(
                    f"{self._stored.full_name(leaf)} has shape {None if found is None else list(found)}; a layer of "
                    f"{list(self.shape)} in {scheme.name} has {list(wanted.shape)}"
                )

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads them."""
        names = {leaf: self._stored.full_name(leaf) for leaf in self._layer.row_names}
        rows = {leaf: self._source.read_rows(name, start, stop) for leaf, name in names.items()}
        return self._layer.restore_rows(rows, torch.float32)


class RestoredExperts(FloatTensor):
    """A weight of all experts, ``[E, N, K]``, in a scheme whose linear layers have more to them than a scale."""

    def __init__(self, source: Source, stored: StoredLayer, scheme: QuantScheme) -> None:
        """``source``: holds the tensors of ``stored``."""
        E, N, K = stored.shape
        super().__init__((E, N, K), torch.float32, self._read)
        self._source, self._stored = source, stored
        self._layer = linear_class(scheme)(K, N, False, "meta", scheme=scheme)
        self._names: dict[str, str] = {}
        for leaf, wanted in self._layer.named_parameters(recurse=False):
            end = leaf.removeprefix("weight")
            tensor = stored.tensors.get(end)
            if tensor is None or tensor.shape != (E, *wanted.shape):
                raise CheckpointError(
                    f"{stored.full_name(end)} has shape {None if tensor is None else list(tensor.shape)}; experts of "
                    f"{list(self.shape)} in {scheme.name} have {[E, *wanted.shape]}"
                )
            self._names[leaf] = stored.full_name(end)

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads one expert after the other."""
        made = torch.empty(stop - start, *self.shape[1:])
        for expert in range(start, stop):
            own = {leaf: self._source.read_rows(name, expert, expert + 1)[0] for leaf, name in self._names.items()}
            for leaf in self._layer.whole_names:
                setattr(self._layer, leaf, frozen(own[leaf]))
            made[expert - start] = self._layer.restore_rows(own, torch.float32)
        return made


class Converted(FloatTensor):
    """The weight of a layer that another library wrote in a form of its own, as qgemm loads it."""

    def __init__(self, contents: Contents, layer: str) -> None:
        """``layer``: the name of one that ``contents`` has."""
        N, K = contents.shapes.get(layer) or contents.headers[f"{layer}.weight"].shape
        super().__init__((N, K), torch.float32, self._read)
        self._contents, self._name = contents, layer
        scheme = contents.manifest.layers[layer]
        self._layer = linear_class(scheme)(K, N, False, "meta", scheme=scheme)
        self._is_read = False

    def _read(self, start: int, stop: int) -> Tensor:
        """Makes the whole of it the first time."""
        if not self._is_read:
            names = {f"{self._name}.{leaf}": leaf for leaf, _ in self._layer.named_parameters(recurse=False)}
            for target, value in read_converted(self._contents, torch.device("cpu"), only=names):
                if (leaf := names.get(target.name)) is not None:
                    self._contents.check_value(target, self._layer, leaf, value)
                    setattr(self._layer, leaf, frozen(value))
            self._is_read = True
        layer = self._layer
        rows = layer.restore_rows({leaf: layer.stored(leaf)[start:stop] for leaf in layer.row_names}, torch.float32)
        if stop == self.shape[0]:  # it is gone through in order, and each weight is as large as a layer
            self._layer, self._is_read = self._layer.to("meta"), False
        return rows


class Made(FloatTensor):
    """A tensor of the model that another library's files hold otherwise, or under another name."""

    def __init__(self, contents: Contents, name: str) -> None:
        """``name``: in the model that ``contents`` was fitted to."""
        super().__init__(contents.headers[name].shape or (1,), torch.float32, self._read)
        self._contents, self._name = contents, name
        self._value: Tensor | None = None

    def _read(self, start: int, stop: int) -> Tensor:
        """Makes the whole of it the first time."""
        value = _read_made(self._contents, {self._name})[self._name] if self._value is None else self._value
        self._value = None if stop == self.row_count else value
        return value.reshape(self.shape)[start:stop].float()


class ConvertedExperts(FloatTensor):
    """A weight of all experts, ``[E, N, K]``, that another library wrote one by one, or in a form of its own."""

    def __init__(self, contents: Contents, name: str, experts: QuantExperts, leaf: str) -> None:
        """``experts``: the module on meta, called ``name`` in the model that ``contents`` was fitted to."""
        like = experts.linear_of(leaf)
        super().__init__((experts.num_experts, like.out_features, like.in_features), torch.float32, self._read)
        self.stored = StoredLayer(f"{name}.{leaf}", "experts", experts.scheme.weight.dtype, self.shape, {})
        self._contents, self._experts, self._leaf = contents, experts, leaf
        held = [own for own, _ in experts.named_parameters(recurse=False) if own.startswith(leaf)]
        self._names = {f"{name}.{own}": own for own in held if own != f"{leaf}_bias"}
        self._is_read = False

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads all experts, as they are stored, the first time."""
        if not self._is_read:
            for name, value in _read_made(self._contents, self._names, self._experts.problem_with).items():
                setattr(self._experts, self._names[name], frozen(value))
            self._is_read = True
        linears = (self._experts.linear_of(self._leaf, expert) for expert in range(start, stop))
        made = torch.stack([linear.dequantize(torch.float32).weight.detach() for linear in linears])
        if stop == self.row_count:
            for own in self._names.values():
                setattr(self._experts, own, frozen(self._experts.stored(own).to("meta")))
            self._is_read = False
        return made


def _read_made(
    contents: Contents,
    names: Container[str],
    find_problem: Callable[[str, Tensor], str] = lambda leaf, value: "",
) -> dict[str, Tensor]:
    """The tensors of the model called ``names``, put together of what conversions make."""
    whole: dict[str, Tensor] = {}
    for target, value in read_converted(contents, torch.device("cpu"), only=names):
        if target.name not in names:
            continue
        if problem := find_problem(target.name.rpartition(".")[2], value):
            raise CheckpointError(f"{contents.stored[target.source].path}: {target.source} {problem}")
        if target.place is None:
            whole[target.name] = value
            continue
        if target.name not in whole:
            whole[target.name] = torch.empty(target.whole, dtype=value.dtype)
        whole[target.name][target.place] = value
    return whole


def _block_size(whole: int, blocks: int) -> int:
    """Of how many values ``blocks`` blocks are, the last of which may be shorter: 128, if that fits."""
    return next(
        (size for size in (128, 64, 256, 32, 16) if math.ceil(whole / size) == blocks), math.ceil(whole / blocks)
    )


@dataclass(frozen=True)
class Pairing:
    """The tensors of two checkpoints by name, and for each of ``b`` that is in ``a`` too, its name there."""

    a: dict[str, FloatTensor]
    b: dict[str, FloatTensor]
    names_in_a: dict[str, str]

    @property
    def values(self) -> int:
        """How many numbers the tensors in both have."""
        return sum(math.prod(self.b[name].shape) for name in self.names_in_a)


def pair_weights(a: Checkpoint, b: Checkpoint, source_a: Source, source_b: Source) -> Pairing:
    """Under which names the two have the most in common: those of the model, or those in the files.

    Integers that aren't quantized are left out. Raises ``CheckpointError`` if the two have no tensor in common, and for
    weights in a format that isn't dequantized here.
    """
    pairings = [
        _pair(weights_a, weights_b, {} if b.contents is None else b.contents.manifest.tied)
        for weights_a, weights_b in product(_find_weights(a, source_a), _find_weights(b, source_b))
    ]
    best = max(pairings, key=lambda pairing: (pairing.values, len(pairing.names_in_a)))
    if not best.names_in_a:
        raise CheckpointError(f"{a.path} and {b.path} have no tensor in common: they belong to different models")
    return best


def _pair(a: dict[str, FloatTensor], b: dict[str, FloatTensor], tied_in_b: dict[str, str]) -> Pairing:
    names_in_a = match_names(b, a)
    aliases = {alias: name for alias, name in tied_in_b.items() if alias in a and alias not in b and name in b}
    return Pairing(
        a, b | {alias: b[name] for alias, name in aliases.items()}, names_in_a | {alias: alias for alias in aliases}
    )


def _find_weights(checkpoint: Checkpoint, source: Source) -> list[dict[str, FloatTensor]]:
    """The tensors of ``checkpoint`` by the model's names, if they are known, and by those in the files."""
    contents = checkpoint.contents
    if contents is not None and contents.is_foreign and checkpoint.folder is not None:
        by_model = _of_model(checkpoint.folder, contents)
        try:
            return [by_model, _in_files(checkpoint, source)]
        except CheckpointError:
            if not by_model:
                raise
            return [by_model]
    in_files = _in_files(checkpoint, source)
    if checkpoint.format == FLOAT and checkpoint.config:
        try:
            loading = plan_loading(source, drop=["*"])
        except (CheckpointError, ImportError):  # not of transformers
            return [in_files]
        tensors = {name: tensor for name, tensor in loading.tensors.items() if tensor.dtype.is_floating_point}
        return [_order_experts(tensors, loading.model), in_files]
    return [in_files]


def _of_model(folder: Path, contents: Contents) -> dict[str, FloatTensor]:
    """The tensors of another library's checkpoint, as ``load_quantized`` takes them; none of a model it can't build.

    Experts have the names and order of ``QuantExperts``. Raises ``CheckpointError`` for values that it refuses though
    no tensor is made of them; ``contents``: those by the names in the files.
    """
    try:
        found = find_matching(folder)
    except (CheckpointError, ImportError):
        check_unheld(contents)
        return {}
    check_unheld(found.contents)
    contents, tensors = found.contents, dict[str, FloatTensor]()
    for name, layer in found.layers.items():
        if isinstance(layer, QuantExperts):
            for leaf in layer.weight_names:
                tensors[f"{name}.{leaf}"] = ConvertedExperts(contents, name, layer, leaf)
        else:
            tensors[f"{name}.weight"] = Converted(contents, name)
    for name, header in contents.headers.items():
        layer_name, leaf = split_name(name)
        is_part = layer_name in found.layers and not leaf.endswith(("bias", "input_scale"))
        if not is_part and header.dtype in FLOAT_DTYPES:
            tensors[name] = Made(contents, name)
    return tensors


def _in_files(checkpoint: Checkpoint, source: Source) -> dict[str, FloatTensor]:
    in_files: dict[str, FloatTensor] = {}
    contents = checkpoint.contents
    schemes = {} if contents is None else contents.manifest.layers
    for layer in find_layers(checkpoint):
        if contents is not None and contents.is_foreign and layer.name in schemes:
            in_files.update(_of_foreign(layer, source, contents))
        else:
            is_own = contents is not None and not contents.is_foreign
            in_files.update(_of_layer(layer, source, schemes.get(layer.module if is_own else layer.name)))
    return in_files


def _order_experts(tensors: dict[str, FloatTensor], model: nn.Module) -> dict[str, FloatTensor]:
    """``tensors`` of the float ``model``, those of experts under the names and in the order of ``QuantExperts``."""
    ordered = dict(tensors)
    for module_name, module in model.named_modules():
        if all(parameter.ndim != 3 for parameter in module.parameters(recurse=False)):
            continue
        try:
            layout = describe_experts(module)
        except UnknownExperts:  # then they aren't quantized either
            continue
        own = {name: ordered.pop(f"{module_name}.{theirs}", None) for name, theirs in layout.parameters.items()}
        for name, tensor in own.items():
            if tensor is not None:
                ordered[f"{module_name}.{name}"] = ordered_experts(tensor, name, layout)
    return ordered


def _of_layer(layer: StoredLayer, source: Source, scheme: QuantScheme | None) -> Iterable[tuple[str, FloatTensor]]:
    main = "" if layer.kind == "experts" else "weight"
    weight = layer.tensors.get(main)
    kind = QuantLinear if scheme is None or layer.kind != "linear" else linear_class(scheme)
    others: tuple[str, ...] = ()
    if scheme is not None and layer.kind == "experts" and scheme.is_weight_only:
        yield layer.full_name(main), RestoredExperts(source, layer, scheme)
        others = tuple(leaf for leaf in layer.tensors if leaf != "_bias")
    elif scheme is not None and kind not in (QuantLinear, BlockScaledLinear):
        yield layer.full_name(main), Restored(source, layer, scheme)
        # What is part of the weight, and a bias that isn't the float layer's.
        others = kind.row_names + kind.index_names
    elif layer.is_quantized:
        leaf = next(
            (leaf for leaf in ("weight_scale", "weight_scale_inv", "SCB", "_scale") if leaf in layer.tensors), ""
        )
        if weight is None or weight.dtype not in (torch.int8, *FP8_DTYPES) or not leaf:
            raise CheckpointError(
                f"{layer.name} is stored as {layer.storage}: qgemm compares float, int8 and fp8 weights"
            )
        yield layer.full_name(main), Dequantized(source, layer, weight, layer.full_name(leaf))
    for leaf, tensor in layer.tensors.items():
        is_scale = layer.is_quantized and layer.full_name(leaf) in layer.scales
        if leaf not in others and tensor.dtype in FLOAT_DTYPES and (leaf == "input_scale" or not is_scale):
            yield layer.full_name(leaf), _as_stored(source, layer.full_name(leaf))


def _of_foreign(layer: StoredLayer, source: Source, contents: Contents) -> Iterable[tuple[str, FloatTensor]]:
    yield layer.full_name("weight"), Converted(contents, layer.name)
    for leaf, tensor in layer.tensors.items():
        name = layer.full_name(leaf)
        is_float = tensor.dtype in FLOAT_DTYPES
        if is_float and (leaf == "input_scale" or (name not in contents.conversions and leaf != "weight_scale")):
            yield name, _as_stored(source, name)


def _as_stored(source: Source, name: str) -> FloatTensor:
    found = stored_float(source, name, torch.float32)
    found.shape = found.shape or (1,)  # one number has either shape, by the format
    return found


def match_names(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """For each of ``names`` that is also in ``others``, the name there.

    One of the two may have a prefix on all of them, as a model inside of another has (``model.layers...``).
    """
    names, known = list(names), set(others)
    best: dict[str, str] = {}
    for prefix in ["", *_prefixes(names, known)]:
        found = {name: prefix + name for name in names if prefix + name in known}
        if len(found) > len(best):
            best = found
    for prefix in _prefixes(list(known), set(names)):
        found = {name: name.removeprefix(prefix) for name in names if name.removeprefix(prefix) in known}
        if len(found) > len(best):
            best = found
    return best


def _prefixes(names: list[str], others: set[str]) -> list[str]:
    """What ``others`` might have before ``names``: the shortest of what they have before the longest of these.

    No model is a part of so many; each one is tried on every name.
    """
    longest = max(names, key=len, default="")
    found = {other.removesuffix(longest) for other in others if other.endswith(f".{longest}")}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))[:MOST_PREFIXES]
