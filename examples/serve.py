"""``transformers serve`` with quantized models: a server that imports qgemm, and a request to it over HTTP.

``python examples/serve.py serve FOLDER`` is the command ``transformers serve FOLDER`` for a quantized folder, with all
of its options. Without arguments the script makes a small quantized model, starts that command in a process of its own
and asks it. Needs ``pip install fastapi uvicorn openai``.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

import qgemm

WORDS = 100
PROMPT = [3, 14, 25, 36, 47]
NEW_TOKENS = 6


def serve() -> None:
    """What the command ``transformers`` does, with models that are fused, and whose ``generate`` is the fast one."""
    from transformers.cli.serving import model_manager
    from transformers.cli.transformers import app

    class FastModels(model_manager.ModelManager):
        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            model, processor = super().load_model_and_processor(*args, **kwargs)
            if "generate" not in vars(model):
                qgemm.fast_generate(qgemm.fuse(model))
            return model, processor

    model_manager.ModelManager = FastModels
    app()


def save_model(folder: Path) -> list[int]:
    """Saves a small quantized model of random weights and its tokenizer; returns the tokens that it generates."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, initializer_range=0.1, eos_token_id=WORDS - 1, pad_token_id=0, **sizes)
    model = qgemm.quantize_model(LlamaForCausalLM(config).eval())
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[0, len(PROMPT) :].tolist()


def ask(url: str, question: dict[str, Any] | None = None) -> Any:
    """The JSON that the server answers."""
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        try:
            ask(url)
            return
        except OSError:
            if server.poll() is not None:
                sys.exit(f"The server ended with exit code {server.returncode}.")
            time.sleep(0.1)
    sys.exit("The server didn't answer for two minutes.")


def main() -> None:
    needed = ("fastapi", "uvicorn", "openai")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        sys.exit(f"This example needs {missing[0]}, which isn't installed: pip install {' '.join(missing)}")
    if sys.argv[1:]:
        return serve()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        expected = save_model(Path(folder))
        server = subprocess.Popen([sys.executable, __file__, "serve", folder, "--port", str(port), "--device", "cpu"])
        try:
            wait_for(f"http://localhost:{port}/health", server)
            question = {
                "model": folder,
                "prompt": " ".join(f"w{token}" for token in PROMPT),
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
            }
            text = ask(f"http://localhost:{port}/v1/completions", question)["choices"][0]["text"]
        finally:
            server.terminate()
            server.wait()
    print(f"{question['prompt']} -> {text}")
    same = text.split() == [f"w{token}" for token in expected]
    print(f"the tokens of generate: {'yes' if same else 'no'}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
