"""Tables of results: aligned text for ``print``, HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str], below: list[str]) -> str:
    """Returns aligned columns, those named in ``numeric`` to the right, then a rule and the lines of ``below``."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if title in numeric else cell.ljust(width)
            for title, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:], rule, *below])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], below: list[str]) -> str:
    """Returns a table, followed by the lines of text in ``below``."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    text = "<br>".join(html.escape(line) for line in below)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{text}</p>"


def size(count: int) -> str:
    """The number of bytes, with a unit."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
