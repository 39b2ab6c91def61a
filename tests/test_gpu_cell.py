"""The cell at the size of a whole model: what gpu_recipe.md promises for a command."""

from __future__ import annotations

import re
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments import gpu_cell
from experiments.harness import Disk, Options
from experiments.systems.catalogue import chosen
from experiments.systems.cell import config_of, order_of, window_of
from experiments.systems.data import Data
from experiments.systems.generate import Knobs

RECIPE = Path(gpu_cell.__file__).with_name("gpu_recipe.md").read_text()
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def _options(folder: Path, gb_s: float, *, quick: bool) -> Options:
    disk = Disk(gb_s, "given")
    return Options(quick, None, None, False, folder, 1, disk, Namespace(), ExitStack())


@pytest.fixture
def seconds(tmp_path: Path) -> dict[str, float]:
    """About how long each system's command takes, at the disk rate that the recipe names."""
    cells = gpu_cell.cells(_options(tmp_path, 2.0, quick=False))
    return {cell.params["system"]: cell.seconds for cell in cells}


def test_the_recipe_has_a_command_for_every_system(seconds: dict[str, float]) -> None:
    """It named three systems for one kind of data, but that command ran five, for 19 minutes."""
    assert set(re.findall(r"--cells (\w+)", RECIPE)) == seconds.keys()
    assert max(seconds.values()) < 8 * 60


def test_the_recipe_names_the_versions_it_is_held_to() -> None:
    """It named none, and what it shows on another torch is not what the tests have shown."""
    for package in ("torch", "transformers"):
        (wanted,) = re.findall(rf"^{package}>=.*$", CONSTRAINTS.read_text(), re.M)
        assert wanted in RECIPE


def test_every_system_fits_the_memory_that_the_recipe_names(
    seconds: dict[str, float], tmp_path: Path
) -> None:
    """Five systems' caches at once took 140 GB, on a machine of 128 GiB."""
    found = re.search(r"needs (\d+) GiB of memory", RECIPE)
    assert found is not None
    data = Data.of(
        gpu_cell.SHAPE, gpu_cell.LAYERS[False], gpu_cell.N_PREFIXES, tmp_path, Knobs(), 1
    )
    longest = max(p.n_tokens for p in data.prefixes) * data.n_layers * data.shape.row_bytes
    for system in chosen([name for name in seconds if name != "recompute"]):
        config = config_of(system, data, gpu_cell.RATIO)
        assert config.dram_bytes + config.hbm_bytes + longest < int(found[1]) << 30


def test_every_prefix_is_asked_for_before_it_is_measured(tmp_path: Path) -> None:
    """With windows of six requests, the least popular of six prefixes was in none: its first
    request was one that is measured."""
    load = gpu_cell.load_of(_options(tmp_path, 2.0, quick=False))
    assert set(window_of(load, gpu_cell.N_PREFIXES)) == set(range(gpu_cell.N_PREFIXES))
    n_warmed = len(order_of(load, gpu_cell.N_PREFIXES)) - load.n_measured
    assert f"after {n_warmed} requests" in " ".join(RECIPE.split())


def test_a_row_says_how_warm_its_caches_were_and_the_report_that_no_wait_was_checked(
    tmp_path: Path,
) -> None:
    """Other emulated cells say both; this one looked as if it had been checked and was flat."""
    options = _options(tmp_path, 50.0, quick=True)
    (row,) = gpu_cell.measure(options, "recompute")
    load = gpu_cell.load_of(options)
    assert (row["n_warmed"], row["flat"]) == (load.n_warm * load.most_windows, False)
    meta = gpu_cell.EXPERIMENT.meta(options)
    assert meta["emulator"] == "not checked" and "waits are not checked" in " ".join(RECIPE.split())
