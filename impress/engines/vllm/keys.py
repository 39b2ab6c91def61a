"""What names a vLLM request's windows: its tokens, and vLLM's own extra keys whole.

vLLM hashes a block with whatever else made its KV: prompt embeddings by digest, the LoRA adapter,
the cache salt. The same go into the store's keys, block by block. A kind that this version does
not know may mean anything: such a request neither reads nor writes the store. Nor does one with
images: what names them may be the client's own word, or a number that the next process gives again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from impress.errors import BadInput, Unsupported
from impress.weights import weights_of

#: vLLM's kind of extra keys that are digests. The salt becomes the tenant; of an adapter the files
#: count, not the path, since a store outlives what lay there.
_DIGESTED = "prompt_embeds"

#: (request, first token, end, index of the first multimodal item) -> (keys or None, next index)
KeysOf = Callable[[Any, int, int, int], tuple[Iterable[Any] | None, int]]


def vllm_keys_of() -> KeysOf:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys_of: KeysOf = generate_block_hash_extra_keys
    return keys_of


def extras_of(
    request: Any, n_tokens: int, block_size: int, keys_of: KeysOf
) -> tuple[dict[int, bytes], str]:
    """(digests by token position, tenant) of a request's first n_tokens.

    Raises Unsupported for keys of an unknown kind or an adapter that cannot be read.
    """
    extra: dict[int, bytes] = {}
    tenant = ""
    at_item = 0
    for first in range(0, n_tokens, block_size):
        keys, at_item = keys_of(request, first, min(first + block_size, n_tokens), at_item)
        digest = blake2b(digest_size=32, person=b"impress-vllm")
        n_digested = 0
        for key in keys or ():
            kind = key[0] if isinstance(key, tuple) and key else None
            if kind == "cache_salt" and len(key) == 2:
                tenant = f"salt:{key[1]}"
            elif kind == "lora" and len(key) == 3:
                if first == 0:  # keys are chained: once is enough
                    digest.update(b"lora" + _adapter(key[2]))
                    n_digested += 1
            elif kind == _DIGESTED and all(isinstance(part, str | bytes | int) for part in key):
                digest.update(repr(key).encode())
                n_digested += 1
            elif kind == "mm":
                raise Unsupported("images have no name that lasts: this request is not reused")
            else:
                raise Unsupported(f"vLLM's key {kind!r} is not known: this request is not reused")
        if n_digested:
            extra[first] = digest.digest()
    return extra, tenant


def _adapter(path: str) -> bytes:
    """A digest of an adapter's weights and settings. Raises Unsupported."""
    folder = Path(path)
    try:
        settings = (folder / "adapter_config.json").read_bytes()
        return blake2b(settings + weights_of(folder), digest_size=32).digest()
    except (OSError, BadInput) as err:
        raise Unsupported(f"adapter {path} cannot be read: {err}") from None
