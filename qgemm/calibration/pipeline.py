"""``quantize_blocks``: quantizes the layers of a model, as planned, block by block.

Of every block in order (``blocks.py`` says what the blocks are): each method of the recipe is applied; under a static
scheme, the scales of activations are found on the block as it then is; its layers are swapped; and what the quantized
block returns is what the next one is worked on with. So later blocks make up for errors of earlier ones, and only one
block at a time needs to be where it is computed (``device``). Nothing is random: the same call gives the same bits.

A method that fails on a block is undone there, and a weight that it has left without finite values is rounded to
nearest; the layers' records say so.

Without data the whole model is the one block, and without methods nothing is left of all this but the swaps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qgemm.calibration.blocks import Chain, capture, find_chains, without_cache
from qgemm.calibration.collect import (
    NEVER_CALLED,
    counted_experts,
    in_eval_mode,
    unused_experts,
    warn_of_uncalled,
    warn_of_unused,
)
from qgemm.calibration.method import Block, Call, ExpertsWork, LayerWork, Method
from qgemm.calibration.observers import MinMax
from qgemm.calibration.outlier_columns import fill_columns
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.resume import ResumeFolder, hash_of_data, hash_of_model
from qgemm.calibration.rounded_part import rounded_part
from qgemm.calibration.statistics import StatisticsSum
from qgemm.model.plan import SwapPlan
from qgemm.model.report import LayerRecord, kept_record
from qgemm.model.swap import make_unusable, swap
from qgemm.nn.linear_layer import InputScale
from qgemm.version import __version__

# Of a layer's inputs, as many rows tell how far its output is off.
_ROWS = 512


def quantize_blocks(
    model: nn.Module, plan: SwapPlan, wanted: Quantization, calls: Sequence[Call], progress: bool | None = None
) -> dict[str, LayerRecord]:
    """Swaps the layers that ``plan`` chooses for quantized ones, in place; returns their records by name.

    - ``wanted``: the recipe, the observer of activations under static schemes, where blocks are worked on, and where
      finished ones are kept.
    - ``calls``: the calibration data. Without any, ``plan`` has the scales, and no method may need data.

    Warns of layers that saw no token under a static scheme, and of experts without any. Raises ``ValueError`` if
    ``wanted.resume`` is of another run, and as methods and observers do, with the model changed in part.
    """
    run = _Run(model, plan, wanted, calls)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if calls:
                stack.enter_context(in_eval_mode(model))
                stack.enter_context(without_cache(model))
            hidden = None if progress is None else not progress
            run.bar = stack.enter_context(tqdm(total=len(run.layers), desc="quantize", unit="layer", disable=hidden))
            run.quantize_all()
    except BaseException as error:
        if run.has_changed:
            make_unusable(model, error)
        raise
    warn_of_unused(run.unused)
    warn_of_uncalled(run.unseen)
    return run.records


def check_runs(model: nn.Module, device: torch.device | None) -> None:
    """Raises ``ValueError`` if ``model`` lacks weights to be worked on, or can't move to ``device`` block by block."""
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError("a recipe needs weights, but the model has some on meta: load it, not offloaded by accelerate")
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if device is not None and (len(homes) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules())):
        raise ValueError(
            "device is given, but the model is spread over devices already: leave it out, or load on the CPU"
        )


