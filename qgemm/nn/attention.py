"""``QuantMultiheadAttention``: ``nn.MultiheadAttention`` whose projections are separate, quantizable layers.

``out_proj(softmax(q @ k.T / sqrt(head_dim) + mask) @ v)`` for each head, with ``q, k, v = in_proj(x)``. PyTorch's
module holds the weights of queries, keys and values as parameters and hands them to functions. ``opened_attention``
turns it into a module whose projections are ``nn.Linear``s that hold the same parameters. Then everything that handles
linear layers (surveys, calibration, methods, checkpoints) handles these by name. The change is in place, so that hooks,
attributes and references to the module stay valid.

PyTorch's encoder layers also have a fused path, which reads all weights of a layer at once. It is switched off where
anything is quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from qgemm.nn.linear import QuantLinear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.quant_layer import has_quant_layers, traced_as_leaf
from qgemm.ops import quant_linear

_PACKED = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""A module's lists of hooks that read or change its state dictionary."""


def _packed_weight(child: str) -> property:
    def weight(self: nn.Module) -> Tensor | None:
        layer = self._modules.get(child)
        if isinstance(layer, LinearLayer):
            return layer.float_linear().weight.detach()
        return None if layer is None else layer.get_parameter("weight")

    return property(weight, doc=f"What the weight of ``{child}`` stands for, made at each read; None without it.")


