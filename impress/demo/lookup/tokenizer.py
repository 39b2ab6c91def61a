"""Words to token ids and back: one id per word of the closed vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from impress.demo.lookup.words import PAD, START, VOCABULARY
from impress.errors import BadInput

_ID_OF: Final = {word: index for index, word in enumerate(VOCABULARY)}

PAD_ID: Final = _ID_OF[PAD]
START_ID: Final = _ID_OF[START]
N_TOKENS: Final = len(VOCABULARY)


def encode(text: str) -> list[int]:
    """The ids of the words of `text`, separated by white space. Pure.

    Raises BadInput on a word outside the vocabulary.
    """
    try:
        return [_ID_OF[word] for word in text.split()]
    except KeyError as missing:
        raise BadInput(f"lookup tokenizer: no such word: {missing.args[0]!r}") from None


def decode(ids: Iterable[int]) -> str:
    """The words of `ids`, joined by one space; `decode(encode(t))` is `t` with its space tidied.

    Raises BadInput on an id outside the vocabulary.
    """
    return " ".join(_word(int(index)) for index in ids)


def _word(index: int) -> str:
    if not 0 <= index < N_TOKENS:
        raise BadInput(f"lookup tokenizer: no such token id: {index}")
    return VOCABULARY[index]
