"""Which Transformers models and generate() calls are served, and what is refused by name.

Pure checks and shapes: nothing here touches a store or runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PretrainedConfig

from impress.engines.hf_lengths import check_lengths
from impress.engines.hf_modules import (
    CACHES,
    INT8_ADVICE,
    Found,
    check_adapters,
    check_causal,
    check_causal_modules,
    check_functions,
    foreign_code,
    modules_of,
    served_modules,
)
from impress.engines.hf_settings import most_new, on_host, setting
from impress.engines.rounding import fpmath
from impress.engines.versions import check_versions, version_of
from impress.errors import BadInput, Unsupported
from impress.settings import check_config
from impress.types import Geometry

FAMILIES = ("opt", "llama", "qwen2", "qwen3", "mistral")
ATTENTION = ("sdpa", "eager")  # the stock kernels whose result was compared bit by bit

# Arguments that would change the prompt, where its rows lie or whose the cache is, unless None.
_REFUSED = {
    **dict.fromkeys(CACHES, "the engine brings the cache of every request"),
    "inputs_embeds": "a prefix is known by its token ids",
    "position_ids": "positions count from 0 in every request",
    "assistant_model": "assisted decoding rolls the cache back",
    "assistant_early_exit": "assisted decoding rolls the cache back",
    "prompt_lookup_num_tokens": "prompt lookup rolls the cache back",
    "use_mtp": "multi-token prediction rolls the cache back",
    "adapter_names": "the namespace knows one adapter for all rows",
    "custom_generate": "only the model's own decoding loop is known to be exact",
    "token_healing": "it changes the prompt behind the engine's back",
    "penalty_alpha": "contrastive search keeps several continuations",
    "dola_layers": "only greedy decoding and sampling are served",
    "constraints": "constrained search needs beams",
    "force_words_ids": "constrained search needs beams",
    "negative_prompt_ids": "guidance runs the model on a second prompt in the midst of a request",
    "negative_prompt_attention_mask": "guidance runs the model on a second prompt",
}
# Arguments of generate() besides the settings of a GenerationConfig. Any other would reach the
# model's forward, where it may change keys that the token ids do not tell apart.
_ARGUMENTS = {
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("synced_gpus", "tokenizer", "trust_remote_code", "logits_to_keep"),
}
_SETTINGS = frozenset(vars(GenerationConfig()))
_ONE = {
    "num_beams": "beam search reorders the cache",
    "num_return_sequences": "one per row",
    "guidance_scale": "guidance runs the model on a second prompt in the midst of a request",
}
# Settings under which no row is reused, and why.
_WHOLE = {
    name: f"{name} is of every token of the prompt"
    for name in ("output_hidden_states", "output_attentions")
}
_VERSION: Final = version_of("transformers").release
if _VERSION < (5, 21):  # over a cache that holds rows
    _WHOLE["prefill_chunk_size"] = "prefill_chunk_size wants Transformers 5.21 on a hit"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked request: what to look up and how much room its rows need."""

    input_ids: torch.Tensor  # [batch, n_tokens] int64
    rows: tuple[npt.NDArray[np.int32], ...]  # the same, one array for each of the batch
    n_tokens: int
    n_new: int  # most tokens generate() may add
    options: dict[str, Any]  # generate()'s other arguments
    returns_cache: bool  # the caller gets a cache back
    whole: str  # why no row may be reused, "" where rows may
    found: Found  # the model's modules, as the check of this request found them


def geometry_of(config: Any, dtype: Any) -> Geometry:
    """The geometry of a config's cache in a dtype (a torch dtype or its name). Raises BadInput."""
    n_heads = config.num_attention_heads
    return Geometry(
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
        dtype=str(dtype).removeprefix("torch."),
    )


#: What the engine asks of a model, besides generate(): wrappers of PEFT and torch pass these on.
_OF_MODELS: Final = ("can_generate", "device", "dtype", "set_attn_implementation")


def check_types(model: Any, config: Any) -> None:
    """Raises BadInput where `attach` was given something other than it takes; Unsupported where
    torch or Transformers are too old."""
    check_versions()
    is_one = isinstance(model, torch.nn.Module) and all(hasattr(model, name) for name in _OF_MODELS)
    if not is_one or not isinstance(getattr(model, "config", None), PretrainedConfig):
        raise BadInput(
            "model: want a Transformers model (AutoModelForCausalLM.from_pretrained(name)), "
            f"got {type(model).__name__}"
        )
    check_config(config)


def check_model(model: Any) -> None:
    """Raises Unsupported, naming what it is, for a model whose KV could not be reused exactly."""
    check_family(model.config)
    if not model.can_generate():
        raise Unsupported(f"{type(model).__name__} cannot generate: load the causal LM class")
    check_adapters(model)
    found = modules_of(model)
    check_causal_modules(model, found)
    if said := foreign_code(model, found):
        raise Unsupported(said)
    _check_attention(model.config)
    check_functions(found)


