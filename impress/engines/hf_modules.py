"""Whether each module of a model computes what its class and tensors say: keys cover no more.

Dropout in training mode is beyond that, and so are hooks, a module's own `forward` or decoding loop
and code that came with a model's files: no digest tells what code does. Whatever leaves rows as
they are passes: Transformers' own hooks (they capture outputs), accelerate's that bring tensors to
a device, torch.compile's wrappers, what PEFT puts back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules import module as every
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from impress.engines.versions import version_of
from impress.errors import Unsupported
from impress.foreign import layer_settings
from impress.values import uncompiled_call

#: What Transformers calls a request's cache, as an argument and in results; and whatever it did.
CACHES: Final = ("cache", "past_key_values", "cache_params")
CACHE: Final = "cache" if version_of("transformers").release >= (5, 24) else "past_key_values"
#: The package of the code that comes with a model's files (trust_remote_code).
_REMOTE: Final = "transformers_modules"
#: Classes of accelerate's hooks that bring tensors to a device, or hold such hooks. CpuOffload is
#: not: it moves the parameters themselves, and a model is known by where they lie (hf_weights).
_MOVING: Final = {"ModelHook", "AlignDevicesHook", "SequentialHook"}
#: What a module may have in place of its class's own: generate() runs these, pass after pass.
_CALLED: Final = ("forward", "generate", "prepare_inputs_for_generation")
#: Transformers' own mask functions, which its models' files have by name.
_MASKS: Final = ("create_causal_mask", "create_sliding_window_causal_mask")
#: Classes in which a pass's largest value scales all of it: torchao's, Four Over Six's, NVFP4's.
_BY_PASS: Final = frozenset({"Float8Linear", "FourOverSixLinear", "NVFP4Linear"})
#: That of LLM.int8(). PEFT's class of this name has no state.
_INT8: Final = "Linear8bitLt"
#: What tells PEFT's layers from its wrappers.
_DISABLED: Final = "disable_adapters"
#: A config that is changed later changes no module.
INT8_ADVICE: Final = (
    "load the model with llm_int8_threshold=0.0 (of a checkpoint saved in 8 bit: in its "
    "config.json)"
)


class Found(NamedTuple):
    """A model's modules and tensors as one walk found them, each once, in torch's own order.

    What each request looks at: walks of their own took twice as long, most of it waiting for code
    and objects that the forward before drove out of the processor's caches.
    """

    modules: list[Any]
    classes: list[type]
    """Of these modules, except torch.compile's wrappers."""
    kinds: dict[type, Any]
    """The classes of all modules, each with its first."""
    odd: list[Any]
    """Modules where a flag, a hook, a method or a rotation of their own is set."""
    tensors: list[torch.Tensor]
    """Parameters and buffers."""


def modules_of(model: Any) -> Found:
    """torch's own walk takes several times as long: it makes names."""
    seen: dict[int, Any] = {}
    tensors: dict[int, torch.Tensor] = {}
    classes: list[type] = []
    odd: list[Any] = []
    left = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen[id(module)] = module
        classes.append(type(module))
        own = module.__dict__
        if (
            own.get("training", True) or not own.get("is_causal", True)
            or own.get("_forward_hooks", True) or own.get("_forward_pre_hooks", True)
            or "rope_type" in own
            # _CALLED, spelled out: a loop over it takes half as long as all else here.
            or "forward" in own or "generate" in own or "prepare_inputs_for_generation" in own
        ):  # fmt: skip
            odd.append(module)
        for kept in (module._parameters, module._buffers):
            if kept:  # most have none
                for tensor in kept.values():
                    if tensor is not None:
                        tensors[id(tensor)] = tensor
        if parts := module._modules:
            left.extend(reversed(parts.values()))
            if "_orig_mod" in parts:
                classes.pop()
    kinds = {type(module): module for module in reversed(seen.values())}
    return Found(list(seen.values()), classes, kinds, odd, list(tensors.values()))


def served_modules(model: Any) -> Found:
    """As `modules_of`. Raises Unsupported where one is in training mode or sees what follows."""
    found = modules_of(model)
    check_causal_modules(model, found)
    check_eval(model, found)
    return found


def of_package(found: Found, package: str) -> Any:
    """A module whose class is of a package, or None."""
    return next((m for kind, m in found.kinds.items() if _package(kind) == package), None)


def bare(model: Any) -> Any:
    """The module that answers, under what torch.compile or PEFT put around it.

    They hand `generate` on to it: their own forward, and its hooks, are bypassed.
    """
    modules = modules_of(model).modules
    return next((m for m in modules if isinstance(m, PreTrainedModel)), model)


def check_eval(model: Any, found: Found) -> None:
    """Raises Unsupported where one is in training mode, as adapters added after eval() are."""
    for module in found.odd:
        if module.training:
            raise Unsupported(
                f"{_name(model, module)} is in training mode (dropout): call model.eval()"
            )


