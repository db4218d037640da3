"""``quantization_config`` in ``config.json``: how each layer is quantized, and which tensors are tied.

```json
{"quant_method": "qgemm", "format_version": 2, "save": "8c3f0a91d2e47b56",
 "schemes": {"int8": {...}}, "layers": {"int8": ["model.layers.[0-79].mlp.up_proj", ...]},
 "tied": {"lm_head.weight": "model.embed_tokens.weight"}, "report": "qgemm_report.json"}
```

Packed rows don't show their length; for layers that have them, ``"in_features": {"4096": [names], ...}`` tells it.

``save`` is the save's id, which each of its files contains. A change that an older qgemm would misread raises
``format_version``. In version 1, ``layers`` had the scheme of each layer by name, ``report`` was the report itself, and
saves had no id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import SAVE_KEY, save_id
from qgemm.checkpoint.name_ranges import collapse, expand
from qgemm.nn import QuantLayer, WeightOnlyLinear
from qgemm.scheme import QuantScheme, resolve_scheme

QUANT_METHOD = "qgemm"
FORMAT_VERSION = 2
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Manifest:
    """``layers``: the scheme of each quantized layer. ``tied``: aliases of tensors, and the name that is stored.

    ``save``: the id of the save; None in version 1 and for a model that wasn't saved. ``report``: the content of
    ``qgemm.report`` in version 1, or the name of the file that contains it; None if there is neither. ``in_features``:
    for layers whose rows are packed.
    """

    layers: dict[str, QuantScheme]
    tied: dict[str, str]
    save: str | None = None
    report: dict[str, Any] | str | None = None
    in_features: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Mapping[str, QuantLayer], tied: dict[str, str], save: str | None = None) -> Manifest:
        """The manifest of a model's quantized ``layers``."""
        schemes = {name: layer.scheme for name, layer in layers.items()}
        packed = {name: layer for name, layer in layers.items() if isinstance(layer, WeightOnlyLinear)}
        widths = {name: layer.whole_in_features for name, layer in packed.items() if layer.form.bits == 4}
        return cls(schemes, tied, save, in_features=widths)

    def check_sizes(self, layers: Mapping[str, QuantLayer], path: Path) -> None:
        """Raises ``CheckpointError`` unless ``layers`` have the ``in_features`` in the config at ``path``."""
        for name, K in self.in_features.items():
            if (own := getattr(layers.get(name), "in_features", K)) != K:
                raise CheckpointError(f"{path}: {name} has rows of {K} values; the model's have {own}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        schemes = {scheme.name: scheme for scheme in self.layers.values()}
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            **({} if self.save is None else {SAVE_KEY: self.save}),
            "schemes": {name: scheme.to_dict() for name, scheme in schemes.items()},
            "layers": _collapsed({layer: scheme.name for layer, scheme in self.layers.items()}),
            **({"in_features": _collapsed(self.in_features)} if self.in_features else {}),
            "tied": self.tied,
            **({} if self.report is None else {"report": self.report}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> Manifest:
        """Parses the manifest in ``config``, read from ``path``; raises ``CheckpointError`` if it isn't one."""
        values = config.get("quantization_config")
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path} has no quantization_config: this is not a quantized checkpoint; "
                "load the float model, then call qgemm.quantize_model"
            )
        if values.get("quant_method") != QUANT_METHOD:
            raise CheckpointError(f"{path}: quant_method is {values.get('quant_method')!r}; only 'qgemm' is supported")
        version = values.get("format_version")
        if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
            raise CheckpointError(
                f"{path}: format_version is {version!r}; this qgemm reads versions 1 and {FORMAT_VERSION}. "
                "A newer checkpoint needs a newer qgemm"
            )
        layers = _names(values, "layers", path) if version == 1 else _expanded(values, "layers", "schemes", path)
        tied, schemes = _names(values, "tied", path), _schemes(values, path)
        for layer, name in layers.items():
            if name not in schemes:
                raise CheckpointError(f"{path}: layer {layer} has scheme {name!r}, which schemes doesn't define")
        report, kind = values.get("report"), dict if version == 1 else str
        if report is not None and not isinstance(report, kind):
            wanted = "an object" if version == 1 else "the name of a file"
            raise CheckpointError(f"{path}: report must be {wanted}, not {type(report).__name__}")
        widths = _widths(values, path)
        if unknown := widths.keys() - layers.keys():
            raise CheckpointError(f"{path}: in_features has {min(unknown)}, which isn't a quantized layer")
        own = {layer: schemes[name] for layer, name in layers.items()}
        return cls(own, tied, save_id(config, path), report, widths)


def _collapsed(keys: Mapping[str, object]) -> dict[str, list[str]]:
    """The layers by their ``keys``, as ``_expanded`` reads them."""
    layers: dict[str, list[str]] = {}
    for layer, key in keys.items():
        layers.setdefault(str(key), []).append(layer)
    return {key: collapse(names) for key, names in layers.items()}


def _names(values: dict[str, Any], field: str, path: Path) -> dict[str, str]:
    names = values.get(field)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{path}: {field} must map names to names")
    return names


def _expanded(values: dict[str, Any], field: str, what: str, path: Path) -> dict[str, str]:
    """The key of each layer, from a table that lists layers' names by key."""
    table = values.get(field)
    if not isinstance(table, dict) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in table.values()
    ):
        raise CheckpointError(f"{path}: {field} must map {what} to lists of names")
    layers: dict[str, str] = {}
    for key, names in table.items():
        try:
            expanded = expand(names)
        except ValueError as error:
            raise CheckpointError(f"{path}: {field} has {error}") from error
        for name in expanded:
            if name in layers:
                raise CheckpointError(f"{path}: {field} has {name} twice")
            layers[name] = key
    return layers


def _widths(values: dict[str, Any], path: Path) -> dict[str, int]:
    if "in_features" not in values:
        return {}
    widths = _expanded(values, "in_features", "numbers", path)
    if wrong := [key for key in widths.values() if not _NUMBER.fullmatch(key)]:
        raise CheckpointError(f"{path}: in_features has {wrong[0]!r}, which isn't a number of columns")
    return {name: int(key) for name, key in widths.items()}


def _schemes(values: dict[str, Any], path: Path) -> dict[str, QuantScheme]:
    schemes = values.get("schemes")
    if not isinstance(schemes, dict):
        raise CheckpointError(f"{path}: schemes must map names to schemes")
    try:
        return {name: resolve_scheme(QuantScheme.from_dict(scheme)) for name, scheme in schemes.items()}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: schemes has one that this version of qgemm doesn't support: {error}") from error
