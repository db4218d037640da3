"""The order of a layer's norms and branches, according to the norms' names or the layer's code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from qgemm.fusion.branches import code_of
from qgemm.nn.blocks.layer import Form


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms, and how the layer's parts follow one another."""

    attention: str = ""
    attention_out: str = ""
    mlp: str = ""
    mlp_out: str = ""
    form: Form = "in a row"

    @property
    def names(self) -> set[str]:
        """The names of the norms."""
        return {self.attention, self.attention_out, self.mlp, self.mlp_out} - {""}


NORMS = (
    Norms("input_layernorm", "", "post_attention_layernorm"),
    Norms("input_layernorm", "", "post_attention_layernorm", form="side by side"),
    Norms("input_layernorm", form="side by side"),
    Norms("ln_1", "", "ln_2"),
    Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    Norms("layer_norm1", "", "layer_norm2"),
    Norms("operator_norm", "", "ffn_norm"),
    Norms("input_layernorm", "", "pre_ff_layernorm"),
    Norms("self_attn_layer_norm", "", "final_layer_norm"),
    Norms("", "self_attn_layer_norm", "", "final_layer_norm", form="norms last"),
    Norms("", "sa_layer_norm", "", "output_layer_norm", form="norms last"),
    Norms("ln_attn", "", "ln_mlp", form="side by side"),
)


def orders_of_parts(layer: nn.Module, norms: Collection[str], mixer: str, mlp: str) -> list[Norms]:
    """The possible orders of ``norms`` with other names: the order in which the code of ``layer`` uses norms and parts.

    ``mixer``, ``mlp``: their names. If the layer itself has no MLP, the modules that contain its parts come in order.
    """
    if not mlp and "intermediate" in layer._modules:
        of_mixer, of_mlp = norms
        return [Norms(of_mixer, "", of_mlp), Norms("", of_mixer, "", of_mlp, form="norms last")]
    mixer, mlp = mixer.partition(".")[0], mlp or "fc1"
    parts = [name for name in code_of(layer).co_names if name in {*norms, mixer, mlp}]
    if {*parts} != {*norms, mixer, mlp} or parts.index(mixer) > parts.index(mlp):
        return []
    first, second = parts.index(mixer), parts.index(mlp)
    before, between, behind = parts[:first], parts[first + 1 : second], parts[second + 1 :]
    one, two, last = (each[0] if each else "" for each in (before, between, behind))
    # The code names a call before its arguments, so in mlp(norm(x)) the norm comes after.
    shape = len(before), len(between), len(behind)
    if shape == (1, 0, 0):
        return [Norms(one, form="side by side")]
    if shape == (2, 0, 0):
        return [Norms(before[0], "", before[1], form="side by side")]
    if shape == (1, 2, 1):
        return [Norms(one, between[0], between[1], last)]
    if shape == (0, 1, 1):
        nested = Norms(two, "", last)
        return [nested, Norms("", two, "", last), Norms("", two, "", last, form="norms last")]
    if shape == (1, 0, 1):
        return [Norms(one, "", last)]
    if shape == (0, 2, 0):
        return [Norms(two, "", between[1]), Norms("", two, between[1])]
    if shape == (0, 0, 1):
        return [Norms("", "", last)]
    if shape in ((1, 1, 0), (0, 1, 0)):
        return [Norms(one, "", two), Norms(one, "", two, form="side by side")]
    return []


def norms_of_cross(layer: nn.Module, norms: Collection[str], mixer: str, cross: str, mlp: str) -> tuple[str, str]:
    """The names of the norms before and after the attention ``cross`` to an encoder, in the code of ``layer``.

    It comes between ``mixer`` and ``mlp``. Each is empty if there is none.
    """
    mlp = mlp or "fc1"
    parts = [name for name in code_of(layer).co_names if name in {*norms, mixer, cross, mlp}]
    if not {mixer, cross, mlp} <= {*parts} or not parts.index(mixer) < parts.index(cross) < parts.index(mlp):
        return "", ""
    between = parts[parts.index(mixer) + 1 : parts.index(cross)]
    behind = parts[parts.index(cross) + 1 : parts.index(mlp)]
    if len(between) not in (1, 2) or len(behind) not in (1, 2):
        return "", ""
    return between[-1], behind[0] if len(behind) == 2 else ""


def is_of_other_form(layer: nn.Module, orders: Sequence[Norms], order: Norms) -> bool:
    """Whether ``layer`` states that its form isn't that of ``order``, where the norms' names fit several forms."""
    if len(orders) == 1:
        return False
    if hasattr(layer, "do_layer_norm_before"):
        return (order.form == "in a row") != layer.do_layer_norm_before
    return (order.form == "side by side") != getattr(layer, "use_parallel_residual", False) and (
        any(each.form == "side by side" for each in orders)
    )
