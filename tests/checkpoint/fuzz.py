"""Broken checkpoints by the thousand: each is refused with a ``CheckpointError`` or loads as what its files say.

    python tests/checkpoint/fuzz.py --cases 10000 --seed 0
    python tests/checkpoint/fuzz.py --cases 10000 --seed 0 --foreign

Every case starts from one of six good folders of qgemm, or of 29 of other libraries. It breaks the folder in one to
three ways, and loads it. What may happen then:

- ``CheckpointError``;
- a model whose output equals the good one's;
- a model with other values, if a break changed values *and* their checksums: then every tensor is what an independent
  reader finds in the files;
- where files of two saves are mixed, or the folder is saved into, or files are cut, while it is loaded: one of the two
  models that were saved, bit for bit.

Of a transformers model that another library has quantized, ``from_pretrained`` may load nothing that is refused here,
and has the same layers.

Anything else is a failure: another exception, more than ``SECONDS`` of a processor's time, ``WAITED_SECONDS`` or
``MEMORY`` bytes, a file opened outside of the folder. Case ``i`` of a seed is always the same; ``--only i`` runs it
alone and shows what became of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.fuzz_breaks import Case, Change, content_of, make_case
from checkpoint.fuzz_experts import make_mixtures
from checkpoint.fuzz_foreign import make_foreign
from checkpoint.fuzz_fp8 import make_fp8
from checkpoint.fuzz_models import CONFIG, INDEX, Files, Good, Link, Special, make_good, output_of
from checkpoint.fuzz_packed import OWN_CONFIG
from qgemm import QGemmConfig
from qgemm.checkpoint import CheckpointError, load_quantized
from qgemm.checkpoint.safetensors_file import DTYPE_CODES
from qgemm.checkpoint.safetensors_reader import SafetensorsReader
from qgemm.checkpoint.tensors import FLOAT_DTYPES, named_tensors
from qgemm.nn import QuantLayer
from qgemm.numerics.packing import pack_codes

# Of a processor: the slowest of 2,200 cases takes 0.1 s. And by the clock, which other processes take their share of.
SECONDS, WAITED_SECONDS = 5, 60
LIMITS = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITED_SECONDS))
MEMORY = 512 << 20


def write_files(files: Files, folder: Path, outside: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        write_file(content, folder / name, outside)


def write_file(content: bytes | Link | Special, path: Path, outside: Path) -> None:
    if isinstance(content, Link):
        path.symlink_to(content.target.replace("{outside}", str(outside)))
    elif isinstance(content, bytes):
        path.write_bytes(content.replace(b"{outside}", str(outside).encode()))
    elif content.kind == "pipe":
        os.mkfifo(path)
    elif content.kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))


def change_files(change: Change, folder: Path, outside: Path) -> None:
    """Makes of the files in ``folder`` those of ``change``: new ones by renames, as a save does, or cut short."""
    for path in [path for path in folder.iterdir() if path.name not in change.files]:
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
    for name, content in change.files.items():
        path = folder / name
        is_bytes = isinstance(content, bytes) and path.is_file()
        if is_bytes and path.read_bytes() == content:
            continue
        if is_bytes and change.in_place:
            os.truncate(path, len(content))  # type: ignore[arg-type]
        elif not path.is_dir():
            temporary = outside / "next"
            write_file(content, temporary, outside)
            if temporary.is_dir():
                path.unlink(missing_ok=True)
            os.replace(temporary, path)


class Watch:
    """What is opened while a case runs, which Python audits; before that, and before each reading of a tensor, comes
    ``on_step``, with the number of those before.
    """

    _one: Watch | None = None

    def __new__(cls) -> Watch:
        """The only one of the process: nothing takes back what Python calls, some million times a minute."""
        if cls._one is None:
            cls._one = super().__new__(cls)
            cls._one._begin()
        return cls._one

    def _begin(self) -> None:
        self.opened: list[str] | None = None
        self.on_step: Callable[[int], None] | None = None
        self._steps = 0
        sys.addaudithook(self._audit)
        plain = SafetensorsReader.read

        def read(reader: SafetensorsReader, name: str) -> Tensor:
            self._step()
            return plain(reader, name)

        SafetensorsReader.read = read  # type: ignore[method-assign]

    def start(self, on_step: Callable[[int], None] | None = None) -> None:
        self.opened, self.on_step, self._steps = [], on_step, 0

    def _step(self) -> None:
        opened, self.opened = self.opened, None  # what happens now isn't the loader's doing
        if self.on_step is not None and opened is not None:
            self.on_step(self._steps)
            self._steps += 1
        self.opened = opened

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.opened is None:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self.opened.append(os.fsdecode(args[0]))
            self._step()
        elif event.partition(".")[0] in ("socket", "subprocess") or event in (
            "os.system",
            "os.exec",
            "pickle.find_class",
        ):
            self.opened.append(f"{event} {args}")

    def outside_of(self, folder: Path) -> list[str]:
        """What was opened that doesn't lie, links followed, in ``folder``; Python's own modules don't count."""
        real, python = os.path.realpath(folder), [os.path.realpath(path) for path in sys.path if path]
        python += [os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]
        # By name, not by suffix alone: a case has no modules.
        return [
            path
            for path in self.opened or []
            if os.path.dirname(os.path.realpath(path)) != real
            and not (path.endswith((".py", ".pyc")) and os.path.realpath(path).startswith(tuple(python)))
        ]


