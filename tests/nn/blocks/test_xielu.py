"""MLPs whose activation has parameters, by the kernel, and what isn't that activation."""

import copy
from typing import Any

import pytest
import torch
from fusion.structures import STRUCTURES
from torch import nn

from qgemm import fuse, quantize_model
from qgemm.fusion.probe import is_xielu
from qgemm.kernels.xielu import dispatch, launcher


def test_apertus_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    example = STRUCTURES["apertus"]()
    quantize_model(example.model)
    expected, calls = example.output(), []
    fuse(example.model)
    xielu = launcher.xielu
    monkeypatch.setattr(launcher, "xielu", lambda *given: calls.append(1) or xielu(*given))  # type: ignore
    monkeypatch.setattr(dispatch, "fits", lambda *given: True)
    torch.testing.assert_close(example.output(), expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 2
    # Its parameters are read in each call.
    with torch.no_grad():
        for name, parameter in example.model.named_parameters():
            if "alpha" in name:
                parameter += 1
    assert not torch.allclose(example.output(), expected, rtol=1e-2, atol=1e-2)


def test_what_is_xielu() -> None:
    from transformers.activations import ACT2FN, XIELUActivation

    module: Any = XIELUActivation()
    assert is_xielu(module)
    assert is_xielu(copy.deepcopy(module).float())
    assert not is_xielu(ACT2FN["silu"])
    assert not is_xielu(nn.PReLU())
    assert not is_xielu(torch.tanh)

    class Other(XIELUActivation):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(max=500.0)

    assert not is_xielu(Other())
    module.beta = nn.Buffer(torch.ones(2))
    assert not is_xielu(module)