class _Run:
    """The state of ``quantize_blocks``.

    - ``works``: the linear layers that are still to be quantized.
    - ``contents``: for each block of a chain that holds some, the names of its layers, in order.
    - ``records``: what has become of the layers that are done.
    - ``has_changed``: whether the model can't be brought back to what it was.
    """

    bar: Any = None
    has_changed: bool = False
    folder: ResumeFolder | None = None

    def __init__(self, model: nn.Module, plan: SwapPlan, wanted: Quantization, calls: Sequence[Call]) -> None:
        self.model, self.plan, self.wanted, self.calls = model, plan, wanted, calls
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
        """Quantizes chain by chain, and then the rest with the whole model as one block."""
        modules = [self.model.get_submodule(name) for name in self.layers]
        chains = find_chains(self.model, self.calls[0], modules) if self.calls else []
        del modules
        self.divide(chains)
        if self.wanted.resume is not None:
            self.folder = ResumeFolder(self.wanted.resume, self._about(chains))
        if self.recipe:
            self._prepare()
        for chain in chains:
            self.quantize_chain(chain)
        rest = [name for name in self.layers if name not in self.records]
        if rest:
            self._quantize_block(Block("", self.model, self.model, self._take(rest), self.calls), rest)

    def _prepare(self) -> None:
        before = [parameter._version for parameter in self.model.parameters()]
        try:
            for method in self.recipe:
                method.prepare(self.model, self.works)
        finally:
            self.has_changed = before != [parameter._version for parameter in self.model.parameters()]

    def divide(self, chains: Sequence[Chain]) -> None:
        """Finds the block of each layer; a layer that is in several blocks belongs to the rest of the model."""
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
        """Quantizes the layers in a chain's blocks, block by block, or takes those that are finished already."""
        inputs = None
        if not all(self._is_finished(name) for name in chain.names):
            inputs = capture(self.model, chain, self.calls, self.wanted.device)
        for place, name in enumerate(chain.names):
            is_finished, held = self._is_finished(name), self.contents.get(name, [])
            with _placed(self.model, name, self.wanted.device):
                if not is_finished and inputs is not None:
                    works = self._take(held)
                    block = Block(name, self.model.get_submodule(name), self.model, works, inputs.calls(place))
                    self._quantize_block(block, held)
                elif self.folder is not None and held:
                    self._take(held)
                    for record in self.folder.restore(self._number(name), self.model, self.layers):
                        self._finish(record)
                if inputs is not None and place + 1 < len(chain.names):
                    inputs.advance(place, self.model.get_submodule(name))
            if self.folder is not None and not is_finished:
                records = [self.records[layer] for layer in held]
                self.folder.save(self._number(name), name, self.model.get_submodule(name), records)

    def _take(self, names: list[str]) -> dict[str, LayerWork]:
        # They are nowhere else from then on: a reference would keep a float weight alive.
        return {name: self.works.pop(name) for name in names if name in self.works}

    def _quantize_block(self, block: Block, names: list[str]) -> None:
        """Quantizes the layers called ``names``: those of ``block``, and experts."""
        experts = [name for name in names if name not in block.layers]
        block.experts = {
            name: ExpertsWork(name, self.model.get_submodule(name), self.plan.schemes[name]) for name in experts
        }
        # Until something is swapped, the model can be brought back: of the first block alone.
        before = [] if self.has_changed or not self.recipe else _float_parameters(block)
        try:
            fill_columns(block)  # before weights are decided
            for method in self.recipe:
                _apply(method, block)
            fill_columns(block)
            scales, samples = self._observe(block) if block.calls else (self.plan.input_scales, {})
            for name in names:
                if name in block.layers:
                    record = self._swap_or_keep(block, name, scales.get(name), samples.get(name))
                else:
                    record = self._swap_experts(block.experts.pop(name))
                self._finish(record)
                self.has_changed, before = True, []
        except BaseException:
            _put_back(before)
            raise

    def _swap_or_keep(
        self, block: Block, name: str, input_scale: InputScale | None, sample: Tensor | None
    ) -> LayerRecord:
        work, layer = block.layers.pop(name), self.layers[name]
        is_called = sample is not None and (input_scale is not None or not work.scheme.is_static)
        if is_called or not block.calls:
            return self._swap(work, input_scale, sample)
        self.unseen.append(name)
        layer.reason = NEVER_CALLED
        return kept_record(layer)

    def _swap(self, work: LayerWork, input_scale: InputScale | None, sample: Tensor | None) -> LayerRecord:
        decided: dict[str, Any] = {}
        if work.weight is not None:
            decided["weight"] = (work.weight.values, work.weight.scale)
        if work.outlier_columns is not None:
            decided["outlier_columns"] = work.outlier_columns
        record = swap(self.model, self.layers[work.name], work.scheme, input_scale, **decided)
        error = None
        if sample is not None:
            error = _output_error(work.module, self.model.get_submodule(work.name), sample)
        return replace(record, note="; ".join(work.notes), output_error=error)

    def _swap_experts(self, work: ExpertsWork) -> LayerRecord:
        weights = {name: (each.values, each.scale) for name, each in (work.weights or {}).items()}
        if self.recipe and work.weights is None:
            work.notes.append("experts are rounded to nearest")
        record = swap(self.model, self.layers[work.name], work.scheme, weights=weights)
        return replace(record, note="; ".join(work.notes))

    def _observe(self, block: Block) -> tuple[dict[str, InputScale], dict[str, Tensor]]:
        """The scales of static layers' inputs, and some of all layers' inputs, from one run of the block.

        The experts that it sends no token to become ``unused``.
        """
        seen = {name: self.observer for name, work in block.layers.items() if work.scheme.is_static}
        sums = {name: StatisticsSum(rows=_ROWS) for name in block.layers}

        def see(name: str, x: Tensor, tokens: Tensor) -> None:
            sums[name].add(tokens)
            if name in seen:
                seen[name] = seen[name].update(rounded_part(block.layers[name], tokens))

        with counted_experts(self.model, list(block.experts), block.batch) as tokens:
            for _ in block.watch(block.layers, see):
                pass
        self.unused += unused_experts(tokens)
        scales: dict[str, InputScale] = {
            name: observer.input_scale(block.layers[name].scheme) for name, observer in seen.items() if observer.tokens
        }
        results = {name: total.result for name, total in sums.items()}
        return scales, {name: seen.rows for name, seen in results.items() if seen is not None and seen.rows is not None}

    def _finish(self, record: LayerRecord) -> None:
        self.records[record.name] = record
        error = "" if record.output_error is None else f" error {record.output_error:.4f}"
        self.bar.set_postfix_str(record.name + error, refresh=False)
        self.bar.update()

    def _is_finished(self, block: str) -> bool:
        return block not in self.contents or (self.folder is not None and self.folder.has(self._number(block)))

    def _about(self, chains: Sequence[Chain]) -> dict[str, Any]:
        """What the run is, so that it isn't gone on with as another one; each key is what errors call it."""
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
        """Which of the blocks with layers it is."""
        return list(self.contents).index(block)


