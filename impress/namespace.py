"""The digest of everything that makes two keys or values compatible.

A namespace covers the model's config, its revision where known, a digest of the weights, the dtype
the model computes in, the position scheme and the engine family. Models with equal namespaces, on
any machine, may read each other's KV; the store mixes the geometry, the window and the tenant into
the root keys. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress.errors import BadInput, Unsupported
from impress.foreign import (
    VOLATILE,
    adapter_settings,
    foreign_modules,
    foreign_settings,
    uncompiled,
)
from impress.weights import (
    StoredTensor,
    add_tensor,
    chunks,
    stamp_of,
    stored_tensors,
    weight_files,
    weights_of,
)

if TYPE_CHECKING:
    import torch

_ENGINE = "transformers"
_POSITIONS = "after-position absolute"
_PASSED_BY = "rotary_emb.inv_freq"  # Transformers ignores it in old checkpoints: it has its own
# Of a path of bytes, a null byte, half of a character; of a directory, the working one among them,
# that is gone or may not be searched; of links in a circle (before Python 3.13).
_NO_PATH = (TypeError, ValueError, OSError, RuntimeError)
_PACKS = "support_avx512bf16_for_cpu"  # what a Linear4bit of bitsandbytes knows of its CPU
# safetensors dtype code -> torch name; a tensor of any other dtype never matches a model's.
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def namespace_of(
    model_or_dir: Any, *, cross_engine: bool = False, engine: str = _ENGINE, dtype: str = ""
) -> bytes:
    """The 32-byte namespace of a Transformers model object, or of a directory with its files.

    A directory (str or path) is read: config.json and every tensor (impress/weights.py); its dtype
    is the config's, float32 where that names none. A model whose tensors, buffers and config still
    match the directory it was loaded from gets the directory's namespace in the model's own dtype;
    any other (random weights, a fine-tune, an adapter in memory, RoPE's angles rounded by
    `.to(dtype)`) gets a digest of its state_dict and of the buffers that differ from what its
    config would make. Every byte is read, which takes some seconds for a large model.
    `cross_engine` leaves the engine family out, for engines whose KV is close but not equal bit by
    bit. `engine` names a family other than Transformers; `dtype` is what that engine computes a
    directory's model in, where the config says otherwise.

    Effects: the weights digest of a directory is kept in the user's cache directory; a failure
    there is harmless. Raises BadInput for anything that is not a readable model directory and
    Unsupported for a model whose weights are not in memory, or not told by any digest.
    """
    family = "any" if cross_engine else engine
    for name, text in (("engine", engine), ("dtype", dtype)):
        if not isinstance(text, str):
            raise BadInput(f"namespace: {name} must be a str, got {type(text).__name__}")
    if isinstance(model_or_dir, (str, os.PathLike)):
        try:
            directory = Path(model_or_dir).resolve()
        except _NO_PATH as err:
            raise BadInput(f"namespace: {model_or_dir!r} is no path: {err}") from None
        config = _read_config(directory)
        return _of_directory(directory, config, dtype or _config_dtype(config), family)
    return _of_model(model_or_dir, family)


def _of_directory(directory: Path, config: dict[str, Any], dtype: str, family: str) -> bytes:
    revision = ""  # a hub snapshot says its commit in its path: .../snapshots/<commit>
    if directory.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", directory.name):
        revision = directory.name
    return _combine(config, revision, weights_of(directory), dtype, family)


def _of_model(model: Any, family: str) -> bytes:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise BadInput(
            "namespace: want a model's directory or a Transformers model, got "
            f"{type(model).__name__}"
        )
    config = model.config.to_dict()
    dtype = str(model.dtype).removeprefix("torch.")
    directory = _directory_of(model)
    odd = _odd_buffers(model)
    if directory is not None and not odd:
        known = _of_its_files(model, directory, dtype, family)
        if known is not None:
            return known
    revision = getattr(model.config, "_commit_hash", None) or ""
    return _combine(config, revision, _weights_of_state(model, odd), dtype, family)


def _directory_of(model: Any) -> Path | None:
    """Where a model says that it was loaded from, if that is a directory that can be found."""
    name = getattr(model.config, "_name_or_path", None) or getattr(model, "name_or_path", "")
    try:
        directory = Path(name).resolve() if name else None
        return directory if directory is not None and directory.is_dir() else None
    except _NO_PATH:  # a hub's name, say, in a working directory that is gone
        return None


def _of_its_files(model: Any, directory: Path, dtype: str, family: str) -> bytes | None:
    """The namespace of a model's directory; None where that holds another, if only by the end."""
    try:
        before = stamp_of(directory)
        if not _is_of(model, directory):
            return None
        found = _of_directory(directory, _read_config(directory), dtype, family)
        return found if stamp_of(directory) == before else None
    except (BadInput, OSError):  # gone, or being replaced
        return None


