"""What a policy is known by: its class, all of its settings, and its code where that is not
impress's own; the same in every process.

Trust that was earned under a name is spent under it (ledgers.py), so the name has to hold whatever
a policy chooses by. Changes to what impress's own do are counted by hand (identify.RULES). Code
that the policy's code calls in turn is not seen.
"""

from __future__ import annotations

import copyreg
import logging
import secrets
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial, partialmethod
from pathlib import PurePath
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final
from uuid import UUID

import numpy as np
import xxhash

from impress import policy as built_in
from impress.errors import ImpressError
from impress.selection import probes
from impress.selection.identify import OWN, select
from impress.values import STDLIB, held_by, kept_in, made_from, marked, uncompiled_call

_PLAIN_REPR: Final[Any] = object.__repr__  # gives an object's address
#: Packages whose classes' methods are left out: they have a version, or are counted by RULES.
_NOT_THEIRS: Final = {"impress", *STDLIB}
#: Their repr gives their address, and there is no more to tell.
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
_SLOTS: Final = (GetSetDescriptorType, MemberDescriptorType)
#: Their repr tells all there is. Not their subclasses', which may hold more, or say less.
_SPEAK: Final = {
    type(None), type(...), bool, int, float, complex, str, bytes, range, date, datetime, time,
    timedelta, Decimal, Fraction, UUID, np.ufunc,
}  # fmt: skip
_SPEAK_AS: Final = (PurePath, np.generic, np.dtype)
_TORCHS: Final = {"torch.dtype", "torch.device", "torch.layout", "torch.memory_format"}
#: Their repr tells all there is where that of each item does.
_HOLD: Final = {list, tuple, dict, OrderedDict}


def name_of(policy: Any) -> str:
    """A policy with its settings and its code, the same in every process."""
    said, does = _settings(policy), "\n".join(_does(policy))
    return f"{said} code {xxhash.xxh3_128_hexdigest(does.encode())}" if does else said


def _settings(policy: Any) -> str:
    kind = type(policy)
    params = vars(kind).get("__dataclass_params__")
    try:
        if params is not None and params.repr:
            said = _made_of(policy, _shown(policy))  # whatever repr its class has
        else:
            # A class that is no dataclass may have a base's repr, which lacks its own settings.
            settings = (f" {name}={_told(value)}" for name, value in _state_of(policy))
            said = f"{kind.__qualname__} {policy.name}{''.join(settings)}"
        if kind.__module__ == built_in.__name__:
            return said
        besides = [*(_hidden(policy) if is_dataclass(policy) else ()), *_of_class(kind)]
        shared = (f" {name}={_told(value)}" for name, value in besides)
        return f"{kind.__module__}.{said}{''.join(shared)}"
    except Exception:  # it leads back to itself, or its own code fails
        return f"{kind.__qualname__} {_unlike_all()}"


def _does(policy: Any) -> list[str]:
    """What a policy chooses by that is not impress's own: its methods, identifier and codec."""
    kind, probe = type(policy), getattr(policy, "probe", None)
    found, identifier = _methods(kind), select.dispatch(kind)
    if identifier is not OWN.get(kind, OWN[object]):
        of = [own.__qualname__ for own, each in OWN.items() if each is identifier]
        found += [f"as {of[0]}"] if of else _whole(identifier)
    if probe is not None and probe not in probes.OWN:
        with suppress(ImpressError):  # an unknown probe, by which nothing is chosen
            found += _whole(probes.codec_of(probe))
    return found


def _whole(value: Any) -> list[str]:
    """A callable or an object: its state, what its class shares among all, and its methods."""
    value = uncompiled_call(value)
    if isinstance(value, MethodType):
        return [_as_far_as(value.__func__), *_whole(value.__self__)]
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    inner = _whole(value.func) if isinstance(value, partial) else []
    own = [] if is_class else _state_of(value)
    return [*inner, _as_far_as(value), *_lines([*own, *_of_class(kind)]), *_methods(kind)]


def _methods(kind: type) -> list[str]:
    """The methods of a class and its bases, except of those that are Python's or impress's."""
    found = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _NOT_THEIRS:
            continue
        does = [
            (f"{base.__qualname__}.{name}", value)
            for name, value in sorted(vars(base).items())
            if (callable(value) or hasattr(type(value), "__get__"))
            and not isinstance(value, _SLOTS)
        ]
        found += _lines(does)
    return found


def _lines(named: list[tuple[str, Any]]) -> list[str]:
    return [f"{name}={_as_far_as(value)}" for name, value in named]


def _as_far_as(value: Any) -> str:
    """As `_told`; for a value that leads back to itself, say, that it is unlike all others."""
    try:
        return _told(value)
    except Exception:
        return f"{type(value).__qualname__} {_unlike_all()}"


def _unlike_all() -> str:
    """Stands in for what cannot be told: no trust is better than another policy's."""
    return secrets.token_hex(8)


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Settings kept in a class or its bases, by name; not its methods, nor its fields."""
    own = {f.name for f in fields(kind)} if is_dataclass(kind) else {"name"}
    found = {name: v for base in reversed(kind.__mro__) for name, v in kept_in(base).items()}
    return sorted((name, value) for name, value in found.items() if name not in own)


def _shown(value: Any) -> list[tuple[str | None, Any]]:
    """A dataclass's settings that it takes or shows, by name."""
    told = (field.name for field in fields(value) if field.repr or field.init)
    return [(name, getattr(value, name, None)) for name in told]


