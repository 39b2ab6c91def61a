"""Fixtures: tiny geometries, KV that is a function of its prefix, stores in fresh directories."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import hypothesis
import numpy as np
import pytest

import impress
import impress.write.reclaim
from impress.usage.notes import Note
from tiers import hbm
from tiers.base import Extent

Found = TypeVar("Found")

MIB = 1 << 20
SERVICE = 65534  # a user who is not root
SMALL = {"segment_bytes": MIB, "write_buffer_bytes": 8 * MIB, "dram_bytes": 4 * MIB}

# Tensors here are so small that torch's threads, here and in children, spend their time waiting for
# work: awake, unless they are told not to. It reads this as it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says only how busy the machine is.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu run where there is a GPU (experiments/gpu_recipe.md)."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    for item in marked:  # what libraries warn about on a device, even in our threads, is theirs
        item.add_marker(pytest.mark.filterwarnings("default"))
    lacking = hbm.why_not() if marked else ""
    for item in marked if lacking else ():
        item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {lacking}"))


@pytest.fixture
def geometry() -> impress.Geometry:
    """Rows of 1 KiB: pieces without padding."""
    return impress.Geometry(2, 4, 2, 128, "float32")


@pytest.fixture
def padded() -> impress.Geometry:
    """Rows of 24 and 40 bytes, K and V of different widths: every piece padded."""
    return impress.Geometry(3, 2, 1, 6, "float32", v_head_dim=10)


def _mounted(where: Path, *options: str) -> Iterator[Path]:
    """A file system mounted there; the test is skipped where that cannot be."""
    where.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    command = ["mount", *options, str(where)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no such mounts here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    yield from _mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=6m", "tmpfs")


def _formatted(
    folder: Path, kind: str, n_bytes: int, package: str, *options: str
) -> Iterator[Path]:
    """A file system of that kind in a file; the test is skipped where it cannot be made."""
    if not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"there is no mkfs.{kind}: install {package}")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(n_bytes)
    subprocess.run([f"mkfs.{kind}", "-q", *options, image], check=True)
    yield from _mounted(folder / kind, "-o", "loop", str(image))


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 MiB where a copy may share blocks."""
    yield from _formatted(tmp_path, "xfs", 320 << 20, "xfsprogs")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB where a file that found no room keeps the blocks it was given."""
    yield from _formatted(tmp_path, "ext4", 32 << 20, "e2fsprogs", "-m", "0")


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., impress.PrefixStore]]:
    """open_store(geometry, **config) on one directory; all are closed at the end."""
    opened: list[impress.PrefixStore] = []

    def opener(
        geometry: impress.Geometry, mode: str = "rw", namespace: str = "test", **config: Any
    ) -> impress.PrefixStore:
        settings = impress.Config(**{**SMALL, **config})
        store = impress.PrefixStore.open(tmp_path / "store", geometry, namespace, settings, mode)
        opened.append(store)
        return store

    yield opener
    with pytest.MonkeyPatch.context() as patch:  # none waits for another that follows no more
        patch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
        for store in opened:
            store.close()


def kv_of(
    tokens: np.ndarray, geometry: impress.Geometry, start: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values of a prompt as a model would make them: each row depends on all before it."""
    mixed = np.cumsum((tokens.astype(np.int64) + 1) * 2654435761 % 1000003)[start:]
    keys, values = [], []
    for layer, plane in itertools.product(range(geometry.n_layers), (0, 1)):
        dim = geometry.v_dim if plane else geometry.head_dim
        base = np.arange(geometry.n_kv_heads * dim).reshape(geometry.n_kv_heads, 1, dim)
        angle = mixed[None, :, None] % 9973 + 31 * layer + 17 * plane
        # sin(base + angle), in a fifth of the time.
        of_base, of_angle = (
            [wave(at).astype(np.float32) for wave in (np.sin, np.cos)] for at in (base, angle)
        )
        rows = of_base[0] * of_angle[1]
        rows += of_base[1] * of_angle[0]
        (values if plane else keys).append(rows.astype(_numpy_dtype(geometry), copy=False))
    return keys, values


def _numpy_dtype(geometry: impress.Geometry) -> Any:
    return {"float16": np.float16, "float32": np.float32}[geometry.dtype]


def said_by_a_child(call: Callable[[], object], limit_s: int = 20) -> str:
    """What a call says in a forked child, which is killed if it has not ended in `limit_s`."""
    came, go = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        said = "returned"
        try:
            call()
        except BaseException as err:
            said = f"{type(err).__name__}: {err}"
        os.write(go, said.encode())
        os._exit(0)
    os.close(go)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(came, 4096).decode()
    os.close(came)
    return said if status == 0 else f"ended by {status}: {said}"


