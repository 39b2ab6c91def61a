"""The systems `experiments.peers` compares, each behind the same few calls, in its own environment.

    fill     rows lie where the system takes them from (its pool in memory)        not timed
    store    on return the system says that they are stored                        timed
    settled  whatever must happen before they can be read from the medium; a pool
             that a restore ends in is cleared of what was stored                  not timed
    restore  on return they lie in memory, where an engine would take them from    timed

All end in memory of their own: no time includes the copy from there to an engine's KV cache.
Peers begin there, too; impress begins with an engine's tensors, packing and checksums included,
which is in the peers' favour. "impress outs" ends in an engine's tensors.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.peers_mooncake import Mooncake
from experiments.peers_worker import Pooled, Shape, System

Rows = npt.NDArray[np.uint8]

MIB = 1 << 20
_POLL_S = 0.0005


class Impress(System):
    """This store without its DRAM tier: a lease, a session, all layers of all rows."""

    dram_bytes = 0

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        import torch

        import impress

        torch.set_num_threads(1)
        self.version = version("impress-kv")
        self._torch = torch
        geometry = impress.Geometry(
            shape.n_layers, shape.n_kv_heads, shape.n_kv_heads, shape.head_dim, "bfloat16"
        )
        config = impress.Config(
            dram_bytes=self.dram_bytes, segment_bytes=256 * MIB, repack_every_s=0,
            write_buffer_bytes=256 * MIB,
        )  # fmt: skip
        self._store = impress.PrefixStore.open(folder, geometry, "peers", config)
        self._planes: Any = None
        self._got: Any = []
        self._reading = ExitStack()  # until the rows read have been compared

    def _tensors(self, rows: Rows) -> Any:
        s = self.shape
        flat = self._torch.from_numpy(rows).view(self._torch.bfloat16)
        return flat.view(s.n_layers, 2, s.n_tokens, s.n_kv_heads, s.head_dim).transpose(2, 3)

    def _tokens(self, prefix: int) -> npt.NDArray[np.int32]:
        return np.arange(self.shape.n_tokens, dtype=np.int32) + prefix * self.shape.n_tokens

    def fill(self, prefix: int, rows: Rows) -> None:
        self._planes = self._tensors(rows)

    def store(self, prefix: int) -> None:
        planes = self._planes
        stored = self._store.store(
            self._tokens(prefix), list(planes[:, 0]), list(planes[:, 1]), wait_s=60
        )
        self._store.flush()
        assert stored.ready, f"not stored: {stored}"

    def restore(self, prefix: int) -> None:
        self._got = self._read(prefix)

    def _read(self, prefix: int, outs: Any = None) -> Any:
        lease = self._reading.enter_context(self._store.lease(self._tokens(prefix)))
        assert lease.n_tokens == self.shape.n_tokens, "it is not stored"
        session = self._reading.enter_context(lease.session())
        session.prefetch(outs)
        return [session.retrieve(layer, None) for layer in range(self.shape.n_layers)]

    def same(self, prefix: int, rows: Rows) -> bool:
        want = self._tensors(rows)
        got, self._got = self._got, []
        same = all(
            self._torch.equal(k, want[i, 0]) and self._torch.equal(v, want[i, 1])
            for i, (k, v, _) in enumerate(got)
        )
        self._reading.close()
        return same

    def close(self) -> None:
        self._store.close()


class ImpressOuts(Impress):
    """The same, read into an engine's tensors; lease and session close once they are filled."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        s = shape
        page = mmap.PAGESIZE
        room = self._torch.empty(s.n_bytes + page, dtype=self._torch.uint8)
        room = room[-room.data_ptr() % page :][: s.n_bytes]
        room.zero_()  # its pages are there before the clock runs
        rows = room.view(self._torch.bfloat16)
        rows = rows.view(s.n_layers, 2, s.n_tokens, s.n_kv_heads, s.head_dim).transpose(2, 3)
        self._outs = [(rows[i, 0], rows[i, 1]) for i in range(s.n_layers)]

    def restore(self, prefix: int) -> None:
        self._got = self._read(prefix, self._outs)
        self._reading.close()


class ImpressDram(Impress):
    """The same with a DRAM tier: what a cold read brought is copied up after it, and read there."""

    dram_bytes = 1024 * MIB


