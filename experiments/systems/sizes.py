"""How much of everything an experiment takes, so that it fits the machine and the time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.common import Row, Unable, console
from experiments.harness import Options
from experiments.systems import emulator
from experiments.systems.clock import A100, MOST_ERROR, dilation_of
from experiments.systems.data import Data
from experiments.systems.generate import Knobs
from experiments.systems.shapes import SHAPES
from tiers.hbm import why_not

#: Bytes of all systems' caches together, and of full keys and values on disk, by `quick`.
CACHES: Final = {False: 10 << 30, True: 5 << 30}
MOST_DATA: Final = {False: 2600 << 20, True: 1300 << 20}
#: Layers of a slice, by `quick`.
LAYERS: Final = {False: 4, True: 2}
#: Tokens of a prefix, on average.
MEAN_TOKENS: Final = 5250


def layers_of(options: Options) -> int:
    """Layers of a slice: as many as were asked for."""
    asked: int | None = getattr(options.more, "layers", None)
    return LAYERS[options.quick] if asked is None else asked


def n_prefixes(
    shape: str, ratio: int, n_systems: int, *, quick: bool, asked: int | None = None,
    layers: int | None = None,
) -> int:  # fmt: skip
    """How many prefixes a cell has: the data, and n_systems pairs of caches for it, fit the
    machine. More layers take more of its disk. Raises Unable where more are asked for, or layers
    of which not two prefixes fit or that the model has not."""
    layers = layers or LAYERS[quick]
    if layers > SHAPES[shape].n_layers:
        raise Unable(f"--layers {layers}: {shape} has {SHAPES[shape].n_layers}")
    one = MEAN_TOKENS * SHAPES[shape].row_bytes * layers
    data = MOST_DATA[quick] * max(layers, LAYERS[quick]) // LAYERS[quick]
    most = min(data, CACHES[quick] * ratio // (42 * max(n_systems, 1)))
    fit = min(24, int(most // one))
    if layers <= LAYERS[quick]:
        fit = max(4, fit)  # somewhat beyond the machine's share, as published cells were
    elif fit < 2:
        raise Unable(
            f"--layers {layers}: the caches of {n_systems} systems have no room for two prefixes "
            f"of {shape}: name fewer --systems, or fewer layers"
        )
    if asked is not None and asked > fit:
        raise Unable(f"--prefixes {asked}: {fit} fit, of {shape} and with {n_systems} systems")
    return fit if asked is None else asked


def data_of(
    options: Options, shape: str, ratio: int, n_systems: int, knobs: Knobs, keep: float = 0.25,
    asked: int | None = None,
) -> Data:  # fmt: skip
    """Plan a cell's data; what the last cell left on disk is removed, unless it is the same.
    `asked`: how many prefixes."""
    layers = layers_of(options)
    n = n_prefixes(shape, ratio, n_systems, quick=options.quick, asked=asked, layers=layers)
    data = Data.of(SHAPES[shape], layers, n, options.folder / "data", knobs, options.seed)
    data.keep = keep
    kept: Data | None = _KEPT.get(options.folder)
    if kept is not None and same(kept, data):
        return kept
    if kept is not None:
        kept.remove()
    _KEPT[options.folder] = data
    return data


_KEPT: dict[Path, Data] = {}


def same(one: Data, other: Data) -> bool:
    """Whether what is on disk for one serves the other."""
    return (one.shape, one.n_layers, one.keep, one.knobs, [p.seed for p in one.prefixes]) == (
        other.shape, other.n_layers, other.keep, other.knobs, [p.seed for p in other.prefixes]
    )  # fmt: skip


def stretch(options: Options) -> float | None:
    """The dilation if the disk's rate was given; None: it follows the rate before each round."""
    return dilation(options) if options.disk.by == "given" else None


