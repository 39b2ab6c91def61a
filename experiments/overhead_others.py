"""How busy other processes keep this machine while something is measured (/proc/stat)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class Others:
    """Processor time that the machine gives to other processes from now on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_s() - time.process_time()

    def cores(self) -> float:
        """Cores that others kept busy, on average; nan where /proc/stat is not available."""
        begin_s, before_s = self._begin
        taken_s = _busy_s() - time.process_time() - before_s
        return taken_s / (time.perf_counter() - begin_s)


def _busy_s() -> float:
    """Seconds that all cores together have been busy since boot."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK_S
