"""A run that was killed goes on at the last finished block, with the same result; and a folder of another run is
refused.
"""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoint.faults import in_child
from families import FAMILIES
from families.example import Example
from families.mixtures import MIXTURES
from torch import nn

import qgemm
import qgemm.model.restore
from qgemm.calibration import GPTQ, BiasCorrection, Block, Method, Percentile, SmoothQuant


@dataclass(frozen=True)
class KilledAt(Method):
    """Stops when it is given a certain block; counts those before."""

    name: ClassVar[str] = "killed-at"
    block: str = ""
    seen: list[str] = field(default_factory=list, compare=False)

    def apply(self, block: Block) -> None:
        if block.name == self.block:
            raise KeyboardInterrupt
        self.seen.append(block.name)

    def to_dict(self) -> dict[str, Any]:
        return {}


BLOCKS = {
    "llama": ["model.layers.0", "model.layers.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    # With two layers outside of the blocks.
    "opt": ["model.decoder.layers.0", "model.decoder.layers.1", ""],
    "mixtral": ["model.layers.0", "model.layers.1"],
}


def build(family: str) -> Example:
    return {**FAMILIES, **MIXTURES}[family]()


def quantize(example: Example, killer: KilledAt | None = None, **settings: Any) -> nn.Module:
    recipe = [SmoothQuant(), GPTQ(), BiasCorrection(), killer or KilledAt("none")]
    settings = {"recipe": recipe, "calibration": [example.inputs] * 2, "scheme": "int8-static", **settings}
    return qgemm.quantize_model(example.model, progress=False, **settings)


@functools.cache
def whole(family: str, scheme: str = "int8-static") -> nn.Module:
    """What a run makes that isn't stopped."""
    return quantize(build(family), scheme=scheme)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    left, right = model.state_dict(), expected.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name
    for (name, module), other in zip(model.named_modules(), expected.modules(), strict=True):
        assert type(module) is type(other), name
        assert module.training == other.training, name
        assert getattr(module, "scheme", None) == getattr(other, "scheme", None), name
    assert qgemm.report(model) == qgemm.report(expected)


@pytest.mark.slow(quick=["llama-model.layers.1"])
@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("llama", "model.layers.0"),
        ("llama", "model.layers.1"),
        pytest.param("t5", "encoder.block.1", marks=pytest.mark.complete),  # as test_killed_twice is first
        ("t5", "decoder.block.0"),
        ("opt", ""),
        ("mixtral", "model.layers.1"),
    ],
)
def test_a_run_goes_on_at_the_last_finished_block(family: str, block: str, tmp_path: Path) -> None:
    first = KilledAt(block)
    with pytest.raises(KeyboardInterrupt):
        quantize(build(family), first, resume_folder=tmp_path)
    second = KilledAt("none")
    resumed = quantize(build(family), second, resume_folder=tmp_path)
    assert first.seen + second.seen == BLOCKS[family]
    assert_same(resumed, whole(family))
    # And once more, when all is done.
    third = KilledAt("none")
    assert_same(quantize(build(family), third, resume_folder=tmp_path), whole(family))
    assert third.seen == [block for block in BLOCKS[family] if not block]


