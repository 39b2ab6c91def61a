"""The index made again from the segments alone: what `impress rebuild` does.

segments ─scan→ header records ─resolve→ one owner for each byte, verified ─> a new index

Every page of every segment is looked at: a header record begins on a page with the magic, a right
checksum and this store's uuid. Rows are judged by their sums. Of sound spans that claim the same
bytes, or hold the same windows, the one of the higher generation wins. The old index is set aside,
not deleted. Where it can be read, it is used for this alone: what it notes as still to be erased
is left out, and noted in the new one, as is what is spent of the day's writes; and no id that it
gave out is given out again, as another process may hold what had it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from impress.blockhash import is_name
from impress.errors import FormatError, StoreFailed, StoreLocked
from impress.spans.format import SpanHeader, SpanRecord, decode_extents, encode_index
from impress.spans.records import wrong_record
from impress.spans.tables import read_header
from impress.upkeep.asked import asked
from impress.upkeep.scan import Progress, Rebuilt, scan
from impress.write.directory import (
    IDENTITY,
    MADE,
    OLD,
    Identity,
    Shard,
    read_identity,
    restore_identity,
    shards_of,
    writing,
)
from impress.write.folders import said_of_no_segments
from impress.write.index import Index
from impress.write.strays import said_of_strays
from tiers.base import PAGE, Extent
from tiers.coalesce import slices
from tiers.errors import MediumError
from tiers.files import segment_paths, sync_path
from tiers.iopool import IoPool, Lane
from tiers.slots import BufferPool
from tiers.space import Space
from tiers.ssd import SsdTier

_SLICE_BYTES: Final = 2 << 20
_READ_BYTES: Final = 32 << 20  # of rows, read and summed together
_THREADS: Final = 8
_TIMEOUT_S: Final = 600.0
_BATCH: Final = 1024  # spans a transaction
_NO_SUMS: Final = np.empty(0, dtype=np.uint64)
_Name = int | tuple[bytes, bytes]  # what only one span may have: an id; keys before and after


def rebuild_store(
    path: Path, *, dry_run: bool = False, progress: Progress | None = None,
    found: Rebuilt | None = None,
) -> Rebuilt:  # fmt: skip
    """Scan, verify, and put new indexes in place (not when `dry_run`), shard by shard.

    Needs the writers' locks: a shard that is open for writing, cannot be read (its disk is not
    mounted, say), or whose new index cannot be written, is named and left alone. `found`: filled
    even where this raises. Raises FormatError (no store, no segments); StoreLocked, StoreFailed (no
    shard was rebuilt).
    """
    say, found = progress or (lambda what, done, of: None), found or Rebuilt()
    found.notes += said_of_strays(path)
    shards = [s for s in shards_of(path) if s.unmounted() or s.segments.is_dir()]
    errors, mine = list[Exception](), list[Shard]()
    if not shards:
        read_identity(path)  # says what is wrong with a path that is not a store
        raise FormatError("; ".join([f"{path}: no segments to rebuild from", *found.notes]))
    try:
        for shard in shards:
            try:
                with writing(shard):
                    shard.lock()
                mine.append(shard)
            except StoreLocked as err:
                errors.append(err)
                found.busy_shards.append(shard.name)
                found.notes.append(f"left alone: {err}")
            except StoreFailed as err:
                _note_failure(found, errors, shard, err)
        identity = _identity(path, mine, found, say, dry_run=dry_run) if mine else None
        for shard in mine:
            assert identity is not None
            one = Rebuilt()
            try:
                _rebuild(shard, identity, one, say, dry_run=dry_run)
                found.add(one)
            except (MediumError, OSError, StoreFailed) as err:  # the others are done all the same
                _note_failure(found, errors, shard, err)
            shard.unlock()  # its server need not wait for the others
    except OSError as err:  # a folder or a segment that may not be read: not an empty one
        raise _failed(path, err) from None
    finally:
        for shard in mine:
            shard.unlock()
    if len(errors) == len(shards):
        failed = [_failed(path, err) for err in errors]
        if len(failed) == 1 or all(isinstance(err, StoreLocked) for err in failed):
            raise failed[0]
        raise StoreFailed("; ".join(map(str, failed)))
    return found


def _note_failure(found: Rebuilt, errors: list[Exception], shard: Shard, err: Exception) -> None:
    """Note that a shard is left as it was."""
    errors.append(err)
    found.failed_shards.append(shard.name)
    found.notes.append(f"shard {shard.name} failed: {_failed(shard.path, err)}")


def _failed(path: Path, err: Exception) -> Exception:
    """What is raised for it."""
    if isinstance(err, OSError):
        return StoreFailed(f"{err.filename or path}: {err.strerror}")
    return StoreFailed(str(err)) if isinstance(err, MediumError) else err


def _rebuild(
    shard: Shard, identity: Identity, found: Rebuilt, say: Progress, *, dry_run: bool
) -> None:
    """One shard, locked; adds what it holds to `found`. Raises MediumError, StoreFailed."""
    ours = _ours(scan(shard.segments, found, say), identity, shard, found)
    notes, wear, n_spans, last = asked(shard, found)
    if said := said_of_no_segments(shard.segments, n_spans):  # else all it held were free space
        raise StoreFailed(said)
    sound = _resolved(_spared(ours, notes, found), shard, found, say)
    found.spans += len(sound)
    found.windows += sum(h.record.n_windows for h in sound)
    found.n_bytes += sum(h.record.owned_bytes for h in sound)
    if not dry_run:
        # So that none is given out again; a renamed one's index notes others', too.
        noted = [span for span in (*notes, last) if span in shard.spans]
        known = [*noted, *(header.record.span_id for header in ours)]
        _install(shard, sound, notes, max(known, default=0), wear)


def _identity(
    path: Path, shards: Sequence[Shard], found: Rebuilt, say: Progress, *, dry_run: bool
) -> Identity:
    """The store's, or what headers in any of these shards say where its file is lost."""
    if (path / IDENTITY).exists():
        return read_identity(path)
    # What this scan finds is counted and noted by the later scan of each shard.
    said = Counter[Identity]()  # what most say: a shard of another store may have been copied here
    errors = list[OSError]()
    for shard in shards:
        try:
            for header in scan(shard.segments, Rebuilt(), say):
                said[Identity(1, header.store_uuid, header.geometry, header.record.window)] += 1
        except OSError as err:
            errors.append(err)
    if not said:
        if errors:
            raise errors[0]
        raise FormatError(f"{path}: no store here: no {IDENTITY}, and no span to make it from")
    ((identity, _),) = said.most_common(1)
    would_be = "would be made" if dry_run else "made"
    found.notes.append(f"{IDENTITY} was missing: {would_be} again from a span's header")
    if not dry_run:
        restore_identity(path, identity)
    return identity


