"""The later acts: trained models that look things up, so that answers are right or wrong.

    each question: recompute · exact · paper · quality     in an order that rotates
                   every hit from a cold SSD: no copies in RAM, caches dropped before each

The one word that the model writes is right or wrong. The answer it is compared with (full KV)
continues from one dense prefill of the document, held in memory, by the same code path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from impress.config import MIB, Config
from impress.demo import CHECKPOINTS, Size, n_asked
from impress.demo.checkpoints import install, unseen
from impress.demo.figures import Row
from impress.demo.lookup.tasks import TASKS, Document, Question, questions
from impress.demo.lookup.tokenizer import decode
from impress.demo.model import load, recompute
from impress.demo.reuse import Say, stored
from impress.demo.stage import lookup_place
from impress.engines import hf
from impress.engines.hf_modules import CACHE
from impress.errors import StoreFailed
from impress.policy import Exact, Paper, Policy, Quality

POLICIES: Final[dict[str, Policy]] = {"exact": Exact(), "paper": Paper(), "quality": Quality()}
MODES: Final = ("recompute", *POLICIES)
#: The policy alone decides, nothing stays in RAM from one request to the next, and rows move only
#: when the third act says so.
_CONFIG: Final = Config(
    dram_bytes=0, segment_bytes=64 * MIB, mode="sparse", repack_every_s=0,
    probes=tuple(policy.probe for policy in POLICIES.values() if policy.probe),
)  # fmt: skip


def store(folder: Path, size: Size, say: Say) -> dict[str, Any]:
    """Compute every document once with each checkpoint, and store it with its probe records."""
    n_all = len(CHECKPOINTS) * size.documents
    n_bytes, started = 0, perf_counter()
    for i, checkpoint in enumerate(CHECKPOINTS):
        place = lookup_place(folder, checkpoint)
        install(checkpoint, place, size.documents)
        model, _ = load(place / "model")
        with hf.attach(model, place / "store", config=_CONFIG) as engine:
            for doc in unseen(size.documents):
                say(f"{checkpoint}: storing", i * size.documents + doc.index, n_all)
                ids = torch.tensor([doc.tokens])
                engine.generate(ids, max_new_tokens=1, do_sample=False)
            n_bytes += stored(engine)["stored_bytes"]
    return {"stored_bytes": n_bytes, "seconds": perf_counter() - started}


def ask(folder: Path, size: Size, say: Say) -> dict[str, Any]:
    """Ask every question in every mode, of each checkpoint; nothing new is stored."""
    rows: list[Row] = []
    n_all = n_asked(size, size.questions)
    for checkpoint, engine in _opened(folder):
        for row in _ask_all(engine, [(doc, _first(doc, size)) for doc in unseen(size.documents)]):
            rows.append({"act": "choice", "checkpoint": checkpoint, **row})
            say(f"asking {checkpoint}", len(rows) // len(MODES), n_all)
    return {"rows": rows}


def ask_again(folder: Path, size: Size, say: Say) -> dict[str, Any]:
    """Repack each store by what was asked so far, then ask other questions."""
    rows: list[Row] = []
    n_all = n_asked(size, size.repacked_questions)
    moved = {"spans": 0, "bytes": 0, "seconds": 0.0}
    for checkpoint, engine in _opened(folder):
        say(f"repacking {checkpoint}", len(rows) // len(MODES), n_all)
        started = perf_counter()
        report = engine.store.repack()
        moved["seconds"] += perf_counter() - started
        moved["spans"] += report.moved
        moved["bytes"] += report.moved_bytes
        for row in _ask_all(engine, [(doc, _other(doc, size)) for doc in unseen(size.documents)]):
            rows.append({"act": "repacked", "checkpoint": checkpoint, **row})
            say(f"asking {checkpoint}", len(rows) // len(MODES), n_all)
    return {"rows": rows, "moved": moved}


def _opened(folder: Path) -> Iterator[tuple[str, hf.Engine]]:
    """Each checkpoint's engine over its store, reading only; closed when the next is wanted."""
    for checkpoint in CHECKPOINTS:
        place = lookup_place(folder, checkpoint)
        model, _ = load(place / "model")
        with hf.attach(model, place / "store", config=_CONFIG, store_new=False) as engine:
            yield checkpoint, engine


