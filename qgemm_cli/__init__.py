"""The command ``qgemm``: ``main`` runs it.

It is a package beside ``qgemm`` because importing anything below ``qgemm`` imports PyTorch, which takes seconds, and
``qgemm --help``, a mistyped option or ``qgemm --version`` shouldn't wait for that. ``app.py`` has the options and the
help of every command and doesn't import PyTorch; ``commands/`` implements the commands, and is imported when one runs.
"""

import atexit
import gc
import sys


def main() -> None:
    """Runs the command line in ``sys.argv`` and exits: 0 success, 1 problems found, 2 failure, 130 interrupted."""
    try:
        from qgemm_cli.app import app
        from qgemm_cli.errors import PIPE_CLOSED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f'The qgemm command needs {error.name}: pip install "typer>=0.15" "rich>=13"', file=sys.stderr)
        sys.exit(2)
    atexit.register(_leave_garbage)
    try:
        app(prog_name="qgemm")
    except OSError as error:  # outside of any command: the help can't be written
        print(f"qgemm: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer and Rich would exit with 1, which means problems found
            sys.exit(PIPE_CLOSED)
        raise


def _leave_garbage() -> None:
    """Saves the second that Python would take at its end to collect garbage among PyTorch's and transformers' objects.

    From version 3.9 on, Triton's classes are nanobind's, which lists objects that are left on stderr. There Python
    collects garbage once instead of twice, which saves half a second.
    """
    triton = sys.modules.get("triton._C.libtriton")
    if triton is not None and type(triton.ir.attribute).__module__ == "nanobind":
        gc.disable()
    else:
        gc.freeze()
