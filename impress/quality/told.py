"""Settings as text, in full and the same in every process: for names (names.py), by which trust is
earned and spent.

What cannot be told is unlike all others. What classes keep is told after all else (`meeting`).
"""

from __future__ import annotations

import copyreg
import logging
import secrets
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial, partialmethod
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final
from uuid import UUID
from weakref import ReferenceType

import numpy as np
import xxhash

from impress.values import VERSIONED, held_by, kept_in, made_from, marked, uncompiled_call

_PLAIN_REPR: Final[Any] = object.__repr__  # gives an object's address
#: Their repr gives their address, and there is no more to tell.
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
#: What a torch.nn.RNNBase keeps of its parameters beside them, and numpy.memmap of its file.
_AGAIN: Final = {"_flat_weights", "_flat_weight_refs"}
_OF_FILE: Final = {"_mmap", "filename", "offset", "mode"}
#: Their repr tells all there is. Not their subclasses', which may hold more, or say less.
_SPEAK: Final = {
    type(None), type(...), bool, int, float, complex, str, bytes, range, date, datetime, time,
    timedelta, Decimal, Fraction, UUID,
}  # fmt: skip
_SPEAK_AS: Final = (PurePath, np.generic, np.dtype)
_TORCHS: Final = {"torch.dtype", "torch.device", "torch.layout", "torch.memory_format"}
#: Their repr tells all there is where that of each item does.
_HOLD: Final = {list, tuple, dict, OrderedDict}
#: The classes, and classes of values, that were told by name while one policy's name is made, in
#: turn. What they keep is told after all else, each once: it may lead back to them.
_met: ContextVar[list[type] | None] = ContextVar("impress_met", default=None)


@contextmanager
def meeting() -> Iterator[list[type]]:
    """Gather the classes that are told meanwhile, for `of_met`."""
    met = list[type]()
    token = _met.set(met)
    try:
        yield met
    finally:
        _met.reset(token)


def _meet(kind: type) -> None:
    """Have what a class and its bases keep told, except of those that have a version."""
    met = _met.get()
    if met is not None and kind not in met:
        met += [base for base in kind.__mro__ if not _has_version(base) and base not in met]


