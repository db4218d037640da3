"""What MkDocs does besides: files of the repository's root become pages, and links fit the site."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's files."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/images/", "](images/")
        files.append(File.generated(config, page, content=links(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fits links from ``docs/`` to files outside of it."""
    source = ROOT / "docs" / page.file.src_uri
    return markdown if page.file.src_uri in PAGES.values() else links(markdown, source.parent)


def links(markdown: str, folder: Path) -> str:
    """``markdown``, a file of ``folder``, with links to pages of the site; links to other files become text."""

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.exists():
            return match[0]  # for MkDocs to complain of
        name = str(path.relative_to(ROOT))
        if name in PAGES or (folder == ROOT and name.startswith("docs/")):
            target = ROOT / "docs" / PAGES.get(name, name.removeprefix("docs/"))
            start = ROOT / "docs" if folder == ROOT else folder
            return f"[{text}]({os.path.relpath(target, start)}{anchor or ''})"
        return match[0] if name.startswith("docs/") else f"`{name}`" if text != name else f"`{text}`"

    parts = re.split(r"(```.*?\n```)", markdown, flags=re.DOTALL)  # code between fences stays
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)
