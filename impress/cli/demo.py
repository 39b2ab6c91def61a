"""`impress demo`: all of it at work on the spot, with a model made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from impress.cli.options import a_file, check_json, directory
from impress.config import expanded


def demo(
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", parser=directory, help="Directory for all that the demo makes."
        ),
    ] = Path("demo-out"),
    quick: Annotated[
        bool, typer.Option("--quick", help="2 documents per model and a few questions.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            parser=a_file,
            help="Write figures, rows and conditions to FILE; - prints them, and the rest goes "
            "to stderr.",
        ),
    ] = None,
) -> None:
    """See it work: prefixes are stored, then read back by a new process, whole or in part.

    First act: a Llama-style model with random weights and 8 documents of about 1,500 tokens from
    Python's own documentation. One process computes and stores them; a new one answers questions
    about them in three ways, in varying order: by recomputing the whole prompt, from SSD (copies
    in RAM dropped first), and from DRAM. The weights are random, so the answers are noise; the
    point is that all three ways give the same noise, and how soon the first token comes.

    Second act: two small models, trained to look things up in documents they have never seen, so
    that answers are right or wrong. Each of 8 documents has 45 questions, answered by recomputing,
    from all rows (exact) and from the rows that the policies paper and quality choose, every hit
    from a cold SSD. It shows how many answers are right, and how much was read for them.

    Third act: the stores are repacked by what was chosen, and other questions are asked. All three
    acts take five minutes on two quick cores, up to a quarter of an hour on slow ones.

    Everything is left under DIR (models, documents, stores) to look at; running again starts over.

    **Exit status**

    0 every answer from all rows agreed · 1 one did not · 2 it could not run

    **Examples**

    impress demo --quick

    impress demo --dir /tmp/demo --json figures.json
    """
    from impress.demo.story import tell

    check_json(json_file)
    if not tell(expanded(folder, "--dir"), quick=quick, json_file=json_file):
        raise typer.Exit(1)
