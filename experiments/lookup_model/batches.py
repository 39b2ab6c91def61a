"""Training sequences: a document, then many questions that do not see each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from experiments.lookup_model.model import Visible
from impress.demo.lookup.tasks import TASKS, Question, document, questions
from impress.demo.lookup.tokenizer import PAD_ID, encode

QUESTION_WORDS = 6  # the longest question: positions to leave free behind a document


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, positions [batch, n]; one entry per question in the rest, n_asked of them.

    Every question's positions continue its document's, and `see` hides the others from it.
    """

    tokens: Tensor
    positions: Tensor
    see: Visible
    rows: Tensor  # the sequence a question is in
    at: Tensor  # its last token, which predicts the answer
    answers: Tensor
    candidates: Tensor  # [n_asked, 2]
    task: Tensor  # index into TASKS
    hinted: Tensor  # [n_asked, n] bool: the name or cause in the document; empty for diffuse


def make_batch(
    split: str, indices: list[int], n_tokens: int, n_each: int, max_positions: int, seed: int
) -> Batch:
    """One sequence per index, its first position drawn at random. Pure in its arguments."""
    rng = np.random.default_rng([seed, n_tokens, *indices[:1]])
    docs = [document(split, index, n_tokens) for index in indices]
    asked = [[q for t in TASKS for q in questions(doc, t, n_each)] for doc in docs]
    width = max(sum(len(q.tokens) for q in qs) for qs in asked)
    n_docs = len(docs)
    tokens = torch.full((n_docs, n_tokens + width), PAD_ID)
    tokens[:, :n_tokens] = torch.tensor([doc.tokens for doc in docs])
    positions = torch.arange(n_tokens + width).clamp(max=n_tokens).repeat(n_docs, 1)
    owner = torch.full((n_docs, width), -1)  # which question a token belongs to
    charged = torch.zeros(n_docs, width, dtype=torch.bool)
    rows, at = [], []
    for row, qs in enumerate(asked):
        end = n_tokens
        for number, q in enumerate(qs):
            start, end = end, end + len(q.tokens)
            tokens[row, start:end] = torch.tensor(q.tokens)
            positions[row, start:end] = n_tokens + torch.arange(len(q.tokens))
            owner[row, start - n_tokens : end - n_tokens] = number
            charged[row, start - n_tokens : end - n_tokens] = q.task != "diffuse"
            rows.append(row)
            at.append(end - 1)
    first = rng.integers(0, max_positions - n_tokens - QUESTION_WORDS + 1, n_docs)
    first[rng.random(n_docs) < 0.25] = 0  # served prompts start at position 0
    flat = [q for qs in asked for q in qs]
    return Batch(
        tokens=tokens,
        positions=positions + torch.tensor(first)[:, None],
        see=_visible(owner, charged, n_tokens),
        rows=torch.tensor(rows),
        at=torch.tensor(at),
        answers=torch.tensor([q.answer for q in flat]),
        candidates=torch.tensor([q.candidates for q in flat]),
        task=torch.tensor([TASKS.index(q.task) for q in flat]),
        hinted=_hinted(tokens[torch.tensor(rows)], n_tokens, flat),
    )


def _visible(owner: Tensor, charged: Tensor, n_document: int) -> Visible:
    """Each question token sees the document and the tokens of its own question up to itself."""
    n_docs, width = owner.shape
    own = (owner[:, :, None] == owner[:, None, :]) & torch.ones(width, width).tril().bool()
    rows = torch.cat([torch.ones(n_docs, width, n_document).bool(), own], 2)
    return Visible(n_document, rows, charged)


def _hinted(tokens: Tensor, n_document: int, asked: list[Question]) -> Tensor:
    """[n_asked, n] bool: where a question's name or cause stands in its document."""
    subject = [-1 if q.task == "diffuse" else encode(q.subject)[0] for q in asked]
    same = tokens == torch.tensor(subject)[:, None]
    same[:, n_document:] = False
    return same


def stream(
    first: int,
    lengths: tuple[int, ...],
    n_each: int,
    tokens_per_step: int,
    max_positions: int,
    seed: int,
    n_before: int = 0,
) -> Iterator[tuple[int, Batch]]:
    """Endless batches of unseen training documents from index `first` on, each with the next
    free index; the documents' lengths take turns, of which `n_before` are over."""
    probes = [make_batch("train", [first], n, n_each, max_positions, seed) for n in lengths]
    counts = [max(1, round(tokens_per_step / probe.tokens.shape[1])) for probe in probes]
    turns = cycle(zip(lengths, counts, strict=True))
    for n_tokens, n_docs in islice(turns, n_before % len(lengths), None):
        indices = list(range(first, first + n_docs))
        first += n_docs
        yield first, make_batch("train", indices, n_tokens, n_each, max_positions, seed)
