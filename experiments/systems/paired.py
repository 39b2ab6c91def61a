"""Systems set against each other on the same requests: one's time as a multiple of another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: What times are compared by -> its value per draw, of drawn requests [draws, requests].
_OF: Final[dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]]] = {
    "p50_ms": lambda drawn: np.median(drawn, axis=1),
    "p90_ms": lambda drawn: np.percentile(drawn, 90, axis=1),
    "p99_ms": lambda drawn: np.percentile(drawn, 99, axis=1),
    "mean_ms": lambda drawn: np.mean(drawn, axis=1),
}
#: Systems between which the chosen mode chooses.
THREE: Final = ("recompute", "exact", "quality")


class Times(NamedTuple):
    """A ratio of two times, and its interval of 95 % (None: rows lack the times of requests)."""

    ratio: float
    low: float | None = None
    high: float | None = None


def say(said: dict[str, float], name: str, found: Times) -> None:
    """A figure, and the ends of its interval where it has one."""
    said[name] = found.ratio
    if found.low is not None and found.high is not None:
        said[end_of(name, "low")], said[end_of(name, "high")] = found.low, found.high


def end_of(figure: str, end: str) -> str:
    """The name of an end of a figure's interval: NAME.WHICH has NAME_low.WHICH."""
    name, dot, which = figure.rpartition(".")
    return f"{name}_{end}.{which}" if dot else f"{figure}_{end}"


def each_ms(row: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Every request's time, in the order in which all systems of the cell served them."""
    return np.array(row["each_ms"].split(), dtype=np.float64)


def times(one: Mapping[str, Any], other: Mapping[str, Any], of: str = "p50_ms") -> Times:
    """`one` ÷ `other`, two rows of a cell; no interval for times that requests do not keep (I/O).

    Requests are drawn for both together, so that one that is hard for both leaves the ratio alone;
    those that followed each other in a row are drawn whole.
    """
    ratio = float(one[of] / other[of]) if other[of] else float("inf")
    if of not in _OF or not {"each_ms"} <= one.keys() & other.keys():
        return Times(ratio)
    above, below = _drawn([one, other], of)
    low, high = np.percentile(above / below, (2.5, 97.5))
    return Times(ratio, float(low), float(high))


def shares_added(steps: Sequence[Mapping[str, Any]], of: str = "p50_ms") -> list[Times]:
    """What each step from one row to the next adds, as a share of the time by which the last row is
    faster than the first; below 0 where a step costs time. Intervals are as those of `times`. None
    of them where the last row is no faster."""
    ms = np.array([float(row[of]) for row in steps])
    if ms[-1] >= ms[0]:
        return []
    shares = (-np.diff(ms) / (ms[0] - ms[-1])).tolist()
    if not all("each_ms" in row for row in steps):
        return [Times(share) for share in shares]
    drawn = np.array(_drawn(steps, of))
    gain = drawn[0] - drawn[-1]
    added = -np.diff(drawn, axis=0) / np.where(gain == 0, 1e-9, gain)
    ends = np.percentile(added, (2.5, 97.5), axis=1).T.tolist()
    return [Times(share, *both) for share, both in zip(shares, ends, strict=True)]


def worst_of(systems: Mapping[str, Mapping[str, Any]], of: str = "p50_ms") -> Times | None:
    """The chosen mode's time ÷ the best of recomputing, exact and sparse, in a cell. `of`: p50, or
    the mean, which is what the mode is chosen by; older reports lack it.

    Which of the three is the best is found again in each draw.
    """
    rows = [systems.get(name, {}) for name in ("auto", *THREE)]
    if any(of not in row for row in rows):
        return None
    auto, *rivals = (float(row[of]) for row in rows)
    if any("each_ms" not in row for row in rows):
        return Times(auto / min(rivals))
    drawn, *others = _drawn(rows, of)
    low, high = np.percentile(drawn / np.min(others, axis=0), (2.5, 97.5))
    return Times(auto / min(rivals), float(low), float(high))


def worst_without_one(systems: Mapping[str, Mapping[str, Any]], of: str) -> float | None:
    """The worst of `worst_of` with any one request (or row of those in a row) left out: a rival
    that stood still once is no reason to call the chosen mode as good."""
    found = worst_of(systems, of)
    if found is None or found.low is None:
        return None if found is None else found.ratio
    ms = _in_rows([systems[name] for name in ("auto", *THREE)])
    ratios: list[float] = []
    for left_out in range(ms.shape[1]):
        auto, *rivals = _OF[of](np.delete(ms, left_out, axis=1).reshape(len(ms), -1)).tolist()
        ratios.append(auto / min(rivals))
    return max(ratios)


def _in_rows(rows: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
    """[systems, rows of requests, requests of a row]: times of each system of a cell."""
    return np.stack([each_ms(row) for row in rows]).reshape(
        len(rows), -1, rows[0].get("in_a_row", 1)
    )


def _drawn(rows: Sequence[Mapping[str, Any]], of: str) -> list[npt.NDArray[np.float64]]:
    """Each system's time in a thousand draws of requests, the same draws for all."""
    ms = _in_rows(rows)
    n = ms.shape[1]
    drawn = ms[:, np.random.default_rng(0).integers(n, size=(1000, n))]
    return [_OF[of](some.reshape(1000, -1)) for some in drawn]