def _first(doc: Document, size: Size) -> list[Question]:
    return [q for task in TASKS for q in questions(doc, task, size.questions[task])]


def _other(doc: Document, size: Size) -> list[Question]:
    """Questions that were not asked before; the diffuse task has too few, so it repeats some."""
    others: list[Question] = []
    for task in TASKS:
        n, n_before = size.repacked_questions[task], size.questions[task]
        pool = questions(doc, task, n_before + n)
        others += pool[-n:]
    return others


def _ask_all(engine: hf.Engine, asked: list[tuple[Document, list[Question]]]) -> Iterator[Row]:
    """A row for each question and mode; the order of the modes rotates."""
    _warm_up(engine, asked[0][0])
    n_done = 0
    for doc, its in asked:
        full = _prefilled(engine.model, doc)
        for q in its:
            ids = torch.tensor([[*doc.tokens, *q.tokens]])
            [truth], _ = recompute(engine.model, ids, 1, full)
            full.crop(-len(q.tokens))
            turn = n_done % len(MODES)
            for mode in MODES[turn:] + MODES[:turn]:
                yield _row(doc, q, mode, truth, *_one_way(engine, ids, mode))
            n_done += 1


@torch.no_grad()
def _prefilled(model: Any, doc: Document) -> Any:
    """A document's rows by the model's own dense forward, in its own cache."""
    return model(torch.tensor([doc.tokens]), use_cache=True)[CACHE]


def _one_way(engine: hf.Engine, ids: torch.Tensor, mode: str) -> tuple[int, dict[str, Any]]:
    """The word written, and what it took. Raises StoreFailed where it ran in another mode."""
    if mode == "recompute":
        [word], ttft_ms = recompute(engine.model, ids, 1)
        return word, {"ttft_ms": ttft_ms}
    engine.store.drop_caches()
    result = engine.generate(ids, max_new_tokens=1, do_sample=False, policy=POLICIES[mode])
    request = engine.last_request
    assert request is not None, "a request has just returned"
    if request.mode != ("exact" if mode == "exact" else "sparse"):
        raise StoreFailed(f"demo: {mode} was asked for and {request.mode} done: {request.why}")
    return int(result[0, -1]), {
        "ttft_ms": request.ttft_ms,
        "hit_tokens": request.hit_tokens,
        "bytes": request.bytes_by_tier,
        "rows": request.rows_by_tier,
        "rows_share": request.chosen_rows_share,
        "fallback_share": request.fallback_share,
        "bytes_share": request.bytes_share,
        "transferred_share": request.transferred_share,
        "estimated_missing_mass": _known(request.estimated_missing_mass),
        "missing_mass_worst_head": _known(request.missing_mass_worst_head),
    }


def _known(mass: float) -> float | None:
    return None if math.isnan(mass) else mass


def _row(doc: Document, q: Question, mode: str, truth: int, word: int, took: dict[str, Any]) -> Row:
    """`agrees` is with full KV, even for recompute: computed in one piece, that may round
    differently. Recompute counts as right where full KV is right."""
    return {
        "task": q.task,
        "document": doc.index,
        "question": q.text,
        "mode": mode,
        "answer": decode([word]),
        "right": (truth if mode == "recompute" else word) == q.answer,
        "agrees": word == truth,
        **took,
    }


def _warm_up(engine: hf.Engine, doc: Document) -> None:
    """Warm up threads, allocators and code paths, in every mode, with a question of two words."""
    ids = torch.tensor([[*doc.tokens, *doc.tokens[1:3]]])
    for mode in MODES:
        _one_way(engine, ids, mode)
