"""Python code in a process of its own, forked from one that has imported what takes seconds: PyTorch, no qgemm.

It has not imported transformers or PEFT either, so that code can test in which order they are imported. Other code is
forked from a process that has imported transformers, too.
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
# With the parts of PyTorch that transformers imports.
FORKED.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx"])


def run_process(
    script: Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    timeout: int = 300,
    transformers: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``python script arguments`` prints and returns, in the working directory and environment of the caller.

    ``transformers``: whether that is imported already, which takes longer than most scripts; nothing comes from a hub.
    """
    command = [str(script), *map(str, arguments)]
    environment = {**os.environ} if environment is None else {**environment}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        run = command, os.getcwd(), environment, files, timeout
        if transformers:
            server = _with_transformers()
            server.send(run)
            code = server.recv()
        else:
            process = FORKED.Process(target=_run, args=run)
            process.start()
            process.join()
            code = process.exitcode or 0
        out, err = (path.read_text(encoding="utf-8") for path in files)
    return subprocess.CompletedProcess(command, code, out, err)


@functools.cache
def _with_transformers() -> Connection:
    """To a process that has imported transformers, and runs what it is sent in forks of its own, one by one."""
    ours, its = FORKED.Pipe()
    FORKED.Process(target=_serve, args=(its,), daemon=True).start()
    return ours


def _serve(connection: Connection) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # which is read at the import
    importlib.import_module("transformers.models.llama.modeling_llama")
    while True:
        run = connection.recv()
        if not (child := os.fork()):
            _run(*run)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def keep_what_is_imported() -> None:
    """For a process that was forked from ``FORKED``'s: there is nothing to free, and to look for it takes long."""
    gc.freeze()
    gc.set_threshold(10_000)


def run_code(code: str, *arguments: object, transformers: bool = False) -> str:
    """What ``python -c code arguments`` prints; an error if it fails. ``transformers``: as in ``run_process``."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "code.py")
        script.write_text(code, encoding="utf-8")
        result = run_process(script, *arguments, transformers=transformers)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def _run(command: list[str], cwd: str, environment: dict[str, str], files: list[Path], timeout: int) -> None:
    signal.alarm(timeout)  # ends the process
    keep_what_is_imported()
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    # As for a script: its folder is there, that of the tests isn't.
    sys.path[:] = [str(Path(command[0]).parent), *(path for path in sys.path if path != str(Path(__file__).parent))]
    code = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
