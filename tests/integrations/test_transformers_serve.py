"""What ``transformers serve`` runs behind its routes, with a quantized folder: the tokens of ``generate``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

import qgemm
from qgemm.nn.blocks.binding import fused_of

serving = pytest.importorskip("transformers.cli.serving.utils", reason="its command isn't installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW, LAST = 6, 90
PROMPTS = ([3, 14, 25, 36, 47], [58, 69])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path_factory.mktemp("served") / "llama-int8"
    model: Any = qgemm.quantize_model(FAMILIES["llama"]().model)
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(LAST + 7)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    return path


def loaded(folder: Path, kind: type[Any], request: pytest.FixtureRequest) -> tuple[Any, Any]:
    manager = kind(device=DEVICE)
    request.addfinalizer(manager.shutdown)  # else its timer keeps the process for five minutes
    model, processor = manager.load_model_and_processor(f"{folder}@main")
    return model, processor


async def text_of(queue: asyncio.Queue[Any]) -> str:
    parts = []
    while (part := await queue.get()) is not None:
        assert isinstance(part, str), part
        parts.append(part)
    return "".join(parts)


@pytest.mark.parametrize("batches", [False, True], ids=["one by one", "continuous batching"])
def test_a_server_gives_the_tokens_of_generate(batches: bool, folder: Path, request: pytest.FixtureRequest) -> None:
    from transformers.cli.serving.model_manager import ModelManager

    class FastModels(ModelManager):  # type: ignore[misc]
        """As in the guide."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            model, processor = super().load_model_and_processor(*args, **kwargs)
            if "generate" not in vars(model):
                qgemm.fast_generate(qgemm.fuse(model))
            return model, processor

    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=LAST + 6, pad_token_id=0)
    plain, _ = loaded(folder, ModelManager, request)
    prompts = [torch.tensor([ids], device=DEVICE) for ids in PROMPTS]
    expected = [plain.generate(ids, generation_config=settings)[0, ids.shape[1] :] for ids in prompts]
    model, processor = loaded(folder, FastModels, request)
    assert all(fused_of(layer) is not None for layer in model.model.layers)

    async def serve() -> None:
        if batches:
            runner = serving.CBGenerateManager(ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64))
            runner.init_cb(model, settings)
        else:
            runner = serving.GenerateManager()
        for number, (ids, wanted) in enumerate(zip(prompts, expected, strict=True)):
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if batches:
                inputs = {"input_ids": ids[0].tolist()}
            text, length, found = await runner.generate_non_streaming(
                model, processor, inputs, settings, request_id=f"whole {number}"
            )
            tokens = found.tolist() if isinstance(found, Tensor) else list(found)
            assert (tokens, length) == (wanted.tolist(), ids.shape[1])
            queue, _ = runner.generate_streaming(model, processor, inputs, settings, request_id=f"stream {number}")
            assert (await text_of(queue)).split() == text.split()
        runner.stop()

    asyncio.run(asyncio.wait_for(serve(), 60))
    if not batches:
        assert vars(model)["_qgemm_generate"].told == set()  # qgemm's loop, and not transformers'
