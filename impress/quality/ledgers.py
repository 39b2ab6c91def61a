"""The guard's ledgers of a store, by namespace and policy; each is a value in the index.

0   2 version = 2          24  8 × 9 counts, as in `Ledger`: requests, shadows, exceeded,
2   1 state                       understated, dropped, sent back, reruns, flips, compared
3   1 0                    96  8 worst missing mass, then 8 worst KL, float64
4   4 shadows wanted      112  8 shadows and dropped ones before it was last sent back
8   8 target, float64     120  … recent shadows, a bit each, 1: over; then the policy, UTF-8
16  4 recent shadows       -8  8 xxh3_64 of all before
20  4 length of the policy

Version 1 is the same without the count at 112, and can be read too.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from impress.config import Config
from impress.errors import FormatError, StoreFailed
from impress.quality.guard import STATES, Decision, Ledger, Rerun, Weighed
from impress.quality.names import name_of
from impress.selection.identify import RULES

log = logging.getLogger("impress")

_VERSION: Final = 2
_HEADS: Final = {1: struct.Struct("<HBxIdII9Qdd"), _VERSION: struct.Struct("<HBxIdII9QddQ")}
_MOST_NAME: Final = 400  # bytes


class Entry(NamedTuple):
    """A ledger and its policy."""

    policy: str
    ledger: Ledger


class Ledgers:
    """Thread-safe. Ledgers whose values are damaged, newer or of other settings begin again."""

    def __init__(
        self,
        fetch: Callable[[bytes], bytes | None] = lambda key: None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """`fetch`: a saved value; `save`: asks for a `dump` soon, off the request's path."""
        self._fetch = fetch
        self._save = save
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        self._changed: set[bytes] = set()
        self._dumped: set[bytes] = set()  # with the last dump

    def open(self, namespace: bytes, policy: Any, config: Config) -> bytes:
        """The key of a policy's ledger in a namespace; the ledger exists from now on."""
        name = name_of(policy)
        key = namespace + _digest(name)
        name = name.encode()[:_MOST_NAME].decode(errors="ignore")  # shown; the key is of all of it
        target, n_wanted = target_of(policy, config), config.guard_shadows
        with self._lock:
            if key in self._entries:
                return key
        found = None
        with suppress(FormatError, StoreFailed):  # damaged, or given up by LMDB: earn trust again
            found = decode(self._fetch(key))
        fresh = Ledger(target, n_wanted)
        if found is not None and (found.ledger.target, found.ledger.n_wanted) == (target, n_wanted):
            fresh = found.ledger
        with self._lock:
            self._entries.setdefault(key, Entry(name, fresh))
        return key

    def decide(self, key: bytes, share: float) -> tuple[Decision, str]:
        """How to serve the next request, and the state in words."""
        with self._lock:
            ledger = self._entries[key].ledger
            self._changed.add(key)
            return ledger.decide(share, key), ledger.said()

    def said(self, key: bytes) -> str:
        """The state in words."""
        with self._lock:
            return self._entries[key].ledger.said()

    def note(self, key: bytes, weighed: Weighed) -> None:
        """Count one shadow; a change of state is logged and saved."""
        with self._lock:
            name, ledger = self._entries[key]
            line = ledger.note(weighed)
            self._changed.add(key)
            bad = ledger.state == "exact"
        if line:
            level = logging.WARNING if bad else logging.INFO
            log.log(level, "guard: %s, namespace %s…: %s", name, key[:8].hex(), line)
            self._save()

    def note_rerun(self, key: bytes, rerun: Rerun) -> None:
        with self._lock:
            self._entries[key].ledger.note_rerun(rerun)
            self._changed.add(key)

    def dropped(self, key: bytes) -> None:
        """A shadow came to nothing."""
        with self._lock:
            self._entries[key].ledger.n_dropped += 1
            self._changed.add(key)

    def dump(self) -> dict[bytes, bytes]:
        """Key -> value, of those that changed since the last dump."""
        with self._lock:
            values = {key: encode(self._entries[key]) for key in self._changed}
            self._changed, self._dumped = set(), self._changed
            return values

    def not_saved(self) -> None:
        """The last dump did not reach the index: the next one gives it again."""
        with self._lock:
            self._changed |= self._dumped

    def snapshot(self) -> list[dict[str, Any]]:
        """Each ledger as plain data."""
        with self._lock:
            return [shown(key, entry) for key, entry in self._entries.items()]


