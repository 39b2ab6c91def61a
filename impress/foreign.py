"""What a model's modules keep beside their tensors, where that decides what they compute.

PEFT's settings are known by name. A module of any other package may compute by all that it has: a
steering vector in an attribute, say, that is set anew between two requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from impress.errors import Unsupported

if TYPE_CHECKING:
    import torch

#: Packages whose classes compute what tensors and settings say.
_KNOWN: Final = {"torch", "transformers", "peft"}
#: Packages whose modules, in a quantized model, replace the layers that its settings tell of.
_QUANTIZERS: Final = {
    "aqlm", "auto_gptq", "auto_round", "auto_round_extension", "auto_round_kernel", "awq",
    "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "flute", "fp_quant", "gptqmodel",
    "hqq", "optimum", "quark", "sinq", "spqr_quant", "torchao", "vptq",
}  # fmt: skip
#: Attributes of a PEFT layer.
_ADAPTER_SETTINGS: Final = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
#: Keys of a PEFT adapter's config that do not say how it computes.
_ADAPTER_VOLATILE: Final = frozenset(
    (
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type"),
        *("inference_mode", "runtime_config"),
    )
)
#: What engines look at by themselves, or what only moves tensors.
_LOOKED_AT: Final = {
    "forward", "generate", "prepare_inputs_for_generation", "_hf_hook", "_old_forward",
    "_compiled_call_impl", "_is_hf_initialized",
}  # fmt: skip
#: What any PreTrainedModel has, beside private names; its config is in a key by itself.
_OF_ANY_MODEL: Final = {
    "name_or_path", "kernel_config", "generation_config", "loss_type", "warnings_issued",
    "all_tied_weights_keys", "gradient_checkpointing", "quantization_method", "is_quantized",
}  # fmt: skip
#: Values that are told of one module: each request tells them again.
_MOST_VALUES: Final = 10_000
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def uncompiled(name: str) -> str:
    """A module's or tensor's name without torch.compile's wrappers, which compute the same."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# --- PEFT -----------------------------------------------------------------------------------------


def adapter_settings(model: Any) -> list[list[str]]:
    """What decides the outcome of PEFT layers besides their tensors: which are active, how scaled,
    and what their adapters' configs say, some of which (a seed, for one) is nowhere else.

    Pure. Empty for a model without such layers.
    """
    layers = [
        [uncompiled(name), *(_setting(module, key) for key in _ADAPTER_SETTINGS)]
        for name, module in model.named_modules()
        if type(module).__module__.partition(".")[0] == "peft"
    ]
    configs = (getattr(model, "peft_config", None) or {}) if layers else {}
    return [*layers, *([name, _said(config)] for name, config in sorted(configs.items()))]


def _setting(module: Any, name: str) -> str:
    value = getattr(module, name, None)
    return "" if callable(value) else repr(value)  # a wrapper's attribute may be a model's method


def _said(config: Any) -> str:
    kept = {key: value for key, value in vars(config).items() if key not in _ADAPTER_VOLATILE}
    return json.dumps(_plain(kept), sort_keys=True)


def _plain(value: Any) -> Any:
    """The value as JSON has it, the same whether it was loaded or made: a set has no order."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):  # PEFT's enums are texts
        return value
    is_settings = is_dataclass(value) and not isinstance(value, type)
    return _plain(vars(value)) if is_settings else str(value)


# --- other packages -------------------------------------------------------------------------------


def foreign_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules of classes that are neither torch's nor Transformers' nor PEFT's, by name: over the
    same tensors they may compute something else. Those of a quantizer that have tensors of their
    own are left out: a quantized model's settings tell of them."""
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    for name, module in model.named_modules():
        has_tensors = bool(module._parameters or module._buffers)
        known = _KNOWN | _QUANTIZERS if is_quantized and has_tensors else _KNOWN
        if type(module).__module__.partition(".")[0] not in known:
            yield uncompiled(name), module


def foreign_settings(model: Any) -> list[list[str]]:
    """[name, class, digest of all that it keeps beside its parameters and buffers] of each of
    `foreign_modules`; what a class's code does, its name has to stand for.

    Raises Unsupported, naming the module, where that is more than can be told.
    """
    found = list(foreign_modules(model))
    if not found:
        return []
    teller = _Teller(model)
    return [[name, _class_of(module), teller.digest(name, module)] for name, module in found]


