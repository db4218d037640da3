"""Imports in qgemm go one way, between files as between folders, and ``import qgemm`` stays light.

``ALLOWED`` is the direction between folders: each part of the package, and the parts that it may import. What it
imports from outside is open, except for the optional packages, which integrations alone import outside of functions.
An import inside of a function counts as any other; one for type checkers alone doesn't.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qgemm"

# Longest name wins: "qgemm.kernels.stages.views" belongs to "qgemm.kernels.stages". A folder may import what is in it,
# and who may import a folder may do so too; the folders in it import of its own files only those with a line.
ALLOWED: dict[str, set[str]] = {
    "qgemm.version": set(),
    "qgemm.warn": set(),
    "qgemm.arguments": set(),
    "qgemm.tables": set(),
    "qgemm.device": set(),
    "qgemm.numerics": set(),
    "qgemm.scheme": {"qgemm.numerics"},
    "qgemm.kernels.stages": {"qgemm.numerics"},
    "qgemm.kernels.launch": {"qgemm.kernels.stages", "qgemm.numerics"},
    "qgemm.kernels.activations": set(),
    "qgemm.kernels.expert_weights": {"qgemm.kernels.activations", "qgemm.kernels.scaled_weight", "qgemm.numerics"},
    "qgemm.kernels.norms": set(),
    "qgemm.kernels.scaled_weight": {"qgemm.numerics"},
    "qgemm.kernels.stored_form": {"qgemm.numerics"},
    "qgemm.kernels.routing": set(),
    "qgemm.kernels.reference": {
        "qgemm.kernels.activations",
        "qgemm.kernels.expert_weights",
        "qgemm.kernels.norms",
        "qgemm.kernels.scaled_weight",
        "qgemm.numerics",
    },
    "qgemm.kernels.checks": {
        "qgemm.kernels.activations",
        "qgemm.kernels.norms",
        "qgemm.kernels.scaled_weight",
        "qgemm.numerics",
    },
    "qgemm.kernels.cpu_rows": {"qgemm.kernels.activations", "qgemm.kernels.norms", "qgemm.numerics"},
    "qgemm.kernels.cpu": {
        "qgemm.device",
        "qgemm.kernels.activations",
        "qgemm.kernels.cpu_rows",
        "qgemm.kernels.routing",
        "qgemm.numerics",
    },
    "qgemm.kernels.attention": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.kernels.cpu_rows",
        "qgemm.numerics",
    },
    "qgemm.kernels.rotary": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.kernels.norms",
        "qgemm.kernels.reference",
        "qgemm.numerics",
    },
    "qgemm.kernels.weight_only": {
        "qgemm.kernels.activations",
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.kernels.cpu",
        "qgemm.kernels.cpu_rows",
        "qgemm.kernels.scaled_weight",
        "qgemm.kernels.stored_form",
        "qgemm.kernels.quantize",
        "qgemm.kernels.reorder",
        "qgemm.kernels.gemm",
        "qgemm.kernels.linear",
        "qgemm.numerics",
    },
    "qgemm.kernels.quantize": {"qgemm.kernels.stages", "qgemm.kernels.launch", "qgemm.numerics"},
    "qgemm.kernels.norm": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.norms",
        "qgemm.kernels.quantize",
        "qgemm.numerics",
    },
    "qgemm.kernels.activation": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.activations",
        "qgemm.kernels.quantize",
        "qgemm.numerics",
    },
    "qgemm.kernels.gemm": {"qgemm.kernels.stages", "qgemm.kernels.launch", "qgemm.kernels.quantize", "qgemm.numerics"},
    "qgemm.kernels.grouped": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.gemm",
        "qgemm.kernels.stored_form",
        "qgemm.numerics",
    },
    "qgemm.kernels.gating": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.activations",
        "qgemm.kernels.quantize",
        "qgemm.numerics",
    },
    "qgemm.kernels.xielu": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.quantize",
        "qgemm.numerics",
    },
    "qgemm.kernels.reorder": {"qgemm.kernels.launch", "qgemm.kernels.quantize", "qgemm.numerics"},
    "qgemm.kernels.hadamard": {"qgemm.kernels.stages", "qgemm.kernels.launch", "qgemm.numerics"},
    "qgemm.kernels.linear": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.kernels.quantize",
        "qgemm.kernels.gemm",
        "qgemm.numerics",
    },
    "qgemm.kernels.router": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.kernels.quantize",
        "qgemm.kernels.routing",
        "qgemm.numerics",
    },
    "qgemm.kernels.sampling": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.checks",
        "qgemm.numerics",
    },
    "qgemm.kernels.moe": {
        "qgemm.kernels.stages",
        "qgemm.kernels.launch",
        "qgemm.kernels.activation",
        "qgemm.kernels.activations",
        "qgemm.kernels.expert_weights",
        "qgemm.kernels.checks",
        "qgemm.kernels.cpu",
        "qgemm.kernels.cpu_rows",
        "qgemm.kernels.quantize",
        "qgemm.kernels.grouped",
        "qgemm.kernels.weight_only",
        "qgemm.kernels.stored_form",
        "qgemm.numerics",
        "qgemm.kernels.routing",
    },
    "qgemm.kernels": set(),
    "qgemm.ops": {"qgemm.kernels", "qgemm.numerics"},
    "qgemm.nn": {"qgemm.warn", "qgemm.ops", "qgemm.kernels", "qgemm.numerics", "qgemm.scheme"},
    "qgemm.model": {
        "qgemm.warn",
        "qgemm.arguments",
        "qgemm.tables",
        "qgemm.device",
        "qgemm.numerics",
        "qgemm.scheme",
        "qgemm.nn",
    },
    "qgemm.fusion": {"qgemm.arguments", "qgemm.tables", "qgemm.device", "qgemm.kernels", "qgemm.nn"},
    "qgemm.checkpoint": {
        "qgemm.warn",
        "qgemm.arguments",
        "qgemm.device",
        "qgemm.numerics",
        "qgemm.scheme",
        "qgemm.nn",
        "qgemm.model",
        "qgemm.fusion",
    },
    "qgemm.calibration": {
        "qgemm.version",
        "qgemm.warn",
        "qgemm.arguments",
        "qgemm.tables",
        "qgemm.device",
        "qgemm.numerics",
        "qgemm.scheme",
        "qgemm.nn",
        "qgemm.model",
        "qgemm.checkpoint",
    },
    "qgemm.quantize": {
        "qgemm.arguments",
        "qgemm.scheme",
        "qgemm.nn",
        "qgemm.model",
        "qgemm.fusion",
        "qgemm.calibration",
    },
    "qgemm.streaming": {
        "qgemm.version",
        "qgemm.warn",
        "qgemm.arguments",
        "qgemm.device",
        "qgemm.numerics",
        "qgemm.nn",
        "qgemm.model",
        "qgemm.checkpoint",
        "qgemm.calibration",
        "qgemm.quantize",
    },
    "qgemm.replay": {"qgemm.warn", "qgemm.arguments"},
    "qgemm.integrations.transformers": {
        "qgemm.warn",
        "qgemm.arguments",
        "qgemm.numerics",
        "qgemm.kernels",
        "qgemm.nn",
        "qgemm.model",
        "qgemm.fusion",
        "qgemm.checkpoint",
        "qgemm.calibration",
        "qgemm.quantize",
        "qgemm.replay",
    },
    "qgemm.parallel": {"qgemm.arguments", "qgemm.nn"},
    "qgemm.integrations.vllm": {
        "qgemm.kernels",
        "qgemm.numerics",
        "qgemm.ops",
        "qgemm.scheme",
        "qgemm.nn",
        "qgemm.checkpoint",
        "qgemm.warn",
    },
    "qgemm.generation": {"qgemm.integrations.transformers"},
    "qgemm.integrations": {"qgemm.nn", "qgemm.model", "qgemm.checkpoint"},
    "qgemm.__main__": set(),
    "qgemm": set(),
}
OPTIONAL = {"transformers", "accelerate", "compressed_tensors", "huggingface_hub", "peft", "vllm", "yaml"}
MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = [*MODULES, *sorted((ROOT / "qgemm_cli").rglob("*.py"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    parts = [part for part in ALLOWED if module == part or (part != "qgemm" and module.startswith(part + "."))]
    assert parts, f"{module} has no line in ALLOWED"
    return max(parts, key=len)


def may_import(part: str) -> set[str]:
    return {
        each for each in ALLOWED if each != part and any(f"{each}.".startswith(f"{a}.") for a in (part, *ALLOWED[part]))
    }


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def import_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom | ast.Call]:
    """All imports but those under ``if TYPE_CHECKING``; calls of ``import_module`` too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if isinstance(node, ast.Import | ast.ImportFrom) or is_call:
            yield node
        yield from import_nodes(node)


