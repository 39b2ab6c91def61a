"""io_uring through ctypes: one ring per thread, plain reads, no polling thread.

    submission ring: indices of requests    front (kernel) ··· tail (ours)
    completion ring: index, bytes or -errno  front (ours)  ··· tail (kernel)

Memory order. The kernel looks at the submission ring only inside io_uring_enter, called by this
very thread, so program order is enough there. Completions may be posted from another CPU: their
tail is read after io_uring_enter has returned and after a lock's acquire, which is a full barrier
on every machine Python runs on; their entries are read only after that, and our front is moved
after a release.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from typing import Final

import numpy as np

from tiers.queues import DEPTH, KernelQueue

_SETUP, _ENTER = 425, 426  # the same on every architecture
_SQ_RING, _CQ_RING, _SQES = 0, 0x8000000, 0x10000000
_SINGLE_MMAP: Final = 1
_SUBMIT_STABLE: Final = 4  # what a request points to is ours again once it is sent
_GETEVENTS: Final = 1
_READV: Final = 1
_long, _pointer = ctypes.c_long, ctypes.c_void_p


class UringQueue(KernelQueue):
    """One thread's ring. Raises OSError where the kernel, or whatever confines us, gives none."""

    name = "io_uring"

    def __init__(self) -> None:
        super().__init__()
        self._fd = -1
        if platform.system() != "Linux":
            raise OSError(errno.ENOSYS, "no io_uring here")
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._barrier = threading.Lock()
        # struct io_uring_params: 10 words, then offsets into the submission and completion rings
        params = np.zeros(30, dtype=np.uint32)
        self._fd = self._call(_SETUP, _long(DEPTH), _pointer(params.ctypes.data))
        self._map(params)

    def _map(self, params: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> None:
        n_sq, n_cq, features = int(params[0]), int(params[1]), int(params[5])
        if not features & _SUBMIT_STABLE:
            raise OSError(errno.ENOSYS, "io_uring of before Linux 5.5")
        sq = dict(zip(("front", "tail", "mask", "entries", "flags", "dropped", "array"),
                      params[10:17].tolist(), strict=True))  # fmt: skip
        cq = dict(zip(("front", "tail", "mask", "entries", "overflow", "cqes"),
                      params[20:26].tolist(), strict=True))  # fmt: skip
        sq_bytes, cq_bytes = sq["array"] + 4 * n_sq, cq["cqes"] + 16 * n_cq
        if features & _SINGLE_MMAP:
            sq_map = cq_map = self._mmap(_SQ_RING, max(sq_bytes, cq_bytes))
        else:
            sq_map, cq_map = self._mmap(_SQ_RING, sq_bytes), self._mmap(_CQ_RING, cq_bytes)
        # struct io_uring_sqe: opcode, fd | offset | iovecs | number of iovecs | index | – | – | –
        self._requests = np.frombuffer(self._mmap(_SQES, 64 * n_sq), dtype=np.int64).reshape(-1, 8)
        self._sq_front = np.frombuffer(sq_map, np.uint32, 1, sq["front"])
        self._sq_tail = np.frombuffer(sq_map, np.uint32, 1, sq["tail"])
        self._sq_array = np.frombuffer(sq_map, np.uint32, n_sq, sq["array"])
        self._sq_mask = n_sq - 1
        self._cq_front = np.frombuffer(cq_map, np.uint32, 1, cq["front"])
        self._cq_tail = np.frombuffer(cq_map, np.uint32, 1, cq["tail"])
        # struct io_uring_cqe: index | bytes or -errno, flags
        self._cq_index = np.frombuffer(cq_map, np.uint64, 2 * n_cq, cq["cqes"])[::2]
        self._cq_result = np.frombuffer(cq_map, np.int32, 4 * n_cq, cq["cqes"])[2::4]
        self._cq_mask = n_cq - 1

    def _mmap(self, off: int, n_bytes: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(self._fd, n_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=off)

    def _write(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        self._requests[: len(rows)] = [
            (_READV | fd << 32, off, at, n, i, 0, 0, 0) for i, fd, at, n, off in rows
        ]

    def _submit(self, n: int) -> int:
        """All n, or as many as the kernel takes."""
        # From where the kernel has read to, not after our tail: what it left of an earlier batch
        # must not go with this one. (There may have been no memory to take that back.)
        front = int(self._sq_front[0])
        places = (front + np.arange(n)) & self._sq_mask
        self._sq_array[places] = np.arange(n, dtype=np.uint32)
        self._sq_tail[0] = (front + n) & 0xFFFFFFFF
        sent = 0
        while sent < n:
            try:
                more = self._enter(n - sent, 0)
            except InterruptedError:
                continue
            except OSError:
                break
            if not more:
                break
            self._under_way += more
            sent += more
        return sent

    def _wait(self, least: int, most: int) -> list[tuple[int, int]]:
        found = self._take(most)
        while len(found) < least:
            try:
                self._enter(0, least - len(found))
            except OSError as err:
                if err.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
            found += self._take(most - len(found))
        return found

    def _take(self, most: int) -> list[tuple[int, int]]:
        """Completions that are there, at most `most`."""
        with self._barrier:
            tail = int(self._cq_tail[0])
        front = int(self._cq_front[0])
        n = min((tail - front) & 0xFFFFFFFF, most)
        if not n:
            return []
        with self._barrier:
            places = (front + np.arange(n)) & self._cq_mask
            index, result = self._cq_index[places].tolist(), self._cq_result[places].tolist()
        with self._barrier:
            self._cq_front[0] = (front + n) & 0xFFFFFFFF
        self._under_way -= n
        return list(zip(index, result, strict=True))

    def _enter(self, n_submit: int, n_wait: int) -> int:
        flags = _GETEVENTS if n_wait else 0
        return self._call(
            _ENTER, _long(self._fd), _long(n_submit), _long(n_wait), _long(flags), None, _long(0)
        )

    def _call(self, number: int, *arguments: object) -> int:
        result = int(self._syscall(_long(number), *arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), "io_uring")
        return result

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
