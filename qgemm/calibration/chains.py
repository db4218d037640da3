"""Chains of blocks: a transformer's layers, one after the other, so that one of them can be worked on at a time.

A chain is found by running the model once with hooks. It consists of members of an ``nn.ModuleList`` (or
``nn.Sequential``) that are each called once, with a tensor that the previous one returned. A block's other inputs
(masks, position embeddings, an encoder's output) are constant: ``capture`` gets them for every batch from a pass in
which the chain's blocks just return their input, so it costs next to nothing. The blocks themselves then run alone,
each on the outputs of the preceding ones, which are quantized by then.

Whether this is right is checked on the first batch: if the chain's input changes, the constants must keep the same
bits, and running block after block must give each block the inputs that it has in the model. Where it doesn't, the
chain is split in two, and the second part is captured after the first one is quantized. Encoder-decoders have several
chains for the same reason. Whatever is in no chain belongs to the rest of the model, which is worked on as a whole.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from qgemm.calibration.hooks import hooked, replaced
from qgemm.calibration.method import Call
from qgemm.calibration.padding import Masks

# Bytes that are compared at a time, so that it needs little memory.
_PIECE = 1 << 26


@dataclass(frozen=True)
class Link:
    """A tensor that one block returns and another one gets.

    ``source``: the index of the first block in the chain. ``path``: the tensor's path in that block's output.
    """

    source: int
    path: str


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks of a model, by name, in the order in which they run.

    - ``links``: for each block, the inputs that come from earlier blocks, by the input's path (``"[0][0]"`` is the
      first argument).
    - ``shortcuts``: for each block, how to skip it while inputs are captured; None if it must run.
    """

    names: tuple[str, ...]
    links: tuple[dict[str, Link], ...]
    shortcuts: tuple[Shortcut | None, ...]

    def part(self, start: int, end: int) -> Chain:
        """The blocks from ``start`` up to ``end``; what earlier blocks return is constant for this part."""
        links = tuple(
            {path: Link(link.source - start, link.path) for path, link in links.items() if link.source >= start}
            for links in self.links[start:end]
        )
        return Chain(self.names[start:end], links, self.shortcuts[start:end])


@dataclass(frozen=True, eq=False)
class Shortcut:
    """How to make a block's output from its input: the tensor at path ``input`` replaces the one at path ``output``."""

    input: str
    output: str
    paths: tuple[str, ...]
    spec: TreeSpec

    def output_of(self, *args: Any, **kwargs: Any) -> Any:
        """The output of a skipped block for these arguments; all other tensors in it are None."""
        # A copy, because code between blocks may change the value in place, and would change the batch itself.
        value = _flattened((args, kwargs))[0][self.input].clone()
        return tree_unflatten([value if path == self.output else None for path in self.paths], self.spec)


@dataclass(eq=False)
class _Event:
    """One call of a block in a run of the model."""

    name: str
    digests: dict[str, Any]
    shapes: dict[str, Any]
    links: dict[str, tuple[_Event, str]]
    output_shapes: dict[str, Any] = field(default_factory=dict)
    output_digests: dict[str, Any] = field(default_factory=dict)
    output_spec: TreeSpec | None = None


@dataclass(eq=False)
class _Inputs:
    """The inputs of a block's call: ``leaves`` by path, without links."""

    leaves: dict[str, Any]
    paths: list[str]
    spec: TreeSpec


class _Store:
    """Keeps the inputs of one batch: on their device, or on the CPU if blocks run on a ``device``."""

    def __init__(self, device: torch.device | None) -> None:
        self._on_cpu = device is not None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, leaf: Any) -> Any:
        """A tensor itself, or its only copy; for anything else that changes as blocks run, such as a cache, a copy."""
        if not isinstance(leaf, Tensor):
            return _copied(leaf, None)
        if not self._on_cpu:
            return leaf.detach()
        if id(leaf) not in self._kept:
            self._kept[id(leaf)] = leaf, leaf.detach().to("cpu")
        return self._kept[id(leaf)][1]


class _Stop(BaseException):
    """Ends a run of the model. It isn't an ``Exception``, so that no model handles it as an error of its own."""