def imported_by(node: ast.Import | ast.ImportFrom | ast.Call) -> list[str]:
    if isinstance(node, ast.Call):
        name = node.args[0]
        assert isinstance(name, ast.Constant), "import_module takes a literal name, so that this test can read it"
        return [name.value]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "imports name the whole path, so that this test can read them"
    # "from qgemm.kernels import dispatch" imports a module, "from qgemm.nn import QuantLinear" a name.
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if is_module(name) else str(node.module) for name in names]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    return list(import_nodes(tree_of(path)))


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    return frozenset(name for node in imports_in(path) for name in imported_by(node))


def find_circle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """A shortest way along ``imports`` from a module back to itself; empty if there is none."""
    circles = []
    for start in imports:
        ways = {name: [start, name] for name in imports[start]}
        queue = list(ways)
        for name in queue:
            new = {each: [*ways[name], each] for each in imports.get(name, ()) if each not in ways}
            ways |= new
            queue += new
        if start in ways:
            circles.append(ways[start])
    return min(circles, key=len, default=[])


def test_no_circle_between_files() -> None:
    circle = find_circle({module_name(path): sorted(imported_modules(path)) for path in FILES})
    assert not circle, " imports ".join(circle)


def test_a_circle_is_found_and_named() -> None:
    assert find_circle({"a": ["b", "x"], "b": ["c"], "c": []}) == []
    assert find_circle({"a": ["b"], "b": ["c", "x"], "c": ["d"], "d": ["b"]}) == ["b", "c", "d", "b"]
    assert find_circle({"a": ["a"]}) == ["a", "a"]


