"""``Recipe``: the methods that a model is quantized with, in order, as a value that is printed, stored and read.

```yaml
methods:
- smoothquant: {alpha: 0.5}
- gptq
```

That is also its dictionary (``to_dict``), which a quantized checkpoint's report holds. Files and dictionaries may come
from anyone: nothing but names and plain settings is read from them.
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
from qgemm.calibration.smoothquant import SmoothQuant
from qgemm.checkpoint.disk import open_regular, replacing
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

# A recipe of all methods with all settings has a thousand characters.
_MAX_FILE_BYTES = 100_000
_MAX_METHODS = 100


@dataclass(frozen=True)
class Recipe:
    """``methods``, applied in this order to every block of a model."""

    methods: Sequence[Method] = ()

    def __post_init__(self) -> None:
        """Takes any iterable of methods.

        Raises ``TypeError`` if something else is in it, ``ValueError`` if one would undo what another has done.
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
        """Whether there must be calibration data."""
        return any(method.needs_data for method in self.methods)

    def __len__(self) -> int:
        """How many methods."""
        return len(self.methods)

    def __iter__(self) -> Iterator[Method]:
        """The methods in order."""
        return iter(self.methods)

    def __str__(self) -> str:
        """A method per line, with all its settings."""
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
        """The recipe that ``to_dict`` wrote, or in the same form; omitted settings have their defaults.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` for anything that isn't a recipe of
        these, and suggests similar names.
        """
        if not isinstance(values, dict) or set(values) != {"methods"} or not isinstance(values["methods"], list):
            raise ValueError(f"a recipe is an object with one list, 'methods'; this is {shortened(values)}")
        if len(values["methods"]) > _MAX_METHODS:
            raise ValueError(f"methods lists {len(values['methods'])} methods; up to {_MAX_METHODS} are read")
        known = {**METHODS, **{method.name: method for method in methods}}
        return cls(tuple(_parse_method(entry, known) for entry in values["methods"]))

    @classmethod
    def of(cls, model: nn.Module, methods: Iterable[type[Method]] = ()) -> Recipe | None:
        """The recipe of a quantized model, also of a loaded one; None without a recipe.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` if it names others.
        """
        stored = report(model).recipe
        return None if stored is None else cls.from_dict(stored, methods)

    def save(self, path: str | Path) -> None:
        """Writes a YAML file, atomically: an old file stays until the new one is complete. Needs PyYAML."""
        text = _yaml().safe_dump(self.to_dict(), sort_keys=False)
        with replacing(Path(path)) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | Path, methods: Iterable[type[Method]] = ()) -> Recipe:
        """The recipe in a YAML (or JSON) file, in the form of ``to_dict``. Needs PyYAML.

        ``methods``: your own, in addition to ``METHODS``. Raises ``ValueError`` for anything else.
        """
        path = Path(path)
        with open_regular(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"{path} is not a recipe: it has more than {_MAX_FILE_BYTES} bytes")
        try:
            return cls.from_dict(_parse_yaml(content), methods)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _check_order(methods: Sequence[Method]) -> None:
    """Raises ``ValueError`` if what a method settles is lost to a later one."""
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
            # Scales and rotations add up; whatever rests upon something is there once.
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


def _parse_yaml(content: bytes) -> Any:
    """What a YAML document holds, if that is no more than its text: nothing is repeated by reference."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("a recipe has no anchors and aliases")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            values = super().construct_mapping(node, deep=deep)
            if len(values) < len(keys):
                twice = next(key for key in keys if keys.count(key) > 1)
                raise ValueError(f"{shortened(twice)} appears twice")
            return values

    try:
        return yaml.load(content, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"it is not valid YAML for a recipe: {text}") from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError('recipes in YAML need PyYAML: pip install "pyyaml>=5.1", or use to_dict') from error
    return yaml
