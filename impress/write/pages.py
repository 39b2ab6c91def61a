"""LMDB's file looked at without LMDB, which answers some damage by ending the process.

meta pages ─roots→ the tree of free pages, the tree of databases → each database's tree

All pages of these trees are looked at, a level at a time: what they are, where their nodes lie,
where they lead, and that no page is in two places or free at the same time. What is in keys and
values is not: it is checked where it is used. (LMDB's data format 1: all of its versions 0.9.)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Pages looked at together.
_BLOCK: Final = 2048
#: Bytes of a file that are read at a time.
_IN_ORDER: Final = 4 << 20
#: Looks at a file in which pages may be used again meanwhile.
_LOOKS: Final = 3
_MAGIC: Final = 0xBEEFC0DE
_FORMAT: Final = 1
#: Bytes of a page, in a file that LMDB makes.
_PAGE_BYTES: Final = [512 << i for i in range(8)]
_NO_PAGE: Final = (1 << 64) - 1
#: Kinds of pages, and of nodes in leaves: a value on pages of its own, a database.
_BRANCH, _LEAF, _LARGE = 1, 2, 4
_ELSEWHERE, _DATABASE = 1, 2
#: Bytes before the pointers of a page, and before the key of a node.
_PAGE_HEAD, _NODE_HEAD = 16, 8
#: Flags of a tree: those that say how its keys and values lie, and of these what free pages have.
_HOW, _BY_NUMBER = 0x7E, 8
_TREE: Final = np.dtype(
    [("pad", "<u4"), ("flags", "<u2"), ("depth", "<u2"), ("n_branches", "<u8"),
     ("n_leaves", "<u8"), ("n_large", "<u8"), ("n_entries", "<u8"), ("root", "<u8")]
)  # fmt: skip
_META: Final = np.dtype(
    [("head", "V16"), ("magic", "<u4"), ("format", "<u4"), ("address", "<u8"),
     ("map_bytes", "<u8"), ("free", _TREE), ("main", _TREE), ("last_page", "<u8"), ("txn", "<u8")]
)  # fmt: skip
_HEAD: Final = np.dtype(
    [("page", "<u8"), ("pad", "<u2"), ("kind", "<u2"), ("lower", "<u2"), ("upper", "<u2")]
)
#: Errors of a process that lacks something: they say nothing about the file.
_LACKING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_Ints = npt.NDArray[np.int64]
_Raw = npt.NDArray[np.uint8]


class _Nodes(NamedTuple):
    """Of some pages' nodes, in the order of their keys: bytes of those pages; where each begins,
    where what follows its key does; four fields."""

    raw: _Raw
    at: _Ints
    data: _Ints
    head: npt.NDArray[np.uint16]


class _Damage(Exception):
    pass


def unopenable(data: Path, map_bytes: int) -> str:
    """What of a file ends the process that has LMDB open it in so many bytes of addresses, or what
    it says something else of; "": nothing. What is no file of LMDB's is its own matter."""
    with suppress(OSError), data.open("rb") as file:
        metas = file.read(_META.itemsize)
        if len(metas) < _META.itemsize or (first := _meta(metas, 0))["magic"] != _MAGIC:
            return ""
        page_bytes = int(first["free"]["pad"])
        if page_bytes not in _PAGE_BYTES:
            return f"pages of {page_bytes} bytes"
        file.seek(page_bytes)
        metas += file.read(_META.itemsize)
        for meta in (
            _meta(metas, at) for at in range(0, len(metas) - _META.itemsize + 1, _META.itemsize)
        ):
            if meta["magic"] == _MAGIC and meta["format"] != first["format"]:
                return f"of formats {first['format']} and {meta['format']}"
            if int(meta["last_page"]) >= map_bytes // page_bytes:
                return f"{meta['last_page']} pages"
    return ""


def damage_of(env: Any, data: Path, *, pinned: bool = True) -> str:
    """What is wrong with the file of an environment; "": nothing. Others may write to it meanwhile.

    `pinned`: LMDB's table of readers tells them of a transaction here, so that no page of the
    newest trees is used again before it ends. Raises LMDB's errors, OSError.
    """
    page_bytes, said, before = env.stat()["psize"], "", b""
    fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        all_there = _read_in_order(fd)
        with env.begin():
            for _ in range(1 if pinned else _LOOKS):
                metas = b""
                while metas != (metas := os.pread(fd, 2 * page_bytes, 0)):  # while one is written
                    pass
                said = _damage(fd, metas, page_bytes, all_there)
                if not said or metas == before:  # else somebody wrote there meanwhile
                    break
                before = metas
            return said
    finally:
        os.close(fd)


def _read_in_order(fd: int) -> bool:
    """So that all of it is in memory, for LMDB, too: an open of 157 MiB of which nothing was took
    0.4 s, and 2.2 to 3.5 page by page. False where some cannot be read: a free page, maybe."""
    some = bytearray(_IN_ORDER)
    with suppress(OSError):
        while os.readv(fd, [some]):
            pass
        return True
    return False


