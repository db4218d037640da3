"""The journal of a run, by which a later run continues: the finished files, and the progress of others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qgemm.checkpoint.disk import replacing
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import read_json


@dataclass(frozen=True)
class Finished:
    """A finished file: its fingerprint, and the errors of the weights in it, by name."""

    fingerprint: str
    errors: dict[str, float]


@dataclass(frozen=True)
class Begun:
    """An unfinished file, and its progress.

    - ``written``: the number of bytes of each tensor in the file, and their checksum.
    - ``units``: how many weights and other tensors are finished; ``errors``: those of the weights among them.
    - ``pieces``: how many pieces of the next unit are finished; ``squares``: what ``WeightError`` has summed over them.
    - ``read``: the number of bytes of float values that all of this was made from.
    """

    name: str
    written: dict[str, tuple[int, str]] = field(default_factory=dict)
    units: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    squares: tuple[float, float] = (0.0, 0.0)
    read: int = 0


@dataclass(frozen=True)
class Journal:
    """``job``: JSON-ready values that identify what is converted to what."""

    job: Any
    finished: dict[str, Finished]
    begun: dict[str, Begun]

    def write(self, path: Path) -> None:
        """Replaces the file at ``path``; it is then on the disk."""
        with replacing(path) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Reads the journal at ``path``; raises ``CheckpointError`` if it is damaged."""
        try:
            values = read_json(path)
            finished = {
                name: Finished(str(each["fingerprint"]), _errors(each)) for name, each in values["finished"].items()
            }
            begun = {each.name: each for each in map(parse_begun, values["begun"].values())}
            return cls(values["job"], finished, begun)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Pass resume=False to start over") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: pass resume=False to start over") from error


def parse_begun(values: dict[str, Any]) -> Begun:
    """Reads what ``asdict`` gave, after JSON; raises Python's own errors for anything else."""
    written = {name: (int(count), str(checksum)) for name, (count, checksum) in values["written"].items()}
    difference, norm = values["squares"]
    squares = float(difference), float(norm)
    numbers = [int(values[key]) for key in ("units", "pieces", "read")]
    if min(numbers) < 0:
        raise ValueError("a number is below 0")
    units, pieces, read = numbers
    return Begun(str(values["name"]), written, units, _errors(values), pieces, squares, read)


def _errors(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(error) for name, error in values["errors"].items()}
