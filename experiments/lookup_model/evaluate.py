"""Accuracy of a checkpoint on documents it has not seen, and how its attention looks.

    python -m experiments.lookup_model.evaluate impress/demo/lookup/agreeing

Per task and prefix length: accuracy among the candidates; `strict`, the share where the answer is
the most likely of all words; and accuracy when the prefix is another document (must be chance).
With --attention: per layer, the share of tokens that hold 90 % of the mass, the mean pairwise
Jaccard index of the first three heads' top 10 %, and how far each head looks at the fact.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from experiments.common import Unable, parser_of
from impress.demo.lookup.tasks import (
    MIN_TOKENS,
    SPLITS,
    TASKS,
    Document,
    Question,
    document,
    questions,
)
from impress.engines.hf_modules import CACHE
from impress.errors import BadInput

#: Tokens of the longest question, which comes after a document.
_QUESTION: Final = 6


@dataclass(frozen=True)
class Score:
    """Counts over the questions of one cell of the table."""

    n: int
    right: int
    strict: int

    def __str__(self) -> str:
        return f"{self.right / self.n:.3f} (strict {self.strict / self.n:.3f}, n {self.n})"


def _continue(
    model: PreTrainedModel, cache: DynamicCache, n_prefix: int, asked: list[Question]
) -> Tensor:
    """[n_questions, words] logits after each question, each alone after a cached prefix.

    `asked` all have the same number of tokens.
    """
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(asked))
    tokens = torch.tensor([q.tokens for q in asked])
    mask = torch.ones(len(asked), n_prefix + tokens.shape[1], dtype=torch.long)
    logits: Tensor = model(tokens, **{CACHE: cache}, attention_mask=mask).logits[:, -1]
    return logits


def score(logits: Tensor, asked: list[Question]) -> Score:
    candidates = torch.tensor([q.candidates for q in asked])
    answers = torch.tensor([q.answer for q in asked])
    best = candidates.gather(1, logits.gather(1, candidates).argmax(1, keepdim=True))[:, 0]
    strict = int((logits.argmax(1) == answers).sum())
    return Score(len(asked), int((best == answers).sum()), strict)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, split: str, n_tokens: int, n_docs: int, n_each: int, first: int = 0
) -> dict[tuple[str, str], Score]:
    """(task, "own" | "other") -> Score over `n_docs` documents, each also serving as the wrong
    prefix of the next one's questions."""
    cells: dict[tuple[str, str], list[Score]] = defaultdict(list)
    previous: dict[str, list[Question]] = {}
    for index in range(first, first + n_docs):
        doc = document(split, index, n_tokens)
        cache = model(torch.tensor([doc.tokens]), use_cache=True)[CACHE]
        asked = {task: list(questions(doc, task, n_each)) for task in TASKS}
        for where, by_task in (("own", asked), ("other", previous)):
            for task, some in by_task.items():
                if some:
                    logits = _continue(model, cache, n_tokens, some)
                    cells[task, where].append(score(logits, some))
        previous = asked
    return {cell: _total(scores) for cell, scores in cells.items()}


def _total(scores: list[Score]) -> Score:
    return Score(
        sum(s.n for s in scores), sum(s.right for s in scores), sum(s.strict for s in scores)
    )


# --- attention -------------------------------------------------------------------------------


@torch.no_grad()
def attention_rows(model: PreTrainedModel, doc: Document, q: Question) -> Tensor:
    """[layers, heads, n_prefix] attention of the question's tokens on the prefix, summed over
    the question's rows; float32."""
    tokens = torch.tensor([[*doc.tokens, *q.tokens]])
    maps = model(tokens, output_attentions=True).attentions
    return torch.stack([m[0, :, doc.n_tokens :, : doc.n_tokens].float().sum(1) for m in maps])


def share_holding(mass: Tensor, wanted: float = 0.9) -> Tensor:
    """Smallest share of tokens that hold `wanted` of the mass, over the last dimension."""
    ordered = mass.sort(-1, descending=True).values.cumsum(-1)
    return (ordered < wanted * ordered[..., -1:]).float().mean(-1)


