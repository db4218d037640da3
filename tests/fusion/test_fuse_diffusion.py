"""Fused blocks of diffusers' diffusion transformers: the bits of the unfused model, and what they leave to it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from qgemm import fuse, fusion_report, load_quantized, quantize_model, save_quantized, unfuse
from qgemm.nn.blocks import diffusion, diffusion_joint
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.fused_module import FusedModule

diffusers = pytest.importorskip("diffusers")

HEADS = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64}
ROTARY = {"guidance_embeds": False, "axes_dims_rope": (8, 12, 12)}
TEXT = 5  # tokens
Inputs = dict[str, Any]


def flux(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "in_channels": 16, "pooled_projection_dim": 16}
    model = diffusers.FluxTransformer2DModel(**{**HEADS, **ROTARY, **sizes, **settings})
    ids = torch.tensor([[0, row, column] for row in range(3) for column in range(4)]).to(dtype)
    inputs = {
        "hidden_states": random(2, 12, 16), "encoder_hidden_states": random(2, TEXT, 64), "img_ids": ids,
        "pooled_projections": random(2, 16), "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip
    return ready(model, inputs, dtype)


def flux2(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "in_channels": 16, "timestep_guidance_channels": 16}
    rotary = {"guidance_embeds": False, "axes_dims_rope": (8, 8, 8, 8)}
    model = diffusers.Flux2Transformer2DModel(**{**HEADS, **rotary, **sizes})
    ids = torch.tensor([[0, row, column, 0] for row in range(3) for column in range(4)]).float()
    inputs = {
        "hidden_states": random(2, 12, 16), "encoder_hidden_states": random(2, TEXT, 64), "img_ids": ids,
        "txt_ids": torch.arange(4.0 * TEXT).view(TEXT, 4), "guidance": None,
    }  # fmt: skip
    return ready(model, inputs, dtype)


def qwen(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 2, "in_channels": 16, "out_channels": 4}
    model = diffusers.QwenImageTransformer2DModel(**{**HEADS, **ROTARY, **sizes, **settings})
    mask = torch.arange(TEXT) < torch.tensor([[TEXT], [3]])
    inputs = {
        "hidden_states": random(2, 12, 16), "encoder_hidden_states": random(2, TEXT, 64),
        "encoder_hidden_states_mask": mask, "img_shapes": [[(1, 3, 4)]] * 2,
    }  # fmt: skip
    return ready(model, inputs, dtype)


def sd3(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"sample_size": 8, "num_layers": 2, "caption_projection_dim": 64, "pooled_projection_dim": 16}
    model = diffusers.SD3Transformer2DModel(**{**HEADS, **sizes, "pos_embed_max_size": 8, **settings})
    inputs = {
        "hidden_states": random(2, 16, 8, 8), "encoder_hidden_states": random(2, TEXT, 64),
        "pooled_projections": random(2, 16),
    }  # fmt: skip
    return ready(model, inputs, dtype)


def hunyuan_video(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1}
    others = {"text_embed_dim": 24, "pooled_projection_dim": 16, "in_channels": 4, "out_channels": 4}
    heads = {"num_attention_heads": 2, "attention_head_dim": 32, "rope_axes_dim": (8, 12, 12)}
    model = diffusers.HunyuanVideoTransformer3DModel(guidance_embeds=False, **sizes, **others, **heads)
    inputs = {
        "hidden_states": random(2, 4, 2, 2, 3), "encoder_hidden_states": random(2, TEXT, 24),
        "encoder_attention_mask": torch.arange(TEXT) < torch.tensor([[TEXT], [3]]),
        "pooled_projections": random(2, 16),
    }  # fmt: skip
    return ready(model, inputs, dtype)


def wan(dtype: torch.dtype = torch.float32, by_token: bool = False, **settings: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 128, "num_layers": 2}
    model = diffusers.WanTransformer3DModel(num_attention_heads=2, attention_head_dim=32, **sizes, **settings)
    inputs = {"hidden_states": random(2, 4, 3, 4, 4), "encoder_hidden_states": random(2, TEXT, 24)}
    if by_token:
        inputs["timestep"] = torch.rand(2, 12)
    return ready(model, inputs, dtype)


def wan_with_image(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    model, inputs = wan(dtype, image_dim=16, added_kv_proj_dim=64)
    of_text, of_image = random(2, 512, 24).to(dtype), random(2, 3, 16).to(dtype)
    return model, {**inputs, "encoder_hidden_states": of_text, "encoder_hidden_states_image": of_image}


def pixart(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 2, "sample_size": 8, "in_channels": 4, "caption_channels": 24, "cross_attention_dim": 64}
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, **sizes, norm_type="ada_norm_single"
    )
    inputs = {
        "hidden_states": random(2, 4, 8, 8), "encoder_hidden_states": random(2, TEXT, 24), "timestep": torch.ones(2),
        "encoder_attention_mask": (torch.arange(TEXT) < torch.tensor([[TEXT], [3]])).float(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return ready(model, inputs, dtype)


def dit() -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "sample_size": 8, "num_attention_heads": 2, "attention_head_dim": 32}
    return ready(diffusers.DiTTransformer2DModel(**sizes), {}, torch.float32)


def sdxl(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"block_out_channels": (32,), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 48}
    sizes |= {"attention_head_dim": 2, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}
    kinds = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",), "mid_block_type": None}
    kinds |= {"addition_embed_type": "text_time", "use_linear_projection": True, "transformer_layers_per_block": 2}
    model = diffusers.UNet2DConditionModel(**{**sizes, **kinds, **settings})
    of_text = {"text_embeds": random(2, 16).to(dtype), "time_ids": random(2, 6).to(dtype)}
    inputs = {"sample": random(2, 4, 4, 4), "encoder_hidden_states": random(2, TEXT, 48), "added_cond_kwargs": of_text}
    return ready(model, inputs, dtype)


FAMILIES: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {
    "flux": flux,
    "flux2": flux2,
    "qwen": qwen,
    "sd3": sd3,
    "sd3.5": lambda dtype=torch.float32: sd3(dtype, qk_norm="rms_norm"),
    "sd3.5-medium": lambda dtype=torch.float32: sd3(dtype, qk_norm="rms_norm", dual_attention_layers=(0,)),
    "hunyuan-video": hunyuan_video,
    "wan": wan,
    "wan-tokens": lambda dtype=torch.float32: wan(dtype, by_token=True),
    "wan-image": wan_with_image,
    "pixart": pixart,
    "sdxl": sdxl,
    "sd1.5": lambda dtype=torch.float32: sdxl(dtype, use_linear_projection=False),
}
FUSED = {"sd3": 1, "sd3.5": 1, "sd3.5-medium": 1}  # blocks; 2 of the others


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def ready(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """In eval mode, with weights of which every block's share of the output shows."""
    for parameter in model.parameters():
        parameter.data.normal_(std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.5)
    inputs.setdefault("timestep", torch.tensor([0.3, 0.7]))
    given = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}
    model.to(dtype).eval()
    kept = model._keep_in_fp32_modules or ()  # as from_pretrained does
    for module in model.modules():
        for name, child in module.named_children():
            if name in kept:
                child.float()
        for name, parameter in module.named_parameters(recurse=False):
            if name in kept:
                parameter.data = parameter.data.float()
    return model, {**given, "return_dict": False}


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(fused_of(module), FusedModule)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the blocks that are computed by their fused forms, in order."""
    seen: list[str] = []
    operands = diffusion._operands

    def see(block: nn.Module, *others: Any) -> Any:
        found = operands(block, *others)
        if found is not None:
            seen.append(type(block).__name__)
        return found

    monkeypatch.setattr(diffusion, "_operands", see)
    return seen


@pytest.mark.slow(quick=["flux-dtype1", "wan-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_blocks_have_the_bits_of_the_model(family: str, dtype: torch.dtype, computed: list[str]) -> None:
    model, inputs = FAMILIES[family](dtype)
    expected = output(quantize_model(model), inputs)
    fuse(model)
    records = fusion_report(model).fused
    assert len(records) == FUSED.get(family, 2) == len(blocks_of(model))
    assert all(record.parts == ("attention", "mlp") and record.error is not None for record in records)
    found = output(model, inputs)
    assert len(computed) == len(records)
    if dtype == torch.float32:  # whose norms add in another order
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow(quick=["int4-32"])
@pytest.mark.parametrize("scheme", ["int4-32", "fp8", "fp8-block", "int8-static", "int8-weight"])
def test_other_schemes(scheme: str, computed: list[str]) -> None:
    model, inputs = flux(torch.bfloat16, attention_head_dim=64, axes_dims_rope=(16, 24, 24))
    calibration = {"calibration": [inputs]} if scheme == "int8-static" else {}
    quantize_model(model, scheme, **calibration)
    expected = output(model, inputs)
    assert len(fusion_report(fuse(model)).fused) == 2
    found = output(model, inputs)
    assert len(computed) == 2
    assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_what_needs_the_class_goes_to_it(computed: list[str]) -> None:
    model, inputs = flux()
    quantize_model(model, fuse=True)
    expected = output(model, inputs)
    assert len(computed) == 2
    computed.clear()

    with_gradient = {**inputs, "hidden_states": inputs["hidden_states"].clone().requires_grad_()}
    model(**with_gradient)[0].sum().backward()
    assert with_gradient["hidden_states"].grad.abs().sum() > 0
    model.train()
    output(model, inputs)
    model.eval()
    output(model, {**inputs, "joint_attention_kwargs": {"unknown": torch.ones(2)}})
    first = model.transformer_blocks[0]
    processor, first.attn.processor = first.attn.processor, type("Other", (type(first.attn.processor),), {})()
    with torch.autocast("cpu", torch.bfloat16):
        output(model, inputs)
    assert not computed
    output(model, inputs)
    assert computed == ["FluxSingleTransformerBlock"]
    first.attn.processor = processor
    seen: list[nn.Module] = []
    handle = first.ff.net[2].register_forward_hook(lambda module, args, out: seen.append(module))
    output(model, inputs)
    assert len(seen) == 1
    handle.remove()
    computed.clear()
    assert torch.equal(output(model, inputs), expected)
    assert len(computed) == 2


def assert_call(block: nn.Module, given: dict[str, Any], is_fused: bool, computed: list[str]) -> None:
    """The block computes what its class does, by the fused functions or not."""
    had = len(computed)
    with torch.no_grad():
        torch.testing.assert_close(block(**given), type(block).forward(block, **given), rtol=1e-4, atol=1e-4)
    assert len(computed) - had == is_fused


def test_calls_of_wans_block_that_its_class_computes(computed: list[str]) -> None:
    block = quantize_model(wan_with_image()[0], fuse=True).blocks[0]
    angles = torch.rand(2, 1, 12, 1, 32).repeat_interleave(2, dim=-1)[..., :32].unbind()
    known = {"hidden_states": random(2, 12, 64), "encoder_hidden_states": random(2, 515, 64), "temb": random(2, 6, 64)}
    for change, is_fused in (
        ({"rotary_emb": angles}, True),
        ({"rotary_emb": None}, True),
        ({"temb": random(1, 6, 64), "rotary_emb": angles}, False),
        ({"rotary_emb": tuple(each.double() for each in angles)}, False),
        ({"encoder_hidden_states": known["encoder_hidden_states"][:, 3:], "rotary_emb": angles}, False),
    ):
        assert_call(block, {**known, **change}, is_fused, computed)


def test_calls_of_blocks_of_stable_diffusion_xl_that_their_class_computes(computed: list[str]) -> None:
    model = quantize_model(sdxl(attention_type="gated")[0], fuse=True)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    known = {"hidden_states": random(2, 12, 32), "encoder_hidden_states": random(2, TEXT, 48)}
    for change, is_fused in (
        ({"cross_attention_kwargs": {}, "timestep": torch.ones(2), "class_labels": torch.ones(2)}, True),
        ({"attention_mask": random(2, 1, 12)}, False),
        ({"encoder_attention_mask": random(2, 1, TEXT)}, True),
        ({"encoder_attention_mask": random(2, 2, TEXT).flatten(0, 1)[:, None]}, False),  # of heads
        ({"cross_attention_kwargs": {"gligen": {"objs": random(2, 3, 48)}}}, False),
    ):
        assert_call(block, {**known, **change}, is_fused, computed)
    block.set_chunk_feed_forward(6, dim=1)
    block(**known)
    assert len(computed) == 2


def test_calls_of_blocks_of_flux_2_that_their_class_computes(computed: list[str]) -> None:
    model = quantize_model(flux2()[0], fuse=True)
    angles = tuple(torch.rand(2, TEXT + 12, 16).repeat_interleave(2, dim=-1))
    text, image, both = random(2, TEXT, 64), random(2, 12, 64), random(2, TEXT + 12, 64)
    double = {"encoder_hidden_states": text, "temb_mod_img": random(2, 384), "temb_mod_txt": random(2, 384)}
    double |= {"hidden_states": image, "image_rotary_emb": angles}
    single = {"hidden_states": both, "encoder_hidden_states": None, "temb_mod": random(2, 192)}
    single |= {"image_rotary_emb": angles}
    for block, known, change, is_fused in (
        (model.transformer_blocks[0], double, {"joint_attention_kwargs": {}}, True),
        (model.transformer_blocks[0], double, {"temb_mod_img": random(2, 12, 384)}, False),  # of tokens
        (model.single_transformer_blocks[0], single, {"text_seq_len": TEXT}, True),
        (model.single_transformer_blocks[0], single, {"temb_mod": random(2, TEXT + 12, 192)}, False),
        (model.single_transformer_blocks[0], single, {"hidden_states": image, "encoder_hidden_states": text}, False),
        (model.single_transformer_blocks[0], single, {"split_hidden_states": True, "text_seq_len": TEXT}, False),
    ):
        assert_call(block, {**known, **change}, is_fused, computed)


@pytest.mark.parametrize("family", ["flux", "wan", "sdxl"])
def test_an_adapter_counts(family: str) -> None:
    model, inputs = FAMILIES[family]()
    quantize_model(model, fuse=True)
    without = output(model, inputs)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    with_it = output(model, inputs)
    assert (with_it - without).norm() > 0.01 * without.norm()
    assert torch.allclose(with_it, output(unfuse(model), inputs))


def test_copies_files_and_undoing(tmp_path: Path, computed: list[str]) -> None:
    model, inputs = flux()
    quantize_model(model)
    names = list(model.state_dict())
    unfused = output(model, inputs)
    fuse(model)
    assert list(model.state_dict()) == names
    expected = output(model, inputs)
    assert torch.equal(output(copy.deepcopy(model), inputs), expected)
    save_quantized(model, tmp_path)
    loaded = load_quantized(tmp_path, model=lambda: flux()[0], fuse=True)
    assert torch.equal(output(loaded, inputs), expected)
    assert len(computed) == 6
    assert torch.equal(output(unfuse(model), inputs), unfused)
    assert len(computed) == 6
    assert not blocks_of(model)


def test_replaced_weights_count(computed: list[str]) -> None:
    model, inputs = flux()
    quantize_model(model, fuse=True)
    other, _ = flux()
    model.load_state_dict(quantize_model(other).state_dict())
    torch.testing.assert_close(output(model, inputs), output(other, inputs), rtol=1e-4, atol=1e-4)
    assert len(computed) == 2


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (sd3, "it returns no text"),
        (lambda: qwen(zero_cond_t=True), "it modulates some tokens of an image in another way than others"),
        (lambda: sdxl(only_cross_attention=True), "it doesn't attend to itself, then to a text"),
        (dit, "its norms are of type ada_norm_zero, not layer_norm or ada_norm_single"),
    ],
)
def test_blocks_that_stay(build: Callable[[], tuple[nn.Module, Inputs]], reason: str) -> None:
    model, _ = build()
    report = fusion_report(quantize_model(model, fuse=True))
    assert report.records[-1].reason == reason
    assert not report.records[-1].parts


@pytest.mark.parametrize(
    ("build", "part", "names", "value", "reason"),
    [
        (flux, "attn", ("norm_q", "norm_k"), nn.Identity(), "the norms of its queries and keys are unknown, or differ"),
        (flux, "attn", ("norm_q",), nn.RMSNorm(32, eps=0.1), "the norms of its queries and keys are unknown, or diff"),
        (flux, "attn", ("processor",), nn.Identity(), "its attention has a Identity, not a FluxAttnProcessor"),
        (flux, "norm1", ("silu",), nn.ReLU(), "its modulation begins with a ReLU, not SiLU"),
        (flux, "ff.net", ("0",), nn.ReLU(), "the activation of its MLP is a ReLU, not a GELU"),
        (sd3, "", ("_chunk_size",), 2, "its MLPs are computed in chunks"),
        (flux, "", ("forward",), print, "its forward was replaced, as accelerate's hooks do"),
    ],
)
def test_blocks_that_were_changed(build: Any, part: str, names: tuple[str, ...], value: Any, reason: str) -> None:
    model, _ = build()
    quantize_model(model)
    for name in names:
        setattr(model.transformer_blocks[0].get_submodule(part), name, value)
    record = fusion_report(fuse(model)).records[0]
    assert record.reason.startswith(reason)
    assert not record.parts


def test_layers_in_float_and_merged_projections_stay() -> None:
    model, _ = flux()
    report = fusion_report(quantize_model(model, skip=["*.ff.*"], fuse=True))
    assert "of class Linear, which" in report.records[0].reason
    assert report.records[1].parts
    assert all(layer.merged is None for layer in model.transformer_blocks[0].modules() if hasattr(layer, "merged"))
    model, _ = flux()
    for block in model.transformer_blocks:
        block.attn.fuse_projections()
    assert "unfuse_qkv_projections" in fusion_report(quantize_model(model, fuse=True)).records[0].reason


def test_a_class_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = flux()
    quantize_model(model)
    kind = type(model.transformer_blocks[0])
    forward = kind.forward

    @functools.wraps(forward)
    def doubled(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        text, image = forward(self, *args, **kwargs)
        return text, 2 * image

    monkeypatch.setattr(kind, "forward", doubled)
    expected = output(model, inputs)
    record, other = fusion_report(fuse(model)).records
    assert not record.parts
    assert "something else than its class says" in record.reason
    assert other.parts
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_large_values_of_float16_are_limited() -> None:
    model, _ = flux(torch.float16)
    quantize_model(model)
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        for name, parameter in block.named_parameters():
            if name in ("ff_context.net.2.bias", "proj_out.bias"):
                parameter.data.fill_(6e4)
    tokens = {"hidden_states": random(2, 12, 64), "encoder_hidden_states": random(2, TEXT, 64), "temb": random(2, 64)}
    given = {name: 50 * x.half() for name, x in tokens.items()}
    block = model.single_transformer_blocks[0]
    with torch.no_grad():
        expected = block(**given)
        assert (expected[0].abs() == diffusion_joint.MAX_FLOAT16).any()
        fuse(model)
        assert all(torch.equal(*pair) for pair in zip(block(**given), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_compiled(family: str, computed: list[str]) -> None:
    model, inputs = FAMILIES[family](torch.bfloat16)
    quantize_model(model, fuse=True)
    expected = output(model, inputs)
    computed.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(output(compiled, inputs), expected)
    assert len(computed) == 2
