"""Settings in YAML or JSON files, which may be untrusted: they give only plain values, no larger than their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qgemm.checkpoint.disk import open_regular, replacing
from qgemm.checkpoint.layout import unique_names


def write_settings(path: str | Path, values: dict[str, Any]) -> None:
    """Writes ``values`` as JSON if the file's name ends in ``.json``, else as YAML, which needs PyYAML.

    An existing file stays until the new one is complete.
    """
    is_json = Path(path).suffix == ".json"
    text = json.dumps(values, indent=2) + "\n" if is_json else _yaml().safe_dump(values, sort_keys=False)
    with replacing(Path(path)) as file:
        file.write(text.encode())


def read_settings(path: str | Path, kind: str, max_bytes: int) -> Any:
    """Reads a file in the form of ``write_settings``; raises ``ValueError`` unless it has plain values and unique keys.

    ``kind``: what errors call the content, such as ``"a recipe"``.
    """
    with open_regular(Path(path)) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} is not {kind}: it has more than {max_bytes} bytes")
    is_json = Path(path).suffix == ".json"
    try:
        return json.loads(content, object_pairs_hook=unique_names) if is_json else _parse_yaml(content)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: it is not valid {'JSON' if is_json else 'YAML'} for {kind}: {text}") from error


def _parse_yaml(content: bytes) -> Any:
    """Parses a YAML document whose values are no larger than its text: it may not repeat parts by reference."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("there may be no anchors and aliases")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            unique_names([(self.construct_object(key, deep=True), None) for key, _ in node.value])
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(content, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError('settings in YAML need PyYAML: pip install "pyyaml>=5.1", or use a .json file') from error
    return yaml