def _spared(
    headers: Sequence[SpanHeader], notes: Mapping[int, bytes], found: Rebuilt
) -> list[SpanHeader]:
    """Those that are not to be erased."""
    places, anywhere = set(), set()
    for span, note in notes.items():
        try:
            places.add((span, decode_extents(note)[0][:2]))
        except FormatError:  # logged at the next open, which erases all that is free
            anywhere.add(span)
    kept = (header for header in headers if header.record.span_id not in anywhere)
    spared = [h for h in kept if (h.record.span_id, h.record.meta[:2]) not in places]
    found.purged += len(headers) - len(spared)
    return spared


# ---- resolve ---------------------------------------------------------------------------------


def _ours(
    headers: Iterable[SpanHeader], identity: Identity, shard: Shard, found: Rebuilt
) -> list[SpanHeader]:
    """Those of this store and shard that make sense, `_lightened`."""
    ours, other = [], []  # `other`: of another store, or of another geometry than this one's
    n_strange = 0
    for header in headers:
        record = header.record
        if header.store_uuid != identity.uuid:
            found.foreign += 1
            other.append(_lightened(header))
            continue
        if (header.geometry, record.window) != (identity.geometry, identity.window):
            other.append(_lightened(header))
            found.torn += 1
            continue
        if record.span_id not in shard.spans:
            n_strange += 1
            continue
        wrong = len(header.sums) != header.layout.n_sums
        if wrong or wrong_record(record, identity.geometry, identity.window):
            found.torn += 1
        else:
            ours.append(_lightened(header))
    if other and not ours and not n_strange:  # a header has a checksum, that file has none
        its, theirs = (
            f"store {uuid.hex()[:8]}…, {geometry} in windows of {window}"
            for uuid, geometry, window in (
                (identity.uuid, identity.geometry, identity.window),
                (other[0].store_uuid, other[0].geometry, other[0].record.window),
            )
        )
        raise StoreFailed(
            f"{IDENTITY} says {its}, all {len(other)} headers in shard {shard.name} say {theirs}: "
            "move the folder away if it was copied here, else that file, which rebuild makes again "
            "from headers"
        )
    if n_strange:
        found.notes.append(
            f"{n_strange} headers in shard {shard.name} are numbered as another folder's: give a "
            "folder that was renamed its name back and rebuild again, or delete a copy"
        )
    return ours


def _lightened(header: SpanHeader) -> SpanHeader:
    """Without what is read again as rows are verified: of a full shard's headers that would take
    gigabytes."""
    return replace(header, sums=_NO_SUMS, importance=None, order=None)


