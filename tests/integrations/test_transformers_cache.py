"""``KeyValueCache`` and the attention "qgemm": what models generate with them, what they read, what they refuse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from fusion.structures import STRUCTURES
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import qgemm
from qgemm.kernels.rotary.call import RotaryCall
from tests.operators import Operators

CONFIG: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "max_position_embeddings": 512,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3": SLIDING,
    "GptOss": {
        **SLIDING,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default"},
    },
}
PROMPT = 12  # longer than a window, and than what decode_attention takes with 8 more


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with weights that are large enough for its tokens to differ."""
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**CONFIG | FAMILIES[family] | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(std=1.0 if "embed" in name or "sinks" in name else 0.1)
    return model.to(dtype)


def prompts(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(2, 128, (2, PROMPT))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: nn.Module, inputs: dict[str, Tensor], cache: Any = None, tokens: int = 8, **options: Any) -> Tensor:
    """Tokens and, side by side with them, the logits of each."""
    out = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip
    return torch.cat((out.sequences[:, -tokens:].T[..., None], torch.stack(out.logits)), -1)


def new_cache(model: Any, dtype: torch.dtype | None = None, max_batch: int = 3) -> Any:
    return qgemm.KeyValueCache(model.config, max_batch, 64, dtype)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_generates_the_same_tokens(family: str, padded: bool) -> None:
    model, inputs = model_of(family), prompts(padded)
    model.set_attn_implementation("eager")
    wanted = generate(model, inputs)
    for attention in ("qgemm", "eager" if family in ("Gemma2", "GptOss") else "sdpa"):
        model.set_attn_implementation(attention)
        cache = new_cache(model)
        found = generate(model, inputs, cache)
        assert torch.equal(found[..., 0], wanted[..., 0]), attention
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert cache.used == cache.length.item() == cache.get_seq_length() == PROMPT + 7
        if attention == "qgemm":
            assert (cache.start is None) == (not padded)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_window_longer_than_the_cache_hides_nothing(padded: bool) -> None:
    model, inputs = model_of("Mistral", sliding_window=100), prompts(padded)
    wanted = generate(model, inputs)
    model.set_attn_implementation("qgemm")
    cache = new_cache(model)
    torch.testing.assert_close(generate(model, inputs, cache), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_bfloat16(family: str) -> None:
    model, inputs = model_of(family, torch.bfloat16), prompts(padded=True)
    wanted = generate(model, inputs)
    model.set_attn_implementation("qgemm")
    found = generate(model, inputs, new_cache(model))
    assert torch.equal(found[..., 0], wanted[..., 0])
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)


def test_layers_that_share_keys_see_a_prompt_before_rounding() -> None:
    """Gemma 4's: the first of them stores the keys, and others read them after it."""
    model: Any = STRUCTURES["gemma4"]().model
    model.set_attn_implementation("qgemm")
    ids = torch.randint(2, 90, (2, 22))
    with torch.no_grad():
        exact, found = (
            torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1], dim=1)], 1)
            for cache in (new_cache(model), new_cache(model, torch.int8))
        )
    assert torch.equal(exact[:, :20], found[:, :20])
    assert 0 < (found[:, 20:] - exact[:, 20:]).std() / exact[:, 20:].std() < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_is_near(family: str) -> None:
    model = model_of(family)
    ids = torch.randint(2, 128, (2, 40))
    model.set_attn_implementation("qgemm")
    logits: list[Tensor] = []
    for dtype in (None, torch.int8):
        cache = new_cache(model, dtype)
        with torch.no_grad():
            steps = [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 18], dim=1)]
        logits.append(torch.cat(steps, 1))
    exact, found = logits
    # A prompt that nothing is cached before is computed before rounding.
    assert torch.equal(exact[:, :20], found[:, :20])
    error = (found[:, 20:] - exact[:, 20:]).std() / exact[:, 20:].std()
    assert 0 < error < 0.02
    # Attention that isn't qgemm's is given the same values in float.
    cache = new_cache(model, torch.int8)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        others = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 18], dim=1)], 1)
    assert (others - exact).std() / exact.std() < 0.03


