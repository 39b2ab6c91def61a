"""How far choices of the small trained models follow an average order: the place on `chunks`' curve
that applies to them.

    question ─policy→ rows chosen in a layer ─┬─ share of them first by the importance at storing
                                              └─ and by what the document's other questions chose

Rows are packed by the first order when they are stored, by the second when they are repacked. The
paper's selector runs without its gate, to see what it would choose of layers it loads whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from experiments.common import Row
from experiments.harness import Options
from experiments.selection import CONFIG, N_TOKENS, model_of
from experiments.selection_forward import walk
from experiments.systems.generate import overlap_with_average
from impress.demo.lookup.tasks import TASKS, Document, document, questions
from impress.engines import hf
from impress.policy import Exact, Paper, Policy, Quality, StaticH2O
from impress.read.session import Lease
from impress.read.sparse import SparseSession

KEEP: Final = 0.25
POLICIES: Final[dict[str, Policy]] = {"paper": Paper(KEEP, gate=False), "quality": Quality()}
N_DOCUMENTS: Final = {False: 12, True: 2}  # by `quick`
#: Questions of each task on a document, over which an average is taken.
N_ASKED: Final = 4
Positions = npt.NDArray[np.int64]


def measure(options: Options, checkpoint: str) -> list[Row]:
    """A row for each policy: mean overlap over documents, layers and questions with each order."""
    found: dict[str, list[Row]] = {name: [] for name in POLICIES}
    folder = options.folder / f"overlap-{checkpoint}"
    with hf.attach(model_of(checkpoint), folder, Quality(), config=CONFIG) as engine:
        for index in range(N_DOCUMENTS[options.quick]):
            doc = document("test", index, N_TOKENS)
            engine.generate(torch.tensor([doc.tokens]), max_new_tokens=1, policy=Exact())
            engine.flush()
            with engine.store.lease(doc.tokens) as lease:
                for name, policy in POLICIES.items():
                    found[name] += _of_document(engine.model, lease, policy, doc)
    return [_mean(name, lines) for name, lines in found.items()]


def _mean(policy: str, lines: Sequence[Row]) -> Row:
    """Means over the layers in which rows were chosen; `whole` over all."""
    chose = [line for line in lines if "others" in line]
    row: Row = {"policy": policy, "n": len(chose)}
    row["whole"] = float(np.mean([line["whole"] for line in lines]))
    for name in ("others", "stored", "kept"):
        row[name] = float(np.mean([line[name] for line in chose])) if chose else None
    return row


def _of_document(model: Any, lease: Lease, policy: Policy, doc: Document) -> Iterator[Row]:
    """A line for each layer: mean overlaps of its choices, the share of rows these keep, and what
    share of the questions loaded it whole. Only the last where fewer than two chose."""
    asked = [q.tokens for task in TASKS for q in questions(doc, task, N_ASKED)]
    by_question = [_chosen(model, lease, policy, tokens) for tokens in asked]
    for layer, found in enumerate(zip(*by_question, strict=True)):
        chosen = [positions for positions in found if positions is not None]
        line: Row = {"whole": 1 - len(chosen) / len(found)}
        if len(chosen) > 1:
            line["kept"] = float(np.mean([len(one) for one in chosen])) / lease.n_tokens
            line["others"] = overlap_with_average(chosen, lease.n_tokens)
            line["stored"] = float(np.mean([_stored(lease, layer, one) for one in chosen]))
        yield line


def _chosen(model: Any, lease: Lease, policy: Policy, tokens: Any) -> list[Positions | None]:
    """The rows chosen, by layer; None: all."""
    with lease.session(policy) as session:
        assert isinstance(session, SparseSession), policy
        walk(model, lease.n_tokens, tokens, session.retrieve)
        return [session.chosen[layer].positions for layer in sorted(session.chosen)]


def _stored(lease: Lease, layer: int, positions: Positions) -> float:
    """Share of a choice that is among as many top rows by the importance at storing."""
    with lease.session(StaticH2O(len(positions) / lease.n_tokens)) as session:
        assert isinstance(session, SparseSession)
        session.retrieve(layer, None)
        first = session.chosen[layer].positions
    assert first is not None, "it chooses as many as it was told"
    return float(np.isin(positions, first).mean())
