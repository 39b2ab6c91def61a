"""The digest of everything that makes two keys or values compatible.

A namespace covers the model's config, its revision where known, a digest of the weights, the dtype
the model computes in, the position scheme and the engine family. Equal namespaces on any machine
mean that KV of one may be read by the other; the geometry, the window and the tenant are mixed into
the root keys by the store. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from impress.config import cache_dir
from impress.errors import BadInput, Unsupported

if TYPE_CHECKING:
    import torch

SAMPLE_BYTES = 64 << 10
_STRIDE_BYTES = 16 << 20  # between samples of a file whose tensors cannot be told apart
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors library accepts
_ENGINE = "transformers"
_POSITIONS = "after-position absolute"

# Config keys that change without changing one bit of the keys and values.
_VOLATILE = frozenset(
    (
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures"),
        *("auto_map", "dtype", "torch_dtype", "use_cache", "return_dict", "max_length"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
    )
)
# Attributes of a PEFT layer.
_ADAPTER_SETTINGS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
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


class _Sample(NamedTuple):
    """The head of one tensor in a safetensors file."""

    name: str
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    head: bytes  # the first SAMPLE_BYTES of its data, or all of them


def namespace_of(
    model_or_dir: Any, *, cross_engine: bool = False, engine: str = _ENGINE, dtype: str = ""
) -> bytes:
    """The 32-byte namespace of a Transformers model object, or of a directory with its files.

    A directory (str or path) is read: config.json, the safetensors headers and the first 64 KiB of
    every tensor; its dtype is the config's, float32 where that names none. A model whose tensors
    and config still match the directory it was loaded from gets the directory's namespace in the
    model's own dtype; any other (random weights, a fine-tune or an adapter in memory) gets a digest
    of samples of its state_dict. `cross_engine` leaves the engine family out, for engines whose KV
    is close but not equal bit by bit. `engine` names a family other than Transformers, `dtype`
    what it computes a directory's model in where that is not what its config says.

    Effects: the weights digest of a directory is kept in the user's cache directory; a failure
    there is harmless. Raises BadInput for what is no readable model directory and Unsupported for
    a model whose weights are not in memory.
    """
    family = "any" if cross_engine else engine
    if isinstance(model_or_dir, (str, os.PathLike)):
        directory = Path(model_or_dir).resolve()
        config = _read_config(directory)
        return _of_directory(directory, config, dtype or _config_dtype(config), family)
    return _of_model(model_or_dir, family)


def _of_directory(directory: Path, config: dict[str, Any], dtype: str, family: str) -> bytes:
    revision = ""  # a hub snapshot says its commit in its path: .../snapshots/<commit>
    if directory.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", directory.name):
        revision = directory.name
    return _combine(config, revision, weights_of(directory), dtype, family)


def _of_model(model: Any, family: str) -> bytes:
    config = model.config.to_dict()
    dtype = str(model.dtype).removeprefix("torch.")
    name = getattr(model.config, "_name_or_path", None) or getattr(model, "name_or_path", "")
    directory = Path(name).resolve() if name else None
    if directory is not None and directory.is_dir() and _is_of(model, directory):
        return _of_directory(directory, _read_config(directory), dtype, family)
    revision = getattr(model.config, "_commit_hash", None) or ""
    return _combine(config, revision, _weights_of_state(model), dtype, family)


def _combine(
    config: Mapping[str, Any], revision: str, weights: bytes, dtype: str, family: str
) -> bytes:
    fields = (
        json.dumps(_normalised(config), sort_keys=True, default=str).encode(),
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


# --- config ---------------------------------------------------------------------------------------


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"namespace: {directory} is no model directory: no config.json") from None
    except (OSError, ValueError) as err:
        raise BadInput(f"namespace: cannot read {path}: {err}") from None
    if not isinstance(config, dict):
        raise BadInput(f"namespace: {path} holds no JSON object")
    return config


def _config_dtype(config: Mapping[str, Any]) -> str:
    """The dtype a directory is loaded in, in one spelling: `dtype` or the older `torch_dtype`."""
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


def _normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without volatile keys and nulls, at every depth."""
    kept = {}
    for key, value in config.items():
        if key in _VOLATILE or value is None:
            continue
        kept[str(key)] = _normalised(value) if isinstance(value, Mapping) else value
    return kept


# --- weights in files -----------------------------------------------------------------------------