def test_half_the_memory() -> None:
    model = model_of("Llama", torch.bfloat16)
    sizes = []
    for dtype in (torch.bfloat16, torch.int8):
        cache = new_cache(model, dtype)
        generate(model, prompts(padded=False), cache, tokens=2)
        tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        sizes.append(sum(each.nbytes for each in tensors))
    # Of 16 values; the scale is a fourth of them.
    assert sizes[1] / sizes[0] == (16 + 4) / 32


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("more", [3, 20])  # of these, decode_attention takes 3 at a time
def test_a_conversation_goes_on(more: int, padded: bool) -> None:
    model, inputs = model_of("Gemma3"), prompts(padded)
    further = torch.randint(2, 128, (2, more))
    outs = []
    for attention in ("eager", "qgemm"):
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config) if attention == "eager" else new_cache(model)
        first = generate(model, inputs, cache)[..., 0].T.long()
        ids = torch.cat((inputs["input_ids"], first, further), 1)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 8 + more, dtype=torch.int64)), 1)
        outs.append(generate(model, {"input_ids": ids, "attention_mask": mask}, cache))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


def test_a_cache_is_reused_at_the_same_addresses() -> None:
    model = model_of("Llama")
    model.set_attn_implementation("qgemm")
    cache = new_cache(model)
    generate(model, prompts(padded=True), cache)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    inputs = prompts(padded=False)
    wanted = generate(model, inputs, new_cache(model))
    cache.reset()
    assert (cache.used, cache.length.item(), cache.start) == (0, 0, None)
    assert torch.equal(generate(model, inputs, cache), wanted)
    # Fewer sequences, and going back to a part of what was there.
    cache.rewind(PROMPT - 1)
    last = model(inputs["input_ids"][:, -1:], past_key_values=cache).logits[:, 0]
    torch.testing.assert_close(last, wanted[0, :, 1:], rtol=1e-4, atol=1e-4)
    cache.crop(-1)
    with pytest.raises(ValueError, match="as a negative number, and got 1"):
        cache.crop(1)
    assert cache.used == cache.length.item() == PROMPT - 1
    cache.crop(-PROMPT)  # more than there are
    assert cache.used == 0
    cache.reset()
    alone = generate(model, {name: x[1:] for name, x in inputs.items()}, cache)
    torch.testing.assert_close(alone, wanted[:, 1:], rtol=1e-4, atol=1e-4)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert cache.batch_size == 1


def test_what_was_stored_in_inference_mode_can_be_continued_outside() -> None:
    model, inputs = model_of("Llama"), prompts(padded=False)
    with torch.inference_mode():
        cache = new_cache(model)
        generate(model, inputs, cache)
    cache.rewind(0)
    assert torch.equal(generate(model, inputs, cache), generate(model, inputs, new_cache(model)))


def test_guesses_that_are_rejected_are_forgotten() -> None:
    model, inputs = model_of("Llama"), prompts(padded=False)
    one = {name: x[:1].repeat(1, 3) for name, x in inputs.items()}
    options = {"max_new_tokens": 20, "do_sample": False}
    cache = new_cache(model)
    found = model.generate(**one, past_key_values=cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, model.generate(**one, **options))
    assert cache.used == found.shape[1] - 1


