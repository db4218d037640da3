"""Times diffusion models on a GPU.

Models are diffusers' in bfloat16, with random weights, a few blocks of full width (of Stable Diffusion XL all), and the
tokens of an image of 1024 x 1024 pixels, or of a video. Ways to run each take turns: as it is, quantized to int8, fused
as well, some with ``fast_forward``, and, with ``--compile``, compiled by PyTorch. Of a call are measured what it takes
from an idle GPU to an idle GPU, with the host's time, and what its kernels take, in a CUDA graph.

Before they are timed, outputs are compared with those of the float model in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.encoders import FLOAT, WAYS, beside, check_and_time
from benchmarks.results import command_line, environment, show
from benchmarks.tables import Table, render
from qgemm_cli.timing import QUICK, Effort

HEADS = {"attention_head_dim": 128, "num_attention_heads": 24}
FLUX2_HEADS = {"num_attention_heads": 48}
SIDE = 64  # tokens along each side of an image of 1024 pixels
VIDEO_HEADS = {"attention_head_dim": 128, "num_attention_heads": 40}
VIDEO = (11, 60, 104)  # what 41 frames of 480 x 832 pixels become: 17,160 tokens
UNET = {
    "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "layers_per_block": 2,
}  # fmt: skip
MAX_ERROR = 0.1
COMPILED = {f"{way}, compiled": way for way in (FLOAT, "int8")}
COMPILED_ERROR = 0.5
"""Of compiled models: PyTorch's compiler rounds elsewhere, and angles of positions and times are large numbers."""


@dataclass(frozen=True)
class Result:
    """One way to compute a model: milliseconds of a call, and of its kernels."""

    model: str
    way: str
    call_ms: float
    kernels_ms: float
    error: float


