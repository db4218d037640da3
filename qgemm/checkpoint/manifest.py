"""``quantization_config`` in ``config.json``: which layers are quantized how, and which tensors are one.

```json
{"quant_method": "qgemm", "format_version": 1,
 "schemes": {"int8": {...}}, "layers": {"model.layers.0.mlp.up_proj": "int8", ...},
 "tied": {"lm_head.weight": "model.embed_tokens.weight"}, "report": {...}}
```

A change that an older qgemm would misread raises ``format_version``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgemm.checkpoint.errors import CheckpointError
from qgemm.scheme import QuantScheme, resolve_scheme

QUANT_METHOD = "qgemm"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """``layers``: the scheme of each quantized layer. ``tied``: names that stand for another's tensor, and that name.

    ``report``: what ``qgemm.report`` shows, or None.
    """

    layers: dict[str, QuantScheme]
    tied: dict[str, str]
    report: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "schemes": {scheme.name: scheme.to_dict() for scheme in self.layers.values()},
            "layers": {layer: scheme.name for layer, scheme in self.layers.items()},
            "tied": self.tied,
            **({} if self.report is None else {"report": self.report}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> Manifest:
        """The manifest in ``config``, which was read from ``path``; raises ``CheckpointError`` if it isn't one."""
        values = config.get("quantization_config")
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path} has no quantization_config: this is not a quantized checkpoint; "
                "load the float model, then call qgemm.quantize_model"
            )
        if values.get("quant_method") != QUANT_METHOD:
            raise CheckpointError(f"{path}: quant_method is {values.get('quant_method')!r}; only 'qgemm' is supported")
        version = values.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"{path}: format_version is {version!r}; this qgemm reads version {FORMAT_VERSION}. "
                "A newer checkpoint needs a newer qgemm"
            )
        layers, tied = _names(values, "layers", path), _names(values, "tied", path)
        schemes = _schemes(values, path)
        for layer, name in layers.items():
            if name not in schemes:
                raise CheckpointError(f"{path}: layer {layer} has scheme {name!r}, which schemes doesn't define")
        report = values.get("report")
        if report is not None and not isinstance(report, dict):
            raise CheckpointError(f"{path}: report must be an object, not {type(report).__name__}")
        return cls({layer: schemes[name] for layer, name in layers.items()}, tied, report)


def _names(values: dict[str, Any], field: str, path: Path) -> dict[str, str]:
    names = values.get(field)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{path}: {field} must be an object of names and names")
    return names


def _schemes(values: dict[str, Any], path: Path) -> dict[str, QuantScheme]:
    schemes = values.get("schemes")
    if not isinstance(schemes, dict):
        raise CheckpointError(f"{path}: schemes must be an object of names and schemes")
    try:
        return {name: resolve_scheme(QuantScheme.from_dict(scheme)) for name, scheme in schemes.items()}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: schemes holds one that this qgemm can't compute: {error}") from error
