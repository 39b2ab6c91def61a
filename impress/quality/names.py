"""What a policy is known by: its class and all of its settings, the same in every process.

Trust that was earned under a name is spent under it (ledgers.py), so whatever a policy chooses by
has to be in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import xxhash

from impress import policy as built_in

#: What Python itself keeps in a class.
_PYTHONS: Final = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
_PLAIN_REPR: Final[Any] = object.__repr__  # says where an object lies


def name_of(policy: Any) -> str:
    """A policy with its settings, the same in every process."""
    kind = type(policy)
    params = vars(kind).get("__dataclass_params__")
    try:
        if params is not None and params.repr:
            said = _in_full(policy)  # whatever repr its class has
        else:
            # A class that is none may have a base's repr, which knows nothing of its own settings.
            settings = (f" {name}={_told(value)}" for name, value in _state_of(policy))
            said = f"{kind.__qualname__} {policy.name}{''.join(settings)}"
        if kind.__module__ == built_in.__name__:
            return said
        shared = (f" {name}={_told(value)}" for name, value in _of_class(kind))
        return f"{kind.__module__}.{said}{''.join(shared)}"
    except RecursionError:  # it leads back to itself
        return repr(policy)


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Settings that stand in a class or its bases, by name; not what it does, nor its fields."""
    own = {f.name for f in fields(kind)} if is_dataclass(kind) else {"name"}
    found = {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if not name.startswith("__") and name not in own and name not in _PYTHONS
        and not hasattr(type(value), "__get__")
    }  # fmt: skip
    return sorted(found.items())


def _state_of(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps, in its dict and its slots, by name."""
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return sorted((name, each) for part in parts for name, each in (part or {}).items())


def _told(value: Any) -> str:
    """A setting's repr, but in full: that of an array or a tensor leaves out rows and digits, that
    of a module what it has learnt."""
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code(value)}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, MethodType):
        return f"{_told(value.__func__)} of {_told(value.__self__)}"
    if isinstance(value, partial):
        return f"partial({_told(value.func)}, {_told(value.args)}, {_told(value.keywords)})"
    if _has_learnt(value):
        plain = type(value).__repr__ is _PLAIN_REPR
        said = type(value).__qualname__ if plain else repr(value)
        with suppress(Exception):  # on a device that is gone, say
            return f"{said} {_learnt(value.state_dict())}"
        return said
    if _is_array(value):
        with suppress(Exception):  # of no device, say: then its repr has to do
            rows = repr(value.tolist()).encode()  # floats in full, of whatever dtype
            digest = xxhash.xxh3_128_hexdigest(rows)
            return f"{type(value).__name__}({value.dtype}, {tuple(value.shape)}, {digest})"
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        return f"{type(value).__qualname__}({', '.join(sorted(map(_told, value)))})"
    return _in_full(value) if _is_told_by_parts(value) else repr(value)


def _code(function: FunctionType) -> str:
    """A digest of what a function does, and of what it was given to do it with."""
    parts, todo = list[str](), [function.__code__]
    for code in todo:  # it grows
        parts.append(f"{code.co_code.hex()} {code.co_names}")
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]
        parts += [_told(const) for const in code.co_consts if not isinstance(const, CodeType)]
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty yet
            cells.append(cell.cell_contents)
    given = _told([function.__defaults__, function.__kwdefaults__, cells])
    return xxhash.xxh3_128_hexdigest("\n".join([*parts, given]).encode())


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


def _in_full(value: Any) -> str:
    parts = (_told(part) if name is None else f"{name}={_told(part)}" for name, part in _of(value))
    return f"{type(value).__qualname__}({', '.join(parts)})"


def _of(value: Any) -> list[tuple[str | None, Any]]:
    """What a value is made of, with the names of fields."""
    if is_dataclass(value) and not isinstance(value, type):
        told = (f.name for f in fields(value) if f.repr or f.init)  # hidden settings are settings
        return [(name, getattr(value, name, None)) for name in told]
    if isinstance(value, Mapping):
        return [(None, part) for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return [(None, part) for part in value]
    if type(value).__repr__ is _PLAIN_REPR:  # else it is told by where it lies
        return list(_state_of(value))
    return []


def _is_array(value: Any) -> bool:
    known = hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")
    return known and not isinstance(value, type | np.generic)


def _is_own(value: Any) -> bool:
    """Whether its repr is not all of it, or not the same in every process."""
    kinds = (set, frozenset, FunctionType, MethodType, partial, type)
    return _is_array(value) or isinstance(value, kinds) or _has_learnt(value)


def _has_learnt(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _is_told_by_parts(value: Any) -> bool:
    if type(value).__repr__ is _PLAIN_REPR or _hides(value):
        return True
    return any(_is_own(part) or _is_told_by_parts(part) for _, part in _of(value))


def _hides(value: Any) -> bool:
    """Whether a dataclass has a setting that its repr leaves out."""
    is_one = is_dataclass(value) and not isinstance(value, type)
    return is_one and any(f.init and not f.repr for f in fields(value))