def check_family(config: Any) -> None:
    """The part of `check_model` that needs only a config: usable before weights are loaded."""
    check_kind(config)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"layer type {kind!r} is not supported, only full attention is")
    check_causal(config)
    _check_quantization(config)


def check_kind(config: Any) -> None:
    """Raises Unsupported on another family, or a RoPE whose angles depend on what follows."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise Unsupported(f"model type {config.model_type!r} is not supported; supported: {known}")
    for rope_type in _rope_types(config):
        if "dynamic" in rope_type or rope_type == "longrope":
            raise Unsupported(f"RoPE type {rope_type!r} rotates keys by the prompt's length")


#: Quantizations in which a pass's largest value scales all of it.
_BY_PASS: Final = {"fouroversix": "Four Over Six", "nvfp4": "NVFP4"}


def _check_quantization(config: Any) -> None:
    """Raises Unsupported on LLM.int8() with a threshold: a column where any row of a pass exceeds
    it is computed in float for all rows. check_causal_modules asks what its modules do."""
    given = getattr(config, "quantization_config", None) or {}
    settings = given if isinstance(given, Mapping) else given.to_dict()
    method = settings.get("quant_method")  # in a config object it is an enum member
    name = _BY_PASS.get(str(getattr(method, "value", method)))
    if name is not None:
        raise Unsupported(f"{name} is not supported: keys depend on what follows them")
    threshold = settings.get("llm_int8_threshold", 6.0)  # what bitsandbytes takes where none is set
    if settings.get("load_in_8bit") and threshold:
        raise Unsupported(
            f"llm_int8_threshold={threshold} is not supported, keys then depend on what follows "
            f"them: {INT8_ADVICE}"
        )


def _rope_types(config: Any) -> list[str]:
    """The RoPE types of a config: a newer one may have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return [str(group.get("rope_type") or group.get("type") or "default") for group in groups]


def _check_attention(config: Any) -> None:
    if str(config._attn_implementation).startswith("impress_"):  # ours, for one request
        raise Unsupported(
            "a request of this model is under way in this thread "
            f"(attention {config._attn_implementation!r}): wait until it has returned"
        )
    if config._attn_implementation not in ATTENTION:
        known = " or ".join(ATTENTION)
        raise Unsupported(
            f"attention {config._attn_implementation!r} is not supported: "
            f"call model.set_attn_implementation({known})"
        )


def check_request(
    model: Any, input_ids: Any, max_new_tokens: int | None, options: Mapping[str, Any]
) -> Prompt:
    """The request as data. Raises BadInput or Unsupported before anything is read or written."""
    kwargs = dict(options)
    if (inputs := kwargs.pop("inputs", None)) is not None:  # generate()'s own name for them
        if input_ids is not None:
            raise BadInput("inputs and input_ids are one argument: pass one")
        input_ids = inputs
    found = _check_mode(model)
    ids, tokens = _check_ids(input_ids, model.config.vocab_size)
    if (mask := kwargs.pop("attention_mask", None)) is not None:
        _check_mask(mask, ids)
    else:
        _check_pads(model, kwargs, tokens)
    _check_options(model, kwargs)
    for name in ("logits_processor", "stopping_criteria"):
        if kwargs.get(name) is not None:  # an iterator would be empty when it is its turn
            kwargs[name] = list(kwargs[name])
    for name in CACHES:  # they are None, else refused: the engine passes its own
        kwargs.pop(name, None)
    if setting(model, kwargs, "cache_implementation") is not None:
        kwargs["cache_implementation"] = None  # generate() wants none beside a cache
    n_tokens = int(ids.shape[1])
    n_new = most_new(model, n_tokens, max_new_tokens, kwargs)
    check_lengths(model.config, n_tokens, n_new)
    return Prompt(
        input_ids=ids,
        rows=tuple(np.ascontiguousarray(row) for row in tokens),
        n_tokens=n_tokens,
        n_new=n_new,
        options=kwargs,
        returns_cache=bool(setting(model, kwargs, "return_dict_in_generate")),
        whole=next((why for name, why in _WHOLE.items() if setting(model, kwargs, name)), ""),
        found=found,
    )


def _check_mode(model: Any) -> Found:
    """What is looked at in each request, all its modules among it, which are returned."""
    _check_attention(model.config)
    check_causal(model.config)  # read in every forward, so it may have come after attach
    found = served_modules(model)
    check_functions(found)
    # As model.device says, which walks the model again.
    device = next(t for t in found.tensors if isinstance(t, torch.nn.Parameter)).device.type
    if torch.is_autocast_enabled(device):
        raise Unsupported("torch.autocast computes keys in another precision than the model's")
    check_rounding(found, device)
    return found


#: Before Transformers 5.19 RoPE's angles are a product of float32 matrices in a model of any dtype.
_ANGLES_BY_PRODUCT: Final = _VERSION < (5, 19)