@pytest.mark.slow(quick=["int4"])
@pytest.mark.parametrize(
    "scheme",
    ["int4", "nvfp4", "int8-static-asymmetric", "int8-static-hadamard", "int8-outliers-16", "int8-static-outliers-16"],
)
def test_layers_of_every_kind_come_back(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(build("bert"), KilledAt("bert.encoder.layer.1"), resume_folder=tmp_path, scheme=scheme)
    resumed = quantize(build("bert"), resume_folder=tmp_path, scheme=scheme)
    assert_same(resumed, whole("bert", scheme))


def test_a_model_that_holds_blocks_of_the_folder_is_partly_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(build("llama"), KilledAt("model.layers.1"), resume_folder=tmp_path)
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    example = build("llama")
    with pytest.raises(KeyboardInterrupt):
        quantize(example, KilledAt("model.layers.1"), resume_folder=tmp_path)
    with pytest.raises(RuntimeError, match="is partly quantized: quantize_model was stopped half-way"):
        example.model(**example.inputs)


@pytest.mark.slow
def test_killed_twice(tmp_path: Path) -> None:
    for block in ("encoder.block.1", "decoder.block.1"):
        with pytest.raises(KeyboardInterrupt):
            quantize(build("t5"), KilledAt(block), resume_folder=tmp_path)
    assert_same(quantize(build("t5"), resume_folder=tmp_path), whole("t5"))


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quantize(build("llama"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_leaves_whole_files_only(tmp_path: Path) -> None:
    """Killed as it has written the second block, but not moved it into place."""
    folder = tmp_path / "run"
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target.name == "block-00001.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def run() -> None:
        os.replace = killed  # of the child alone
        quantize(build("llama"), resume_folder=folder)

    assert os.WTERMSIG(in_child(run)) == signal.SIGKILL
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if name[0] != "."] == ["block-00000.safetensors", "run.json"]
    assert len(names) == 3
    probe = KilledAt("none")
    resumed = quantize(build("llama"), probe, resume_folder=folder)
    assert probe.seen == BLOCKS["llama"][1:]
    assert_same(resumed, whole("llama"))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow(quick=["run.json"])
@pytest.mark.parametrize("at", ["run.json", "block-00000.safetensors"])
def test_a_full_disk_leaves_whole_files_only(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == at:
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as context:
        context.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            quantize(build("llama"), resume_folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ([] if at == "run.json" else ["run.json"])
    assert_same(quantize(build("llama"), resume_folder=tmp_path), whole("llama"))


def changed_model() -> Example:
    example = build("llama")
    with torch.no_grad():
        example.model.model.layers[1].mlp.up_proj.weight[50:] += 0.001
    return example


def changed_data() -> Example:
    example = build("llama")
    example.inputs["input_ids"] = example.inputs["input_ids"].roll(1)
    return example


@pytest.mark.slow(quick=["another observer"])
@pytest.mark.parametrize(
    ("example", "settings", "message"),
    [
        (lambda: build("llama"), {"recipe": [GPTQ()]}, "another recipe"),
        (lambda: build("llama"), {"scheme": "int8"}, "another schemes or layers"),
        (lambda: build("llama"), {"skip": "*.up_proj"}, "another schemes or layers"),
        (lambda: build("llama"), {"observer": "mse"}, "another observer"),
        (lambda: build("llama"), {"device": "cpu"}, "another device"),
        (changed_data, {}, "another calibration data"),
        (changed_model, {}, "another model"),
        (lambda: build("bert"), {}, "another schemes or layers and another division into blocks and another model"),
    ],
)
def test_a_folder_of_another_run_is_refused(
    example: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(build("llama"), KilledAt("model.layers.1"), resume_folder=tmp_path)
    other = example()
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(
        ValueError, match=f"resume_folder: .* holds a run with {message}.*: give another folder, or remove"
    ):
        quantize(other, resume_folder=tmp_path, **settings)
    after = other.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_observer_with_other_settings_is_another(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(build("llama"), KilledAt("model.layers.1"), resume_folder=tmp_path, observer=Percentile(99.0))
    with pytest.raises(ValueError, match="another observer"):
        quantize(build("llama"), resume_folder=tmp_path, observer=Percentile(99.9))
    quantize(build("llama"), resume_folder=tmp_path, observer=Percentile(99.0))


def test_a_run_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("qgemm.calibration.pipeline.__version__", "0.0.1")
        with pytest.raises(KeyboardInterrupt):
            quantize(build("llama"), KilledAt("model.layers.1"), resume_folder=tmp_path)
    with pytest.raises(ValueError, match="holds a run with another version of qgemm: give another"):
        quantize(build("llama"), resume_folder=tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds thesis\.tex but no run\.json: give an empty folder"):
        quantize(build("llama"), resume_folder=tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(build("llama"), KilledAt("model.layers.1"), resume_folder=tmp_path)
    path = tmp_path / "block-00000.safetensors"
    whole = path.read_bytes()

    def refused(content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(qgemm.CheckpointError, match=message):
            quantize(build("llama"), resume_folder=tmp_path)

    flipped = bytearray(whole)
    flipped[-5] ^= 1
    refused(bytes(flipped), "doesn't have the checksum")
    refused(whole[:-5], "block-00000")
    refused(b"", "block-00000")
    refused(whole.replace(b"qgemm_block", b"qgemm_bluck", 1), "isn't a block of a run")
    refused(
        whole.replace(b"self_attn.q_proj.weight_scale", b"self_attn.q_proj.weight_scule"),
        "lacks|doesn't have|isn't a block",
    )
    path.write_bytes(whole)
    run = tmp_path / "run.json"
    text = run.read_text()
    run.write_text(text[:-10])
    with pytest.raises(qgemm.CheckpointError, match=r"run\.json is not valid JSON"):
        quantize(build("llama"), resume_folder=tmp_path)


def test_a_bias_that_a_method_made_comes_back(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class AddsBias(Method):
        name: ClassVar[str] = "adds-bias"

        def apply(self, block: Block) -> None:
            for work in block.layers.values():
                if work.module.bias is None:
                    work.module.bias = nn.Parameter(torch.full((work.module.out_features,), 0.25))

    def run(killer: KilledAt, **settings: Any) -> nn.Module:
        example = build("llama")
        return qgemm.quantize_model(
            example.model, calibration=[example.inputs], recipe=[AddsBias(), killer], progress=False, **settings
        )

    with pytest.raises(KeyboardInterrupt):
        run(KilledAt("model.layers.1"), resume_folder=tmp_path)
    resumed = run(KilledAt("none"), resume_folder=tmp_path)
    assert_same(resumed, run(KilledAt("none")))
    assert (resumed.model.layers[0].mlp.up_proj.bias == 0.25).all()


def test_ties_hold(tmp_path: Path) -> None:
    """A weight that norms of two blocks share is one afterwards too."""

    def shared() -> Example:
        example = build("llama")
        first, second = example.model.model.layers
        second.input_layernorm.weight = first.input_layernorm.weight
        return example

    expected = quantize(shared(), recipe=[GPTQ(), KilledAt("none")])
    with pytest.raises(KeyboardInterrupt):
        quantize(shared(), resume_folder=tmp_path, recipe=[GPTQ(), KilledAt("model.layers.1")])
    resumed = quantize(shared(), resume_folder=tmp_path, recipe=[GPTQ(), KilledAt("none")])
    first, second = resumed.model.layers
    assert second.input_layernorm.weight is first.input_layernorm.weight
    assert_same(resumed, expected)