def _hidden(value: Any) -> list[tuple[str, Any]]:
    """A dataclass's settings that it neither takes nor shows, by name: such fields, and attributes
    it has set itself beside them. Not what is computed only when asked for."""
    told = {field.name for field in fields(value) if field.repr or field.init}
    state = {field.name: getattr(value, field.name, None) for field in fields(value)}
    state |= dict(_kept(value))
    return sorted((name, state[name]) for name in state.keys() - told)


def _kept(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps, except for what is computed only when asked for."""
    lazy = {name for kind in type(value).__mro__ for name, of in vars(kind).items()
            if isinstance(of, cached_property)}  # fmt: skip
    return [(name, each) for name, each in _state_of(value) if name not in lazy]


def _state_of(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps, in its dict and its slots, by name."""
    if isinstance(value, FunctionType):
        return sorted(marked(value).items())
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return sorted((name, each) for part in parts for name, each in (part or {}).items())


def _told(value: Any) -> str:
    """A setting's repr, but in full: an array's or a tensor's leaves out rows and digits, and a
    module's what it has learnt."""
    if isinstance(value, FunctionType):
        value = uncompiled_call(value)
        return f"{value.__module__}.{value.__qualname__} {_code(value)}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, _LOCKS):
        return type(value).__qualname__
    if isinstance(value, MethodType):
        return f"{_told(value.__func__)} of {_told(value.__self__)}"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {_told(value.__func__)}"
    if isinstance(value, property):
        return f"property {_told([value.fget, value.fset, value.fdel])}"
    if isinstance(value, partial | partialmethod):
        return f"partial({_told(value.func)}, {_told(value.args)}, {_told(value.keywords)})"
    if _has_learnt(value):
        plain = type(value).__repr__ is _PLAIN_REPR
        said = type(value).__qualname__ if plain else repr(value)
        try:  # what is beside first: it may lead back here, before all weights are copied
            return f"{said} {_learnt(_beside(value))} {_learnt(value.state_dict())}"
        except RecursionError:
            raise
        except Exception:  # say, on a device that is gone
            return f"{said} {_unlike_all()}"
    if _is_array(value):
        with suppress(Exception):  # say, of no device: then its repr has to do
            rows = repr(value.tolist()).encode()  # floats in full, of whatever dtype
            digest = xxhash.xxh3_128_hexdigest(rows)
            return f"{type(value).__name__}({value.dtype}, {tuple(value.shape)}, {digest})"
        return repr(value)
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        return f"{type(value).__qualname__}({', '.join(sorted(map(_told, value)))})"
    if isinstance(value, logging.Logger):  # leads to all others
        return f"logger {value.name}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    return repr(value) if _speaks(value) else _in_full(value)


def _code(function: FunctionType) -> str:
    """A digest of what a function does, and of the values it was given for that."""
    parts, functions = list[str](), [function]
    for one in functions:  # it grows by the functions it was given, one maybe itself
        parts += _steps(one.__code__)
        for held in map(uncompiled_call, held_by(one)):
            if isinstance(held, FunctionType):
                functions += [] if held in functions else [held]
                parts.append(f"{held.__module__}.{held.__qualname__} {functions.index(held)}")
            else:
                parts.append(_told(held))
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _steps(code: CodeType) -> list[str]:
    """What code does, functions made in it included."""
    parts, todo = list[str](), [code]
    for each in todo:  # the list grows
        parts.append(f"{each.co_code.hex()} {each.co_names}")
        todo += [const for const in each.co_consts if isinstance(const, CodeType)]
        parts += [_told(const) for const in each.co_consts if not isinstance(const, CodeType)]
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
            digest.update(f"{name} {_told(value)}".encode())
    return digest.hexdigest()


def _beside(module: Any) -> dict[str, Any]:
    """What a torch.nn.Module, and those in it, choose by and save nowhere: plain attributes, and
    buffers that are not persistent."""
    found: dict[str, Any] = {}
    for where, one in getattr(module, "named_modules", tuple)():
        plain = {name: each for name, each in vars(one).items() if not name.startswith("_")}
        found |= {f"{where}.{name}": each for name, each in {**plain, **one._buffers}.items()}
    return found


def _in_full(value: Any) -> str:
    return _made_of(value, _of(value))


def _made_of(value: Any, named: Sequence[tuple[str | None, Any]]) -> str:
    parts = (_told(part) if name is None else f"{name}={_told(part)}" for name, part in named)
    return f"{type(value).__qualname__}({', '.join(parts)})"


def _of(value: Any) -> list[tuple[str | None, Any]]:
    """What a value is made of, with the names of fields, whatever its repr shows."""
    kind = type(value)
    if _is_dataclass(value):
        return [*_shown(value), *_hidden(value)]
    beside: list[tuple[str | None, Any]] = [] if kind in _HOLD else list(_kept(value))
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
        return _unlike_all()
    return f"{getattr(value, '__module__', '')}.{made}" if isinstance(made, str) else made


def _speaks(value: Any) -> bool:
    """Whether its repr tells all there is, the same in every process."""
    kind = type(value)
    if kind in _HOLD:
        return all(_speaks(part) for _, part in _of(value))
    by_name = f"{kind.__module__}.{kind.__qualname__}" in _TORCHS
    return kind in _SPEAK or isinstance(value, _SPEAK_AS) or by_name


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    known = hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")
    return known and not isinstance(value, type | np.generic)


def _has_learnt(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
