"""Following the other shards of a directory: what their writers store and take out, as it happens.

    look: which shards are there → their logs since the last look → the tree → say how far we are

In the background, every `Config.follow_every_s`; no request waits for it. Where a log does not
reach back far enough, or an index was made anew, the index is read whole and compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from impress.blockhash import key_after
from impress.errors import FormatError, ImpressError, StoreFailed
from impress.spans.format import decode_index, split_index
from impress.tree.merged import MergedCatalog
from impress.write.changes import Change
from impress.write.directory import Shard, shards_of
from impress.write.env import NothingYet
from impress.write.neighbours import Neighbour, Unread, spans_in, stamp_of
from tiers.ssd import SsdTier
from tiers.threads import Worker
from tiers.ticket import until

log = logging.getLogger("impress")

#: How many spans that wait for a place a look tries again, after one that changed something.
RETRIES: Final = 64
#: Longest wait for a look to end: on a disk that hangs it may not.
STOP_S: Final = 10.0
DROP_EVERY_S: Final = 1.0  # looks at others' files for those that are gone, where nothing changed

_T = TypeVar("_T")
OwnValues = Iterable[tuple[int, bytes]]


class Follower:
    """One look at a time; `look` may be called from any thread."""

    def __init__(
        self, path: Path, own: Shard | None, catalog: MergedCatalog, ssd: SsdTier, grace_s: float,
        forget: Callable[[int], None], orphaned: Callable[[list[int]], None],
        own_value: Callable[[int], bytes | None], own_values: Callable[[], OwnValues],
    ) -> None:  # fmt: skip
        """`forget`: told of others' spans that nobody here holds; `orphaned`: of own to delete.

        `own_value`: the index value of an own span; `own_values`: (id, value) of all.
        `grace_s`: longest that a read takes.
        """
        self._path = path
        self._own = own
        self._catalog = catalog
        self._ssd = ssd
        self._grace_s = grace_s
        self._forget = forget
        self._orphaned = orphaned
        self._own_value = own_value
        self._own_values = own_values
        self._turn = threading.Lock()  # held for a whole look; only looks and `close` take it
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: Worker | None = None
        self._unread = Unread(path)
        # What a look that was cut off leaves to the next one: the logs do not tell it again.
        self._gone: set[int] = set()  # deleted by their writers, and to be taken out
        self._orphans: list[int] = []  # one's own that hung from them: out of the tree; untold
        self._begun: set[int] = set()  # known to the catalog, but perhaps not shown
        self.error: ImpressError | None = None  # the last one, of any shard
        self._n_chances = 0  # the catalog's, when waiting spans were last due to be tried again
        self._to_try = 0  # of those that waited then, not tried yet
        self.neighbours: dict[int, Neighbour] = {}
        self._drop_due_s = 0.0
        try:
            self._discover()
        except BaseException:  # as in Neighbour
            self.close()
            raise

    def start(self, every_s: float, then: Callable[[], None]) -> None:
        """Look every `every_s` from now on, and call `then` after each look. Raises MediumError
        where no thread can be started."""
        if every_s:
            thread = Worker(self._work, "impress-follow", every_s, then)
            thread.start()
            self._thread = thread  # last: `stop` joins it

    def is_gone(self, span: int) -> bool:
        """Whether another's span was moved or taken out by its writer, as its index has it, or may
        have been, as that was made anew: a look that begins at once, where a thread looks, takes
        that over. False: that shard is unread."""
        theirs = self._of(span)
        if not theirs or any(self._unread.has(n.shard) for n in theirs):
            return False
        with suppress(ImpressError):
            anew = any(n.index.replaced() for n in theirs)  # what is read here is the old one
            value = None if anew else self.value(span)
            if value is None or not self._catalog.knows(span, value):
                self._wake.set()
                return True
        return False

    def values(self) -> Iterator[tuple[int, bytes]]:
        """Everything that the others hold now; for opening. A shard that cannot be read is left out
        until the next look."""

        def taken_over(neighbour: Neighbour) -> dict[int, bytes]:
            neighbour.generation, values = neighbour.read()
            return values

        for values in self._of_all(taken_over):
            yield from values.items()

    def heat(self) -> dict[int, tuple[int, int]]:
        """Span -> (leases, lease counter at the last one), of all the others; for opening.

        Each writer counts its own leases: counters are shifted so that all end at the same value.
        """
        found = list(self._of_all(Neighbour.heat))
        lasts = [max((used for _, used in heat.values()), default=0) for heat in found]
        last = max(lasts, default=0)
        return {
            span: (hits, used + last - theirs)
            for heat, theirs in zip(found, lasts, strict=True)
            for span, (hits, used) in heat.items()
        }

    def _of_all(self, what: Callable[[Neighbour], _T]) -> Iterator[_T]:
        """Each neighbour's answer; one that cannot answer is left out until the next look."""
        for number, neighbour in self.neighbours.items():
            try:
                found = what(neighbour)
            except ImpressError as err:
                self.error = err
                self._unread.failed(neighbour.shard, stamp_of(neighbour.shard), err)
                neighbour.close()
                self.neighbours = {n: one for n, one in self.neighbours.items() if n != number}
                continue
            yield found

    def left_out(self) -> dict[str, str]:
        """Names of shards that hold something and cannot be read, and why; until a look can."""
        return self._unread.left_out()

    def absent(self) -> None:
        """Nothing of theirs is read from here on, except headers: their writers need not wait."""
        for neighbour in self.neighbours.values():
            neighbour.absent()

    def params(self) -> list[Path]:
        """Where the others keep probe parameters."""
        return [neighbour.shard.params for neighbour in self.neighbours.values()]

    def ledgers(self) -> list[tuple[bytes, bytes]]:
        """The guards' ledgers of the others, by key."""
        return [pair for n in self.neighbours.values() for pair in n.index.ledgers()]

    def names(self) -> dict[bytes, str]:
        """Root key -> what its namespace is called, in the others' indexes."""
        return {k: name for n in self.neighbours.values() for k, name in n.index.names().items()}

    def value(self, span: int) -> bytes | None:
        """A span's index value, whoever wrote it."""
        if span in self._catalog.own:
            return self._own_value(span)
        return next((n.index.value(span) for n in self._of(span)), None)

    def history(self, span: int) -> bytes | None:
        """What requests have shown of another's span, as its writer saved it."""
        return next((n.index.history(span) for n in self._of(span)), None)

    def history_tick(self, span: int) -> int | None:
        """Requests noted by the writer of another's span, as it saved them."""
        return next((n.index.history_tick() for n in self._of(span)), None)

    def look(self) -> bool:
        """Take over what others changed; whether anything was."""
        with self._turn:
            if self._stop.is_set():
                return False
            with suppress(StoreFailed):  # no more files, say: those it knows are followed
                self._discover()
            changed = bool(self._gone)
            tried, self._n_chances = self._n_chances, -1  # if cut off, the next look tries again
            for neighbour in self.neighbours.values():
                neighbour.let_go(2 * self._grace_s)
                shard, stamp = neighbour.shard, stamp_of(neighbour.shard)
                if self._unread.rests(shard, stamp):
                    continue
                try:
                    changed |= self._catch_up(neighbour)
                    changed |= self._unread.read(shard)  # what waits for it may be tried again
                except (ImpressError, OSError) as err:
                    self._unread.failed(shard, stamp, err)
            self._take_out()  # last: new spans, of any shard, take places of these
            chances = self._catalog.waiting.n_chances
            if changed or chances != tried:
                self._to_try = len(self._catalog.waiting)
            if self._to_try > 0:
                self._to_try -= RETRIES
                self._catalog.retry(RETRIES, self.value)
            self._n_chances = chances
            if changed or monotonic() >= self._drop_due_s:  # files go after their spans
                self._ssd.drop_deleted(2 * self._grace_s, by_name=changed)
                self._drop_due_s = monotonic() + DROP_EVERY_S
            self.say()
            return changed

    def say(self) -> None:
        """Tell the writers how far this process has followed, and what it still holds."""
        for n in self.neighbours.values():
            n.say(self._catalog.held_after(n.shard.spans))

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.ended(STOP_S)

    def close(self) -> bool:
        """The writers need not wait for this process any more: it reads nothing of theirs. False:
        a look hangs, and may still go on; then everything stays open."""
        self.stop()
        if not until(lambda: not self._turn.locked(), STOP_S):
            log.error(
                "%s: a look at the other shards hangs: until this process ends, their writers wait "
                "for it as long as a lease lasts", self._path,
            )  # fmt: skip
            return False
        for neighbour in self.neighbours.values():  # a look that begins now ends at once
            neighbour.close()
        return True

    # ---- a look ----------------------------------------------------------------------------

    def _work(self, every_s: float, then: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:  # nothing here may end the thread, not even a wait without memory
                self._wake.wait(every_s)
                self._wake.clear()
                if not self._stop.is_set():
                    self.look()
                    then()
            except Exception:
                with suppress(Exception):  # a log handler's own
                    log.exception("following the other shards failed; the next look tries again")

    def _of(self, span: int) -> list[Neighbour]:
        return [n for n in list(self.neighbours.values()) if span in n.shard.spans]

    def _discover(self) -> None:
        for shard in shards_of(self._path):
            ours = self._own is not None and shard.number == self._own.number
            if ours or shard.number in self.neighbours:
                continue
            stamp = stamp_of(shard)  # before: what is being made may be whole a moment later
            if self._unread.rests(shard, stamp):
                continue
            try:
                neighbour = Neighbour(shard)
            except ImpressError as err:
                self.error = self.error if isinstance(err, NothingYet) else err
                self._unread.failed(shard, stamp, err)
                continue
            try:
                self._unread.read(shard)
                self._ssd.join(shard.number, shard.segments)
                self.neighbours = {**self.neighbours, shard.number: neighbour}
            except BaseException:
                neighbour.close()
                raise

    def _catch_up(self, n: Neighbour) -> bool:
        """Show what is new in a shard; what is to be taken out is added to `_gone`."""
        if n.index.replaced():
            n.reopen()
        n.whole |= not all(map(self._catalog.knows, n.late))
        if n.whole:
            return self._compare(n)
        if n.index.version() == n.version:
            return False
        found = n.index.changes(n.generation)
        if found is None:
            return n.index.refresh() != n.generation and self._compare(n)
        version, generation, changes, values = found
        if changes:
            # First: new files may have their names.
            self._ssd.drop_deleted(2 * self._grace_s, folder=n.shard.number)
            self._apply(n, changes, values)
        n.version, n.generation = version, generation  # last: else an error would skip them
        return bool(changes)

    def _apply(self, n: Neighbour, changes: list[Change], values: dict[int, bytes]) -> None:
        """Do in the tree what the shard's writer did in its own."""
        theirs = n.shard.spans  # the log of a copied shard speaks of the other's spans
        self._gone.update(c.old for c in changes if c.old in theirs and self._catalog.knows(c.old))
        for span, _, prefix in changes:
            if span not in values or span not in theirs:
                continue
            known = self._catalog.knows(span) and span not in self._begun
            if known and not self._catalog.knows(span, values[span]):
                n.late.add(span)  # a rebuild gave the id out again, of one that is held here
            if not known:
                with suppress(FormatError):
                    before = _before(span, values[span], prefix, self._catalog.window)
                    self._admit(span, values[span], before)

    def _admit(self, span: int, value: bytes, before: bytes | None) -> None:
        """Show it, unless it is damaged. `before`: the labels before it; None: it is a stray."""
        self._begun.add(span)
        if not self._catalog.knows(span):  # what had the id before has left; its copies may be yet
            self._forget(span)  # about to go, and would answer under the labels of this one
        with suppress(FormatError):
            if before is None:
                self._catalog.admit_stray(span, value)
            else:
                self._catalog.admit(span, value, before, self._gone)
        self._begun.discard(span)

    def _take_out(self) -> None:
        """Take out spans whose writer deleted them. If cut off, it is done again from the start."""
        gone = self._gone
        if not gone and not self._orphans:
            return
        self._catalog.forget_waiting(gone)
        self._catalog.retry(self._catalog.n_heirs(gone), self.value, gone)
        self._orphaned(self._catalog.withdraw(gone, self._orphans))
        self._orphans = []
        self._catalog.deleted(gone, [])
        for span in gone:
            if not self._catalog.knows(span):  # else somebody here still holds it
                self._forget(span)
        self._gone = set()

    def _compare(self, n: Neighbour) -> bool:
        """Read a shard whole, and take over what differs.

        A shard that was deleted and begun again gives out the same ids: where the value differs it
        is another span, shown once the one before is out, which somebody here may hold.
        """
        n.whole = True  # until that is done
        generation, values = n.read()
        self._ssd.drop_deleted(2 * self._grace_s, folder=n.shard.number)
        known = self._catalog.known(n.shard.spans)
        n.late = {span for span in known if _is_another(values.get(span), known[span])}
        ids, here = {span for span, kept in known.items() if kept}, values.keys() - n.late
        self._begun |= self._gone & here  # back, in an index made anew
        self._gone -= here
        whole = MergedCatalog(self._catalog.window, range(0))
        if new := here - (ids - self._begun):
            whole.load(chain([*self._own_values()], self._theirs()), {})
        # Only now: where the span that replaces one that is gone cannot be read, both stay.
        self._gone |= ids - here
        if new:
            for span, before in whole.before(new):
                new.discard(span)
                self._admit(span, values[span], before)
            for span in new:
                self._admit(span, values[span], None)
        n.generation, n.whole = generation, False
        return True

    def _theirs(self) -> Iterator[tuple[int, bytes]]:
        """What the others hold, as far as it can be read; looks at them report what cannot."""
        for n in self.neighbours.values():
            with suppress(ImpressError):
                yield from spans_in(n.index, n.shard)


def _is_another(value: bytes | None, kept: bytes | None) -> bool:
    """Whether an index value is that of another span than the one that was `kept`, or that one was
    taken out. A value that is damaged, or not there (None), is not."""
    if value is None or (kept is not None and value.startswith(kept)):
        return False
    with suppress(FormatError):
        split_index(value)
        return True
    return False


def _before(span: int, value: bytes, prefix: bytes, window: int) -> bytes:
    """The labels before a span, out of `prefix`: those up to its end, as a log has them. Raises
    FormatError where its key stands for others: its rows would be served after the wrong ones."""
    kept, labels = split_index(value, window)
    record, before = decode_index(span, kept), prefix[: len(prefix) - len(labels)]
    if key_after(record.root, before, window) != record.key_before:
        raise FormatError(f"index: the log has span {span} in another place")
    return before