def _apply(method: Method, block: Block) -> None:
    """Applies a method; undoes it if it fails, or leaves values that aren't finite."""
    parameters = _float_parameters(block)
    works: list[LayerWork | ExpertsWork] = [*block.layers.values(), *block.experts.values()]
    before = [dict(vars(work)) for work in works]
    try:
        method.apply(block)
        failure = _not_finite(block)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        failure = str(error)
    if failure:
        _put_back(parameters)
        for work, values in zip(works, before, strict=True):
            vars(work).update(values)
            work.notes.append(f"{method.name} failed on its block: {failure}")
    for work in works:
        if not all(bool((weight.scale.isfinite() & (weight.scale > 0)).all()) for weight in work.decided):
            work.undecide(f"{method.name} found no finite scales: rounded to nearest")


_Saved: TypeAlias = "list[tuple[nn.Module, str, nn.Parameter | None, Tensor | None]]"


def _float_parameters(block: Block) -> _Saved:
    """The float parameters of a block's modules, those that are None too, and copies of their values."""
    return [
        (module, name, parameter, None if parameter is None else parameter.detach().clone())
        for module in block.module.modules()
        for name, parameter in module._parameters.items()
        if parameter is None or parameter.is_floating_point()
    ]


def _put_back(saved: _Saved) -> None:
    for module, name, parameter, values in saved:
        if parameter is not None and values is not None:
            parameter.detach().copy_(values)
        setattr(module, name, parameter)


def _not_finite(block: Block) -> str:
    for name, parameter in block.module.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            return f"{name} would hold NaN or Inf"
    return ""


def _output_error(linear: nn.Module, quantized: nn.Module, rows: Tensor) -> float | None:
    # Not by a call: others' hooks aren't to see these rows.
    wanted = linear.forward(rows).double()
    error = (quantized.forward(rows).double() - wanted).norm() / wanted.norm()
    return float(error) if bool(error.isfinite()) else None


@contextmanager
def _placed(model: nn.Module, name: str, device: torch.device | None) -> Iterator[None]:
    """Inside, a module is on ``device``; afterwards it, or what is in its place, is where the module was.

    So are float layers that have been in it, if somebody keeps them.
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
