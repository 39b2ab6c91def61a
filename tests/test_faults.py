"""What is counted by the experiment that breaks stores."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments import load_content, reliability_table
from experiments.common import Row
from experiments.faults import __main__ as faults
from experiments.faults import content, cuts, flips, media


def test_prompts_missed_beside_the_flipped_ones_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost` of bit flips was 0 whatever happened: nothing was ever added to it. Of six prompts two
    begin alike, so a flip in the rows of one may cost that pair."""

    def all_missed(_context: object, copies: list[Path]) -> list[Row]:
        return [{"missing": [*range(flips.N_PROMPTS)], "wrong": 0} for _ in copies]

    monkeypatch.setattr(flips, "_looked", all_missed)
    rows = {row["fault"]: row for row in flips.flips(tmp_path, 40, 1)}
    for kind in ("rows", "headers"):
        row = rows[f"bit flip in {kind}"]
        assert row["tried"] and row["lost"] == 4 * row["tried"]
    assert rows["bit flip in index"]["lost"] is None


def test_a_flip_costs_no_prompt_but_those_that_need_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at_here(_context: object, copies: list[Path]) -> list[Row]:
        found: list[Row] = []
        flips._look([str(copy) for copy in copies], SimpleNamespace(send=found.append))
        return found

    monkeypatch.setattr(logging.getLogger("impress"), "setLevel", lambda _level: None)
    monkeypatch.setattr(flips, "_looked", looked_at_here)
    monkeypatch.setattr(flips, "_KINDS", {"rows": 1.0})
    (row,) = flips.flips(tmp_path, 12, 1)
    assert row["missed"] > 0
    assert row["lost"] == row["wrong"] == 0


def test_a_worker_that_ends_by_itself_under_a_failing_call_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked at its exit status: prompts that it never came to passed for whole."""

    def said(*command: str) -> tuple[int, list[str]]:
        if "experiments.faults.worker" in command:
            return -signal.SIGABRT, ["kept 0", "refused 1", "kept 2"]
        return 0, ["missing", "judged 0 0"]

    monkeypatch.setattr(media, "_lines", said)
    row = media._injected(tmp_path, "pwrite64: EIO", "pwrite64:error=EIO:when=5+37", 60)
    assert (row["ended"], row["acknowledged"], row["refused"]) == (1, 2, 1)


def test_what_hangs_under_an_injection_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """strace alone was killed, and let go of what it traced."""
    child = "import os, signal; print(os.getpid(), file=open('pid', 'w')); signal.pause()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(media, "SILENCE_S", 0.5)
    monkeypatch.chdir(tmp_path)
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text():  # on a busy machine it may come too late
        with pytest.raises(subprocess.TimeoutExpired):
            media._lines(sys.executable, "-c", program)
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(int(pid.read_text()))
        try:
            assert select.select([fd], [], [], 60)[0]  # it has ended
        finally:
            os.close(fd)


def test_a_worker_that_ends_by_itself_is_counted() -> None:
    """It passed for one that was killed: 500 of 500 tried, nothing acknowledged, nothing lost."""
    program = "print('open'); print(0); print('kept 0'); print(3, flush=True)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert cuts.acknowledged(process, 3) == (3, "ended")


def test_a_store_that_does_not_open_again_has_lost_what_was_acknowledged(tmp_path: Path) -> None:
    total = content.counts_of("kill -9", 1)
    (tmp_path / "impress.json").write_text("{")
    rng = np.random.default_rng(1)
    cuts._note(total, tmp_path, 0, cuts.Heard(3, "ended"), [7], rng)
    assert (total["acknowledged"], total["lost"], total["refused"], total["ended"]) == (4, 5, 1, 1)


def test_a_user_or_a_writer_that_ends_over_an_error_is_no_quiet_one() -> None:
    """Its thread had ended, its error was on a terminal, and the row said wrong 0, lost 0."""

    def broken(*_args: Any, **_named: Any) -> None:
        raise ZeroDivisionError

    said = {"oldest_lease_s": 0.0, "tiers": {"dram": {"used": 0}}}
    store: Any = SimpleNamespace(lease=broken, store=broken, stats=lambda: said)
    with pytest.raises(ZeroDivisionError):
        load_content.users(store, 2, 4.0, 4, 1)
    with pytest.raises(ZeroDivisionError), load_content.Writer(store, 4) as writer:
        wait([writer._writing], 60)


@pytest.mark.parametrize("altered", range(load_content.GEOMETRY.n_layers))
def test_a_wrong_row_in_any_layer_is_found(altered: int) -> None:
    """Only the last layer of a sampled answer was compared: the others could have been anything,
    and the row said wrong 0."""

    def retrieve(layer: int, _query: None) -> tuple[torch.Tensor, ...]:
        k, v = (torch.from_numpy(load_content.plane(3, layer, which)) for which in (0, 1))
        v[0, 0, 0] += layer == altered
        return k, v, torch.arange(load_content.N_TOKENS)

    session = SimpleNamespace(prefetch=lambda: None, retrieve=retrieve)
    lease = SimpleNamespace(n_tokens=load_content.N_TOKENS, session=lambda: nullcontext(session))
    store: Any = SimpleNamespace(lease=lambda _tokens: nullcontext(lease))
    seen = load_content.Seen()
    for _ in range(load_content.GEOMETRY.n_layers):
        load_content.ask(store, 3, seen, compare=True)
    assert (seen.compared, seen.wrong) == (load_content.GEOMETRY.n_layers, 1)


def test_a_fault_behind_which_nothing_is_stored_any_more_says_nothing() -> None:
    """The first fault made the store read-only for longer than its worker lived: "lost 0" was said
    of one prompt."""
    assert media._goes_on(["open", "kept 0", "0", "refused disk", "kept", "kept 3 4", "4"])
    assert not media._goes_on(["open", "kept 0", "0", "refused disk", "kept", "refused disk"])
    assert not media._goes_on(["open", "kept 0", "0"])


def test_what_was_not_counted_is_no_zero(tmp_path: Path, capsys: Any) -> None:
    row = {"name": "bit_flips", "fault": "bit flip in index", "tried": 3, "acknowledged": 18,
           "lost": None, "wrong": 0, "hangs": 0, "missed": 6, "refused": 1, "ended": 0}  # fmt: skip
    said, lines = faults.EXPERIMENT.figures([row, row], None)  # type: ignore[arg-type]
    assert said["lost"] == 0 and said["bit_flips"] == 6
    assert lines[0]["lost"] is None and lines[0]["missed"] == 12
    assert "–" in capsys.readouterr().out
    (tmp_path / "faults.json").write_text(json.dumps({"figures": said, "rows": lines, "meta": {}}))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: faults -->\n<!-- end -->\n")
    reliability_table.fill(page, tmp_path)
    assert "| bit flip in index | 6 | 36 | – | 0 | 0 | 12 | 2 | 0 |" in page.read_text()
