"""What names a vLLM request's windows: its tokens, and all of vLLM's own extra keys.

vLLM hashes a block with whatever else made its KV: prompt embeddings by digest, the LoRA adapter,
the cache salt. The same go into the store's keys, block by block. A kind of key that this version
does not know may mean anything: its request neither reads nor writes the store. Nor does one with
images: they may be named by the client's own word, or a number that the next process gives again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from impress.errors import BadInput, Unsupported
from impress.weights import weights_of

log = logging.getLogger("impress")

#: vLLM's extra keys of this kind are digests. The salt becomes the tenant; an adapter is named by
#: its files, not its path, since a store outlives what lay there.
_DIGESTED = "prompt_embeds"
_MOST_LINKS = 40  # as in the kernel

#: (request, first token, end, index of the first multimodal item) -> (keys or None, next index)
KeysOf = Callable[[Any, int, int, int], tuple[Iterable[Any] | None, int]]


def vllm_keys_of() -> KeysOf:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys_of: KeysOf = generate_block_hash_extra_keys
    return keys_of


def extras_of(
    request: Any, n_tokens: int, block_size: int, keys_of: KeysOf, adapters: Adapters
) -> tuple[dict[int, bytes], str]:
    """(digests by token position, tenant) of a request's first n_tokens.

    Raises Unsupported for keys of an unknown kind, images, a salt that is not text, or an adapter
    that Adapters refuses.
    """
    # A plain prompt needs no look at each block; embeddings would be hashed once more.
    if request.prompt_embeds is None and keys_of(request, 0, n_tokens, 0)[0] is None:
        return {}, ""
    extra: dict[int, bytes] = {}
    tenant = ""
    at_item = 0
    for first in range(0, n_tokens, block_size):
        keys, at_item = keys_of(request, first, min(first + block_size, n_tokens), at_item)
        if keys is None:
            continue
        digest = blake2b(digest_size=32, person=b"impress-vllm")
        n_digested = 0
        for key in keys:
            kind = key[0] if isinstance(key, tuple) and key else None
            if kind == "cache_salt" and len(key) == 2:
                tenant = f"salt:{_text(key[1])}"
            elif kind == "lora" and len(key) == 3:
                if first == 0:  # keys are chained: once is enough
                    digest.update(b"lora" + adapters.digest(request.lora_request))
                    n_digested += 1
            elif kind == _DIGESTED and all(isinstance(part, str | bytes | int) for part in key):
                digest.update(repr((key, *_meant(request, first, first + block_size))).encode())
                n_digested += 1
            elif kind == "mm":
                raise Unsupported("images have no name that lasts: this request is not reused")
            else:
                raise Unsupported(f"vLLM's key {kind!r} is not known: this request is not reused")
        if n_digested:
            extra[first] = digest.digest()
    return extra, tenant


def _meant(request: Any, first: int, end: int) -> tuple[Any, ...]:
    """How vLLM reads a block of prompt embeddings, of which its key has only the bytes.

    Returns their dtype, and where vLLM takes tokens instead: zeros may stand for either.
    """
    mask = request.prompt_is_token_ids
    tokens = request.prompt_token_ids is not None if mask is None else list(mask[first:end])
    return str(request.prompt_embeds.dtype), tokens


def _text(salt: Any) -> str:
    try:
        if isinstance(salt, str) and salt.encode():
            return salt
    except UnicodeEncodeError:  # JSON can hold half a character
        pass
    raise Unsupported(f"cache_salt {salt!r} is no text: this request is not reused")


#: Files that changed less than this before they were read may change again within the same tick of
#: their file system's clock, which may be a second.
_SETTLED_NS: Final = 2 * 10**9
#: Of each file: name, device, inode, bytes, when it was changed (st_mtime_ns, st_ctime_ns).
_Stamp = tuple[tuple[str, int, int, int, int, int], ...]


class Adapters:
    """What the files of each adapter held when a request first named it. For one thread.

    vLLM loads an adapter once, by its number, and computes with that even if its files change. A
    server loads it before any request names it (`--lora-modules`, /v1/load_lora_adapter), of which
    no connector hears: files that changed since vLLM began may not be those it has. (Nor does one
    hear of `load_inplace`: docs/VLLM.md, Limits.) Its own prefix cache knows an adapter by name and
    path: one loaded again from there, under another number, is answered from blocks that its
    predecessor computed, which must not be stored as its own.
    """

    def __init__(self, applied: str = "", begun_ns: int | None = None) -> None:
        """applied: how the server applies every adapter (settings.Served.lora); begun_ns: when it
        began, on the system's clock."""
        self._applied = applied.encode()
        self._begun_ns = begun_ns
        # By number, and by name and path; empty: which files vLLM has of it is no longer known.
        self._first: dict[int | tuple[str, str], bytes] = {}
        self._read: dict[str, tuple[_Stamp, bytes]] = {}  # by path

    def digest(self, adapter: Any) -> bytes:
        """A digest of a vLLM LoRA request's weights and settings, as they are applied.

        Raises Unsupported if they cannot be read or are not those first seen, and from then on.
        """
        path, now = adapter.lora_path, b""
        known: tuple[int, tuple[str, str]] = (adapter.lora_int_id, (adapter.lora_name, path))
        firsts = {self._first[by] for by in known if by in self._first}
        why = f"adapter {path} has other files than when it was first used"
        if b"" not in firsts:
            try:
                if getattr(adapter, "tensorizer_config_dict", None):
                    raise Unsupported(f"adapter {path} is loaded by tensorizer, from other files")
                now = self._digest(path)
                if not firsts and self._begun_ns is not None and _changed_ns(path) > self._begun_ns:
                    raise Unsupported(
                        f"adapter {path} was saved after vLLM began, and vLLM may have loaded what "
                        "was there before"
                    )
            except Unsupported as err:
                why, now = str(err), b""
        if now and firsts <= {now}:
            self._first.update(dict.fromkeys(known, now))
            return now
        self._first.update(dict.fromkeys(known, b""))
        if b"" not in firsts:
            log.warning("%s: its requests are not reused until vLLM is started again", why)
        raise Unsupported(why)

    def _digest(self, path: str) -> bytes:
        """Of an adapter's files, read where they changed: the scheduler, and with it every request,
        waits for it, several times a request. Raises Unsupported."""
        stamp = _stamp_of(path)
        known, digest = self._read.get(path, ((), b""))
        if stamp != known:
            digest, read_ns = _adapter(path, self._applied), time.time_ns()
            if _stamp_of(path) == stamp and max(look[-1] for look in stamp) < read_ns - _SETTLED_NS:
                self._read[path] = stamp, digest
        return digest


