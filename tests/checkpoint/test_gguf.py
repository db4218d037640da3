"""GGUF files as whole models: types, parts, folders, floats, other schemes, saving, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

import qgemm
from checkpoint.fuzz_gguf import broken
from checkpoint.gguf_deepseek import GLM_KINDS, write_deepseek, write_glm
from checkpoint.gguf_deepseek import KINDS as DEEPSEEK_KINDS
from checkpoint.gguf_dense import MODELS as DENSE_MODELS
from checkpoint.gguf_dense import write_like
from checkpoint.gguf_files import Array, Tensors, random_blocks, random_tensors, write_file
from checkpoint.gguf_gemma4 import KINDS, write_gemma4
from checkpoint.gguf_mixtures import write_gpt_oss, write_mixtral
from checkpoint.gguf_models import MODELS, float_model, settings_of, write_model
from checkpoint.gguf_qwen import write_35, write_next
from qgemm import CheckpointError, QuantLinear
from qgemm.nn import QuantLayer

IDS = torch.arange(3, 27).view(2, 12)
FACTORS = ("blk.0.attn_q", "blk.0.attn_k", "blk.1.ffn_down", "output")


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def schemes(model: nn.Module) -> dict[str, str]:
    return {name: module.scheme.name for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def floats(tensor: Array | tuple[str, Array]) -> Array:
    return dequantize(tensor[1], GGMLQuantizationType[tensor[0]]) if isinstance(tensor, tuple) else tensor


def tensors_of_llama(kind: str = "Q8_0") -> Tensors:
    return random_tensors(float_model("llama"), "llama", kind)


@pytest.mark.parametrize(
    ("kinds", "used"),
    [
        (
            ["Q6_K", "Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "TQ1_0", "TQ2_0"],
            [
                *("int8-weight-16", "int4-16-float-zeros", "int4-16", "int8-weight-32-float-zeros", "int8-weight-32"),
                "int4-256",
            ],
        ),
        (
            ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"],
            ["int8-weight-16", "int8-weight-32"],
        ),
    ],
)
def test_a_mix_of_types(kinds: list[str], used: list[str], tmp_path: Path) -> None:
    """As in files that are called Q4_K_M, and types that only large blocks have."""
    from transformers import AutoModelForCausalLM

    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    tensors = random_tensors(float_model("llama", **wide), "llama", "Q4_K")
    for number, name in enumerate(each for each in tensors if ".0." in each and isinstance(tensors[each], tuple)):
        tensors[name] = kinds[number], random_blocks(kinds[number], *floats(tensors[name]).shape, seed=number)
    settings = settings_of("llama", embedding_length=256, feed_forward_length=256, rope__dimension_count=64)
    write_file(tmp_path / "a.gguf", "llama", settings, tensors)
    model = qgemm.load_quantized(tmp_path / "a.gguf", dtype=torch.float32)
    assert set(schemes(model).values()) == {"int4-32-float-zeros", *used}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    assert torch.allclose(logits(model), logits(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "down"), [("Q4_0", "Q5_1"), ("Q4_1", "Q4_1"), ("Q5_1", "IQ4_NL"), ("MXFP4", "MXFP4")])
def test_experts(kind: str, down: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "a.gguf", "qwen3moe", kind, {"blk.0.ffn_down_exps.weight": (down, _experts(down))})
    model: Any = qgemm.load_quantized(tmp_path, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", config=float_model("qwen3moe").config
    )
    assert torch.allclose(logits(model), logits(reference), rtol=1e-4, atol=1e-5)


def test_experts_that_need_a_scheme(tmp_path: Path) -> None:
    gates = _experts("Q4_0").reshape(4, 32, -1)  # of [64, 32] each, and now of [32, 64]
    write_model(tmp_path / "a.gguf", "qwen3moe", "Q8_0", {"blk.0.ffn_gate_exps.weight": ("Q4_0", gates)})
    with pytest.raises(CheckpointError, match="Give one to convert them to"):
        qgemm.load_quantized(tmp_path)
    assert schemes(qgemm.load_quantized(tmp_path, scheme="int8"))["model.layers.0.mlp.experts"] == "int8"


@pytest.mark.filterwarnings("ignore:.*activations stay in float, where the file has scales")
def test_factors_of_nvfp4(tmp_path: Path) -> None:
    """Of layers, whose rows may be in another order, and of experts; what has none has 1."""
    tensors = random_tensors(float_model("llama"), "llama", "NVFP4")
    factors = {name: np.array([0.7 + number], dtype="f4") for number, name in enumerate(FACTORS)}
    own = {f"{name}.{leaf}": value for name, value in factors.items() for leaf in ("input_scale", "scale")}
    whole = {
        name: floats(tensor) * factors.get(name.removesuffix(".weight"), np.float32(1))
        for name, tensor in tensors.items()
    }
    write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), own | tensors)
    model = qgemm.load_quantized(tmp_path / "a.gguf", dtype="float32")
    assert set(schemes(model).values()) == {"nvfp4"}
    whole["blk.0.attn_v.weight"] = tensors["blk.0.attn_v.weight"]  # something must be quantized
    write_file(tmp_path / "b.gguf", "llama", settings_of("llama"), whole)
    wanted = logits(qgemm.load_quantized(tmp_path / "b.gguf", dtype="float32"))
    assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_factors_of_experts(tmp_path: Path) -> None:
    tensors = {
        f"blk.{layer}.ffn_{part}_exps.scale": np.arange(1, 5, dtype="f4") + 4 * (part == "down")
        for layer in range(2)
        for part in ("gate", "up", "down")
    }
    config = {"hidden_size": 64, "moe_intermediate_size": 64}
    tensors |= random_tensors(float_model("qwen3moe", **config), "qwen3moe", "NVFP4")
    settings = settings_of("qwen3moe", expert_feed_forward_length=64)
    path = write_file(tmp_path / "a.gguf", "qwen3moe", settings, tensors)
    model: Any = qgemm.load_quantized(path, dtype="float32")
    whole = {
        name: floats(tensor) * tensors.get(name.replace("weight", "scale"), np.ones(1, "f4"))[:, None, None]
        if "_exps.weight" in name
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("scale")
    }
    write_file(tmp_path / "b.gguf", "qwen3moe", settings, whole)
    assert schemes(model)["model.layers.1.mlp.experts"] == "nvfp4"
    wanted = logits(qgemm.load_quantized(tmp_path / "b.gguf", dtype="float32"))
    assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    tensors["blk.0.ffn_up_exps.scale"] = np.ones(4, "f4")
    write_file(path, "qwen3moe", settings, tensors)
    with pytest.raises(CheckpointError, match="qgemm's experts have one scale for both"):
        qgemm.load_quantized(path)


def test_a_layer_of_another_shape(tmp_path: Path) -> None:
    wrong = {"blk.0.ffn_up.weight": ("Q8_0", random_blocks("Q8_0", 32, 64))}
    write_model(tmp_path / "a.gguf", "llama", "Q8_0", wrong)
    with pytest.raises(
        CheckpointError, match=r"a\.gguf: layer model\.layers\.0\.mlp\.up_proj has the shape \[32, 64\]"
    ):
        qgemm.load_quantized(tmp_path)


def _experts(kind: str) -> Array:
    return random_blocks(kind, 4, 64, 32)


def write_parts(folder: Path, tensors: Tensors, count: int | None = None) -> list[Path]:
    """Two parts, named as llama.cpp names them; settings are in the first one. ``count``: what each says of tensors."""
    paths = [folder / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = list(tensors)
    for number, (path, part) in enumerate(zip(paths, (names[:9], names[9:]), strict=True)):
        settings = {**(settings_of("llama") if number == 0 else {}), "split.no": number, "split.count": 2}
        settings["split.tensors.count"] = len(tensors) if count is None else count
        write_file(path, "llama", settings, {name: tensors[name] for name in part})
    return paths


def test_parts(tmp_path: Path) -> None:
    tensors = tensors_of_llama()
    whole = logits(qgemm.load_quantized(write_file(tmp_path / "b.gguf", "llama", settings_of("llama"), tensors)))
    (tmp_path / "b.gguf").unlink()
    # The head is in the second part, where transformers doesn't look for it.
    assert list(tensors).index("output.weight") > 9
    paths = write_parts(tmp_path, tensors)
    for path in (tmp_path, *paths):
        model: Any = qgemm.load_quantized(path)
        assert not model.config.tie_word_embeddings
        assert torch.equal(logits(model), whole)
    paths[0].rename(tmp_path / "c.gguf")
    with pytest.raises(CheckpointError, match=r"c\.gguf is one of 2 parts, whose names end in -00001-of-00002\.gguf"):
        qgemm.load_quantized(tmp_path / "c.gguf")
    (tmp_path / "c.gguf").rename(paths[0])
    write_file(paths[1], "llama", {}, tensors)
    with pytest.raises(CheckpointError, match=r"tensor token_embd.weight is in two files, .*a-00001.* and .*a-00002"):
        qgemm.load_quantized(tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"has no file a-00002-of-00002\.gguf: the checkpoint is incomplete"):
        qgemm.load_quantized(tmp_path)


def test_parts_of_another_number_of_tensors(tmp_path: Path) -> None:
    """As of two models, the second of which has tensors that the first one lacks, and transformers doesn't need."""
    tensors = tensors_of_llama()
    write_parts(tmp_path, tensors, len(tensors) + 1)
    with pytest.raises(CheckpointError, match=r"its model has 22 tensors, and its parts have 21: get all parts again"):
        qgemm.load_quantized(tmp_path)


