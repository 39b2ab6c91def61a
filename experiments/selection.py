"""How much accuracy choosing rows keeps, on the lookup models and their three tasks.

Each document is computed once and stored in a real store with both probe records; each question is
then answered from the stored prefix under every policy, from the SSD (no DRAM tier, so nothing
carries over). Weights, arithmetic and stored rows are float16, as the checkpoints are: byte shares
depend on it (in float32 the int4 records would be half the share).

Intervals are bootstrapped over documents: questions on one document are not independent.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import impress
from experiments.accuracy_figures import most_unseen
from experiments.common import Options, Row, console, print_rows, run
from experiments.selection_forward import Answered, Prefix, answer, prefill
from impress.demo.lookup.tasks import TASKS, Document, Question, document, questions
from impress.engines import hf
from impress.engines.hf_models import geometry_of
from impress.engines.hf_modules import CACHE
from impress.policy import AllHeads, Exact, Paper, Policy, Quality, Random, Recency

CHECKPOINTS: Final = ("agreeing", "specialised", "grouped")
N_TOKENS: Final = 1024
N_DOCUMENTS: Final = {False: 252, True: 8}  # by `quick`
LIMIT_S: Final = 3600  # after this no further document is begun: `n` says how many were asked
N_CHECKED: Final = 2  # documents whose answers the engine gives too
N_RESAMPLES: Final = 2000
ESTIMATES: Final = ("estimated_missing_mass", "missing_mass_worst_head")
POLICIES: Final[dict[str, Policy]] = {
    "exact": Exact(),
    "paper10": Paper(0.10),
    "paper25": Paper(0.25),
    "ungated25": Paper(0.25, gate=False),
    "quality": Quality(),
    "quality10": Quality(0.1),
    "quality_head10": Quality(0.1, per="head"),
    "all_heads10": AllHeads(0.10),
    "random25": Random(0.25),
    "recency25": Recency(0.25),
}
CONFIG: Final = impress.Config(
    probes=("heads3-v1", "int4-v2"), dram_bytes=0, mode="sparse", durable=False, io_threads=2,
    segment_bytes=64 << 20, disk_bytes=256 << 20, repack_every_s=0.0,
)  # fmt: skip
#: Where the checkpoints are.
LOOKUP: Final = Path(impress.__file__).parent / "demo" / "lookup"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question under one policy. `mass`: [layers, 4], estimated and true, then the same for the
    worst head; no rows where it was not measured."""

    document: int
    task: str
    right: bool
    strict: bool
    same: bool  # it chose the same candidate as exact
    exact_right: bool
    kl: float  # nats, from exact's distribution over all words
    rows_share: float
    bytes_share: float
    transferred_share: float
    fallback_share: float
    mass: npt.NDArray[np.float64]


@dataclass(slots=True)
class Found:
    """All outcomes of a checkpoint, by policy, and how exact compares with a dense forward."""

    by_policy: dict[str, list[Outcome]] = field(
        default_factory=lambda: {name: [] for name in POLICIES}
    )
    dense_same: list[bool] = field(default_factory=list)
    dense_right: list[bool] = field(default_factory=list)
    engine_apart: float = 0.0  # largest difference of a logit between engine and own forward
    n_engine: int = 0


# ---- answering ---------------------------------------------------------------------------------


def asked(doc: Document) -> list[Question]:
    """One diffuse question, and three of the other tasks: two of one, one of the other, in turn."""
    n_rte = 1 + doc.index % 2
    counts = {"rte": n_rte, "copa": 3 - n_rte, "diffuse": 1}
    return [q for task in TASKS for q in questions(doc, task, counts[task])]


