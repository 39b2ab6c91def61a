"""Ways of serving a prefix that `accuracy` compares, by name: `KEPT.SELECTOR`, or a name alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from experiments.behind import GivenRows
from impress.policy import (
    AllHeads,
    Contiguous,
    Exact,
    Pages,
    Paper,
    Policy,
    Quality,
    Random,
    Recency,
    SnapWindow,
    StaticH2O,
)
from impress.selection.quant import dequantise, n_scales, packed_bytes, quantise

#: Percent of a prefix's rows.
KEPT: Final = (5, 10, 25, 50)
#: The full KV, which every other is compared with.
EXACT: Final = "exact"
#: Dimensions that share a float16 scale where all of the KV is quantised: int4 takes .281 of it.
GROUP: Final = 32

SELECTORS: Final[Mapping[str, Callable[[float], Policy]]] = {
    "paper": Paper,
    "paper_ungated": lambda keep: Paper(keep, gate=False),
    "all_heads": AllHeads,
    "pages": Pages,
    "snap": SnapWindow,
    "contiguous": Contiguous,
    "static_h2o": StaticH2O,
    "random": Random,
    "recency": Recency,
}
BOUNDS: Final[Mapping[str, Policy]] = {
    "quality02": Quality(0.02),
    "quality05": Quality(0.05),
    "quality10": Quality(0.1),
    "quality20": Quality(0.2),
    "quality10_head": Quality(0.1, per="head"),
}


@dataclass(frozen=True, slots=True)
class Quantised:
    """Every row, in `bits` bits: no policy, read in sequence (AS-int8, AS-int4)."""

    bits: int

    def of(self, rows: GivenRows, layers: int) -> GivenRows:
        """The rows after a round trip through codes and scales."""
        nothing = torch.empty(0)
        both = [rows.choose(layer, nothing, nothing, 1.0) for layer in range(layers)]
        made = [[self._through(plane) for plane in layer] for layer in both]
        return GivenRows([k for k, _ in made], [v for _, v in made])

    def share(self, head_dim: int, element_bytes: int) -> float:
        """Bytes of a row's codes and scales ÷ those of the row."""
        coded = packed_bytes(head_dim, self.bits) + 2 * n_scales(head_dim, GROUP)
        return coded / (head_dim * element_bytes)

    def _through(self, plane: Tensor) -> Tensor:
        """A plane [n_kv_heads, n, head_dim], one scale per GROUP dimensions of a row and head."""
        values = plane.float().numpy()
        codes, scales = quantise(values.reshape(-1, values.shape[-1]), self.bits, GROUP)
        wide = torch.from_numpy(scales.astype(np.float32))
        back = dequantise(torch.from_numpy(codes), wide, self.bits, GROUP)
        return back.view(plane.shape).to(plane.dtype)


Arm = Policy | Quantised


def arms(kept: Sequence[int] = KEPT) -> dict[str, Arm]:
    """Every arm by name, exact first."""
    made: dict[str, Arm] = {EXACT: Exact(), "int8": Quantised(8), "int4": Quantised(4), **BOUNDS}
    for percent in kept:
        for name, make in SELECTORS.items():
            made[f"{percent}.{name}"] = make(percent / 100)
    return made


def probes(some: Mapping[str, Arm]) -> tuple[str, ...]:
    """The probe codecs that arms read."""
    named = [arm.probe for arm in some.values() if not isinstance(arm, Quantised) and arm.probe]
    return tuple(dict.fromkeys(named))
