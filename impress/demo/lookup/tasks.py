"""Seeded in-context tasks over a long document that no training run has seen.

A document is the shared prefix; a question follows it. Names, causes and themes are paired
afresh in each document, so no answer can come from a model's weights.

    <s> body ............................................. 8 demonstrations | question -> answer
        facts and filler sentences, shuffled                (rte and copa, with answers)

    attribute fact   colour green for anna         the question's answer needs one such fact
    cause fact       then flood after storm        likewise
    filler           gull tide reef salt           3-7 words of one theme

    rte      claim colour green for anna           -> yes | no    entailed or not
    copa     choose flood or fire after storm      -> flood       both effects occur
    diffuse  mostly sea or farm                    -> sea         which theme has more words

The value comes before the name and the answer right after it: small models learn that order
sooner. The diffuse task depends on every filler sentence, so no small selection is sufficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from numpy.random import Generator

from impress.demo.lookup.tokenizer import START_ID, encode
from impress.demo.lookup.words import ATTRIBUTES, CAUSES, EFFECTS, NAMES, THEMES
from impress.errors import BadInput

TASKS: Final = ("rte", "copa", "diffuse")

#: Split -> the code mixed into every seed, so that no two splits share a document.
SPLITS: Final = {"train": 1, "calibration": 2, "test": 3}

FACT_WORDS: Final = 4
FILLER_WORDS: Final = (3, 7)  # shortest and longest sentence
N_DEMONSTRATIONS: Final = 8
MIN_TOKENS: Final = 64
MAX_TOKENS: Final = 1 << 16

_MAX_FACTS: Final = 48  # of each sort: below the number of names, causes and effects
_TOKENS_PER_FACT: Final = 16  # body tokens for one fact of each sort, until _MAX_FACTS
_THEME_RATIO: Final = (1.2, 1.5)  # words of one theme to words of the next rarer one
_MIN_RATIO: Final = 1.05  # two themes nearer than this are not asked about


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document. `tokens` follow the document's; `answer` is the next token.

    `candidates` are the tokens to choose among, in the order of the question; `answer` is one.
    `subject` is the word the answer hangs on: a name, a cause, or both themes.
    """

    task: str
    tokens: tuple[int, ...]
    answer: int
    candidates: tuple[int, ...]
    text: str
    subject: str


@dataclass(frozen=True, slots=True)
class Document:
    """A shared prefix of exactly `n_tokens` tokens, start marker and demonstrations included.

    `attributes` maps a name to (kind, value), `causes` a cause to its effect, as pairs in no
    particular order; `theme_words` counts filler words. `demonstrated` are the subjects of the
    demonstrations: no question is asked about those names and causes again.
    """

    split: str
    index: int
    tokens: tuple[int, ...]
    attributes: tuple[tuple[str, tuple[str, str]], ...]
    causes: tuple[tuple[str, str], ...]
    theme_words: tuple[tuple[str, int], ...]
    demonstrated: frozenset[str]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


