"""A vLLM engine in this process, with or without a store, and what tests ask of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MIB = 1 << 20
SMALL = {"segment_bytes": 4 * MIB, "write_buffer_bytes": 8 * MIB, "dram_bytes": 0}


class Answer(NamedTuple):
    tokens: list[int]
    n_cached: int
    said: dict[str, Any]  # what the connector says of the request


def words(n: int, seed: int) -> list[int]:
    """n token ids that share no window with another seed's."""
    return np.random.default_rng(seed).integers(5, 500, n).tolist()  # type: ignore[no-any-return]


def transfer_config(store: Path, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    given = {"store": str(store), "config": SMALL, **(extra or {})}
    return {
        "kv_connector": "ImpressConnector",
        "kv_connector_module_path": "impress.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": given,
    }


class Served:
    def __init__(
        self, model: Path, dtype: str, store: Path | None, *,
        extra: dict[str, Any] | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        from vllm import LLM

        from impress.engines.vllm import register

        register()  # as vLLM does where impress is installed
        options = {
            "max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True,
            "skip_tokenizer_init": True, "disable_log_stats": False, **arguments,
        }  # fmt: skip
        config = transfer_config(store, extra) if store is not None else None
        self.llm = LLM(model=str(model), dtype=dtype, kv_transfer_config=config, **options)
        self._closed = False

    def ask(
        self, prompts: list[list[int]], n: int = 10, policy: dict[str, Any] | None = None,
        salt: str = "",
    ) -> list[Answer]:  # fmt: skip
        """Greedy answers of n tokens to prompts sent together."""
        salted = {"cache_salt": salt} if salt else {}
        requests = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        return self._answers(self.llm.generate(requests, params(n, policy), use_tqdm=False))

    def ask_each(
        self, prompts: list[list[int]], n: int, policies: list[dict[str, Any] | None]
    ) -> list[Answer]:
        """The same, each prompt under a policy of its own."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        each = [params(n, policy) for policy in policies]
        return self._answers(self.llm.generate(requests, each, use_tqdm=False))

    @staticmethod
    def _answers(outputs: list[Any]) -> list[Answer]:
        return [
            Answer(
                list(out.outputs[0].token_ids),
                out.num_cached_tokens,
                (getattr(out, "kv_transfer_params", None) or {}).get("impress", {}),
            )
            for out in outputs
        ]

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def store(self) -> Any:
        return self.worker.store

    def settle(self) -> None:
        """Let every finished request give back its blocks, and everything be stored."""
        self.worker.flush()
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        self.worker.flush()

    def forgets_all(self) -> bool:
        """Whether the thread that stores forgets every request within a minute: it does so when it
        comes round to it, not before it says that nothing waits."""
        deadline = time.monotonic() + 60
        while self.worker.saver._lives and time.monotonic() < deadline:
            os.sched_yield()
        return not self.worker.saver._lives

    def counted(self) -> dict[str, float]:
        """vLLM's counters, the store's among them."""
        return {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}

    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)  # one is vLLM's own

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.llm.llm_engine.engine_core.shutdown()


def params(n: int, policy: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    args = {"kv_transfer_params": {"impress": {"policy": policy}}} if policy else None
    return SamplingParams(
        temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, extra_args=args
    )


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]
