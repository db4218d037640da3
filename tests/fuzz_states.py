"""Features of qgemm in random order: a model must compute what it does without the detours.

    python tests/fuzz_states.py --cases 1000 --seed 0

Every case builds one small model twice and applies three to eight operations. Those that change numbers (quantize,
cast, dequantize, adapters) are applied to both, the others (save and load, copy, fuse, hooks and so on) to the first
alone. After each one:

- both models hold the same values and return the same bits, and the report names the layers that are quantized;
- an operation that raised an error did so for both, and left the first model as it was: modules, attributes, values;
- copies made before compute what they did.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint.models import Net
from families import FAMILIES
from families.example import Example
from families.mixtures import MIXTURES
from fuzz_states_world import UnfitError, World
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

import qgemm
from qgemm.nn import QuantLayer

MODELS: dict[str, Callable[[], Example]] = {
    **{name: FAMILIES[name] for name in ("llama", "gemma2", "gpt2", "t5", "bert", "whisper", "siglip_vision")},
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "net": lambda: Example(Net().eval(), {"ids": torch.arange(6)}),
}
BOTH = [name for name in vars(World) if name.startswith("both_")]
ONE = [name for name in vars(World) if name.startswith("one_")]


def outputs_of(world: World, model: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        out = model(**world.arguments(model))
    return {"": out} if isinstance(out, Tensor) else {n: each for n, each in out.items() if isinstance(each, Tensor)}


def state_of(model: nn.Module) -> dict[str, Any]:
    """What an operation that raises must leave as it was, besides values."""
    state: dict[str, Any] = {"config": str(getattr(model, "config", None))}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        state[f"module {name}"] = type(module), id(module), module.training, sorted(vars(module)), hooks
    return state | {name: (id(each), each.requires_grad) for name, each in model.named_parameters()}


def compare(what: str, got: dict[str, Tensor], wanted: dict[str, Tensor], error: float = 0.0) -> None:
    assert got.keys() == wanted.keys(), f"{what}: {sorted(got.keys() ^ wanted.keys())} are in one only"
    for name, value in wanted.items():
        own = got[name]
        assert (own.dtype, own.shape) == (value.dtype, value.shape), f"{what} {name}: {own.dtype}, not {value.dtype}"
        if not torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (own, value))):
            off = float((own.double() - value.double()).norm() / value.double().norm())
            assert off <= error, f"{what} {name}: off by {off:.3g}"


class Case:
    """A model and its twin, and what is done to them."""

    def __init__(self, seed: int, number: int, folder: Path) -> None:
        self.rng = random.Random(f"{seed} {number}")
        name = self.rng.choice(list(MODELS))
        self.done, self.counts = [name], Counter[str]()
        self.copies: list[tuple[Any, dict[str, Tensor]]] = []
        self.worlds = []
        for is_twin in (False, True):
            torch.manual_seed(number)
            example = MODELS[name]()
            self.worlds.append(World(MODELS[name], folder / str(is_twin), is_twin, example.model, example.inputs))
            self.worlds[-1].folder.mkdir()

    def step(self) -> None:
        world, names = self.worlds[0], BOTH if self.rng.random() < 0.4 else ONE
        if len(self.done) == 1 and self.rng.random() < 0.5:
            names = ["both_quantize"]
        name, choices = self.rng.choice(names), self.rng.randrange(1 << 30)
        if self.rng.random() < 0.15:
            self.copies.append((kept := copy.deepcopy(world.model), outputs_of(world, kept)))
        before, values = state_of(world.model), copy.deepcopy(world.model.state_dict())
        self.done.append(name)
        errors = [apply(name, each, choices) for each in (self.worlds if names is not ONE else [world])]
        self.done[-1] += f" ({world.note})" + (f" raised {errors[0]}"[:150] if errors[0] else "")
        if isinstance(errors[0], UnfitError):
            self.done.pop()
            return
        self.counts["raised" if errors[0] else "done"] += 1
        assert len({type(error) for error in errors}) == 1, f"an error for one of the two: {errors}"
        if errors[0] is not None and name != "both_adapt":  # which is for PEFT to undo
            after = state_of(world.model)
            changed = [key for key in {**after, **before} if after.get(key) != before.get(key)]
            assert not changed, f"an error left changes in {changed[:3]}"
            compare("values after an error", world.model.state_dict(), values)
        self.check()

    def check(self) -> None:
        world, twin = self.worlds
        compare("values", world.model.state_dict(), twin.model.state_dict())
        wanted = outputs_of(twin, twin.model)
        # Fused products of floats add in another order.
        is_fused = any("_qgemm_fused" in vars(module) for each in self.worlds for module in each.model.modules())
        error = 0.0 if not is_fused else 1e-5 if next(iter(wanted.values())).dtype == torch.float32 else 0.05
        compare("outputs", outputs_of(world, world.model), wanted, error)
        for kept, outputs in self.copies:
            compare("outputs of an earlier copy", outputs_of(world, kept), outputs, error)
        names = {name for name, module in world.inner.named_modules() if isinstance(module, QuantLayer)}
        if names and world.inner is world.model:
            told = {record.name for record in qgemm.report(world.model).quantized}
            assert told == names, f"the report and the model differ in {sorted(told ^ names)}"


def apply(name: str, world: World, choices: int) -> BaseException | None:
    world.rng, world.note = random.Random(choices), ""
    torch.manual_seed(choices)
    try:
        getattr(world, name)()
    except AssertionError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return error.with_traceback(None)
    return None


def run_case(seed: int, number: int) -> tuple[str, Counter[str]]:
    """What failed in a case, if anything did, and how many operations were done."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(seed, number, Path(folder))
        try:
            for _ in range(case.rng.randint(3, 8)):
                case.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}\n    {' > '.join(case.done)}", case.counts
    return "", case.counts


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"cases": 100, "seed": 0, "only": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number in range(options.cases) if options.only is None else [options.only]:
        failure, done = run_case(options.seed, number)
        counts += done
        if failure:
            counts["failed"] += 1
            print(f"case {number}: {failure}", flush=True)
    print(dict(counts) | {"failed": counts["failed"]})
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
