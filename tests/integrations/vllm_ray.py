"""A model on four ranks in two Ray nodes of this machine: ``python -m integrations.vllm_ray FOLDER`` prints the tokens.

They are the ranks of two machines with two GPUs each: a node has half of the layers, and each of its ranks has columns
and rows of these. vLLM's platform for CPUs has no ranks in Ray; ``RayCpuPlatform`` has, one for what Ray takes for a
GPU. vLLM finds it in each of its processes, as it finds every plugin for a platform, by an entry point: of a package
that ``plugin`` writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from integrations.vllm_engine import answers, engine, tokens_of

# Compiled: with --enforce-eager, vLLM's build for CPUs makes no buffers for what a stage gets of the one before.
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "enforce_eager": False,
}


def plugin(folder: Path) -> None:
    """Writes to ``folder``, which is to be in ``PYTHONPATH``, metadata of a package that has the platform."""
    package = folder / "vllm_ray_platform-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ray-platform\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_cpu = integrations.vllm_ray_platform:qualified_name\n"
    )


@contextlib.contextmanager
def two_nodes(environment: Mapping[str, str], scratch: Path) -> Iterator[str]:
    """The address of a cluster of two Ray nodes, with two ranks each. What they print is in ``scratch``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Not in pytest's folder: names of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as up:
        head = ["--head", "--port", address.partition(":")[2], "--include-dashboard", "false", "--temp-dir", folder]
        for name, arguments in (("first", head), ("second", ["--address", address])):
            up.enter_context(_node(arguments, environment, scratch / name))
        yield address


@contextlib.contextmanager
def _node(arguments: list[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
    command += ["--num-cpus", "2", "--num-gpus", "2", "--object-store-memory", "100000000"]
    with log.open("w") as out:
        node = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            if node.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"Ray didn't start: {log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield
    finally:
        node.terminate()  # and it ends the others
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)


def held(worker: Any) -> tuple[str, list[str]]:
    """The Ray node of a rank, and its layers that qgemm computes."""
    import ray

    from qgemm.integrations.vllm.linear import QGemmLinearMethod

    layers = worker.get_model().named_modules()
    names = [name for name, layer in layers if isinstance(getattr(layer, "quant_method", None), QGemmLinearMethod)]
    return ray.get_runtime_context().get_node_id(), names


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for a function to go to the ranks
    served = engine(Path(sys.argv[1]), **OPTIONS)
    print(json.dumps([tokens_of(answers(served)), served.collective_rpc(held)]), flush=True)
    os._exit(0)  # what ranks leave behind isn't waited for
