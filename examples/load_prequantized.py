"""Loads a model whose weights are int8 already, in two ways: ``load_quantized``, and by hand.

By hand it takes safetensors and ``QuantLinear.load_state_dict``: that is the way for int8 weights from anywhere else,
as long as each row of a weight has one float32 scale.

Run it with ``python examples/load_prequantized.py``.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import qgemm


def build_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    # The last layer, number 4, stays in float.
    model = qgemm.quantize_model(build_classifier(), skip=["4"])
    qgemm.save_quantized(model, folder)


def load_by_hand(file: Path) -> nn.Module:
    tensors = load_file(file)
    with torch.device("meta"):
        model = build_classifier()
    # A layer with a scale is quantized.
    for name in [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]:
        out_features, in_features = tensors[f"{name}.weight"].shape
        has_bias = f"{name}.bias" in tensors
        layer = qgemm.QuantLinear(in_features, out_features, bias=has_bias, device="meta")
        model.set_submodule(name, layer)
    # assign=True puts the tensors of the file into the model as they are, without a copy. It raises if one is missing.
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "classifier-int8"
        make_checkpoint(folder)
        print("files:", *sorted(path.name for path in folder.iterdir()))
        # The function builds the float model, whose weights never take memory.
        loaded = qgemm.load_quantized(folder, model=build_classifier)
        by_hand = load_by_hand(folder / "model.safetensors")

    print(by_hand)
    x = torch.randn(4, 256)
    with torch.no_grad():
        same = torch.equal(loaded(x), by_hand(x))
    print(f"same output from both: {same}")
    assert same


if __name__ == "__main__":
    main()