def as_the_service() -> None:
    """In a child: go on as a user whom permissions bind, also where tests run as root. What that
    user may not read (this Python, say) has to be imported before."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(SERVICE)
        os.setuid(SERVICE)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that the service can reach, too: pytest's are only for the user who runs it."""

    def reached() -> None:
        as_the_service()
        list(Path(made).iterdir())

    with TemporaryDirectory(prefix="impress-place-") as made:
        Path(made).chmod(0o755)
        if (said := said_by_a_child(reached)) != "returned":
            pytest.skip(f"another user cannot reach {made}: {said}")
        yield Path(made)


def prompt(n: int, seed: int = 0) -> np.ndarray:
    """n token ids that share no window with another seed's."""
    return np.random.default_rng(seed).integers(0, 50000, n).astype(np.int32)


def put_prompt(store: impress.PrefixStore, tokens: np.ndarray, **named: Any) -> impress.Stored:
    """Store a whole prompt's KV."""
    keys, values = kv_of(tokens, store.geometry, named.get("start", 0))
    return store.store(tokens, keys, values, **named)


def look(store: impress.PrefixStore, tokens: np.ndarray, seed: int = 0, times: int = 3) -> None:
    """Let history see requests that choose the same scattered tenth of every span's rows."""
    notes = []
    with store.lease(tokens) as lease:
        for source in lease.sources:
            n_rows = source.held.record.n_windows * store.window
            for layer in range(store.geometry.n_layers):
                rng = np.random.default_rng([seed, source.at, layer])
                rows = np.sort(rng.permutation(n_rows)[: max(1, n_rows // 10)])
                notes.append(Note(source.span, n_rows, layer, 0, n_rows, rows))
    for _ in range(times):
        store.history.request(notes)


def assert_serves(
    store: impress.PrefixStore, tokens: np.ndarray, n_tokens: int, **named: Any
) -> None:
    """A lease gives exactly n_tokens, and every byte is what was stored."""
    keys, values = kv_of(tokens, store.geometry)
    with store.lease(tokens, **named) as lease:
        assert lease.n_tokens == n_tokens, lease.miss_reason
        if not n_tokens:
            return
        with lease.session() as session:
            for layer in range(store.geometry.n_layers):
                k, v, pos = session.retrieve(layer, None)
                assert np.array_equal(k.numpy(), keys[layer][:, :n_tokens])
                assert np.array_equal(v.numpy(), values[layer][:, :n_tokens])
                assert pos.tolist() == list(range(n_tokens))


@contextmanager
def read_limit(store: impress.PrefixStore, limit_s: float) -> Iterator[None]:
    """Within the block a read counts as late after `limit_s`. A store opened with that limit could,
    under load, be late with the reads before and after the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(store.config), "read_timeout_s", limit_s)
        yield


class Told:
    """A lock that says when somebody waits for it."""

    def __init__(self, lock: Any, waited: threading.Event) -> None:
        self._lock, self._waited = lock, waited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def flip_a_bit(path: Path, extent: Extent, off: int = 0) -> None:
    """Damage one byte of a store on the disk, behind its back."""
    with (path / f"shards/main/segments/{extent.segment:08d}.seg").open("r+b") as file:
        file.seek(extent.off + off)
        byte = file.read(1)[0]
        file.seek(extent.off + off)
        file.write(bytes([byte ^ 1]))


def other_weights(model: Path) -> None:
    """Change one weight in a model's directory, in a new file: the old one may still be read."""
    file, fresh = model / "model.safetensors", model / "fresh"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1  # the lowest bit of a float16
    fresh.write_bytes(data)
    fresh.replace(file)


class _Failing(logging.Handler):
    def emit(self, _record: logging.LogRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def failing_log() -> Iterator[None]:
    """Within the block anything logged raises, as when a handler of the caller's own fails."""
    handler, log = _Failing(), logging.getLogger("impress")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def everything_in(folder: Path) -> bytes:
    """Every byte of every file below the folder."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def wait_for_promotions(store: impress.PrefixStore) -> None:
    """Wait until the work that follows requests is done."""
    assert store._pool.idle(60)


def elsewhere(call: Callable[[], Found]) -> Found:
    """What a call returns on a thread of its own: in the middle of another it would be refused."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(60)


def soon(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within a minute."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        os.sched_yield()
    return true()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small spend their time handing work to threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what was compiled before: at its limit torch would leave a forward uncompiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
