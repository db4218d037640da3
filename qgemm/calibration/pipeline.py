"""``quantize_blocks``: quantizes the layers of a model, as planned, block by block.

For every block in order (``chains.py`` finds them): each method of the recipe is applied; under a static scheme,
activation scales are found on the block as it then is; its layers are swapped; and the quantized block's outputs become
the inputs of the next one. So later blocks compensate for errors of earlier ones, and only one block at a time needs to
be on the device that computes (``device``). Nothing is random: the same call gives the same bits.

Without data, the whole model is a single block; without methods, only the swaps remain.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from qgemm.calibration.chains import Chain, capture, find_chains
from qgemm.calibration.collect import warn_of_uncalled, warn_of_unused
from qgemm.calibration.hooks import in_eval_mode, without_cache
from qgemm.calibration.method import Block, Call, ExpertsWork, LayerWork
from qgemm.calibration.observers import MinMax
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.quantize_block import quantize_block
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.resume import ResumeFolder, hash_of_data, hash_of_model
from qgemm.model.plan import SwapPlan
from qgemm.model.report import LayerRecord
from qgemm.model.swap import make_unusable
from qgemm.version import __version__


def quantize_blocks(
    model: nn.Module, plan: SwapPlan, wanted: Quantization, calls: Sequence[Call], progress: bool | None = None
) -> dict[str, LayerRecord]:
    """Swaps the layers that ``plan`` chooses for quantized ones, in place; returns their records by name.

    - ``wanted``: the recipe, the observer of activations under static schemes, the device that blocks are processed on,
      and the folder for finished ones.
    - ``calls``: the calibration data. Without any, ``plan`` contains the scales, and no method may need data.

    Warns about layers that saw no token under a static scheme, and about experts without any. Raises ``ValueError`` if
    ``wanted.resume_folder`` belongs to another run, and as methods and observers do; the model is then partly changed.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if calls:
            stack.enter_context(in_eval_mode(model))
            stack.enter_context(without_cache(model))
        hidden = None if progress is None else not progress
        bar = stack.enter_context(tqdm(total=len(plan.chosen), desc="quantize", unit="layer", disable=hidden))
        run = _Run(model, plan, wanted, calls, bar)
        try:
            run.quantize_all()
        except BaseException as error:
            if run.has_changed:
                make_unusable(model, error)
            raise
    warn_of_unused(run.unused)
    warn_of_uncalled(run.unseen)
    return run.records


