"""The demo from outside: the acts in order, each a process or two and a table. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from impress.demo import CHECKPOINTS, SEED, SIZES, n_asked
from impress.demo.checkpoints import DOCUMENT_TOKENS, unseen
from impress.demo.figures import Row, figures_of, moved_share
from impress.demo.lookup.tasks import questions
from impress.demo.stage import THREADS, check_installed, lookup_place, prepared, run_step
from impress.demo.tables import choice_table, reuse_table
from impress.report import write_report
from impress.terminal import out, show, size

MODES: Final = ("recompute", "exact", "paper", "quality")


def tell(folder: Path, *, quick: bool, json_file: Path | None) -> bool:
    """Run the whole demo under `folder`; True when every exact answer agreed.

    Raises ImpressError for what is missing or in the way, OSError.
    """
    check_installed()
    which = "quick" if quick else "full"
    started = perf_counter()
    with redirect_stdout(sys.stderr if str(json_file) == "-" else sys.stdout), prepared(folder):
        rows, meta = _reuse(folder, which)
        rows += _choice(folder, which)
        rows += _repacked(folder, which, figures_of(rows))
        figures = figures_of(rows)
        _say_where(folder)
    if json_file is not None:
        threads = {name: os.environ.get(name, value) for name, value in THREADS.items()}
        write_report(
            json_file, figures, rows,
            seed=SEED, quick=quick, **meta, **threads, wall_s=round(perf_counter() - started, 1),
        )  # fmt: skip
    return figures["exact.agreement"] == 1.0


def _reuse(folder: Path, which: str) -> tuple[list[Row], dict[str, Any]]:
    """The first act; its rows, and the conditions of all of them."""
    n_documents = SIZES[which].reuse_documents
    _head("1  What was computed is read back.")
    _say(
        f"A process makes a model with random weights, computes {n_documents} documents and "
        "stores them."
    )
    computed = run_step("compute", folder, which)
    n_questions = n_documents * SIZES[which].reuse_questions
    _say(
        f"{sum(computed['tokens']):,} tokens computed in {computed['seconds']:.0f} s; stored "
        f"{computed['stored_tokens']:,} in whole windows, {size(computed['stored_bytes'])}. "
        f"A new process answers {n_questions} questions, three ways each."
    )
    answered = run_step("answer", folder, which)
    rows: list[Row] = answered["rows"]
    show(reuse_table(rows, figures_of(rows)))
    changed = sum(row["changes_without_prefix"] for row in rows if row["mode"] == "ssd")
    _say(
        "The weights are random, so the answers mean nothing; but without the rows read from the "
        f"store {changed} of {n_questions} would differ. {_reading(answered['direct_io'])}"
    )
    return rows, {
        "model_weights": computed["weights"], "document_tokens": computed["tokens"],
        **{name: answered[name] for name in ("torch_threads", "direct_io", "tiers")},
    }  # fmt: skip


def _reading(direct_io: bool) -> str:
    if direct_io:
        return "SSD reads used O_DIRECT: the page cache had no part in them."
    return "This file system refuses O_DIRECT: the page cache may have served what was read."


def _choice(folder: Path, which: str) -> list[Row]:
    """The second act."""
    asked = SIZES[which]
    n_questions = n_asked(asked, asked.questions)
    out.print()
    _head("2  Only what a question needs is read.")
    _say(
        "Two small trained models look things up in documents they have never seen. A process "
        f"stores {asked.documents} documents of {DOCUMENT_TOKENS:,} tokens for each."
    )
    stored = run_step("store", folder, which)
    _say(
        f"{size(stored['stored_bytes'])} stored in {stored['seconds']:.0f} s. A new process asks "
        f"{n_questions} questions, four ways each, every hit from a cold SSD with nothing in RAM."
    )
    rows: list[Row] = run_step("ask", folder, which)["rows"]
    figures = figures_of(rows)
    show(choice_table(figures, MODES))
    _explain(figures)
    return rows


def _repacked(folder: Path, which: str, before: dict[str, float]) -> list[Row]:
    """The third act."""
    asked = SIZES[which]
    n_questions = n_asked(asked, asked.repacked_questions)
    out.print()
    _head("3  Often-chosen rows are packed side by side.")
    _say(
        "The stores have noted which rows were chosen. A new process repacks them by that, then "
        f"asks {n_questions} new questions (the diffuse task has too few, and repeats some)."
    )
    found = run_step("ask_again", folder, which)
    moved, rows = found["moved"], found["rows"]
    figures = figures_of(rows)
    show(choice_table(figures, MODES, "repacked."))
    moves = ", ".join(
        f"{mode} {100 * moved_share(before, mode):.1f} before and "
        f"{100 * moved_share(figures, f'repacked.{mode}'):.1f} after"
        for mode in ("paper", "quality")
    )
    _say(
        f"{moved['spans']} prefixes rewritten ({size(moved['bytes'])}) in "
        f"{moved['seconds']:.1f} s. Bytes moved for a hit, % of exact's, mean of tasks: {moves}."
    )
    return list(rows)


def _explain(figures: dict[str, float]) -> None:
    masses = [
        f"{mode} {figures[f'{mode}.estimated_missing_mass']:.3f} "
        f"(worst head {figures[f'{mode}.missing_mass_worst_head']:.3f})"
        for mode in ("paper", "quality")
        if f"{mode}.estimated_missing_mass" in figures
    ]
    for line in (
        "agreeing: all heads look at the fact that a question needs. specialised: only heads that "
        "the paper's policy does not read. RTE: is a claim true? COPA: which of two effects? "
        "diffuse: which of two themes has more words, for which every row counts.",
        "as full KV: the same answer as all rows give, right or wrong. fell back: layers loaded "
        "whole because the policy could not choose. rows chosen: of all rows, those layers "
        "included. wanted: chosen rows and the records read to choose them; moved: what left the "
        "SSD for that, pieces being larger than rows; both as % of exact's.",
        f"Estimated missing mass of the worst layer, mean: {', '.join(masses)}.",
        "Times: all of a prefix is 8 MiB here, and bringing that can be quicker than choosing from "
        "it. What this act shows is answers and bytes.",
    ):
        _say(line)


def _say_where(folder: Path) -> None:
    place = lookup_place(folder, CHECKPOINTS[-1])
    question = questions(unseen(1)[0], "copa", 1)[0].text
    impress = command()
    first, last, model, text = (
        shlex.quote(str(path))
        for path in (
            folder / "store", place / "store", place / "model", place / "documents" / "0.txt",
        )
    )  # fmt: skip
    out.print("\nLook at the stores it left, and ask something yourself:", style="bold")
    for line in (
        f"{impress} inspect --store {first}",
        f"{impress} verify --store {first}",
        f"{impress} run --store {last} --model {model} \\\n"
        f"    --prefix {text} --max-new-tokens 1 --policy quality \\\n"
        f'    --query "{question}"',
    ):
        out.print(f"  {line}", markup=False, soft_wrap=True)


def command() -> str:
    """How a shell calls this program again: by its name, where the shell finds it."""
    if shutil.which("impress"):
        return "impress"
    called = Path(sys.argv[0])
    if called.name == "impress":
        return shlex.quote(str(called))
    return f"{shlex.quote(sys.executable)} -m impress"


def _head(text: str) -> None:
    out.print(text, style="bold")


def _say(text: str) -> None:
    lines = textwrap.wrap(text, 100, initial_indent="   ", subsequent_indent="   ")
    out.print("\n".join(lines), soft_wrap=True)
