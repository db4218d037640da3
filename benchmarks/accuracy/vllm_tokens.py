"""Greedy tokens of a quantized model in vLLM, each checked against transformers' forward pass.

    python -m benchmarks.accuracy.train FOLDER --size full
    python -m benchmarks.accuracy.vllm_tokens FOLDER --scheme int8 --scheme fp8 --dtype bfloat16

``FOLDER`` has a trained model in float: logits of random weights are so close that rounding decides. Each scheme is
quantized, written and served; vLLM continues prompts of text that the model wasn't trained on. The same quantized model
in transformers then reads prompt and answer. At every new token its largest logit is compared with that of vLLM's
token: a gap of 0 is the same choice. Gaps are in standard deviations of the logits; those of rounding are hundredths,
and a wrong token is several below.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import qgemm
from benchmarks.models.measure import gaps
from benchmarks.results import environment, write_json
from benchmarks.tables import Table, render

MAX_GAP = 0.1
"""The largest gap that rounding explains: in bfloat16, 0.037 was measured."""


@dataclass(frozen=True)
class Checked:
    """``same``: the tokens, of ``tokens``, with the largest logit. ``whole``: the prompts, of ``prompts``, all of whose
    tokens have it. ``gap``: the largest."""

    scheme: str
    dtype: str
    tokens: int
    same: int
    prompts: int
    whole: int
    gap: float


def main(arguments: Sequence[str] | None = None) -> list[Checked]:
    """Checks what the command line asks for and prints it; exits with 1 if a gap is above ``MAX_GAP``."""
    args = _parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = load_file(args.folder / "tokens.safetensors")["held_out"]
    prompts = prompts_of(held_out, args.prompts, args.longest)
    checked = [_check(args, scheme, prompts, device) for scheme in args.scheme]
    about = environment(device, args.commit)
    print(f"{about['device']}, {about['versions']}, commit {about['commit']}\n")
    print(render(table(checked), markdown=True))
    if args.json:
        write_json(args.json, [about, *map(asdict, checked)])
    if not all(one.gap <= MAX_GAP for one in checked):
        sys.exit(1)
    return checked


def prompts_of(tokens: Tensor, count: int, longest: int) -> list[list[int]]:
    """``count`` prompts of 1 to ``longest`` tokens, far apart in a text."""
    starts = range(0, len(tokens) - longest, max((len(tokens) - longest) // count, 1))[:count]
    return [tokens[start : start + 1 + at % longest].tolist() for at, start in enumerate(starts)]


def gaps_of_answers(model: Any, prompts: Sequence[list[int]], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """The gap of each token of each answer."""
    return [
        gaps(model, torch.tensor([[*prompt, *answer]], device=model.device), len(answer))[0].cpu()
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def table(checked: Sequence[Checked]) -> Table:
    """A row a scheme."""
    rows = [
        [one.scheme, one.dtype, f"{one.same:,} of {one.tokens:,}", f"{one.whole} of {one.prompts}", f"{one.gap:.3f}"]
        for one in checked
    ]
    return ["scheme", "dtype", "the largest logit", "whole answers", "the largest gap"], rows


def _check(args: argparse.Namespace, scheme: str, prompts: list[list[int]], device: torch.device) -> Checked:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
        calibration = None
        if qgemm.scheme.resolve_scheme(scheme).needs_data:
            tokens = load_file(args.folder / "tokens.safetensors")["calibration"].long()
            calibration = [{"input_ids": tokens[: 32 * 128].view(32, 128)}]
        qgemm.quantize_model(model, scheme, calibration=calibration, progress=False).save_pretrained(folder)
        options = {"dtype": args.dtype, "enforce_eager": args.eager, "max_model_len": args.longest + args.new}
        # Of its own, since vLLM takes most of a GPU's memory, and gives it back when it ends.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            answers = process.submit(_answers, folder, prompts, args.new, options).result()
    found = gaps_of_answers(model.to(device), prompts, answers)
    together = torch.cat(found)
    return Checked(
        scheme, args.dtype, len(together), int((together == 0).sum()), len(found),
        sum(not bool(each.any()) for each in found), float(together.max()),
    )  # fmt: skip


def _answers(folder: str, prompts: list[list[int]], new: int, options: dict[str, Any]) -> list[list[int]]:
    """The greedy tokens of vLLM, whose engine is in this process: one of its own wouldn't end with this."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, skip_tokenizer_init=True, **options)
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.vllm_tokens", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="what benchmarks.accuracy.train wrote")
    parser.add_argument("--scheme", action="append", help="int8 if none is named; once for each")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=24, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--eager", action="store_true", help="without compilation and CUDA graphs")
    parser.add_argument("--json", type=Path, help="writes what is printed there")
    parser.add_argument("--commit", help="the commit measured, where the tree has no git")
    args = parser.parse_args(arguments)
    args.scheme = args.scheme or ["int8"]
    return args


if __name__ == "__main__":
    main()