def flux(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """FLUX.1 with 2 of 19 blocks of two streams, and 4 of 38 of one stream."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(num_layers=2, num_single_layers=4, guidance_embeds=True, **HEADS)
    ids = torch.stack(torch.meshgrid(*2 * [torch.arange(SIDE, device=device)], indexing="ij"), dim=-1).view(-1, 2)
    inputs = {
        "hidden_states": random(1, SIDE**2, 64, device=device), "guidance": torch.tensor([3.5], device=device),
        "encoder_hidden_states": random(1, 512, 4096, device=device),
        "pooled_projections": random(1, 768, device=device),
        "img_ids": torch.cat([ids[:, :1] * 0, ids], dim=1), "txt_ids": ids.new_zeros(512, 3),
    }  # fmt: skip
    return model, inputs


def flux2(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """FLUX.2 with 1 of 8 blocks of two streams, and 2 of 48 of one stream."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(num_layers=1, num_single_layers=2, **{**HEADS, **FLUX2_HEADS})
    ids = torch.stack(torch.meshgrid(*2 * [torch.arange(SIDE, device=device)], indexing="ij"), dim=-1).view(-1, 2)
    zeros = ids[:, :1] * 0
    inputs = {
        "hidden_states": random(1, SIDE**2, 128, device=device), "guidance": torch.tensor([3.5], device=device),
        "encoder_hidden_states": random(1, 512, 15_360, device=device),
        "img_ids": torch.cat([zeros, ids, zeros], dim=1), "txt_ids": ids.new_zeros(512, 4),
    }  # fmt: skip
    return model, inputs


def qwen_image(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """Qwen-Image with 4 of 60 blocks."""
    from diffusers import QwenImageTransformer2DModel

    inputs = {
        "hidden_states": random(1, SIDE**2, 64, device=device),
        "encoder_hidden_states": random(1, 300, 3584, device=device),
        "encoder_hidden_states_mask": None, "img_shapes": [[(1, SIDE, SIDE)]],
    }  # fmt: skip
    return QwenImageTransformer2DModel(num_layers=4, **HEADS), inputs


def sd3(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """Stable Diffusion 3 Medium with 6 of 24 blocks, of which the last returns no text: two samples, for guidance."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        num_layers=6, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192, sample_size=128
    )
    inputs = {
        "hidden_states": random(2, 16, 128, 128, device=device), "pooled_projections": random(2, 2048, device=device),
        "encoder_hidden_states": random(2, 333, 4096, device=device),
    }  # fmt: skip
    return model, inputs


def hunyuan_video(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """HunyuanVideo with 2 of 20 blocks of two streams, and 2 of 40 of one stream."""
    from diffusers import HunyuanVideoTransformer3DModel

    inputs = {
        "hidden_states": random(1, 16, *VIDEO, device=device), "guidance": torch.tensor([6e3], device=device),
        "encoder_hidden_states": random(1, 256, 4096, device=device),
        "encoder_attention_mask": torch.arange(256, device=device)[None] < 100,
        "pooled_projections": random(1, 768, device=device),
    }  # fmt: skip
    return HunyuanVideoTransformer3DModel(num_layers=2, num_single_layers=2, guidance_embeds=True, **HEADS), inputs


def wan(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """Wan 2.1 or 2.2, 14B, with 2 of 40 blocks: text to video."""
    from diffusers import WanTransformer3DModel

    inputs = {
        "hidden_states": random(1, 16, *VIDEO, device=device),
        "encoder_hidden_states": random(1, 512, 4096, device=device),
    }
    return WanTransformer3DModel(num_layers=2, **VIDEO_HEADS), inputs


def sdxl(device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """Stable Diffusion XL's whole UNet, with 70 blocks: two samples, for guidance."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816, **UNET,
    )  # fmt: skip
    size = torch.tensor([1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0], device=device)
    inputs = {
        "sample": random(2, 4, 2 * SIDE, 2 * SIDE, device=device),
        "encoder_hidden_states": random(2, 77, 2048, device=device),
        "added_cond_kwargs": {"text_embeds": random(2, 1280, device=device), "time_ids": size.expand(2, 6)},
    }
    return model, inputs


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, dict[str, Any]]]] = {
    "flux": flux,
    "flux2": flux2,
    "qwen-image": qwen_image,
    "sd3": sd3,
    "hunyuan-video": hunyuan_video,
    "wan": wan,
    "sdxl": sdxl,
}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measures what the command line asks for, prints it, and writes the JSON file if one is named."""
    parser = command_line("diffusion", __doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="(default: all)")
    parser.add_argument("--compile", action="store_true", help="compiled models, too")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    results: list[Result] = []
    with torch.inference_mode():
        for name in args.model or MODELS:
            results += measure(name, args.compile, QUICK if args.quick else Effort(), device)
    show(render(table(results), markdown=False), results, environment(device, args.commit), args.json)
    return results


def measure(name: str, compiles: bool, effort: Effort, device: torch.device) -> list[Result]:
    """All ways to compute a model; raises ``ValueError`` for a wrong output."""
    runs: dict[str, Any] = {}
    for way, change in WAYS.items():
        model, given = build(name, device)
        change(model)
        runs[way] = partial(output, model)
        for compiled, of in COMPILED.items():
            if compiles and of == way:
                runs[compiled] = partial(output, torch.compile(model))
    limits = {way: COMPILED_ERROR if way in COMPILED else MAX_ERROR for way in runs}
    found = check_and_time(runs, [given], limits, effort, device)
    return [Result(name, way, *figures) for way, figures in found.items()]


def build(name: str, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model in eval mode, with the same random weights each time, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model, given = MODELS[name](device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
    given["timestep"] = torch.tensor([0.5], device=device).expand(given["encoder_hidden_states"].shape[0])
    inputs = {key: x.bfloat16() if torch.is_tensor(x) and x.dtype != torch.bool else x for key, x in given.items()}
    return in_bfloat16(model).eval().requires_grad_(False), inputs


def in_bfloat16(model: Any) -> nn.Module:
    """``model`` in bfloat16, apart from what diffusers' ``from_pretrained`` keeps in float32."""
    floats = {*(model._keep_in_fp32_modules or ())}
    kept = {name: x.data for name, x in values_of(model) if not floats.isdisjoint(name.split("."))}
    model.to(torch.bfloat16)
    for name, x in values_of(model):
        if name in kept:
            x.data = kept[name]
    return model  # type: ignore[no-any-return]


def values_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def random(*shape: int, device: torch.device) -> Tensor:
    """Values of the standard normal distribution."""
    return torch.randn(shape, device=device)


def output(model: Any, given: dict[str, Any]) -> Tensor:
    """The model's prediction."""
    out: Tensor = model(**given, return_dict=False)[0]
    return out


def table(results: Sequence[Result]) -> Table:
    """A row for each model and way."""
    floats = {one.model: one for one in results if one.way == FLOAT}
    rows = [[one.model, one.way, *beside(floats[one.model], one), f"{one.error:.3f}"] for one in results]
    return ["model", "", "call, ms", "times", "kernels, ms", "times", "error"], rows


if __name__ == "__main__":
    main()
