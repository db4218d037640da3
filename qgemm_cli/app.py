"""The options and the help of every command. Nothing here imports PyTorch: that is for ``commands/``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from qgemm_cli.errors import PROBLEMS, running
from qgemm_cli.output import print_json

app = typer.Typer(
    name="qgemm",
    help="Quantize models to int8, look into checkpoints of any format, convert and compare them, and measure layers.",
    epilog="Exit codes: 0 fine, 1 problems or differences found, 2 it couldn't be done, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(metadata.version("qgemm"))
        except metadata.PackageNotFoundError:  # run from its sources, which are not installed
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

    qgemm inspect model-00001-of-00004.safetensors --json"""
)
def inspect(
    path: Annotated[Path, typer.Argument(help="A folder, its model.safetensors.index.json, or a safetensors file.")],
    verify: Annotated[
        bool, typer.Option(help="Read scales, and all tensors that have a checksum, and check their values.")
    ] = True,
    every_layer: Annotated[bool, typer.Option("--all", help="A row for every layer, not for every kind.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint is: format, layers, sizes, how much of it is quantized, and what is wrong with it.

    No model is built, no code is run, and tensors are read one at a time. Exit code 1: there are problems.
    """
    with running(debug):
        from qgemm_cli.commands.inspect import examine, show

        with redirect_stdout(sys.stderr):
            document = examine(path, verify)
        print_json(document) if json else show(document, every_layer)
    if document["problems"]:
        raise typer.Exit(PROBLEMS)
