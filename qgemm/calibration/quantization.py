"""``Quantization``: how to quantize a model, as one value that is checked, stored and loaded.

```yaml
scheme: [["*.mlp.*", int4], ["*", int8-static]]
skip: ["*.o_proj"]
recipe: [smoothquant, gptq: {damping: 0.02}]
observer: percentile
```

``quantize_model``, ``quantize_checkpoint``, ``QGemmConfig`` and the command line make it from their arguments. Data
isn't part of it: neither batches nor measurements.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from qgemm.arguments import as_scales, shortened, shown
from qgemm.calibration.budget import Budget
from qgemm.calibration.method import Method, nearest
from qgemm.calibration.observers import Observer, parse_observer, resolve_observer
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration, check_has_statistics
from qgemm.calibration.sensitivity_result import Sensitivity
from qgemm.calibration.settings_file import read_settings, write_settings
from qgemm.device import find_device
from qgemm.model.selection import Pattern, Patterns, SchemeChoice, as_patterns, resolve_schemes, shown_pattern
from qgemm.nn.linear_layer import InputScale
from qgemm.scheme import QuantScheme, resolve_scheme

# Enough for the scales of a model with 10,000 layers, by name.
_MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True)
class Quantization:
    """How to quantize a model; ``quantize_model`` explains each field. ``of`` makes one from arguments.

    - ``schemes``: by pattern; None leaves layers in float.
    - ``options``: the schemes that ``budget`` may choose from.
    """

    schemes: Mapping[Pattern, QuantScheme | None]
    options: Sequence[QuantScheme] = ()
    skip: Sequence[Pattern] = ()
    include: Sequence[Pattern] = ()
    input_scales: Mapping[str, InputScale] | None = None
    recipe: Recipe | None = None
    observer: Observer | None = None
    budget: Budget | None = None
    device: torch.device | None = None
    resume_folder: str | Path | None = None

    @classmethod
    def of(
        cls,
        scheme: SchemeChoice | Sequence[str | QuantScheme] = "int8",
        *,
        skip: Patterns = None,
        include: Patterns = None,
        input_scales: Mapping[str, InputScale] | None = None,
        recipe: Recipe | Sequence[Method] | None = None,
        observer: str | Observer | None = None,
        budget: Budget | None = None,
        device: torch.device | str | None = None,
        resume_folder: str | Path | None = None,
    ) -> Quantization:
        """Makes one from the arguments of ``quantize_model``; raises its errors that don't depend on a model."""
        if budget is not None and not isinstance(budget, Budget):
            raise TypeError(f"budget is {shown(budget)}; it must be a qgemm.Budget")
        options = _options(scheme, budget)
        return cls(
            schemes={"*": options[0]} if options else resolve_schemes(scheme),  # type: ignore[arg-type]
            options=options,
            skip=as_patterns("skip", skip),
            include=as_patterns("include", include),
            input_scales=as_scales(input_scales),
            recipe=recipe if recipe is None or isinstance(recipe, Recipe) else Recipe(recipe),
            observer=None if observer is None else resolve_observer(observer),
            budget=budget,
            device=None if device is None else find_device(device),
            resume_folder=resume_folder,
        )

    def check_data(
        self, calibration: Calibration | Iterable[Any] | None, sensitivity: Sensitivity | None = None
    ) -> None:
        """Raises ``ValueError`` or ``TypeError`` if this data doesn't fit, whatever the model is."""
        if sensitivity is not None and not isinstance(sensitivity, Sensitivity):
            raise TypeError(f"sensitivity is {shown(sensitivity)}; it must be what qgemm.sensitivity returned")
        if self.budget is None and sensitivity is not None:
            raise ValueError("sensitivity is given without a budget: pass budget=Budget(...)")
        if calibration is not None and self.input_scales is not None:
            raise ValueError("input_scales and calibration both give the scales: pass one of them")
        if self.observer is not None and not are_batches(calibration):
            raise ValueError("observer computes scales from batches: pass them as calibration, or leave observer out")
        if self._wants_blocks:
            if self.input_scales is not None:
                raise ValueError(
                    "input_scales are given, but a recipe computes scales itself: pass batches as calibration"
                )
            if isinstance(calibration, Calibration):
                raise ValueError("calibration is a Calibration, but a recipe runs the model on data: pass batches")

    def goes_by_blocks(
        self, schemes: Iterable[QuantScheme], calibration: Calibration | Iterable[Any] | None = None
    ) -> bool:
        """Whether a model under ``schemes`` is quantized block by block, each calibrated on its predecessors' output.

        Otherwise, scales that are needed are found for the whole model at once.
        """
        return self._wants_blocks or (are_batches(calibration) and any(scheme.needs_blocks for scheme in schemes))

    def check_schemes(
        self,
        schemes: Sequence[QuantScheme],
        calibration: Calibration | Iterable[Any] | None,
        sensitivity: Sensitivity | None = None,
    ) -> None:
        """Raises ``ValueError`` if the layers' ``schemes`` need data that is missing, or don't use given data."""
        if self.goes_by_blocks(schemes, calibration):
            if calibration is None and (wanting := self.wanting_data(schemes, sensitivity)):
                raise ValueError(f"{wanting[0]} needs batches to run the model on: pass them as calibration")
        elif calibration is not None:
            check_has_statistics(schemes)
            if not any(scheme.is_static for scheme in schemes):
                raise ValueError(_nothing_to_calibrate(schemes))

    def check_runs(self, model: nn.Module) -> None:
        """Raises ``ValueError`` if ``model`` lacks weights, or its blocks can't be moved to ``device``."""
        if any(parameter.device.type == "meta" for parameter in model.parameters()):
            raise ValueError(
                "a recipe needs weights, but the model has some on meta: load it, not offloaded by accelerate"
            )
        homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if self.device is not None and (
            len(homes) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules())
        ):
            raise ValueError(
                "device is given, but the model is spread over devices already: leave it out, or load on the CPU"
            )

    def wanting_data(self, schemes: Iterable[QuantScheme], sensitivity: Sensitivity | None = None) -> list[str]:
        """What requires batches to run the model on if layers have ``schemes``, in words."""
        wanting = [f"the method {method.name}" for method in self.recipe or () if method.needs_data]
        wanting += [f"the scheme {scheme.name!r}" for scheme in schemes if scheme.needs_data]
        own = {
            "budget": None if sensitivity else self.budget,
            "device": self.device,
            "resume_folder": self.resume_folder,
        }
        return wanting + [name for name, value in own.items() if value is not None]

    def check_folds_no_bias(self, why: str) -> None:
        """Raises ``ValueError``, ending in ``why``, if a scheme changes biases and so needs whole layers."""
        for scheme in self.schemes.values():
            if scheme is not None and scheme.has_zero_point:
                raise ValueError(f"scheme {scheme.name!r} changes biases, which isn't possible {why}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, by the argument names of ``of``; rarely used ones are left out if they are None."""
        # Pairs, because their order matters, which JSON guarantees for lists only.
        schemes: Any = [[shown_pattern(pattern), each and each.name] for pattern, each in self.schemes.items()]
        if len(schemes) == 1 and schemes[0][0] == "*" and schemes[0][1]:
            schemes = schemes[0][1]
        scales = self.input_scales
        rarely = {
            "observer": self.observer and {self.observer.name: self.observer.settings},
            "budget": self.budget and {name: value for name, value in vars(self.budget).items() if value is not None},
            "device": self.device and str(self.device),
            "resume_folder": self.resume_folder and str(self.resume_folder),
        }
        return {
            "scheme": [each.name for each in self.options] or schemes,
            "skip": [shown_pattern(pattern) for pattern in self.skip],
            "include": [shown_pattern(pattern) for pattern in self.include],
            "input_scales": None if scales is None else {name: _numbers(scale) for name, scale in scales.items()},
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            **{name: value for name, value in rarely.items() if value is not None},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Quantization:
        """Reads what ``to_dict`` gave, also after JSON or YAML.

        It also accepts an observer's name, and a list of methods as a recipe. Raises ``ValueError``, ``TypeError``,
        ``KeyError`` or ``AttributeError`` for anything else.
        """
        given, known = dict(values), list(inspect.signature(cls.of).parameters)
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"there is no setting {shortened(unknown[0])}; {nearest(unknown[0], known)}")
        if isinstance(given.get("scheme"), list) and not given.get("budget"):
            given["scheme"] = dict(given["scheme"])
        if given.get("recipe") is not None:
            recipe = given["recipe"]
            given["recipe"] = Recipe.from_dict({"methods": recipe} if isinstance(recipe, list) else recipe)
        if isinstance(given.get("observer"), Mapping):
            ((name, settings),) = given["observer"].items()
            given["observer"] = parse_observer(name, settings)
        if given.get("budget") is not None:
            given["budget"] = Budget(**given["budget"])
        return cls.of(**given)

    def save(self, path: str | Path) -> None:
        """Writes ``to_dict`` as a YAML file, or JSON if the name ends in ``.json``, atomically. YAML needs PyYAML."""
        write_settings(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Quantization:
        """Reads a file written by ``save``, or by hand in its form; raises ``ValueError`` for anything else."""
        values = read_settings(path, "a quantization", _MAX_FILE_BYTES)
        if not isinstance(values, Mapping):
            raise ValueError(f"{path}: a quantization is an object of names and values; this is {shortened(values)}")
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def _wants_blocks(self) -> bool:
        return any(each is not None for each in (self.recipe, self.device, self.resume_folder, self.budget))


def are_batches(calibration: Calibration | Iterable[Any] | None) -> TypeGuard[Iterable[Any]]:
    """Whether ``calibration`` is data to run the model on."""
    return calibration is not None and not isinstance(calibration, Calibration)


def _options(scheme: Any, budget: Budget | None) -> list[QuantScheme]:
    """The schemes that ``budget`` may choose from; empty without a budget."""
    are_several = isinstance(scheme, Sequence) and not isinstance(scheme, str)
    if budget is None:
        if are_several:
            raise ValueError(f"scheme is {scheme!r}: pass one scheme, or a budget that chooses")
        return []
    if isinstance(scheme, Mapping):
        raise ValueError(
            "a mapping of schemes can't be combined with a budget: pass a list of schemes for the budget to "
            "choose from, or leave budget out"
        )
    if are_several and not scheme:
        raise ValueError("scheme is empty: name those that the budget may choose from")
    return [resolve_scheme(each) for each in (scheme if are_several else [scheme])]


def _numbers(scale: InputScale) -> float | list[float]:
    return [float(each) for each in scale] if isinstance(scale, tuple | list) else float(scale)


def _nothing_to_calibrate(schemes: Sequence[QuantScheme]) -> str:
    """Why batches alone are of no use here, and what would use them."""
    names = " and ".join(repr(scheme.name) for scheme in schemes)
    if all(scheme.is_weight_only for scheme in schemes):
        return (
            f"scheme {names} multiplies in float, so calibration by itself finds nothing: with a recipe, such as "
            "recipe=[GPTQ()], the batches decide better weights than rounding gives"
        )
    return (
        f"scheme {names} finds scales as it runs: calibration is for a static scheme, or for a recipe, such as "
        "recipe=[SmoothQuant(), GPTQ()]"
    )