def check_causal(config: Any) -> None:
    """Raises Unsupported where tokens see those after them: Transformers' masks use this, and
    another thread's forward may have changed it (continuous batching does)."""
    if not getattr(config, "is_causal", True):
        raise Unsupported("is_causal=False is not supported: keys depend on what follows them")


def check_causal_modules(model: Any, found: Found) -> None:
    """Raises Unsupported where a token's keys depend on those after it, whatever the config says.

    torch's sdpa uses a module's is_causal where there is no mask. LLM.int8() uses a threshold that
    each module got at loading: a column where any row of a pass exceeds it is float in all rows.
    """
    for module in found.odd:
        if not module.__dict__.get("is_causal", True):
            raise Unsupported(
                f"{_name(model, module)} has is_causal=False: keys depend on what follows them"
            )
        if module.__dict__.get("rope_type") in ("dynamic", "longrope"):  # whatever the config says
            raise Unsupported(
                f"{_name(model, module)} has RoPE type {module.rope_type!r}, which rotates keys by "
                "the prompt's length"
            )
    for kind, module in found.kinds.items():
        if kind.__name__ in _BY_PASS:
            raise Unsupported(
                f"{_name(model, module)} is a {kind.__name__}: keys depend on what follows them; "
                "attach the model without it"
            )
    if _INT8 not in {kind.__name__ for kind in found.kinds}:
        return
    for module in found.modules:
        state = module.__dict__.get("state") if type(module).__name__ == _INT8 else None
        if threshold := getattr(state, "threshold", 0):
            raise Unsupported(
                f"{_name(model, module)} has llm_int8_threshold={threshold}: keys depend on what "
                f"follows them: {INT8_ADVICE}"
            )


def check_adapters(model: Any) -> None:
    """Raises Unsupported where a PEFT adapter's part in a token's keys depends on what follows, or
    its forward writes tensors: the model would pass for another after each request."""
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        kind = ""
        if getattr(adapter, "alora_invocation_tokens", None) is not None:
            kind = "an aLoRA"  # it begins at the last invocation in the prompt
        elif getattr(adapter, "peft_type", None) == "XLORA":
            kind = "an X-LoRA"  # it is mixed by the whole prompt
        elif getattr(adapter, "peft_type", None) == "LILY":
            kind = "a Lily"  # by the mean of a pass
        if getattr(adapter, "sample_at_inference", False):
            raise Unsupported(
                f"adapter {name!r} draws at random in every pass (sample_at_inference): one draw "
                "would be stored for all; delete it, or load it without that"
            )
        if kind:
            raise Unsupported(
                f"adapter {name!r} is {kind}, and a token's keys then depend on what follows: "
                "delete it"
            )
        if getattr(adapter, "peft_type", None) == "CPT":
            raise Unsupported(
                f"adapter {name!r} is a CPT, which writes its own tensors in every request, and a "
                "model is known by them: delete it"
            )
        if getattr(adapter, "target_parameters", None):
            raise Unsupported(
                f"adapter {name!r} has target_parameters: it writes the model's tensors in every "
                "request, and a model is known by them: merge it (merge_and_unload) or delete it"
            )


def switches(model: Any, found: Found) -> Callable[[], list[Any]]:
    """What asks how a model is set: training mode, causality, which adapters are active.

    For code that runs within an answer and may set it back before the end. Asked in every pass, so
    of one attention and one of PEFT's layers alone: train() and set_adapter() set all of them.
    """
    attention = next((m for m in found.modules if "layer_idx" in m.__dict__), model)
    layer = None
    if of_package(found, "peft") is not None:  # its wrappers pass a method of this name on
        layers = (m for m in found.modules if _package(type(m)) == "peft")
        layer = next((m for m in layers if isinstance(getattr(m, _DISABLED, None), bool)), None)

    def now() -> list[Any]:
        own = attention.__dict__
        causal = own.get("is_causal"), getattr(model.config, "is_causal", None)
        return [attention.training, causal, *([] if layer is None else layer_settings(layer))]

    return now


def check_functions(found: Found) -> None:
    """Raises Unsupported where a function that every module's attention calls was replaced."""
    for kind in found.kinds:
        if (file := _file_of(kind)) is not None:
            _check_file(file)
    functional, masks = torch.nn.functional, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    own = torch._C._nn.scaled_dot_product_attention
    if functional.scaled_dot_product_attention is not own:
        raise _was_replaced("torch.nn.functional.scaled_dot_product_attention")
    if ALL_ATTENTION_FUNCTIONS.get("eager") is not None:
        raise _was_replaced("attention function eager")
    for where, there, name, home in (
        ("attention function sdpa", ALL_ATTENTION_FUNCTIONS.get("sdpa"),
         "sdpa_attention_forward", sdpa_attention),
        ("mask function sdpa", masks.get("sdpa"), "sdpa_mask", masking_utils),
        ("mask function eager", masks.get("eager"), "eager_mask", masking_utils),
    ):  # fmt: skip
        if not _is_from(there, name, home):
            raise _was_replaced(where)


