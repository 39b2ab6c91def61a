"""What a policy is known by: its class, all of its settings, what the classes of these keep, and
its code where that is not impress's own; the same in every process.

Trust that was earned under a name is spent under it (ledgers.py), so the name has to hold whatever
a policy chooses by. Changes to what impress's own do are counted by hand (identify.RULES). Code
that the policy's code calls in turn is not seen.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Final

import xxhash

from impress import policy as built_in
from impress.errors import ImpressError
from impress.quality.told import (
    as_far_as,
    hidden,
    kept_by,
    lines,
    made_of,
    meeting,
    of_met,
    shown,
    told,
    unlike_all,
)  # fmt: skip
from impress.selection import probes
from impress.selection.identify import OWN, select
from impress.values import STDLIB, kept_in, uncompiled_call

#: Packages whose classes' methods are left out: they have a version, or are counted by RULES.
_NOT_THEIRS: Final = {"impress", *STDLIB}
_SLOTS: Final = (GetSetDescriptorType, MemberDescriptorType)
#: Where Python keeps a class's annotations, from 3.14 on as a function around all of the class's
#: namespace, itself included, which could not be told. No rows are chosen by them.
_ANNOTATIONS: Final = {
    "__annotate_func__", "__annotate__", "__annotations_cache__", "__conditional_annotations__",
}  # fmt: skip


def name_of(policy: Any) -> str:
    """A policy with its settings and its code, the same in every process."""
    with meeting() as met:
        said, does = _settings(policy), _does(policy)
        does += of_met(met)
    digest = xxhash.xxh3_128_hexdigest("\n".join(does).encode())
    return f"{said} code {digest}" if does else said


def _settings(policy: Any) -> str:
    kind = type(policy)
    params = vars(kind).get("__dataclass_params__")
    try:
        if params is not None and params.repr:
            said = made_of(policy, shown(policy))  # whatever repr its class has
        else:
            # A class that is no dataclass may have a base's repr, which lacks its own settings.
            settings = (f" {name}={told(value)}" for name, value in kept_by(policy))
            said = f"{kind.__qualname__} {policy.name}{''.join(settings)}"
        if kind.__module__ == built_in.__name__:
            return said
        besides = [*(hidden(policy) if is_dataclass(policy) else ()), *_of_class(kind)]
        shared = (f" {name}={told(value)}" for name, value in besides)
        return f"{kind.__module__}.{said}{''.join(shared)}"
    except Exception:  # it leads back to itself, or its own code fails
        return f"{kind.__qualname__} {unlike_all()}"


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
        return [as_far_as(value.__func__), *_whole(value.__self__)]
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    inner = _whole(value.func) if isinstance(value, partial) else []
    own = [] if is_class or isinstance(value, FunctionType) else kept_by(value)
    return [*inner, as_far_as(value), *lines(own), *_methods(kind)]


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
            and name not in _ANNOTATIONS
        ]
        found += lines(does)
    return found


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Settings kept in a class or its bases, by name; not its methods, nor its fields."""
    own = {f.name for f in fields(kind)} if is_dataclass(kind) else {"name"}
    found = {name: v for base in reversed(kind.__mro__) for name, v in kept_in(base).items()}
    return sorted((name, value) for name, value in found.items() if name not in own)
