"""LoRA and DoRA on quantized layers, through PEFT: ``y = base(x) + scaling * B(A(dropout(x)))``, ``base`` quantized.

PEFT lets a config name a class for a kind of layer (``LoraConfig._register_custom_module``, described in its guide to
custom models). Importing this module makes every ``LoraConfig`` name ``LoraQuantLinear`` for ``LinearLayer``, including
a config read from an adapter's folder, where a user couldn't. ``import qgemm`` imports it as soon as PEFT is imported.
``peft_targets`` decides which layers an adapter gets.

Adapters are in float32; ``x`` is cast to their dtype, and the sum back to that of ``base(x)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import ALoraLinearVariant, DoraLinearVariant
from torch import Tensor, nn

from qgemm.integrations.peft_targets import refusal_of_experts, register_targets
from qgemm.nn import LinearLayer, QuantExperts
from qgemm.nn.linear_layer import is_conv1d

if not hasattr(Linear, "lora_variants"):  # earlier versions don't ask which variants a layer supports
    raise ImportError('LoRA over quantized layers needs PEFT 0.20 or later: pip install "peft>=0.20"')

# Other initializations use the float weight, which doesn't exist; some would replace it.
_STARTS = (True, False, "gaussian", "eva")


class _DoraQuantLinear(DoraLinearLayer):
    """PEFT's DoRA: rows of ``W + scaling * B @ A`` get norms that are trained; ``W`` is the dequantized weight."""

    def update_layer(self, *, base_layer: nn.Module, **kwargs: Any) -> None:
        super().update_layer(base_layer=_in_float(base_layer), **kwargs)

    def forward(self, x: Tensor, *, base_layer: nn.Module, base_result: Tensor | None = None, **kwargs: Any) -> Tensor:
        self.fan_in_fan_out = is_conv1d(base_layer)
        if base_result is None:  # with dropout: PEFT's product would keep the float weight for the backward
            base_result = base_layer(x)
        added: Tensor = super().forward(x, base_layer=_in_float(base_layer), base_result=base_result, **kwargs)
        return added


def _in_float(layer: nn.Module) -> nn.Module:
    return layer.float_linear(torch.float32).requires_grad_(False) if isinstance(layer, LinearLayer) else layer


class _DoraQuantVariant(DoraLinearVariant):
    @staticmethod
    def init(module: Linear, adapter_name: str, **kwargs: Any) -> None:  # type: ignore[override]
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        layer = _DoraQuantLinear(fan_in_fan_out=False)
        layer.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = layer


class LoraQuantLinear(Linear):
    """PEFT's LoRA layer over a ``LinearLayer`` of any scheme, whose parameters don't change."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        """Called by PEFT. Raises ``ValueError`` for most variants, and for starts from the float weight (PiSSA)."""
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

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the weight is ``[in_features, out_features]``: that of a Conv1D, once the model is dequantized."""
        return is_conv1d(self.get_base_layer())

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, value: bool) -> None:
        """PEFT sets what the config says of the float model."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter; raises as ``__init__`` does."""
        if config.init_lora_weights not in _STARTS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the float weight, and a quantized layer "
                'has none: use True, False, "gaussian" or "eva", or adapt the float model that model.dequantize() '
                "restores"
            )
        if getattr(config, "use_qalora", False):  # PEFT would ignore it
            raise ValueError("use_qalora is for PEFT's layers of GPTQ only: leave it out, or use nf4 for QLoRA")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA, DoRA and aLoRA; others need the float weight, or weren't compared with PEFT's on float layers."""
        return {(): None, ("use_dora",): _DoraQuantVariant, ("alora_invocation_tokens",): ALoraLinearVariant}

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """As in PEFT, for what ``lora_variants`` holds; raises ``ValueError`` for other variants."""
        try:
            return super().resolve_lora_variant(config=config, **kwargs)
        except ValueError as error:
            raise ValueError(
                f"on a quantized layer only plain LoRA, DoRA and aLoRA work: {error}; use one of these, or adapt the "
                "float model that model.dequantize() restores"
            ) from error

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As in PEFT, if ``model.dequantize()`` has put a float layer below; otherwise raises ``NotImplementedError``.

        The sum of a quantized weight and the adapter would have to be rounded again.
        """
        self.check_merges()
        magnitude: Any  # DoRA's
        for magnitude in self.lora_magnitude_vector.values():
            magnitude.fan_in_fan_out = self.fan_in_fan_out
        super().merge(safe_merge, adapter_names)

    def check_merges(self) -> None:
        """Raises ``NotImplementedError`` if the weight is quantized."""
        if isinstance(self.get_base_layer(), LinearLayer):
            raise NotImplementedError(
                "an adapter can't be merged into a quantized weight without rounding the sum again: keep it separate, "
                "or merge it into the float model, which model.dequantize() restores if it is one of transformers, and "
                "quantize the result"
            )

    def unmerge(self) -> None:
        """As ``merge``."""
        if isinstance(self.get_base_layer(), LinearLayer):
            raise NotImplementedError("a quantized layer has no merged adapters")
        super().unmerge()


class _NoneOnExperts(nn.Module):
    """What PEFT uses for experts, so that it raises, if ``peft_targets`` has not done so before."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        """Raises ``ValueError``."""
        assert isinstance(base_layer, QuantExperts)
        raise ValueError(refusal_of_experts(base_layer))


def _register() -> None:
    finish = LoraConfig.__post_init__
    finish = getattr(finish, "__wrapped__", finish)  # a notebook's autoreload runs this again

    @functools.wraps(finish)
    def finish_and_register(self: LoraConfig) -> None:
        finish(self)
        self._register_custom_module({LinearLayer: LoraQuantLinear, QuantExperts: _NoneOnExperts})

    LoraConfig.__post_init__ = finish_and_register  # type: ignore[method-assign]
    check = LoraModel._check_merge_allowed
    check = getattr(check, "__wrapped__", check)

    @functools.wraps(check)
    def check_every_layer(self: LoraModel) -> None:
        # Otherwise PEFT would have merged some layers in float when one refuses.
        check(self)
        for layer in self.modules():
            if isinstance(layer, LoraQuantLinear):
                layer.check_merges()

    LoraModel._check_merge_allowed = check_every_layer  # type: ignore[method-assign]


_register()
register_targets()