def _damage(fd: int, metas: bytes, page_bytes: int, all_there: bool) -> str:
    if len(metas) < 2 * page_bytes:
        return f"cut short: {len(metas)} of {2 * page_bytes} bytes and more"
    meta = max((_meta(metas, at) for at in (0, page_bytes)), key=lambda meta: int(meta["txn"]))
    if meta["magic"] != _MAGIC or meta["format"] != _FORMAT:
        return ""  # LMDB has opened it: one that came after this was written
    n_bytes = os.fstat(fd).st_size
    try:
        _Walk(fd, page_bytes, meta, n_bytes, all_there).run()
    except OSError as err:
        if err.errno in _LACKING:
            raise
        return f"not to be read: {err.strerror}"
    except _Damage as err:
        want = (int(meta["last_page"]) + 1) * page_bytes
        # LMDB never writes a page that was taken and given back by one transaction: at the end of
        # the file it is counted, free, and not there.
        return f"cut short: {n_bytes} of {want} bytes" if n_bytes < want else f"damaged: {err}"
    return ""


def _meta(raw: bytes, at: int) -> Any:
    return np.frombuffer(raw, _META, 1, at)[0]


class _Walk:
    """One look at all trees of a state of the file. Raises _Damage."""

    def __init__(
        self, fd: int, page_bytes: int, meta: Any, n_bytes: int, all_there: bool
    ) -> None:  # fmt: skip
        """`all_there`: all of the file can be read, the insides of large values, too."""
        self._fd, self._page_bytes, self._meta = fd, page_bytes, meta
        self._all_there = all_there
        self._n_there = n_bytes // page_bytes
        n_pages = int(meta["last_page"]) + 1
        if not 2 <= n_pages <= int(meta["map_bytes"]) // page_bytes:
            raise _Damage(f"{n_pages} pages")
        self._taken = np.zeros(n_pages, bool)
        self._taken[:2] = True

    def run(self) -> None:
        free, main = self._meta["free"], self._meta["main"]
        if free["flags"] & _HOW != _BY_NUMBER or main["flags"]:
            raise _Damage("trees of another kind")
        records, databases = list[bytes](), list[bytes]()
        for nodes in self._leaves(free):
            records += self._values(nodes)
        for nodes in self._leaves(main):
            if (nodes.head[:, 2] != _DATABASE).any():
                raise _Damage("a database that is none")
            databases += self._values(nodes)
        for raw in databases:
            if len(raw) != _TREE.itemsize:
                raise _Damage(f"a database of {len(raw)} bytes")
            tree = np.frombuffer(raw, _TREE)[0]
            if tree["flags"]:
                raise _Damage(f"a database of kind {tree['flags']}")
            for nodes in self._leaves(tree):
                self._elsewhere(nodes)
        for raw in records:
            self._free(np.frombuffer(raw[: len(raw) // 8 * 8], "<u8"))

    def _leaves(self, tree: Any) -> Iterator[_Nodes]:
        """The nodes in a tree's leaves."""
        pages, n_entries = np.array([tree["root"]], np.uint64), 0
        if tree["root"] == _NO_PAGE:
            pages = pages[:0]
        for level in range(int(tree["depth"])):
            is_leaf, below = level == int(tree["depth"]) - 1, list[npt.NDArray[np.uint64]]()
            self._take(pages)
            for first in range(0, len(pages), _BLOCK):
                nodes = self._nodes(pages[first : first + _BLOCK], _LEAF if is_leaf else _BRANCH)
                if is_leaf:
                    n_entries += len(nodes.at)
                    yield nodes
                else:
                    low, high, top = nodes.head[:, :3].astype(np.uint64).T
                    below.append(low | high << np.uint64(16) | top << np.uint64(32))
            pages = np.concatenate(below) if below else pages[:0]
        if n_entries != tree["n_entries"]:
            raise _Damage(f"{n_entries} of {tree['n_entries']} entries")

    def _take(self, pages: npt.NDArray[np.uint64], *, free: bool = False) -> None:
        """Every page has one use."""
        limit = len(self._taken) if free else min(len(self._taken), self._n_there)
        if len(pages) and (pages.min() < 2 or pages.max() >= limit):
            raise _Damage("a page that is not there")
        at = pages.astype(np.int64)
        if self._taken[at].any() or len(np.unique(at)) < len(at):
            raise _Damage("a page in two places")
        self._taken[at] = True

    def _read(self, pages: npt.NDArray[np.uint64], n_bytes: int) -> _Raw:
        """The beginnings of pages, a row each."""
        raw = np.zeros((len(pages), n_bytes), np.uint8)
        for row, page in zip(raw, pages.tolist(), strict=True):
            os.preadv(self._fd, [row], page * self._page_bytes)
        return raw

    def _nodes(self, pages: npt.NDArray[np.uint64], kind: int) -> _Nodes:
        """The nodes of pages that are to be of a kind: they fill what a page says is full."""
        size, raw = self._page_bytes, self._read(pages, self._page_bytes)
        heads = raw[:, :_PAGE_HEAD].copy().view(_HEAD).ravel()
        lower, upper = heads["lower"].astype(np.int64), heads["upper"].astype(np.int64)
        n_nodes = (lower - _PAGE_HEAD) // 2
        good = (
            (heads["page"] == pages) & (heads["kind"] == kind) & (n_nodes >= 1) & (lower % 2 == 0)
        )
        good &= (lower <= upper) & (upper % 2 == 0) & (upper <= size)
        if not good.all():
            raise _Damage(f"page {pages[~good][0]}")
        flat, words = raw.reshape(-1), raw.view("<u2")
        is_pointer = np.arange(words.shape[1]) - _PAGE_HEAD // 2 < n_nodes[:, None]
        is_pointer[:, : _PAGE_HEAD // 2] = False
        offs = words[is_pointer].astype(np.int64)
        of_page = np.repeat(np.arange(len(pages)), n_nodes)
        good = (offs % 2 == 0) & (offs >= upper[of_page]) & (offs <= size - _NODE_HEAD)
        if not good.all():
            raise _Damage(f"page {pages[of_page[~good][0]]}")
        at = of_page * size + offs
        head = words.reshape(-1)[(at // 2)[:, None] + np.arange(4)]
        data = at + _NODE_HEAD + head[:, 3]
        end = data.copy()
        if kind == _LEAF:
            n_bytes = head[:, 0] | head[:, 1].astype(np.int64) << 16
            end += np.where(head[:, 2] & _ELSEWHERE, 8, n_bytes)
        order = np.argsort(at)
        begins, ends = at[order], (end + (end & 1))[order]
        last = np.cumsum(n_nodes) - 1
        follows = np.append(begins[1:], 0)
        follows[last] = (np.arange(len(pages)) + 1) * size
        good = ends == follows
        good[last - n_nodes + 1] &= (
            begins[last - n_nodes + 1] == np.arange(len(pages)) * size + upper
        )
        if not good.all():
            raise _Damage(f"page {pages[of_page[order][~good][0]]}")
        return _Nodes(flat, at, data, head)

    def _elsewhere(self, nodes: _Nodes) -> dict[int, int]:
        """Of nodes whose values are on pages of their own: which -> the first page."""
        kinds = nodes.head[:, 2]
        if (kinds & ~np.uint16(_ELSEWHERE | _DATABASE)).any():
            raise _Damage(f"a node of kind {kinds.max()}")
        which = np.flatnonzero(kinds & _ELSEWHERE)
        if not len(which):
            return {}
        first = nodes.raw[nodes.data[which][:, None] + np.arange(8)].view("<u8").ravel()
        if first.max() >= self._n_there:
            raise _Damage("a page that is not there")
        heads = self._read(first, _PAGE_HEAD).view(_HEAD).ravel()
        n_pages = heads["lower"].astype(np.int64) | heads["upper"].astype(np.int64) << 16
        n_bytes = nodes.head[which, 0] | nodes.head[which, 1].astype(np.int64) << 16
        needed = (_PAGE_HEAD - 1 + n_bytes) // self._page_bytes + 1
        good = (heads["page"] == first) & (heads["kind"] == _LARGE) & (n_pages >= needed)
        good &= first.astype(np.int64) + n_pages <= self._n_there
        if not good.all():
            raise _Damage(f"page {first[~good][0]}")
        begin = np.repeat(first, n_pages)
        along = np.arange(len(begin)) - np.repeat(np.cumsum(n_pages) - n_pages, n_pages)
        pages = begin + along.astype(np.uint64)
        self._take(pages)
        if not self._all_there:
            for at in range(0, len(pages), _BLOCK):
                self._read(pages[at : at + _BLOCK], self._page_bytes)
        return dict(zip(which.tolist(), first.tolist(), strict=True))

    def _values(self, nodes: _Nodes) -> Iterator[bytes]:
        """Values, where there are few."""
        elsewhere = self._elsewhere(nodes)
        for i, (low, high) in enumerate(nodes.head[:, :2].tolist()):
            n_bytes, at = low | high << 16, int(nodes.data[i])
            if i in elsewhere:
                start = elsewhere[i] * self._page_bytes + _PAGE_HEAD
                yield os.pread(self._fd, n_bytes, start)
            else:
                yield nodes.raw[at : at + n_bytes].tobytes()

    def _free(self, record: npt.NDArray[np.uint64]) -> None:
        """A record of free pages: how many, and which, the highest first."""
        if not len(record) or record[0] >= len(record):
            raise _Damage("free pages that are not there")
        pages = record[1 : int(record[0]) + 1]
        if (pages[1:] >= pages[:-1]).any():
            raise _Damage("free pages out of order")
        self._take(pages, free=True)
