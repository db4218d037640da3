"""The weights of a checkpoint in float, however they are stored, some rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgemm.checkpoint.contents import PartReader
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.nn import QuantExperts, QuantLayer
from qgemm.nn.kinds import meta_linear
from qgemm.nn.quant_layer import frozen
from qgemm.numerics.formats import INT8
from qgemm.scheme import QuantScheme
from qgemm.streaming.float_tensors import FloatTensor
from qgemm.streaming.source import Source
from qgemm_cli.layers import StoredLayer


class Dequantized(FloatTensor):
    """An int8 or float8 weight times its scales: one for all, one per row, or one per block."""

    def __init__(self, source: Source, layer: StoredLayer, weight: StoredTensor, scale_name: str) -> None:
        """``weight``: ``[..., N, K]``; ``scale_name``: the tensor in ``source`` with its scales."""
        super().__init__(weight.shape, torch.float32, self._read)
        self._source = source
        self._name = layer.full_name("" if layer.kind == "experts" else "weight")
        self._scale_name = scale_name
        self._scale: Tensor | None = None

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads rows; also the scales, the first time."""
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
        if scale.ndim == len(self.shape) and scale.numel():  # per row, or per block of rows and columns
            for dim, (blocks, whole) in enumerate(zip(scale.shape, self.shape, strict=True)):
                if blocks not in (1, whole):
                    scale = scale.repeat_interleave(_block_size(whole, blocks), dim).narrow(dim, 0, whole)
            return scale
        raise CheckpointError(
            f"{stored.path}: {self._scale_name} has shape {list(scale.shape)}, which doesn't fit a weight of "
            f"{list(self.shape)}"
        )


class Restored(FloatTensor):
    """The weight of a layer whose scheme needs more than a scale: it is packed, rotated, or has columns in float."""

    def __init__(self, source: Source, stored: StoredLayer, scheme: QuantScheme) -> None:
        """``source``: contains the tensors of ``stored``."""
        N, K = stored.shape
        super().__init__((N, K), torch.float32, self._read)
        self._source, self._stored = source, stored
        self._layer = meta_linear(scheme, K, N)
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
        """Reads rows."""
        names = {leaf: self._stored.full_name(leaf) for leaf in self._layer.row_names}
        rows = {leaf: self._source.read_rows(name, start, stop) for leaf, name in names.items()}
        return self._layer.restore_rows(rows, torch.float32)


class RestoredExperts(FloatTensor):
    """A weight of all experts, ``[E, N, K]``, in a scheme whose linear layers need more than a scale."""

    def __init__(self, source: Source, stored: StoredLayer, scheme: QuantScheme) -> None:
        """``source``: contains the tensors of ``stored``."""
        E, N, K = stored.shape
        super().__init__((E, N, K), torch.float32, self._read)
        self._source, self._stored = source, stored
        self._layer = meta_linear(scheme, K, N)
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
        """Reads the experts one after the other."""
        made = torch.empty(stop - start, *self.shape[1:])
        for expert in range(start, stop):
            own = {leaf: self._source.read_rows(name, expert, expert + 1)[0] for leaf, name in self._names.items()}
            for leaf in self._layer.whole_names:
                setattr(self._layer, leaf, frozen(own[leaf]))
            made[expert - start] = self._layer.restore_rows(own, torch.float32)
        return made


class Converted(FloatTensor):
    """The weight of a layer in another library's own form, as qgemm loads it."""

    def __init__(self, parts: PartReader, layer: str) -> None:
        """``layer``: the name of one in the contents that ``parts`` reads."""
        contents = parts.contents
        N, K = contents.shapes.get(layer) or contents.headers[f"{layer}.weight"].shape
        super().__init__((N, K), torch.float32, self._read)
        self._parts, self._name = parts, layer
        scheme = contents.manifest.layers[layer]
        self._layer = meta_linear(scheme, K, N)
        self._is_read = False

    def _read(self, start: int, stop: int) -> Tensor:
        """Makes the whole weight the first time."""
        if not self._is_read:
            names = {f"{self._name}.{leaf}": leaf for leaf, _ in self._layer.named_parameters(recurse=False)}
            for name, value in _read_made(self._parts, names, self._layer).items():
                setattr(self._layer, names[name], frozen(value))
            self._is_read = True
        layer = self._layer
        rows = layer.restore_rows({leaf: layer.stored(leaf)[start:stop] for leaf in layer.row_names}, torch.float32)
        if stop == self.shape[0]:  # weights are read in order, and each one is as large as a layer, so it is freed
            self._layer, self._is_read = self._layer.to("meta"), False
        return rows


class Made(FloatTensor):
    """A tensor of the model that another library's files have in another form, or under another name."""

    def __init__(self, parts: PartReader, name: str) -> None:
        """``name``: in the model that the contents of ``parts`` were fitted to."""
        super().__init__(parts.contents.headers[name].shape or (1,), torch.float32, self._read)
        self._parts, self._name = parts, name
        self._value: Tensor | None = None

    def _read(self, start: int, stop: int) -> Tensor:
        """Makes the whole tensor the first time."""
        value = _read_made(self._parts, {self._name: ""})[self._name] if self._value is None else self._value
        self._value = None if stop == self.row_count else value
        return value.reshape(self.shape)[start:stop].float()


class ConvertedExperts(FloatTensor):
    """A weight of all experts, ``[E, N, K]``, that another library stored one by one, or in a form of its own."""

    def __init__(self, parts: PartReader, name: str, experts: QuantExperts, leaf: str) -> None:
        """``experts``: the module on meta, called ``name`` in the model that what ``parts`` reads was fitted to."""
        like = experts.linear_of(leaf)
        super().__init__((experts.num_experts, like.out_features, like.in_features), torch.float32, self._read)
        self.stored = StoredLayer(f"{name}.{leaf}", "experts", experts.scheme.of(leaf).weight.dtype, self.shape, {})
        self._parts, self._experts, self._leaf = parts, experts, leaf
        held = [own for own, _ in experts.named_parameters(recurse=False) if own.startswith(leaf)]
        self._names = {f"{name}.{own}": own for own in held if own != f"{leaf}_bias"}
        self._is_read = False

    def _read(self, start: int, stop: int) -> Tensor:
        """Reads all experts, in stored form, the first time."""
        if not self._is_read:
            for name, value in _read_made(self._parts, self._names, self._experts).items():
                setattr(self._experts, self._names[name], frozen(value))
            self._is_read = True
        linears = (self._experts.linear_of(self._leaf, expert) for expert in range(start, stop))
        made = torch.stack([linear.dequantize(torch.float32).weight.detach() for linear in linears])
        if stop == self.row_count:
            for own in self._names.values():
                setattr(self._experts, own, frozen(self._experts.stored(own).to("meta")))
            self._is_read = False
        return made


def _read_made(parts: PartReader, names: dict[str, str], layer: QuantLayer | None = None) -> dict[str, Tensor]:
    """The model's tensors ``names``, put together from what conversions make; checked if they are a ``layer``'s.

    ``names``: with the layer's name for each.
    """
    found: dict[str, Tensor] = {}
    for target, value in parts.read(names):
        if target.name in names:
            if layer is not None:
                parts.contents.check_value(target, layer, names[target.name], value)
            target.put_into(found, value)
    return found


def _block_size(whole: int, blocks: int) -> int:
    """The block size if ``blocks`` blocks cover ``whole`` values, the last one perhaps shorter: 128, if that fits."""
    return next(
        (size for size in (128, 64, 256, 32, 16) if math.ceil(whole / size) == blocks), math.ceil(whole / blocks)
    )