def _is_from(function: Any, name: str, home: ModuleType) -> bool:
    """Whether a function is the one that Transformers defines there under this name: not what was
    found there at first, as whoever replaces it may come before. Its own decorators are passed."""
    while isinstance(function, FunctionType):
        if not str(function.__globals__.get("__name__", "")).startswith("transformers."):
            return False
        if not hasattr(function, "__wrapped__"):
            return function.__globals__ is vars(home) and function.__code__.co_name == name
        function = function.__wrapped__
    return False


@lru_cache(256)
def _file_of(kind: type) -> dict[str, Any] | None:
    """The globals of the code of a Transformers model class: sys.modules may have let go of them.
    None: the class is not one, or another file's code answers for it."""
    if not kind.__module__.startswith("transformers.models."):
        return None
    found: dict[str, Any] = getattr(unwrap(kind.forward), "__globals__", {})  # type: ignore[attr-defined]
    return found if found.get("__name__") == kind.__module__ else None


def _check_file(found: dict[str, Any]) -> None:
    """Raises Unsupported where a function that a model's code calls by name was replaced."""
    for name in _MASKS:
        if name in found and not _is_from(found[name], name, masking_utils):
            raise _was_replaced(f"{found['__name__']}.{name}")
    eager = found.get("eager_attention_forward")
    if eager is not None and getattr(eager, "__globals__", None) is not found:
        raise _was_replaced(f"{found['__name__']}.eager_attention_forward")


def _was_replaced(what: str) -> Unsupported:
    return Unsupported(
        f"{what} was replaced, and no key tells what that computes: put back the one of torch or "
        f"Transformers (if nobody did: Transformers {version_of('transformers')} is not known here)"
    )


def foreign_code(model: Any, found: Found) -> str:
    """One line that says what to do where a module computes by more than its class; else empty.

    A class that was patched as a whole is not noticed.
    """
    if (remote := of_package(found, _REMOTE)) is not None:
        return _remote(_name(model, remote))
    if _foreign([*every._global_forward_hooks.values(), *every._global_forward_pre_hooks.values()]):
        return _to_remove("every module has a forward hook")
    for module in found.odd:
        hooks, before = module._forward_hooks, module._forward_pre_hooks
        if (hooks or before) and _foreign([*hooks.values(), *before.values()]):
            return _to_remove(f"{_name(model, module)} has a forward hook")
        if name := _replaced(module, found.modules):
            own = module.__dict__[name]  # custom_generate/generate.py comes in a partial
            if _package(getattr(own, "func", own)) == _REMOTE:
                return _remote(f"{name} of {_name(model, module)}")
            return _to_remove(f"{_name(model, module)} has a {name} of its own")
    return ""


def _to_remove(said: str) -> str:
    return f"{said}, and no key tells what that computes: remove it"


def _remote(what: str) -> str:
    return (
        f"{what} is of code that came with its files, and no key tells what that computes: load it "
        "without trust_remote_code"
    )


def _foreign(hooks: Iterable[Any]) -> bool:
    return not {_package(hook) for hook in hooks} <= {"transformers"}


def _package(code: Any) -> str:
    return str(getattr(code, "__module__", "")).partition(".")[0]


def _replaced(module: Any, modules: Sequence[Any]) -> str:
    """Name of a module's own method that does something other than its class's; "" for none."""
    own = module.__dict__
    for name in _CALLED:
        if name not in own:
            continue
        if name == "forward":
            same = _comes_to_its_class(module, own[name])
        else:
            same = _is_of_a_class(own[name], name, modules)
        if not same:
            return name
    return ""


def _is_of_a_class(called: Any, name: str, modules: Sequence[Any]) -> bool:
    """Whether it is what the class of one of them has: after each generate() PEFT leaves in itself
    the bound method of the model under it."""
    called = uncompiled_call(called)  # compiled by itself
    function, owner = (getattr(called, part, None) for part in ("__func__", "__self__"))
    if function is None or function is not getattr(type(owner), name, None):
        return False
    return any(owner is module for module in modules)


def _comes_to_its_class(module: Any, forward: Any) -> bool:
    if "_orig_mod" in module._modules:  # torch.compile's, around a module that is looked at too
        return True
    forward = uncompiled_call(forward)  # compiled by itself
    if isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks":
        before = getattr(module, "_old_forward", None)
        return _moves(getattr(module, "_hf_hook", None)) and _comes_to_its_class(module, before)
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def _moves(hook: Any) -> bool:
    kind = type(hook)
    known = kind.__module__ == "accelerate.hooks" and kind.__name__ in _MOVING
    return known and all(_moves(held) for held in getattr(hook, "hooks", ()))


def _name(model: Any, module: Any) -> str:
    names = (name for name, other in model.named_modules() if other is module)
    return next(names, "") or "the model"