class LMCache(System):
    """LMCache's LocalDiskBackend under its StorageManager, without its CPU tier."""

    direct = False

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self.version = version("lmcache")
        kind, s = torch.bfloat16, shape
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=s.chunk_tokens, local_cpu=False, local_disk=str(folder),
            max_local_cpu_size=2.5 * s.n_bytes / 2**30, max_local_disk_size=64.0,
            extra_config={"use_odirect": self.direct},
        )  # fmt: skip
        metadata = LMCacheMetadata(
            model_name="peers", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=kind, kv_shape=(s.n_layers, 2, s.chunk_tokens, s.n_kv_heads, s.head_dim),
            chunk_size=s.chunk_tokens,
        )  # fmt: skip
        self._manager = StorageManager(config, metadata, EventManager())
        self._disk = self._manager.storage_backends["LocalDiskBackend"]
        self._key: Callable[[int], Any] = lambda n: CacheEngineKey("peers", 1, 0, n, kind)
        self._kind = kind
        self._size = torch.Size([2, s.n_layers, s.chunk_tokens, s.n_kv_heads * s.head_dim])
        self._filled: list[Any] = []
        self._got: list[Any] = []

    def _keys(self, prefix: int) -> list[Any]:
        n = self.shape.n_chunks
        return [self._key(prefix * n + i) for i in range(n)]

    def fill(self, prefix: int, rows: Rows) -> None:
        self._filled = [self._manager.allocate(self._size, self._kind) for _ in rows]
        for made, row in zip(self._filled, rows, strict=True):
            np.frombuffer(made.byte_array, dtype=np.uint8)[:] = row

    def store(self, prefix: int) -> None:
        keys = self._keys(prefix)
        self._manager.batched_put(keys, self._filled)
        while any(self._disk.exists_in_put_tasks(key) for key in keys):
            time.sleep(_POLL_S)

    def restore(self, prefix: int) -> None:
        self._got = self._manager.batched_get(self._keys(prefix), location="LocalDiskBackend")

    def same(self, prefix: int, rows: Rows) -> bool:
        got, self._got = self._got, []
        same = all(
            item is not None and np.array_equal(np.frombuffer(item.byte_array, np.uint8), row)
            for item, row in zip(got, rows, strict=True)
        )
        for item in got:
            if item is not None:
                item.ref_count_down()
        return same


class LMCacheDirect(LMCache):
    """The same with O_DIRECT, which is off by default."""

    direct = True


class VllmFiles(Pooled):
    """vLLM's file tier of its KV offloading, one job per request, as its manager submits them."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
        from vllm.version import __version__

        self.version = __version__
        memory = mmap.mmap(-1, shape.n_bytes)
        self.pool = np.frombuffer(memory, dtype=np.uint8).reshape(-1, shape.chunk_bytes)
        self._key = make_offload_key
        self._job = TransferJob
        self._n_jobs = 0
        # What the tier reads of vLLM's configuration, to make folder names from it.
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=shape.chunk_tokens, layer_names=["all"])],
            model=SimpleNamespace(name="peers", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=shape.chunk_tokens),
            parallel=SimpleNamespace(
                tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
            ),
            canonical_layout=False,
            replicated_layout=False,
        )
        events = SimpleNamespace(enable_kv_cache_events=False)
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)
        self._tier = FileSystemTierManager(spec, memoryview(self.pool), "fs", str(folder))

    def _run(self, prefix: int, *, load: bool) -> None:
        n = self.shape.n_chunks
        keys = [self._key((prefix * n + i).to_bytes(32, "big"), 0) for i in range(n)]
        self._n_jobs += 1
        places = np.arange(n, dtype=np.int32)
        asking = SimpleNamespace(req_id=str(prefix))
        job = self._job(self._n_jobs, keys, places, load, asking)
        (self._tier.submit_load if load else self._tier.submit_store)(job)
        while not (done := list(self._tier.get_finished_jobs())):
            time.sleep(_POLL_S)
        assert done[0].success, "the job failed"

    def store(self, prefix: int) -> None:
        self._run(prefix, load=False)

    def restore(self, prefix: int) -> None:
        self._run(prefix, load=True)


class HiCacheFile(Pooled):
    """SGLang's file backend of HiCache, one page per chunk."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile as Backend
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        self.version = version("sglang")
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="peers", extra_config={"file_storage_path": str(folder)},
        )  # fmt: skip
        self._backend = Backend(config)
        self._pages = torch.zeros(shape.n_chunks, shape.chunk_bytes, dtype=torch.uint8)
        self.pool = self._pages.numpy()

    def _keys(self, prefix: int) -> list[str]:
        return [f"{prefix}-{i}" for i in range(self.shape.n_chunks)]

    def store(self, prefix: int) -> None:
        assert self._backend.batch_set(self._keys(prefix), list(self._pages)), "it was not stored"

    def restore(self, prefix: int) -> None:
        got = self._backend.batch_get(self._keys(prefix), list(self._pages))
        assert all(page is not None for page in got), "it is not stored"


SYSTEMS = {
    "impress": Impress,
    "impress outs": ImpressOuts,
    "impress dram": ImpressDram,
    "lmcache": LMCache,
    "lmcache direct": LMCacheDirect,
    "vllm files": VllmFiles,
    "sglang": HiCacheFile,
    "mooncake": Mooncake,
}