def _resolved(
    headers: Sequence[SpanHeader], shard: Shard, found: Rebuilt, say: Progress
) -> list[SpanHeader]:
    """One owner for each byte, one span for each id and each run of windows, its rows sound.

    That is the one of the highest generation whose every piece matches its sum: a header may have
    outlived the rows that a crash cut off. Of two of one generation, the one with more windows.
    """
    space = Space()
    for path in segment_paths(shard.segments):
        space.add(int(path.stem), path.stat().st_size // PAGE * PAGE)
    sound: list[SpanHeader] = []
    taken: set[_Name] = set()
    ssd = SsdTier(shard.segments, PAGE, None, read_only=True, number=shard.number)
    pool, buffers = IoPool(_THREADS, "impress-rebuild"), BufferPool(None)
    total, done = sum(h.record.data_bytes for h in headers), 0
    newest = sorted(headers, key=lambda h: (h.record.span_id, h.record.n_windows), reverse=True)
    try:
        for header in newest:
            say("verifying", done, total)
            record = header.record
            done += record.data_bytes
            names: set[_Name] = {record.span_id, (record.key_before, record.key_after)}
            extents = record.meta, *record.parts
            is_cut = any(e.off + e.length > space.sizes.get(e.segment, 0) for e in extents)
            if names & taken or not (is_cut or _claimed(space, extents)):
                found.superseded += 1
            elif not is_cut and _rows_match(record, ssd, pool, buffers):
                taken |= names
                sound.append(header)
            else:
                space.give(() if is_cut else extents)
                found.damaged += 1
        say("verifying", total, total)
    finally:
        if pool.close(1.0):  # a read that hangs would hold whoever closes its queue
            ssd.close()
    return sound


def _claimed(space: Space, extents: Sequence[Extent]) -> bool:
    """Take all this space, or none of it."""
    for n, extent in enumerate(extents):
        try:
            space.claim([extent])
        except ValueError:
            space.give(extents[:n])
            return False
    return True


def _rows_match(record: SpanRecord, ssd: SsdTier, pool: IoPool, buffers: BufferPool) -> bool:
    """Whether its header still reads back, and every piece of its rows. Raises StoreFailed where a
    read says nothing of that."""
    try:
        found = list[SpanHeader]()
        _done(pool, [lambda: found.append(read_header(ssd, record))])
        _read_rows(found[0], ssd, pool, buffers)
    except MediumError as err:
        if err.harmless:
            raise StoreFailed(f"rebuild: {err}") from None
        return False
    return True


def _read_rows(header: SpanHeader, ssd: SsdTier, pool: IoPool, buffers: BufferPool) -> None:
    """Read all of a span. Raises MediumError, StoreFailed."""
    layout = header.layout
    for layer in range(layout.n_layers):
        for plane, shape in enumerate(layout.planes):
            step = max(1, _READ_BYTES // shape.chunk_bytes)
            for first in range(0, layout.n_windows, step):
                count = min(step, layout.n_windows - first)
                buffer = buffers.acquire(count * shape.chunk_bytes)
                assert buffer is not None, "the pool has no budget"
                read = header.read_of(layer, plane, first, buffer.array)
                try:
                    _done(pool, [partial(ssd.read, p) for p in slices([read], _SLICE_BYTES)])
                finally:
                    buffer.release()


def _done(pool: IoPool, tasks: Sequence[Callable[[], None]]) -> None:
    if not pool.submit(Lane.DEMAND, tasks).wait(_TIMEOUT_S):
        raise StoreFailed(f"rebuild: a read took more than {_TIMEOUT_S:g} s")


# ---- install ---------------------------------------------------------------------------------


def _install(
    shard: Shard, headers: Sequence[SpanHeader], notes: Mapping[int, bytes], last: int, wear: bytes
) -> None:
    """Make a new index beside the old one, then put it in its place. A crash leaves one of the two,
    and whoever locks the shard next puts the new one there if the old one is not (Shard.lock).

    `last`: the highest id found, or known to the old index, whatever became of it. `wear`: the old
    index's, where known.
    """
    draft, made, aside = shard.path / "index.new", shard.path / MADE, shard.path / OLD
    try:
        shutil.rmtree(draft, ignore_errors=True)
        index = Index(draft, create=True)
        try:
            ordered = sorted(headers, key=lambda h: h.record.span_id)
            for at in range(0, len(ordered), _BATCH):
                part = ordered[at : at + _BATCH]
                names = {h.record.root: h.name for h in part if is_name(h.name, h.record.namespace)}
                puts = {h.record.span_id: encode_index(h.record) for h in part}
                index.commit(puts, names=names)
            index.carry(notes, last, wear)
        finally:
            index.close()
        sync_path(draft)
        draft.rename(made)
        sync_path(shard.path)
        was_one = shard.index.exists()
        if was_one:
            shutil.rmtree(aside, ignore_errors=True)
        try:
            if was_one:
                shard.index.rename(aside)
            made.rename(shard.index)
        except BaseException:
            if was_one and not shard.index.exists():
                aside.rename(shard.index)
            raise
        sync_path(shard.path)
    except OSError as err:
        raise StoreFailed(f"rebuild: {err.filename or shard.path}: {err.strerror}") from None
    finally:  # what came to nothing takes no room, least of all on a disk that is full
        for left in (draft, made) if shard.index.exists() else (draft,):
            shutil.rmtree(left, ignore_errors=True)