def ask_all(
    model: Any, engine: hf.Engine, doc: Document, found: Found, n_checked: int = N_CHECKED
) -> None:
    """Store a document, answer its questions under every policy, note what came out."""
    rows, cache = prefill(model, doc.tokens)
    store = engine.store
    store.store(doc.tokens, rows.keys, rows.values, wait_s=10).wait(60)
    truth = Prefix([k.float() for k in rows.keys], rows.values)
    measured: set[str] = set()
    with store.lease(doc.tokens) as lease:
        for q in asked(doc):
            # Measuring what was left out costs as much as answering: only the first of each task.
            seen = None if q.task in measured else truth
            measured.add(q.task)
            got = {
                name: answer(model, lease, policy, q.tokens, seen)
                for name, policy in POLICIES.items()
            }
            for name, one in got.items():
                found.by_policy[name].append(_outcome(store.geometry, doc, q, one, got["exact"]))
            with torch.no_grad():
                dense = model(torch.tensor([q.tokens]), **{CACHE: cache}).logits[0, -1]
            cache.crop(-len(q.tokens))
            found.dense_same.append(choice_of(dense, q) == choice_of(got["exact"].logits, q))
            found.dense_right.append(choice_of(dense, q) == q.answer)
            if doc.index < n_checked:
                _compare(engine, doc, q, got, found)


def _outcome(
    geometry: impress.Geometry, doc: Document, q: Question, one: Answered, exact: Answered
) -> Outcome:
    row_bytes = geometry.k_row_bytes + geometry.v_row_bytes
    lines, whole = one.report.per_layer, doc.n_tokens * row_bytes
    said = [[line.get(name, 0.0) for line in lines] for name in ESTIMATES]
    mass = np.array([said[0], one.missing, said[1], one.missing_worst]) if one.missing else ()
    log_p, log_e = one.logits.log_softmax(-1), exact.logits.log_softmax(-1)
    chosen = choice_of(one.logits, q)
    return Outcome(
        document=doc.index,
        task=q.task,
        right=chosen == q.answer,
        strict=int(one.logits.argmax()) == q.answer,
        same=chosen == choice_of(exact.logits, q),
        exact_right=choice_of(exact.logits, q) == q.answer,
        kl=float((log_e.exp() * (log_e - log_p)).sum()),
        rows_share=float(np.mean([line.get("chosen", doc.n_tokens) for line in lines]))
        / doc.n_tokens,
        bytes_share=float(np.mean([line.get("wanted_bytes", whole) for line in lines])) / whole,
        transferred_share=float(np.mean([sum(line["bytes"].values()) for line in lines])) / whole,
        fallback_share=float(np.mean([line.get("fell_back", False) for line in lines])),
        mass=np.array(mass).T.reshape(-1, 4),
    )


def choice_of(logits: torch.Tensor, q: Question) -> int:
    """The likeliest of a question's candidates."""
    return int(q.candidates[int(logits[list(q.candidates)].argmax())])