def test_folders(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama")
    write_file(tmp_path / "mmproj-a.gguf", "clip", {}, {})
    (tmp_path / "README.md").touch()
    assert schemes(qgemm.load_quantized(tmp_path)) == schemes(qgemm.load_quantized(str(path)))
    write_model(tmp_path / "A.gguf", "llama", "Q4_0")
    with pytest.raises(CheckpointError, match=r"holds 2 models: pass the file of one of them, such as A\.gguf"):
        qgemm.load_quantized(tmp_path)
    with pytest.raises(CheckpointError, match=r"no\.gguf can't be read"):
        qgemm.load_quantized(tmp_path / "no.gguf")
    # Other weights are the model's, as before.
    qgemm.save_quantized(qgemm.load_quantized(path), tmp_path)
    assert set(schemes(qgemm.load_quantized(tmp_path)).values()) == {"int8-weight-32"}


def test_saving(tmp_path: Path) -> None:
    """Files of qgemm's hold what the model does, bit for bit, with tied embeddings too."""
    tensors = tensors_of_llama("Q4_1")
    del tensors["output.weight"]
    model: Any = qgemm.load_quantized(write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), tensors))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    qgemm.save_quantized(model, tmp_path / "saved")
    again = qgemm.load_quantized(tmp_path / "saved")
    assert schemes(again) == schemes(model)
    found, wanted = again.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logits(again), logits(model))


