"""Servers with the API of OpenAI, asked over HTTP: ``transformers serve`` with its continuous batching, and vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import vllm_worker
from benchmarks.models.measure import Request, Sizes, check_lengths, draw_requests, wrong_answer
from benchmarks.models.providers import PROVIDERS
from benchmarks.models.results import HTTP, STREAM, Figure
from benchmarks.models.shapes import ModelShape
from benchmarks.peers import first_line

ROOT = Path(__file__).parents[2]
TRANSFORMERS = "from transformers.cli.transformers import app; app()"
CPU_BLOCK = 256
SECONDS_TO_START = 400.0


def measure_server(shape: ModelShape, name: str, layers: int, sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Figures of one provider, answered at once and streamed. ``device``: of ``transformers serve``."""
    vocabulary: int = shape.make_config().vocab_size
    with tempfile.TemporaryDirectory() as folder:
        _save_tokenizer(folder, vocabulary)
        if name.startswith("vllm"):
            model, note = None, vllm_worker.NOTE
            vllm_worker.save_config(folder, shape, layers, name)
            command = _vllm(folder, sizes)
        else:
            model = shape.build(device, layers)
            note = "; ".join(PROVIDERS[name].prepare(model))
            model.save_pretrained(folder)
            command = _transformers(name, folder, device, sizes)
        base = Figure(shape.name, layers, name, HTTP, note=note)
        with _running(command) as url:
            for measure in (HTTP, STREAM):
                for count in sizes.requests:
                    figure = replace(base, measure=measure, batch=count, context=sizes.prompts[1])
                    try:
                        yield _asked(figure, url, folder, model, vocabulary, sizes)
                    except Exception as error:  # one size that fails leaves the others
                        yield replace(figure, reason=first_line(error))


def _asked(figure: Figure, url: str, folder: str, model: Any, vocabulary: int, sizes: Sizes) -> Figure:
    """New tokens a second of all requests at once; the first batch isn't counted, since servers still prepare."""
    first = sizes.rounds + 1 if figure.measure == STREAM else 0  # servers keep what they know of prompts
    batches = [draw_requests(figure.batch, sizes, vocabulary, first + turn) for turn in range(sizes.rounds + 1)]
    seconds = []
    for requests in batches:
        taken, bodies = asyncio.run(_ask(url, [_question(figure, folder, request) for request in requests]))
        seconds.append(taken)
        answers = [_read(body) for body in bodies]
        check_lengths(requests, answers)
    if model is not None and (reason := wrong_answer(model, requests, answers)):
        return replace(figure, reason=reason)
    return replace(figure, value=sum(request.new for request in batches[0]) / statistics.median(seconds[1:]))


def _question(figure: Figure, folder: str, request: Request) -> dict[str, Any]:
    """The body of a request for text, with greedy decoding."""
    prompt = " ".join(f"t{token}" for token in request.prompt)
    body = {"model": folder, "prompt": prompt, "max_tokens": request.new, "temperature": 0}
    if figure.provider.startswith("vllm"):  # models that transformers serves have no token that ends an answer
        body["ignore_eos"] = True
    return {**body, "stream": True} if figure.measure == STREAM else body


async def _ask(url: str, questions: Sequence[dict[str, Any]]) -> tuple[float, list[bytes]]:
    """Seconds from the first request to the end of the last answer, and what was answered."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def ask(question: dict[str, Any]) -> bytes:
            async with client.stream("POST", f"{url}/v1/completions", json=question) as answer:
                body = b"".join([piece async for piece in answer.aiter_raw()])
                if answer.status_code != 200:
                    raise RuntimeError(f"status {answer.status_code}: {body[:300].decode(errors='replace')}")
                return body

        start = time.perf_counter()
        bodies = await asyncio.gather(*map(ask, questions))
        return time.perf_counter() - start, bodies


def _read(body: bytes) -> list[int]:
    """The tokens of an answer, or of a stream of its pieces. Raises ``RuntimeError`` if a piece is an error."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    pieces = [json.loads(line) for line in lines if line.startswith("{")]
    if errors := [str(piece["error"]) for piece in pieces if "error" in piece]:
        raise RuntimeError(errors[0])
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    return [int(word.removeprefix("t")) for word in text.split()]


def _save_tokenizer(folder: str, vocabulary: int) -> None:
    """A tokenizer with a word for each token and no special ones: all that is answered can be read."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{index}": index for index in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _vllm(folder: str, sizes: Sizes) -> list[str]:
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    longest = 2 * (sizes.prompts[1] + sizes.answers[1])  # vLLM first estimates tokens by characters
    return [*module, "--load-format", "dummy", "--max-model-len", str(longest), "--disable-uvicorn-access-log"]


def _transformers(name: str, folder: str, device: torch.device, sizes: Sizes) -> list[str]:
    """The command ``transformers serve``, of quantized models as the example starts it."""
    program = ["-c", TRANSFORMERS] if name == "bf16" else [str(ROOT / "examples" / "serve.py")]
    command = [sys.executable, *program, "serve", folder, "--continuous-batching", "--device", device.type]
    if device.type == "cpu":  # its default takes all memory, as on a GPU
        blocks = max(sizes.requests) * ((sizes.prompts[1] + sizes.answers[1]) // CPU_BLOCK + 2)
        sizes_of_a_cpu = {"block-size": CPU_BLOCK, "num-blocks": blocks, "max-batch-tokens": 512}
        command += [f"--cb-{option}={value}" for option, value in sizes_of_a_cpu.items()]
    return command


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[str]:
    """The address of a server that answers. Raises ``RuntimeError`` with its last line if it ends before."""
    import httpx

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    url = f"http://localhost:{port}"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **vllm_worker.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    del environ["VLLM_ENABLE_V1_MULTIPROCESSING"]  # vLLM's server has processes
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen([*command, "--port", str(port)], env=environ, stdout=said, stderr=said)
        try:
            end = time.monotonic() + SECONDS_TO_START
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                if server.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    lines = said.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                    raise RuntimeError(f"the server didn't start, and said: {lines[-1][:300]}")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
