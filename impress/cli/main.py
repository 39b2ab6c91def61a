"""`impress`: look into a store, verify it, run a model over it, see it all in a demo."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from impress import __version__
from impress.cli.demo import demo
from impress.cli.doctor import doctor
from impress.cli.explain import explain
from impress.cli.inspect import inspect
from impress.cli.options import by_owner, fail, one_line
from impress.cli.purge import purge
from impress.cli.rebuild import rebuild
from impress.cli.repack import repack
from impress.cli.run import run as run_model
from impress.cli.verify import verify
from impress.cli.vllm_config import vllm_config
from impress.terminal import line_of, stopped_as_by_ctrl_c

#: Typer's base class of every complaint about arguments; it exports only subclasses of it.
_WRONG_USE: Final[type[Exception]] = typer.BadParameter.__mro__[1]

#: What `vllm-config` prints if it fails. A shell passes on what "$(impress vllm-config …)" printed
#: all the same: nothing would mean no connector to vLLM, and no input to jq; this both refuse.
_NO_JSON: Final = b"impress-vllm-config-failed\n"

app = typer.Typer(
    name="impress",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done; 1 it ran and found something wrong; 2 it could not run "
    "(bad arguments, no store, no permission, no room for its files, interrupted), and stderr says "
    "why.",
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
    """A prefix-KV store for language models: a prompt's keys and values are computed once, then
    reused exactly by every later prompt that begins alike, from SSD or RAM, even after a restart.

    Start with **impress demo**; look at any store with **impress inspect**.
    Every command has its own --help."""


_COMMANDS = (
    demo,
    run_model,
    inspect,
    explain,
    verify,
    rebuild,
    purge,
    doctor,
    repack,
    vllm_config,
)
_WITHOUT_A_STORE = (demo, vllm_config)  # the demo makes its own, the other opens none
for command in _COMMANDS:
    owned = command if command in _WITHOUT_A_STORE else by_owner(command)
    app.command(command.__name__.replace("_", "-"), no_args_is_help=False)(one_line(owned))


def run() -> None:
    """Entry point of the console script. Ends the process."""
    try:
        _run()
    except SystemExit as end:
        if end.code and _called() == " vllm-config":
            with suppress(OSError):
                os.write(1, _NO_JSON)
        raise


def _run() -> None:
    _fill_closed()
    if isinstance(sys.stdout, TextIOWrapper):  # Latin-1 has no dash; stderr escapes by itself
        sys.stdout.reconfigure(errors="replace")
    try:
        with stopped_as_by_ctrl_c():
            status = app(standalone_mode=not sys.argv[1:])  # without arguments: the help
    except KeyboardInterrupt:
        fail("interrupted")
    except _WRONG_USE as wrong:
        fail(_said(wrong))
    except OSError as error:  # from the help: commands report their own errors
        fail(str(line_of(error)))
    except Exception:  # a bug: 1 would say that a command found something
        traceback.print_exc()
        raise SystemExit(2) from None
    except SystemExit as end:  # 1: the reader of the help or version closed the pipe
        raise SystemExit(2 if end.code == 1 else end.code) from None
    if status == 130:  # interrupted before a command began
        fail("interrupted")
    raise SystemExit(status)


def _fill_closed() -> None:
    """Open /dev/null in place of any standard stream that was closed before we started: otherwise
    a store's files take its number, and what any library or child prints goes into them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(opened, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # without stderr, print() would use stdout
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _said(wrong: Any) -> str:
    """What was wrong with the arguments, and where the right ones are described."""
    path = wrong.ctx.command_path if wrong.ctx is not None else f"impress{_called()}"
    said = wrong.format_message().rstrip(".")
    return f"{said}{' See' if said.endswith('?') else '; see'} {path} --help"


def _called() -> str:
    """The command's name, for a complaint that does not say which command it is about."""
    names = {command.__name__.replace("_", "-") for command in _COMMANDS}
    return next((f" {word}" for word in sys.argv[1:2] if word in names), "")


if __name__ == "__main__":
    run()