def _combine(
    config: Mapping[str, Any], revision: str, weights: bytes, dtype: str, family: str
) -> bytes:
    fields = (
        json.dumps(_normalised(config), sort_keys=True, default=_text).encode(),
        revision.encode(),
        weights,
        dtype.encode(),
        _POSITIONS.encode(),
        family.encode(),
    )
    digest = hashlib.blake2b(digest_size=32, person=b"impress-ns-v1")
    for field in fields:
        digest.update(struct.pack("<Q", len(field)) + field)
    return digest.digest()


def _text(value: Any) -> Any:
    """What a config holds that is not JSON, the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    said = str(value)
    return type(value).__qualname__ if " at 0x" in said else said


# --- config ---------------------------------------------------------------------------------------


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"namespace: {directory} is no model directory: no config.json") from None
    except (OSError, ValueError, RecursionError) as err:  # the last: thousands of brackets
        raise BadInput(f"namespace: cannot read {path}: {err}") from None
    if not isinstance(config, dict):
        raise BadInput(f"namespace: {path} holds no JSON object")
    return config


def _config_dtype(config: Mapping[str, Any]) -> str:
    """The dtype a directory is loaded in, in one spelling: `dtype` or the older `torch_dtype`."""
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


def _normalised(config: Mapping[str, Any], volatile: frozenset[str] = VOLATILE) -> dict[str, Any]:
    """The config without volatile keys, at every depth; a quantization keeps them, as its `dtype`
    is another. Nulls are kept: an absent key means a default, which may be another."""
    kept = {}
    for key, value in config.items():
        if key in volatile:
            continue
        below = frozenset[str]() if key == "quantization_config" else volatile
        kept[str(key)] = _normalised(value, below) if isinstance(value, Mapping) else value
    return kept


# --- weights in memory ----------------------------------------------------------------------------


def _weights_of_state(model: Any, odd: Mapping[str, torch.Tensor]) -> bytes:
    """The digest of a state_dict and odd buffers, and of the adapters' settings."""
    digest = hashlib.blake2b(digest_size=32, person=b"impress-mem-v1")
    for name, tensor in sorted({**_state(model), **odd}.items()):
        if tensor.device.type == "meta":
            raise Unsupported(f"namespace: the weights of {name} are not in memory (meta device)")
        dtype = str(tensor.dtype).removeprefix("torch.")
        read = partial(_bytes, tensor.detach().reshape(-1))
        add_tensor(digest, name, dtype, tuple(tensor.shape), tensor.nbytes, read)
    digest.update(json.dumps(adapter_settings(model)).encode())
    if foreign := foreign_settings(model):
        digest.update(json.dumps(foreign).encode())
    return digest.digest()


