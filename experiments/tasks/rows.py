"""Where rows come from: files of one JSON object a line, or the Hugging Face hub by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from experiments.tasks.formats import FORMATS, Format, Item
from impress.errors import BadInput

#: What the file of a split may be called, without .jsonl; the first that exists is used.
_SPLITS: Final = {
    "train": ("train",), "validation": ("val", "validation", "dev"), "test": ("test",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """A task's questions; `train` is empty where the data has no such split.

    `asked`: those of the `split` that lm-eval asks: for OpenBookQA test, if the data has it.
    """

    task: str
    train: tuple[Item, ...]
    asked: tuple[Item, ...]
    split: str = "validation"


def load(task: str, data: str) -> Rows:
    """Every question of a task. `data`: a folder of train.jsonl and val.jsonl (OpenBookQA:
    test.jsonl else val.jsonl), one file with the questions to ask, or the name of a data set on the
    Hugging Face hub (needs `datasets`).

    Raises BadInput naming file, line and field of a row that is malformed, or what is missing.
    """
    form = FORMATS.get(task)
    if form is None:
        raise BadInput(f"task must be one of {', '.join(FORMATS)}, got {task!r}")
    path = Path(data)
    if path.is_file():
        if not (rows := tuple(_of_file(path, form))):
            raise BadInput(f"{path}: no rows")
        return Rows(task, (), rows)
    if path.is_dir():
        train = _of_folder(path, "train", form)
        for split in form.asks:
            if asked := _of_folder(path, split, form):
                return Rows(task, train, asked, split)
        other = ", ".join(f"{name}.jsonl" for split in form.asks for name in _SPLITS[split])
        raise BadInput(f"{path}: no rows to ask: none in any of {other}")
    return _of_hub(task, data, form)


def _of_folder(folder: Path, split: str, form: Format) -> tuple[Item, ...]:
    files = (folder / f"{name}.jsonl" for name in _SPLITS[split])
    file = next((file for file in files if file.is_file()), None)
    return tuple(_of_file(file, form)) if file is not None else ()


def _of_file(file: Path, form: Format) -> Iterator[Item]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        where = f"{file} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())  # UTF-8, whatever this machine's locale says
        except UnicodeDecodeError as err:
            raise BadInput(f"{where}: not UTF-8 at its byte {err.start}") from None
        except (ValueError, RecursionError) as err:  # the latter: thousands of brackets
            raise BadInput(f"{where}: not JSON ({err})") from None
        if not isinstance(row, dict):
            raise BadInput(f"{where}: wants an object with fields, got {type(row).__name__}")
        yield form.parse(row, where)


def _of_hub(task: str, name: str, form: Format) -> Rows:
    if name.startswith((".", "/", "~")) or name.endswith(".jsonl"):
        raise BadInput(f"{name}: no such file or directory")
    if find_spec("datasets") is None:
        raise BadInput(f"{name}: no such path; for a data set of that name, pip install datasets")
    try:
        from datasets import load_dataset
    except ImportError as err:  # of something it needs itself: pyarrow
        raise BadInput(f"{name}: no such path, and datasets cannot be imported ({err})") from None
    try:
        found: Any = load_dataset(name, form.config) if form.config else load_dataset(name)
    except Exception as err:  # not reached, not so arranged, a script: `datasets` has its own
        said = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise BadInput(f"{name}: {said}; or give a folder of train.jsonl and val.jsonl") from None

    def of(split: str) -> tuple[Item, ...]:
        rows = enumerate(found.get(split, ()))
        return tuple(form.parse(row, f"{name} {split} row {i}") for i, row in rows)

    for split in form.asks:
        if asked := of(split):
            return Rows(task, of("train"), asked, split)
    raise BadInput(f"{name}: no {' or '.join(form.asks)} split with rows")