def find_chains(model: nn.Module, call: Call, layers: Iterable[nn.Module]) -> list[Chain]:
    """The chains of ``model`` whose blocks contain ``layers``, in the order in which ``call`` runs them.

    ``model`` must be in eval mode, and return the same bits for the same input.
    """
    wanted = set(layers)
    members = _members(model, wanted)
    events = _trace(model, call, {name: module for group in members.values() for name, module in group.items()})
    chains: list[Chain] = []
    for group in members.values():
        if any(name.startswith(f"{block}.") for name in group for chain in chains for block in chain.names):
            continue  # nested in a block of another chain
        holding = {name for name, module in group.items() if not wanted.isdisjoint(module.modules())}
        runs = [_trimmed(run, holding) for run in _runs([event for event in events if event.name in group])]
        if any(sum(event.name in holding for event in run) > 1 for run in runs):
            chains += [chain for run in runs if run for chain in _checked(model, call, run)]
    places = {event.name: place for place, event in enumerate(events)}
    return sorted(chains, key=lambda chain: places[chain.names[0]])


def _members(model: nn.Module, wanted: set[nn.Module]) -> dict[str, dict[str, nn.Module]]:
    """The members of each list, outer lists first; a module in two lists counts only in the first one.

    Layers aren't blocks, because methods also work on what surrounds a layer.
    """
    seen = set(wanted)
    members: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            new = {key: member for key, member in module._modules.items() if member is not None and member not in seen}
            members[name] = {f"{name}.{key}" if name else key: member for key, member in new.items()}
            seen.update(new.values())
    return members


@torch.no_grad()
def _trace(model: nn.Module, call: Call, blocks: dict[str, nn.Module]) -> list[_Event]:
    """The calls, in order, of those blocks that are called exactly once."""
    events: list[_Event] = []
    # By id, with weak references, so that activations don't live longer than usual. An id may have been reused.
    made: dict[int, tuple[weakref.ref[Tensor], _Event, str]] = {}
    running: dict[str, _Event] = {}

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = _flattened((args, kwargs))[0]
        known = {path: made[id(leaf)] for path, leaf in leaves.items() if id(leaf) in made}
        links = {path: (event, output) for path, (tensor, event, output) in known.items() if tensor() is leaves[path]}
        shapes = {path: _shape(leaf) for path, leaf in leaves.items()}
        event = _Event(name, _digests(leaves), shapes, links)
        events.append(event)
        running[name] = event

    def after(name: str, output: Any) -> None:
        event = running[name]
        leaves, event.output_spec = _flattened(output)
        event.output_shapes = {path: _shape(leaf) for path, leaf in leaves.items()}
        event.output_digests = _digests(leaves)
        for path, leaf in leaves.items():
            if isinstance(leaf, Tensor):
                made[id(leaf)] = (weakref.ref(leaf), event, path)

    with hooked(blocks, before, after, first=True):
        model(*call.args, **call.kwargs)
    counts = Counter(event.name for event in events)
    return [event for event in events if counts[event.name] == 1]


def _runs(events: list[_Event]) -> list[list[_Event]]:
    """The calls of one list's members, split wherever a block doesn't get what the previous one returned."""
    runs: list[list[_Event]] = []
    for event in events:
        if runs and any(source is runs[-1][-1] for source, _ in event.links.values()):
            runs[-1].append(event)
        else:
            runs.append([event])
    return runs


def _trimmed(run: list[_Event], holding: set[str]) -> list[_Event]:
    """The run from the first to the last block that contains layers."""
    places = [place for place, event in enumerate(run) if event.name in holding]
    return run[places[0] : places[-1] + 1] if places else []


def _checked(model: nn.Module, call: Call, run: list[_Event]) -> Iterator[Chain]:
    """The run as one chain, or as several where blocks run alone don't get the inputs that they have in the model."""
    chain = _chain_of(run)
    start = 0
    while start < len(run):
        end = start + 1
        if end < len(run):
            part = chain.part(start, len(run))
            try:
                correct = _count_correct(model, part, run[start:], call)
            except Exception:  # a model may raise anything for None in place of a tensor
                chain = replace(chain, shortcuts=(None,) * len(run))
                correct = _count_correct(model, chain.part(start, len(run)), run[start:], call)
            end = start + max(correct, 1)
        yield chain.part(start, end)
        start = end


