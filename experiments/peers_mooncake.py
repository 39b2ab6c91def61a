"""Mooncake's SSD tier for `experiments.peers`: a master, and a client that is storage as well."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from experiments.peers_worker import Pooled, Shape

MIB = 1 << 20
_STARTED_S = 30.0
_OFFLOADED_S = 120.0


class Mooncake(Pooled):
    """Mooncake's store over TCP on loopback; its copies in memory are cleared, so that the SSD
    tier is read. A store ends when that tier has the rows: once a second, in the background."""

    _LEASE_S = 5.0

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        os.environ["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"] = "1"
        # A file is written once this much waits for it: a prefix.
        os.environ["MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"] = str(shape.n_bytes)
        self.version = version("mooncake-transfer-engine-non-cuda")
        rpc, meta, metrics = (_free_port() for _ in range(3))
        self._master = subprocess.Popen(
            [str(Path(sys.executable).with_name("mooncake_master")), "--rpc_port", str(rpc),
             "--metrics_port", str(metrics), "--enable_offload=true",
             "--enable_http_metadata_server=true", "--http_metadata_server_host", "127.0.0.1",
             "--http_metadata_server_port", str(meta),
             "--default_kv_lease_ttl", f"{1000 * self._LEASE_S:.0f}"],
            stdout=2,
        )  # fmt: skip
        self.children = [self._master.pid]
        try:
            self._begin(folder, shape, meta, rpc)
        except BaseException:  # nobody else knows it
            self._master.terminate()
            raise

    def _begin(self, folder: Path, shape: Shape, meta: int, rpc: int) -> None:
        """Connect to the master once its metadata server answers."""
        from mooncake.store import MooncakeDistributedStore

        _answers(meta)
        self._client = MooncakeDistributedStore()
        status = self._client.setup(
            {"local_hostname": "127.0.0.1", "metadata_server": f"http://127.0.0.1:{meta}/metadata",
             "global_segment_size": str(3 * shape.n_bytes), "local_buffer_size": str(64 * MIB),
             "protocol": "tcp", "rdma_devices": "", "master_server_addr": f"127.0.0.1:{rpc}",
             "enable_ssd_offload": "true", "ssd_offload_path": str(folder)}
        )  # fmt: skip
        assert status == 0, f"setup: {status}"
        self.pool = np.zeros((shape.n_chunks, shape.chunk_bytes), dtype=np.uint8)
        self._client.register_buffer(self.pool.ctypes.data, self.pool.nbytes)

    def _request(self, prefix: int) -> tuple[list[str], list[int], list[int]]:
        n, size = self.pool.shape
        places = [self.pool.ctypes.data + i * size for i in range(n)]
        return [f"{prefix}-{i}" for i in range(n)], places, [size] * n

    def store(self, prefix: int) -> None:
        keys, *where = self._request(prefix)
        assert not any(self._client.batch_put_from(keys, *where)), "it was not stored"
        until = time.monotonic() + _OFFLOADED_S
        while not all(self._on_disk(key) for key in keys):
            assert time.monotonic() < until, "its SSD tier does not fill"
            time.sleep(0.1)

    def _on_disk(self, key: str) -> bool:
        return any(copy.is_local_disk_replica() for copy in self._client.get_replica_desc(key))

    def settled(self, prefix: int) -> None:
        keys, *_ = self._request(prefix)
        copies = self._client.get_replica_desc(keys[0])
        (memory,) = (copy for copy in copies if copy.is_memory_replica())
        segment = memory.get_memory_descriptor().buffer_descriptor.transport_endpoint
        time.sleep(self._LEASE_S + 0.5)  # leased copies are not cleared
        cleared = self._client.batch_replica_clear(keys, segment)
        assert len(cleared) == len(keys), "its copies in memory stay"
        super().settled(prefix)

    def restore(self, prefix: int) -> None:
        keys, *where = self._request(prefix)
        got = self._client.batch_get_into(keys, *where)
        assert all(n == self.shape.chunk_bytes for n in got), f"read: {set(got)}"

    def close(self) -> None:
        self._client.close()
        self._master.terminate()
        self._master.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> None:
    until = time.monotonic() + _STARTED_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
