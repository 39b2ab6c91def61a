"""Plots of experiments, with matplotlib, which is only imported when one is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.common import Row, Unable, console

#: Inches and dots: readable on a page of its own, and side by side in a table.
_SIZE = (8.0, 5.0)
_DPI = 120


def check_plotting(folder: Path) -> None:
    """Raises Unable where matplotlib is missing, or the folder cannot be made or written to."""
    if find_spec("matplotlib") is None:
        raise Unable("--plot needs matplotlib: pip install matplotlib")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise Unable(f"--plot {folder}: {there} is a file: name a directory")
    if not os.access(there, os.W_OK):
        raise Unable(f"--plot {folder}: {there} cannot be written")


def plot_all(
    folder: Path,
    name: str,
    plots: Mapping[str, Callable[[Any, dict[str, float], list[Row]], None]],
    figures: dict[str, float],
    rows: list[Row],
) -> list[Path]:
    """Write each plot as folder/NAME.PLOT.png; makes the folder. The files written."""
    check_plotting(folder)
    from matplotlib.figure import Figure  # the object, not pyplot: no global state, no display

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot, draw in plots.items():
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw(figure, figures, rows)
        path = folder / f"{name}.{plot}.png"
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        written.append(path)
    if written:
        console.print(f"plots: {', '.join(str(path) for path in written)}")
    return written
