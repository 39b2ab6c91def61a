"""Processes that are forks of one that has imported what they need.

Each has its own arguments, environment, directory, files and exit status, as one that is started
has. Only the imports, half a second for the command line and two seconds where torch is among them,
are done once. What depends on how Python starts, such as its encodings, is not theirs.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

_LIMIT_S = 120
_END_S = 10
_MOST_BYTES = 1 << 20
_COMMAND = "from impress.cli.entry import run\nrun()"
#: What a fork begins with: the command line, which is without torch, or what tests of stores need.
LIGHT = ("impress.cli.main",)
STORES = ("conftest", "torch", "impress.store")


def command(argv: Sequence[str], **files: Any) -> subprocess.CompletedProcess[str]:
    """A console script's end, its output captured. `files`: as of `_ran`."""
    return _ran(_server(*LIGHT), _COMMAND, argv, **files)


def python(
    code: str, *args: str, has: Sequence[str] = STORES, **files: Any
) -> subprocess.CompletedProcess[str]:
    """The end of `python -c code args`, its output captured. `has`: imported before. `files`: as of
    `_ran`."""
    asked = f"import sys\nsys.path.insert(0, '')\n{code}"
    return _ran(_server(*has), asked, ["-c", *args], **files)


def _ran(
    server: _Server, code: str, argv: Sequence[str], input: str = "",
    stdout: IO[str] | None = None, cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    told = json.dumps([code, argv, str(cwd or Path.cwd()), dict(os.environ)]).encode()
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(input.encode())
        given.seek(0)
        files = [given, out if stdout is None else stdout, err]
        try:
            status = server.status(told, [file.fileno() for file in files])
        except BaseException:  # its answer may yet come, and would be taken for the next fork's
            _server.cache_clear()
            server.kill()
            raise
        for file in (out, err):
            file.seek(0)
        said, complained = (file.read().decode() for file in (out, err))
    return subprocess.CompletedProcess(argv, status, said, complained)


class _Server:
    """A process that has imported these, and forks; neither it nor they have a terminal. It and its
    forks are killed together."""

    def __init__(self, *modules: str) -> None:
        self._asked, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno()), *modules], pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.end)

    def status(self, told: bytes, fds: Sequence[int]) -> int:
        """What the next fork ends with. Raises TimeoutError."""
        self._asked.settimeout(_LIMIT_S)
        socket.send_fds(self._asked, [told], fds)
        return int(self._asked.recv(_MOST_BYTES))

    def end(self) -> None:
        """Let it end by itself, or kill it where a fork goes on."""
        self._asked.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """It has not ended, or nobody has waited for it: its number is nobody else's."""
        atexit.unregister(self.end)
        self._asked.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_server = cache(_Server)


def _next_fork(asked: socket.socket) -> str:
    """The code of the next fork, in that fork, which has its files, arguments, environment and
    directory by then. Ends the process once nobody can ask any more."""
    while True:
        told, fds, _, _ = socket.recv_fds(asked, _MOST_BYTES, 3)
        if not told:
            raise SystemExit
        child = os.fork()
        if child == 0:
            break
        for fd in fds:
            os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        asked.send(str(status).encode())
    asked.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    # Those there are know what they were opened on: whether it can be sought in, say.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    code, sys.argv, folder, environment = json.loads(told)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return str(code)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    sys.path.remove(str(Path(__file__).parent))  # whoever wants modules of tests says so
    gc.freeze()
    exec(_next_fork(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