def test_layers_in_float(tmp_path: Path) -> None:
    tensors = tensors_of_llama()
    dtypes = {"blk.0.ffn_up.weight": "f4", "blk.0.ffn_down.weight": "f2", "output.weight": "f2"}
    tensors |= {name: floats(tensors[name]).astype(dtype) for name, dtype in dtypes.items()}
    halves = torch.from_numpy(floats(tensors["blk.1.ffn_up.weight"])).bfloat16()
    tensors["blk.1.ffn_up.weight"] = "BF16", halves.view(torch.uint8).numpy()
    path = write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), tensors)
    model: Any = qgemm.load_quantized(path, dtype=torch.float32)
    assert len(schemes(model)) == 15 - 4
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, halves.float())
    for layer, name in ((model.lm_head, "output"), (model.model.layers[0].mlp.down_proj, "blk.0.ffn_down")):
        assert torch.equal(layer.weight, torch.from_numpy(tensors[f"{name}.weight"]).float())
    write_file(
        path, "llama", settings_of("llama"), {name: floats(tensor) for name, tensor in tensors_of_llama().items()}
    )
    with pytest.raises(CheckpointError, match="holds no quantized layer: load its floats with transformers'"):
        qgemm.load_quantized(path)


def test_another_scheme(tmp_path: Path) -> None:
    """The weights of int8 are those of the float weights in the file."""
    tensors = tensors_of_llama("Q5_1")
    path = write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), tensors)
    model: Any = qgemm.load_quantized(path, scheme="int8", fuse=True)
    assert set(schemes(model).values()) == {"int8"}
    down = nn.Linear(128, 64, bias=False)
    down.weight.data = torch.from_numpy(floats(tensors["blk.1.ffn_down.weight"]))
    wanted = QuantLinear.from_linear(down)
    found = model.model.layers[1].mlp.down_proj
    assert torch.equal(found.weight_scale, wanted.weight_scale)
    assert torch.equal(torch.as_tensor(found.state_dict()["weight"]), wanted.state_dict()["weight"])


