"""What `impress demo` runs: models and documents, a process for each step, one report.

documents.py  texts and questions of the first act     model.py        its random model
reuse.py      first act: what is kept comes back       lookup/         trained checkpoints, tasks
asking.py     later acts: what is read, what is right  checkpoints.py  the checkpoints on disk
worker.py     one step in a process of its own         stage.py        starts it, shows progress
figures.py    rows to figures                          tables.py       figures as people read them
story.py      the acts in order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Seeds the random model's weights, and nothing else.
SEED: Final = 20250214
#: The trained models, in the order they are asked.
CHECKPOINTS: Final = ("agreeing", "specialised")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked. Questions are counted per document, in the later acts per task too."""

    reuse_documents: int
    reuse_questions: int
    documents: int
    questions: dict[str, int]
    repacked_questions: dict[str, int]


SIZES: Final = {
    "full": Size(
        8, 3, 8, {"rte": 20, "copa": 20, "diffuse": 5}, {"rte": 10, "copa": 10, "diffuse": 5}
    ),
    "quick": Size(
        2, 2, 2, {"rte": 3, "copa": 3, "diffuse": 2}, {"rte": 2, "copa": 2, "diffuse": 1}
    ),
}


def n_asked(size: Size, by_task: dict[str, int]) -> int:
    """Number of questions in a later act, over both checkpoints."""
    return len(CHECKPOINTS) * size.documents * sum(by_task.values())