def weights_of(directory: Path) -> bytes:
    """The digest of a directory's weights, from the user's cache where the files are unchanged."""
    files = _weight_files(directory)
    stamp = []
    for path in files:
        stat = path.stat()
        # ctime tells a copy that kept size and mtime
        stamp.append([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    cached = _cache_path(directory)
    known = _read_cached(cached, stamp)
    if known is not None:
        return known
    digest = hashlib.blake2b(digest_size=32, person=b"impress-wts-v1")
    for path in files:
        if path.suffix == ".safetensors":
            for sample in _samples(path):
                _add_tensor(digest, sample.name, sample.dtype, sample.shape, sample.head)
        else:
            _add_file(digest, path)
    _write_cached(cached, stamp, digest.digest())
    return digest.digest()


def _weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, in a fixed order. Raises BadInput when there are none."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        path = directory / index
        if path.is_file():
            return _indexed_files(path)
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth"):
        found = sorted(path for path in directory.glob(pattern) if path.is_file())
        if found:
            return found
    raise BadInput(f"namespace: {directory} holds no weights")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise BadInput(f"namespace: cannot read {index}: {err!r}") from None
    files = [index.parent / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise BadInput(f"namespace: {index.parent} lacks {missing[0]}, which its index names")
    return files


def _samples(path: Path) -> Iterator[_Sample]:
    """The head of every tensor of a safetensors file, by name. Raises BadInput on a broken file."""
    try:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            (n_header,) = struct.unpack("<Q", file.read(8))
            if n_header > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"header of {n_header} bytes")
            header = json.loads(file.read(n_header))
            header.pop("__metadata__", None)
            for name in sorted(header):
                entry = header[name]
                first, end = entry["data_offsets"]
                n_bytes = min(end - first, SAMPLE_BYTES)
                head = os.pread(file.fileno(), n_bytes, 8 + n_header + first)
                if len(head) != n_bytes:
                    raise ValueError(f"{name} ends past the file")
                yield _Sample(name, entry["dtype"], tuple(entry["shape"]), head)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as err:
        raise BadInput(f"namespace: {path} is no readable safetensors file: {err}") from None


def _add_tensor(
    digest: hashlib.blake2b, name: str, dtype: str, shape: tuple[int, ...], head: bytes
) -> None:
    title = json.dumps([name, dtype, list(shape), len(head)]).encode()
    digest.update(struct.pack("<Q", len(title)) + title + head)


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    """Name, size, and samples at fixed distances and at the end, of a file of any format."""
    size = path.stat().st_size
    digest.update(json.dumps([path.name, size]).encode())
    with path.open("rb", buffering=0) as file:
        for start in [*range(0, size, _STRIDE_BYTES), max(0, size - SAMPLE_BYTES)]:
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))


# --- the cached digest ----------------------------------------------------------------------------


def _cache_path(directory: Path) -> Path:
    name = hashlib.blake2b(str(directory).encode(), digest_size=16).hexdigest()
    return cache_dir() / "weights" / f"{name}.json"


def _read_cached(path: Path, stamp: list[list[Any]]) -> bytes | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["files"] != stamp:
            return None
        digest = bytes.fromhex(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == 32 else None


def _write_cached(path: Path, stamp: list[list[Any]], digest: bytes) -> None:
    """Replace the cached digest in one step. Without a writable cache it is computed each time."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(fresh, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"files": stamp, "digest": digest.hex()}, file)
        fresh.replace(path)
    except OSError:
        return


# --- weights in memory ----------------------------------------------------------------------------


def _weights_of_state(model: Any) -> bytes:
    """The digest of samples of a model's state_dict, and of its adapters' settings."""
    digest = hashlib.blake2b(digest_size=32, person=b"impress-mem-v1")
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.device.type == "meta":
            raise Unsupported(f"namespace: the weights of {name} are not in memory (meta device)")
        dtype = str(tensor.dtype).removeprefix("torch.")
        head = _head(tensor, SAMPLE_BYTES // tensor.element_size())
        _add_tensor(digest, name, dtype, tuple(tensor.shape), head)
    digest.update(json.dumps(adapter_settings(model)).encode())
    return digest.digest()


def adapter_settings(model: Any) -> list[list[str]]:
    """What decides the outcome of PEFT layers beside their tensors: which are active, how scaled.

    Pure. Empty for a model without such layers.
    """
    return [
        [name, *(_setting(module, key) for key in _ADAPTER_SETTINGS)]
        for name, module in model.named_modules()
        if type(module).__module__.partition(".")[0] == "peft"
    ]


def _setting(module: Any, name: str) -> str:
    value = getattr(module, name, None)
    return "" if callable(value) else repr(value)  # a wrapper's attribute may be a model's method


def _is_of(model: Any, directory: Path) -> bool:
    """Whether a model's config and every tensor are those of the directory, cast to its dtype."""
    try:
        files = _weight_files(directory)
        if not all(path.suffix == ".safetensors" for path in files):
            return False
        loaded = type(model.config).from_pretrained(directory, local_files_only=True)
    except (BadInput, OSError, ValueError, TypeError, KeyError):
        return False
    if _normalised(loaded.to_dict()) != _normalised(model.config.to_dict()):
        return False
    return _tensors_match(model, files)


def _tensors_match(model: Any, files: list[Path]) -> bool:
    state: dict[str, torch.Tensor] = model.state_dict()
    matched = set()
    try:
        for sample in (sample for path in files for sample in _samples(path)):
            tensor = state.pop(sample.name, None)
            if tensor is None or not _matches(tensor, sample, model.dtype):
                return False
            matched.add((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()))
    except BadInput:
        return False
    # A tied tensor is saved once: what is left must be another name of one that matched.
    return all((t.data_ptr(), tuple(t.shape), t.stride()) in matched for t in state.values())


def _matches(tensor: torch.Tensor, sample: _Sample, model_dtype: torch.dtype) -> bool:
    import torch

    stored_dtype = getattr(torch, _TORCH_NAMES.get(sample.dtype, ""), None)
    if stored_dtype is None or tuple(tensor.shape) != sample.shape or tensor.is_meta:
        return False
    if tensor.dtype != (model_dtype if stored_dtype.is_floating_point else stored_dtype):
        return False
    if not sample.head:
        return True
    stored = torch.frombuffer(bytearray(sample.head), dtype=stored_dtype).to(tensor.dtype)
    return _head(tensor, stored.numel()) == _head(stored, stored.numel())


def _head(tensor: torch.Tensor, n_elements: int) -> bytes:
    """The bytes of the first elements in row-major order."""
    import torch

    flat = tensor.detach().reshape(-1)[:n_elements].cpu().contiguous()
    return flat.view(torch.uint8).numpy().tobytes()
