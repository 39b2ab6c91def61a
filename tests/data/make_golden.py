"""The golden store of format 1: `python tests/data/make_golden.py` writes golden_v1.tar.xz again.

Run it when the format's VERSION goes up, under a new name, and never to silence a test: a byte that
differs under the same VERSION is a store in the field that can no longer be read. (A row codec, a
probe codec or a key that must change gets a new name or number beside the old one.)
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import impress
from impress.write.directory import Identity, restore_identity

ARCHIVE = Path(__file__).parent / "golden_v1.tar.xz"
#: Rows of 32 and 64 bytes: every piece is padded, and K's pieces differ from V's.
GEOMETRY = impress.Geometry(2, 4, 2, 4, "float32", v_head_dim=8)
CONFIG = impress.Config(
    window=16, segment_bytes=1 << 20, write_buffer_bytes=1 << 20, dram_bytes=1 << 20,
    probes=("heads3-v1", "int4-v1"), io_threads=2, repack_every_s=0,
)  # fmt: skip
UUID = bytes(range(16))


@dataclass(frozen=True, slots=True)
class Put:
    """One store: `n` tokens of prompt `seed`, the first `same` of them as in prompt 1."""

    namespace: str
    seed: int
    n: int
    same: int = 0
    tenant: str = ""
    important: bool = False

    @property
    def tokens(self) -> np.ndarray:
        i = np.arange(self.n, dtype=np.int64)
        tokens = (i * 7919 + self.seed * 104729 + 1) % 50021
        tokens[: self.same] = (i[: self.same] * 7919 + 104729 + 1) % 50021
        return tokens.astype(np.int32)

    @property
    def importance(self) -> np.ndarray | None:
        """float32 [n_layers, n], no two alike in a layer."""
        if not self.important:
            return None
        i = np.arange(self.n, dtype=np.int64)
        return np.stack([(i * 31 + 7 * layer) % 997 for layer in range(2)]).astype(np.float32)


PUTS = (
    Put("golden", 1, 80),
    Put("golden", 2, 96, same=48),  # splits the first one's node
    Put("golden", 3, 64, important=True),  # packed
    Put("golden", 1, 48, tenant="alice"),
    Put("another", 1, 80, important=True),
    Put("another", 4, 40),  # two windows, and a rest that is not stored
)


def rows_of(put: Put) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values by layer: small integers, each a function of all tokens before it."""
    sums = np.cumsum(put.tokens.astype(np.int64))
    made = []
    for plane in range(2 * GEOMETRY.n_layers):
        dim = GEOMETRY.v_dim if plane % 2 else GEOMETRY.head_dim
        at = np.arange(GEOMETRY.n_kv_heads * dim).reshape(-1, 1, dim)
        rows = (sums[None, :, None] + 13 * at + 101 * plane) % 257 - 128
        made.append(rows.astype(np.float32))
    return made[::2], made[1::2]


def build(path: Path) -> None:
    """Store everything, one after the other."""
    path.mkdir(mode=0o700)
    restore_identity(path, Identity(1, UUID, GEOMETRY, CONFIG.window))
    for put in PUTS:
        with impress.PrefixStore.open(path, GEOMETRY, put.namespace, CONFIG) as store:
            stored = store.store(
                put.tokens, *rows_of(put), importance=put.importance, tenant=put.tenant, wait_s=60
            )
            assert not stored.refused, stored
            store.flush()


def unpack(to: Path) -> Path:
    """The golden store in a directory; its path."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(to, filter="tar")
    return to / "golden_v1"


def _files(path: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for file in [path, *sorted(path.rglob("*"))]:
        if file.name in ("lock", "lock.mdb"):  # of a running process
            continue
        info = tarfile.TarInfo("/".join(["golden_v1", *file.relative_to(path).parts]))
        info.mode = file.stat().st_mode & 0o777
        raw = b"" if file.is_dir() else file.read_bytes()
        info.type, info.size = (tarfile.DIRTYPE if file.is_dir() else tarfile.REGTYPE), len(raw)
        yield info, raw


def main() -> None:
    """Build it and write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "golden_v1")
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for info, raw in _files(Path(folder) / "golden_v1"):
                archive.addfile(info, io.BytesIO(raw))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
