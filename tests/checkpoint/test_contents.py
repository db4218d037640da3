"""Tensors of files that become tensors of a model: several together, renamed, as parts of larger ones, and checked."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qgemm.checkpoint import CheckpointError
from qgemm.checkpoint.contents import Contents, PartReader, read_converted
from qgemm.checkpoint.safetensors_file import OpenFiles, StoredTensor, read_header

CPU = torch.device("cpu")
SCALE = torch.tensor([1.0, 2.0])


def contents_of(stored: dict[str, StoredTensor]) -> Contents:
    return Contents.of_files(stored)


def write(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> dict[str, StoredTensor]:
    save_file(tensors, folder / name)
    return read_header(folder / name)


def split(values: Tensor, scale: Tensor) -> Sequence[Tensor]:
    """A weight and its scale from values in pairs, as made up here."""
    if bool((values > 100).any()):
        raise ValueError("values holds more than 100")
    return values.reshape(2, -1), scale.float()


def convert_layer(contents: Contents, layer: str) -> None:
    size = contents.stored[f"{layer}.values"].shape[0]
    contents.convert_together(
        [f"{layer}.values", f"{layer}.scale"],
        {
            f"{layer}.weight": (f"{layer}.values", (2, size // 2), torch.int32),
            f"{layer}.weight_scale": (f"{layer}.scale", (2,), torch.float32),
        },
        split,
    )


def layer_tensors(layer: str, first: int = 0) -> dict[str, Tensor]:
    values = torch.arange(first, first + 6, dtype=torch.int32)
    return {f"{layer}.values": values, f"{layer}.scale": SCALE.half()}


def read(contents: Contents) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for target, value in read_converted(contents, CPU, lambda nbytes: None):
        if target.place is None:
            found[target.name] = value
        else:
            found.setdefault(target.name, torch.full(target.whole, -1, dtype=value.dtype))[target.place] = value
    return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name


def test_several_become_several(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, {**layer_tensors("a"), "norm": torch.ones(3)}))
    convert_layer(contents, "a")
    headers = {name: (tensor.shape, tensor.dtype) for name, tensor in contents.headers.items()}
    assert headers == {
        "norm": ((3,), torch.float32),
        "a.weight": ((2, 3), torch.int32),
        "a.weight_scale": ((2,), torch.float32),
    }
    weight = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    same(read(contents), {"a.weight": weight, "a.weight_scale": SCALE, "norm": torch.ones(3)})


def test_some_are_read_at_a_time_from_files_that_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.checkpoint.safetensors_file.MOST_OPEN", 1)
    stored = write(tmp_path, {**layer_tensors("a"), "norm": torch.ones(3)})
    contents = contents_of(stored | write(tmp_path, layer_tensors("b", 6), "2.safetensors"))
    for index, layer in enumerate("ab"):
        convert_layer(contents, layer)
        contents.merge("experts.weight", f"{layer}.weight", (2, 3), (2, 2, 3), (index,))
    with closing(OpenFiles()) as files:
        parts = PartReader(contents, files)
        for _ in range(2):
            assert {target.name for target, _ in parts.read(["norm", "unknown"])} == {"norm"}
            experts: dict[str, Tensor] = {}
            for target, value in parts.read(["experts.weight"]):  # scales are made together with it
                target.put_into(experts, value)
            whole = torch.arange(12, dtype=torch.int32).reshape(2, 2, 3)
            same(experts, {"experts.weight": whole, **dict.fromkeys(("a.weight_scale", "b.weight_scale"), SCALE)})
        with (tmp_path / "2.safetensors").open("r+b") as file:
            file.truncate(10)
        with pytest.raises(CheckpointError, match=r"2\.safetensors was replaced while the checkpoint was read"):
            list(parts.read(["b.weight_scale"]))  # the file is still open


def test_one_of_several_is_left_out_and_then_the_other(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, layer_tensors("a")))
    convert_layer(contents, "a")
    contents.leave_out("a.weight")
    same(read(contents), {"a.weight_scale": SCALE})
    contents.leave_out("a.weight_scale")
    assert not contents.headers
    same(read(contents), {})


def test_a_layer_may_lie_in_two_files(tmp_path: Path) -> None:
    tensors = layer_tensors("a")
    stored = {
        **write(tmp_path, {"a.scale": tensors["a.scale"]}, "1.safetensors"),
        **write(tmp_path, {"a.values": tensors["a.values"]}, "2.safetensors"),
    }
    contents = contents_of(stored)
    convert_layer(contents, "a")
    assert set(read(contents)) == {"a.weight", "a.weight_scale"}


def test_results_are_renamed_even_in_a_circle(tmp_path: Path) -> None:
    tensors = {**layer_tensors("a"), **layer_tensors("b", 10), "c": torch.zeros(1), "d": torch.ones(1)}
    contents = contents_of(write(tmp_path, tensors))
    convert_layer(contents, "a")
    convert_layer(contents, "b")
    swapped = {"a.weight": "b.weight", "b.weight": "a.weight", "c": "d", "d": "c"}
    for names in (swapped, {"a.weight": "x.weight"}):
        contents.rename({name: names.get(name, name) for name in contents.headers})
    found = read(contents)
    assert found["x.weight"][0, 0] == 10
    assert found["b.weight"][0, 0] == 0
    assert (found["c"], found["d"]) == (1, 0)
    with pytest.raises(CheckpointError, match=r"holds c and another tensor that is also d"):
        contents.rename({name: "d" if name == "c" else name for name in sorted(contents.headers, reverse=True)})


def test_results_become_parts_of_a_larger_tensor(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, {**layer_tensors("e.0"), **layer_tensors("e.1", 6)}))
    for expert in range(2):
        convert_layer(contents, f"e.{expert}")
        contents.merge("e.up", f"e.{expert}.weight", (2, 3), (2, 4, 3), (expert, slice(1, 3)))
        contents.merge("e.up_scale", f"e.{expert}.weight_scale", (2,), (2, 2), (expert,))
    found = read(contents)
    assert found["e.up"].shape == (2, 4, 3)
    assert torch.equal(found["e.up"][:, 1:3].flatten(), torch.arange(12, dtype=torch.int32))
    assert torch.equal(found["e.up_scale"], torch.tensor([[1.0, 2.0]] * 2))


def test_parts_have_the_shape_that_is_asked_for_and_one_dtype(tmp_path: Path) -> None:
    parts = {"e.0": torch.ones(2), "e.1": torch.ones(2, dtype=torch.float16), "e.2": torch.ones(3)}
    contents = contents_of(write(tmp_path, parts))
    contents.merge("e", "e.0", (2,), (4, 2), (0,))
    with pytest.raises(CheckpointError, match=r"safetensors: e\.1 is torch\.float16, and e torch\.float32$"):
        contents.merge("e", "e.1", (2,), (4, 2), (1,))
    with pytest.raises(CheckpointError, match=r"safetensors: e\.2 has shape \[3\]; the model's is \[2\]$"):
        contents.merge("e", "e.2", (2,), (4, 2), (2,))
    with pytest.raises(CheckpointError, match=r"lacks e\.3, from which e is made: get all files again$"):
        contents.merge("e", "e.3", (2,), (4, 2), (3,))


def test_parts_of_what_the_files_have_as_a_whole_too(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, {"e": torch.zeros(2, 2), "e.0": torch.ones(2), "e.1": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"safetensors holds both e\.0 and e; only one of them can be the"):
        contents.merge("e", "e.0", (2,), (2, 2), (0,))


def test_values_that_cannot_be_name_file_and_tensor(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, layer_tensors("a", 99)))
    convert_layer(contents, "a")
    with pytest.raises(CheckpointError, match=r"model.safetensors: a.values: values holds more than 100"):
        read(contents)


def test_a_name_that_the_files_have_as_well(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, {**layer_tensors("a"), "a.weight_scale": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"holds both a.scale and a.weight_scale; only one"):
        convert_layer(contents, "a")


def test_the_results_may_have_the_names_of_the_sources(tmp_path: Path) -> None:
    contents = contents_of(write(tmp_path, {"a.weight": torch.arange(4.0), "a.other": torch.ones(1)}))
    made = {"a.weight": ("a.weight", (2,), torch.float32)}
    contents.convert_together(["a.weight", "a.other"], made, lambda weight, other: [weight[:2] + other])
    same(read(contents), {"a.weight": torch.tensor([1.0, 2.0])})


def test_one_layer_waits_at_a_time(tmp_path: Path) -> None:
    # A file that safetensors writes has all of the values first, whose dtype is wider, and then all of the scales.
    stored = write(tmp_path, {name: value for layer in "abcdef" for name, value in layer_tensors(layer).items()})
    assert [name.split(".")[1] for name in stored] == ["values"] * 6 + ["scale"] * 6
    reads = 0
    waiting: list[int] = []
    given: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def add(nbytes: int) -> None:
        nonlocal reads
        reads += 1

    def convert(values: Tensor, scale: Tensor) -> Sequence[Tensor]:
        waiting.append(reads - 2 * len(waiting))
        assert not given, "the reader keeps tensors of a layer that it has converted"
        given.update((values, scale))
        return [values + 0, scale + 0]

    contents = contents_of(stored)
    for layer in "abcdef":
        names = [f"{layer}.values", f"{layer}.scale"]
        contents.convert_together(names, {name: (name, stored[name].shape, torch.int32) for name in names}, convert)
    for _ in read_converted(contents, CPU, add):
        pass
    assert waiting == [2] * 6
