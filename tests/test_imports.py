"""Imports in qgemm go one way, and ``import qgemm`` stays light.

``ALLOWED`` is the whole direction: each part of the package, and the parts that it may import. What it imports from
outside is open, except for the optional packages, which only ``LAZY`` modules may import, inside functions.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qgemm"

# Longest name wins: "qgemm.kernels.stages.views" belongs to "qgemm.kernels.stages".
ALLOWED: dict[str, set[str]] = {
    "qgemm.kernels.stages": set(),
    "qgemm.numerics": set(),
    "qgemm.kernels": {"qgemm.kernels.stages", "qgemm.numerics"},
    "qgemm.scheme": set(),
    "qgemm.device": set(),
    "qgemm.arguments": set(),
    "qgemm.version": set(),
    "qgemm.op_rules": set(),
    "qgemm.ops": {"qgemm.op_rules", "qgemm.kernels", "qgemm.numerics"},
    "qgemm.expert_ops": {"qgemm.ops", "qgemm.op_rules", "qgemm.kernels"},
    "qgemm.nn": {"qgemm.ops", "qgemm.op_rules", "qgemm.expert_ops", "qgemm.kernels", "qgemm.numerics", "qgemm.scheme"},
    "qgemm.tables": set(),
    "qgemm.model": {"qgemm.tables", "qgemm.nn", "qgemm.arguments", "qgemm.kernels", "qgemm.scheme"},
    "qgemm.calibration": {
        "qgemm.numerics",
        "qgemm.arguments",
        "qgemm.checkpoint",
        "qgemm.model",
        "qgemm.tables",
        "qgemm.nn",
        "qgemm.kernels",
        "qgemm.scheme",
        "qgemm.version",
    },
    "qgemm.quantize": {
        "qgemm.arguments",
        "qgemm.device",
        "qgemm.calibration",
        "qgemm.model",
        "qgemm.nn",
        "qgemm.scheme",
    },
    "qgemm.checkpoint": {
        "qgemm.model",
        "qgemm.arguments",
        "qgemm.device",
        "qgemm.nn",
        "qgemm.scheme",
    },
    "qgemm.integrations": {
        "qgemm.calibration",
        "qgemm.arguments",
        "qgemm.quantize",
        "qgemm.model",
        "qgemm.checkpoint",
        "qgemm.nn",
        "qgemm.scheme",
    },
    "qgemm.streaming": {
        "qgemm.arguments",
        "qgemm.quantize",
        "qgemm.model",
        "qgemm.checkpoint",
        "qgemm.nn",
        "qgemm.kernels",
        "qgemm.scheme",
        "qgemm.device",
        "qgemm.version",
    },
    "qgemm.__main__": set(),
    "qgemm": {
        "qgemm.integrations",
        "qgemm.streaming",
        "qgemm.checkpoint",
        "qgemm.calibration",
        "qgemm.quantize",
        "qgemm.model",
        "qgemm.nn",
        "qgemm.scheme",
        "qgemm.version",
    },
}
# A quantized model is announced to the library that it is of: inside a function, for a model of such a library only.
ANNOUNCED_TO = {"qgemm.quantize": {"qgemm.integrations"}, "qgemm.checkpoint": {"qgemm.integrations"}}
OPTIONAL = {"transformers", "accelerate", "compressed_tensors", "huggingface_hub", "peft", "yaml"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    parts = [part for part in ALLOWED if module == part or (part != "qgemm" and module.startswith(part + "."))]
    assert parts, f"{module} has no line in ALLOWED"
    return max(parts, key=len)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path, so that this test can read them"
            assert node.module is not None
            for alias in node.names:
                # "from qgemm.kernels import dispatch" imports a module, "from qgemm.nn import QuantLinear" a name.
                submodule = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = submodule.is_dir() or submodule.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(module_name(path))
    ours = {part_of(name) for name in imported_modules(ast.parse(path.read_text())) if name.split(".")[0] == "qgemm"}
    backwards = ours - ALLOWED[part] - {part} - ANNOUNCED_TO.get(part, set())
    assert not backwards, f"{module_name(path)} imports {sorted(backwards)}, which {part} must not know"


@pytest.mark.parametrize(("package", "above"), [("qgemm", {"qgemm_cli", "benchmarks"}), ("qgemm_cli", {"benchmarks"})])
def test_packages_know_nothing_of_those_above_them(package: str, above: set[str]) -> None:
    for path in (PACKAGE.parent / package).rglob("*.py"):
        if path == PACKAGE / "__main__.py":
            continue  # ``python -m qgemm`` is the command
        packages = {name.split(".")[0] for name in imported_modules(ast.parse(path.read_text()))}
        assert not packages & (above | {"tests", "examples"}), f"{path} imports {sorted(packages)}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_optional_packages_are_imported_inside_functions(path: Path) -> None:
    if path.parent.name == "integrations":
        return  # subclasses of a library's classes: test_importing_qgemm_is_light sees that nothing imports it at once
    tree = ast.parse(path.read_text())
    deferred = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in deferred:
            packages = {name.split(".")[0] for name in imported_modules(node)}
            assert not packages & OPTIONAL, f"{path.name}:{node.lineno} imports {sorted(packages & OPTIONAL)} at once"
            announced = {part_of(name) for name in imported_modules(node) if name.split(".")[0] == "qgemm"}
            backwards = announced & ANNOUNCED_TO.get(part_of(module_name(path)), set())
            assert not backwards, f"{path.name}:{node.lineno} imports {sorted(backwards)} at once"


def test_the_table_has_no_cycle_and_no_part_that_is_gone() -> None:
    modules = {module_name(path) for path in MODULES}
    assert set(ALLOWED) <= modules
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, imports in ALLOWED.items() if part not in done and imports <= done}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def test_importing_qgemm_is_light() -> None:
    code = """
import sys
import torch, tqdm, safetensors.torch
before = set(sys.modules)
import qgemm
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new & {"transformers", "accelerate", "compressed_tensors", "huggingface_hub", "peft", "triton"}
assert not heavy, f"import qgemm imports {sorted(heavy)}"
assert not torch.cuda.is_initialized(), "import qgemm initialises CUDA"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
