"""``Recipe``: the methods that a model is quantized with, in order, as a value that is printed, stored and loaded.

```yaml
methods:
- smoothquant: {alpha: 0.5}
- gptq
```

This is also the form of its dictionary (``to_dict``), which the report of a quantized checkpoint contains. Files and
dictionaries may come from untrusted sources: only names and plain settings are read from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qgemm.arguments import shortened
from qgemm.calibration.awq import AWQ
from qgemm.calibration.bias_correction import BiasCorrection
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.hadamard import HadamardRotation
from qgemm.calibration.method import PARTS, Method, nearest
from qgemm.calibration.outlier_columns import OutlierColumns
from qgemm.calibration.residual_rotation import ResidualRotation
from qgemm.calibration.rounding import MSEWeights
from qgemm.calibration.settings_file import read_settings, write_settings
from qgemm.calibration.smoothquant import SmoothQuant
from qgemm.model.report import report

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        ResidualRotation,
        SmoothQuant,
        HadamardRotation,
        OutlierColumns,
        AWQ,
        GPTQ,
        MSEWeights,
        BiasCorrection,
    )
}
"""The methods, by name, in the order in which they usually come."""

# A recipe with all methods and all settings has a thousand characters.
_MAX_FILE_BYTES = 100_000
_MAX_METHODS = 100


@dataclass(frozen=True)
class Recipe:
    """``methods``, applied in this order to every block of a model."""

    methods: Sequence[Method] = ()

    def __post_init__(self) -> None:
        """Accepts any iterable of methods.

        Raises ``TypeError`` if it contains anything else, ``ValueError`` if a method would undo another one's work.
        """
        if isinstance(self.methods, str | Method) or not isinstance(self.methods, Iterable):
            raise TypeError(f"recipe is {shortened(self.methods)}; it must be a list of methods, such as [GPTQ()]")
        object.__setattr__(self, "methods", tuple(self.methods))
        for method in self.methods:
            if isinstance(method, type) and issubclass(method, Method):
                raise TypeError(f"recipe holds the class {method.__name__}; create an instance: {method.__name__}()")
            if not isinstance(method, Method):
                raise TypeError(f"recipe holds {shortened(method)}; it takes methods, such as GPTQ()")
        _check_order(self.methods)

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is required."""
        return any(method.needs_data for method in self.methods)

    def __len__(self) -> int:
        """The number of methods."""
        return len(self.methods)

    def __iter__(self) -> Iterator[Method]:
        """The methods in order."""
        return iter(self.methods)

    def __str__(self) -> str:
        """One method per line, with all its settings."""
        lines = []
        for place, method in enumerate(self.methods, start=1):
            settings = ", ".join(f"{name}={value!r}" for name, value in method.to_dict().items())
            lines.append(f"{place}. {method.name}({settings})")
        return "\n".join(lines) or "nothing but rounding to nearest"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"methods": [{method.name: method.to_dict()} for method in self.methods]}

    @classmethod
    def from_dict(cls, values: Any, methods: Iterable[type[Method]] = ()) -> Recipe:
        """Reads a recipe that ``to_dict`` wrote, or in the same form; omitted settings have their defaults.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` for anything that isn't a recipe of
        these methods, and suggests similar names.
        """
        if not isinstance(values, dict) or set(values) != {"methods"} or not isinstance(values["methods"], list):
            raise ValueError(f"a recipe is an object with one list, 'methods'; this is {shortened(values)}")
        if len(values["methods"]) > _MAX_METHODS:
            raise ValueError(f"methods lists {len(values['methods'])} methods; up to {_MAX_METHODS} are read")
        known = {**METHODS, **{method.name: method for method in methods}}
        return cls(tuple(_parse_method(entry, known) for entry in values["methods"]))

    @classmethod
    def of(cls, model: nn.Module, methods: Iterable[type[Method]] = ()) -> Recipe | None:
        """The recipe of a quantized model, including a loaded one; None if it has none.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` if the recipe contains others.
        """
        stored = report(model).recipe
        return None if stored is None else cls.from_dict(stored, methods)

    def save(self, path: str | Path) -> None:
        """Writes a YAML file, or JSON if the name ends in ``.json``, atomically. YAML needs PyYAML."""
        write_settings(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, methods: Iterable[type[Method]] = ()) -> Recipe:
        """Reads a recipe from a file that ``save`` wrote, or one in the form of ``to_dict``.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` for anything else.
        """
        values = read_settings(path, "a recipe", _MAX_FILE_BYTES)
        try:
            return cls.from_dict(values, methods)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _check_order(methods: Sequence[Method]) -> None:
    """Raises ``ValueError`` if a later method would undo what an earlier one determines."""
    for place, later in enumerate(methods):
        for earlier in methods[:place]:
            if not (earlier.settles and later.settles):
                continue
            if type(earlier) is type(later):
                raise ValueError(f"recipe has {later.name} twice: give it once")
            first, begins = (min(map(PARTS.index, method.settles)) for method in (earlier, later))
            if begins < max(map(PARTS.index, earlier.settles)):
                raise ValueError(
                    f"recipe has {later.name} after {earlier.name}, whose work would be lost: {later.name} changes the "
                    f"{PARTS[begins]} that it depends on. Put {later.name} first: {later.name}, {earlier.name}"
                )
            # Scales and rotations can be combined; whatever depends on other parts may be determined only once.
            if first == begins > 0:
                raise ValueError(
                    f"recipe has {later.name} after {earlier.name}, whose work would be lost: both determine the "
                    f"{PARTS[begins]} of layers. Leave one of {earlier.name} and {later.name} out"
                )


def _parse_method(entry: Any, known: dict[str, type[Method]]) -> Method:
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, settings),) = entry.items()
    else:
        name, settings = entry, None
    if not isinstance(name, str):
        raise ValueError(f"methods holds {shortened(entry)}; each is a name, or one name with its settings")
    if name not in known:
        raise ValueError(f"there is no method {shortened(name)}; {nearest(name, known)}")
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(
            f"the settings of {name} are {shortened(settings)}; they must be an object of names and values"
        )
    return known[name].from_dict(settings or {})