def jaccard_of_three(mass: Tensor, keep: float = 0.1) -> Tensor:
    """[layers] mean pairwise Jaccard index of the first three heads' top `keep` tokens."""
    k = max(1, int(keep * mass.shape[-1]))
    chosen = torch.zeros_like(mass).scatter(-1, mass.topk(k).indices, 1.0)[:, :3]
    pairs = [(0, 1), (0, 2), (1, 2)]
    both = torch.stack([(chosen[:, a] * chosen[:, b]).sum(-1) for a, b in pairs])
    return (both / (2 * k - both)).mean(0)


def on_fact(doc: Document, q: Question, mass: Tensor) -> Tensor:
    """[layers, heads] share of the mass that falls on the words of the question's fact."""
    subject = q.tokens[-1]
    at = doc.tokens.index(subject)
    return mass[:, :, at - 3 : at + 1].sum(-1) / mass.sum(-1)


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    """Load a model from its files alone."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, **options
    ).eval()


def show_attention(folder: Path, n_tokens: int, n_docs: int) -> None:
    model = loaded(folder, attn_implementation="eager")
    for task in TASKS:
        held, jaccard, fact = [], [], []
        for index in range(n_docs):
            doc = document("calibration", index, n_tokens)
            for q in questions(doc, task, 4):
                mass = attention_rows(model, doc, q)
                held.append(share_holding(mass.sum(1)))
                jaccard.append(jaccard_of_three(mass))
                if task != "diffuse":
                    fact.append(on_fact(doc, q, mass))
        print(f"{task} at {n_tokens}: tokens holding 90 % by layer {_row(held)}")
        print(f"{task} at {n_tokens}: Jaccard of three heads at 10 % by layer {_row(jaccard)}")
        for layer, heads in enumerate(torch.stack(fact).mean(0) if fact else []):
            print(f"{task} at {n_tokens}: layer {layer} mass on the fact by head {_row([heads])}")


def _row(values: list[Tensor]) -> str:
    return " ".join(f"{v:.3f}" for v in torch.stack(values).mean(0).tolist())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("lookup_model.evaluate", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="DIR", help="a lookup model's folder")
    add("--split", choices=(*SPLITS,), default="test", help="whose documents (default test)")
    add(
        "--lengths", type=int, nargs="+", metavar="N", default=[512, 1024, 2048],
        help="tokens of a document (default 512 1024 2048)",
    )  # fmt: skip
    add("--docs", type=int, metavar="N", default=25, help="documents of each length (default 25)")
    add(
        "--questions", type=int, metavar="N", default=20,
        help="most of each task about a document (default 20)",
    )  # fmt: skip
    add("--attention", action="store_true", help="say how its attention looks, too")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    """Raises Unable, BadInput, OSError."""
    if not (args.checkpoint / "config.json").is_file():
        raise Unable(f"{args.checkpoint}: no config.json there: name a checkpoint's folder")
    config = AutoConfig.from_pretrained(args.checkpoint, local_files_only=True)
    most = config.max_position_embeddings - _QUESTION
    for n_tokens in args.lengths:
        if not MIN_TOKENS <= n_tokens <= most:
            raise Unable(f"--lengths {n_tokens}: want {MIN_TOKENS} to {most} for this checkpoint")
    model = loaded(args.checkpoint)
    for n_tokens in args.lengths:
        cells = evaluate(model, args.split, n_tokens, args.docs, args.questions)
        for (task, where), cell in sorted(cells.items()):
            print(f"{n_tokens:5d} {task:8s} {where:6s} {cell}", flush=True)
    if args.attention:
        for n_tokens in args.lengths[1:2] or args.lengths:
            show_attention(args.checkpoint, n_tokens, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 where it could not run."""
    args = _arguments(argv)
    torch.set_num_threads(1)
    try:
        _run(args)
    except (Unable, BadInput, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
