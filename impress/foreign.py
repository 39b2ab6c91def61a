"""What a model's modules keep beside their tensors, where that decides what they compute.

PEFT's settings are known by name. A module of any other package may compute by all that it has: a
steering vector in an attribute, say, that is set anew between two requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from impress.errors import Unsupported
from impress.values import VERSIONED, held_by, kept_in, made_from, marked, uncompiled_call

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
#: What Transformers keeps in any of its models; the config is in a key by itself.
_OF_ANY_MODEL: Final = {
    "name_or_path", "kernel_config", "generation_config", "loss_type", "warnings_issued",
    "all_tied_weights_keys", "gradient_checkpointing", "quantization_method", "is_quantized",
    "is_loaded_in_4bit", "is_loaded_in_8bit", "hf_device_map", "hf_quantizer", "_tp_plan",
    "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_device_mesh", "_no_split_modules",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_save", "_previous_max_cache_length", "_loss_function", "_compiled_call",
    "_last_compile_config", "_require_grads_hook", "_require_grads_hooks",
    "_gradient_checkpointing_func", "_use_kernels", "_hf_peft_config_loaded",
    "_output_capturing_hooks_installed", "_weight_conversions", "model_tags",
    "peft_config",  # see adapter_settings
}  # fmt: skip
#: What it keeps in their classes.
_OF_ANY_CLASS: Final = _OF_ANY_MODEL | {
    "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value",
    "config_class", "_auto_class",
}  # fmt: skip
#: Config keys that change without changing one bit of the keys and values (dtype counts by itself),
#: except the kernels of attention and experts: eager and sdpa round differently, and rows of one
#: serve the other. An object keeps some under another name than its file (`_output_attentions`).
VOLATILE: Final = frozenset(
    (
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures"),
        *("auto_map", "dtype", "torch_dtype", "use_cache", "return_dict", "max_length"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("_experts_implementation_internal", "output_attentions", "_output_attentions"),
        *("output_hidden_states", "id2label", "label2id", "problem_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
    )
)
#: Values, and bytes of them, that are told of a model: each request tells them again.
_MOST_VALUES: Final = 10_000
_MOST_BYTES: Final = 8 << 20


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
        [uncompiled(name), *layer_settings(module)]
        for name, module in model.named_modules()
        if type(module).__module__.partition(".")[0] == "peft"
    ]
    configs = (getattr(model, "peft_config", None) or {}) if layers else {}
    return [*layers, *([name, _said(config)] for name, config in sorted(configs.items()))]


def layer_settings(layer: Any) -> list[str]:
    """Of one of PEFT's layers: which adapters are active, merged and how scaled."""
    return [_setting(layer, key) for key in _ADAPTER_SETTINGS]


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
    """[name, class, attribute, digest] of all that each of `foreign_modules` keeps beside its
    parameters and buffers, and of the model's config, by which they may compute; what the code of
    a class or function does, its name has to stand for.

    Raises Unsupported, naming the module, where that is more than can be told.
    """
    found = list(foreign_modules(model))
    if not found:
        return []
    teller, told = _Teller(model), list[list[str]]()
    for name, module in [*found, ("config", model.config)]:
        kind = _class_of(module)
        told.append([name, kind, "", ""])
        try:
            told += [[name, kind, attribute, said] for attribute, said in teller.kept_by(module)]
        except (_Untold, RecursionError) as err:
            what = str(err) if isinstance(err, _Untold) else "what refers to itself"
            raise Unsupported(
                f"{name} ({kind}) keeps {what} beside its tensors, and no key can tell that: "
                "register it as a buffer, or attach the model without the module"
            ) from None
    return told