def _chain_of(run: list[_Event]) -> Chain:
    links = [
        {path: Link(run.index(source), out) for path, (source, out) in event.links.items() if source in run}
        for event in run
    ]
    shortcuts: list[Shortcut | None] = []
    for place, event in enumerate(run):
        used = {link.path for others in links[place + 1 :] for link in others.values() if link.source == place}
        # The path of the input from the previous block; the first block's is the same as the second one's.
        given = links[place] if place else links[min(1, len(run) - 1)]
        slots = [path for path, link in given.items() if link.source == max(place - 1, 0)]
        passed = [
            Shortcut(slot, out, tuple(event.output_shapes), event.output_spec)
            for slot in slots[:1]
            for out in used
            if event.output_spec is not None and event.shapes.get(slot) == event.output_shapes[out]
        ]
        shortcuts.append(passed[0] if len(used) == len(slots) == len(passed) == 1 else None)
    return Chain(tuple(event.name for event in run), tuple(links), tuple(shortcuts))


def _count_correct(model: nn.Module, chain: Chain, run: list[_Event], call: Call) -> int:
    """How many blocks, run one by one, get and return the same tensors as in the model."""
    true, other = (capture(model, chain, [call], disturb=disturb) for disturb in (False, True))
    for place, event in enumerate(run):
        for inputs in (true, other):
            constant = _digests(inputs.constants(place))
            if place and any(event.digests.get(path) != digest for path, digest in constant.items()):
                return place
        given = true.calls(place)[0]
        if _digests(_flattened((given.args, dict(given.kwargs)))[0]) != event.digests:
            return place
        output = true.advance(place, model.get_submodule(event.name))
        if _digests(_flattened(output)[0]) != event.output_digests:
            return place
    return len(run)


class ChainInputs:
    """The inputs of a chain's blocks, for every batch that reaches the chain.

    To be used in order: ``calls(place)`` for the block at ``place``, in whatever state it is, as often as needed; then
    ``advance(place, block)``, which runs it for the blocks after it, if any, and drops its inputs.
    """

    def __init__(
        self, chain: Chain, captured: list[list[_Inputs]], masks: list[Masks], device: torch.device | None
    ) -> None:
        """``captured``: for each batch, the inputs of each block. ``masks``: of each batch.

        ``device``: where blocks run, with inputs kept on the CPU. If None, both stay where they are.
        """
        self._chain, self._captured, self._masks, self._device = chain, captured, masks, device
        self._made: list[dict[Link, Tensor]] = [{} for _ in captured]

    def calls(self, place: int) -> Sequence[Call]:
        """The calls of the block at ``place``; tensors are copied each time, because a block may change them."""
        return _Calls(self, place, len(self._captured))

    def constants(self, place: int) -> dict[str, Any]:
        """The inputs of the block at ``place`` on the first batch that don't come from other blocks, by path."""
        return self._captured[0][place].leaves if self._captured else {}

    def call(self, place: int, batch: int) -> Call:
        """One of ``calls(place)``."""
        inputs, links = self._captured[batch][place], self._chain.links[place]
        copies: dict[int, Any] = {}
        leaves = []
        for path in inputs.paths:
            leaf = self._made[batch][links[path]] if path in links else inputs.leaves[path]
            if id(leaf) not in copies:
                copies[id(leaf)] = _copied(leaf, self._device)
            leaves.append(copies[id(leaf)])
        args, kwargs = tree_unflatten(leaves, inputs.spec)
        return Call(args, kwargs, self._masks[batch])

    @torch.no_grad()
    def advance(self, place: int, block: nn.Module) -> Any:
        """Runs ``block``, the one at ``place``, and keeps the inputs of later blocks; returns the last output."""
        later = {link for links in self._chain.links[place + 1 :] for link in links.values()}
        output = None
        for batch, captured in enumerate(self._captured):
            made = self._made[batch]
            call = self.call(place, batch)
            output = block(*call.args, **call.kwargs)
            leaves = _flattened(output)[0]
            for link in later:
                if link.source == place:
                    value = leaves[link.path]
                    made[link] = value if self._device is None else value.to("cpu")
            captured[place].leaves.clear()
            for link in [link for link in made if link not in later]:
                del made[link]
        return output


class _Calls(Sequence[Call]):
    """Calls that are built anew on every access."""

    def __init__(self, inputs: ChainInputs, place: int, count: int) -> None:
        self._inputs, self._place, self._count = inputs, place, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, batch: Any) -> Any:
        chosen = range(self._count)[batch]
        return self._inputs.call(self._place, chosen) if isinstance(chosen, int) else [self[each] for each in chosen]