def test_fused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama", "Q4_0")
    model = qgemm.load_quantized(path, dtype=torch.float32, fuse=True)
    assert qgemm.fusion_report(model).fused
    assert torch.allclose(logits(model), logits(qgemm.load_quantized(path, dtype="float32")), rtol=1e-4, atol=1e-5)


def test_a_given_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_model(tmp_path / "a.gguf", "llama")
    config = float_model("llama").config
    model = qgemm.load_quantized(path, model=lambda: AutoModelForCausalLM.from_config(config))
    assert torch.equal(logits(model), logits(qgemm.load_quantized(path, dtype="float32")))
    with pytest.raises(CheckpointError, match=r"a\.gguf is read for models of transformers; this is a Sequential"):
        qgemm.load_quantized(path, model=nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: model.layers.0.self_attn.k_proj.bias"):
        qgemm.load_quantized(path, model=lambda: float_model("qwen2"))


def _with(blocks: Array, start: int, octets: bytes) -> Array:
    """``blocks`` with these ``octets`` in the last row."""
    blocks[-1, start : start + len(octets)] = np.frombuffer(octets, dtype=np.uint8)
    return blocks


NVFP4: Tensors = {"blk.0.ffn_up.weight": ("NVFP4", random_blocks("NVFP4", 128, 64))}
REFUSED: dict[str, tuple[Tensors, str]] = {
    "a scale with a sign": (
        {"blk.0.ffn_up.weight": ("NVFP4", _with(np.zeros((128, 36), dtype=np.uint8), 0, b"\x80"))},
        "blk.0.ffn_up.weight holds NaN or Inf",
    ),
    "such a scale of an embedding": (
        {"token_embd.weight": ("NVFP4", _with(np.zeros((97, 36), dtype=np.uint8), 3, b"\x7f"))},
        r"a\.gguf: token_embd.weight: it holds NaN or Inf",
    ),
    "several factors": (
        NVFP4 | {"blk.0.ffn_up.scale": np.ones(2, dtype="f4")},
        r"blk.0.ffn_up.scale is torch.float32 \[2\]",
    ),
    "a factor that is no float": (
        NVFP4 | {"blk.0.ffn_up.scale": np.ones(1, dtype="f2")},
        r"blk.0.ffn_up.scale is torch.float16 \[1\]",
    ),
    "a factor of all scales that is NaN": (
        NVFP4 | {"blk.0.ffn_up.scale": np.full(1, np.nan, dtype="f4")},
        r"a\.gguf: blk.0.ffn_up.scale is not finite",
    ),
    "a factor of another type": (
        {"blk.0.ffn_up.scale": np.ones(1, dtype="f4")},
        "holds tensors that the model doesn't have: blk.0.ffn_up.scale",
    ),
    "a type of the library's own": (
        {"blk.0.ffn_up.weight": ("Q8_1", np.zeros((128, 80), dtype=np.uint8))},
        "is of type Q8_1, which qgemm doesn't read",
    ),
    "a factor that is NaN": (
        {"blk.0.ffn_up.weight": ("Q8_0", np.full((128, 68), 255, dtype=np.uint8))},
        "blk.0.ffn_up.weight holds NaN or Inf",
    ),
    "such a factor of an embedding": (
        {"token_embd.weight": ("Q8_0", np.full((97, 68), 255, dtype=np.uint8))},
        r"a\.gguf: token_embd.weight: it holds NaN or Inf; the file is damaged: get it again",
    ),
    "such a zero point": (
        {"token_embd.weight": ("Q4_1", _with(random_blocks("Q4_1", 97, 64), 2, b"\x00\x7c"))},
        r"a\.gguf: token_embd.weight: it holds NaN or Inf",
    ),
    "an exponent that is NaN": (
        {"token_embd.weight": ("MXFP4", np.full((97, 34), 255, dtype=np.uint8))},
        r"a\.gguf: token_embd.weight: it holds NaN or Inf",
    ),
    "another tensor": (
        {"blk.0.attn_q.bias": np.ones(64, dtype="f4")},
        "holds tensors that the model doesn't have: blk.0.attn_q.bias",
    ),
    "another shape": (
        {"blk.0.ffn_up.weight": ("Q8_0", random_blocks("Q8_0", 64, 64))},
        r"layer model.layers.0.mlp.up_proj has the shape \[64, 64\]; the model's is \[128, 64\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, problem = REFUSED[case]
    with pytest.raises(CheckpointError, match=problem):
        qgemm.load_quantized(write_model(tmp_path / "a.gguf", "llama", "Q8_0", tensors))


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    tensors = tensors_of_llama()
    del tensors["blk.1.ffn_up.weight"]
    path = write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), tensors)
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: model.layers.1.mlp.up_proj.weight"):
        qgemm.load_quantized(path)


def test_layers_for_further_tokens_where_none_are_read(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "a.gguf", "llama", "Q8_0", {"blk.2.attn_norm.weight": np.ones(64, "f4")}, nextn_predict_layers=1
    )
    with pytest.raises(CheckpointError, match=r"holds tensors that the model doesn't have: blk.2.attn_norm.weight"):
        qgemm.load_quantized(path)


CALLED = {"mixtral": "llama", "nvfp4": "llama", "ministral3": "mistral3", **dict.fromkeys(KINDS, "gemma4")}
CALLED |= dict.fromkeys(DEEPSEEK_KINDS, "deepseek2") | dict.fromkeys(GLM_KINDS, "glm4moe")
BROKEN, COMPLETE_BROKEN = 100, 2000
"""Files; the latter with ``--complete``. 16,000 have been read."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_broken_files(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Each is refused, or loads as a model whose values its layers accept."""
    path, good = tmp_path / "good.gguf", {}
    for name, write in {"gpt-oss": write_gpt_oss, "mixtral": write_mixtral, "qwen3next": write_next}.items():
        write(path)
        good[name] = path.read_bytes()
    kinds: list[tuple[Any, Iterable[str]]] = [
        (write_model, MODELS), (write_35, ("qwen35", "qwen35moe")), (write_gemma4, KINDS), (write_like, DENSE_MODELS),
        (write_deepseek, DEEPSEEK_KINDS), (write_glm, GLM_KINDS),
    ]  # fmt: skip
    for write_kind, names in kinds:
        for name in names:
            write_kind(path, name)
            good[name] = path.read_bytes()
    factors = {f"blk.0.attn_{part}.{leaf}": np.ones(1, "f4") for part in "qk" for leaf in ("scale", "input_scale")}
    good["nvfp4"] = write_model(tmp_path / "nvfp4.gguf", "llama", "NVFP4", factors).read_bytes()
    path, loaded = tmp_path / "broken.gguf", 0
    cases = COMPLETE_BROKEN if pytestconfig.getoption("--complete") else BROKEN
    for number in range(cases):
        rng = random.Random(number)
        name = rng.choice(sorted(good))
        path.write_bytes(broken(good[name], CALLED.get(name, name), rng))
        try:
            model = qgemm.load_quantized(path)
        except CheckpointError:
            continue
        except Exception as error:
            pytest.fail(f"case {number}, {name}: {type(error).__name__} {error}")
        loaded += 1
        for layer in model.modules():
            if isinstance(layer, QuantLayer):
                problems = [layer.problem_with(leaf, value) for leaf, value in layer.named_parameters(recurse=False)]
                assert not any(problems), f"case {number}"
    assert cases / 10 < loaded < cases / 2
