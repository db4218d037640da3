"""``QGemmConfig``: what ``from_pretrained`` is to do to a float model, and what was done to a quantized one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from qgemm.arguments import as_scales, shown
from qgemm.calibration.collect import check_batches, no_batch
from qgemm.calibration.method import Method
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import CONFIG_FILE
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.model.selection import Patterns, SchemeChoice, as_patterns, resolve_schemes, shown_pattern
from qgemm.nn import linear_class


class QGemmConfig(QuantizationConfigMixin):
    """``quantization_config`` for ``from_pretrained``: how to quantize a float model as it is loaded.

    All arguments are those of ``qgemm.quantize_model``. With ``recipe``, or batches as ``calibration``, the model is
    loaded in float, where the device map puts it, and then quantized on these batches, which must be there too. Else
    each weight is quantized as it is read. Once a model is quantized, its ``config.quantization_config`` has
    ``manifest`` instead, which says what was done to every layer. Batches are stored nowhere.
    """

    def __init__(
        self,
        scheme: SchemeChoice = "int8",
        *,
        skip: Patterns = None,
        include: Patterns = None,
        input_scales: Mapping[str, float | Tensor] | None = None,
        recipe: Recipe | Sequence[Method] | None = None,
        calibration: Calibration | Iterable[Any] | None = None,
    ) -> None:
        """Raises ``ValueError`` for an unknown scheme, or one that can't be applied as a model loads.

        Raises ``TypeError`` and ``ValueError`` as ``quantize_model`` for a recipe or a calibration that is none.
        """
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.schemes = resolve_schemes(scheme)
        self.recipe = recipe if recipe is None or isinstance(recipe, Recipe) else Recipe(recipe)
        if calibration is not None and not isinstance(calibration, Calibration):
            check_batches(calibration)
            calibration = list(calibration)
            if not calibration:
                raise no_batch()
        self.calibration = calibration
        if input_scales is not None and (calibration is not None or recipe is not None):
            raise ValueError("input_scales say what the scales are, and so do a recipe and calibration: pass one")
        if self.recipe is not None and isinstance(calibration, Calibration):
            raise ValueError("calibration is what was seen before, but a recipe runs on the data itself: pass batches")
        for each in self.schemes.values():
            if each is not None and linear_class(each).folds_bias and not self.loads_float:
                # A bias may come before its weight, or after.
                raise ValueError(
                    f"scheme {each.name!r} changes biases, which can't be done as weights are read: pass batches as "
                    "calibration, for which the model is loaded in float first"
                )
        self.skip, self.include = as_patterns("skip", skip), as_patterns("include", include)
        self.input_scales = as_scales(input_scales)
        self.manifest: Manifest | None = None

    @property
    def loads_float(self) -> bool:
        """Whether the model is loaded in float, and quantized once it is there."""
        return self.recipe is not None or isinstance(self.calibration, list)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> QGemmConfig:
        """The config of a model that is quantized."""
        config = cls()
        config.manifest = manifest
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """What ``to_dict`` gave, or ``config.json`` of a quantized model holds; raises ``CheckpointError``."""
        if not isinstance(config_dict, Mapping):
            raise TypeError(f"config_dict is {shown(config_dict)}; it must be what to_dict gave")
        if "format_version" in config_dict or "layers" in config_dict:
            config = cls.from_manifest(Manifest.from_config({"quantization_config": config_dict}, Path(CONFIG_FILE)))
        else:
            values = {key: value for key, value in config_dict.items() if key != "quant_method"}
            try:
                if isinstance(values.get("scheme"), list):
                    values["scheme"] = dict(values["scheme"])
                if values.get("recipe") is not None:
                    values["recipe"] = Recipe.from_dict(values["recipe"])
                config = cls(**values)
            except (ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"quantization_config is none of qgemm's: {error}") from error
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: those of ``manifest`` once there is one; before, without ``calibration``."""
        if self.manifest is not None:
            return self.manifest.to_dict()
        scales = None if self.input_scales is None else {k: float(v) for k, v in self.input_scales.items()}
        # Pairs, since their order counts, which JSON promises of lists alone.
        schemes = [[shown_pattern(pattern), each and each.name] for pattern, each in self.schemes.items()]
        return {
            "quant_method": QUANT_METHOD,
            "scheme": schemes[0][1] if [pattern for pattern, _ in schemes] == ["*"] and schemes[0][1] else schemes,
            "skip": [shown_pattern(pattern) for pattern in self.skip],
            "include": [shown_pattern(pattern) for pattern in self.include],
            "input_scales": scales,
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """``dict(config)`` is ``config.to_dict()``."""
        return iter(self.to_dict().items())

    def to_json_string(self, use_diff: bool = True) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"
