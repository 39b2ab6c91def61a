"""vLLM's own OpenAI server on loopback, with a store under it or not, and what it counts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import impress
from experiments.common import Unable
from impress.demo.lookup.words import PAD, START, VOCABULARY

MIB = 1 << 20
LOOKUP = Path(impress.__file__).parent / "demo" / "lookup"
_READY_S = 600.0
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a server serves: nothing under it, or a store and a policy for every request.

    `connector`: another connector in the place of ours, as --kv-transfer-config takes it; its extra
    config has the folder of its files under `folder_key`.
    """

    name: str
    policy: dict[str, Any] | None
    floor: dict[str, Any] | None = None
    connector: dict[str, Any] | None = None
    folder_key: str = ""


def make_model(folder: Path, checkpoint: str) -> Path:
    """A lookup checkpoint with its words as a tokenizer, as any Transformers model is saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(LOOKUP / checkpoint, folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, bos_token=START, unk_token=PAD
    ).save_pretrained(folder)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process; leaving the with-block ends it and waits for it.

    `base` is its address; `counts` gives what its /metrics and the store's say.
    """

    def __init__(
        self, model: Path, way: Way, store: Path, log: Path, dtype: str, max_seqs: int = 16
    ) -> None:
        self.port, self.metrics_port = _free_port(), _free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.way = way
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", "lookup", "--dtype", dtype, "--host", "127.0.0.1",
            "--port", str(self.port), "--max-model-len", "2048", "--max-num-seqs", str(max_seqs),
            "--max-num-batched-tokens", "4096", "--enforce-eager",
        ]  # fmt: skip
        if way.connector is not None:
            theirs = {**way.connector, "kv_connector_extra_config": {way.folder_key: str(store)}}
            self.command += ["--kv-transfer-config", json.dumps(theirs)]
        elif way.policy is not None:
            self.command += ["--kv-transfer-config", json.dumps(self._transfer(store))]
        self._log = log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def _transfer(self, store: Path) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "store": str(store),
            "policy": self.way.policy,
            "config": {
                "dram_bytes": 256 * MIB,
                "segment_bytes": 64 * MIB,
                "probes": ["heads3-v1", "int4-v2"],
                "metrics_port": self.metrics_port,
            },
        }
        if self.way.floor is not None:
            extra["floor"] = self.way.floor
        return {
            "kv_connector": "ImpressConnector",
            "kv_connector_module_path": "impress.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def __enter__(self) -> Server:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # as the client: it reuses what the server closes
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        self._process = subprocess.Popen(
            self.command, env=environment, stdout=self._log, stderr=self._log
        )
        try:
            self._wait(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unable(f"vLLM's server did not start: {self.last_line()}")
            time.sleep(0.5)

    def last_line(self) -> str:
        """Of its log, which goes with the experiment's data."""
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def counts(self) -> dict[str, float]:
        """Every sample of both /metrics, added up over labels."""
        ports = [self.port] + ([self.metrics_port] if self.way.policy is not None else [])
        found: dict[str, float] = {}
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                for line in reply.read().decode().splitlines():
                    match = re.match(r"([a-zA-Z_:]+)(?:\{[^}]*\})? (\S+)$", line)
                    if match:
                        found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def forget(self) -> None:
        """Empty vLLM's own prefix cache (an endpoint of its development mode)."""
        self.settled()
        request = urllib.request.Request(f"{self.base}/reset_prefix_cache", method="POST")
        for _ in range(60):  # blocks of the last answers may still be on their way into the store
            with urllib.request.urlopen(request, timeout=30) as reply:
                if json.loads(reply.read())["success"]:
                    return
            time.sleep(0.5)
        raise Unable("vLLM did not empty its prefix cache within 30 s")

    def settled(self) -> dict[str, float]:
        """The counts once storing has come to rest: the same twice, a second apart."""
        before = self._stored()
        while True:
            time.sleep(1.0)
            now = self._stored()
            if now == before:
                return self.counts()
            before = now

    def _stored(self) -> float:
        return self.counts().get("impress_stored_tokens_total", 0.0)


@contextmanager
def told(server: Server) -> Iterator[None]:
    """An error of the OpenAI client in the with-block is told in a line (Unable), with the last
    line of the server's log, where the reason is."""
    from openai import OpenAIError

    try:
        yield
    except OpenAIError as err:
        said = " ".join(str(err).split())[:300]
        raise Unable(f"{server.way.name}: {said}; its log ends: {server.last_line()}") from None


@contextmanager
def since(server: Server) -> Iterator[dict[str, float]]:
    """What the counts grew by in the with-block, filled in at its end."""
    grown: dict[str, float] = {}
    before = server.counts()
    yield grown
    grown.update(_grown(before, server.counts()))


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


#: `vllm bench serve` where the distribution is not called vllm, which its command line requires.
_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench(server: Server, model: Path, n_prompts: int) -> dict[str, Any]:
    """`vllm bench serve --dataset-name prefix_repetition`, unmodified, against a server."""
    result = model.parent / f"bench-{server.way.name}.json"
    command = [
        sys.executable, "-c", _BENCH,
        "--base-url", server.base, "--model", "lookup", "--tokenizer", str(model),
        "--dataset-name", "prefix_repetition", "--num-prompts", str(n_prompts),
        "--prefix-repetition-prefix-len", "1024", "--prefix-repetition-suffix-len", "32",
        "--prefix-repetition-num-prefixes", str(max(1, n_prompts // 4)),
        "--prefix-repetition-output-len", "8", "--max-concurrency", "4", "--seed", "1",
        "--save-result", "--result-filename", str(result), "--disable-tqdm",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=600,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # what was measured before is not lost for it
        return {"error": "it took more than 600 s"}
    if done.returncode or not result.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(result.read_text())
    wanted = ("completed", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "request_throughput")
    if missing := [name for name in wanted if found.get(name) is None]:
        return {"error": f"its report lacks {', '.join(missing)}"}
    return {name: found[name] for name in wanted}
