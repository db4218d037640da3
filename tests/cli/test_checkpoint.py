"""What the command says of a checkpoint is what ``load_quantized`` does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.test_recognition import SAMPLES_ALONE, contents_of, without_settings

from qgemm import CheckpointError
from qgemm_cli.checkpoint import open_checkpoint


@pytest.mark.parametrize("name", SAMPLES_ALONE)
def test_formats_by_tensors_alone(name: str, tmp_path: Path) -> None:
    folder, (format, unsaid) = without_settings(name, tmp_path / "copy"), SAMPLES_ALONE[name]
    found = open_checkpoint(folder)
    assert found.format == format
    # Of what may be qgemm's own file, one that can't be read is a fault.
    assert found.problems == ([found.refusal] if format == "qgemm" else [])
    if unsaid:
        with pytest.raises(CheckpointError) as refusal:
            contents_of(folder)
        assert (found.contents, found.refusal) == (None, str(refusal.value))
    else:
        assert found.contents is not None
        assert found.contents.manifest == contents_of(folder).manifest
