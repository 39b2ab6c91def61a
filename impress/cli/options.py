"""What all commands share: common options, how they fail, how they print JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from impress.cli.owner import become_owner, whose
from impress.config import MOST_BYTES, Config, default_store_dir, expanded, in_full
from impress.errors import BadInput, FormatError, StoreFailed
from impress.policy import Exact, Paper, Policy, Quality
from impress.report import write_json
from impress.terminal import line_of, printable
from impress.write.directory import read_identity

P = ParamSpec("P")
_STDIN = Path("/dev/stdin")


def directory(given: str) -> Path:
    """Refuses an empty name: from an unset variable, it would mean the current directory."""
    if not given:
        raise typer.BadParameter("it is empty: name a directory")
    return Path(given)


def a_file(given: str) -> Path:
    """The same for a file."""
    if not given:
        raise typer.BadParameter("it is empty: name a file")
    return Path(given)


def a_prompt(given: str) -> Path:
    """A file for `text_of`; - is stdin."""
    return _STDIN if given == "-" else a_file(given)


def text_of(file: Path) -> str:
    """A file's text. Stdin is read from the open descriptor: reopening it may be refused, as for
    another user's pipe or a socket. Raises OSError, UnicodeDecodeError."""
    if file != _STDIN:
        return file.read_bytes().decode()  # unchanged: its line ends are tokens
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read().decode()


Store = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        parser=directory,
        help="The store's directory.",
        show_default="$IMPRESS_STORE, else impress/store in the user's cache directory",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
DiskGib = Annotated[
    int | None,
    typer.Option(
        "--disk-gib", min=1, max=MOST_BYTES >> 30,
        help="Most GiB on disk for the shard (the part of DIR) that this process writes; files "
        "already there do not shrink.",
        show_default="all there is",
    ),
]  # fmt: skip
PolicyName = Annotated[
    str,
    typer.Option("--policy", metavar="NAME", help="What of a hit to load: exact, paper, quality."),
]
PolicyAsked = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="NAME", show_default="quality",
        help="What of a hit to load: exact, paper, quality. Needs --query.",
    ),
]  # fmt: skip
Keep = Annotated[
    float | None,
    typer.Option("--keep", metavar="SHARE", help="paper: share of the tokens to keep."),
]
MissingMass = Annotated[
    float | None,
    typer.Option(
        "--max-missing-mass", metavar="MASS", help="quality: most attention a layer may miss."
    ),
]


def policy_of(name: str, keep: float | None, mass: float | None) -> Policy:
    """The policy of these options. Raises BadInput where they do not go together."""
    if keep is not None and name != "paper":
        raise BadInput(f"--keep goes with --policy paper, not {name}")
    if mass is not None and name != "quality":
        raise BadInput(f"--max-missing-mass goes with --policy quality, not {name}")
    if name == "exact":
        return Exact()
    if name == "paper":
        return Paper() if keep is None else Paper(keep=keep)
    if name == "quality":
        return Quality() if mass is None else Quality(max_missing_mass=mass)
    raise BadInput(f"--policy {name}: want exact, paper or quality")


def store_dir(given: Path | None) -> Path:
    """The store that is meant. Raises BadInput, ConfigError where that cannot be told."""
    return expanded(given if given is not None else default_store_dir(), "--store")


def window_of(store: Path) -> int:
    """A readable store's window, else the default: opening the store says why it is unreadable."""
    with suppress(FormatError, StoreFailed):
        return read_identity(store).window
    return Config().window


def fail(line: str) -> NoReturn:
    """One line on stderr and exit status 2, even where stderr does not take the line."""
    complain(f"impress: {' '.join(line.split())}")
    _leave(2)


def complain(line: str) -> None:
    """Print to stderr if it takes the line; a full disk or a closed terminal does not.

    A line may have names in it, and what lock files or another program's port say."""
    with suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def _leave(status: int) -> NoReturn:
    """End the process; what an output refused is not tried again at exit."""
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    raise SystemExit(status)


def one_line(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with any mistake of the user or the environment reported in one line."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            try:
                _check_texts(kwargs)
                command(*args, **kwargs)
            finally:
                sys.stdout.flush()  # here, where a full disk can still be reported
        except KeyboardInterrupt:
            fail("interrupted")
        except BrokenPipeError:  # the reader of stdout closed the pipe
            _leave(2)
        except Exception as error:
            line = line_of(error)
            if line is None and whose() and isinstance(error, ImportError):
                line = str(error)
            if line is None:  # a bug: its traceback is what a report needs
                raise
            fail(line + whose())

    return guarded


def by_owner(command: Callable[P, None]) -> Callable[P, None]:
    """The command; started by root, it reads and writes everything as the store's owner."""

    @wraps(command)
    def owned(*args: P.args, **kwargs: P.kwargs) -> None:
        given: Any = kwargs["store"]
        kwargs["store"] = where = store_dir(given)  # while ~ is still the caller's home
        become_owner(in_full(where))
        command(*args, **kwargs)

    return owned


def _check_texts(options: Mapping[str, object]) -> None:
    """Raises BadInput for a text whose bytes are not UTF-8: such text is never hashed or tokenised.
    A path may have any bytes."""
    for name, value in options.items():
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise BadInput(f"--{name.replace('_', '-')}: not UTF-8 text") from None


def print_json(value: Any) -> None:
    """One object, with keys in the order given."""
    write_json("-", value)


def check_json(file: Path | None) -> None:
    """Raises BadInput where --json's FILE cannot be written: before the work, not after it.

    An existing file is not written into: another takes its place.
    """
    if file is None or str(file) == "-":
        return
    if str(file).startswith("-"):  # `--json --dry-run`: the option would be taken for the file
        raise BadInput(f"--json wants a FILE before {file}, or - for stdout")
    if file.is_dir():
        raise BadInput(f"--json {file}: a directory; name a file, or - for stdout")
    dangles = file.is_symlink() and not file.exists()
    there = Path(os.path.realpath(file)) if dangles else in_full(file)
    if dangles and there.is_symlink():
        raise BadInput(f"--json {file}: a link that leads to itself; name another file")
    folder = there.parent
    if not folder.is_dir():
        raise BadInput(f"--json {file}: no such folder")
    into = file.exists() and (file.is_symlink() or not file.is_file())
    if not os.access(file if into else folder, os.W_OK):
        raise BadInput(f"--json {file}: cannot be written; name another file, or - for stdout")
