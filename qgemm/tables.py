"""Tables of results: aligned text for ``print``, HTML for notebooks; sizes in bytes as text."""

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


def size(count: float) -> str:
    """Bytes in readable form: ``"1.5 GB"`` is 1.5 * 10^9."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