class QuantMultiheadAttention(nn.Module):
    """The quantized ``nn.MultiheadAttention``, with the same attributes and the same call.

    - ``in_proj``: queries, keys and values in one layer, ``[3 * embed_dim, embed_dim]``. If ``kdim`` or ``vdim``
      differs, there are ``q_proj``, ``k_proj`` and ``v_proj`` instead.
    - ``out_proj``: ``[embed_dim, embed_dim]``.
    - ``bias_k``, ``bias_v``: ``[1, 1, embed_dim]``, from ``add_bias_kv``; or None.

    Code that reads the packed ``in_proj_weight`` or ``in_proj_bias`` gets float ones.
    """

    in_proj_weight = _packed_weight("in_proj")
    q_proj_weight = _packed_weight("q_proj")
    k_proj_weight = _packed_weight("k_proj")
    v_proj_weight = _packed_weight("v_proj")

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: nn.Module
    closes = False
    """Whether it becomes an ``nn.MultiheadAttention`` again as soon as all of its projections are ``nn.Linear``s."""

    def __setattr__(self, name: str, value: Any) -> None:
        """As in ``nn.Module``; with ``closes``, a layer in the place of an adapter may be the last that was missing."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Linear) and self.closes:
            self.close_if_plain()

    def close_if_plain(self) -> None:
        """Turns it back into ``nn.MultiheadAttention`` if all of its projections are ``nn.Linear``s."""
        if all(type(layer) is nn.Linear for layer in self._modules.values()):
            vars(self).pop("closes", None)
            _close(self)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The bias of queries, keys and values, ``[3 * embed_dim]``; or None."""
        layers: list[Any] = [layer for name, layer in self._modules.items() if name != "out_proj"]
        biases: list[Any] = [layer.float_bias() if isinstance(layer, LinearLayer) else layer.bias for layer in layers]
        whole: Tensor | None = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
        return whole

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what ``nn.MultiheadAttention`` does: the output, and the attention's weights if ``need_weights``.

        ``query``: ``[L, E]``, ``[L, N, E]``, or with ``batch_first`` ``[N, L, E]``; ``key`` and ``value`` likewise, of
        length ``S``. ``key_padding_mask``: ``[N, S]`` or ``[S]``. ``attn_mask``: ``[L, S]`` or
        ``[N * num_heads, L, S]``. True in a mask leaves a key out; floats are added. ``is_causal`` says that
        ``attn_mask`` is the causal one.
        """
        if isinstance(query, Proxy):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            traced: tuple[Tensor, Tensor | None] = traced_as_leaf(self, query, key, value, *options)
            return traced
        batch = _check_inputs(query, key, value, self.batch_first)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is only a hint about attn_mask: pass the causal mask too")
        q, k, v = (_batch_first(x, self.batch_first) for x in self._project(query, key, value))
        mask = self._mask(key_padding_mask, attn_mask, query.dim() == 3, q, k)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(batch, -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(batch, -1, -1)], dim=1)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - mask.shape[3]))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            out, weights = self._attend_with_weights(q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        elif is_causal and key_padding_mask is None:  # in this case PyTorch hides added keys too
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        if query.dim() == 2:
            rows = out.squeeze(0).transpose(0, 1)
            weights = None if weights is None else weights.squeeze(0)
        else:
            rows = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return self.out_proj(rows.flatten(-2)), weights

    def _attend_with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        return weights @ v, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each in the shape of its input; inputs that are the same tensor share a product."""
        if "in_proj" not in self._modules:
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)  # type: ignore[operator]
        E, layer = self.embed_dim, self.get_submodule("in_proj")
        if query is key and key is value:
            q, k, v = layer(query).chunk(3, dim=-1)
        elif key is value:
            q = _some_rows(layer, query, slice(0, E))
            k, v = _some_rows(layer, key, slice(E, 3 * E)).chunk(2, dim=-1)
        elif query is key:
            q, k = _some_rows(layer, query, slice(0, 2 * E)).chunk(2, dim=-1)
            v = _some_rows(layer, value, slice(2 * E, 3 * E))
        else:
            q, k, v = (_some_rows(layer, x, slice(i * E, i * E + E)) for i, x in enumerate((query, key, value)))
        return q, k, v

    def _mask(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_batched: bool, q: Tensor, k: Tensor
    ) -> Tensor | None:
        """Both masks as one that is added to the scores ``[N, H, L, S]``, and expands to their shape."""
        (N, L, _), S, H, mask = q.shape, k.shape[1], self.num_heads, None
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (L, S), (N * H, L, S))
            mask = _added(attn_mask, q.dtype).view((N, H, L, S) if attn_mask.dim() == 3 else (1, 1, L, S))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (N, S) if is_batched else (S,))
            padding = _added(key_padding_mask, q.dtype).view(N, 1, 1, S)
            mask = padding if mask is None else mask + padding
        return mask

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> int:
    """The batch size, 1 for inputs without a batch; raises ``ValueError`` for inputs that don't fit together."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("query, key or value is a nested tensor: pad it, and pass key_padding_mask")
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        dims = f"{query.dim()}, {key.dim()} and {value.dim()}"
        raise ValueError(f"query, key and value have {dims} dimensions; they must all have 2, or all 3")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key is {list(key.shape)} and value {list(value.shape)}; all but the last must be the same")
    if query.dim() == 2:
        return 1
    axis = 0 if batch_first else 1
    if query.shape[axis] != key.shape[axis]:
        raise ValueError(f"query has a batch of {query.shape[axis]} and key one of {key.shape[axis]}: they must agree")
    return query.shape[axis]


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; it must be bool, or float to be added")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} is {list(mask.shape)}; it must be {' or '.join(str(list(each)) for each in shapes)}")


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)


def _batch_first(x: Tensor, batch_first: bool) -> Tensor:
    """``[N, L, E]``."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def _some_rows(layer: nn.Module, x: Tensor, rows: slice) -> Tensor:
    """``layer(x)[..., rows]``; for an int8 layer, only these rows of the weight are multiplied."""
    # Hooks, and layers that others put in its place, must see the whole call.
    called = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if type(layer) is not QuantLinear or called:
        out: Tensor = layer(x)
        return out[..., rows]
    weight, scale, bias, input_scale = map(layer.stored, layer.operands)
    return quant_linear(x, weight[rows], scale[rows], None if bias is None else bias[rows], input_scale)


def why_closed(module: nn.Module) -> str:
    """Why ``opened_attention`` leaves an ``nn.MultiheadAttention`` as it is; empty if it opens it."""
    if type(module) is not nn.MultiheadAttention:
        return "a subclass of nn.MultiheadAttention, which may compute something else"
    if hasattr(module, "_hf_hook") or hasattr(module.out_proj, "_hf_hook"):
        return "accelerate moves its packed weights: quantize the model before that"
    if "forward" in vars(module):
        return "its forward was replaced"
    if any(vars(module)[hooks] for hooks in STATE_DICT_HOOKS):
        return "it has state-dict hooks, which know its packed weights"
    if set(module._parameters) - {"bias_k", "bias_v"} != set(_PACKED):
        return "its weights are computed from others (weight norm, spectral norm, pruning)"
    if type(module.out_proj) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return f"its out_proj is a {type(module.out_proj).__name__}"
    return ""