def _compare(
    engine: hf.Engine, doc: Document, q: Question, got: dict[str, Answered], found: Found
) -> None:
    """The same questions by the engine: how far apart are the logits?"""
    for name, policy in POLICIES.items():
        out = engine.generate(
            torch.tensor([[*doc.tokens, *q.tokens]]), max_new_tokens=1, do_sample=False,
            policy=policy, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        apart = float((out.logits[0][0].float() - got[name].logits).abs().max())
        found.engine_apart = max(found.engine_apart, apart)
        found.n_engine += 1


# ---- figures -----------------------------------------------------------------------------------


def resamples(outcomes: list[Outcome], seed: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Bootstrap over documents: accuracy, and exact's minus it, [N_RESAMPLES] each."""
    at = {index: i for i, index in enumerate(sorted({o.document for o in outcomes}))}
    sums = np.zeros((len(at), 3))  # right, exact right, questions
    for o in outcomes:
        sums[at[o.document]] += (o.right, o.exact_right, 1)
    drawn = np.random.default_rng(seed).integers(len(at), size=(N_RESAMPLES, len(at)))
    right, exact, n = sums[drawn].sum(axis=1).T
    return right / n, (exact - right) / n


def figures_of(outcomes: list[Outcome], policy: Policy, seed: int) -> dict[str, float]:
    """Figures of some questions under one policy. Accuracies are shares; `lost_points` and its
    interval are percentage points below exact."""
    accuracy, lost = resamples(outcomes, seed)
    low, high = np.percentile(accuracy, (2.5, 97.5))
    least, most = np.percentile(100 * lost, (2.5, 97.5))
    said = {
        name: float(np.mean([getattr(o, name) for o in outcomes]))
        for name in ("strict", "kl", "rows_share", "bytes_share", "transferred_share",
                     "fallback_share")
    }  # fmt: skip
    right = sum(o.right for o in outcomes)
    exact = sum(o.exact_right for o in outcomes)
    made = {
        "n": float(len(outcomes)),
        "accuracy": right / len(outcomes), "accuracy_low": low, "accuracy_high": high,
        "lost_points": 100 * (exact - right) / len(outcomes),
        "lost_points_low": least, "lost_points_high": most,
        "flips_to_wrong": float(sum(o.exact_right and not o.right for o in outcomes)),
        "flips_to_right": float(sum(o.right and not o.exact_right for o in outcomes)),
        "agreement": float(np.mean([o.same for o in outcomes])),
        **said,
        **_masses(np.concatenate([o.mass for o in outcomes]), policy),
    }  # fmt: skip
    if not isinstance(policy, Exact):  # losing one is known no better than losing none
        least_known = most_unseen(len({o.document for o in outcomes}))
        made["lost_points_high"] = max(made["lost_points_high"], least_known)
    return {name: float(value) for name, value in made.items()}


def _masses(mass: npt.NDArray[np.float64], policy: Policy) -> dict[str, float]:
    """True missing mass against the estimate, over layers of the questions measured."""
    if not len(mass):
        return {}
    estimate, true, _, worst = mass.T
    made = {
        "missing_mass": true.mean(),
        "missing_mass_p95": np.percentile(true, 95),
        "missing_mass_head": worst.mean(),
    }
    if not np.isnan(estimate).any():
        made["estimate"] = estimate.mean()
        made["over_estimate"] = (true > estimate + 1e-3).mean()
    if isinstance(policy, Quality):
        bounded = worst if policy.per == "head" else true
        made["over_bound"] = (bounded > policy.max_missing_mass).mean()
        made["bounded_most"] = bounded.max()
    return {name: float(value) for name, value in made.items()}


def all_figures(found: dict[str, Found], seed: int) -> tuple[dict[str, float], list[Row]]:
    """Figures by checkpoint.task.policy, checkpoint.policy and policy; a row for each."""
    figures: dict[str, float] = {}
    rows: list[Row] = []
    for name, policy in POLICIES.items():
        cells = {
            (checkpoint, task): [o for o in one.by_policy[name] if task in ("", o.task)]
            for checkpoint, one in found.items()
            for task in (*TASKS, "")
        }
        # Every checkpoint is asked about a document: pooled, it is still one document.
        cells["", ""] = [o for one in found.values() for o in one.by_policy[name]]
        for (checkpoint, task), outcomes in cells.items():
            said = figures_of(outcomes, policy, seed)
            where = ".".join(part for part in (checkpoint, task, name) if part)
            figures |= {f"{where}.{what}": value for what, value in said.items()}
            rows.append({"checkpoint": checkpoint, "task": task, "policy": name, **said})
    for checkpoint, one in found.items():
        figures[f"{checkpoint}.recompute.accuracy"] = float(np.mean(one.dense_right))
        figures[f"{checkpoint}.exact.same_as_recompute"] = float(np.mean(one.dense_same))
    figures["engine.most_apart"] = max(one.engine_apart for one in found.values())
    figures["engine.n_compared"] = float(sum(one.n_engine for one in found.values()))
    return figures, rows


def show(rows: list[Row]) -> None:
    """For each checkpoint and task, how the answers fared and what was read for them."""
    for checkpoint, task in dict.fromkeys((row["checkpoint"], row["task"]) for row in rows):
        some = [r for r in rows if (r["checkpoint"], r["task"]) == (checkpoint, task)]
        title = f"{checkpoint or 'all models'}, {task or 'all tasks'}, {some[0]['n']:.0f} questions"
        print_rows(f"{title}: answers", [_answers(row) for row in some])
        print_rows(f"{title}: reads", [_reads(row) for row in some])


def _answers(row: Row) -> Row:
    return {
        "policy": row["policy"],
        "accuracy [95 %]": f"{row['accuracy']:.3f} "
        f"[{row['accuracy_low']:.3f}, {row['accuracy_high']:.3f}]",
        "points lost [95 %]": f"{row['lost_points']:.1f} "
        f"[{row['lost_points_low']:.1f}, {row['lost_points_high']:.1f}]",
        "to wrong": int(row["flips_to_wrong"]),
        "to right": int(row["flips_to_right"]),
        "agreement": f"{row['agreement']:.3f}",
        "KL": f"{row['kl']:.2g}",
    }


def _reads(row: Row) -> Row:
    names = {
        "fell back": "fallback_share", "rows": "rows_share", "bytes": "bytes_share",
        "moved": "transferred_share", "missing": "missing_mass", "estimate": "estimate",
        "over estimate": "over_estimate", "over bound": "over_bound",
    }  # fmt: skip
    cells = {title: f"{row[name]:.3f}" if name in row else "" for title, name in names.items()}
    return {"policy": row["policy"], **cells}


# ---- the run -----------------------------------------------------------------------------------


def model_of(checkpoint: str) -> Any:
    """A checkpoint's model in float16."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(LOOKUP / checkpoint, dtype=torch.float16).eval()
    assert geometry_of(model.config, model.dtype).dtype == "float16"
    return model


def opened(checkpoint: str, folder: Path) -> hf.Engine:
    """A checkpoint's model over a fresh store, which the engine closes."""
    return hf.attach(model_of(checkpoint), folder / checkpoint, config=CONFIG, store_new=False)


def digest_of(checkpoint: str) -> str:
    """The first 12 hex digits of SHA-256 of a checkpoint's weights."""
    weights = (LOOKUP / checkpoint / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest()[:12]


def progress(n_documents: int) -> Iterator[int]:
    """Document numbers, with a line now and then; fewer than n where time runs out."""
    started_s = time.monotonic()
    for index in range(n_documents):
        if time.monotonic() - started_s > LIMIT_S:
            console.print(f"stopped by time after {index} of {n_documents} documents")
            return
        if index in (2, 8) or (index and index % 32 == 0):
            spent_s = time.monotonic() - started_s
            left_s = spent_s / index * (n_documents - index)
            console.print(f"{index} of {n_documents} documents, about {left_s:.0f} s left")
        yield index


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    torch.set_num_threads(1)
    found = {checkpoint: Found() for checkpoint in CHECKPOINTS}
    for checkpoint in CHECKPOINTS:
        console.print(f"{checkpoint}: weights {digest_of(checkpoint)}")
    engines = {checkpoint: opened(checkpoint, options.folder) for checkpoint in CHECKPOINTS}
    try:
        for index in progress(N_DOCUMENTS[options.quick]):
            doc = document("test", index, N_TOKENS)
            for checkpoint, engine in engines.items():
                ask_all(engine.model, engine, doc, found[checkpoint])
    finally:
        for engine in engines.values():
            engine.close()
    figures, rows = all_figures(found, options.seed)
    show(rows)
    console.print(
        f"engine and own forward: {figures['engine.n_compared']:.0f} answers compared, logits "
        f"at most {figures['engine.most_apart']:.2g} apart"
    )
    return figures, rows


if __name__ == "__main__":
    sys.exit(
        run(
            "Accuracy kept by the policies that choose rows.",
            experiment,
            lambda quick: "under a minute" if quick else "20 to 60 minutes on one busy core",
            weights={checkpoint: digest_of(checkpoint) for checkpoint in CHECKPOINTS},
        )
    )
