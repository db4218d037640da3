"""Calls of ``fast_generate`` by what is in them: the tokens and the cache are those of transformers' own loop."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, MllamaForCausalLM, MllamaTextConfig, PreTrainedModel
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import qgemm
from qgemm.integrations.transformers.cache import ARGUMENT, ATTENTION
from qgemm.integrations.transformers.generate import loop
from qgemm.integrations.transformers.generate.contexts import Attention
from qgemm.integrations.transformers.generate.covered import NotCovered
from qgemm.integrations.transformers.generate.request import check_settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = (torch.arange(3, 24).reshape(3, 7) * 11 % 90 + 5).to(DEVICE)
SETTINGS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": VOCABULARY}


@pytest.fixture(scope="module")
def llama() -> Any:
    return FAMILIES["llama"]().model.to(DEVICE)


@pytest.fixture(autouse=True)
def _as_before(llama: PreTrainedModel) -> Iterator[None]:
    yield
    qgemm.fast_generate(llama, False)


def both(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``call`` gives with transformers' loop and with ours."""
    expected = call()
    qgemm.fast_generate(model)
    return expected, call()


@pytest.mark.parametrize("length", [3, 10, 30], ids=["less than the prompt", "shorter", "longer"])
def test_a_criterion_of_length_takes_the_place_of_the_setting(llama: Any, length: int) -> None:
    expected, result = both(
        llama,
        lambda: llama.generate(
            PROMPTS, **SETTINGS, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(length)])
        ),
    )
    assert expected.shape[1] == max(length, 7 + 1)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("new_alone", [False, True], ids=["all tokens", "new tokens"])
def test_a_cache_of_the_callers_that_grows_is_filled(llama: Any, new_alone: bool) -> None:
    def call() -> list[Any]:
        cache = DynamicCache(config=llama.config)
        first = llama.generate(PROMPTS, **SETTINGS, max_new_tokens=5, past_key_values=cache)
        tokens = torch.cat([first, PROMPTS[:, :3]], dim=1)
        given = tokens[:, cache.get_seq_length() :] if new_alone else tokens
        mask = torch.ones_like(tokens)
        options = {**SETTINGS, "attention_mask": mask, "max_new_tokens": 5, "past_key_values": cache}
        return [first, llama.generate(given, **options)[:, -5:], torch.tensor(cache.get_seq_length())]

    qgemm.fast_generate(llama, False)
    expected = call()
    qgemm.fast_generate(llama)
    with pytest.warns(UserWarning, match=f"{ARGUMENT} is a cache that grows; a StaticCache can be continued"):
        result = call()
    assert all(map(torch.equal, result, expected))