class _Teller:
    """Tells values as text, the same in any process."""

    def __init__(self, model: Any) -> None:
        import torch

        self._torch = torch
        self._own = {*vars(torch.nn.Module()), *_LOOKED_AT}
        registered = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        # What the model has anyway is told by its name.
        self._names = {id(one): uncompiled(name) for name, one in registered}
        self._names[id(model.config)] = "config"
        self._seen: dict[int, tuple[int, Any]] = {}  # with each value: else its id is used again
        self._n_left = 0

    def digest(self, name: str, module: Any) -> str:
        self._seen, self._n_left = {}, _MOST_VALUES
        told = hashlib.blake2b(digest_size=16, person=b"impress-foreign")
        try:
            for text in self._attributes(module):
                told.update(text.encode(errors="backslashreplace") + b"\0")
        except (_TooMuch, RecursionError):
            raise Unsupported(
                f"{name} ({_class_of(module)}) keeps more beside its tensors than a key could "
                "tell: keep that elsewhere, or attach the model without the module"
            ) from None
        return told.hexdigest()

    def _attributes(self, module: Any) -> Iterator[str]:
        is_model = any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
        for name, value in sorted(vars(module).items()):
            if name in self._own or (is_model and _is_of_any_model(name)):
                continue
            yield name
            yield from self._told(value)

    def _told(self, value: Any) -> Iterator[str]:
        """A value as texts."""
        self._n_left -= 1
        if self._n_left < 0:
            raise _TooMuch
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield f"{type(value).__name__} {value!r}"
        elif (name := self._names.get(id(value))) is not None:
            yield f"the model's {name}"
        elif id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = len(self._seen), value
            yield _class_of(value)
            yield from self._inside(value)
            yield "end"

    def _inside(self, value: Any) -> Iterator[str]:
        """What an object has."""
        if isinstance(value, self._torch.Tensor):
            yield _tensor(value)
        elif isinstance(value, self._torch.nn.Module):  # which no other module registers
            for kept in (value._parameters, value._buffers, value._modules):
                yield from self._told(dict(kept))
            yield from self._attributes(value)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from self._told(key)
                yield from self._told(each)
        elif isinstance(value, set | frozenset):
            yield from sorted(" ".join(self._told(each)) for each in value)
        elif isinstance(value, list | tuple):
            for each in value:
                yield from self._told(each)
        elif isinstance(value, partial):
            yield from self._told([value.func, value.args, value.keywords])
        elif isinstance(value, ModuleType | type | logging.Logger) or callable(value):
            yield from self._code(value)
        elif hasattr(value, "to_dict"):  # a config of Transformers
            yield from self._told(value.to_dict())
        elif hasattr(value, "tobytes"):  # numpy's
            digest = hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
            yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} {digest}"
        elif is_dataclass(value):
            yield from self._told({one.name: getattr(value, one.name) for one in fields(value)})
        elif hasattr(value, "__dict__"):
            yield from self._told(dict(sorted(vars(value).items())))
        elif type(value).__module__ != "_thread":  # a lock is taken or free
            yield _ADDRESS.sub("", repr(value))

    def _code(self, value: Any) -> Iterator[str]:
        """A class or function is what its name says, as a module's class is; and what it is bound
        to."""
        yield f"{getattr(value, '__module__', '')}.{_name_of(value)}"
        if (owner := getattr(value, "__self__", None)) is not None:
            yield from self._told(owner)
        elif not isinstance(value, ModuleType | type | logging.Logger):
            cells = getattr(value, "__closure__", None) or ()
            with suppress(ValueError):  # an empty one
                yield from self._told([cell.cell_contents for cell in cells])
            yield from self._told(dict(getattr(value, "__dict__", {})))


class _TooMuch(Exception):
    """More than _MOST_VALUES."""


def _is_of_any_model(name: str) -> bool:
    return name.startswith(("_", "hf_", "is_loaded_in_")) or name in _OF_ANY_MODEL


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _name_of(code: Any) -> str:
    return str(getattr(code, "__qualname__", "") or getattr(code, "__name__", "") or type(code))


def _tensor(value: torch.Tensor) -> str:
    """Shape, dtype and bytes of a tensor, wherever it lies."""
    import torch

    try:
        flat = value.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # meta, sparse, quantized
        raise _TooMuch from None
    digest = hashlib.blake2b(flat, digest_size=16).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"