def target_of(policy: Any, config: Config) -> float:
    """The missing mass a policy says it keeps to; the operator's if it says none."""
    own = getattr(policy, "max_missing_mass", None)
    return float(own) if isinstance(own, Real) else config.guard_missing_mass


def _digest(name: str) -> bytes:
    """The end of the key of a policy's ledger. RULES are in it alone: the name is shown."""
    salt = RULES.to_bytes(16, "little")
    return hashlib.blake2b(name.encode(), digest_size=8, salt=salt).digest()


def shown(key: bytes, entry: Entry) -> dict[str, Any]:
    """A ledger for people and for JSON."""
    ledger = entry.ledger
    return {
        "namespace": key[:-8].hex(),
        "policy": entry.policy,
        "state": ledger.state,
        "said": ledger.said(),
        "target": ledger.target,
        "most_mass": ledger.most_mass,
        "wanted": ledger.n_wanted,
        "clean": ledger.n_clean,
        "requests": ledger.n_requests,
        "shadows": ledger.n_shadows,
        "exceeded": ledger.n_exceeded,
        "understated": ledger.n_understated,
        "dropped": ledger.n_dropped,
        "sent_back": ledger.n_sent_back,
        "bound": ledger.bound,
        "worst_missing_mass": ledger.worst_mass,
        "reruns": ledger.n_reruns,
        "worst_kl": ledger.worst_kl,
        "flips": ledger.n_flips,
        "compared": ledger.n_compared,
    }


def decoded(values: Iterable[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    """The ledgers of saved values. Damaged ones are left out, and those of other RULES, which no
    request goes by; not where the name was cut (UTF-8: by up to 3 bytes more), so that no key can
    be made of it."""
    found = ((key, decode(raw)) for key, raw in values)
    return [
        shown(key, entry)
        for key, entry in found
        if entry is not None
        and (len(entry.policy.encode()) >= _MOST_NAME - 3 or key[-8:] == _digest(entry.policy))
    ]


def encode(entry: Entry) -> bytes:
    """The value; see above."""
    ledger, name = entry.ledger, entry.policy.encode()
    bits = np.packbits(np.fromiter(ledger.recent, dtype=bool), bitorder="little")
    n_recent = len(ledger.recent)
    head = _HEADS[_VERSION].pack(
        _VERSION, STATES.index(ledger.state), ledger.n_wanted, ledger.target, n_recent, len(name),
        ledger.n_requests, ledger.n_shadows, ledger.n_exceeded, ledger.n_understated,
        ledger.n_dropped, ledger.n_sent_back, ledger.n_reruns, ledger.n_flips, ledger.n_compared,
        ledger.worst_mass, ledger.worst_kl, ledger.n_before,
    )  # fmt: skip
    raw = head + bits.tobytes() + name
    return raw + _sum(raw)


def decode(raw: bytes | None) -> Entry | None:
    """The inverse; None for a value that is missing, damaged or of another version."""
    try:
        return None if raw is None else _decoded(raw)
    except (FormatError, UnicodeDecodeError):
        return None


def _decoded(raw: bytes) -> Entry:
    if len(raw) < 10 or _sum(raw[:-8]) != raw[-8:]:
        raise FormatError("guard: a damaged value")
    head = _HEADS.get(int.from_bytes(raw[:2], "little"))
    if head is None or len(raw) < head.size + 8:
        raise FormatError("guard: a value of another version")
    version, state, n_wanted, target, n_recent, n_name, *rest = head.unpack_from(raw)
    requests, shadows, exceeded, understated, dropped, sent_back, reruns, flips, compared = rest[:9]
    end = head.size + (n_recent + 7) // 8
    if state >= len(STATES) or len(raw) != end + n_name + 8:
        raise FormatError("guard: a value of another version")
    # Version 1 does not say: a ledger that was sent back has all its tries again.
    before = rest[11] if version > 1 else shadows + dropped if sent_back else 0
    bits = np.frombuffer(raw, dtype=np.uint8, count=end - head.size, offset=head.size)
    recent = np.unpackbits(bits, count=n_recent, bitorder="little").astype(bool).tolist()
    ledger = Ledger(
        target, n_wanted, STATES[state], requests, shadows, exceeded, understated, dropped,
        sent_back, rest[9], reruns, rest[10], flips, compared,
        deque(recent), before,
    )  # fmt: skip
    return Entry(raw[end : end + n_name].decode(), ledger)


def _sum(raw: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")
