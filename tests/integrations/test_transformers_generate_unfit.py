"""``fast_generate`` with attention that a ``KeyValueCache`` isn't for: transformers' own loop, and a warning."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import qgemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = torch.arange(3, 24).reshape(3, 7) * 11 % 90 + 5


class Counter(BaseStreamer):
    values = 0

    def put(self, value: Tensor) -> None:
        self.values += 1

    def end(self) -> None:
        pass


_SIZES = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 0},
}
_OF_KOSMOS = {"vocab_size": 97, "embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4, "init_std": 0.2}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "BertLMHeadModel": (_SIZES, "BertSelfAttention sees the tokens that are to come"),
    "JetMoeForCausalLM": (
        {**_SIZES, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "changes keys between the cache and attention",
    ),
    "DogeForCausalLM": (_SIZES, "DogeAttention makes a mask of its own"),
    "FalconForCausalLM": ({**_SIZES, "alibi": True}, "FalconForCausalLM adds ALiBi to masks"),
    # As Dory's models say it, which are in transformers from 5.24 on.
    "LlamaForCausalLM": (
        {**_SIZES, "recurrent_kv_cache_mode": "last_loop"},
        "LlamaForCausalLM reads keys of its cache by itself",
    ),
    "MiMoV2FlashForCausalLM": (
        {
            **_SIZES,
            "head_dim": 24,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        "keys have 2 heads of size 24, and values 2 of size 16",
    ),
    # A mask of its forward has no window, which one that generate makes for a static cache has.
    "MoshiForCausalLM": (
        {**_SIZES, "num_key_value_heads": 4, "head_dim": 16, "ffn_dim": 192, "sliding_window": 4},
        "MoshiAttention has a window in its cache and none in its mask",
    ),
    "Kosmos2_5ForConditionalGeneration": (
        {"text_config": _OF_KOSMOS, "vision_config": {"hidden_size": 64, "num_hidden_layers": 1}},
        "Kosmos2_5ForConditionalGeneration makes positions of its own",
    ),
}


@pytest.mark.parametrize(("name", "settings", "reason"), [(name, *each) for name, each in UNFIT.items()], ids=UNFIT)
def test_attention_in_another_way_goes_to_transformers(name: str, settings: dict[str, Any], reason: str) -> None:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model: Any = cls(cls.config_class(**settings)).eval().to(DEVICE)
    mask = torch.ones_like(PROMPTS)
    mask[0, :3] = 0
    inputs = {"input_ids": (PROMPTS * mask).to(DEVICE), "attention_mask": mask.to(DEVICE)}
    options = {**inputs, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**options)
    qgemm.fast_generate(model)
    streamer = Counter()
    with pytest.warns(UserWarning, match=f"not qgemm's: .*{reason}"):
        assert torch.equal(model.generate(**options, streamer=streamer), expected)
    assert streamer.values == 1 + 6
    assert torch.equal(model.generate(**options), expected)
    if name.startswith(("Bert", "JetMoe", "Doge", "MiMo")):  # and whoever passes the cache is told
        model.set_attn_implementation("qgemm")
        with pytest.raises(ValueError, match=f"{reason}, which a KeyValueCache isn't for: use a cache"):
            type(model).generate(
                model, **options, past_key_values=qgemm.KeyValueCache(model.config, 3, 64, device=DEVICE)
            )


@pytest.mark.parametrize(
    "make",
    [lambda it: qgemm.KeyValueCache(it, 3, 64, device=DEVICE), lambda it: transformers.StaticCache(it, 64)],
    ids=["qgemm", "static"],
)
@pytest.mark.parametrize("name", ["BertLMHeadModel", "JetMoeForCausalLM", "DogeForCausalLM"])
def test_a_cache_of_the_callers_is_as_it_was(name: str, make: Any) -> None:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model: Any = cls(cls.config_class(**UNFIT[name][0])).eval().to(DEVICE)
    options = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**options, past_key_values=make(model.config))
    cache = make(model.config)
    qgemm.fast_generate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(model.generate(**options, past_key_values=cache), expected)
    assert cache.get_seq_length() == 7 + 5


@pytest.mark.skipif(not hasattr(transformers, "DoryForCausalLM"), reason="transformers has it from 5.24 on")
@pytest.mark.parametrize(
    "settings", [{"n_input_layers": 0}, {"n_input_layers": 1}, {"layer_types": 4 * ["full_attention"]}]
)
def test_layers_that_run_several_times_keep_the_keys_of_each(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {**_SIZES, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 4, "n_output_layers": 1}
    config = transformers.DoryConfig(**{**sizes, "n_input_layers": 1, "n_recurrent_loops": 3, **settings})
    model: Any = transformers.DoryForCausalLM(config).eval().to(DEVICE)
    options: dict[str, Any] = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    qgemm.fast_generate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            assert torch.equal(model.generate(**options), expected)


def test_values_of_a_config_that_differ_among_layers() -> None:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval().to(DEVICE)
    options: dict[str, Any] = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    model.config.kv_lora_rank = None
    model.config.per_layer_config = {1: {"kv_lora_rank": 16}}
    qgemm.fast_generate(model)
    assert torch.equal(model.generate(**options), expected)
    qgemm.fast_generate(model, cache_dtype=torch.int8)
    with pytest.warns(UserWarning, match="LlamaForCausalLM has no KeyValueCache"):
        assert torch.equal(model.generate(**options), expected)


def test_decoding_of_a_class_goes_to_it() -> None:
    """CSM's has a step for each codebook, and tokens ``[B, frames, codebooks]``."""
    sizes = {**_SIZES, "vocab_size": 40, "head_dim": 16, "num_codebooks": 4, "bos_token_id": 1, "pad_token_id": 2}
    depth = {**sizes, "backbone_hidden_size": 64, "max_position_embeddings": 33}
    of_ids = {"text_vocab_size": 97, "codebook_pad_token_id": 38, "audio_token_id": 90, "audio_eos_token_id": 91}
    torch.manual_seed(0)
    config = transformers.CsmConfig(**sizes, **of_ids, depth_decoder_config=depth)
    model: Any = transformers.CsmForConditionalGeneration(config).eval().to(DEVICE)
    options = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**options)
    assert expected.shape == (3, 3, 4)
    with pytest.warns(UserWarning, match="not qgemm's: CsmForConditionalGeneration decodes in a way of its own"):
        assert torch.equal(model.generate(**options, custom_generate=qgemm.generate), expected)
    qgemm.fast_generate(model)
    assert torch.equal(model.generate(**options), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torchscript_go_to_transformers() -> None:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval()
    model.lm_head = torch.jit.trace(model.lm_head, torch.zeros(1, 64))
    model.to(DEVICE)
    options: dict[str, Any] = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**options)
    qgemm.fast_generate(model)
    with pytest.warns(UserWarning, match="not qgemm's: it has modules of TorchScript"):
        assert torch.equal(model.generate(**options), expected)
