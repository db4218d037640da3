"""Exit codes, and the way a command fails: with one sentence on standard error, without a traceback."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer

from qgemm_cli.options import in_options
from qgemm_cli.output import printable

PROBLEMS = 1
FAILED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


@contextmanager
def running(command: Callable[..., Any], debug: bool) -> Iterator[None]:
    """Surrounds the work of ``command``: errors exit with code 2 and one sentence, Ctrl-C and SIGTERM with 130.

    ``debug`` shows where an error came from. Warnings are shown in one line each. Both are in terms of the command's
    options.
    """
    # Not every encoding has all characters that file names contain.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings(), _interrupted_by_sigterm():
        warnings.showwarning = partial(_show_warning, command)  # restored by catch_warnings
        try:
            yield
        except KeyboardInterrupt as interrupt:
            said = f"interrupted: {interrupt}" if str(interrupt) else "interrupted"
            print(printable(said, limit=2000), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except BrokenPipeError:
            # The reader has closed the pipe. Nothing more is written to it, not even when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            else:
                print(f"qgemm: {describe(error, command)}", file=sys.stderr)
            raise typer.Exit(FAILED) from None


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    # Schedulers end a job with SIGTERM; the job then tells how to continue. Only the main thread can set a handler.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def describe(error: Exception, command: Callable[..., Any]) -> str:
    """An error in one line. An error not meant for users is shown with its type, and with the way to see its origin."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if (why := getattr(error, "why", None)) is not None:  # an UnknownModel, whose module would import PyTorch
        said = f"{why}, and the command builds no other: use qgemm in Python"
    text = printable(in_options(" ".join(said.split()), command), limit=2000)
    if isinstance(error, (ValueError, OSError, ImportError)) and text:
        return text
    return f"{type(error).__name__}: {text or 'no more is known'} (--debug shows where)"


def _show_warning(command: Callable[..., Any], message: Warning | str, category: type[Warning], *_: object) -> None:
    # Users can't do anything about deprecations inside libraries.
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning)):
        print(f"warning: {printable(in_options(' '.join(str(message).split()), command), limit=2000)}", file=sys.stderr)
