"""Which devices can be named, with and without a GPU."""

import pytest
import torch

from qgemm.device import find_device


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("_two_gpus")
def test_devices_that_are_there() -> None:
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    assert find_device("cuda:0") == torch.device("cuda", 0)
    assert find_device("cuda") == torch.device("cuda", 1)  # torch.cuda.set_device wants a number


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("device", ["cuda:2", "cuda:99", "meta", "gpu", ""])
def test_devices_that_are_not(device: str) -> None:
    with pytest.raises(ValueError, match=f'device is "{device}"; it must be "cpu", or "cuda"'):
        find_device(device)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r'device is "cuda"; it must be "cpu", or "cuda" where PyTorch finds a GPU'):
        find_device("cuda")
