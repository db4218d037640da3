"""LoRA on quantized layers, through PEFT: ``y = base(x) + scaling * B(A(dropout(x)))``, with ``base`` quantized.

PEFT lets a config name a class of its own for a kind of layer (``LoraConfig._register_custom_module``, described in its
guide to custom models). Importing this module has every ``LoraConfig`` name ``LoraQuantLinear`` for ``LinearLayer``,
also one that is read from an adapter's folder, where a user couldn't. ``import qgemm`` imports it as soon as PEFT is.

Adapters are in float32; ``x`` is cast to their dtype, and the sum back to that of ``base(x)``.
"""

from __future__ import annotations

import functools
from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from qgemm.nn import LinearLayer, QuantExperts

if not hasattr(Linear, "lora_variants"):  # by which versions before don't ask what a layer takes
    raise ImportError('LoRA over quantized layers needs PEFT 0.20 or later: pip install "peft>=0.20"')

# Others start from the float weight, which isn't there; some would put another one in its place.
_STARTS = (True, False, "gaussian", "eva")


class LoraQuantLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer over a ``LinearLayer`` of any scheme, whose parameters stay as they are."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        """As PEFT calls it. Raises ``ValueError`` for what needs the float weight, such as DoRA and PiSSA."""
        if kwargs.get("parameter_name") is not None:
            raise ValueError(
                f"target_parameters names {kwargs['parameter_name']!r} of a {type(base_layer).__name__}, whose "
                "quantized weight can't be adapted by itself: name the layer in target_modules"
            )
        if getattr(base_layer, "shard", None) is not None:
            raise ValueError(
                f"{getattr(base_layer, 'layer_name', '') or 'a layer'} is split among processes, and an adapter isn't: "
                "put adapters on a model that is loaded without distributed_config"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)
        # Which says that the weight is [in_features, out_features], as in a Conv1D; never so here.
        self.fan_in_fan_out = False

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter; raises as ``__init__``."""
        if config.init_lora_weights not in _STARTS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the float weight, and a quantized layer "
                'has none: use True, False, "gaussian" or "eva"'
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """The one variant that needs no float weight: none."""
        return {(): None}

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """None, for plain LoRA; raises ``ValueError`` for any variant."""
        try:
            return super().resolve_lora_variant(config=config, **kwargs)
        except ValueError as error:
            raise ValueError(f"a quantized layer takes plain LoRA only, no variant such as DoRA: {error}") from error

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT, once ``model.dequantize()`` has put a float layer below; else raises ``NotImplementedError``.

        The sum of a quantized weight and the adapter would have to be rounded anew.
        """
        if isinstance(self.get_base_layer(), LinearLayer):
            raise NotImplementedError(
                "an adapter can't be merged into a quantized weight without rounding the sum again: keep it separate, "
                "or call model.dequantize(), merge it into the float model, and quantize the result"
            )
        super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        """As ``merge``."""
        if isinstance(self.get_base_layer(), LinearLayer):
            raise NotImplementedError("a quantized layer has no merged adapters")
        super().unmerge()


class _NoneOnExperts(nn.Module):
    """What PEFT takes for experts, so that it raises: by itself it would round the adapter as the weights are."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        """Raises ``ValueError``."""
        assert isinstance(base_layer, QuantExperts)
        raise ValueError(
            f"an adapter can't be put on {type(base_layer).__name__}, whose weights are in {base_layer.scheme.name}: "
            "name the layers around the experts in target_modules, and no parameter of experts in target_parameters"
        )


def _register() -> None:
    finish = LoraConfig.__post_init__
    finish = getattr(finish, "__wrapped__", finish)  # a notebook's autoreload comes here again

    @functools.wraps(finish)
    def finish_and_register(self: LoraConfig) -> None:
        finish(self)
        self._register_custom_module({LinearLayer: LoraQuantLinear, QuantExperts: _NoneOnExperts})

    LoraConfig.__post_init__ = finish_and_register  # type: ignore[method-assign]


_register()