def test_masks_of_a_forward_are_not_those_of_the_next() -> None:
    """With a length that only the device knows, as after compiled code."""
    model = model_of("Llama")
    model.set_attn_implementation("qgemm")
    ids = torch.randint(2, 128, (1, 60))
    found = []
    for knows in (True, False):
        cache = new_cache(model)
        for begin in range(0, 60, 20):
            if not knows:
                cache.tokens.used = None
            found.append(model(ids[:, begin : begin + 20], past_key_values=cache).logits)
    torch.testing.assert_close(found[3:], found[:3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("announced", [False, True])
def test_a_step_of_decoding_reads_nothing_back(announced: bool, dtype: torch.dtype | None) -> None:
    model, inputs = model_of("Gemma3"), prompts(padded=True)
    model.set_attn_implementation("qgemm")
    cache = new_cache(model, dtype)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        position = mask.cumsum(-1)[:, -1:] - 1
        step = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": mask, "position_ids": position}
        with Operators() as operators:
            if announced:
                cache.advance(1)
            model(**step, past_key_values=cache)
    assert not [name for name in operators.names if "_local_scalar_dense" in name or "nonzero" in name]
    assert operators.names.count("qgemm.store_key_value") == 3
    assert operators.names.count("qgemm.decode_attention") == 3
    assert not [name for name in operators.names if "scaled_dot_product" in name or "softmax" in name]
    assert cache.used == cache.length.item() == PROMPT + 1
    with torch.no_grad():
        model(**step, past_key_values=cache)
    assert cache.used == cache.length.item() == PROMPT + 2


@pytest.mark.parametrize("attention", ["qgemm", "eager"])
def test_masks_of_another_form(attention: str) -> None:
    model, inputs = model_of("Gemma2"), prompts(padded=False)
    inputs["attention_mask"][0, 4:7] = 0  # a hole
    model.set_attn_implementation("eager")
    wanted = generate(model, inputs)
    model.set_attn_implementation(attention)
    torch.testing.assert_close(generate(model, inputs, new_cache(model)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [DynamicCache, StaticCache], ids=["dynamic", "static"])
def test_other_caches(make: Callable[..., Any], family: str) -> None:
    model, inputs = model_of(family), prompts(padded=True)
    model.set_attn_implementation("eager")
    wanted = generate(model, inputs)
    model.set_attn_implementation("qgemm")
    cache = make(config=model.config, **({"max_cache_len": 64} if make is StaticCache else {}))
    torch.testing.assert_close(generate(model, inputs, cache), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_without_a_cache_it_trains(family: str) -> None:
    model, inputs = model_of(family), prompts(padded=True)
    grads = []
    for attention in ("eager", "qgemm"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
        logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


def test_beams() -> None:
    model, inputs = model_of("Llama"), prompts(padded=True)
    wanted = model.generate(**inputs, max_new_tokens=6, num_beams=2, do_sample=False)
    model.set_attn_implementation("qgemm")
    for dtype in (None, torch.int8):
        cache = new_cache(model, dtype, max_batch=4)
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, num_beams=2, do_sample=False)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.int8, marks=pytest.mark.complete)], ids=str)
def test_compiled_decoding(dtype: torch.dtype | None) -> None:
    model, inputs = model_of("Gemma3"), prompts(padded=True)
    model.set_attn_implementation("qgemm")
    cache = new_cache(model, dtype, max_batch=2)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        same = copy.deepcopy(cache)
        for step in range(4):
            token, position = inputs["input_ids"][:, step : step + 1], torch.tensor([[7 + step], [12 + step]])
            found = compiled(token, past_key_values=cache, position_ids=position, use_cache=True).logits
            wanted = model(token, past_key_values=same, position_ids=position).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        # Not compiled again; what was on the host isn't known there any more, and nothing asks the device.
        position = torch.tensor([[11], [16]])
        with Operators() as operators:
            found = model(token, past_key_values=cache, position_ids=position).logits
        assert not [name for name in operators.names if "_local_scalar_dense" in name]
        torch.testing.assert_close(found, model(token, past_key_values=same, position_ids=position).logits)
    assert len(graphs) == 1
    assert sum("decode_attention" in str(node.target) for node in graphs[0].graph.nodes) == 3
    assert cache.used == same.used == PROMPT + 5


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_rotate_and_store_is_an_update(dtype: torch.dtype | None) -> None:
    model = model_of("Llama")
    model.set_attn_implementation("qgemm")
    ours, wanted = new_cache(model, dtype), new_cache(model, dtype)
    for S in (5, 2):
        qkv, angles = torch.randn(2, S, 8 * 16), torch.rand(2, 1, S, 8).unbind()
        call = RotaryCall(qkv, *angles, None, None, "rms", 1e-6, 4, 2, False)
        q, key, value = torch.ops.qgemm.rotate(*call)
        for layer in range(3):
            found = ours.rotate_and_store(layer, call)
            stored = wanted.update(key, value, layer)
            assert torch.equal(found[0], q)
            assert all(torch.equal(x, y) for x, y in zip(found[1:], stored, strict=True))
            assert (found[1].about.fresh is None) == (stored[0].about.fresh is None)
    assert ours.used == wanted.used == 7


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_a_copy_of_a_layer_is_one_more_of_its_cache(dtype: torch.dtype | None) -> None:
    """As Dory makes them, whose layers run several times."""
    model = model_of("Llama")
    ours, wanted = new_cache(model, dtype), new_cache(model, dtype)
    ours.layers += [copy.deepcopy(layer) for layer in ours.layers]
    model.set_attn_implementation("qgemm")
    whole = copy.deepcopy(ours)
    for S in (5, 2):
        key, value = torch.randn(2, 2, 2, S, 16)
        stored = wanted.update(key, value, 0)
        for cache in (ours, whole):
            for each in (cache.update(key, value, layer) for layer in range(6)):
                assert all(torch.equal(x, y) for x, y in zip(each, stored, strict=True))
                assert each[0].about.tokens is cache.tokens
    assert ours.used == whole.used == wanted.used == 7
    ours.rewind(3)
    assert whole.used == 7
    assert [layer.get_seq_length() for layer in ours.layers] == 6 * [3]


def test_what_is_refused() -> None:
    model, inputs = model_of("Llama"), prompts(padded=False)
    config = model.config
    for arguments, message in (
        ((0, 64), "max_batch is 0; it must be a whole number, 1 or more"),
        ((2, True), "max_length is True"),
        ((2, 64, torch.float64), "dtype is torch.float64; it must be one of torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            qgemm.KeyValueCache(config, *arguments)
    with pytest.raises(
        TypeError, match=r"config is a LlamaForCausalLM; it must be a config of transformers: model.con"
    ):
        qgemm.KeyValueCache(model, 2, 64)
    with pytest.raises(ValueError, match="has no chunked attention"):
        qgemm.KeyValueCache(transformers.Llama4TextConfig(), 1, 64)
    with pytest.raises(ValueError, match="reads keys of its cache by itself: use a cache of transformers"):
        qgemm.KeyValueCache(transformers.LlamaConfig(recurrent_kv_cache_mode="last_loop"), 1, 64)
    with pytest.raises(ValueError, match=r"layers of the kind \w+, and a KeyValueCache keeps only keys and values"):
        qgemm.KeyValueCache(transformers.Qwen3NextConfig(num_hidden_layers=4), 1, 64)
    with pytest.raises(ValueError, match="2 sequences come, and the cache has room for 1"):
        generate(model, inputs, new_cache(model, max_batch=1))
    with pytest.raises(ValueError, match=r"keys are torch.float32 and the cache is torch.bfloat16: make it with"):
        generate(model, inputs, new_cache(model, torch.bfloat16))
    with pytest.raises(ValueError, match="room for 14 tokens, holds 14, and 1 more come"):
        generate(model, inputs, qgemm.KeyValueCache(config, 2, 14))
    with pytest.raises(ValueError, match="the cache has 1 layers, and keys of layer 1 come"):
        generate(model, inputs, qgemm.KeyValueCache(model_of("Llama", num_hidden_layers=1).config, 2, 64))
    cache = new_cache(model)
    cache.advance(3)
    with pytest.raises(ValueError, match=r"advance\(\) announced 3 tokens, and 12 came"):
        model(**inputs, past_key_values=cache)
    latent = transformers.DeepseekV3Config(
        num_hidden_layers=1, first_k_dense_replace=1, hidden_size=64, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=128, q_lora_rank=16, kv_lora_rank=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="keys have 1 heads of size 16, and values 1 of size 64"):
        transformers.DeepseekV3ForCausalLM(latent)(**inputs, past_key_values=qgemm.KeyValueCache(latent, 2, 64))
