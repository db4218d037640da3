"""Actions after an import: on modules of one's own, found by a path and imported in the usual ways."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgemm.integrations.on_import import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package ``awaited`` that can be imported."""
    finders = list(sys.meta_path)
    (tmp_path / "awaited").mkdir()
    path = tmp_path / "awaited" / "__init__.py"
    path.write_text("value = 3\n")
    (tmp_path / "awaited" / "part.py").write_text("import awaited\nvalue = awaited.value + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    for name in ("awaited", "awaited.part"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = finders


@pytest.mark.parametrize("name", ["awaited", "awaited.part"])
def test_an_action_runs_once_and_after_the_module(name: str, module: Path) -> None:
    before = list(sys.meta_path)
    seen: list[int] = []
    when_imported(name, lambda: seen.append(sys.modules[name].value))
    assert not seen
    assert importlib.util.find_spec("awaited") is not None  # looking is not importing
    assert not seen
    imported = importlib.import_module(name)
    assert seen == [imported.value]
    assert sys.meta_path == before
    assert type(imported.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(imported.__loader__)
    assert "value" in inspect.getsource(imported)
    importlib.reload(imported)
    assert seen == [imported.value]


def test_a_module_that_is_there_already(module: Path) -> None:
    importlib.import_module("awaited")
    before = list(sys.meta_path)
    seen: list[str] = []
    when_imported("awaited", lambda: seen.append("now"))
    assert seen == ["now"]
    assert sys.meta_path == before


def test_two_actions_for_one_module(module: Path) -> None:
    before = list(sys.meta_path)
    seen: list[str] = []
    when_imported("awaited", lambda: seen.append("a"))
    when_imported("awaited", lambda: seen.append("b"))
    importlib.import_module("awaited")
    assert sorted(seen) == ["a", "b"]
    assert sys.meta_path == before


def test_a_loader_of_many_modules(tmp_path: Path, module: Path) -> None:
    # As zipimport has them: what is imported between looking and importing isn't the awaited module.
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("awaited_in_zip.py", "value = 5")
        file.writestr("other_in_zip.py", "value = 6")
    sys.path.insert(0, str(archive))
    seen: list[int] = []
    try:
        when_imported("awaited_in_zip", lambda: seen.append(sys.modules["awaited_in_zip"].value))
        importlib.util.find_spec("awaited_in_zip")
        assert importlib.import_module("other_in_zip").value == 6
        assert not seen
        assert importlib.import_module("awaited_in_zip").value == 5
        assert seen == [5]
    finally:
        sys.path.remove(str(archive))
        for name in ("awaited_in_zip", "other_in_zip"):
            sys.modules.pop(name, None)


def test_a_module_that_fails_at_first(module: Path) -> None:
    seen: list[str] = []
    when_imported("awaited", lambda: seen.append("done"))
    module.write_text("raise RuntimeError('not today')\n")
    with pytest.raises(RuntimeError, match="not today"):
        importlib.import_module("awaited")
    assert not seen
    module.write_text("value = 4444\n")
    assert importlib.import_module("awaited").value == 4444
    assert seen == ["done"]


def test_a_module_that_does_not_exist() -> None:
    finders = list(sys.meta_path)
    when_imported("awaited_in_vain", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="awaited_in_vain"):
        importlib.import_module("awaited_in_vain")
    sys.meta_path[:] = finders


def test_a_library_without_what_the_action_needs(module: Path) -> None:
    def need_more() -> None:
        from awaited import not_there  # noqa: F401

    when_imported("awaited", need_more)
    assert importlib.import_module("awaited").value == 3


def test_other_errors_are_not_hidden(module: Path) -> None:
    when_imported("awaited", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("awaited")
