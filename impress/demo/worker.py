"""One process of the demo: `python -m impress.demo.worker compute|answer DIR DOCUMENTS QUESTIONS`.

Says what it does in JSON lines on stdout: {"step": text, "done": n, "of": n}, then one
{"result": …}, or {"error": line} and exit status 2.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from impress.config import MIB, Config
from impress.demo.documents import Document, documents
from impress.demo.model import load, save
from impress.engines import hf
from impress.errors import StoreFailed
from impress.terminal import line_of

NEW_TOKENS: Final = 8
MODES: Final = ("recompute", "ssd", "dram")
CONFIG: Final = Config(dram_bytes=256 * MIB, segment_bytes=64 * MIB, mode="exact")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to one question: its tokens, how long the first took, what was read."""

    tokens: list[int]
    ttft_ms: float
    hit_tokens: int
    bytes_by_tier: dict[str, int]


def compute(folder: Path, n_documents: int, n_questions: int) -> dict[str, Any]:
    """Make documents, tokenizer and model; compute every document once and store it."""
    _say("making a model and its tokenizer", 0, n_documents)
    texts = save(folder / "model", documents(n_documents, n_questions))
    (folder / "documents").mkdir(exist_ok=True)
    for document in texts:
        path = folder / "documents" / f"{document.name}.txt"
        path.write_text(document.text, encoding="utf-8")
    model, tokenizer = load(folder / "model")
    n_tokens = []
    started = perf_counter()
    with hf.attach(model, folder / "store", config=CONFIG) as engine:
        for i, document in enumerate(texts):
            _say(f"computing and storing {document.name}", i, n_documents)
            ids = tokenizer(document.text, return_tensors="pt")["input_ids"]
            n_tokens.append(int(ids.shape[1]))
            engine.generate(ids, max_new_tokens=1, do_sample=False)
        engine.flush()
        stats = engine.store.stats()
    if stats["refused"]:
        why = ", ".join(stats["refused"]).replace("_", " ")
        raise StoreFailed(f"demo: the store refused a document ({why})")
    return {
        "tokens": n_tokens,
        "seconds": perf_counter() - started,
        "weights": sum(p.numel() for p in model.parameters()),
        "stored_tokens": stats["stored_tokens"],
        "stored_bytes": stats["stored_bytes"],
    }


def answer(folder: Path, n_documents: int, n_questions: int) -> dict[str, Any]:
    """Answer every question recomputing, from SSD and from DRAM, in turns; nothing is stored."""
    _say("loading the model", 0, n_documents * n_questions)
    model, tokenizer = load(folder / "model")
    rows: list[dict[str, Any]] = []
    with hf.attach(model, folder / "store", config=CONFIG, store_new=False) as engine:
        _warm_up(model, engine)
        for document in documents(n_documents, n_questions):
            text = (folder / "documents" / f"{document.name}.txt").read_text(encoding="utf-8")
            for question in document.questions:
                _say(f"asking about {document.name}", len(rows), n_documents * n_questions)
                ids = _prompt(tokenizer, text, question)
                answers = _three_ways(model, engine, ids, hits_first=len(rows) % 2 == 1)
                if not all(answers[mode].hit_tokens for mode in ("ssd", "dram")):
                    raise StoreFailed(f"demo: {document.name} was stored and is not found")
                # The control: what a hit computes, without what it reads.
                alone = _recompute(model, ids[:, answers["ssd"].hit_tokens :])
                row = _row(document, question, ids.shape[1], answers, tokenizer)
                changes = alone.tokens != answers["recompute"].tokens
                rows.append({**row, "changes_without_prefix": changes})
        stats = engine.store.stats()
    kept = ("tiers", "hits", "misses", "read_bytes", "lost", "direct_io", "spans", "tokens")
    return {"rows": rows, "store": {name: stats[name] for name in kept},
            "torch_threads": torch.get_num_threads()}  # fmt: skip


def _prompt(tokenizer: Any, text: str, question: str) -> torch.Tensor:
    """[1, n_tokens]; tokenised apart, so that the document's tokens are always the same."""
    return torch.tensor([tokenizer(text)["input_ids"] + tokenizer(question)["input_ids"]])


def _three_ways(
    model: Any, engine: hf.Engine, ids: torch.Tensor, *, hits_first: bool
) -> dict[str, Answer]:
    """DRAM right after SSD, which fills it; recomputing before or after, by turns."""
    answers: dict[str, Answer] = {}
    order = ("ssd", "dram", "recompute") if hits_first else MODES
    for mode in order:
        if mode == "recompute":
            answers[mode] = _recompute(model, ids)
            continue
        if mode == "ssd":
            engine.store.drop_caches()
        answers[mode] = _reuse(engine, ids)
    return answers


def _recompute(model: Any, ids: torch.Tensor) -> Answer:
    """The model alone, without the store."""
    clock = _FirstLogits()
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([clock]),
    )
    return Answer(result[0, ids.shape[1] :].tolist(), clock.ttft_ms, 0, {})


def _reuse(engine: hf.Engine, ids: torch.Tensor) -> Answer:
    result = engine.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    request = engine.last_request
    assert request is not None, "a request has just returned"
    return Answer(
        result[0, ids.shape[1] :].tolist(), request.ttft_ms, request.hit_tokens,
        request.bytes_by_tier,
    )  # fmt: skip


class _FirstLogits(LogitsProcessor):  # type: ignore[misc]  # the base is untyped
    """Changes nothing; notes how long after its making the first logits came."""

    def __init__(self) -> None:
        self.ttft_ms = 0.0
        self._started = perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.ttft_ms:
            self.ttft_ms = (perf_counter() - self._started) * 1e3
        return scores


def _warm_up(model: Any, engine: hf.Engine) -> None:
    """Threads, allocators and code paths; on tokens no document begins with."""
    ids = torch.zeros((1, 100), dtype=torch.int64)
    _recompute(model, ids)
    _reuse(engine, ids)


def _row(
    document: Document, question: str, n_tokens: int, answers: dict[str, Answer], tokenizer: Any
) -> dict[str, Any]:
    truth = answers["recompute"].tokens
    return {
        "document": document.name,
        "question": question.split("\n")[1].removeprefix("Question: "),
        "prompt_tokens": n_tokens,
        "hit_tokens": {mode: answers[mode].hit_tokens for mode in ("ssd", "dram")},
        "ttft_ms": {mode: answers[mode].ttft_ms for mode in MODES},
        "bytes": {mode: answers[mode].bytes_by_tier for mode in ("ssd", "dram")},
        "agrees": {mode: answers[mode].tokens == truth for mode in ("ssd", "dram")},
        "answer": tokenizer.decode(truth),
    }


def _say(step: str, done: int, of: int) -> None:
    _send({"step": step, "done": done, "of": of})


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def main() -> None:
    """Run one phase; the last line on stdout is its result."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    phase, folder, *counts = sys.argv[1:]
    work = {"compute": compute, "answer": answer}[phase]
    n_documents, n_questions = (int(count) for count in counts)
    try:
        with redirect_stdout(sys.stderr):  # whatever a library prints is no message of ours
            result = work(Path(folder), n_documents, n_questions)
    except KeyboardInterrupt:
        raise SystemExit(2) from None
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        _send({"error": line})
        raise SystemExit(2) from None
    _send({"result": result})


if __name__ == "__main__":
    main()