def document(split: str, index: int, n_tokens: int) -> Document:
    """The document number `index` of a split: the same for the same three arguments. Pure.

    Documents shorter than about 512 tokens (for a curriculum) get fewer than 8 demonstrations.
    Raises BadInput on an unknown split, a negative index or a length outside
    MIN_TOKENS..MAX_TOKENS.
    """
    if not MIN_TOKENS <= n_tokens <= MAX_TOKENS:
        raise BadInput(f"n_tokens must be in {MIN_TOKENS}..{MAX_TOKENS}, got {n_tokens}")
    rng = _rng(split, index, n_tokens, 0)
    n_facts = min(_MAX_FACTS, n_tokens // _TOKENS_PER_FACT)
    attributes = _draw_attributes(rng, n_facts)
    causes = dict(zip(_sample(rng, CAUSES, n_facts), _sample(rng, EFFECTS, n_facts), strict=True))
    demo_tasks = _demonstration_tasks(rng, n_tokens)
    n_demo_words = sum({"rte": 6, "copa": 7}[task] for task in demo_tasks)
    n_filler = n_tokens - 1 - 2 * FACT_WORDS * n_facts - n_demo_words
    filler, theme_words = _draw_filler(rng, n_filler)
    sentences = [f"{kind} {value} for {name}" for name, (kind, value) in attributes.items()]
    sentences += [f"then {effect} after {cause}" for cause, effect in causes.items()]
    sentences += filler
    rng.shuffle(sentences)
    body = Document(
        split=split,
        index=index,
        tokens=(START_ID, *encode(" ".join(sentences))),
        attributes=tuple(attributes.items()),
        causes=tuple(causes.items()),
        theme_words=tuple(theme_words.items()),
        demonstrated=frozenset(),
    )
    return _with_demonstrations(body, demo_tasks, rng)


def questions(doc: Document, task: str, n: int, draw: int = 0) -> tuple[Question, ...]:
    """At most `n` different questions about `doc`, none about a demonstrated name or cause. Pure.

    `draw` selects another sample of questions. Fewer come back when the document has too few
    facts; the diffuse task has at most six. Raises BadInput on an unknown task or a negative
    number.
    """
    if task not in TASKS:
        raise BadInput(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if n < 0 or draw < 0:
        raise BadInput(f"n and draw must not be negative, got {n} and {draw}")
    rng = _rng(doc.split, doc.index, doc.n_tokens, 1 + TASKS.index(task), draw)
    return _ask(doc, task, n, rng)


def _rng(split: str, index: int, *more: int) -> Generator:
    if split not in SPLITS:
        raise BadInput(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if index < 0:
        raise BadInput(f"a document's index must not be negative, got {index}")
    return np.random.default_rng([SPLITS[split], index, *more])


def _sample(rng: Generator, words: Sequence[str], n: int) -> list[str]:
    """`n` different ones of `words`, in random order."""
    return [words[i] for i in rng.permutation(len(words))[:n]]


# --- the document's parts --------------------------------------------------------------------


def _draw_attributes(rng: Generator, n: int) -> dict[str, tuple[str, str]]:
    """Names paired with (kind, value); every kind in use has at least two different values."""
    kinds = _sample(rng, tuple(ATTRIBUTES), max(1, min(len(ATTRIBUTES), n // 4)))
    values = {kind: _sample(rng, ATTRIBUTES[kind], len(ATTRIBUTES[kind])) for kind in kinds}
    facts = {}
    for i, name in enumerate(_sample(rng, NAMES, n)):
        kind = kinds[i % len(kinds)]
        of_kind = values[kind]
        facts[name] = (kind, of_kind[(i // len(kinds)) % len(of_kind)])
    return facts


def _draw_filler(rng: Generator, n_words: int) -> tuple[list[str], dict[str, int]]:
    """Sentences of `n_words` in all, and how many words each theme has.

    The next sentence always goes to the theme furthest behind its wanted share.
    """
    ratio = rng.uniform(*_THEME_RATIO)
    weights = [ratio**-rank for rank in range(len(THEMES))]
    wanted = dict(
        zip(_sample(rng, tuple(THEMES), len(THEMES)), np.array(weights) / sum(weights), strict=True)
    )
    count = dict.fromkeys(THEMES, 0)
    sentences = []
    for length in _sentence_lengths(rng, n_words):
        done = sum(count.values()) + length
        theme = max(THEMES, key=lambda t: wanted[t] * done - count[t])
        count[theme] += length
        sentences.append(" ".join(_sample(rng, THEMES[theme], length)))
    return sentences, count


def _sentence_lengths(rng: Generator, n_words: int) -> list[int]:
    """Lengths of 3 to 7 words that add up to `n_words`, which is at least 3."""
    shortest, longest = FILLER_WORDS
    assert n_words >= shortest, "the document has no room for filler"
    lengths = []
    while n_words > longest:
        # leave at least one whole sentence behind
        length = int(rng.integers(shortest, min(longest, n_words - shortest) + 1))
        lengths.append(length)
        n_words -= length
    return [*lengths, n_words]


def _demonstration_tasks(rng: Generator, n_tokens: int) -> list[str]:
    """Which task each demonstration shows; never the diffuse one, whose few possible questions
    could then be answered from a demonstration."""
    n = min(N_DEMONSTRATIONS, (n_tokens - MIN_TOKENS) // 48)
    shown = (["rte", "copa"] * N_DEMONSTRATIONS)[:n]
    rng.shuffle(shown)
    return shown


def _with_demonstrations(body: Document, tasks: list[str], rng: Generator) -> Document:
    """`body` followed by one answered question for each of `tasks`."""
    tokens = list(body.tokens)
    subjects: set[str] = set()
    pools = {task: list(_ask(body, task, tasks.count(task), rng)) for task in dict.fromkeys(tasks)}
    for task in tasks:
        shown = pools[task].pop()
        tokens += [*shown.tokens, shown.answer]
        subjects.add(shown.subject)
    return Document(
        split=body.split,
        index=body.index,
        tokens=tuple(tokens),
        attributes=body.attributes,
        causes=body.causes,
        theme_words=body.theme_words,
        demonstrated=frozenset(subjects),
    )


# --- questions -------------------------------------------------------------------------------


def _ask(doc: Document, task: str, n: int, rng: Generator) -> tuple[Question, ...]:
    if task == "diffuse":
        pairs = _askable_themes(doc)
        return tuple(_ask_diffuse(doc, pairs[i]) for i in rng.permutation(len(pairs))[:n])
    facts = doc.attributes if task == "rte" else doc.causes
    subjects = [subject for subject, _ in facts if subject not in doc.demonstrated]
    ask = _ask_rte if task == "rte" else _ask_copa
    return tuple(ask(doc, subject, rng) for subject in _sample(rng, subjects, n))


def _ask_rte(doc: Document, name: str, rng: Generator) -> Question:
    attributes = dict(doc.attributes)
    kind, value = attributes[name]
    entailed = bool(rng.integers(2))
    if not entailed:
        others = sorted({v for k, v in attributes.values() if k == kind and v != value})
        value = others[rng.integers(len(others))]
    answer = "yes" if entailed else "no"
    return _question("rte", f"claim {kind} {value} for {name}", answer, ("yes", "no"), name)


def _ask_copa(doc: Document, cause: str, rng: Generator) -> Question:
    causes = dict(doc.causes)
    effect = causes[cause]
    others = sorted(set(causes.values()) - {effect})
    pair = [effect, others[rng.integers(len(others))]]
    rng.shuffle(pair)
    text = f"choose {pair[0]} or {pair[1]} after {cause}"
    return _question("copa", text, effect, tuple(pair), cause)


def _askable_themes(doc: Document) -> list[tuple[str, str]]:
    """Ordered pairs of themes whose word counts differ clearly enough to have an answer."""
    count = dict(doc.theme_words)
    return [
        (a, b)
        for a, b in permutations(THEMES, 2)
        if max(count[a], count[b]) >= _MIN_RATIO * min(count[a], count[b]) + 1
    ]


def _ask_diffuse(doc: Document, pair: tuple[str, str]) -> Question:
    count = dict(doc.theme_words)
    answer = max(pair, key=lambda theme: count[theme])
    return _question("diffuse", f"mostly {pair[0]} or {pair[1]}", answer, pair, " ".join(pair))


def _question(
    task: str, text: str, answer: str, candidates: tuple[str, ...], subject: str
) -> Question:
    [answer_id] = encode(answer)
    options = tuple(encode(" ".join(candidates)))
    return Question(task, tuple(encode(text)), answer_id, options, text, subject)