def private_imports(path: Path) -> set[str]:
    """The private names that a file takes from our other modules, kernels of its own folder aside."""
    tree, own = tree_of(path), module_name(path)
    taken, modules = set(), {}
    for node in imports_in(path):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("qgemm", "qgemm_cli"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    taken.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            taken.add(f"{modules[node.value.id]}.{node.attr}")
    return {
        f"{module}.{name}"
        for module, _, name in (each.rpartition(".") for each in taken)
        if name.startswith("_")
        and not name.startswith("__")
        and not (name.endswith("_kernel") and module.rpartition(".")[0] == own.rpartition(".")[0])
    }


# One test for all files: a test for each took each of the test processes seconds to read what all of them import.
def test_private_names_stay_in_their_file() -> None:
    taken = {path: sorted(private_imports(path)) for path in FILES}
    found = [f"{path} takes {names}: give them public names" for path, names in taken.items() if names]
    assert not found, "\n".join(found)


def test_imports_go_one_way() -> None:
    found = []
    for path in MODULES:
        part = part_of(module_name(path))
        ours = {part_of(name) for name in imported_modules(path) if name.split(".")[0] == "qgemm"}
        if backwards := ours - may_import(part) - {part}:
            found.append(f"{module_name(path)} imports {sorted(backwards)}, which {part} must not know")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("package", "above"), [("qgemm", {"qgemm_cli", "benchmarks"}), ("qgemm_cli", {"benchmarks"})])
def test_packages_know_nothing_of_those_above_them(package: str, above: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        if path == PACKAGE / "__main__.py":
            continue  # ``python -m qgemm`` is the command
        packages = {name.split(".")[0] for name in imported_modules(path)}
        assert not packages & (above | {"tests", "examples"}), f"{path} imports {sorted(packages)}"


def test_optional_packages_are_imported_inside_functions() -> None:
    found = []
    for path in MODULES:
        if "integrations" in path.parts:
            continue  # subclasses of a library's classes: test_importing_qgemm_is_light sees that nothing imports them
        functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        deferred = {id(inner) for function in functions for inner in ast.walk(function)}
        for node in imports_in(path):
            packages = {name.split(".")[0] for name in imported_by(node)} & OPTIONAL
            if packages and id(node) not in deferred:
                found.append(f"{path.name}:{node.lineno} imports {sorted(packages)} at once")
    assert not found, "\n".join(found)


def test_the_table_is_true_and_has_no_circle() -> None:
    modules = {module_name(path) for path in MODULES}
    assert set(ALLOWED) <= modules
    circle = find_circle({part: sorted(may_import(part)) for part in ALLOWED})
    assert not circle, " may import ".join(circle)
    for part, allowed in ALLOWED.items():
        imports = {name for path in MODULES if part_of(module_name(path)) == part for name in imported_modules(path)}
        unused = {each for each in allowed if not any(f"{name}.".startswith(f"{each}.") for name in imports)}
        assert not unused, f"{part} imports nothing of {sorted(unused)}: take that out of its line in ALLOWED"


@pytest.mark.slow
def test_importing_qgemm_is_light() -> None:
    code = """
import sys
import torch, tqdm, safetensors.torch
before = set(sys.modules)
import qgemm
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new & {"transformers", "accelerate", "compressed_tensors", "huggingface_hub", "peft", "triton", "vllm"}
assert not heavy, f"import qgemm imports {sorted(heavy)}"
assert not torch.cuda.is_initialized(), "import qgemm initialises CUDA"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
