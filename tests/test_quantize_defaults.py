"""PyTorch's default device and dtype are the process's, and may be anything: nothing here depends on them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint.models import tiny_llama
from torch import Tensor, nn

import qgemm
from qgemm.numerics.formats import FORMATS

IDS = torch.tensor([[1, 2, 3, 4]])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.fixture(params=DEFAULTS.values(), ids=DEFAULTS)
def default(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[object]]:
    for form in FORMATS.values():  # which keep tensors
        vars(form).pop("_encoding", None)
    made: Callable[[], AbstractContextManager[object]] = request.param
    return made


def float_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64))


@pytest.mark.parametrize("scheme", ["int8", "int8-hadamard", "int8-weight", "int4", "int4-int8", "nf4", "mxfp4"])
def test_layers(default: Callable[[], AbstractContextManager[object]], scheme: str) -> None:
    model, other = float_layer(), float_layer()
    x, empty = torch.randn(3, 128), torch.randn(0, 128)
    with default():
        qgemm.quantize_model(model, scheme)
        found: Tensor = model(x)
        model(empty)
    qgemm.quantize_model(other, scheme)
    assert torch.equal(found, other(x))
    assert qgemm.report(model).to_dict() == qgemm.report(other).to_dict()


def test_models(default: Callable[[], AbstractContextManager[object]], tmp_path: Path) -> None:
    model = tiny_llama().eval()
    model.save_pretrained(tmp_path / "float")
    expected = copy.deepcopy(model)
    qgemm.quantize_model(expected)
    with default():
        qgemm.quantize_model(model, fuse=True)
        qgemm.save_quantized(model, tmp_path / "saved")
        loaded = qgemm.load_quantized(tmp_path / "saved", fuse=True)
        qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")
    streamed = qgemm.load_quantized(tmp_path / "streamed")
    for found in (model, loaded, streamed):
        assert torch.equal(found(IDS).logits, expected(IDS).logits)
