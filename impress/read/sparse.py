"""Sessions that choose: read a little to know what matters, then read what matters.

    retrieve(layer, query): probe records ─identify→ Selection ─gather→ K and V of the chosen rows

What is read in order to choose does not depend on the query, so it is read ahead: probe records of
the next layers, or, where a policy looks at all keys, these. If a prefix was stored without the
records a policy wants, they are made from its keys, which must then be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from impress.errors import BadInput, ImpressError
from impress.policy import Exact, KeepAll, Policy
from impress.read.access import line_of
from impress.read.early import Foresight
from impress.read.importance import Importance, NoImportance
from impress.read.load import Load
from impress.read.parts import Source, in_position_order, rows_of
from impress.read.promote import Looked
from impress.read.reading import Reading
from impress.read.session import Lease, Session
from impress.selection.choices import Selection, checked, whole
from impress.selection.identify import (
    Asked,
    check_fits,
    leaves_room,
    reads_keys,
    select,
    shares_rows,
)
from impress.selection.probes import ProbeCodec, codec_of, encoded, fitted
from impress.spans.layout import K, V
from impress.spans.params import NONE, Layers
from impress.spans.rows import host_words
from impress.types import layers_of
from tiers.base import Bytes
from tiers.errors import MediumError
from tiers.iopool import Lane

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from impress.read.outs import Tensors


#: For how many layers to come the data to choose by is on its way: while one layer is chosen, the
#: disk has the next to read; more would only delay the rows chosen meanwhile, and the first layer.
LAYERS_AHEAD: Final = 2


class SparseSession(Session):
    """A session under a policy with an identifier (`impress.selection.identify`)."""

    def __init__(
        self, lease: Lease, policy: Policy, reading: Reading, in_order: bool = True
    ) -> None:
        super().__init__(lease, policy, reading, in_order=in_order)
        with reading.lost_for():
            self._codec, self._plane, self._params = self._sketch()
        self._of_probes = in_position_order(self._sources)
        asked = Asked(
            0, self.n_tokens, reading.geometry, self._window, codec=self._codec,
            from_keys=self._from_keys,
        )  # fmt: skip
        self._has_room = leaves_room(policy, asked)
        if not self._has_room:  # then nothing is read to choose by
            self._codec = self._plane = self._params = None
        self._probes: dict[int, Load] = {}  # records on their way, by layer
        self._keys_ahead: dict[int, Load] = {}  # all keys on their way, by layer
        self._untaken += [self._probes, self._keys_ahead]
        self._next: int | None = None  # layers before it are dealt with; None: not read ahead
        self._importance = Importance(reading, self._sources, self._lane, policy.name)
        self.chosen: dict[int, Selection] = {}
        """What was chosen in each layer so far."""
        self.keys_as_read = False
        """True: where all keys of a layer were read to choose by, `retrieve`'s k is all of them, on
        the host unless v is all rows, too; pos is of v's rows. For callers that scored them on a
        device and take chosen ones there."""
        self.key_rows: npt.NDArray[np.int64] | None = None
        """Which row each of these is, where they come as they lie: policies choose by it. None: in
        order."""
        self._foresight = Foresight(reading, self._sources)

    def _sketch(self) -> tuple[ProbeCodec | None, int | None, Layers | None]:
        """The codec to score with, the plane of its records, and its parameters by layer.

        Records count only where every span has them, made with the same parameters, and these can
        be had; else those of the codec's fallback; else (plane None) they are made from the keys,
        by a codec without parameters.
        """
        if not self.policy.probe:
            return None, None, None
        codec = codec_of(self.policy.probe)
        again = fitted(codec)
        plain = codec if again is None else codec_of(again.fallback)
        plane, digest = self._plane_of(codec)
        if again is None:
            return codec, plane, None
        layers = None if plane is None else self._layers_of(digest)
        if layers is not None and len(layers) == self._r.geometry.n_layers:
            return codec, plane, layers
        return plain, self._plane_of(plain)[0], None

    def _layers_of(self, digest: bytes) -> Layers | None:
        """Parameters of that name; None where they cannot be had. Raises MediumError where reading
        them takes too long or too much memory: they may be a hundred megabytes."""
        params = self._r.params
        if (known := params.known(digest)) is not None:
            return known
        return self._r.fetched(self._lane, partial(params.layers, digest), "a probe's parameters")

    @property
    def _from_keys(self) -> bool:
        """Whether records are made from the keys."""
        return self._codec is not None and self._plane is None

    def _plane_of(self, codec: ProbeCodec) -> tuple[int | None, bytes]:
        """The plane that holds a codec's records in every span of the prefix, alike; else None."""
        wanted = (codec.name, codec.group, codec.probe_bytes(self._r.geometry))
        planes = set()
        for source in self._sources:
            found = [(p.codec, p.group, p.group_bytes) for p in source.probes]
            at = found.index(wanted) if wanted in found else None
            planes.add((None, NONE) if at is None else (V + 1 + at, source.probes[at].params))
        return planes.pop() if len(planes) == 1 else (None, NONE)

    def prefetch(
        self, outs: Sequence[Tensors] | None = None, layers: Sequence[int] | None = None
    ) -> None:
        """Start reading what rows are chosen by, two layers at a time, whatever `layers` says. Rows
        cannot be read before they are chosen."""
        if outs is not None:
            raise BadInput(f"prefetch: policy {self.policy.name} chooses how many rows there are")
        layers_of(layers, self._r.geometry.n_layers, "prefetch")
        if self._closed:
            raise ImpressError("session: closed")
        self._lease.check_active()
        with self._r.lost_for():
            if self._next is None:
                self._next = 0
                self._start_ahead(0)
        self._check_ended()

    def _start_ahead(self, first: int) -> None:
        """If reading ahead has begun, start reading what the layers from `first` on are chosen by:
        their records, or all their keys."""
        if self._next is None:
            return
        end = min(first + LAYERS_AHEAD, self._r.geometry.n_layers)
        for layer in range(max(self._next, first), end):
            if self._plane is not None and layer not in self._probes:
                self._probes[layer] = self._start_probes(layer, self._plane)
            if self._chooses_by_keys(layer) and layer not in self._keys_ahead:
                self._keys_ahead[layer] = self._load_keys(layer)
        self._next = max(end, self._next)

    def _chooses_by_keys(self, layer: int) -> bool:
        """Whether the layer's keys will all be read, whatever the query."""
        return reads_keys(self.policy, layer) or self._from_keys

    def _load_keys(self, layer: int) -> Load:
        where = self._of_keys, layer, self._r.copies.chunks
        return Load(self._r, self._begun.add, *where, (K,), lane=self._lane)

    @property
    def _of_keys(self) -> Sequence[Source]:
        as_read = self.keys_as_read and not self._from_keys  # records are of rows in order
        return self._sources if as_read else self._lease.sources

    def _start_probes(self, layer: int, plane: int) -> Load:
        size = self._sources[0].layout.planes[plane].chunk_bytes
        # A prefix stored with other codecs than this store's now has no cache of its records.
        cache = self._r.copies.probes.get((plane, size))
        caches = [cache] if cache else []
        where = self._of_probes, layer, caches
        return Load(self._r, self._begun.add, *where, (plane,), lane=self._lane)

    def _bring(
        self,
        layer: int,
        query: torch.Tensor | None,
        scaling: float | None,
        suffix_lse: torch.Tensor | None,
        out: Tensors | None,
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64] | None]:
        if out is not None:
            raise BadInput(f"retrieve: policy {self.policy.name} chooses how many rows there are")
        self._lease.check_active()
        begin_s = monotonic()
        used: list[Load] = []  # everything this layer read
        try:
            selection, all_keys = self._choose(layer, query, scaling, suffix_lse, used)
            positions = selection.positions
            keys = next((load for load in used if load.planes == (K,)), None)
            planes = (K, V) if keys is None else (V,)
            ahead = self._foresight.take(layer)
            where = self._sources if keys is None else self._of_keys, layer, self._r.copies.chunks
            rows = Load(self._r, self._begun.add, *where, planes, positions, ahead=ahead)
            try:
                with suppress(MediumError):  # no memory so early: it is read when it is its turn
                    self._start_ahead(layer + 1)  # behind the rows
                self._check_ended()
                self._foresee(layer + 1, positions, planes)  # while this layer is read
                k = None
                if keys is not None:  # picked out while values are read
                    k = all_keys if self.keys_as_read else keys.tensor(positions)
            except BaseException:
                rows.abandon()
                raise
            self._read(rows, used)
            self._foresight.start()
            k, v = rows.tensors() if k is None else (k, rows.tensor())
            # Chosen rows are copies; whole planes are views of what was read into.
            seen = [load for load in used if positions is None and load.planes != (self._plane,)]
            if self.keys_as_read and keys is not None and positions is not None:
                seen.append(keys)
            for load in used:
                if load not in seen:
                    load.give_back()
            self._keep(layer, seen)
            ahead_bytes = 0 if ahead is None else ahead.asked_bytes
            self._note(selection, used, rows, begin_s, ahead_bytes)
            self._looked.append(Looked(positions, selection.by_query, rows.brought()))
        except BaseException:
            for load in used:
                load.abandon()
            raise
        return k, v, rows_of(rows.parts) if positions is None else positions

    def _foresee(
        self, layer: int, chosen: npt.NDArray[np.int64] | None, planes: Sequence[int]
    ) -> None:
        """Plan what to read ahead of a layer, when the one before it chose these rows (None: all)
        and then had to read these planes of them."""
        is_known = shares_rows(self.policy, layer)
        if layer < self._r.geometry.n_layers and self._chooses_by_keys(layer):
            planes = (V,)  # its keys are all read anyway
        elif is_known:
            planes = (K, V)
        self._foresight.plan(layer, chosen, planes, is_known=is_known)

    def _read(self, load: Load, used: list[Load]) -> Load:
        used.append(load)  # before anything may come between
        load.wait(self._came_s)  # as a layer's rows: it may have been begun with all others
        self._came_s = monotonic()
        self._climb(load)  # from buffers of its own: close need not wait for the copies
        return load

    def _choose(
        self,
        layer: int,
        query: torch.Tensor | None,
        scaling: float | None,
        suffix_lse: torch.Tensor | None,
        used: list[Load],
    ) -> tuple[Selection, torch.Tensor | None]:
        """The rows this layer needs, and all its keys where they had to be read for that."""
        if not self._has_room:
            self.chosen[layer] = whole("no room", fell_back=True)
            return self.chosen[layer], None
        g = self._r.geometry
        found: list[torch.Tensor] = []

        def all_keys() -> torch.Tensor:
            if not found:
                found.append(self._all_keys(layer, used))
            return found[0]

        asked = Asked(
            layer,
            self.n_tokens,
            g,
            self._window,
            _detached(query),
            g.head_dim**-0.5 if scaling is None else _scale(scaling),
            _detached(suffix_lse),
            self._codec,
            None if self._codec is None else self._records(layer, all_keys, used),
            None if self._params is None else self._params[layer],
            all_keys,
            lambda: self._importance.of(layer),
            self.chosen,
            self._from_keys,
            lambda: self.key_rows,
        )
        try:
            wanted = select(self.policy, asked)
        except NoImportance:  # the engines ask before, of those policies that they know
            if self._lane is not Lane.DEMAND:
                raise
            wanted = whole("no importance", fell_back=True)
        selection = checked(wanted, self.n_tokens, self.policy.name)
        self.chosen[layer] = selection
        return selection, found[0] if found else None

    def _all_keys(self, layer: int, used: list[Load]) -> torch.Tensor:
        """Keys [n_kv_heads, n_tokens, head_dim] of the whole prefix."""
        load = self._keys_ahead.pop(layer, None) or self._load_keys(layer)
        self.key_rows = rows_of(load.parts)
        return self._read(load, used).tensor()

    def _records(self, layer: int, all_keys: Any, used: list[Load]) -> Bytes:
        """The layer's probe records, contiguous [groups, probe_bytes]."""
        assert self._codec is not None
        n_bytes = self._codec.probe_bytes(self._r.geometry)
        if self._plane is None:
            words = host_words(all_keys(), self._r.geometry)
            return encoded(self._codec, words, self._r.geometry)
        load = self._probes.pop(layer, None) or self._start_probes(layer, self._plane)
        self._read(load, used)
        by_window = load.pieces(0).reshape(self.n_tokens // self._window, -1)
        exact = by_window[:, : self._window // self._codec.group * n_bytes]
        return np.ascontiguousarray(exact).reshape(-1, n_bytes)

    def has_importance(self) -> bool:
        """Whether all rows were given importance when they were stored. Raises PrefixLost."""
        with self._r.lost_for():
            return self._importance.is_whole()

    def _note(
        self, selection: Selection, used: list[Load], rows: Load, begin_s: float, ahead_bytes: int
    ) -> None:
        """The layer's line in the report."""
        g = self._r.geometry
        n_rows = selection.n_rows(self.n_tokens)
        n_keys = self.n_tokens if K not in rows.planes else n_rows  # all were read, to choose by
        records = 0
        if self._codec is not None and self._plane is not None:
            records = self.n_tokens // self._codec.group * self._codec.probe_bytes(g)
        self._layers.append(
            {
                **line_of(rows, used, (monotonic() - begin_s) * 1e3, ahead_bytes),
                "ahead_bytes": ahead_bytes,
                "ahead_used_bytes": rows.ahead_used_bytes,
                "ahead_hit_rows": rows.ahead_hit_rows,
                "chosen": n_rows,
                "probe": None if self._codec is None else self._codec.name,
                "wanted_bytes": n_keys * g.k_row_bytes + n_rows * g.v_row_bytes + records,
                "fell_back": selection.fell_back,
                "reason": selection.reason,
                "estimated_missing_mass": selection.estimated_missing_mass,
                "missing_mass_worst_head": selection.missing_mass_worst_head,
                "agreement": selection.agreement,
            }
        )

    def close(self) -> bool:
        if self._r.forked:
            return True  # as Session's
        try:
            self._foresight.close()
        finally:
            is_over = super().close()
        return is_over


def _detached(given: Any) -> Any:
    """Nobody differentiates what rows are chosen by; what is not a tensor is reported later."""
    return given.detach() if hasattr(given, "detach") else given


def _scale(given: Any) -> float:
    """What scores are multiplied by, from a number or a tensor of one. Raises BadInput."""
    if isinstance(given, Real) or getattr(given, "numel", int)() == 1:
        return float(given)
    raise BadInput(f"retrieve: scaling wants a number or None, got {type(given).__name__}")


def session_of(
    reading: Reading, lease: Lease, policy: Policy, first: int = 0, in_order: bool = True
) -> Session:
    """A session under any policy; `first`, `in_order`: see Lease.session.

    Raises ImpressError where no session has an identifier for it, BadInput where it can never be
    kept to on such rows (check_fits).
    """
    if isinstance(policy, Exact | KeepAll):
        return Session(lease, policy, reading, first, in_order)
    if select.dispatch(type(policy)) is select.dispatch(object):  # the latter serves nothing
        raise ImpressError(f"session: policy {policy!r} is not one this version can serve")
    if first:
        raise BadInput(f"session: {policy.name} chooses among all rows, it cannot skip {first}")
    check_fits(policy, reading.geometry, lease.sources[0].held.record.window)
    return SparseSession(lease, policy, reading, in_order)
