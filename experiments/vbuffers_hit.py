"""A hit's time to the first token: rows read into virtual buffers, or into the pool. Real."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import impress
from experiments.common import Row
from experiments.vbuffers_decode import random_model
from impress.engines import hf


def hits(folder: Path, n_tokens: int, rounds: int, seed: int) -> list[Row]:
    """One row: two engines over one store, asked in turn; nothing is kept in DRAM."""
    torch.set_num_threads(1)
    model = random_model(seed)
    # float32: a prefix of 2,048 tokens is 32 MiB in this model.
    config = impress.Config(
        dram_bytes=0, mode="sparse", durable=False, segment_bytes=256 << 20, repack_every_s=0
    )
    ids = torch.randint(0, 256, (1, n_tokens))
    question = torch.randint(0, 256, (rounds + 2, 32))
    times: dict[str, list[tuple[float, float]]] = {"pooled": [], "virtual": []}
    with hf.attach(model, folder, config=config) as pooled:
        pooled.generate(ids, max_new_tokens=1)
        pooled.flush()
        asked = hf.Virtual(batch=2, context=n_tokens + 64)
        with hf.attach(model, pooled.store, store_new=False, virtual=asked) as virtual:
            engines = [("pooled", pooled), ("virtual", virtual)]
            for turn, tail in enumerate(question):
                prompt = torch.cat([ids, tail[None]], 1)
                for name, engine in engines[:: 1 if turn % 2 else -1]:
                    took = _ask(engine, prompt, name)
                    if turn > 1:  # the first ones warm up
                        times[name].append(took)
    of_pool, mine = (np.array(times[name]) for name in ("pooled", "virtual"))
    ratio, cpu_ratio = np.median(mine / of_pool, axis=0).tolist()
    return [
        {
            "n_tokens": n_tokens, "pooled_ms": float(np.median(of_pool[:, 0])),
            "virtual_ms": float(np.median(mine[:, 0])), "ttft_vs_pooled": ratio,
            "cpu_vs_pooled": cpu_ratio, "n": len(mine),
        }
    ]  # fmt: skip


def _ask(engine: Any, prompt: torch.Tensor, memory: str) -> tuple[float, float]:
    """Time to the first token, and how long all threads worked for it, in ms."""
    begin_s = time.process_time()
    engine.generate(prompt, max_new_tokens=1, do_sample=False)
    cpu_s = time.process_time() - begin_s
    request = engine.last_request
    assert request.hit_tokens > prompt.shape[1] - 2 * engine.store.window
    assert request.memory == memory
    engine.flush()
    return float(request.ttft_ms), cpu_s * 1e3
