"""Rows of a task as questions: the prompts of EleutherAI's lm-evaluation-harness, word for word.

From its task files super_glue/rte, super_glue/copa, piqa and openbookqa. A choice follows its
context after one space, which belongs to the choice (for COPA, two in the harness since 0.4: its
task and its default put one each). Rows come as SuperGLUE and Hugging Face have
them, or, for PIQA and OpenBookQA, in llm-foundry's form (query, choices, gold).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from impress.errors import BadInput


@dataclass(frozen=True, slots=True)
class Item:
    """One question: text before the answer, the continuations to choose among, the right one.

    `about`: equal for questions about the same thing, which are not independent.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    about: str


@dataclass(frozen=True, slots=True)
class Format:
    """How one task's rows become questions. `normalised`: lm-eval reports acc_norm too.

    `config`: the data set's configuration on the Hugging Face hub, None for its only one. `asks`:
    the splits that lm-eval asks, the first that exists is used.
    """

    parse: Callable[[Mapping[str, Any], str], Item]
    normalised: bool
    config: str | None
    asks: tuple[str, ...] = ("validation",)


def _rte(row: Mapping[str, Any], where: str) -> Item:
    names = ("entailment", "not_entailment")
    label = row.get("label")
    gold = names.index(label) if label in names else _index(row, "label", 2, where)
    premise, hypothesis = _text(row, "premise", where), _text(row, "hypothesis", where)
    context = f"{premise}\nQuestion: {hypothesis} True or False?\nAnswer:"
    return Item(context, (" True", " False"), gold, premise)


def _copa(row: Mapping[str, Any], where: str) -> Item:
    connectors = {"cause": "because", "effect": "therefore"}
    asked = _text(row, "question", where)
    if asked not in connectors:
        raise BadInput(f"{where}: field 'question' must be 'cause' or 'effect', got {asked!r}")
    premise = _text(row, "premise", where)
    context = f"{premise.strip()[:-1]} {connectors[asked]}"
    offered = [_text(row, name, where) for name in ("choice1", "choice2")]
    choices = tuple(f" {text[0].lower()}{text[1:]}" for text in offered)  # it ends a sentence
    return Item(context, choices, _index(row, "label", 2, where), premise)


def _piqa(row: Mapping[str, Any], where: str) -> Item:
    if "query" in row:
        context = _text(row, "query", where).rstrip("\n") + "\nAnswer:"
        return _chosen(context, row, where)
    choices = tuple(f" {_text(row, name, where)}" for name in ("sol1", "sol2"))
    context = f"Question: {_text(row, 'goal', where)}\nAnswer:"
    return Item(context, choices, _index(row, "label", 2, where), context)


def _openbookqa(row: Mapping[str, Any], where: str) -> Item:
    if "query" in row:
        return _chosen(_text(row, "query", where), row, where)
    offered = row.get("choices")
    if not isinstance(offered, Mapping):
        raise BadInput(f"{where}: field 'choices' must hold 'text' and 'label', got {offered!r}")
    texts, labels = _texts(offered, "text", where), _texts(offered, "label", where)
    if len(labels) != len(texts):
        said = f"{len(texts)} 'text' and {len(labels)} 'label'"
        raise BadInput(f"{where}: field 'choices' must hold as many of both, got {said}")
    key = _text(row, "answerKey", where).strip()
    if key not in labels:
        raise BadInput(f"{where}: field 'answerKey' must be one of {list(labels)}, got {key!r}")
    choices = tuple(f" {text}" for text in texts)
    context = _text(row, "question_stem", where)
    return Item(context, choices, labels.index(key), context)


FORMATS: Final[dict[str, Format]] = {
    "rte": Format(_rte, False, "rte"),
    "copa": Format(_copa, False, "copa"),
    "piqa": Format(_piqa, True, None),
    "openbookqa": Format(_openbookqa, True, "main", ("test", "validation")),
}


# ---- fields ------------------------------------------------------------------------------------


def _chosen(context: str, row: Mapping[str, Any], where: str) -> Item:
    """llm-foundry's form: choices and the index of the right one."""
    choices = tuple(f" {text}" for text in _texts(row, "choices", where))
    return Item(context, choices, _index(row, "gold", len(choices), where), context)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not _is_text(value):
        raise BadInput(f"{where}: field {name!r} must be text, got {value!r}")
    return value


def _texts(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    values = row.get(name)
    if not isinstance(values, list | tuple) or len(values) < 2 or not all(map(_is_text, values)):
        raise BadInput(f"{where}: field {name!r} must be a list of at least two texts")
    return tuple(values)


def _is_text(value: Any) -> TypeGuard[str]:
    """Not blank, and no half of a surrogate pair in it: JSON may hold one, tokenizers take none."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _index(row: Mapping[str, Any], name: str, below: int, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise BadInput(f"{where}: field {name!r} must be an int in 0..{below - 1}, got {value!r}")
    return value
