"""The options and the help of every command. Nothing here imports PyTorch; only ``commands/`` does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from qgemm_cli.errors import PROBLEMS, running
from qgemm_cli.output import print_json, printable

app = typer.Typer(
    name="qgemm",
    help="Quantize models, inspect, convert and compare checkpoints, and time layers.",
    epilog="Exit codes: 0 success, 1 problems or differences found, 2 failure, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, to standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


ShardSize = Annotated[str, typer.Option(help='The maximum size of a file: a number of bytes, or text like "5GB".')]


def _new_folder(given: str) -> Path:
    """Refuses an empty name, which pathlib takes for the current folder: a script passes it where a name is unset."""
    if not given:
        raise typer.BadParameter("the destination's name is empty: name a folder")
    return Path(given)


def _check_is_for_text(text: Path | None, options: Mapping[str, object]) -> None:
    """Raises ``ValueError`` for one of the ``options`` that is given without a text; else it would have no effect."""
    option = next((option for option, given in options.items() if given is not None), None)
    if option is not None and text is None:
        raise ValueError(f"{option} is for a text: pass --text FILE, or leave it out")


def _size(given: str) -> int | str:
    """Converts a number of bytes to an int, because command lines give text."""
    return int(given) if given.isdecimal() and given.isascii() else given


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(metadata.version("qgemm-torch"))
        except metadata.PackageNotFoundError:  # run from sources that aren't installed
            from qgemm import __version__

            typer.echo(__version__)
        raise typer.Exit


@app.callback()
def qgemm(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options of the command itself."""


