"""Shadows: what a request's chosen rows really left out, weighed against all keys after its answer.

the request's own query rows ─┬─ its selection; of an exact request, one made by these rows
                              └─ all keys of the prefix ──→ true missing mass, beside the estimate
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from impress.errors import PrefixLost
from impress.policy import Policy
from impress.quality.guard import Weighed
from impress.read.load import Load
from impress.read.session import Lease, Session
from impress.read.sparse import SparseSession
from impress.selection.choices import Selection
from impress.selection.scores import true_missing_mass
from tiers.errors import MediumError
from tiers.iopool import Lane

if TYPE_CHECKING:
    import torch

#: How many of a request's last query rows are kept to be asked again. A longer one is judged by
#: these, and where it was exact the selection is made by them alone: 256 rows of 32 heads of 128
#: are 2 MiB a layer in 16 bits.
SHADOW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer's attention was asked: a request's last query rows.

    query [n_heads, r, head_dim] after RoPE; suffix_lse float32 [n_heads, r]. `chosen`: what the
    request chose, by all its rows; its estimates are nan where it asked more rows than these, since
    they are compared with what these miss. None where it was exact: these choose, when weighed.
    """

    query: torch.Tensor
    scaling: float
    suffix_lse: torch.Tensor
    chosen: Selection | None = None


class ShadowSession(SparseSession):
    """Chooses as a request would; reads behind all requests, copies nothing up, teaches nothing."""

    _lane = Lane.PROMOTE

    def __init__(self, lease: Lease, policy: Policy) -> None:
        super().__init__(lease, policy, lease.reading)
        self._keys: torch.Tensor | None = None

    def weigh(self, layer: int, seen: Seen, keys: torch.Tensor | None = None) -> Weighed | None:
        """A layer's missing mass, true and estimated: mean or worst head, as the policy bounds it.
        None where the layer is taken whole: that says nothing of how the policy chooses.

        keys [n_kv_heads, n_tokens, head_dim] of the prefix if they are at hand, else they are
        read. Take layers in order, for policies that look at earlier ones. Raises PrefixLost.
        """
        self._lease.check_active()
        used: list[Load] = []
        self._keys = keys
        try:
            chosen = seen.chosen
            if chosen is None:
                lse = seen.suffix_lse if self.needs_suffix_lse else None
                chosen, found = self._choose(layer, seen.query, seen.scaling, lse, used)
                self._keys = found if found is not None else keys
            if chosen.positions is None or len(chosen.positions) == self.n_tokens:
                return None
            all_keys = self._all_keys(layer, used)
            masses = true_missing_mass(
                seen.query.to(all_keys.device), all_keys, seen.scaling, seen.suffix_lse,
                chosen.positions,
            )  # fmt: skip
        except MediumError as err:  # a header's, or no memory to read into: not a request's loss
            raise PrefixLost(err.reason, str(err)) from None
        finally:
            self._keys = None
            for load in used:
                load.abandon()
        if by_head(self.policy):
            return Weighed(float(masses.max()), chosen.missing_mass_worst_head)
        return Weighed(float(masses.mean()), chosen.estimated_missing_mass)

    def _all_keys(self, layer: int, used: list[Load]) -> torch.Tensor:
        return self._keys if self._keys is not None else super()._all_keys(layer, used)

    def _read(self, load: Load, used: list[Load]) -> Load:
        used.append(load)
        load.wait()
        return load


class RerunSession(Session):
    """Brings all rows as an exact request's would, behind all requests; copies nothing up, teaches
    nothing."""

    _lane = Lane.PROMOTE

    def __init__(self, lease: Lease, policy: Policy) -> None:
        super().__init__(lease, policy, lease.reading)

    def _account(self, load: Load, begin_s: float) -> None:
        """Account for nothing: it is not a request's."""


def by_head(policy: Any) -> bool:
    """Whether a policy bounds the worst head; else the mean over heads."""
    return getattr(policy, "per", "mean") == "head"
