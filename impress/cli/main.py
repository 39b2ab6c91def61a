"""`impress`: inspect and verify a store, run a model over it, see the whole thing in a demo."""

from __future__ import annotations

from typing import Annotated

import typer

from impress import __version__
from impress.cli.demo import demo
from impress.cli.doctor import doctor
from impress.cli.inspect import inspect
from impress.cli.options import fail, one_line
from impress.cli.rebuild import rebuild
from impress.cli.run import run as run_model
from impress.cli.verify import verify

app = typer.Typer(
    name="impress",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done; 1 it ran and found something wrong; 2 it could not run "
    "(bad arguments, no store, no permission, disk full, interrupted), and stderr says why.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"impress {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A prefix-KV store for language models: a prompt's keys and values, computed once, reused
    exactly by every later prompt that begins alike, from SSD or RAM, after a restart too.

    Start with **impress demo**; look at any store with **impress inspect**.
    Every command has its own --help."""


for command in (demo, run_model, inspect, verify, rebuild, doctor):
    app.command(command.__name__, no_args_is_help=False)(one_line(command))


def run() -> None:
    """Entry point of the console script. Ends the process."""
    try:
        app()
    except KeyboardInterrupt:
        fail("interrupted")


if __name__ == "__main__":
    run()
