"""A hit's time to the first token: rows read into virtual buffers, or into the pool. Real."""

from __future__ import annotations

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
    times: dict[str, list[float]] = {"pooled": [], "virtual": []}
    with hf.attach(model, folder, config=config) as pooled:
        pooled.generate(ids, max_new_tokens=1)
        pooled.flush()
        asked = hf.Virtual(batch=2, context=n_tokens + 64)
        with hf.attach(model, pooled.store, store_new=False, virtual=asked) as virtual:
            engines = [("pooled", pooled), ("virtual", virtual)]
            for turn, tail in enumerate(question):
                prompt = torch.cat([ids, tail[None]], 1)
                for name, engine in engines[:: 1 if turn % 2 else -1]:
                    ms = _ask(engine, prompt, name)
                    if turn > 1:  # the first ones warm up
                        times[name].append(ms)
    ratio = np.array(times["virtual"]) / np.array(times["pooled"])
    return [
        {
            "n_tokens": n_tokens, "pooled_ms": float(np.median(times["pooled"])),
            "virtual_ms": float(np.median(times["virtual"])),
            "ttft_vs_pooled": float(np.median(ratio)), "n": len(ratio),
        }
    ]  # fmt: skip


def _ask(engine: Any, prompt: torch.Tensor, memory: str) -> float:
    engine.generate(prompt, max_new_tokens=1, do_sample=False)
    request = engine.last_request
    assert request.hit_tokens > prompt.shape[1] - 2 * engine.store.window
    assert request.memory == memory
    engine.flush()
    return float(request.ttft_ms)
