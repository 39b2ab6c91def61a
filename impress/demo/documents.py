"""The first act's texts: Python's own documentation, as pydoc prints it. The same every time."""

from __future__ import annotations

import pydoc
from typing import Final, NamedTuple

#: Characters kept of each text; the tokenizer cuts further, to DOCUMENT_TOKENS.
_MOST_CHARS: Final = 9000

_MODULES: Final = {
    "json": ("dump", "load", "JSONEncoder"),
    "csv": ("Sniffer", "DictReader", "QUOTE_MINIMAL"),
    "statistics": ("fmean", "median", "NormalDist"),
    "random": ("shuffle", "gauss", "seed"),
    "tempfile": ("mkstemp", "NamedTemporaryFile", "gettempdir"),
    "zipfile": ("ZipFile", "is_zipfile", "ZipInfo"),
    "decimal": ("Context", "getcontext", "Inexact"),
    "datetime": ("timedelta", "isoformat", "tzinfo"),
}


class Document(NamedTuple):
    """A text and what is asked about it."""

    name: str
    text: str
    questions: tuple[str, ...]


def documents(n_documents: int, n_questions: int) -> list[Document]:
    """The first n documents with n questions each. Imports the modules they are about."""
    return [
        Document(name, _text(name), tuple(_questions(name, topics)[:n_questions]))
        for name, topics in list(_MODULES.items())[:n_documents]
    ]


def _text(module: str) -> str:
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    return text.partition("\nFILE\n")[0][:_MOST_CHARS]


def _questions(module: str, topics: tuple[str, str, str]) -> list[str]:
    one, two, three = topics
    return [
        f"\nQuestion: what does {one} of the module {module} do?\nAnswer:",
        f"\nQuestion: when would you use {two}, and what does it return?\nAnswer:",
        f"\nQuestion: give one example in which {three} matters.\nAnswer:",
    ]