@contextmanager
def opened_attention(model: nn.Module, layers: Iterable[str] | None = None) -> Iterator[None]:
    """Inside, each ``nn.MultiheadAttention`` of ``model`` is a ``QuantMultiheadAttention``, and no fused path is taken.

    At the end, attention without a quantized layer is closed again. ``layers``: if given, only attention that holds one
    of these is opened; the names are those in a model whose attention is open.
    """
    holders = None if layers is None else {name.rpartition(".")[0] for name in layers}
    closed = {
        module: (module.in_proj_bias, type(module.out_proj))
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention) and not why_closed(module)
        if holders is None or name in holders
    }
    fused = [(module, name, getattr(module, name, None)) for module, name, _ in _fused_paths(model)]
    try:
        for module in closed:
            _open(module)
        for holder, name, never in _fused_paths(model):
            setattr(holder, name, never)
        yield
    finally:
        for module, (bias, out_proj) in closed.items():
            if not has_quant_layers(module):
                _close(module, bias, out_proj)
            else:
                _separate_biases(module)
        for holder, name, value in fused:
            if not has_quant_layers(holder):
                setattr(holder, name, value)


def close_attention(model: nn.Module) -> None:
    """Turns attention back into ``nn.MultiheadAttention`` where its projections are float layers.

    Where one of them has an adapter, this happens once the adapter is merged or taken off.
    """
    for module in model.modules():
        if isinstance(module, QuantMultiheadAttention) and not has_quant_layers(module):
            module.closes = True
            module.close_if_plain()


def _fused_paths(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Modules with a path that reads all their layers' weights; the attribute that enables it; its value for never."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            yield module, "activation_relu_or_gelu", 0
        elif isinstance(module, nn.TransformerEncoder):
            yield module, "use_nested_tensor", False


def _open(attention: nn.MultiheadAttention) -> None:
    bias = attention.in_proj_bias
    if attention.in_proj_weight is not None:
        projections = {"in_proj": _linear(attention.in_proj_weight, bias)}
    else:
        weights = [attention.get_parameter(f"{which}_proj_weight") for which in "qkv"]
        # Views: changing such a bias in place changes the module's own.
        biases = (
            [None] * 3 if bias is None else [nn.Parameter(part, bias.requires_grad) for part in bias.detach().chunk(3)]
        )
        projections = {f"{which}_proj": _linear(*pair) for which, *pair in zip("qkv", weights, biases, strict=True)}
    for name in _PACKED:
        setattr(attention, name, None)
    out_proj = attention._modules.pop("out_proj")
    assert out_proj is not None
    for name, layer in {**projections, "out_proj": out_proj}.items():
        attention.add_module(name, layer.train(attention.training))
    out_proj.__class__ = nn.Linear
    # Encoder layers check this before they take their fused path.
    attention._qkv_same_embed_dim = False
    attention.__class__ = QuantMultiheadAttention  # type: ignore[assignment]


def _separate_biases(attention: nn.Module) -> None:
    """Gives the biases that ``_open`` made as views memory of their own: safetensors refuses parts of one storage."""
    for layer in attention.children():
        bias = layer._parameters.get("bias")
        if bias is not None and bias.untyped_storage().nbytes() != bias.nbytes:
            layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta", weight.dtype)
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def _close(
    attention: Any, bias: nn.Parameter | None = None, out_proj: type[nn.Module] = NonDynamicallyQuantizableLinear
) -> None:
    """Undoes ``_open``. ``bias``: the former ``in_proj_bias``; None for the layers'. ``out_proj``: its class."""
    own = attention.in_proj_bias if bias is None else bias
    attention.__class__ = nn.MultiheadAttention
    layers: dict[str, Any] = dict(attention._modules)
    layers.pop("out_proj").__class__ = out_proj
    for name, layer in layers.items():
        delattr(attention, name)
        setattr(attention, f"{name}_weight", layer.weight)
    attention._qkv_same_embed_dim = "in_proj" in layers
    attention.in_proj_bias = own if own is None or isinstance(own, nn.Parameter) else nn.Parameter(own.detach())