class _Run:
    """The state of ``quantize_blocks``.

    - ``works``: the linear layers that remain to be quantized.
    - ``contents``: for each block of a chain that has layers, their names, in order.
    - ``records``: the records of finished layers.
    - ``has_changed``: whether the model can't be restored any more.
    """

    has_changed: bool = False
    folder: ResumeFolder | None = None

    def __init__(self, model: nn.Module, plan: SwapPlan, wanted: Quantization, calls: Sequence[Call], bar: Any) -> None:
        self.model, self.plan, self.wanted, self.calls, self.bar = model, plan, wanted, calls, bar
        self.recipe = wanted.recipe or Recipe()
        self.observer = wanted.observer or MinMax()
        self.layers = {layer.name: layer for layer in plan.chosen}
        self.works = {
            layer.name: LayerWork(layer.name, model.get_submodule(layer.name), plan.scheme_of(layer))
            for layer in plan.chosen
            if not layer.is_experts
        }
        self.contents: dict[str, list[str]] = {}
        self.records: dict[str, LayerRecord] = {}
        self.unseen: list[str] = []
        self.unused: list[str] = []

    def quantize_all(self) -> None:
        """Quantizes chain by chain, and then the remaining layers with the whole model as one block."""
        modules = [self.model.get_submodule(name) for name in self.layers]
        chains = find_chains(self.model, self.calls[0], modules) if self.calls else []
        del modules
        self.divide(chains)
        if self.wanted.resume_folder is not None:
            self.folder = ResumeFolder(self.wanted.resume_folder, self._about(chains))
        if self.recipe:
            self._prepare()
        for chain in chains:
            self.quantize_chain(chain)
        rest = [name for name in self.layers if name not in self.records]
        if rest:
            self._quantize("", rest, self.calls)

    def _prepare(self) -> None:
        before = self._versions()
        try:
            for method in self.recipe:
                method.prepare(self.model, self.works)
        finally:
            self.has_changed = before != self._versions()

    def _versions(self) -> list[object]:
        """Changes if a parameter does; tensors made in inference mode have no version, and count as changed."""
        return [object() if each.is_inference() else each._version for each in self.model.parameters()]

    def divide(self, chains: Sequence[Chain]) -> None:
        """Finds the block of each layer; a layer in several blocks belongs to the rest of the model."""
        names = {self.model.get_submodule(name): name for name in self.layers}
        blocks = [name for chain in chains for name in chain.names]
        found = [
            (names[module], block)
            for block in blocks
            for module in self.model.get_submodule(block).modules()
            if module in names
        ]
        counts = Counter(name for name, _ in found)
        homes = {name: block for name, block in found if counts[name] == 1}
        contents = {block: [name for name in self.layers if homes.get(name) == block] for block in blocks}
        self.contents = {block: names for block, names in contents.items() if names}

    def quantize_chain(self, chain: Chain) -> None:
        """Quantizes the layers in a chain's blocks, block by block, or restores blocks that are already finished."""
        inputs = None
        if not all(self._is_finished(name) for name in chain.names):
            inputs = capture(self.model, chain, self.calls, self.wanted.device)
        for place, name in enumerate(chain.names):
            is_finished, held = self._is_finished(name), self.contents.get(name, [])
            with _placed(self.model, name, self.wanted.device):
                if held and is_finished:
                    self._restore(name, held)
                elif held:
                    assert inputs is not None
                    self._quantize(name, held, inputs.calls(place))
                if inputs is not None and place + 1 < len(chain.names):
                    inputs.advance(place, self.model.get_submodule(name))
            if self.folder is not None and not is_finished:
                records = [self.records[layer] for layer in held]
                self.folder.save(self._number(name), name, self.model.get_submodule(name), records)

    def _restore(self, name: str, names: list[str]) -> None:
        """Restores the layers ``names`` of the finished block ``name`` from the folder."""
        assert self.folder is not None
        for each in names:
            self.works.pop(each, None)
        self._note(self.folder.restore(self._number(name), self.model, self.layers))

    def _quantize(self, name: str, names: list[str], calls: Sequence[Call]) -> None:
        """Quantizes the layers ``names`` of the block ``name``, which is called with ``calls``."""
        experts = [each for each in names if self.layers[each].is_experts]
        # Popped, because another reference would keep a float weight alive.
        block = Block(
            name,
            self.model.get_submodule(name),
            self.model,
            {each: self.works.pop(each) for each in names if each not in experts},
            calls,
            {each: ExpertsWork(each, self.model.get_submodule(each), self.plan.schemes[each]) for each in experts},
        )
        self._note(
            quantize_block(block, self.layers, self.recipe, self.observer, self.plan.input_scales, not self.has_changed)
        )
        self.unseen += [each for each in names if self.layers[each].reason]
        self.unused += block.unused

    def _note(self, records: Iterable[LayerRecord]) -> None:
        """Keeps each layer's record when it is finished, and shows it in the progress bar."""
        for record in records:
            self.has_changed = True
            self.records[record.name] = record
            error = "" if record.output_error is None else f" error {record.output_error:.4f}"
            self.bar.set_postfix_str(record.name + error, refresh=False)
            self.bar.update()

    def _is_finished(self, block: str) -> bool:
        return block not in self.contents or (self.folder is not None and self.folder.has(self._number(block)))

    def _about(self, chains: Sequence[Chain]) -> dict[str, Any]:
        """What identifies the run, so that it isn't continued as a different one; the keys appear in errors."""
        return {
            "version of qgemm": __version__,
            "recipe": self.recipe.to_dict(),
            "observer": {self.observer.name: self.observer.settings},
            "device": str(self.wanted.device),
            "schemes or layers": {name: scheme.to_dict() for name, scheme in self.plan.schemes.items()},
            "division into blocks": [list(chain.names) for chain in chains],
            "model": hash_of_model(self.model),
            "calibration data": hash_of_data((call.args, dict(call.kwargs)) for call in self.calls),
        }

    def _number(self, block: str) -> int:
        """The index of the block among those with layers."""
        return list(self.contents).index(block)


@contextmanager
def _placed(model: nn.Module, name: str, device: torch.device | None) -> Iterator[None]:
    """Inside, a module is on ``device``; afterwards it, or its replacement, is back where it was.

    So are float layers that were part of it, if they still exist.
    """
    if device is None:
        yield
        return
    block = model.get_submodule(name)
    home = next((tensor.device for tensor in [*block.parameters(), *block.buffers()]), device)
    parts = [weakref.ref(module) for module in block.modules()]
    block.to(device)
    del block
    try:
        yield
    finally:
        for module in [model.get_submodule(name), *filter(None, (part() for part in parts))]:
            module.to(home)
