"""The rules cover every place in transformers that reads a linear layer's weight, found by reading its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from qgemm.model.report import report
from qgemm.model.swap_rules import find_rule
from qgemm.quantize import quantize_model

# Read and found harmless, though the source looks like the places that aren't.
HARMLESS = {
    # Only if config.slow_but_exact is set, with pretraining_tp > 1: a debugging aid of the original training.
    ("BloomAttention", "dense"),
    ("BloomMLP", "dense_4h_to_h"),
}
READ = re.compile(r"self\.\w+\.weight")
LINEAR_CLASSES = {"Linear", "Conv1D", "FalconLinear"}


def _holder(name: str, module: str = "transformers.models.some.modeling_some") -> nn.Module:
    return type(name, (nn.Module,), {"__module__": module})()


def _name_of_call(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _linear_attributes(cls: ast.ClassDef) -> set[str]:
    """Names of ``self.<name> = ...`` where the right side makes a linear layer."""
    return {
        target.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Assign) and any(_name_of_call(call) in LINEAR_CLASSES for call in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }


def _weight_reads(cls: ast.ClassDef, names: set[str]) -> Iterator[tuple[str, int]]:
    """``self.<name>.weight`` in a method, but for its device and shape, and where the author has thought of int8."""
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or "init" in method.name:
            continue
        parents = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(method):
            if not (
                isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute)
            ):
                continue
            name, use = node.value.attr, parents[node]
            if name not in names or ast.unparse(node.value.value) != "self":
                continue
            source = ast.unparse(method)
            knows_int8 = f"self.{name}.weight.dtype != torch.int8" in source
            knows_floats = f"self.{name}.weight.dtype).is_floating_point" in source
            about_it = isinstance(use, ast.Attribute) and use.attr in ("device", "shape")
            if not (knows_int8 or knows_floats or about_it):
                yield name, node.lineno


def _places() -> Iterator[tuple[str, str, str]]:
    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        # By line: most files and classes have no such place, and walking through their trees takes seconds.
        reads = [number for number, line in enumerate(text.splitlines(), 1) if READ.search(line)]
        if not reads:
            continue
        tree = ast.parse(text)
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for cls in classes.values():
            if not any(cls.lineno <= line <= (cls.end_lineno or 0) for line in reads):
                continue
            bases = [classes[base.id] for base in cls.bases if isinstance(base, ast.Name) and base.id in classes]
            names = set().union(*(_linear_attributes(one) for one in (cls, *bases))) - {"lm_head"}
            for name, line in _weight_reads(cls, names):
                yield cls.name, name, f"{file.name}:{line}"


@pytest.mark.complete
def test_every_read_of_a_linear_weight_in_transformers_has_a_rule() -> None:
    places = list(_places())
    # The scan itself works if it sees the one that everybody knows.
    assert ("MambaMixer", "dt_proj") in {place[:2] for place in places}
    missing = [
        f"{cls}.{name} ({where})"
        for cls, name, where in places
        if (cls, name) not in HARMLESS and find_rule([(_holder(cls), name)]) is None
    ]
    assert missing == []
    # An exception that excuses nothing would hide the next place of that name.
    assert not HARMLESS - {place[:2] for place in places}


@pytest.mark.parametrize(
    ("around", "kept"),
    [
        ([("Mamba2Mixer", "out_proj")], True),
        ([("Mamba2Mixer", "in_proj")], False),
        # A rule looks at every module around the layer, not at its parent alone.
        ([("RwkvSelfAttention", "output"), ("RwkvBlock", "attention.output")], True),
        ([("Sequential", "0"), ("Swinv2SelfAttention", "continuous_position_bias_mlp.0")], True),
        ([("T5DenseGatedActDense", "wo")], False),
        ([("MixtralSparseMoeBlock", "gate")], True),
        # The gate of a gated MLP is no router.
        ([("Qwen3MoeMLP", "gate_proj")], False),
    ],
)
def test_rules_hold_for_these_and_no_more(around: list[tuple[str, str]], kept: bool) -> None:
    assert (find_rule((_holder(name), path) for name, path in around) is not None) == kept


@pytest.mark.parametrize(
    ("module", "name", "path", "kept"),
    [
        ("transformers_modules.somebody.model.modeling_model", "SomeRouter", "proj", True),
        ("transformers.models.mixtral.modeling_mixtral", "SomeRouter", "proj", True),
        ("__main__", "SomeRouter", "proj", False),
        # Begins alike.
        ("transformers_of_mine.models", "SomeRouter", "proj", False),
        ("peft.tuners.lora.layer", "Linear", "lora_A.default", True),
        ("mine.layers", "Linear", "lora_A.default", False),
        ("mine.layers", "TransformerEncoderLayer", "linear1", False),
        ("diffusers.models.transformers.transformer_wan", "WanTimeTextImageEmbedding", "time_embedder.linear_1", True),
        ("diffusers.models.transformers.transformer_wan", "WanTimeTextImageEmbedding", "time_proj", False),
        ("diffusers.models.embeddings", "CombinedTimestepTextProjEmbeddings", "timestep_embedder.linear_1", False),
        *(
            ("diffusers.models.transformers.transformer_minimax_h3", "MiniMaxH3Transformer", path, path != "to_q")
            for path in ("linear", "proj_in", "audio_proj_in", "context_embedder.linear_1", "proj_out", "to_q")
        ),
        ("torchvision.models.swin_transformer", "ShiftedWindowAttentionV2", "cpb_mlp.0", False),
        ("torchvision.models.swin_transformer", "ShiftedWindowAttentionV2", "qkv", True),
        ("open_clip.modified_resnet", "AttentionPool2d", "c_proj", True),
        ("open_clip.transformer", "Transformer", "resblocks.0.mlp.c_fc", True),
        ("open_clip.transformer", "Transformer", "resblocks.1.mlp.c_fc", False),
        ("sentence_transformers.sentence_transformer.modules.dense", "Dense", "linear", True),
        # Its code casts to the dtype of the first parameter in there.
        ("gliner.modeling.base", "StreamingSpanModel", "labels_encoder.encoder.layer.0", True),
        # Where q_bias is None, the layer is called.
        ("timm.models.eva", "EvaAttention", "qkv", False),
    ],
)
def test_a_rule_is_for_the_modules_that_it_names(module: str, name: str, path: str, kept: bool) -> None:
    assert (find_rule([(_holder(name, module), path)]) is not None) == kept


def test_a_rule_may_be_for_holders_with_an_attribute() -> None:
    attention = _holder("EvaAttention", "timm.models.eva")
    attention.q_bias = nn.Parameter(torch.zeros(8))
    assert find_rule([(attention, "qkv")]) is not None
    attention.q_bias = None
    assert find_rule([(attention, "qkv")]) is None


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 8)


class PatchEmbed(Gate):
    pass


class MyMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8)


def test_classes_of_ones_own_have_no_rule_by_their_names() -> None:
    model = quantize_model(nn.Sequential(Gate(), PatchEmbed(), MyMoE()))
    assert report(model).kept == ()


def test_a_class_that_inherits_has_the_rules_of_what_it_inherits_from() -> None:
    mine = type("Mine", (type(_holder("SomeRouter")),), {"__module__": "__main__"})
    assert find_rule([(mine(), "proj")]) is not None
