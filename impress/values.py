"""What Python's values are made of, as far as two digests want to know: a policy's name (quality)
and a model's (foreign)."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any


def held_by(function: FunctionType) -> list[Any]:
    """What a function was given: defaults, and what it found around it."""
    held: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is still empty
            held.append(cell.cell_contents)
    return held


def made_from(value: Any) -> str | list[Any]:
    """What copies and pickles would make a value from; a text: it is found by that name.

    Raises whatever the value does where it cannot be pickled.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    made = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(made, str):
        return made
    return [[*part] if isinstance(part, Iterator) else part for part in made]
