"""The benchmark of servers: what it asks over HTTP, how it reads answers, and that wrong ones are no figures."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_benchmarks_models import DECODER, SIZES

from benchmarks.models import __main__ as runner
from benchmarks.models import server
from benchmarks.models.results import HTTP, STREAM, Figure

CPU = torch.device("cpu")
ALL = replace(SIZES, requests=(3,), rounds=3)
SIZE = (3, 20)


class Answers:
    """What answers in a server's place: the tokens of ``generate``, or what a test makes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.change = lambda tokens: tokens
        self.model: Any = None
        self.lock = threading.Lock()
        monkeypatch.setattr(server, "_running", self.running)

    @contextlib.contextmanager
    def running(self, command: Sequence[str]) -> Iterator[str]:
        """As ``server._running``, of whatever program."""
        from transformers import AutoModelForCausalLM

        with contextlib.suppress(ValueError):  # vLLM's has no weights
            folder = command[command.index("serve") + 1]
            self.model = AutoModelForCausalLM.from_pretrained(folder)
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with here.lock:
                    here.asked.append({"path": self.path, **body})
                    pieces = here.pieces(body)
                self.send_response(here.status)
                self.end_headers()
                with contextlib.suppress(OSError):  # after an error nobody reads the other answers
                    self.wfile.write("".join(pieces).encode())

            def log_message(self, *about: Any) -> None:
                pass

        found = ThreadingHTTPServer(("localhost", 0), Handler)
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))  # how often it looks for its end
        thread.start()
        try:
            yield f"http://localhost:{found.server_port}"
        finally:
            found.shutdown()
            thread.join()
            found.server_close()

    def pieces(self, body: dict[str, Any]) -> list[str]:
        """What is answered to a request."""
        ids, new = torch.tensor([[int(word[1:]) for word in body["prompt"].split()]]), body["max_tokens"]
        if self.model is None:
            tokens = [0] * new
        else:
            tokens = self.model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
        words = [f" t{token}" for token in self.change(tokens)]
        if not body.get("stream"):
            return [json.dumps({"choices": [{"text": "".join(words)}]})]
        return [*(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n" for word in words), "data: [DONE]\n\n"]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


@pytest.mark.parametrize("provider", ["bf16", "qgemm", "vllm int8"])
def test_new_tokens_a_second_at_once_and_streamed(
    provider: str, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0, 50, 100, 101, 200, 202, 300, 309] * 2)
    monkeypatch.setattr(server, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = list(server.measure_server(DECODER, provider, 2, ALL, CPU))
    assert [(one.measure, one.batch, one.context, one.reason) for one in found] == [
        (HTTP, *SIZE, ""),
        (STREAM, *SIZE, ""),
    ]
    assert len(answers.asked) == 2 * 4 * 3
    new = sum(one["max_tokens"] for one in answers.asked[:3])
    assert [one.value for one in found] == [new / 2] * 2, "the first batch doesn't count, the median does"
    assert {one["path"] for one in answers.asked} == {"/v1/completions"}
    assert [one.get("stream", False) for one in answers.asked] == [False] * 12 + [True] * 12
    assert all(one["temperature"] == 0 for one in answers.asked)
    assert all(one.get("ignore_eos", False) == (provider == "vllm int8") for one in answers.asked)
    assert len({one["prompt"] for one in answers.asked}) == 24, "servers keep the keys and values of prompts"


def test_wrong_answers_are_no_figures(answers: Answers) -> None:
    def reasons() -> set[str]:
        found = list(server.measure_server(DECODER, "bf16", 2, replace(ALL, rounds=1), CPU))
        assert [one.value for one in found] == [None, None]
        return {one.reason.split(",")[0].split(" is ")[0] for one in found}

    answers.change = lambda tokens: tokens[:-1]
    assert reasons() == {"RuntimeError: wrong output: a request has 3 new tokens"}
    answers.change = lambda tokens: [*tokens[:-1], 0]
    assert reasons() == {"wrong output: a generated token's logit"}
    answers.status = 500
    assert all(reason.startswith("RuntimeError: status 500: ") for reason in reasons())


def test_an_error_within_a_stream() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        server._read(b'data: {"choices": [{"text": "t1"}]}\n\ndata: {"error": "out of memory"}\n\n')


def test_what_is_started() -> None:
    plain = server._transformers("bf16", "folder", CPU, ALL)
    assert plain[:3] == [sys.executable, "-c", server.TRANSFORMERS]
    assert plain[3:8] == ["serve", "folder", "--continuous-batching", "--device", "cpu"]
    ours = server._transformers("qgemm", "folder", torch.device("cuda"), ALL)
    assert Path(ours[1]).is_file()
    assert ours[2:] == ["serve", "folder", "--continuous-batching", "--device", "cuda"], "the defaults of a GPU"
    assert server._vllm("folder", ALL)[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "folder"]


def test_a_server_that_ends_says_why() -> None:
    program = "import sys; print('so', file=sys.stderr); sys.exit('no such model')"
    said = pytest.raises(RuntimeError, match="the server didn't start, and said: no such model")
    with said, server._running([sys.executable, "-c", program]):
        pass


def test_servers_are_measured_where_that_is_asked_for() -> None:
    few = ["--model", "llama-3-8b", "--provider", "qgemm", "--provider", "qgemm int4"]
    jobs = list(runner._jobs(runner._parse(few)))
    assert not any(HTTP in job.measures for job in jobs)
    (job,) = runner._jobs(runner._parse([*few, "--measure", "http"]))
    assert (job.providers, job.measures) == (("qgemm",), (HTTP,))


def test_figures_of_servers_are_in_the_table() -> None:
    from benchmarks.models.tables import speed_table

    base = Figure("tiny", 2, "bf16", HTTP, 64, 1024, 100.0)
    _, rows = speed_table([base, replace(base, provider="qgemm", value=250.0)])
    assert rows == [["http, 64 requests of up to 1024 tokens", "100", "250 (2.50)"]]
