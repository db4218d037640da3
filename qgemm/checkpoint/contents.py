"""``Contents``: a checkpoint of any format in qgemm's terms: its layers, and names, shapes and dtypes.

A format's reader makes it from the config and the headers of the files, before any value is read. The reader notes how
the tensors that the model holds in another form are converted: one tensor by itself (``convert``), several together
(``convert_together``), one that is only checked (``look_at``), or one that isn't needed (``pass_over``). Renaming
tensors and putting experts together then change where the results go, but not how they are made. ``read_converted``
makes them, on any device; a caller that wants only some of them must also call ``check_unheld``. ``PartReader`` makes
them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError, raised
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import OpenFiles, StoredTensor, read_values
from qgemm.nn import QuantLayer

Made = tuple[str, tuple[int, ...], torch.dtype | None]
"""A tensor that is made for the model: the source that errors about its values name, its shape, its dtype."""


@dataclass(frozen=True)
class Target:
    """A tensor of the model that a conversion makes.

    ``name``: its name in the model. ``source``: the tensor in the files that errors about its values name. ``place``:
    its place in a tensor of shape ``whole``, which several targets fill; None if it is the whole tensor.
    """

    name: str
    source: str
    place: tuple[int | slice, ...] | None = None
    whole: tuple[int, ...] = ()

    def put_into(self, values: dict[str, Tensor], value: Tensor) -> None:
        """Adds ``value`` to ``values``, which has tensors of the model by name."""
        if self.place is None:
            values[self.name] = value
            return
        if self.name not in values:
            values[self.name] = torch.empty(self.whole, dtype=value.dtype, device=value.device)
        values[self.name][self.place] = value


@dataclass(eq=False)
class Conversion:
    """Tensors of the files, and what replaces them in the model.

    ``make`` gets the values of ``sources`` and returns one value for each of ``targets``, in their order. It raises
    ``ValueError`` for invalid values; the error then names the first source. A target that the model doesn't have is
    None. ``checks``: nothing is made, but values are checked.
    """

    sources: tuple[str, ...]
    targets: list[Target | None]
    make: Callable[..., Sequence[Tensor]]
    checks: bool = False


@dataclass
class Contents:
    """A checkpoint in the form in which the model will hold it.

    - ``manifest``: its quantized layers.
    - ``stored``: the tensors of its files, by their names there.
    - ``conversions``: how tensors that the model holds in another form are made. Others go into the model unchanged.
    - ``headers``: the tensors as the model holds them: names, shapes, dtypes.
    - ``shapes``: ``[N, K]`` of quantized layers whose parameters don't show it, because packed ones are padded.
    - ``grouped``: layers whose ``shapes`` are ``[groups, group size]``, because only the model tells those of layers.
    - ``report``: the content of ``qgemm.report``, unchecked, or None. ``lacks``: the name of a missing file without
      which the model still loads.
    - ``is_foreign``: whether it is another library's, whose config doesn't list quantized layers and tied tensors.
    - ``interleaves_experts``: whether rows of fused experts were gate 0, up 0, gate 1, ... in the files.
    - ``restored``: layers that are quantized in the files, but in float in the model.
    - ``notes``: what the checkpoint asks for but qgemm doesn't do, although it loads; the user is told.
    """

    manifest: Manifest
    stored: dict[str, StoredTensor]
    headers: dict[str, StoredTensor]
    conversions: dict[str, Conversion] = field(default_factory=dict)
    is_foreign: bool = False
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)
    report: dict[str, Any] | None = None
    lacks: str | None = None
    interleaves_experts: bool = False
    restored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # For each tensor of the model that isn't just read: its conversion, and which of the conversion's targets it is.
    _made: dict[str, tuple[Conversion, int]] = field(default_factory=dict)

    @classmethod
    def of_files(cls, stored: dict[str, StoredTensor]) -> Contents:
        """Another library's files as they are, before their layers are known."""
        return cls(Manifest({}, {}), stored, dict(stored), is_foreign=True)

    def convert(
        self,
        name: str,
        name_in_file: str,
        shape: tuple[int, ...],
        convert: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        """Notes that the tensor ``name_in_file`` becomes the tensor ``name`` of ``shape`` and ``dtype``.

        Raises ``CheckpointError`` if the files hold a tensor ``name`` as well.
        """
        made = {name: (name_in_file, shape, dtype)}
        self.convert_together((name_in_file,), made, lambda value: (convert(value),))

    def convert_together(
        self,
        sources: Sequence[str],
        made: Mapping[str, Made],
        convert: Callable[..., Sequence[Tensor]],
    ) -> None:
        """Notes that tensors of the files become others together, as soon as all of them have been read.

        ``sources``: their names in the files; none may be part of another conversion. ``convert`` gets their values in
        this order, on any device, and returns those of ``made``, which has each new tensor by its name in the model.
        Raises ``CheckpointError`` if the files already contain a tensor with such a name, or others that become it.
        """
        for name, (source, _, _) in made.items():
            others = self._made[name][0].sources if name in self._made else (name,)
            other = next((each for each in others if each not in sources and each in self.stored), None)
            if other is not None:
                own = next((each for each in (source, *sources) if each not in others), source)
                raise CheckpointError(
                    f"{self.stored[other].path} holds both {own} and {other}; only one of them can be the model's"
                )
        for source in sources:
            self.headers.pop(source)
        conversion = Conversion(tuple(sources), [Target(name, made[name][0]) for name in made], convert)
        self.conversions.update(dict.fromkeys(sources, conversion))
        for index, (name, (source, shape, dtype)) in enumerate(made.items()):
            self.headers[name] = StoredTensor(self.stored[source].path, shape, dtype)
            self._made[name] = conversion, index

    def convert_further(
        self,
        made: Mapping[str, Made],
        of: Sequence[str],
        convert: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    ) -> None:
        """Notes that the model's tensors ``of`` become others as soon as all of them have been made.

        ``convert`` gets them by name and returns those of ``made``, as in ``convert_together``; the source that an
        error names is one of ``of``. They must be everything that is made from their sources.
        """
        parts = [self._made[name][0] if name in self._made else self.conversion_of(name) for name in of]
        parts = list(dict.fromkeys(parts))
        names = [[None if target is None else target.name for target in part.targets] for part in parts]
        sources = list(dict.fromkeys(source for part in parts for source in part.sources))
        blamed = {target.name: target.source for part in parts for target in part.targets if target is not None}

        def make(*values: Tensor) -> Sequence[Tensor]:
            given = dict(zip(sources, values, strict=True))
            found: dict[str, Tensor] = {}
            for part, own in zip(parts, names, strict=True):
                results = part.make(*(given[source] for source in part.sources))
                found |= {name: value for name, value in zip(own, results, strict=True) if name is not None}
            return convert(found)

        for name in of:
            del self.headers[name]
            self._made.pop(name, None)
        targets: list[Target | None] = [Target(name, blamed[old]) for name, (old, _, _) in made.items()]
        conversion = Conversion(tuple(sources), targets, make)
        self.conversions.update(dict.fromkeys(sources, conversion))
        for index, (name, (old, shape, dtype)) in enumerate(made.items()):
            self.headers[name] = StoredTensor(self.stored[blamed[old]].path, shape, dtype)
            self._made[name] = conversion, index

    def rename(self, names: dict[str, str]) -> None:
        """Renames the tensors of the model; raises ``CheckpointError`` if two would get the same name.

        ``names``: the new name of every tensor in ``headers``.
        """
        made, self._made = self._made, {}
        headers: dict[str, StoredTensor] = {}
        for old, new in names.items():
            if new in headers:
                raise CheckpointError(f"{headers[new].path} holds {old} and another tensor that is also {new}")
            headers[new] = self.headers[old]
            if old in made:
                self._made[new] = made[old]
            elif old != new:
                self._made[new] = self._take_as_it_is(old), 0
            if new in self._made:
                self._redirect(new, name=new)
        self.headers = headers

    def merge(
        self,
        name: str,
        part: str,
        shape: tuple[int, ...],
        whole: tuple[int, ...],
        place: tuple[int | slice, ...],
    ) -> None:
        """Notes that the model's tensor ``part`` is a part of one called ``name``; gives its place, and their shapes.

        Raises ``CheckpointError`` unless there is such a part with that shape and the dtype of the others, and if the
        files hold a tensor ``name`` as well.
        """
        tensor = self.headers.pop(part, None)
        if tensor is None:
            folder = next(iter(self.stored.values())).path.parent
            raise CheckpointError(f"{folder} lacks {part}, from which {name} is made: get all files again")
        if tensor.shape != shape:
            raise CheckpointError(f"{tensor.path}: {part} has shape {list(tensor.shape)}; the model's is {list(shape)}")
        known = self.headers.setdefault(name, StoredTensor(tensor.path, whole, tensor.dtype))
        if known is self.stored.get(name):
            raise CheckpointError(f"{known.path} holds both {part} and {name}; only one of them can be the model's")
        if known.dtype != tensor.dtype:
            raise CheckpointError(f"{tensor.path}: {part} is {tensor.dtype}, and {name} {known.dtype}")
        if part not in self._made:
            self._made[part] = self._take_as_it_is(part), 0
        self._redirect(part, name=name, place=place, whole=whole)
        del self._made[part]  # no longer a tensor of the model

    def _take_as_it_is(self, name_in_file: str) -> Conversion:
        conversion = self.conversions[name_in_file] = self.conversion_of(name_in_file)
        return conversion

    def _redirect(self, name: str, /, **changes: Any) -> None:
        conversion, index = self._made[name]
        target = conversion.targets[index]
        assert target is not None
        conversion.targets[index] = replace(target, **changes)

    def conversion_of(self, name_in_file: str) -> Conversion:
        """The conversion of a tensor in the files."""
        known = self.conversions.get(name_in_file)
        return known or Conversion((name_in_file,), [Target(name_in_file, name_in_file)], lambda value: (value,))

    def path_of(self, layer: str) -> Path:
        """A file that holds a tensor of ``layer``."""
        return next(tensor.path for name, tensor in self.stored.items() if name.startswith(f"{layer}."))

    def note(self, text: str) -> None:
        """Adds ``text`` to ``notes``, once."""
        if text not in self.notes:
            self.notes.append(text)

    def look_at(self, name_in_file: str, check: Callable[[Tensor], object]) -> None:
        """Notes that the model doesn't hold ``name_in_file``; ``check`` raises ``ValueError`` for a wrong value."""

        def look(value: Tensor) -> Sequence[Tensor]:
            check(value)
            return ()

        self.pass_over(name_in_file)
        self.conversions[name_in_file] = Conversion((name_in_file,), [], look, checks=True)

    def pass_over(self, name_in_file: str) -> None:
        """Notes that the model doesn't hold ``name_in_file``, whatever its values are."""
        self.convert_together((name_in_file,), {}, lambda value: ())

    def must_be_zero(self, name_in_file: str, problem: str) -> None:
        """As ``look_at``, for a tensor in which anything but 0 is a ``problem``.

        A tensor that others are made from stays a source of them, and is checked when they are made.
        """
        known = self.conversions.get(name_in_file)
        if known is None or not any(known.targets):
            self.look_at(name_in_file, partial(_must_be_zero, problem))
            return
        check = partial(_must_be_zero, f"{name_in_file}: {problem}")
        make, index = known.make, known.sources.index(name_in_file)

        def make_if_zero(*values: Tensor) -> Sequence[Tensor]:
            check(values[index])
            return make(*values)

        known.make = make_if_zero

    def sources_of(self, name: str) -> tuple[str, ...]:
        """The tensors in the files from which the model's tensor ``name`` is made."""
        conversion, _ = self._made.get(name, (self.conversion_of(name), 0))
        return conversion.sources

    def is_source_of(self, name_in_file: str, names: Container[str]) -> bool:
        """Whether one of the model's tensors in ``names``, or a part of it, is made from ``name_in_file``."""
        targets = self.conversion_of(name_in_file).targets
        return any(target is not None and target.name in names for target in targets)

    def leave_out(self, name: str, problem: str = "") -> None:
        """Notes that the model has no tensor ``name``.

        With a ``problem``, values other than 0 in a tensor that is stored unchanged count as that problem.
        """
        conversion, index = self._made.pop(name, (self.conversion_of(name), 0))
        del self.headers[name]
        conversion.targets[index] = None
        if not any(conversion.targets):
            look = partial(_must_be_zero, problem)
            for source in conversion.sources:
                self.conversions[source] = Conversion((source,), [], look, checks=bool(problem))

    def check_value(
        self,
        target: Target,
        layer: QuantLayer,
        leaf: str,
        value: Tensor,
        on_problem: Callable[[CheckpointError], object] = raised,
    ) -> None:
        """Calls ``on_problem`` if ``value`` of ``target`` is wrong for the parameter ``leaf`` of ``layer``."""
        if problem := layer.problem_with(leaf, value):
            advice = "the files are damaged: get them again, or quantize the float model"
            on_problem(CheckpointError(f"{self.stored[target.source].path}: {target.source} {problem}; {advice}"))

    @property
    def checked_names(self) -> list[str]:
        """The tensors in the files that the model doesn't hold, but whose values are checked."""
        return [name for name in self.stored if self.conversion_of(name).checks]

    def in_order(self) -> dict[str, StoredTensor]:
        """``stored``, with the tensors of each conversion together, so that few of them wait for others.

        Files sort them by dtype or name. Those of a layer that is split over two files wait for the second file.
        """
        order: dict[str, StoredTensor] = {}
        for name in self.stored:
            for source in self.conversion_of(name).sources:
                order.setdefault(source, self.stored[source])
        return order


def _must_be_zero(problem: str, value: Tensor) -> Sequence[Tensor]:
    if problem and bool((value != 0).any()):
        raise ValueError(problem)
    return ()


def read_converted(
    contents: Contents,
    device: torch.device,
    on_read: Callable[[int], object] = lambda nbytes: None,
    only: Container[str] | None = None,
    on_problem: Callable[[CheckpointError], object] = raised,
) -> Iterator[tuple[Target, Tensor]]:
    """Yields every tensor of the model, or part of one, made from the files on ``device``.

    ``on_read`` is called with the number of bytes read. ``only``: the names of the tensors wanted; others that are made
    together with them are included. It reads the tensors of one conversion after the other, and keeps nothing that it
    has yielded. Calls ``on_problem`` with a ``CheckpointError`` that names file and tensor for values that can't be
    converted; by default that is raised. Raises as ``read_values`` does.
    """
    order = contents.in_order()
    if only is not None:
        order = {name: order[name] for name in order if contents.is_source_of(name, only)}
    yield from _converted(contents, order, device, on_read, on_problem)


class PartReader:
    """Reads tensors of the model on the CPU, some at a time, in any order, from files that stay open.

    What a call takes depends on what it reads, not on the size of ``contents``, which must not change any more.
    """

    def __init__(self, contents: Contents, files: OpenFiles) -> None:
        """``files``: closed by the caller."""
        self.contents = contents
        self._files = files
        self._sources: dict[str, dict[str, StoredTensor]] = {}  # of each tensor of the model
        for name in contents.stored:
            conversion = contents.conversion_of(name)
            if name == conversion.sources[0]:
                stored = {source: contents.stored[source] for source in conversion.sources}
                for target in filter(None, conversion.targets):
                    self._sources.setdefault(target.name, {}).update(stored)

    def read(self, names: Iterable[str]) -> Iterator[tuple[Target, Tensor]]:
        """As ``read_converted`` for ``only`` these ``names``."""
        order = {source: tensor for name in names for source, tensor in self._sources.get(name, {}).items()}
        yield from _converted(self.contents, order, torch.device("cpu"), lambda nbytes: None, raised, self._files)


def check_unheld(
    contents: Contents,
    on_read: Callable[[int], object] = lambda nbytes: None,
    on_problem: Callable[[CheckpointError], object] = raised,
) -> None:
    """Checks the tensors that the model doesn't hold but that can't have any value; errors as in ``read_converted``."""
    order = {name: contents.stored[name] for name in contents.checked_names}
    for _ in _converted(contents, order, torch.device("cpu"), on_read, on_problem):
        pass


def _converted(
    contents: Contents,
    order: dict[str, StoredTensor],
    device: torch.device,
    on_read: Callable[[int], object],
    on_problem: Callable[[CheckpointError], object],
    files: OpenFiles | None = None,
) -> Iterator[tuple[Target, Tensor]]:
    """The results for the tensors in ``order``, which contains all sources of each conversion."""
    waiting: dict[str, dict[str, Tensor]] = {}  # by the first source of each conversion
    for name_in_file, value in read_values(order, device, files):
        on_read(value.nbytes)
        conversion = contents.conversion_of(name_in_file)
        first = conversion.sources[0]
        held = waiting.setdefault(first, {})
        held[name_in_file] = value
        del value
        if len(held) < len(conversion.sources):
            continue
        del waiting[first]
        values = [held.pop(name) for name in conversion.sources]
        try:
            made = conversion.make(*values)
        except ValueError as error:
            on_problem(CheckpointError(f"{contents.stored[first].path}: {first}: {error}"))
            continue
        del values
        yield from ((target, each) for target, each in zip(conversion.targets, made, strict=True) if target)
        del made