def dilation(options: Options) -> float:
    assert options.disk.gb_s is not None, "the experiment says that it uses the disk"
    return dilation_of(options.disk.gb_s)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every experiment whose compute is emulated where there is no device."""
    unchecked_argument(parser)
    compute_argument(parser)


def unchecked_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unchecked", action="store_true",
        help="do not check the emulator first: the figures are then marked unchecked",
    )  # fmt: skip


def compute_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compute", choices=("auto", "real", "emulated"), default="auto",
        help="by a CUDA device, or by waits (default: by a device where one can be used)",
    )  # fmt: skip


def is_real(options: Options) -> bool:
    """Whether a CUDA device computes. Raises Unable where one was asked for and cannot be used."""
    asked = getattr(options.more, "compute", "emulated")
    lacking = "" if asked == "emulated" else why_not()
    if asked == "real" and lacking:
        raise Unable(f"--compute real: {lacking}")
    return asked != "emulated" and not lacking


def how(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the compute of a report's rows came about, for titles."""
    real = any(row.get("compute") == "real" for row in rows)
    return "compute real" if real else "compute emulated"


class Verdict:
    """Whether the emulator may be used: every cell asks, and the check's cell knows."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.error: float | None = None

    def check(self) -> list[Row]:
        """The rows of the check."""
        if is_real(self._options):
            return []  # nothing is emulated
        if self._options.more.unchecked:
            console.print("the emulator is not checked")
            return []
        rows = emulator.check(self._options.folder / "check", 20 if self._options.quick else 30)
        self.error = emulator.worst(rows)
        console.print(emulator.verdict(self.error))
        return [{"part": "check", **row} for row in rows]

    @property
    def withdrawn(self) -> bool:
        return self.error is not None and self.error > MOST_ERROR


def checked(rows: list[Row]) -> tuple[dict[str, float], bool]:
    """(emulator_error where it was checked, whether the experiment is withdrawn).

    Of several runs, the worst check that cells were measured after; where some were measured after
    none, the emulator is not checked. Older rows do not tell: for them, the worst of all checks.
    """
    behind = [row["emulator_error"] for row in rows if "emulator_error" in row]
    errors = behind or [row["error"] for row in rows if row.get("part") == "check"]
    if not errors or None in errors:
        return {}, False
    error = max(errors)
    console.print(emulator.verdict(error))
    return {"emulator_error": error}, error > MOST_ERROR


def checks(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how much each check among these rows was off, failed ones too, in their order."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.get("part") == "check":
            errors.setdefault(row["mode"], []).append(row["error"])
    return [max(each) for each in zip(*errors.values(), strict=True)]


def meta(
    options: Options, measured: str = "measured before each round of requests"
) -> dict[str, Any]:
    """What a reader of such an experiment must know. `measured`: when the disk's rate was."""
    if is_real(options):
        return _real_meta(options)
    return {
        "emulated": f"all compute (forward, scoring, top-k, dequantising) is a timed wait: "
        f"{A100.name}, {A100.flop_s / 1e12:g} TFLOP/s at {A100.efficiency:g}, "
        f"{A100.memory_b_s / 1e12:g} TB/s at {A100.memory_efficiency:g}, {A100.step_s * 1e6:g} us "
        f"a layer and a choice; dilated by 5.0 GB/s over this disk's rate, "
        f"{'as given' if options.disk.by == 'given' else measured}",
        "milliseconds": "of this machine's clock, divided by the dilation",
        "layers": f"{layers_of(options)} layers of each model: a slice, not the model",
        "hbm": "emulated in host memory",
        "choices": "computed for real before the clock starts; the clock gets the emulated time",
    }


def computed_by(options: Options) -> dict[str, str]:
    """What a cell's parameters say of the device that computes, so that no cell of another card is
    taken for it."""
    if not is_real(options):
        return {}
    import torch

    return {"compute": "real", "device": torch.cuda.get_device_name()}


def _real_meta(options: Options) -> dict[str, Any]:
    import torch

    return {
        "compute": f"real: {torch.cuda.get_device_name()}, torch {torch.__version__}, drawn "
        "weights, unfused kernels",
        "milliseconds": "of this machine's clock",
        "layers": f"{layers_of(options)} layers of each model: a slice, not the model",
        "hbm": "in the device's memory, copied through the host",
        "choices": "made on the clock, by the product's own code",
    }
