"""Which ways of reading files there are, which of them work here, and why the others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from tiers.aio import AioQueue
from tiers.errors import MediumError
from tiers.queues import ReadQueue
from tiers.uring import UringQueue


def _kernel_says(make: Callable[[], ReadQueue]) -> str:
    try:
        make().close()
    except OSError as err:
        return f"the kernel, or who confines this process, refuses it ({err.strerror})"
    return ""


def _aiofiles() -> ReadQueue:
    from tiers.portable import AiofilesQueue

    return AiofilesQueue()


def _kvikio() -> ReadQueue:
    from tiers.cufile import KvikioQueue

    return KvikioQueue()


def _kvikio_says() -> str:
    from tiers.cufile import why_not

    return why_not()


#: Name -> how a thread gets a queue (None: each read is one preadv), and why it would get none.
_ENGINES: Final[dict[str, tuple[Callable[[], ReadQueue] | None, Callable[[], str]]]] = {
    "aio": (AioQueue, lambda: _kernel_says(AioQueue)),
    "io_uring": (UringQueue, lambda: _kernel_says(UringQueue)),
    "preadv": (None, lambda: ""),
    "kvikio": (_kvikio, _kvikio_says),
    "aiofiles": (_aiofiles, lambda: ""),
}
ENGINES: Final = tuple(_ENGINES)
#: What "auto" takes: the first that works.
_AUTO: Final = ("aio", "io_uring", "preadv")


@functools.cache
def why_not(name: str) -> str:
    """Why this process cannot use an engine, in one line; "" when it can. Asked once."""
    return _ENGINES[name][1]()


def engine_named(name: str) -> str:
    """The engine meant by a name of ENGINES or "auto". Raises MediumError if it does not work."""
    if name == "auto":
        return next(engine for engine in _AUTO if not why_not(engine))
    if name not in _ENGINES:
        raise MediumError(f"io_engine: {name!r} is none of {', '.join(('auto', *ENGINES))}")
    reason = why_not(name)
    if reason:
        raise MediumError(f"io_engine: {name} cannot be used here: {reason}")
    return name


def new_queue(name: str) -> ReadQueue | None:
    """A queue for the calling thread; None where each read is one preadv. Raises OSError."""
    make = _ENGINES[name][0]
    return None if make is None else make()