class Hang(BaseException):
    """A case computed for longer than ``SECONDS``, or was still waiting after ``WAITED_SECONDS``."""


def _hang(number: int, frame: object) -> None:
    computed = number == signal.SIGPROF
    raise Hang(f"computed for {SECONDS} s" if computed else f"still waiting after {WAITED_SECONDS} s")


def run_case(case: Case, work: Path, watch: Watch) -> str:
    """``"refused"``, ``"equal"``, ``"other save"`` or ``"other values"``; anything else raises ``AssertionError``."""
    start, files = case.start, case.files
    folder, outside = work / "case", work / "outside"
    write_files(files, folder, outside)
    before, refusal, pretrained = memory_peak(), "", None
    model: Any = None
    waiting = sorted(case.changes, key=lambda change: change.step)

    def change_now(step: int) -> None:
        while waiting and waiting[0].step <= step:
            change_files(waiting.pop(0), folder, outside)

    for number, timer, seconds in LIMITS:
        signal.signal(number, _hang)
        signal.setitimer(timer, seconds)
    watch.start(change_now)
    try:
        model = load_quantized(folder, model=start.build)
    except CheckpointError as error:
        str(error).encode("utf-8", "backslashreplace")
        model, refusal = None, str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of CheckpointError") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        for _, timer, _ in LIMITS:
            signal.setitimer(timer, 0)
        strangers = watch.outside_of(folder)
        watch.opened = None
        grown = memory_peak() - before
        if start.meaning is not None and start.build is None and not case.changes:
            pretrained = from_pretrained(folder)
        shards = [] if strangers else [path for path in folder.iterdir() if path.name.endswith(".safetensors")]
        held = {path.name: path.read_bytes() for path in shards if path.is_file()}
        is_loaded = model is not None and not strangers and (folder / CONFIG).is_file()
        said = (folder / CONFIG).read_bytes() if is_loaded else b""  # through a link, too
        shutil.rmtree(folder)
    assert not strangers, f"opened {strangers}"
    assert grown < MEMORY, f"memory rose by {grown >> 20} MiB"
    assert torch.get_default_dtype() == torch.float32, "the default dtype was left changed"
    if model is None:
        is_checked = not any(text in refusal for text in UNCHECKED_BY_TRANSFORMERS)
        assert pretrained is None or not is_checked, f"from_pretrained loads what is refused: {refusal}"
        return "refused"
    if pretrained is not None:
        check_same_layers(model, pretrained)
    if case.is_whole:
        return which_save(model, start)
    config = json.loads(said)
    on_disk = read_files(files, held)
    meant = start.meaning(on_disk) if start.meaning else on_disk
    tied = {} if start.meaning else config["quantization_config"]["tied"]
    for name, tensor in named_tensors(model).items():
        stored = with_signs_of(meant, tied.get(name, name), tensor)
        assert stored is None or is_held(name, stored, tensor.detach()), f"{name} is not what its file holds"
    if start.check is not None:
        own = json.loads(content_of(files, OWN_CONFIG)) if OWN_CONFIG in files else {}
        start.check(model, on_disk, config.get("quantization_config") or own)
    for name, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False) if isinstance(layer, QuantLayer) else ():
            problem = layer.problem_with(leaf, parameter.detach())
            assert not problem, f"{name}.{leaf} {problem}"
    try:
        output = output_of(model)
    except Exception as error:
        # A float tensor keeps the dtype of its file; PyTorch refuses to multiply those that differ.
        # A model whose config has it return tuples, may find one where it wants more; one whose window holds no tokens
        # makes masks of another size.
        dtypes = {tensor.dtype for tensor in on_disk.values() if tensor.dtype in FLOAT_DTYPES}
        if len(dtypes) > 1 or not config.get("return_dict", True) or config.get("sliding_window") == 0:
            return "other values"
        raise AssertionError("loaded, but can't be run") from error
    if torch.equal(output, start.output):
        return "equal"
    untouched = read_files(start.files, start.files)
    assert (
        config != json.loads(content_of(start.files, CONFIG))
        or files.get(OWN_CONFIG) != start.files.get(OWN_CONFIG)
        or on_disk.keys() != untouched.keys()
        or not all(same_bytes(tensor, on_disk[name]) for name, tensor in untouched.items())
    ), "another output from the same values"
    return "other values"