def _stamp_of(path: str) -> _Stamp:
    """What changes with an adapter's files. Raises Unsupported."""
    try:
        folder = Path(path).expanduser()
        files = [folder / "adapter_config.json", *sorted(folder.glob("adapter_model.*"))]
        looks = [(file.name, file.stat()) for file in files]
    except (OSError, RuntimeError) as err:
        raise Unsupported(f"adapter {path} cannot be read: {err}") from None
    return tuple(
        (name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        for name, at in looks
    )


def _changed_ns(path: str) -> int:
    """When an adapter's files, its folder or a link on the way to one of them were last changed, or
    put in place of another. (Not a folder above it that was renamed.) Raises Unsupported."""
    folder = Path(path).expanduser().absolute()
    try:
        files = [folder, folder / "adapter_config.json", *folder.glob("adapter_model.*")]
        looks = [file.stat() for file in files]
        for place in [*files, *folder.parents]:
            link, n = place, 0
            while link.is_symlink() and (n := n + 1) < _MOST_LINKS:
                looks.append(link.lstat())
                link = link.parent / link.readlink()
        return max(look.st_ctime_ns for look in looks)
    except OSError as err:
        raise Unsupported(f"adapter {path} cannot be read: {err}") from None


def _adapter(path: str, applied: bytes) -> bytes:
    """A digest of an adapter's weights and settings, and how it is applied. Raises Unsupported."""
    try:
        folder = Path(path).expanduser()  # as vLLM does
        settings = (folder / "adapter_config.json").read_bytes()
        files = sorted(folder.glob("adapter_model.*"))  # which one it loads is up to vLLM
        if not files:
            raise BadInput("it holds no adapter_model file")
        return blake2b(applied + settings + weights_of(folder, files), digest_size=32).digest()
    except (OSError, RuntimeError, BadInput) as err:  # RuntimeError: no such user's home
        raise Unsupported(f"adapter {path} cannot be read: {err}") from None
