"""Reused memory: on the way to a selection, fresh pages cost as much as arithmetic.

A free list per device, bounded; what does not fit is freed. Safe from any thread: a buffer is in
one place only, and list.append and list.pop are atomic. On CUDA there is one per stream, bounded
together: a buffer is back when the work on it has been launched, and only what its own stream does
next comes after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from impress.spans.rows import torch_module

if TYPE_CHECKING:
    import torch

#: Most bytes, and buffers, kept for one device while nobody uses them.
MOST_BYTES: Final = 32 << 20
MOST_BUFFERS: Final = 16

_free: dict[tuple[str, int], list[torch.Tensor]] = {}  # by device and stream

#: (shape, dtype) -> uninitialised tensor, valid until the `with` ends.
Take = Callable[[tuple[int, ...], Any], "torch.Tensor"]


@contextmanager
def scratch(device: torch.device) -> Iterator[Take]:
    """Tensors to work in; they go back to the free list at the end."""
    module = torch_module()
    free = _free.setdefault((str(device), _stream(device)), [])
    taken: list[torch.Tensor] = []

    def take(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        n_bytes = max(64, math.prod(shape) * dtype.itemsize)
        flat = _pop(free, n_bytes)
        if flat is None:
            with module.inference_mode(False):  # else, by torch's version, of use only in that mode
                flat = module.empty(n_bytes, dtype=module.uint8, device=device)
        taken.append(flat)
        made: torch.Tensor = flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return made

    try:
        yield take
    finally:
        for flat in taken:
            held = sum(len(other) for other in _kept(device))
            if len(free) < MOST_BUFFERS and held + len(flat) <= MOST_BYTES:
                free.append(flat)


def _stream(device: torch.device) -> int:
    """Work launched with memory of one stream runs in order."""
    if device.type != "cuda":
        return 0
    stream: int = torch_module().cuda.current_stream(device).cuda_stream
    return stream


def _kept(device: torch.device) -> list[torch.Tensor]:
    """What a device has free, whatever stream used it."""
    return [flat for (name, _), some in [*_free.items()] if name == str(device) for flat in some]


def _pop(free: list[torch.Tensor], n_bytes: int) -> torch.Tensor | None:
    """A buffer of exactly n_bytes, as sizes repeat from layer to layer; a full list loses one."""
    for _ in range(len(free)):
        try:
            flat = free.pop(0)
        except IndexError:  # another thread was faster
            return None
        if len(flat) == n_bytes:
            return flat
        free.append(flat)
    if len(free) == MOST_BUFFERS:
        del free[:1]
    return None


def drop_scratch() -> None:
    """Free what nobody uses."""
    _free.clear()
