"""Ten seconds of tests/fuzz: whatever a stranger hands over is answered as documented."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from run import fuzz
from targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_strange_comes_out(name: str) -> None:
    fuzz(name, TARGETS[name][2], 0)
