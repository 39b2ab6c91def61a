"""Sessions of random requests under the Transformers engine, each compared with the model alone.

Prompts share beginnings, end early, are padded, and come in batches and one after the other, while
rows are stored, evicted and purged. Whatever happens to the store, the tokens are the model's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_hf import CONFIG, VOCAB, prompts, tiny

from impress.engines import hf
from impress.engines.virtual import Virtual

pytestmark = pytest.mark.usefixtures("one_thread")

Rng = np.random.Generator
N_REQUESTS = 14
MIB = 1 << 20


@pytest.mark.parametrize("seed", range(24))
def test_a_session_has_the_models_tokens_and_ends_well(seed: int, tmp_path: Path) -> None:
    """This found a batch row that ended before its first window and kept those after it from being
    stored (flush raised), and batches of one token, which were refused."""
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["opt", "llama", "qwen3", "mistral"]))
    model = tiny(family, attention=str(rng.choice(["sdpa", "sdpa", "eager"])), seed=seed)
    documents = [prompts(int(rng.integers(30, 330)), seed=i) for i in range(4)]
    documents.append(prompts(200, seed=4))
    virtual = Virtual(batch=3, context=400, budget_bytes=int(rng.choice([MIB, 16 * MIB])))
    engine = hf.attach(
        model, tmp_path, config=CONFIG.model_copy(update=settings(rng)),
        virtual=virtual if rng.random() < 0.5 else None,
    )  # fmt: skip
    with engine:
        for _ in range(N_REQUESTS):
            ids, asked = request(rng, documents)
            want, got = (generate(ids, **asked) for generate in (model.generate, engine.generate))
            if "return_dict_in_generate" in asked:
                want, got = want.sequences, got.sequences
            assert torch.equal(got, want), engine.last_request
            if rng.random() < 0.5:
                engine.flush()
            if rng.random() < 0.1:
                engine.store.purge()
            if rng.random() < 0.1:
                engine.store.evict(MIB // 4)
        last = {
            "max_new_tokens": 3,
            "do_sample": False,
        }  # whatever came before, the engine still stores
        for _ in range(3):
            got = engine.generate(documents[4], **last)
            engine.flush()
        assert engine.last_request is not None and engine.last_request.hit_tokens == 192
        assert torch.equal(got, model.generate(documents[4], **last))
    assert engine.store.buffers.used_bytes == 0


def settings(rng: Rng) -> dict[str, Any]:
    """Settings of a store that is large enough for a session, or not."""
    return {
        "admit": str(rng.choice(["first", "second"])),
        "dram_bytes": int(rng.choice([0, MIB, 8 * MIB])),
        "disk_bytes": int(rng.choice([4, 64])) * MIB,
    }


def request(rng: Rng, documents: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The head of a document, once per row, and in most requests a tail of each row's own."""
    document, batch = documents[rng.integers(4)], int(rng.choice([1, 1, 2, 3]))
    most = document.shape[1] if rng.random() < 0.9 else 2
    ids = document[:, : int(rng.integers(1, most + 1))].repeat(batch, 1)
    if rng.random() < 0.6:
        tails = rng.integers(0, VOCAB, (batch, int(rng.integers(1, 70))))
        ids = torch.cat([ids, torch.from_numpy(tails)], 1)
    asked: dict[str, Any] = {
        "max_new_tokens": int(rng.integers(1, 40)), "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    if rng.random() < 0.5:  # rows that end early, and are padded
        asked["eos_token_id"] = rng.integers(0, VOCAB, 20).tolist()
        asked["pad_token_id"] = int(rng.integers(VOCAB))
    if rng.random() < 0.3:
        asked["prefill_chunk_size"] = int(rng.integers(1, 80))
    if rng.random() < 0.3:
        asked["return_dict_in_generate"] = True
    return ids, asked
