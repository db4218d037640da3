"""Tiny models quantized and served: in this process by vLLM's ``LLM``, or by ``vllm serve`` on a port of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import qgemm

PROMPTS = [[3, 14, 25, 36, 47, 5, 9], [58, 69, 1, 2], list(range(3, 40))]
NEW, WORDS = 12, 320
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 64},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"tie_word_embeddings": False, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}


def model(family: str = "llama", **changes: Any) -> Any:
    """A model of two layers, by the name that transformers has for its family, whose greedy tokens differ."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "eos_token_id": None, "bos_token_id": 1} if family == "gpt2" else _SIZES
    config = AutoConfig.for_model(family, **{**sizes, **_OF_A_FAMILY.get(family, {}), **changes})
    # Other attention of transformers' has no limit of the logits, which Gemma 2 has.
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    made = AutoModelForCausalLM.from_config(config, **attention)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
        elif not parameter.any():  # a bias
            torch.nn.init.normal_(parameter, std=0.3)
    # Or each token would follow itself (of one embedding), or a few follow all (positions outweigh tokens).
    factor = 1 / 16 if made.config.tie_word_embeddings else 16 if family == "gpt2" else 1
    made.get_input_embeddings().weight.data *= factor
    return made.eval()


def calibration_data() -> list[dict[str, torch.Tensor]]:
    """Three batches of random tokens."""
    return [{"input_ids": torch.randint(0, WORDS, (2, 16))} for _ in range(3)]


def quantized(folder: Path, scheme: str, changes: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    """Writes a quantized model to ``folder``. Returns the tokens of transformers."""
    if qgemm.scheme.resolve_scheme(scheme).needs_data:
        options["calibration"] = calibration_data()
    made = qgemm.quantize_model(model(**(changes or {})), scheme, progress=False, **options)
    made.save_pretrained(folder)
    return tokens_of_transformers(made)


def tokens_of_transformers(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The greedy tokens of each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def tokens_of_vllm(folder: Path, adapter: Path | None = None, **options: Any) -> list[list[int]]:
    """The same of ``vllm.LLM``, an ``engine``. ``adapter``: LoRA's folder."""
    request = None
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("adapter", 1, str(adapter))
    return tokens_of(answers(engine(folder, **options), lora_request=request))


def engine(folder: Path, **options: Any) -> Any:
    """``vllm.LLM`` in float32, in this process but for several ranks."""
    parallel = max(options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")) > 1
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(parallel)))
    if parallel:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    else:
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()  # of the model before: a mixture wants a group that others don't make

    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True}
    return LLM(model=str(folder), skip_tokenizer_init=True, **{**settings, **options})


def answers(engine: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Any]:
    """What ``engine`` says of each prompt, with greedy tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs: list[Any] = engine.generate(given, sampling, use_tqdm=False, **options)
    return outputs


def tokens_of(answers: list[Any]) -> list[list[int]]:
    """The new tokens of each answer."""
    return [list(answer.outputs[0].token_ids) for answer in answers]


@contextlib.contextmanager
def counting_fused(counts: Path) -> Iterator[None]:
    """Writes what ``fusion.fuse`` returns to a file: there are engines whose models are in a process of their own."""
    from qgemm.integrations.vllm import fusion

    real = fusion.fuse

    def fuse(graph: Any) -> None:
        with counts.open("a") as file:
            file.write(f"{real(graph)} ")

    fusion.fuse = fuse  # type: ignore[assignment]
    try:
        yield
    finally:
        fusion.fuse = real


@contextlib.contextmanager
def compiled_as_on_a_gpu() -> Iterator[dict[str, Any]]:
    """Options of ``tokens_of_vllm`` with which vLLM's own compiler runs, every time: for a CPU it takes PyTorch's."""
    from torch._inductor import config as inductor
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        compilation, modes = config.compilation_config, CompilationMode
        compilation.mode = modes.STOCK_TORCH_COMPILE
        own(config)
        compilation.mode, compilation.backend = modes.VLLM_COMPILE, "inductor"
        compilation.compile_sizes, compilation.ir_enable_torch_wrap = [], True
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # so that a process of 0.22's has what tests patch

    CpuPlatform.check_and_update_config = staticmethod(check)
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    try:
        with inductor.patch(force_disable_caches=True):
            yield {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_mode": 0}}
    finally:
        del os.environ["VLLM_DISABLE_COMPILE_CACHE"]
        CpuPlatform.check_and_update_config = own


def environment_of_ranks(*folders: Path) -> dict[str, str]:
    """That of this process for others, which find the tests' modules and what is in ``folders``."""
    tests = Path(__file__).parent.parent
    paths = [*map(str, folders), str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def printed_by(module: str, arguments: list[str], scratch: Path, environment: dict[str, str]) -> Any:
    """The last line that ``python -m MODULE ARGUMENTS`` prints, read as JSON. All of it is in ``scratch``."""
    said = scratch / "said"
    with said.open("w") as out, (scratch / "errors").open("w") as errors:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors, start_new_session=True)
        try:
            code = process.wait(900)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
    assert code == 0, said.read_text()[-1000:] + (scratch / "errors").read_text()[-3000:]
    return json.loads(said.read_text().splitlines()[-1])


def save_tokenizer(folder: Path) -> None:
    """One of words ``w0``, ``w1``, ..., which a server wants."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@contextlib.contextmanager
def server(folder: Path, scratch: Path, *arguments: str) -> Iterator[str]:
    """The address of ``vllm serve FOLDER`` in float32. What it prints is in ``scratch / "log"``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--max-model-len", "128", "--port", str(port), *arguments]
    environment = {**os.environ, **SETTINGS}
    environment.pop("TRITON_INTERPRET", None)
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", process, scratch / "log")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 900) -> None:
    """Returns when ``address`` answers; raises with the end of ``log`` if the process ends before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"no answer from {address}: {log.read_text()[-3000:]}")


def tell_the_version() -> None:
    """Writes metadata of a package "vllm": its build for CPUs has another name, and its command asks for that one."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
        folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    tell_the_version()