@torch.no_grad()
def capture(
    model: nn.Module,
    chain: Chain,
    calls: Iterable[Call],
    device: torch.device | None = None,
    *,
    disturb: bool = False,
) -> ChainInputs:
    """Runs ``model``, as it is now, on every batch up to the last block of ``chain``, to get the blocks' inputs.

    ``device``: as in ``ChainInputs``. ``disturb``: gives the first block a different input than the model does. Raises
    ``RuntimeError`` if a batch reaches only some of the blocks.
    """
    modules = {name: model.get_submodule(name) for name in chain.names}
    captured, masks = [], []
    for call in calls:
        seen: list[_Inputs] = []
        store = _Store(device)
        with ExitStack() as stack:
            stack.enter_context(hooked(modules, _recorder(chain, seen, store, disturb), first=True))
            for name, shortcut in zip(chain.names[:-1], chain.shortcuts, strict=False):
                if shortcut is not None:
                    stack.enter_context(replaced(modules[name], "forward", shortcut.output_of))
            try:
                model(*call.args, **call.kwargs)
            except _Stop:
                captured.append(seen)
                masks.append(call.masks or Masks.of(model, call.args, call.kwargs))
            else:
                if seen:
                    raise RuntimeError(
                        f"a batch of calibration reaches {chain.names[0]} but not {chain.names[len(seen)]}: leave it "
                        "out, or pass it first, so that the blocks are found with it"
                    )
    return ChainInputs(chain, captured, masks, device)


def _recorder(chain: Chain, seen: list[_Inputs], store: _Store, disturb: bool) -> Any:
    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = chain.names.index(name)
        if len(seen) != place:
            raise RuntimeError(f"{name} runs in another order on a batch of calibration: leave that batch out")
        leaves, spec = _flattened((args, kwargs))
        links = chain.links[place]
        if missing := [path for path in links if path not in leaves]:
            raise RuntimeError(f"{name} is called without {missing[0]} on a batch of calibration: leave that batch out")
        kept = {path: store.keep(leaf) for path, leaf in leaves.items() if path not in links}
        seen.append(_Inputs(kept, list(leaves), spec))
        if place + 1 == len(chain.names):
            raise _Stop
        if disturb and place == 0:
            slots = [path for path, link in chain.links[1].items() if link.source == 0]
            moved = [_disturbed(leaf) if path in slots else leaf for path, leaf in leaves.items()]
            return tree_unflatten(moved, spec)
        return None

    return record


def _flattened(tree: Any) -> tuple[dict[str, Any], TreeSpec]:
    """The leaves of nested tuples, lists and dictionaries, by path."""
    leaves, spec = tree_flatten_with_path(tree)
    return {keystr(path): leaf for path, leaf in leaves}, spec


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _digest(leaf: Any) -> Any:
    """A value that is equal for equal leaves, bit for bit; None for leaves that can't be compared."""
    if isinstance(leaf, Mapping):  # of a type that isn't flattened, such as a UserDict
        return [(key, _digests(_flattened(value)[0])) for key, value in leaf.items()]
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf) if isinstance(leaf, bool | int | float | str | None) else None
    if leaf.is_nested or leaf.layout != torch.strided:
        return None
    content = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, content.numel(), _PIECE):
        piece = content[start : start + _PIECE]
        if piece.numel() % 8 or piece.storage_offset() % 8:
            piece = torch.cat((piece, piece.new_zeros(-piece.numel() % 8)))
        words = piece.view(torch.int64)
        # Each word is multiplied by a different odd number, modulo 2^64.
        factors = torch.arange(2 * start + 1, 2 * (start + len(words)), 2, device=words.device)
        total += int((words * factors).sum())
    return leaf.shape, leaf.dtype, total % 2**64


def _digests(leaves: dict[str, Any]) -> dict[str, Any]:
    return {path: _digest(leaf) for path, leaf in leaves.items()}


def _disturbed(leaf: Any) -> Any:
    """Values that differ from these, and that a norm doesn't make equal again."""
    return leaf.roll(1, -1) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim else leaf


def _copied(leaf: Any, device: torch.device | None) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone() if device is None else leaf.to(device, copy=True)
    if not hasattr(leaf, "__dict__") or callable(leaf):
        return leaf
    return copy.deepcopy(leaf)
