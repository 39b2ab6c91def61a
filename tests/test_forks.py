"""Forks that take the place of processes: what one that is cut off leaves to the next."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import forks
import pytest

HAS = ("json",)
GOES_ON = "import os, signal, sys\nos.kill(int(sys.argv[1]), signal.SIGUSR1)\nsignal.pause()"


class Struck(BaseException):
    """As pytest's own limit strikes."""


@pytest.fixture(autouse=True)
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork of GOES_ON strikes this process. Servers of other tests stay as they are."""

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise Struck

    monkeypatch.setattr(forks, "_server", cache(forks._Server))
    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_gone(came: int) -> bool:
    """Whether nobody has the other end of a pipe: waits for that, a minute at most; closes it."""
    with os.fdopen(came, "rb") as file:
        return bool(select.select([file], [], [], 60)[0]) and not file.read()


@pytest.mark.parametrize("error", [TimeoutError, Struck])
def test_a_fork_that_is_cut_off_is_killed_and_the_next_has_its_own_end(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """It ran on, and each one after it was told how the one before had ended, and said nothing."""
    assert forks.python("print('x')", has=HAS).stdout == "x\n"
    came, go = os.pipe()
    with monkeypatch.context() as patch, open(go, "w") as out, pytest.raises(error):
        if error is TimeoutError:
            patch.setattr(forks, "_LIMIT_S", 0.01)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        forks.python(GOES_ON, str(os.getpid()), has=HAS, stdout=out)
    assert is_gone(came)
    done = forks.python("print('x')", has=HAS)
    assert (done.returncode, done.stdout) == (0, "x\n")


def test_a_fork_that_goes_on_keeps_nobody_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest waited at its end for a command that hung."""
    monkeypatch.setattr(forks, "_END_S", 0)
    server, (came, go) = forks._Server(*HAS), os.pipe()
    told = [GOES_ON, ["-c", str(os.getpid())], str(Path.cwd()), dict(os.environ)]
    with open(go, "w") as out, pytest.raises(Struck):
        server.status(json.dumps(told).encode(), [out.fileno()] * 3)
    server.end()
    assert is_gone(came)
