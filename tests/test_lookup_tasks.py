"""The lookup tasks: the answers to a document's questions follow from what it says."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impress.demo.lookup.tasks import (
    SPLITS,
    TASKS,
    Document,
    Question,
    document,
    questions,
)
from impress.demo.lookup.tokenizer import N_TOKENS, decode, encode
from impress.demo.lookup.words import THEMES, VOCABULARY
from impress.errors import BadInput

ANY_DOCUMENT = st.builds(
    document,
    st.sampled_from(sorted(SPLITS)),
    st.integers(0, 1 << 40),
    st.integers(64, 1500),
)


class Solver:
    """Answers from the words of a document alone: it reads text, not the generator's records."""

    def __init__(self, doc: Document) -> None:
        text = decode(doc.tokens)
        body = re.split(r" (?=claim |choose |mostly )", text)[0]
        self.facts = set(re.findall(r"\w+ \w+ for \w+", body))
        self.effects = {c: e for e, c in re.findall(r"then (\w+) after (\w+)", body)}
        self.said = set(body.split())
        words = body.split()
        self.n_words = {theme: sum(map(words.count, of)) for theme, of in THEMES.items()}
        self.demonstrations = re.split(r" (?=claim |choose |mostly )", text)[1:]

    def answer(self, question: str) -> str:
        match question.split():
            case ["claim", *fact]:
                return "yes" if " ".join(fact) in self.facts else "no"
            case ["choose", first, "or", second, "after", cause]:
                effect = self.effects[cause]
                assert effect in (first, second)
                return effect
            case ["mostly", first, "or", second]:
                assert self.n_words[first] != self.n_words[second]
                return max(first, second, key=lambda theme: self.n_words[theme])
        raise AssertionError(f"not a question: {question}")


def every_question(doc: Document) -> list[Question]:
    return [q for task in TASKS for q in questions(doc, task, 100)]


@settings(max_examples=60)
@given(ANY_DOCUMENT)
def test_answers_follow_from_the_words_of_the_document(doc: Document) -> None:
    solver = Solver(doc)
    for q in every_question(doc):
        assert decode(q.tokens) == q.text
        assert decode([q.answer]) == solver.answer(q.text)
        assert q.answer in q.candidates and len(set(q.candidates)) == 2


@settings(max_examples=60)
@given(ANY_DOCUMENT)
def test_demonstrations_are_answered_rightly_and_never_asked_again(doc: Document) -> None:
    solver = Solver(doc)
    for shown in solver.demonstrations:
        question, _, answer = shown.rpartition(" ")
        assert solver.answer(question) == answer
    asked = {q.subject for q in every_question(doc) if q.task != "diffuse"}
    assert not asked & doc.demonstrated


@settings(max_examples=60)
@given(ANY_DOCUMENT)
def test_false_values_and_wrong_effects_occur_in_the_document(doc: Document) -> None:
    solver = Solver(doc)
    for q in every_question(doc):
        if q.task == "rte":
            assert q.text.split()[2] in solver.said
        if q.task == "copa":
            assert {decode([c]) for c in q.candidates} <= solver.said


@pytest.mark.parametrize("n_tokens", [64, 65, 511, 512, 1024, 2048])
def test_a_document_has_exactly_the_length_asked_for(n_tokens: int) -> None:
    assert document("test", 0, n_tokens).n_tokens == n_tokens


@pytest.mark.parametrize("n_tokens", [512, 1024, 2048])
def test_served_lengths_have_eight_demonstrations_and_enough_questions(n_tokens: int) -> None:
    for index in range(20):
        doc = document("test", index, n_tokens)
        assert len(Solver(doc).demonstrations) == 8
        counts = [len(questions(doc, task, n)) for task, n in zip(TASKS, (20, 20, 5), strict=True)]
        assert counts == [20, 20, 5]


def test_sentences_have_the_lengths_promised() -> None:
    """Facts of four words; runs of filler are whole sentences of at least three words."""
    text = decode(document("test", 3, 2048).tokens)
    body = re.split(r" (?=claim |choose |mostly )", text)[0].removeprefix("<s> ")
    theme_of = {word: theme for theme, words in THEMES.items() for word in words}
    facts = re.findall(r"\w+ \w+ for \w+|then \w+ after \w+", body)
    assert len(facts) == 96
    runs = re.split(r"(?:\w+ \w+ for \w+|then \w+ after \w+)", body)
    for run in (run.split() for run in runs):
        assert all(word in theme_of for word in run)
        changes = sum(theme_of[a] != theme_of[b] for a, b in pairwise(run))
        assert len(run) >= 3 * (changes + 1) or not run


def test_the_same_seed_gives_the_same_document_and_questions() -> None:
    first, second = (document("test", 7, 512) for _ in range(2))
    assert first == second
    assert every_question(first) == every_question(second)
    assert questions(first, "rte", 5, draw=1) != questions(first, "rte", 5)


def test_splits_share_no_document_and_no_pairing() -> None:
    docs = [document(split, index, 512) for split in SPLITS for index in range(30)]
    assert len({doc.tokens for doc in docs}) == len(docs)
    assert len({frozenset(doc.attributes) for doc in docs}) == len(docs)
    assert len({frozenset(doc.causes) for doc in docs}) == len(docs)


def test_nothing_can_be_answered_without_the_document() -> None:
    """Answers are balanced, by word and by place in the question."""
    for task in TASKS:
        asked = [q for i in range(60) for q in questions(document("test", i, 512), task, 20)]
        first = sum(q.answer == q.candidates[0] for q in asked) / len(asked)
        assert 0.4 < first < 0.6, (task, first)


@given(st.lists(st.sampled_from(VOCABULARY)))
def test_the_tokenizer_round_trips(words: list[str]) -> None:
    ids = encode(" ".join(words))
    assert decode(ids).split() == words
    assert encode(decode(ids)) == ids
    assert all(0 <= i < N_TOKENS for i in ids)


def test_what_cannot_be_is_refused_by_name() -> None:
    doc = document("test", 0, 64)
    with pytest.raises(BadInput, match="unicorn"):
        encode("claim unicorn")
    with pytest.raises(BadInput, match="token id"):
        decode([N_TOKENS])
    with pytest.raises(BadInput, match="split"):
        document("holdout", 0, 64)
    with pytest.raises(BadInput, match="n_tokens"):
        document("test", 0, 63)
    with pytest.raises(BadInput, match="index"):
        document("test", -1, 64)
    with pytest.raises(BadInput, match="task"):
        questions(doc, "squad", 1)
    with pytest.raises(BadInput, match="negative"):
        questions(doc, "rte", -1)