def check_rounding(found: Found, device: str) -> None:
    """Raises Unsupported where a torch setting has a model round more than its dtypes say."""
    if is_rounded() and _multiplies(found):
        raise Unsupported(
            "torch may round float32 matrices before it multiplies them, and no key tells that: "
            "call torch.set_float32_matmul_precision('highest')"
        )
    if device == "cpu" and (mode := fpmath()) and _multiplies(found):
        raise Unsupported(
            f"ONEDNN_DEFAULT_FPMATH_MODE (or DNNL_…) is {mode}: oneDNN may round float32 matrices "
            "before it multiplies them, and no key tells that: unset it"
        )
    matmul = torch.backends.cuda.matmul
    adds_up = device == "cuda" and getattr(matmul, "allow_fp16_accumulation", False)
    if adds_up and any(tensor.dtype == torch.float16 for tensor in found.tensors):
        raise Unsupported(
            "torch adds float16 products up in float16, and no key tells that: set "
            "torch.backends.cuda.matmul.allow_fp16_accumulation = False"
        )


def _multiplies(found: Found) -> bool:
    """Whether a model may multiply float32 matrices: of a model in 16 bits, an adapter's may be in
    32, and quantized ones may be computed in that."""
    return (
        _ANGLES_BY_PRODUCT
        or any(tensor.dtype == torch.float32 and tensor.ndim == 2 for tensor in found.tensors)
        or any(getattr(one, "compute_dtype", None) == torch.float32 for one in found.modules)
    )


def is_rounded() -> bool:
    """Whether torch may round float32 matrices before it multiplies them."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was lowered through torch.backends, for which there is no single name
        return True


def _check_ids(input_ids: Any, vocab_size: int) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """The ids, as the model takes them and on the host."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
        shape = tuple(getattr(input_ids, "shape", ())) or type(input_ids).__name__
        raise BadInput(f"input_ids must be a tensor [batch, n_tokens], got {shape}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise BadInput(f"input_ids must be int64 or int32, got {input_ids.dtype}")
    if not input_ids.numel():
        raise BadInput(f"input_ids is empty: {tuple(input_ids.shape)}")
    # A copy: what the caller writes there later is not in the prompt that rows are stored under.
    # And few torch calls: each lets go of the interpreter, which storing may be waiting for.
    ids = input_ids.to(torch.int64, copy=True)
    tokens = (ids if ids.device.type == "cpu" else ids.cpu()).numpy()
    if int(tokens.view(np.uint64).max()) >= vocab_size:  # a negative one is beyond every vocabulary
        wrong = min(int(tokens.min()), 0) or int(tokens.max())
        raise BadInput(f"token id {wrong} is outside the vocabulary 0..{vocab_size - 1}")
    return ids, tokens.astype(np.int32)


def _check_mask(mask: Any, ids: torch.Tensor) -> None:
    shape = tuple(getattr(mask, "shape", ())) or type(mask).__name__
    if shape != tuple(ids.shape):
        raise BadInput(f"attention_mask must be a tensor {tuple(ids.shape)}, got {shape}")
    if not bool((mask == 1).all()):
        raise Unsupported("padded prompts: pass a batch of equal lengths, or one prompt at a time")


def _check_pads(model: Any, kwargs: Mapping[str, Any], tokens: npt.NDArray[np.int32]) -> None:
    """Without a mask generate() hides every pad token, unless that also ends an answer."""
    pad, ends = (on_host(setting(model, kwargs, f"{name}_token_id")) for name in ("pad", "eos"))
    if pad is None or (ends is not None and np.isin(pad, ends).any()):
        return
    if np.isin(tokens, pad).any():
        raise Unsupported(
            f"padded prompts: token {pad} pads, and there is no attention_mask: pass a batch of "
            "equal lengths, or one prompt at a time; where the token is meant, an attention_mask "
            "of ones"
        )


def _check_options(model: Any, kwargs: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        value = setting(model, kwargs, name)
        if value is not None and value is not False:
            raise Unsupported(f"{name} is not supported: {why}")
    for name, why in _ONE.items():
        value = setting(model, kwargs, name)
        if value not in (None, 1):
            raise Unsupported(f"{name}={value} is not supported, only 1: {why}")
    if setting(model, kwargs, "use_cache") is False:
        raise Unsupported("use_cache=False is not supported: there would be nothing to reuse")
    keep = kwargs.get("logits_to_keep")
    if keep is not None and not isinstance(keep, int):
        raise Unsupported(
            f"logits_to_keep as {type(keep).__name__} is not supported, only an int: it names "
            "positions of a pass, and on a hit these are others"
        )
    for name, value in kwargs.items():
        if name not in _ARGUMENTS and name not in _SETTINGS and value is not None:
            raise Unsupported(f"{name} is not supported: it is no setting of generate()")
    cache = setting(model, kwargs, "cache_implementation")
    if cache not in (None, "dynamic", "hybrid"):  # hybrid: what older checkpoints name by default
        raise Unsupported(f"cache_implementation={cache!r} is not supported, only the dynamic one")
