"""vLLM on the same shapes, with dummy weights of its own: its outputs aren't compared with anything."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models.measure import Request, Sizes, check_lengths, decoding_rate, draw_requests, median_seconds
from benchmarks.models.results import DECODE, PREFILL, SERVE, Figure
from benchmarks.models.shapes import ModelShape
from benchmarks.peers import first_line
from qgemm.checkpoint.manifest import Manifest
from qgemm.scheme import SCHEMES

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles CUDA code, which not every machine can
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
NOTE = "its own weights, outputs not compared"
QGEMM = "vllm qgemm"
_TYPES = {"vllm int8": "int", "vllm fp8": "float"}


def measure_vllm(shape: ModelShape, name: str, layers: int, measures: Sequence[str], sizes: Sizes) -> Iterator[Figure]:
    """Figures of vLLM in bf16, in compressed-tensors' int8 or fp8 (a scale a row and a token), or in qgemm's int8."""
    os.environ.update(ENVIRONMENT)
    if name == QGEMM:  # vLLM finds it by itself where qgemm is installed, but not in a copy of the tree
        importlib.import_module("qgemm.integrations.vllm").register()
    vllm = importlib.import_module("vllm")
    base = Figure(shape.name, layers, name, "", note=NOTE)
    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, shape, layers, name)
        engine = vllm.LLM(model=folder, **_settings(measures, sizes))

    def settings(new: int) -> Any:
        return vllm.SamplingParams(max_tokens=new, min_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)

    def generate(batch: int, length: int, new: int) -> None:
        prompts = [
            {"prompt_token_ids": [(7 * row + column) % 30000 + 10 for column in range(length)]} for row in range(batch)
        ]
        engine.generate(prompts, settings(new), use_tqdm=False)

    def serve(turns: Iterator[Sequence[Request]]) -> None:
        requests = next(turns)
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        done = engine.generate(prompts, [settings(request.new) for request in requests], use_tqdm=False)
        check_lengths(requests, [one.outputs[0].token_ids for one in done])

    if PREFILL in measures:
        batch, length = sizes.prefill
        seconds = median_seconds(lambda: generate(batch, length, 1), sizes.rounds)
        yield replace(base, measure=PREFILL, batch=batch, context=length, value=batch * length / seconds)
    for count in sizes.requests if SERVE in measures else ():
        figure = replace(base, measure=SERVE, batch=count, context=sizes.prompts[1])
        vocabulary = shape.make_config().vocab_size
        turns = [draw_requests(count, sizes, vocabulary, turn) for turn in range(sizes.rounds + 1)]
        try:
            seconds = median_seconds(partial(serve, iter(turns)), sizes.rounds)
        except Exception as error:
            yield replace(figure, reason=first_line(error))
            continue
        yield replace(figure, value=sum(request.new for request in turns[0]) / seconds)
    for context in sizes.contexts if DECODE in measures else ():
        for batch in sizes.batches:
            figure = replace(base, measure=DECODE, batch=batch, context=context)
            new = sizes.new_tokens(batch, context)
            try:
                rate = decoding_rate(partial(generate, batch, context), batch, new, sizes.rounds)
            except Exception as error:
                yield replace(figure, reason=first_line(error))
                continue
            yield replace(figure, value=rate)


def _settings(measures: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Of the engine."""
    longest = max(*sizes.contexts, sizes.prefill[1]) + sizes.new_tokens(1024, 1024)
    # CUDA graphs of the batches that are measured, but of vLLM's choice where batches shrink as requests end.
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sorted({1, *sizes.batches})}}
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(longest, sizes.prompts[1] + sizes.answers[1]),
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16384,
        **({} if SERVE in measures else graphs),
    }


def save_config(folder: str, shape: ModelShape, layers: int, name: str) -> None:
    """Writes all that vLLM needs for dummy weights."""
    Path(folder, "config.json").write_text(json.dumps(_config(shape, layers, name)), encoding="utf-8")


def _config(shape: ModelShape, layers: int, name: str) -> dict[str, Any]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = shape.make_config(layers)
    values: dict[str, Any] = config.to_dict()
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    values |= {"architectures": [mapping[type(config)].__name__], "torch_dtype": "bfloat16"}
    if name == QGEMM:
        model = shape.build(torch.device("meta"), layers)
        linear = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
        experts = [layer for layer, _ in model.named_modules() if layer.endswith(".mlp.experts")]
        names = [layer for layer in (*linear, *experts) if layer != "lm_head"]
        values["quantization_config"] = Manifest(dict.fromkeys(names, SCHEMES["int8"]), {}).to_dict()
    elif (kind := _TYPES.get(name)) is not None:
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        values["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", r"re:.*\.mlp\.gate$"],  # the routers of mixtures
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**common, "strategy": "channel", "dynamic": False},
                    "input_activations": {**common, "strategy": "token", "dynamic": True},
                }
            },
        }
    return values