def _state(model: Any) -> dict[str, torch.Tensor]:
    """The state_dict. Raises Unsupported where a module computes with more than plain tensors, or
    would be changed by that."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    _check_packing(model)
    state = {}
    for name, value in model.state_dict().items():
        is_wrapper = is_traceable_wrapper_subclass(value)  # its values are in tensors of its own
        if not isinstance(value, torch.Tensor) or value.is_quantized or is_wrapper:
            raise Unsupported(
                f"namespace: {name} is quantised by torch, or divided ({type(value).__name__}): "
                "no digest tells such weights: attach the model that is neither"
            )
        state[uncompiled(name)] = value
    return state


def _check_packing(model: Any) -> None:
    """Raises Unsupported where state_dict() would change the model: bitsandbytes then unpacks what
    the first forward packed for such a CPU, with other scales, and the next packs it again."""
    for name, module in model.named_modules():
        if vars(module).get(_PACKS) and module.weight.device.type == "cpu":
            raise Unsupported(
                f"namespace: {name} is in bitsandbytes' 4 bit, which a forward packs anew on a CPU "
                "with AVX512_BF16, and a model is known by where its weights lie: put it on a GPU, "
                f"load it otherwise, or set {_PACKS} = False in all such layers"
            )


def _odd_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers that no file holds, by name, where the model's config would make others.

    RoPE's frequencies are such: from_pretrained(…, dtype) keeps them float32, a later `.to(dtype)`
    rounds them, and the same weights then rotate keys by other angles.
    """
    odd = {}
    for path, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        mine = {name: b for name, b in module.named_buffers(recurse=False) if name in unsaved}
        fresh = _made_anew(module, model.config) if mine else {}
        for name, buffer in mine.items():
            if name not in fresh or not _same_bits(buffer, fresh[name]):
                odd[f"{uncompiled(path)}.{name}"] = buffer
    return odd


def _made_anew(module: Any, config: Any) -> dict[str, torch.Tensor]:
    """Fresh buffers of a module whose class takes only a config, as RoPE's does; else none."""
    import torch

    if next(module.parameters(), None) is not None:  # they would be drawn at random
        return {}
    try:
        with torch.device("cpu"):
            return dict(type(module)(config).named_buffers(recurse=False))
    except Exception:  # somebody else's class: what it asks for is not known
        return {}


def _is_of(model: Any, directory: Path) -> bool:
    """Whether a model's config and every tensor are those of the directory, cast to its dtype."""
    if any(foreign_modules(model)):
        return False
    try:
        files = weight_files(directory)
        if not all(path.suffix == ".safetensors" for path in files):
            return False
        loaded = type(model.config).from_pretrained(directory, local_files_only=True)
    except Exception:  # Transformers has its own error classes for a bad config
        return False
    if _normalised(loaded.to_dict()) != _normalised(model.config.to_dict()):
        return False
    return _tensors_match(model, files)


def _tensors_match(model: Any, files: list[Path]) -> bool:
    state = _state(model)
    matched = set()
    try:
        for stored in (stored for path in files for stored in stored_tensors(path)):
            tensor = state.pop(stored.name, None)
            if tensor is None and stored.name.endswith(_PASSED_BY):
                continue
            if tensor is None or not _matches(tensor, stored, model.dtype):
                return False
            matched.add((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()))
    except BadInput:
        return False
    # A tied tensor is saved once: what is left must be another name of one that matched.
    return all((t.data_ptr(), tuple(t.shape), t.stride()) in matched for t in state.values())


def _matches(tensor: torch.Tensor, stored: StoredTensor, model_dtype: torch.dtype) -> bool:
    import torch

    stored_dtype = getattr(torch, _TORCH_NAMES.get(stored.dtype, ""), None)
    if stored_dtype is None or tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    if tensor.dtype != (model_dtype if stored_dtype.is_floating_point else stored_dtype):
        return False
    size = stored_dtype.itemsize
    if stored.n_bytes != tensor.numel() * size:
        return False
    flat = tensor.detach().reshape(-1)
    for first, end in chunks(stored.n_bytes):
        raw = stored.read(first, end)
        if stored_dtype != tensor.dtype:
            cast = torch.frombuffer(bytearray(raw), dtype=stored_dtype).to(tensor.dtype)
            raw = cast.view(torch.uint8).numpy().tobytes()
        piece = flat[first // size : end // size]
        if raw != _bytes(piece, 0, piece.nbytes):
            return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape or one.is_meta:
        return False
    bits = [t.detach().cpu().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def _bytes(flat: torch.Tensor, first: int, end: int) -> bytes:
    """Bytes of a tensor [n], from the device it is on."""
    import torch

    size = flat.element_size()
    piece = flat[first // size : end // size].cpu()
    return piece.view(torch.uint8).numpy().tobytes()