class _Untold(Exception):
    """What cannot be told."""


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
        self._kept: list[Any] = []
        self._n_values = self._n_bytes = 0

    def kept_by(self, module: Any) -> Iterator[tuple[str, str]]:
        """(attribute, digest) of what is its own, and its class's. Raises _Untold."""
        known = self._own if isinstance(module, self._torch.nn.Module) else VOLATILE
        if _is_a_model(type(module)):
            known = known | _OF_ANY_MODEL
        own = sorted((name, value) for name, value in vars(module).items() if name not in known)
        for name, value in (*own, *_of_class(type(module))):
            told = hashlib.blake2b(digest_size=16, person=b"impress-foreign")
            for text in self._told(value):
                told.update(text.encode(errors="backslashreplace") + b"\0")
            yield name, told.hexdigest()

    def _told(self, value: Any) -> Iterator[str]:
        """A value as texts."""
        self._n_values += 1
        if self._n_values > _MOST_VALUES:
            raise _Untold(f"with others of its kind more than {_MOST_VALUES:,} values")
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._count(len(value) if isinstance(value, str | bytes) else 0)
            yield f"{type(value).__name__} {value!r}"
        elif (name := self._names.get(id(value))) is not None:
            yield f"the model's {name}"
        elif id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = len(self._seen), value
            yield _class_of(value)
            is_module = isinstance(value, self._torch.nn.Module)  # see `kept_by`
            if not is_module and (shared := list(_of_class(type(value)))):
                yield from self._told(shared)
            yield from self._inside(value)
            yield "end"

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes > _MOST_BYTES:
            raise _Untold(f"with others of its kind more than {_MOST_BYTES:,} bytes")

    def _inside(self, value: Any) -> Iterator[str]:
        """What an object has."""
        value = uncompiled_call(value)
        if isinstance(value, Enum):
            yield from self._told(value.value)
        elif isinstance(value, self._torch.Tensor | Mapping | set | frozenset | list | tuple):
            yield from self._items(value)
            if own := getattr(value, "__dict__", None):
                yield from self._told(own)
        elif isinstance(value, self._torch.nn.Module):  # which no other module registers
            yield from self._told([dict(value._parameters), dict(value._buffers)])
            yield from self._told(dict(value._modules))
            for name, said in self.kept_by(value):
                yield f"{name} {said}"
        elif isinstance(value, ModuleType | type | logging.Logger):
            yield _name_of(value)
            if isinstance(value, type):
                yield from self._told(list(_of_class(value)))
        elif isinstance(value, FunctionType):  # with what it is given, but not what it looks up
            yield _name_of(value)
            yield from self._told([held_by(value), marked(value)])
        elif isinstance(value, weakref.ref):
            yield from self._told(value())
        elif isinstance(value, MethodType):
            yield from self._told([value.__func__, value.__self__])
        elif hasattr(value, "to_dict") and _class_of(value).startswith("transformers."):
            kept = value.to_dict().items()  # a config
            yield from self._told({key: each for key, each in kept if key not in VOLATILE})
        else:
            yield from self._state(value)

    def _items(self, value: Any) -> Iterator[str]:
        """What a tensor, or a container, holds."""
        if isinstance(value, self._torch.Tensor):
            yield _tensor(value, self._count)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from self._told(key)
                yield from self._told(each)
        elif isinstance(value, list | tuple):
            for each in value:
                yield from self._told(each)
        else:  # a set has no order: none of its items may refer to one before it
            before, told, kept = self._seen, [], list[Any]()
            for each in value:
                self._seen = before.copy()
                told.append(" ".join(self._told(each)))
                kept.append(self._seen)
            self._seen = before
            yield from sorted(told)
            self._kept += kept  # their values' ids are used by no others

    def _state(self, value: Any) -> Iterator[str]:
        """What would make it again, as copies and pickles have it."""
        if hasattr(value, "__array_interface__"):  # numpy's
            self._count(value.nbytes)
            yield f"{value.dtype} {value.shape}"
            yield from self._told(value.tolist() if value.dtype.hasobject else value.tobytes())
        elif type(value).__module__ == "_thread":
            return  # a lock is taken or free
        else:
            try:
                made = made_from(value)
            except Exception:  # whatever it raises
                if not (callable(value) and hasattr(value, "__name__")):  # numpy.sin, say
                    raise _Untold(f"a {_class_of(value)}") from None
                made = value.__name__
            yield from self._told(made)
            if hasattr(value, "__dict__"):  # what a pickle may leave out
                yield from self._told(vars(value))


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class and its bases keep, by name, as far as no package's version tells it: of an
    enumeration its members, not what Python keeps there as they are used."""
    left_out = _OF_ANY_CLASS if _is_a_model(kind) else ()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in VERSIONED:
            continue
        kept = kept_in(base)
        if issubclass(base, Enum):
            kept = {name: member.value for name, member in base.__members__.items()}
        for name, value in sorted(kept.items()):
            if name not in left_out:
                yield f"{base.__qualname__}.{name}", value


def _is_a_model(kind: type) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _name_of(code: Any) -> str:
    name = getattr(code, "__qualname__", "") or getattr(code, "__name__", "") or code.name
    return f"{getattr(code, '__module__', '')}.{name}"


def _tensor(value: torch.Tensor, count: Callable[[int], None]) -> str:
    """Shape, dtype and bytes of a tensor, wherever it lies."""
    import torch

    try:
        count(value.nbytes)
        flat = value.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # meta, sparse, quantized
        raise _Untold(f"a tensor of {value.dtype} on {value.device}") from None
    digest = hashlib.blake2b(flat, digest_size=16).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"
