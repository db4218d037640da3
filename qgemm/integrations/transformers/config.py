"""``QGemmConfig``: how ``from_pretrained`` should quantize a float model, and a description of a quantized one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from qgemm.arguments import shown
from qgemm.calibration.collect import as_calls
from qgemm.calibration.method import Method
from qgemm.calibration.observers import Observer
from qgemm.calibration.quantization import Quantization, are_batches
from qgemm.calibration.recipe import Recipe
from qgemm.calibration.result import Calibration
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import CONFIG_FILE
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.model.selection import Patterns, SchemeChoice


class QGemmConfig(QuantizationConfigMixin):
    """``quantization_config`` for ``from_pretrained``: how to quantize a float model while it is loaded.

    All arguments are those of ``qgemm.quantize_model``; ``scheme`` None means ``"int8"`` for a float model. With
    ``recipe``, or with batches as ``calibration``, the model is loaded in float, on the devices of the device map, and
    then quantized with these batches, which must be on its device. Otherwise each weight is quantized while it is read.

    A checkpoint that is already quantized, by qgemm or another library, runs in qgemm's layers. Then only ``scheme``
    (None keeps its own) and ``fuse`` may be given; other arguments are an error. The ``config.quantization_config`` of
    a quantized model has a ``manifest`` instead, which describes how each layer was quantized. Batches and ``fuse``
    aren't stored.
    """

    def __init__(
        self,
        scheme: SchemeChoice | None = None,
        *,
        skip: Patterns = None,
        include: Patterns = None,
        input_scales: Mapping[str, float | Tensor] | None = None,
        calibration: Calibration | Iterable[Any] | None = None,
        observer: str | Observer | None = None,
        recipe: Recipe | Sequence[Method] | None = None,
        fuse: bool = False,
    ) -> None:
        """``scheme``: None means ``"int8"``; layers quantized by another library then stay as they are.

        Raises ``ValueError`` for a scheme that can't be applied while a model loads, and ``ValueError`` and
        ``TypeError`` as ``quantize_model`` does for an unknown scheme and an invalid recipe or calibration.
        """
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.asked_scheme = scheme
        wanted = Quantization.of(
            "int8" if scheme is None else scheme,
            skip=skip,
            include=include,
            input_scales=input_scales,
            observer=observer,
            recipe=recipe,
        )
        wanted.check_data(calibration)
        self._take(wanted, calibration)
        self.fuse = fuse

    def _take(self, wanted: Quantization, calibration: Calibration | Iterable[Any] | None = None) -> None:
        self.quantization = wanted
        self.calibration = as_calls(calibration) if are_batches(calibration) else calibration
        if not self.loads_float:
            # A bias may arrive before or after its weight.
            wanted.check_folds_no_bias(
                "as weights are read: pass batches as calibration; the model is then loaded in float first"
            )
        self.manifest = None
        self.foreign = False

    @property
    def manifest(self) -> Manifest | None:
        """How each layer was quantized; None before. It isn't changed any more."""
        return self._manifest

    @manifest.setter
    def manifest(self, manifest: Manifest | None) -> None:
        # Encoder-decoders copy their config, and ask for its values, in every call that makes a cache.
        self._manifest, self._values = manifest, None if manifest is None else manifest.to_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> QGemmConfig:
        """A config with attributes of its own; their values are shared, because nothing changes them."""
        return copy.copy(self)

    @property
    def loads_float(self) -> bool:
        """Whether the model is first loaded in float, and then quantized."""
        return self.quantization.recipe is not None or are_batches(self.calibration)

    def for_quantized(self) -> QGemmConfig:
        """This config for a checkpoint quantized by another library; it sets ``foreign``."""
        found = copy.copy(self)
        found.foreign = True
        return found

    def for_own(self, stored: QGemmConfig) -> QGemmConfig:
        """The config ``stored`` in a checkpoint of qgemm's own, with this config's requests added.

        Raises ``ValueError`` for options that only apply to float models, and for several schemes.
        """
        self.check_for_quantized()
        self.one_scheme()
        found = copy.copy(stored)
        found.asked_scheme, found.quantization, found.fuse = self.asked_scheme, self.quantization, self.fuse
        return found

    def one_scheme(self) -> Any:
        """The scheme to convert the layers of a quantized checkpoint to; raises ``ValueError`` for several."""
        if isinstance(self.asked_scheme, Mapping):
            raise ValueError("scheme names patterns, but the checkpoint is quantized: pass one scheme for all, or none")
        return None if self.asked_scheme is None else self.quantization.schemes["*"]

    def check_for_quantized(self) -> None:
        """Raises ``ValueError`` if it has options that only apply to float models."""
        wanted = self.quantization
        given: dict[str, Any] = {"skip": wanted.skip, "include": wanted.include, "input_scales": wanted.input_scales}
        given |= {"recipe": wanted.recipe, "calibration": self.calibration, "observer": wanted.observer}
        if unfit := [name for name, value in given.items() if value]:
            raise ValueError(f"{unfit[0]} is for a float model, but the checkpoint is quantized: leave it out")

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> QGemmConfig:
        """The config of a quantized model."""
        config = cls()
        config.manifest = manifest
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Reads what ``to_dict`` gave, or the ``config.json`` of a quantized model; raises ``CheckpointError``."""
        if not isinstance(config_dict, Mapping):
            raise TypeError(f"config_dict is {shown(config_dict)}; it must be what to_dict returned")
        if "format_version" in config_dict or "layers" in config_dict:
            config = cls.from_manifest(Manifest.from_config({"quantization_config": config_dict}, Path(CONFIG_FILE)))
        else:
            values = {key: value for key, value in config_dict.items() if key != "quant_method"}
            try:
                config = cls()
                wanted = Quantization.from_dict(values)
                replace(wanted, observer=None).check_data(None)  # the observer was for batches, which aren't stored
                config._take(wanted)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(f"quantization_config isn't qgemm's: {error}") from error
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: the ``manifest``'s if there is one; otherwise the arguments, without ``calibration``."""
        if self._values is not None:
            return {**self._values}
        return {"quant_method": QUANT_METHOD, **self.quantization.to_dict()}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Makes ``dict(config)`` equal ``config.to_dict()``."""
        return iter(self.to_dict().items())

    def to_json_string(self, use_diff: bool = True) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"
