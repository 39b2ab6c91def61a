"""A published model on a published task as cells of `accuracy`: a few questions a cell.

All questions share one few-shot prefix, which the engine stores once. A question and its choices
are scored after it as in lm-eval: log-likelihood of the choice's tokens. Whether a prompt begins
with a token of its own (OPT's does) is for the tokenizer to say, as in lm-eval since its #3347 and
in the engine. The tokens of the prefix after its last whole window are computed with each question.
Rows are chosen by the question; its choices are continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import impress
from experiments.accuracy_measure import N_DECODED, Prompts, Query, check_stored
from experiments.arms import Arm, probes
from experiments.common import Row, Unable
from experiments.harness import Cell, Options
from experiments.tasks import FORMATS, Drawn, Item, draw, load
from impress.cli.models import loading
from impress.engines import hf
from impress.engines.hf_models import check_family, geometry_of
from impress.policy import Exact, Quality

N_QUICK: Final = 20
_CELL_ITEMS: Final = 10
#: Seconds for one arm on one question, for the estimate only: nothing is known of the model.
_ARM_S: Final = 0.25


class Asking(NamedTuple):
    """A model with its prefix stored, and its questions."""

    prompts: Prompts
    queries: list[Query]


def cells(options: Options, arms: dict[str, Arm]) -> list[Cell]:
    """Questions in runs of a few. Raises BadInput or Unable where data or model are not there."""
    more, where = options.more, Path(options.more.model)
    is_path = where.is_absolute() or more.model.startswith(".") or more.model.count("/") > 1
    if is_path and not where.is_dir():
        raise Unable(f"--model {more.model}: no such folder")
    n_items = more.items
    if n_items is None and options.quick:
        n_items = N_QUICK
    drawn = draw(load(more.task, more.data), more.shots, options.seed, n_items)
    with loading(more.model, "tokenizer does"):
        tokenizer = AutoTokenizer.from_pretrained(more.model, trust_remote_code=False)
        config = AutoConfig.from_pretrained(more.model, trust_remote_code=False)
    check_family(config)
    _check_tokenizer(tokenizer, more.model)
    queries = [query_of(tokenizer, drawn, item, more.task) for item in drawn.items]
    documents = documents_of(drawn.items)
    shared = shared_tokens(queries, tokenizer(drawn.prefix)["input_ids"])
    _check_lengths(queries, shared, config)

    opened: list[Asking | Unable] = []

    def asking() -> Asking:
        if not opened:
            try:
                opened.append(_opened(options, arms, queries, shared))
            except Unable as err:  # for each cell the model would be loaded once more, beside it
                opened.append(err)
        if isinstance(opened[0], Unable):
            raise opened[0]
        return opened[0]

    params = {
        "group": where.name.replace(".", "_"), "task": more.task, "shots": more.shots,
        "items": len(queries), "arms": sorted(arms),
        "model": str(where.resolve()) if where.exists() else more.model,
        "weights": _weights(more.model, config),
        "asked": blake2b(repr(queries).encode(), digest_size=8).hexdigest(),
    }  # fmt: skip
    return [
        Cell({**params, "first": first},
             _measure(asking, documents, range(len(queries))[first : first + _CELL_ITEMS]),
             _ARM_S * _CELL_ITEMS * len(arms))
        for first in range(0, len(queries), _CELL_ITEMS)
    ]  # fmt: skip


def _weights(model: str, config: Any) -> str:
    """What tells these weights from others of the same name: a folder's contents, or on the hub the
    commit."""
    if not Path(model).is_dir():
        return str(getattr(config, "_commit_hash", None) or "")
    with loading(model, "weights do"):
        return impress.namespace_of(model).hex()


def query_of(tokenizer: Any, drawn: Drawn, item: Item, task: str) -> Query:
    """A question after the shared prefix, tokenised as lm-eval does: a choice's tokens are those
    that the prompt with the choice has beyond the prompt alone; white space at the end of the
    prompt belongs to the choice."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text)["input_ids"])

    whole = drawn.prefix + item.context
    prompt = encode(whole.rstrip())
    choices = tuple(encode(whole + choice)[len(prompt) :] for choice in item.choices)
    if not all(choices):
        raise Unable(f"a choice of {item.choices} adds no token to its prompt with this tokenizer")
    lengths = tuple(len(choice) - 1 for choice in item.choices)
    return Query(task, prompt, choices, item.gold, lengths if FORMATS[task].normalised else ())


def _check_tokenizer(tokenizer: Any, model: str) -> None:
    """Raises Unable where a text gets tokens after its own: a choice would come behind them."""
    text = tokenizer("text", add_special_tokens=False)["input_ids"]
    ids = tokenizer("text")["input_ids"]
    if ids[len(ids) - len(text) :] != text:
        raise Unable(
            f"--model {model}: its tokenizer ends a text with tokens of its own, and choices go on "
            "with one: set add_eos_token to false in its tokenizer_config.json"
        )


def documents_of(items: Sequence[Item]) -> list[int]:
    """For each question, the number of the first one about the same thing. Pure."""
    first: dict[str, int] = {}
    return [first.setdefault(item.about, i) for i, item in enumerate(items)]


def shared_tokens(queries: list[Query], shots: Sequence[int]) -> tuple[int, ...]:
    """The tokens of the shots that all prompts begin with, and none of a question: rows are chosen
    by the question. At least one token of each prompt is left to compute."""
    first, last = min(query.prompt for query in queries), max(query.prompt for query in queries)
    n = min(_n_common(first, last), _n_common(first, shots))
    return first[: min(n, *(len(query.prompt) - 1 for query in queries))]


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    least = min(len(one), len(other))
    pairs = zip(one[:least], other[:least], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), least)


def _check_lengths(queries: list[Query], shared: tuple[int, ...], config: Any) -> None:
    window = impress.Config().window
    if len(shared) < window:
        raise Unable(
            f"the shared prefix has {len(shared)} tokens, under a window of {window}: "
            "ask with more --shots"
        )
    most = getattr(config, "max_position_embeddings", None)
    longest = max(len(q.prompt) + max(N_DECODED, *map(len, q.choices)) for q in queries)
    if most is not None and longest > most:
        raise Unable(
            f"the longest prompt and {N_DECODED} tokens after it are {longest} tokens, the model "
            f"takes {most}: ask with fewer --shots"
        )


def _opened(
    options: Options, arms: dict[str, Arm], queries: list[Query], shared: tuple[int, ...]
) -> Asking:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with loading(options.more.model, "weights do"):
        model = AutoModelForCausalLM.from_pretrained(
            options.more.model, dtype="auto", trust_remote_code=False
        )
    model = model.to(device).eval()
    config = impress.Config(  # rows stay in the order of the importance at storing
        probes=probes(arms), dram_bytes=0, mode="sparse", durable=False, repack_every_s=0.0,
    )  # fmt: skip
    need = 3 * len(shared) * geometry_of(model.config, model.dtype).token_bytes
    config = config.model_copy(update={"disk_bytes": max(need, 4 * config.segment_bytes)})
    engine = hf.attach(model, options.folder / "store", Quality(), config=config)
    options.exits.enter_context(engine)
    ids = torch.tensor([shared], device=device)
    engine.generate(ids, max_new_tokens=1, policy=Exact())
    check_stored(engine)
    return Asking(Prompts(model, engine.store, arms, shared), queries)


def _measure(
    asking: Callable[[], Asking], documents: Sequence[int], items: range
) -> Callable[[], list[Row]]:
    def measure() -> list[Row]:
        prompts, queries = asking()
        return [{"document": documents[i], **prompts.ask(queries[i])} for i in items]

    return measure
