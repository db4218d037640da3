"""``rotate`` gives what the modules of transformers' models give, bit for bit, on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgemm.numerics.formats import INT8

B, S, HEADS, KV_HEADS, D = 2, 5, 4, 2, 16
ops = torch.ops.qgemm
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def rotary(name: str, **config: Any) -> tuple[Any, nn.Module]:
    """The module that defines a family's attention, and its rotary embedding."""
    import importlib

    import transformers

    config_class = getattr(transformers, f"{name}Config")
    made = config_class(
        hidden_size=HEADS * D, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=1, head_dim=D,
        pad_token_id=0, **config,
    )  # fmt: skip
    modeling = importlib.import_module(f"transformers.models.{made.model_type}.modeling_{made.model_type}")
    return modeling, getattr(modeling, f"{name}RotaryEmbedding")(made)


def angles(embedding: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(7, 7 + S)[None] + 1000 * torch.arange(B)[:, None]
    return embedding(x, positions)


def halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def every_other(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # Cohere multiplies in float32 by what was rounded to the model's dtype.
    return cos[..., ::2].float(), sin[..., ::2].float()


def whole(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos, sin


Half = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
FAMILIES: list[tuple[str, dict[str, Any], Half, bool]] = [
    ("Llama", {}, halves, False),
    ("Qwen3", {}, halves, False),
    ("Olmo2", {}, halves, False),
    (
        "Phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        halves,
        False,
    ),
    ("Cohere", {}, every_other, True),
    (
        "Glm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        halves,
        True,
    ),
    ("GptOss", {}, whole, False),
]


@DTYPES
@pytest.mark.parametrize(("name", "config", "half", "interleaved"), FAMILIES, ids=[family[0] for family in FAMILIES])
def test_rotary_embedding(name: str, config: dict[str, Any], half: Half, interleaved: bool, dtype: torch.dtype) -> None:
    modeling, embedding = rotary(name, **config)
    qkv = torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D).to(dtype)
    q, k, v = (x.transpose(1, 2) for x in qkv.unflatten(-1, (-1, D)).split([HEADS, KV_HEADS, KV_HEADS], 2))
    cos, sin = angles(embedding, qkv)
    R = 2 * half(cos, sin)[0].shape[-1]
    if name == "Phi":  # whose attention itself takes a head apart
        parts = modeling.apply_rotary_pos_emb(q[..., :R], k[..., :R], cos, sin)
        wanted = [torch.cat((part, rest[..., R:]), -1) for part, rest in zip(parts, (q, k), strict=True)]
    else:
        wanted = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    assert (R < D) == bool(config)
    found = ops.rotate(qkv, *half(cos, sin), None, None, "rms", 1e-6, HEADS, KV_HEADS, interleaved)
    assert torch.equal(found[0], wanted[0].transpose(1, 2))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[2], v)
    assert all(x.is_contiguous() and x.dtype == dtype for x in found)


NORMS = [
    ("Qwen3", "Qwen3RMSNorm", "rms", "head"),
    ("Gemma3Text", "Gemma3RMSNorm", "rms_plus_one", "head"),
    ("Olmo2", "Olmo2RMSNorm", "rms_once", "all"),
    ("Olmoe", "OlmoeRMSNorm", "rms", "all"),
    ("Llama", "LayerNorm", "layer", "head"),
    ("StableLm", "StableLmLayerNormPerHead", "layer", "own"),
]


@DTYPES
@pytest.mark.parametrize(("name", "norm_class", "kind", "over"), NORMS, ids=[norm[0] for norm in NORMS])
def test_norms_of_queries_and_keys(name: str, norm_class: str, kind: str, over: str, dtype: torch.dtype) -> None:
    modeling, embedding = rotary("Llama")
    if name != "Llama":
        import importlib

        module = {"Gemma3Text": "gemma3"}.get(name, name.lower())
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    qkv = (torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D) * 3).to(dtype)
    heads = qkv.unflatten(-1, (-1, D)).split([HEADS, KV_HEADS, KV_HEADS], 2)
    weights, wanted = [], []
    for x, count in zip(heads[:2], (HEADS, KV_HEADS), strict=True):
        width = count * D if over == "all" else D
        weight = torch.randn((count, D) if over == "own" else width).to(dtype)
        weights.append(weight)
        if norm_class == "LayerNorm":
            norm = nn.LayerNorm(D, eps=1e-5, bias=False, dtype=dtype)
        elif over == "own":
            norm = modeling.StableLmLayerNormPerHead(D, count, eps=1e-5).to(dtype)
        else:
            norm = getattr(modeling, norm_class)(width, eps=1e-5).to(dtype)
        with torch.no_grad():
            for target, source in zip(norm.parameters(), weight if over == "own" else [weight], strict=True):
                target.copy_(source)
        shaped = x.flatten(2) if over == "all" else x.transpose(1, 2) if over == "own" else x
        out = norm(shaped).detach()
        wanted.append(out.view(x.shape) if over == "all" else out.transpose(1, 2) if over == "own" else out)
    cos, sin = angles(embedding, qkv)
    llama = rotary("Llama")[0]
    q, k = llama.apply_rotary_pos_emb(*(x.transpose(1, 2) for x in wanted), cos, sin)
    found = ops.rotate(qkv, *halves(cos, sin), *weights, kind, 1e-5, HEADS, KV_HEADS, False)
    if kind == "layer" and dtype != torch.float32:
        # nn.LayerNorm sums in another order for 16-bit types.
        torch.testing.assert_close(found[0], q.transpose(1, 2), rtol=0.02, atol=0.02)
        torch.testing.assert_close(found[1], k, rtol=0.02, atol=0.02)
        return
    assert torch.equal(found[0], q.transpose(1, 2))
    assert torch.equal(found[1], k)


@pytest.mark.parametrize("stored", [torch.bfloat16, INT8.storage], ids=str)
def test_a_cache_holds_what_a_model_would_store(stored: torch.dtype) -> None:
    modeling, embedding = rotary("Llama")
    qkv = torch.randn(B, S, (HEADS + 2 * KV_HEADS) * D).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in qkv.unflatten(-1, (-1, D)).split([HEADS, KV_HEADS, KV_HEADS], 2))
    cos, sin = angles(embedding, qkv)
    q, k = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    caches = [torch.zeros(B, KV_HEADS, 12, D, dtype=stored) for _ in range(2)]
    scales = [torch.ones(B, KV_HEADS, 12) if stored == INT8.storage else None for _ in range(2)]
    length = torch.tensor([4 + S], dtype=torch.int32)
    found = ops.rotate_and_store(
        qkv,
        *halves(cos, sin),
        None,
        None,
        "rms",
        1e-6,
        HEADS,
        KV_HEADS,
        False,
        "plain",
        "in turn",
        1.0,
        0.0,
        0.0,
        False,
        None,
        *caches,
        *scales,
        length,
    )
    assert torch.equal(found, q.transpose(1, 2))
    for wanted, cache, scale in zip((k, v), caches, scales, strict=True):
        assert not cache[:, :, :4].any()
        assert not cache[:, :, 4 + S :].any()
        rows = cache[:, :, 4 : 4 + S]
        if scale is None:
            assert torch.equal(rows, wanted)
        else:
            values, row_scale = ops.quantize_rows(wanted, None)
            assert torch.equal(rows, values)
            assert torch.equal(scale[:, :, 4 : 4 + S], row_scale)
