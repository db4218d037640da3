"""English sentences from the docstrings and the documentation in a corpus, for models of sentences."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator

_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_WORD = re.compile(r"[A-Za-z][a-z'-]*")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ,;:'\"()/_.-]*[.!?]")
_WORDS = range(6, 41)


def sentences_of(corpus: dict[str, str]) -> list[str]:
    """All different sentences of 6 to 40 words, in an order that depends on the sentences alone.

    A sentence begins with a capital, ends with a full stop, holds nothing but letters, figures and common punctuation,
    and is mostly words.
    """
    found = {
        sentence
        for name, text in corpus.items()
        for paragraph in _paragraphs(name, text)
        for sentence in _END.split(" ".join(paragraph.split()))
        if _is_sentence(sentence)
    }
    return sorted(found, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())


def _paragraphs(name: str, text: str) -> Iterator[str]:
    for prose in _docstrings(text) if name.endswith(".py") else [text]:
        yield from re.split(r"\n\s*\n", prose)


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # files that are there to be wrong
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def _is_sentence(text: str) -> bool:
    if not text[:1].isupper() or not _PLAIN.fullmatch(text):
        return False
    words = text.split()
    plain = sum(bool(_WORD.fullmatch(word.strip(",;:.!?()"))) for word in words)
    return len(words) in _WORDS and plain > 0.8 * len(words)
