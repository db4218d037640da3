"""LoRA on quantized layers, through PEFT: ``y = base(x) + scaling * B(A(dropout(x)))``, with ``base`` quantized.

PEFT lets a config name a class for a kind of layer (``LoraConfig._register_custom_module``, described in its guide to
custom models). Importing this module makes every ``LoraConfig`` name ``LoraQuantLinear`` for ``LinearLayer``, including
a config read from an adapter's folder, where a user couldn't. ``import qgemm`` imports it as soon as PEFT is imported.

Adapters are in float32; ``x`` is cast to their dtype, and the sum back to that of ``base(x)``.
"""

from __future__ import annotations

import functools
from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from qgemm.nn import LinearLayer, QuantExperts

if not hasattr(Linear, "lora_variants"):  # earlier versions don't ask which variants a layer supports
    raise ImportError('LoRA over quantized layers needs PEFT 0.20 or later: pip install "peft>=0.20"')

# Other initializations use the float weight, which doesn't exist; some would replace it.
_STARTS = (True, False, "gaussian", "eva")


class LoraQuantLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer over a ``LinearLayer`` of any scheme, whose parameters don't change."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        """Called by PEFT. Raises ``ValueError`` for variants that need the float weight, such as DoRA and PiSSA."""
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
        # True would mean that the weight is [in_features, out_features], as in a Conv1D; here it never is.
        self.fan_in_fan_out = False

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter; raises as ``__init__`` does."""
        if config.init_lora_weights not in _STARTS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the float weight, and a quantized layer "
                'has none: use True, False, "gaussian" or "eva"'
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Empty: every variant needs the float weight."""
        return {(): None}

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """Returns None for plain LoRA; raises ``ValueError`` for any variant."""
        try:
            return super().resolve_lora_variant(config=config, **kwargs)
        except ValueError as error:
            raise ValueError(f"a quantized layer takes plain LoRA only, no variant such as DoRA: {error}") from error

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As in PEFT, if ``model.dequantize()`` has put a float layer below; otherwise raises ``NotImplementedError``.

        The sum of a quantized weight and the adapter would have to be rounded again.
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
    """What PEFT uses for experts, so that it raises: otherwise PEFT would round the adapter like the weights."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        """Raises ``ValueError``."""
        assert isinstance(base_layer, QuantExperts)
        raise ValueError(
            f"an adapter can't be put on {type(base_layer).__name__}, whose weights are in {base_layer.scheme.name}: "
            "name the layers around the experts in target_modules, and no parameter of experts in target_parameters"
        )


def _register() -> None:
    finish = LoraConfig.__post_init__
    finish = getattr(finish, "__wrapped__", finish)  # a notebook's autoreload runs this again

    @functools.wraps(finish)
    def finish_and_register(self: LoraConfig) -> None:
        finish(self)
        self._register_custom_module({LinearLayer: LoraQuantLinear, QuantExperts: _NoneOnExperts})

    LoraConfig.__post_init__ = finish_and_register  # type: ignore[method-assign]


_register()
