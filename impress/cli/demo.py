"""`impress demo`: the whole thing on the spot, with a model made for it."""

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
            "--dir", metavar="DIR", parser=directory, help="Where the demo puts what it makes."
        ),
    ] = Path("demo-out"),
    quick: Annotated[
        bool, typer.Option("--quick", help="2 documents a model and a few questions.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            parser=a_file,
            help="Write figures, rows and conditions to FILE; - prints them, and the story goes "
            "to stderr.",
        ),
    ] = None,
) -> None:
    """See it work: prefixes computed and stored, then read back by a new process, whole or in part.

    First act: a Llama-style model with random weights and 8 documents of about 1,500 tokens from
    Python's own documentation. One process computes and stores them; a new one answers questions
    on them three ways, in turns: recomputing all of the prompt, from SSD (RAM dropped first), and
    from DRAM. The weights are random, so the answers are noise; that they are the same noise is
    the point, and the time to the first token.

    Second act: two small models, trained to look things up in documents they have never seen, so
    that answers are right or wrong. 8 documents with 45 questions each, answered recomputing, from
    all rows (exact) and from those that the policies paper and quality choose, each time from a
    cold SSD: how many are right, and how much was read for them.

    Third act: the stores are repacked by what was chosen, and other questions asked. All of it
    takes five minutes on two quick cores, up to a quarter of an hour on slow ones.

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