# Of what load_quantized refuses: how to generate, checksums of the float part, and a model of absurd sizes.
UNCHECKED_BY_TRANSFORMERS = (
    *("generation_config", "doesn't have the checksum", "is above", "is beyond", "is negative", "would choose"),
    "it must be a float dtype",
)


def from_pretrained(folder: Path) -> nn.Module | None:
    """What transformers loads with a ``QGemmConfig`` for another library's checkpoint; None if that is an error."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QGemmConfig())
    except Exception:  # of whatever kind: what isn't about quantized layers is transformers' own
        return None
    return loaded


def check_same_layers(model: nn.Module, other: nn.Module) -> None:
    """Raises ``AssertionError`` unless the quantized layers of both are the same."""
    theirs = dict(other.named_modules())
    for name, layer in model.named_modules():
        for leaf in layer.fixed_names if isinstance(layer, QuantLayer) else ():
            if (value := layer.stored(leaf)) is not None:
                same = same_bytes(value.detach(), theirs[name].stored(leaf).detach())  # type: ignore[operator]
                assert same, f"from_pretrained has another {name}.{leaf}"


def which_save(model: nn.Module, start: Good) -> str:
    """``"equal"`` or ``"other save"``: the model is one of the two that were saved, in every bit."""
    assert start.other is not None
    tensors = named_tensors(model)
    for name, save in (("equal", start), ("other save", start.other)):
        if tensors.keys() == save.state.keys() and all(
            same_bytes(tensor.detach(), save.state[key]) for key, tensor in tensors.items()
        ):
            assert torch.equal(output_of(model), save.output)
            return name
    raise AssertionError("a mixture of two saves")


def read_files(files: Files, held: Mapping[str, bytes | Link | Special]) -> dict[str, Tensor]:
    """Every tensor of the files that the index names, or of the only one, read by the safetensors library."""
    places = json.loads(content_of(files, INDEX))["weight_map"] if isinstance(files.get(INDEX), bytes) else {}
    tensors: dict[str, Tensor] = {}
    for name in set(places.values()) or {"model.safetensors"}:
        content = held[name]
        assert isinstance(content, bytes)
        try:
            tensors.update(parse_safetensors(content))
        # A dtype that this version of the library doesn't know; a header with "-0", which is a whole number in JSON.
        except (KeyError, SafetensorError):
            tensors.update(parse_by_hand(content))
    return tensors


def parse_by_hand(content: bytes) -> dict[str, Tensor]:
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    dtypes = {code: dtype for dtype, code in DTYPE_CODES.items()}
    tensors = {}
    for name, entry in header.items():
        start, stop = (begin + offset for offset in entry["data_offsets"])
        octets = (
            torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
            if stop > start
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors[name] = octets.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def with_signs_of(meant: Mapping[str, Tensor], name: str, tensor: Tensor) -> Tensor | None:
    """What files mean by ``name``; of layers that take no scale below 0, with its sign in the values.

    ``tensor``: what the model has. Scales and weights of other signs are taken for those, each by itself, where the
    other one changes as well.
    """
    stored = meant.get(name)
    weight = name.removesuffix("_scale")
    scale = meant.get(f"{weight}_scale")
    if stored is None or scale is None or weight not in meant or not (scale.float() < 0).any():
        return stored
    if name != weight:
        return stored if (tensor.float() < 0).any() else stored.float().abs().to(stored.dtype)
    if tensor.shape != stored.shape or tensor.dtype != stored.dtype or same_bytes(stored, tensor):
        return stored
    signs = scale.float().sign().reshape(scale.shape if scale.ndim == tensor.ndim else (*scale.shape, 1))
    for dim, (count, whole) in enumerate(zip(signs.shape, tensor.shape, strict=False)):
        if count not in (1, whole):  # blocks
            signs = signs.repeat_interleave(128, dim).narrow(dim, 0, whole)
    return tensor if torch.equal(tensor.float(), stored.float() * torch.where(signs < 0, -1, 1)) else stored


def is_held(name: str, stored: Tensor, tensor: Tensor) -> bool:
    """Whether the model's ``tensor`` is what a file means.

    Layers differ in the shapes and dtypes of their scales, and may pack values of 4 bits that have a byte each there.
    """
    if stored.dtype == torch.int8 and tensor.dtype == torch.uint8 and stored.ndim == 2:
        return same_bytes(pack_codes((stored & 15).view(torch.uint8)), tensor)
    if name.endswith("_scale") and stored.numel() in (1, tensor.numel()):  # one for all rows
        times = tensor.numel() if stored.numel() == 1 else 1
        return same_bytes(stored.float().flatten().repeat(times), tensor.float().flatten())
    return same_bytes(stored, tensor)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def memory_peak() -> int:
    """The most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prepare(work: Path, make: Callable[[Path], list[Good]] = make_good) -> tuple[list[Good], Watch]:
    """The good checkpoints, and everything imported that loading one imports."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    disable_progress_bar()
    torch.set_num_threads(1)
    good = make(work / "good")
    write_files(good[0].files, work / "outside", work)
    return good, Watch()


def make_every_foreign(folder: Path) -> list[Good]:
    """Those of other libraries, written into ``folder``."""
    return make_foreign(folder) + make_fp8(folder) + make_mixtures(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--foreign", action="store_true", help="those of other libraries, not qgemm's own")
    parser.add_argument("--only", type=int, help="run this case alone and show it")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.cases) if args.only is None else [args.only]
    faulthandler.enable()
    counts: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work_name:
        work = Path(work_name)
        good, watch = prepare(work, make_every_foreign if args.foreign else make_good)
        # Address space that a case may take on top of what PyTorch has mapped by now: what asks for more, fails.
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MEMORY, resource.RLIM_INFINITY))
        baseline = memory_peak()
        for number in numbers:
            case = make_case(good, args.seed, number)
            faulthandler.dump_traceback_later(3 * WAITED_SECONDS, exit=True)
            try:
                outcome = run_case(case, work, watch)
            except AssertionError as error:
                failures += 1
                outcome = "FAILED"
                print(f"case {number} of seed {args.seed}, {', '.join(case.breaks)}: {error}", flush=True)
                if failures <= 20 or args.only is not None:
                    traceback.print_exception(error.__cause__ or error, limit=-6)
            counts[outcome] += 1
            if args.only is not None:
                print(f"{', '.join(case.breaks)}: {outcome}")
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({**counts, "peak_memory_grown": memory_peak() - baseline}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
