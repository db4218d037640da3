"""vLLM with a quantized model: a server that finds qgemm by itself, and a request to it through the OpenAI client.

The script makes a small quantized model, runs ``vllm serve`` for its folder, asks it, and compares the tokens with
transformers'. Needs vLLM, and qgemm installed in its environment.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

import qgemm

WORDS = 100
PROMPT = [3, 14, 25, 36, 47]
NEW_TOKENS = 6


def save_model(folder: Path) -> list[int]:
    """Saves a small quantized model of random weights and its tokenizer; returns the tokens that it generates."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, initializer_range=0.1, eos_token_id=None, pad_token_id=0, **sizes)
    model = qgemm.quantize_model(LlamaForCausalLM(config).eval())
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[0, len(PROMPT) :].tolist()


def wait_for(address: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            if server.poll() is not None:
                sys.exit(f"The server ended with exit code {server.returncode}.")
            time.sleep(0.5)
    sys.exit("The server didn't answer for five minutes.")


def main() -> None:
    if missing := [name for name in ("vllm", "openai") if importlib.util.find_spec(name) is None]:
        sys.exit(f"This example needs {missing[0]}, which isn't installed: pip install {' '.join(missing)}")
    from openai import OpenAI

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        expected = save_model(Path(folder))
        # In float32, so that the tokens are those of transformers on a CPU.
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--port", str(port)]
        options = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}  # GB; on a GPU without effect
        server = subprocess.Popen([*command, *options], stdout=sys.stderr, env=environment)
        try:
            wait_for(f"http://localhost:{port}", server)
            client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
            body = {"return_token_ids": True, "ignore_eos": True}
            answer = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0, extra_body=body
            )
        finally:
            server.terminate()
            server.wait()
    tokens = answer.choices[0].model_dump()["token_ids"]
    print(f"{PROMPT} -> {tokens}")
    print(f"the tokens of transformers: {'yes' if tokens == expected else 'no'}")
    if tokens != expected:
        sys.exit(1)


if __name__ == "__main__":
    main()
