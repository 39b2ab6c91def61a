"""The lookup models' documents and questions as cells of `accuracy`: one cell per document.

Each document is stored by the engine itself, with every arm's probe records and with importance,
by which its rows are packed. There is no DRAM tier, so all bytes come from home and nothing carries
over. Weights, arithmetic and rows are float16, as the checkpoints are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

import torch

import impress
from experiments.accuracy_measure import Prompts, Query, check_stored
from experiments.arms import Arm, probes
from experiments.common import Row
from experiments.harness import Cell, Options
from experiments.selection import CHECKPOINTS, N_TOKENS, asked, digest_of, model_of
from impress.demo.lookup.tasks import document
from impress.engines import hf
from impress.policy import Exact, Quality

N_DOCUMENTS: Final = {False: 252, True: 6}  # by `quick`
#: Seconds for one arm on one question on one busy core, for the estimate.
_ARM_S: Final = 0.05
_QUESTIONS: Final = 4


def cells(
    options: Options, arms: dict[str, Arm], documents: Iterable[int] | None = None
) -> list[Cell]:
    """A cell for each of these documents (None: all of this size) and each checkpoint."""
    if documents is None:
        documents = range(N_DOCUMENTS[options.quick])
    torch.set_num_threads(1)

    @cache
    def engine(checkpoint: str) -> hf.Engine:
        return options.exits.enter_context(_opened(checkpoint, options, arms))

    seconds, weights = _ARM_S * _QUESTIONS * len(arms), _weights()
    return [
        Cell({"group": checkpoint, "document": index, "arms": sorted(arms),
              "weights": weights[checkpoint]},
             _measure(engine, checkpoint, index, arms), seconds)
        for index in documents
        for checkpoint in CHECKPOINTS
    ]  # fmt: skip


def meta() -> dict[str, Any]:
    """What a reader needs to know about the models."""
    return {"weights": _weights(), "n_tokens": N_TOKENS}


def _weights() -> dict[str, str]:
    return {name: digest_of(name) for name in CHECKPOINTS}


def _opened(checkpoint: str, options: Options, arms: dict[str, Arm]) -> hf.Engine:
    config = impress.Config(
        probes=probes(arms), dram_bytes=0, mode="sparse", durable=False, io_threads=2,
        segment_bytes=64 << 20, disk_bytes=256 << 20, repack_every_s=0.0,
    )  # fmt: skip
    model = model_of(checkpoint)
    return hf.attach(model, options.folder / checkpoint, Quality(), config=config)


def _measure(
    engine: Callable[[str], hf.Engine], checkpoint: str, index: int, arms: dict[str, Arm]
) -> Callable[[], list[Row]]:
    def measure() -> list[Row]:
        server, doc = engine(checkpoint), document("test", index, N_TOKENS)
        server.generate(torch.tensor([doc.tokens]), max_new_tokens=1, policy=Exact())
        check_stored(server)
        prompts = Prompts(server.model, server.store, arms, doc.tokens)
        rows = []
        for q in asked(doc):
            choices = tuple((token,) for token in q.candidates)
            gold = q.candidates.index(q.answer)
            rows.append(prompts.ask(Query(q.task, (*doc.tokens, *q.tokens), choices, gold)))
        return rows

    return measure
