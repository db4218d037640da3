"""Steps that are replayed, as a CUDA graph replays them: the same operators on the same tensors, and no Python.

``Recording`` does that on a CPU. What a step takes from a number of the host, which a graph would have built in, is
wrong in its second step; on a GPU the same tests run with CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from transformers import Cache, PreTrainedModel, StaticCache

import qgemm
from qgemm.replay.graphs import CaptureError, GraphMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = torch.arange(3, 24, device=DEVICE).reshape(3, 7) * 11 % 90 + 5
PADDED = (torch.arange(7, device=DEVICE) >= torch.tensor([[3], [1], [0]], device=DEVICE)).long()
BUILDERS = {**FAMILIES, **MIXTURES}


FAMILIES_TO_RUN = ["llama", "mistral", "gemma2", "qwen3", "deepseek_v3", "gpt2", "gpt_oss", "mixtral"]


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("family", FAMILIES_TO_RUN)
def test_replayed_steps_give_the_tokens_of_transformers(graphs: list[Any], family: str, padded: bool) -> None:
    model: Any = BUILDERS[family]().model.to(DEVICE)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = PADDED if padded else torch.ones_like(PADDED)
    expected = model.generate(PROMPTS, **options)
    qgemm.fast_generate(model)
    assert torch.equal(model.generate(PROMPTS, **options), expected)
    assert len(graphs) == 2, "one of the forward, one of the sampler"
    other = PROMPTS.flip(1)
    options["attention_mask"] = PADDED  # other starts than the captured ones, or steps of another form
    options["attention_mask"][:2] = options["attention_mask"][:2].flip(0)
    assert torch.equal(model.generate(other, **options), type(model).generate(model, other, **options))


FUSED = [("qwen3", None), ("qwen3", torch.int8)]
FUSED += [(family, None) for family in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe")]


@pytest.mark.slow(quick=["qwen3-None", "qwen3-dtype1", "qwen3_moe"])
@pytest.mark.parametrize(("family", "dtype"), FUSED)
def test_fused_layers_are_replayed(graphs: list[Any], family: str, dtype: torch.dtype | None) -> None:
    model: Any = qgemm.quantize_model(BUILDERS[family]().model.to(DEVICE))
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = PADDED
    of_transformers = model.generate(PROMPTS, **options)
    qgemm.fast_generate(model, cache_dtype=dtype)
    expected = model.generate(PROMPTS, **options)
    assert dtype is not None or torch.equal(expected, of_transformers)
    qgemm.fuse(model)
    for _ in range(2):
        assert torch.equal(model.generate(PROMPTS, **options), expected)
    assert len(graphs) == 4, "fused layers are captured anew"


CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "StaticCache": lambda model: StaticCache(model.config, max_cache_len=40),
    "KeyValueCache": lambda model: qgemm.KeyValueCache(model.config, 3, 40, device=DEVICE),
    "int8": lambda model: qgemm.KeyValueCache(model.config, 3, 40, torch.int8, DEVICE),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_is_continued(graphs: list[Any], make: Callable[[PreTrainedModel], Cache]) -> None:
    llama: Any = FAMILIES["llama"]().model.to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours, theirs = make(llama), make(llama)
    qgemm.fast_generate(llama)
    for turn in range(4):
        if turn in (0, 2):  # emptied, for prompts with other padding
            prompts, mask = PROMPTS, PADDED if turn else PADDED.flip(0)
            ours.reset()
            theirs.reset()
        result = llama.generate(prompts, attention_mask=mask, past_key_values=ours, **options)
        llama.set_attn_implementation("sdpa" if isinstance(ours, StaticCache) else "qgemm")
        # On a GPU it would compile the step, and a model that has been compiled is captured anew.
        whole = {**options, "disable_compile": True}
        expected = type(llama).generate(llama, prompts, attention_mask=mask, past_key_values=theirs, **whole)
        llama.set_attn_implementation("sdpa")
        assert torch.equal(result, expected)
        prompts = torch.cat([result, result[:, :2]], dim=1)
        mask = torch.cat([mask, mask.new_ones(3, 7)], dim=1)
    assert len(graphs) == 2, "graphs of a cache are its own"
    with pytest.raises(ValueError, match="room for 40 tokens, but there are 18 in it and 32 to come"):
        llama.generate(prompts, attention_mask=mask, past_key_values=ours, **{**options, "max_new_tokens": 30})


def test_a_model_that_was_changed_is_seen(graphs: list[Any]) -> None:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    first, second = (layer.mlp for layer in model.model.layers)
    first.act_fn, second.act_fn.forward = torch.nn.SiLU().eval(), torch.nn.functional.silu
    qgemm.fast_generate(model)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(PROMPTS, **options)
    changes: list[Callable[[], object]] = [
        lambda: model.lm_head.weight.set_(model.lm_head.weight.flip(0)),
        lambda: model.model.norm.register_forward_hook(lambda module, inputs, output: output.neg()),
        lambda: setattr(first, "act_fn", torch.nn.ReLU().eval()),  # which has the attributes of SiLU
        lambda: setattr(second.act_fn, "forward", torch.nn.functional.gelu),
        lambda: qgemm.quantize_model(model),
    ]
    for count, change in enumerate(changes, 1):
        assert len(graphs) == 2 * count
        with torch.no_grad():
            change()
        assert torch.equal(model.generate(PROMPTS, **options), type(model).generate(model, PROMPTS, **options))
        assert len(graphs) == 2 * (count + 1), "it isn't captured anew"


def test_what_changes_inside_of_an_attribute_is_seen(graphs: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_alpha=64)
    model = peft.get_peft_model(FAMILIES["llama"]().model.to(DEVICE), settings)
    base = model.get_base_model()
    qgemm.fast_generate(base)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    base.generate(PROMPTS, **options)

    def scale_attention(factor: float) -> None:
        for layer in base.model.layers:
            layer.self_attn.scaling = factor * layer.self_attn.scaling

    changes: list[Callable[[], object]] = [
        lambda: [layer.self_attn.q_proj.scale_layer(3.0) for layer in base.model.layers],
        model.merge_adapter,
        lambda: [scale_attention(2.0), scale_attention(4.0)],  # the last number may lie where the first one was
        lambda: setattr(base.config, "max_position_embeddings", 77),
    ]
    for count, change in enumerate(changes, 1):
        assert len(graphs) == 2 * count
        change()
        assert torch.equal(base.generate(PROMPTS, **options), type(base).generate(base, PROMPTS, **options))
        assert len(graphs) == 2 * (count + 1), "it isn't captured anew"


def test_draws_are_replayed(graphs: list[Any]) -> None:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    options = {"max_new_tokens": 30, "do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3, "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(PROMPTS, **options)
    state = torch.rand(3, device=DEVICE)
    qgemm.fast_generate(model)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(model.generate(PROMPTS, **options), expected)
        assert torch.equal(torch.rand(3, device=DEVICE), state), "more or fewer random numbers were drawn"


def test_what_can_not_be_captured_runs_as_it_is(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * output.ne(0).any().item())
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(PROMPTS, **options)
    if DEVICE.type == "cpu":

        def fail(memory: GraphMemory, run: Callable[[], None]) -> Any:
            memory.captures = False
            raise CaptureError("the host waits")

        monkeypatch.setattr(GraphMemory, "capture", fail)  # a recording would have done half of a step
    qgemm.fast_generate(model)
    with pytest.warns(UserWarning, match="steps run without CUDA graphs, which is slower"):
        assert torch.equal(model.generate(PROMPTS, **options), expected)
