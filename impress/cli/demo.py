"""`impress demo`: the whole thing on the spot, with a model made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", readable=False, help="Where the demo puts what it makes."
        ),
    ] = Path("demo-out"),
    quick: Annotated[
        bool, typer.Option("--quick", help="2 documents with 2 questions each, instead of 8 × 3.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            readable=False,
            help="Write figures, rows and conditions to FILE.",
        ),
    ] = None,
) -> None:
    """See it work: documents computed and stored, then answered from disk by a new process.

    Makes a Llama-style model with random weights and a tokenizer, and takes 8 documents of about
    1,500 tokens from Python's own documentation. One process computes and stores them. A new
    process then answers questions on them three ways, in turns: recomputing all of the prompt,
    from SSD (RAM dropped first), and from DRAM. It compares the answers token by token and prints
    the time to the first token. The weights are random, so the answers are noise; that they are
    the same noise is the point. A minute or two on two cores.

    Everything is left under DIR (model, documents, store) to look at; running again starts over.

    **Exit status**

    0 every answer agreed · 1 one did not · 2 it could not run

    **Examples**

    impress demo --quick

    impress demo --dir /tmp/demo --json figures.json
    """
    from impress.demo.story import tell

    if not tell(folder, quick=quick, json_file=json_file):
        raise typer.Exit(1)