def test_what_a_dict_has_in_its_cache_can_be_read_by_others(llama: Any) -> None:
    def call() -> list[Tensor]:
        options = {**SETTINGS, "max_new_tokens": 5, "return_dict_in_generate": True}
        first = llama.generate(PROMPTS, **options)
        tokens = torch.cat([first.sequences, PROMPTS[:, :3]], dim=1)
        cache = first.past_key_values
        second = llama.generate(tokens, **options, output_scores=True, past_key_values=cache)  # transformers' loop
        logits = llama(second.sequences[:, -1:], past_key_values=cache).logits
        third = llama.generate(torch.cat([second.sequences, PROMPTS], dim=1), **options, past_key_values=cache)
        return [second.sequences, logits.argmax(-1), third.sequences]

    expected, result = both(llama, call)
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("make", [DynamicCache, qgemm.KeyValueCache], ids=["transformers' loop", "qgemm's loop"])
def test_a_cache_can_have_its_former_name(llama: Any, make: Any) -> None:
    """transformers has another since 5.24, and warns of this one at the line that calls its own ``generate``."""
    cache = make(llama.config, 3, 16, device=DEVICE) if make is qgemm.KeyValueCache else make(config=llama.config)
    expected = llama.generate(PROMPTS, **SETTINGS, max_new_tokens=5)
    qgemm.fast_generate(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.filterwarnings("ignore", f"generate runs.*{ARGUMENT} is a cache that grows")
        found = llama.generate(PROMPTS, **SETTINGS, max_new_tokens=5, past_key_values=cache)
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == PROMPTS.shape[1] + 4


def test_positions_of_one_row_are_those_of_all(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_PROMPT_VALUES", 1)
    positions = torch.arange(3, 10, device=DEVICE)[None]
    expected, result = both(
        llama, lambda: llama.generate(PROMPTS, **SETTINGS, max_new_tokens=5, position_ids=positions)
    )
    assert torch.equal(result, expected)


def test_adapters_of_each_prompt_are_given_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(FAMILIES["llama"]().model.to(DEVICE), settings).eval()
    names = ["default", "__base__", "default"]
    options = {**SETTINGS, "input_ids": PROMPTS, "adapter_names": names, "max_new_tokens": 5}
    expected = model.generate(**options)
    monkeypatch.setattr(loop, "MAX_PROMPT_VALUES", 1)
    qgemm.fast_generate(model)
    assert torch.equal(model.generate(**options), expected)


def test_inputs_that_hold_nothing_are_covered() -> None:
    for empty in (None, {}):
        check_settings(GenerationConfig(), {"image_outputs": empty}, synced=False)
    for value in ({"last_hidden_state": PROMPTS}, PROMPTS, 0):
        with pytest.raises(NotCovered, match="image_outputs is passed"):
            check_settings(GenerationConfig(), {"image_outputs": value}, synced=False)


def test_no_custom_generate(llama: Any) -> None:
    expected, result = both(llama, lambda: llama.generate(PROMPTS, **SETTINGS, max_new_tokens=5, custom_generate=None))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_draws_of_what_is_no_distribution_are_refused(llama: Any, value: float) -> None:
    """As by ``torch.multinomial``; of the second token here."""
    calls: list[None] = []

    def spoil(module: Any, arguments: Any, logits: Tensor) -> Tensor:
        calls.append(None)
        return logits if len(calls) == 1 else torch.full_like(logits, value)

    qgemm.fast_generate(llama)
    hook = llama.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(RuntimeError, match="scores of new token 2 are NaN or infinite"):
            llama.generate(PROMPTS, **{**SETTINGS, "do_sample": True}, max_new_tokens=4)
    finally:
        hook.remove()


def test_layers_that_see_no_image_are_left_out() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default"}}
    config = MllamaTextConfig(**sizes, **heads, cross_attention_layers=[1], pad_token_id=0, initializer_range=0.2)
    model: Any = MllamaForCausalLM(config).eval().to(DEVICE)
    expected, result = both(model, lambda: model.generate(PROMPTS, **SETTINGS, max_new_tokens=5))
    assert torch.equal(result, expected)
    with pytest.raises(ValueError, match=r"layers with cross attention, .*: use a cache of transformers"):
        qgemm.KeyValueCache(config, 1, 64)


def test_text_alone_for_a_model_that_sees_images() -> None:
    """With transformers 5.20, if not before, its loop is given what encoders said of images, which is nothing here."""
    model = FAMILIES["llava"]().model.to(DEVICE)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "generate runs")
        assert torch.equal(*both(model, lambda: model.generate(PROMPTS, **SETTINGS, max_new_tokens=5)))


def test_parts_of_a_model_keep_the_attention_that_they_have() -> None:
    model: Any = FAMILIES["llava"]().model.to(DEVICE)
    model.set_attn_implementation({"vision_config": "eager"})
    qgemm.fast_generate(model)
    model.generate(PROMPTS, **SETTINGS, max_new_tokens=2)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]


def test_the_last_call_of_all_restores_the_attention(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model may have no such part, though its class has.
    monkeypatch.setattr(type(llama.config), "sub_configs", {"audio_config": type(llama.config)})
    monkeypatch.setattr(type(llama.config), "audio_config", None, raising=False)
    attention = Attention()
    with attention.call():
        attention.use(llama, "eager")
        with attention.call():
            attention.use(llama, ATTENTION)
            assert attention.own(llama) == "sdpa"
        assert llama.config._attn_implementation == ATTENTION
    assert llama.config._attn_implementation == attention.own(llama) == "sdpa"


def test_a_call_that_ends_leaves_the_attention_to_another(llama: Any) -> None:
    """Masks of one attention are wrong for another: here the second call has a mask when the first one ends."""
    options = {**SETTINGS, "max_new_tokens": 5}
    llama.set_attn_implementation("eager")
    expected = llama.generate(PROMPTS[1:], **options)
    has_mask, ended = threading.Event(), threading.Event()
    results: list[Tensor] = []
    other = threading.Thread(target=lambda: results.append(llama.generate(PROMPTS[1:], **options)))

    def wait(*_: Any) -> None:
        if threading.current_thread() is other and not has_mask.is_set():
            has_mask.set()
            assert ended.wait(30)

    class StartsTheOther(BaseStreamer):
        def put(self, value: Tensor) -> None:
            if not has_mask.is_set():
                other.start()
                assert has_mask.wait(30)

        def end(self) -> None:
            pass

    qgemm.fast_generate(llama)
    hook = llama.model.layers[0].register_forward_pre_hook(wait)
    try:
        with pytest.warns(UserWarning, match="running another generate"):
            llama.generate(PROMPTS[:1], **options, streamer=StartsTheOther())
        ended.set()
        other.join()
        assert torch.equal(results[0], expected)
        assert llama.config._attn_implementation == "eager"
    finally:
        hook.remove()
        llama.set_attn_implementation("sdpa")
