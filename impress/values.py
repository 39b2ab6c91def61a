"""What Python's values are made of, as far as two digests want to know: a policy's name (quality)
and a model's (foreign)."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, Final

#: Names that Python itself keeps in a class.
_PYTHONS: Final = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
#: Python's packages: they have a version.
STDLIB: Final = sys.stdlib_module_names
#: Packages that have a version, so that a class's name tells what it keeps.
VERSIONED: Final = {*STDLIB, "accelerate", "impress", "numpy", "peft", "torch", "transformers"}
#: What torch.compile leaves on its wrapper; functools.wraps copies it to wrappers around that.
_TORCHS: Final = ("_torchdynamo_", "get_compiler_config")
#: Where torch.compile's wrapper, which refers to much of the process, has the function itself.
_COMPILED: Final = "_torchdynamo_orig_callable"


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


def kept_in(kind: type) -> dict[str, Any]:
    """What one class itself keeps and all its objects share: not its methods, nor descriptors."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and name not in _PYTHONS
        and not hasattr(type(value), "__get__")
    }  # fmt: skip


def marked(function: FunctionType) -> dict[str, Any]:
    """What was set on a function, except by torch.compile (addresses, for one)."""
    return {name: v for name, v in vars(function).items() if not name.startswith(_TORCHS)}


def uncompiled_call(called: Any) -> Any:
    """What torch.compile was given, where this is its own wrapper; anything else as it is.

    functools.wraps copies the attribute by which torch finds it, so that any wrapper around a
    compiled function has it, too.
    """
    if not isinstance(called, FunctionType):
        return called
    is_torchs = str(called.__globals__.get("__name__", "")).startswith("torch._dynamo.")
    return getattr(called, _COMPILED, called) if is_torchs else called