def _has_version(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in VERSIONED


def of_met(met: list[type]) -> list[str]:
    """What each class keeps, in an order that is not that of a set in which they were met."""
    found = list[str]()
    for base in met:  # it grows by those that these keep
        kept = kept_in(base)
        if issubclass(base, Enum):  # what Python keeps there grows as members are asked for
            kept = {name: value for name, value in kept.items() if not _is_enums(name)}
            kept |= base.__members__
        where = f"{base.__module__}.{base.__qualname__}"
        found += lines([(f"{where}.{name}", value) for name, value in kept.items()])
    return sorted(found)


def _is_enums(name: str) -> bool:
    """Whether an enumeration and its members have it for Python's sake."""
    return name.startswith("_") and name.endswith("_")


def lines(named: list[tuple[str, Any]]) -> list[str]:
    return [f"{name}={as_far_as(value)}" for name, value in named]


def as_far_as(value: Any) -> str:
    """As `told`; for a value that leads back to itself, say, that it is unlike all others."""
    try:
        return told(value)
    except Exception:
        return f"{type(value).__qualname__} {unlike_all()}"


def unlike_all() -> str:
    """Stands in for what cannot be told: no trust is better than another policy's."""
    return secrets.token_hex(8)


def shown(value: Any) -> list[tuple[str | None, Any]]:
    """A dataclass's settings that it takes or shows, by name."""
    names = (field.name for field in fields(value) if field.repr or field.init)
    return [(name, getattr(value, name, None)) for name in names]


def hidden(value: Any) -> list[tuple[str, Any]]:
    """A dataclass's settings that it neither takes nor shows, by name: such fields, and attributes
    it has set itself beside them. Not what is computed only when asked for."""
    apart = {field.name for field in fields(value) if field.repr or field.init}
    state = {field.name: getattr(value, field.name, None) for field in fields(value)}
    state |= dict(kept_by(value))
    return sorted((name, state[name]) for name in state.keys() - apart)


def kept_by(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps, except for what is computed only when asked for."""
    lazy = {name for kind in type(value).__mro__ for name, of in vars(kind).items()
            if isinstance(of, cached_property)}  # fmt: skip
    return [(name, each) for name, each in state_of(value) if name not in lazy]


def state_of(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps, in its dict and its slots, by name."""
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return sorted((name, each) for part in parts for name, each in (part or {}).items())


def told(value: Any) -> str:
    """A setting's repr, but in full: an array's or a tensor's leaves out rows and digits, and a
    module's what it has learnt."""
    _meet(value if isinstance(value, type) else type(value))
    if isinstance(value, FunctionType):
        value = uncompiled_call(value)
        return f"{value.__module__}.{value.__qualname__} {_code(value)}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, _LOCKS):
        return type(value).__qualname__
    if isinstance(value, ReferenceType):
        return f"reference to {told(value())}"
    if isinstance(value, MethodType):
        return f"{told(value.__func__)} of {told(value.__self__)}"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {told(value.__func__)}"
    if isinstance(value, property):
        return f"property {told([value.fget, value.fset, value.fdel])}"
    if isinstance(value, partial | partialmethod):
        said = f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
        return _with_kept(said, value) if isinstance(value, partial) else said
    if _has_learnt(value):
        plain = type(value).__repr__ is _PLAIN_REPR
        said = type(value).__qualname__ if plain else repr(value)
        try:  # what is beside first: it may lead back here, before all weights are copied
            return f"{said} {_learnt(_beside(value))} {_learnt(value.state_dict())}"
        except RecursionError:
            raise
        except Exception:  # say, on a device that is gone
            return f"{said} {unlike_all()}"
    if _is_array(value):
        return _with_kept(_array(value), value)
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        said = f"{type(value).__qualname__}({', '.join(sorted(map(told, value)))})"
        return _with_kept(said, value)
    if isinstance(value, logging.Logger):  # leads to all others
        return f"logger {value.name}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, Enum):
        said = f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
        own = {name: each for name, each in vars(value).items() if not _is_enums(name)}
        return f"{said} {told([value.value, own])}"
    if isinstance(value, np.ufunc):  # of one that is not NumPy's, what it does is not to be had
        is_numpys = getattr(np, value.__name__, None) is value
        return repr(value) if is_numpys else f"{value!r} {unlike_all()}"
    return repr(value) if _speaks(value) else _in_full(value)


def _with_kept(said: str, value: Any) -> str:
    """As said, and what the value keeps beside that. An array in a file has been told by its rows,
    wherever that lies."""
    kept = _unmarked(dict(kept_by(value)))
    if isinstance(value, np.memmap):
        kept = {name: each for name, each in kept.items() if name not in _OF_FILE}
    return f"{said} {told(kept)}" if kept else said


def _unmarked(own: dict[str, Any]) -> dict[str, Any]:
    """Without what torch.compile marks a tensor with."""
    return {name: each for name, each in own.items() if not name.startswith("_dynamo_")}


def _array(value: Any) -> str:
    """A digest of an array's or a tensor's values, floats in full, of whatever dtype."""
    dtype = value.dtype
    holds = bool(getattr(dtype, "hasobject", False) or getattr(dtype, "names", None))
    try:
        rows = value.tolist()
    except RecursionError:
        raise
    except Exception:  # a sparse one, say, is told as it is pickled
        if str(getattr(value, "device", "")) == "meta":  # there are no values
            return repr(value)
        is_quantized = getattr(value, "is_quantized", False)  # its pickle has addresses
        rows, holds = unlike_all() if is_quantized else _pickled(value), True
    said = told(rows) if holds else repr(rows)  # what it holds may be arrays
    digest = xxhash.xxh3_128_hexdigest(said.encode())
    return f"{type(value).__name__}({dtype}, {tuple(value.shape)}, {digest})"


def _code(function: FunctionType) -> str:
    """A digest of what a function does, of the values it was given for that, and of those that
    were set on it."""
    parts, functions = list[str](), [function]
    for one in functions:  # it grows by the functions it was given, one maybe itself
        parts += _steps(one.__code__)
        own = sorted(marked(one).items())
        parts += [name for name, _ in own]
        for held in map(uncompiled_call, [*held_by(one), *(value for _, value in own)]):
            if isinstance(held, FunctionType):
                functions += [] if held in functions else [held]
                parts.append(f"{held.__module__}.{held.__qualname__} {functions.index(held)}")
            else:
                parts.append(told(held))
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _steps(code: CodeType) -> list[str]:
    """What code does, functions made in it included."""
    parts, todo = list[str](), [code]
    for each in todo:  # the list grows
        parts.append(f"{each.co_code.hex()} {each.co_names}")
        todo += [const for const in each.co_consts if isinstance(const, CodeType)]
        parts += [told(const) for const in each.co_consts if not isinstance(const, CodeType)]
    return parts


def _learnt(state: Mapping[str, Any]) -> str:
    """A digest by bytes: a state may be all of a model's weights."""
    import torch

    digest = xxhash.xxh3_128()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
        else:
            digest.update(f"{name} {told(value)}".encode())
    return digest.hexdigest()


def _beside(module: Any) -> dict[str, Any]:
    """What a torch.nn.Module, and those in it, choose by and save nowhere: plain attributes,
    buffers that are not persistent, and what is set on their tensors. Of another object with a
    state_dict, what it keeps, unless it is torch's (an optimizer)."""
    import torch

    torchs = {*vars(torch.nn.Module()), "_compiled_call_impl"} - {"training"}
    itself = [] if _has_version(type(module)) else [("", module)]
    found: dict[str, Any] = {}
    for where, one in getattr(module, "named_modules", lambda: itself)():
        _meet(type(one))
        buffers = getattr(one, "_buffers", {})
        again = _AGAIN if isinstance(one, torch.nn.RNNBase) else set[str]()
        plain = {
            name: each
            for name, each in kept_by(one)
            if name not in torchs | again and not name.startswith("_torchdynamo_")
        }
        found |= {f"{where}.{name}": each for name, each in {**plain, **buffers}.items()}
        for name, tensor in {**getattr(one, "_parameters", {}), **buffers}.items():
            if own := _unmarked(vars(tensor)) if tensor is not None else {}:
                found[f"{where}.{name} has"] = own
    return found


def _in_full(value: Any) -> str:
    return made_of(value, _of(value))


def made_of(value: Any, named: Sequence[tuple[str | None, Any]]) -> str:
    parts = (told(part) if name is None else f"{name}={told(part)}" for name, part in named)
    return f"{type(value).__qualname__}({', '.join(parts)})"


def _of(value: Any) -> list[tuple[str | None, Any]]:
    """What a value is made of, with the names of fields, whatever its repr shows."""
    kind = type(value)
    if _is_dataclass(value):
        return [*shown(value), *hidden(value)]
    beside: list[tuple[str | None, Any]] = [] if kind in _HOLD else list(kept_by(value))
    beside += [(name, getattr(value, name)) for name in ("default_factory", "maxlen")
               if isinstance(value, defaultdict | deque) and hasattr(value, name)]  # fmt: skip
    if isinstance(value, Mapping):
        return [(None, part) for pair in value.items() for part in pair] + beside
    if isinstance(value, list | tuple | deque):
        return [(None, part) for part in value] + beside
    bare = next(
        (base for base in (int, float, complex, str, bytes) if isinstance(value, base)), None
    )
    if bare is not None:
        return [(None, bare(value)), *beside]
    own = kind is SimpleNamespace or _is_of_python(kind)
    return beside if own else [*beside, (None, _pickled(value))]


def _is_of_python(kind: type) -> bool:
    """Whether its objects hold nothing beside their dict and slots (object's own rule, where it is
    to pickle one)."""
    slots = len(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    places = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return not kind.__itemsize__ and kind.__basicsize__ <= object.__basicsize__ + 8 * places


def _pickled(value: Any) -> Any:
    """What C code holds, as it would be pickled; else what is unlike all others."""
    try:
        made = made_from(value)
    except Exception:
        return unlike_all()
    return f"{getattr(value, '__module__', '')}.{made}" if isinstance(made, str) else made


def _speaks(value: Any) -> bool:
    """Whether its repr tells all there is, the same in every process."""
    kind = type(value)
    if kind in _HOLD:
        return all(_speaks(part) for _, part in _of(value))
    by_name = f"{kind.__module__}.{kind.__qualname__}" in _TORCHS
    is_scalar = isinstance(value, _SPEAK_AS) and not isinstance(value, np.void)
    return kind in _SPEAK or is_scalar or by_name


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    known = hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")
    is_scalar = isinstance(value, np.generic) and not isinstance(value, np.void)
    return known and not is_scalar and not isinstance(value, type)


def _has_learnt(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
