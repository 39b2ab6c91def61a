"""The first act: what one process computed and stored, another reads instead of computing.

The weights are random, so the answers are noise; that every way gives the same noise is the point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from impress.config import MIB, Config
from impress.demo import Size
from impress.demo.documents import Document, documents
from impress.demo.model import load, recompute, save
from impress.engines import hf
from impress.errors import StoreFailed

Say = Callable[[str, int, int], None]

NEW_TOKENS: Final = 8
MODES: Final = ("recompute", "ssd", "dram")
_CONFIG: Final = Config(dram_bytes=256 * MIB, segment_bytes=64 * MIB, mode="exact")


def compute(folder: Path, size: Size, say: Say) -> dict[str, Any]:
    """Make documents, tokenizer and model; compute every document once and store it."""
    say("making a model and its tokenizer", 0, size.reuse_documents)
    texts = save(folder / "model", documents(size.reuse_documents, size.reuse_questions))
    (folder / "documents").mkdir(exist_ok=True)
    for document in texts:
        path = folder / "documents" / f"{document.name}.txt"
        path.write_text(document.text, encoding="utf-8")
    model, tokenizer = load(folder / "model")
    n_tokens = []
    started = perf_counter()
    with hf.attach(model, folder / "store", config=_CONFIG) as engine:
        for i, document in enumerate(texts):
            say(f"computing and storing {document.name}", i, size.reuse_documents)
            ids = tokenizer(document.text, return_tensors="pt")["input_ids"]
            n_tokens.append(int(ids.shape[1]))
            engine.generate(ids, max_new_tokens=1, do_sample=False)
        stats = stored(engine)
    return {
        "tokens": n_tokens,
        "seconds": perf_counter() - started,
        "weights": sum(p.numel() for p in model.parameters()),
        "stored_tokens": stats["stored_tokens"],
        "stored_bytes": stats["stored_bytes"],
    }


def stored(engine: hf.Engine) -> dict[str, Any]:
    """The store's counters once all of it is durable. Raises StoreFailed if any was refused."""
    engine.flush()
    stats = engine.store.stats()
    if stats["refused"]:
        why = stats["ssd_read_only"] or ", ".join(stats["refused"]).replace("_", " ")
        raise StoreFailed(
            f"demo: the store refused a document ({why}); free some of the disk, or name another "
            "--dir"
        )
    return stats


def answer(folder: Path, size: Size, say: Say) -> dict[str, Any]:
    """Answer every question by recomputing, from SSD and from DRAM, in turn; nothing is stored."""
    n_asked = size.reuse_documents * size.reuse_questions
    say("loading the model", 0, n_asked)
    model, tokenizer = load(folder / "model")
    rows: list[dict[str, Any]] = []
    with hf.attach(model, folder / "store", config=_CONFIG, store_new=False) as engine:
        _warm_up(model, engine)
        for document in documents(size.reuse_documents, size.reuse_questions):
            text = (folder / "documents" / f"{document.name}.txt").read_text(encoding="utf-8")
            for question in document.questions:
                n_done = len(rows) // len(MODES)
                say(f"asking about {document.name}", n_done, n_asked)
                ids = _prompt(tokenizer, text, question)
                rows += _asked(model, engine, ids, document, question, hits_first=n_done % 2 == 1)
        stats = engine.store.stats()
    kept = {name: stats[name] for name in ("tiers", "direct_io")}
    return {"rows": rows, "torch_threads": torch.get_num_threads(), **kept}


def _prompt(tokenizer: Any, text: str, question: str) -> torch.Tensor:
    """[1, n_tokens]; tokenised separately, so that the document's tokens are always the same."""
    return torch.tensor([tokenizer(text)["input_ids"] + tokenizer(question)["input_ids"]])


def _asked(
    model: Any, engine: hf.Engine, ids: torch.Tensor, document: Document, question: str,
    *, hits_first: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each way. DRAM comes right after SSD, which fills it; recompute before or after."""
    answers: dict[str, list[int]] = {}
    rows = []
    for mode in ("ssd", "dram", "recompute") if hits_first else MODES:
        answers[mode], row = _one_way(model, engine, ids, mode)
        if mode != "recompute" and not row["hit_tokens"] and (request := engine.last_request):
            raise StoreFailed(f"demo: {document.name} was stored and is not read: {request.why}")
        named = question.split("\n")[1].removeprefix("Question: ")
        rows.append({
            "act": "reuse", "checkpoint": "random", "document": document.name, "question": named,
            "mode": mode, "prompt_tokens": int(ids.shape[1]), **row,
        })  # fmt: skip
    n_hit = max(row["hit_tokens"] for row in rows)
    # The control: what a hit computes, without what it reads.
    alone, _ = recompute(model, ids[:, n_hit:], NEW_TOKENS)
    for row in rows:
        row["agrees"] = answers[row["mode"]] == answers["recompute"]
        row["changes_without_prefix"] = alone != answers["recompute"]
    return rows


def _one_way(
    model: Any, engine: hf.Engine, ids: torch.Tensor, mode: str
) -> tuple[list[int], dict[str, Any]]:
    """The answer's tokens, and what it took."""
    if mode == "recompute":
        tokens, ttft_ms = recompute(model, ids, NEW_TOKENS)
        return tokens, {"ttft_ms": ttft_ms, "hit_tokens": 0, "bytes": {}}
    if mode == "ssd":
        engine.store.drop_caches()
    result = engine.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    request = engine.last_request
    assert request is not None, "a request has just returned"
    return result[0, ids.shape[1] :].tolist(), {
        "ttft_ms": request.ttft_ms,
        "hit_tokens": request.hit_tokens,
        "bytes": request.bytes_by_tier,
    }


def _warm_up(model: Any, engine: hf.Engine) -> None:
    """Warm up threads, allocators and code paths, on tokens that no document begins with."""
    ids = torch.zeros((1, 100), dtype=torch.int64)
    for mode in ("recompute", "dram"):
        _one_way(model, engine, ids, mode)