@app.command(
    epilog="""Examples:

    qgemm inspect llama-int8

    qgemm inspect llama-int8 --all --no-verify

    qgemm inspect model-00001-of-00004.safetensors --json

    qgemm inspect llama-Q4_K_M.gguf"""
)
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A folder, its model.safetensors.index.json, or a safetensors or GGUF file.")
    ],
    verify: Annotated[
        bool, typer.Option(help="Read and check the values of scales and of tensors with a checksum.")
    ] = True,
    every_layer: Annotated[bool, typer.Option("--all", help="Print a row for every layer.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a checkpoint's format, layers, sizes, quantized fraction and problems.

    Runs no code of the checkpoint, and reads one layer at a time. Exit code 1: there are problems.
    """
    with running(inspect, debug):
        from qgemm_cli.commands.inspect import examine, show

        with redirect_stdout(sys.stderr):
            document = examine(path, verify)
        print_json(document) if json else show(document, every_layer)
    if document["problems"]:
        raise typer.Exit(PROBLEMS)


@app.command(
    epilog="""Examples:

    qgemm quantize llama llama-int8

    qgemm quantize llama llama-int8 --skip "\\*.o_proj" --skip "re:layers.[01].mlp" --device cuda

    qgemm quantize llama-70b llama-70b-int8 --device cuda --workers 4

    qgemm quantize llama llama-mixed --scheme "\\*.mlp.\\*=int4" --scheme "\\*=int8" --include lm_head

    qgemm quantize llama llama-static --scheme int8-static --recipe smoothquant,gptq --text book.txt

    qgemm quantize llama llama-static --scheme int8-static --statistics statistics.safetensors"""
)
def quantize(
    source: Annotated[Path, typer.Argument(help="The folder of a float model that transformers saved.")],
    destination: Annotated[Path, typer.Argument(parser=_new_folder, help="A folder for the quantized model.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="int8, int4 or another scheme; int8-static needs --text, --statistics or --input-scales. Or PATTERN="
            'SCHEME, repeated: the first pattern that matches a layer counts; "float" leaves it in float. [int8]'
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Layers to leave in float: a name, a glob, or re: and a regular expression. Repeatable."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Quantize layers that stay in float by default; patterns as for --skip. Repeatable."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Ignore tensors with this name or glob, which the model doesn't have."),
    ] = None,
    input_scales: Annotated[
        Path | None, typer.Option(help="A JSON file with the activation scale of each layer, by name.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Statistics that Calibration.save wrote, for the scales of static schemes.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Methods, separated by commas: smoothquant,gptq. Or a YAML file with them.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML or JSON file with scheme, skip, include, input_scales, recipe, observer and budget."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to run the model on, for static scales and recipes.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="The number of windows of the text, evenly spread. [128]")
    ] = None,
    length: Annotated[int | None, typer.Option(min=2, help="The number of tokens in a window. [512]")] = None,
    device: Annotated[str, typer.Option(help="The device to compute on: cpu, cuda, cuda:1, ...")] = "cpu",
    max_shard_size: ShardSize = "5GB",
    workers: Annotated[
        int, typer.Option(min=1, help="The number of processes that write files at a time; with cuda each has a GPU.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option(help="Continue an interrupted run of the same command, or start over.")
    ] = True,
    progress: Annotated[bool, typer.Option(help="Show a progress bar, on a terminal.")] = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize a float checkpoint into a new folder. The whole model is never in memory.

    Except with --recipe or --text: then the float model is in CPU memory, and is quantized block by block on --device.

    The tokenizer and similar files are copied. qgemm.load_quantized loads the result, and so does transformers'
    from_pretrained once qgemm is imported; qgemm convert converts it to compressed-tensors.
    """
    with running(quantize, debug):
        _check_is_for_text(text, {"--samples": samples, "--length": length})
        from qgemm_cli.commands.quantize import quantize as run
        from qgemm_cli.commands.quantize import show

        with redirect_stdout(sys.stderr):
            document = run(
                source,
                destination,
                config=config,
                scheme=scheme or [],
                skip=skip or [],
                include=include or [],
                input_scales=input_scales,
                recipe=recipe,
                statistics=statistics,
                text=text,
                samples=samples or 128,
                length=length or 512,
                drop=drop or [],
                workers=workers,
                device=device,
                max_shard_size=_size(max_shard_size),
                resume=resume,
                progress=None if progress else False,
            )
        print_json(document) if json else show(document)


class Format(str, Enum):
    """The formats that ``convert`` writes."""

    QGEMM = "qgemm"
    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"


@app.command(
    epilog="""Examples:

    qgemm convert llama-int8 llama-w8a8 --to compressed-tensors

    qgemm convert llama-awq llama-int8 --to qgemm --scheme int8

    qgemm convert llama-Q4_K_M.gguf llama-q4 --to qgemm"""
)
def convert(
    source: Annotated[
        Path, typer.Argument(help="A quantized model in any format that qgemm loads: its folder, or a GGUF file.")
    ],
    destination: Annotated[Path, typer.Argument(parser=_new_folder, help="A folder for the converted model.")],
    to: Annotated[
        Format,
        typer.Option(
            metavar="<format>",
            help="The format to write: qgemm, compressed-tensors or gptq. vLLM and transformers load the latter two.",
        ),
    ],
    scheme: Annotated[
        str | None, typer.Option(help="A scheme to convert layers to, such as int8. Without it they stay as they are.")
    ] = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in that folder.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a quantized checkpoint in another format, with the same values, or in another scheme.

    Reads every format that qgemm loads: GPTQ, AWQ, compressed-tensors, bitsandbytes, GGUF and others. Holds the
    quantized model in memory, and reads the result again to check it.
    """
    with running(convert, debug):
        from qgemm_cli.commands.convert import convert as run
        from qgemm_cli.commands.convert import show

        with redirect_stdout(sys.stderr):
            document = run(source, destination, to.value, _size(max_shard_size), overwrite, scheme)
        print_json(document) if json else show(document)


@app.command(
    epilog="""Examples:

    qgemm compare llama llama-int8

    qgemm compare llama llama-int8 --text book.txt --max-tokens 20000 --device cuda

    qgemm compare llama-int8 llama-w8a8 --tolerance 0 --json"""
)
def compare(
    a: Annotated[Path, typer.Argument(help="The folder or GGUF file of the reference, float or quantized.")],
    b: Annotated[Path, typer.Argument(help="The folder or GGUF file to compare with it, float or quantized.")],
    text: Annotated[Path | None, typer.Option(help="Run both models on this text file and compare logits.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The folder of the tokenizer, if neither A nor B has one.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device to run the models on: cpu, cuda, cuda:1, ...")] = "cpu",
    window: Annotated[
        int | None, typer.Option(min=2, help="The number of tokens that a model gets at a time. [512]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="The maximum number of tokens of the text. [4096]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 1 if a tensor's relative error is above this, or a weight only in A or B."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if the mean divergence over the text is above this.")
    ] = None,
    every_layer: Annotated[bool, typer.Option("--all", help="Print a row for every layer.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints: the error of each weight and, on a text, the difference of the logits.

    Weights are read a few rows at a time. With --text both models are in memory at once. Exit code 1: shapes differ,
    or a value is above --tolerance or --max-kl.
    """
    with running(compare, debug):
        of_text = {"--max-kl": max_kl, "--tokenizer": tokenizer, "--window": window, "--max-tokens": max_tokens}
        _check_is_for_text(text, of_text)
        from qgemm_cli.commands.compare import compare as run
        from qgemm_cli.commands.compare import find_differences, show

        with redirect_stdout(sys.stderr):
            document = run(a, b, text, tokenizer, device, window or 512, max_tokens or 4096)
        document["differences"] = find_differences(document, tolerance, max_kl)
        print_json(document) if json else show(document, every_layer)
        for difference in document["differences"]:
            print(f"qgemm: {printable(difference, 500)}", file=sys.stderr)
    if document["differences"]:
        raise typer.Exit(PROBLEMS)


@app.command(
    epilog="""Examples:

    qgemm bench llama

    qgemm bench llama-int8 --m 1,64,4096 --json

    qgemm bench --shape 4096x14336 --device cpu --quick"""
)
def bench(
    path: Annotated[
        Path | None, typer.Argument(help="A checkpoint, float or quantized, whose linear layers are timed.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Time this weight, NxK. Repeatable.")] = None,
    m: Annotated[str, typer.Option("--m", help="Rows of activations, separated by commas.")] = "1,16,256",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... [the GPU, if there is one]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Time int8 and float layers on this machine, in the sizes of a model.

    Weights and activations are random; every output is checked before it is timed. Exit code 1: an output was wrong.
    Without a path or a shape, the sizes are Llama 3 8B's on a GPU, and two smaller ones on a CPU.
    """
    with running(bench, debug):
        from qgemm_cli.commands.bench import bench as run
        from qgemm_cli.commands.bench import parse_rows, show

        with redirect_stdout(sys.stderr):
            document = run(path, shape or [], parse_rows(m), device, quick)
        print_json(document) if json else show(document)
    if any(result["wrong"] for result in document["results"]):
        raise typer.Exit(PROBLEMS)
