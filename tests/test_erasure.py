"""Purged data stays gone: across kills, power cuts and rebuilds, in segments and index."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import lmdb
import numpy as np
import pytest
from conftest import (
    MIB,
    SMALL,
    assert_serves,
    elsewhere,
    everything_in,
    kv_of,
    look,
    prompt,
    put_prompt,
    soon,
)
from typer.testing import CliRunner

import impress
from impress.cli.main import app
from impress.errors import StoreFailed
from impress.spans.format import MAGIC, SpanRecord
from impress.tree.catalog import Catalog
from impress.tree.merged import MergedCatalog
from impress.tree.nodes import Ids
from impress.tree.radix import RadixTree
from impress.upkeep.rebuild import rebuild_store
from impress.write import env
from impress.write.draft import Draft
from impress.write.env import compact
from impress.write.headers import Headers
from impress.write.limbo import Limbo
from impress.write.reclaim import Reclaim
from tiers.base import Extent, Slot
from tiers.errors import MediumError
from tiers.ssd import SsdTier

ROOT = Path(__file__).parent
GEOMETRY = impress.Geometry(2, 4, 2, 128, "float32")
Open = Callable[..., impress.PrefixStore]

_CUT_OFF = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from conftest import SMALL, look, prompt, put_prompt
import impress
from impress.repacking.span_copy import Copier
from impress.write.headers import Headers
store = impress.PrefixStore.open(sys.argv[1], impress.Geometry(2, 4, 2, 128, "float32"), "test",
                                 impress.Config(**SMALL, repack_every_s=0))
for seed in (1, 2):
    put_prompt(store, prompt(256, seed), wait_s=60)
store.flush()

def dies(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] in ("rows", "header"):
    look(store, prompt(256, 1))
    if sys.argv[3] == "header":  # it is written, and no transaction names it
        Headers.sync = lambda self, spans: dies() if list(spans) else None
    else:
        plane, planes = Copier._copy_plane, []
        Copier._copy_plane = lambda *a: plane(*a) if planes.append(1) or len(planes) < 3 else dies()
    store.repack()
if sys.argv[3] == "store":  # its header, too, is written, and no transaction names it
    Headers.sync = lambda self, spans: dies() if list(spans) else None
    put_prompt(store, prompt(64, 3), wait_s=60)  # beside the headers of the others
lease = store.lease(prompt(256, 1))
if sys.argv[3] == "purge":
    assert store.purge(namespaces=[store.namespace]) == (2, 1)
else:
    look(store, prompt(256, 1))
    assert store.repack().moved == 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def cut_off(folder: Path, what: str) -> Path:
    """A store whose writer was killed while a lease held a span that it had purged or repacked."""
    path = folder / "store"
    done = forks.python(_CUT_OFF, str(path), str(ROOT), what)
    assert done.returncode == -9, done.stderr
    return path


def row_of(tokens: np.ndarray) -> bytes:
    """One row of these tokens' keys, with its bytes on the medium, whatever the order of rows."""
    return kv_of(tokens, GEOMETRY)[0][0].transpose(1, 0, 2)[7].tobytes()


def segments(path: Path) -> Path:
    return path / "shards/main/segments"


def test_a_purge_that_was_killed_is_finished_by_the_next_open(tmp_path: Path) -> None:
    """Only the dead process knew what was to be erased: the rows stayed for good."""
    path = cut_off(tmp_path, "purge")
    assert row_of(prompt(256, 1)) in everything_in(segments(path))
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        held = everything_in(segments(path))
        assert row_of(prompt(256, 1)) not in held and prompt(256, 1).tobytes()[:256] not in held
        assert store.counters["unerased_spans"] == 0
        put_prompt(store, prompt(256, 3)).wait(60)
        assert not store.index.to_erase()
        store.check()
    assert rebuild_store(path).spans == 1


def test_a_rebuild_does_not_bring_back_what_a_killed_purge_took_out(tmp_path: Path) -> None:
    """The header still lay whole in free space: the span was served again."""
    path = cut_off(tmp_path, "purge")
    found = rebuild_store(path)
    assert found.spans == 0 and (found.purged, found.notes) == (1, [])
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert store.lookup(prompt(256, 1)) == 0
        assert row_of(prompt(256, 1)) not in everything_in(segments(path))


def test_a_rebuild_asks_the_old_index_by_no_module_of_where_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks there first: a lmdb.py in that folder was run, by root perhaps, the index could
    not be read, and what a purge had taken out was served again."""
    path, here = cut_off(tmp_path, "purge"), tmp_path / "here"
    here.mkdir()
    (here / "lmdb.py").write_text("open('was-run', 'w').close()\n")
    monkeypatch.chdir(here)
    found = rebuild_store(path)
    assert not (here / "was-run").exists()
    assert (found.spans, found.purged, found.notes) == (0, 1, [])


def test_a_rebuild_that_was_cut_off_before_its_last_step_forgets_nothing_to_erase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next rebuild found no index to ask: what a purge had taken out was served again."""
    path, rename = cut_off(tmp_path, "purge"), Path.rename

    def dies(old: Path, new: Path) -> Path:
        if old.name in ("index.made", "index.old"):  # nor does it put the old one back
            raise KeyboardInterrupt
        return rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", dies)
        rebuild_store(path)
    assert not (path / "shards/main/index").exists()
    found = rebuild_store(path)
    assert (found.spans, found.purged, found.notes) == (0, 1, [])
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert store.lookup(prompt(256, 1)) == 0
        assert row_of(prompt(256, 1)) not in everything_in(segments(path))


def test_a_purge_reaches_the_copy_that_a_killed_repack_left_behind(tmp_path: Path) -> None:
    path = cut_off(tmp_path, "repack")
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert_serves(store, prompt(256, 1), 256)
        assert everything_in(segments(path)).count(row_of(prompt(256, 1))) == 1
        assert store.purge() == (2, 0)
    assert row_of(prompt(256, 1)) not in everything_in(segments(path))
    assert rebuild_store(path).spans == 0


@pytest.mark.parametrize("at", ["rows", "header"])
def test_a_copy_that_a_kill_cut_off_is_erased_by_the_next_open(at: str, tmp_path: Path) -> None:
    """Nobody knew of it any more: its rows lay in free space, where no purge reached them. How much
    of the day's write budget had been spent was forgotten, too."""
    path = cut_off(tmp_path, at)
    assert everything_in(segments(path)).count(row_of(prompt(256, 1))) == 2
    config = impress.Config(**SMALL, daily_write_bytes=64 * MIB)
    with impress.PrefixStore.open(path, GEOMETRY, "test", config) as store:
        assert everything_in(segments(path)).count(row_of(prompt(256, 1))) == 1
        assert_serves(store, prompt(256, 1), 256)
        spent = 64 * MIB - (store._home.budget.left_bytes or 0)
        assert spent > 2.9 * 256 * GEOMETRY.token_bytes  # two stores and the copy
        put_prompt(store, prompt(256, 3)).wait(60)
        assert not store.index.to_erase()
        assert store.purge() == (3, 0)
        store.check()
    assert row_of(prompt(256, 1)) not in everything_in(segments(path))


def test_a_rebuild_does_not_bring_back_a_copy_that_no_transaction_named(tmp_path: Path) -> None:
    """A kill between its header and the index left a sound span of a higher generation."""
    path = cut_off(tmp_path, "header")
    found = rebuild_store(path)
    assert (found.spans, found.purged, found.superseded) == (2, 1, 0)
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert_serves(store, prompt(256, 1), 256)
        assert everything_in(segments(path)).count(row_of(prompt(256, 1))) == 1


def test_a_purge_reaches_the_copy_that_a_repack_makes_meanwhile(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy replaced what the purge had just listed: the copy stayed, and was served."""
    store = open_store(GEOMETRY, repack_every_s=0)
    tokens = prompt(256, 1)
    put_prompt(store, tokens).wait(60)
    look(store, tokens)
    listed, moved = store.catalog.own_records, []

    def repacked_behind() -> list[Any]:
        found = listed()
        monkeypatch.undo()
        moved.append(elsewhere(store.repack).moved)
        return found

    monkeypatch.setattr(store.catalog, "own_records", repacked_behind)
    assert store.purge()[0] == 1 and moved == [1]
    assert store.lookup(tokens) == 0
    assert row_of(tokens) not in everything_in(segments(store.path))
    store.check()


def test_a_purge_reaches_stores_that_were_handed_over_before_it(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listed what the tree held: stores that the committer had yet to show were then served."""
    store, begun, go_on = open_store(GEOMETRY), threading.Event(), threading.Event()
    first, second, his, sync = prompt(256, 1), prompt(256, 2), prompt(256, 3), SsdTier.sync

    def waits(ssd: SsdTier, slots: Iterable[Slot]) -> None:
        begun.set()
        assert go_on.wait(60)
        sync(ssd, slots)

    monkeypatch.setattr(SsdTier, "sync", waits)
    early = put_prompt(store, first, wait_s=60, tenant="hers")
    assert begun.wait(60)
    late = put_prompt(store, second, wait_s=60, tenant="hers")
    kept = put_prompt(store, his, wait_s=60, tenant="his")
    purging = threading.Thread(target=store.purge, args=("hers",))
    purging.start()
    while len(store._home.committer._jobs) < 3:  # type: ignore[union-attr]
        pass  # both stores, and what the purge waits for; the suite's time limit ends it
    go_on.set()
    purging.join(60)
    assert early.ready and late.refused == "purged" and kept.wait(60)
    assert store.lookup(first, tenant="hers") == store.lookup(second, tenant="hers") == 0
    held = everything_in(segments(store.path))
    assert row_of(first) not in held and row_of(second) not in held and row_of(his) in held
    assert store.stats()["refused"] == {"purged": 1}
    store.flush()
    store.check()
    store.close()
    assert rebuild_store(store.path).spans == 1  # his was under way, too, and is not to be erased


def evicted_beside_a_kept_one(store: impress.PrefixStore, hers: np.ndarray) -> None:
    """Evict her rows, which then lie in free space of a segment that is not empty."""
    put_prompt(store, hers, wait_s=60, tenant="hers").wait(60)
    put_prompt(store, prompt(64, 3), wait_s=60).wait(60)
    store.lease(prompt(64, 3)).release()
    assert store.evict(1) > 0
    assert row_of(hers) in everything_in(segments(store.path))


@pytest.mark.parametrize("stored", [False, True], ids=["given up", "stored"])
def test_a_purge_reaches_what_was_evicted_where_another_store_is_to_write(
    open_store: Open, stored: bool
) -> None:
    """It erased free space: this space was another store's, which gave it back unwritten."""
    store, hers, his = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1), prompt(64, 2)
    evicted_beside_a_kept_one(store, hers)
    keys, values = kv_of(his, GEOMETRY)
    with store.writer(his, tenant="his", wait_s=60) as writer:
        assert row_of(hers) in everything_in(segments(store.path))
        assert store.purge("hers") == (0, 0)
        assert len(store.index.to_erase()) == 1  # a crash is made good, too
        for layer in range(2 * stored):
            writer.put(layer, 0, keys[layer], values[layer])
    assert writer.stored.wait(60) == stored
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    assert_serves(store, his, 64 * stored, tenant="his")
    assert_serves(store, prompt(64, 3), 64)
    put_prompt(store, prompt(64, 4), wait_s=60).wait(60)
    assert not store.index.to_erase()
    store.check()


def test_a_purge_reaches_what_was_evicted_where_a_store_has_just_got_its_space(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That store is not yet on any list of stores under way."""
    store, hers, reserve = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1), SsdTier.reserve
    evicted_beside_a_kept_one(store, hers)

    def purged_before_it_is_told(ssd: SsdTier, n_bytes: int, least: int) -> Slot | None:
        slot = reserve(ssd, n_bytes, least)
        if least == n_bytes:  # its header's
            return slot
        monkeypatch.undo()
        assert elsewhere(lambda: store.purge("hers")) == (0, 0)
        return slot

    monkeypatch.setattr(SsdTier, "reserve", purged_before_it_is_told)
    with store.writer(prompt(64, 2), tenant="his", wait_s=60) as writer:
        assert row_of(hers) in everything_in(segments(store.path))
        assert len(store.index.to_erase()) == 1  # a crash is made good, too
    assert not writer.stored.wait(60)
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def begun_beside_a_purge(store: impress.PrefixStore, begin: Callable[[], object]) -> list[object]:
    """The result of `begin`, called on another thread after the purge has refused the stores under
    way and before it erases the free space."""
    wait_for, made = Reclaim.wait_for, list[object]()

    def meanwhile(reclaim: Reclaim, spans: Any) -> None:
        other = threading.Thread(target=lambda: made.append(begin()))
        other.start()
        other.join(60)
        wait_for(reclaim, spans)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reclaim, "wait_for", meanwhile)
        assert store.purge("hers") == (0, 0)
    return made


def test_a_purge_reaches_what_a_store_begun_beside_it_gives_back(open_store: Open) -> None:
    """It asked once which stores were under way, and later passed over space taken meanwhile."""
    store, hers, his = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1), prompt(64, 2)
    evicted_beside_a_kept_one(store, hers)
    (writer,) = begun_beside_a_purge(store, lambda: store.writer(his, tenant="his", wait_s=60))
    assert len(store.index.to_erase()) == 1  # a crash is made good, too
    writer.close(keep=False)
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def test_a_purge_reaches_room_for_a_header_whose_rows_found_none(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belonged to no store yet: its space was given back unerased."""
    store, hers = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1)
    evicted_beside_a_kept_one(store, hers)
    leaving = store._home.leaving
    reserve = leaving.reserve

    def in_vain(n_bytes: int, whole: int, least: int | None) -> Slot | None:
        if least is not None:
            return reserve(n_bytes, whole, least)
        # While the store waits for room for its rows.
        assert elsewhere(lambda: store.purge("hers")) == (0, 0)
        return None

    monkeypatch.setattr(leaving, "reserve", in_vain)
    with store.writer(prompt(64, 2), tenant="his") as writer:
        assert writer.stored.refused == "disk full"
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def test_a_store_begun_beside_a_purge_is_not_to_be_erased_any_more_once_it_is_ready(
    open_store: Open,
) -> None:
    store, hers, his = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1), prompt(64, 2)
    evicted_beside_a_kept_one(store, hers)
    (writer,) = begun_beside_a_purge(store, lambda: store.writer(his, tenant="his", wait_s=60))
    assert len(store.index.to_erase()) == 1
    for layer, (k, v) in enumerate(zip(*kv_of(his, GEOMETRY), strict=True)):
        writer.put(layer, 0, k, v)
    writer.close()
    assert writer.stored.wait(60)
    assert not store.index.to_erase()


def test_a_purge_reaches_what_a_header_did_not_need(open_store: Open) -> None:
    """The space after a header was given back unerased, and with READY the note that was to have it
    erased was gone."""
    n, geometry = 1024, impress.Geometry(2, 4, 2, 128, "float32")
    store = open_store(geometry, dram_bytes=0, segment_bytes=8 * MIB, write_buffer_bytes=8 * MIB)
    rng = np.random.default_rng(1)
    hers = [rng.standard_normal((2, n, 128), dtype=np.float32) for _ in range(4)]
    assert store.store(prompt(n, 1), hers[:2], hers[2:], tenant="hers", wait_s=60).wait(60)
    put_prompt(store, prompt(64, 3), wait_s=60).wait(60)
    store.lease(prompt(64, 3)).release()
    assert store.evict(1) > 0
    his = prompt(512, 2)
    keys, values = kv_of(his, geometry)
    with store.writer(his, tenant="his", wait_s=60) as writer:
        reserved = writer.draft.record.meta.length
        assert store.purge("hers") == (0, 0)
        for layer in range(2):
            writer.put(layer, 0, keys[layer], values[layer])
    assert writer.stored.wait(60)
    store.flush()
    assert writer.draft.record.meta.length < reserved
    left = np.frombuffer(everything_in(segments(store.path)), dtype=np.uint64)
    assert not np.isin(np.stack(hers).view(np.uint64), left).any()
    assert np.isin(np.stack(keys).view(np.uint64), left).all()
    assert_serves(store, his, 512, tenant="his")
    store.check()


def test_a_purge_reaches_what_a_trial_of_the_disk_takes(open_store: Open) -> None:
    store, hers = open_store(GEOMETRY, dram_bytes=0), prompt(64, 1)
    evicted_beside_a_kept_one(store, hers)
    room = store._home.leaving.reserve(64 * GEOMETRY.token_bytes)
    assert store.purge("hers") == (0, 0)
    store._home.committer.try_writing(room, 60)
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def test_a_purge_reaches_a_span_between_tree_and_limbo(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last lease ended, and no list had it while the purge looked: where another process might
    still read it, its space was later given back unerased."""
    store, hers = open_store(GEOMETRY, dram_bytes=0, follow_every_s=0), prompt(64, 1)
    put_prompt(store, hers, wait_s=60, tenant="hers").wait(60)
    put_prompt(store, prompt(64, 3), wait_s=60).wait(60)
    lease = store.lease(hers, tenant="hers")
    store._home.leaving.quarantine(lease.sources[0].held.record.span_id)
    store.flush()
    unheld, at_rest, purge = MergedCatalog.unheld, Reclaim.at_rest, store.catalog.purge
    forgotten, looking = threading.Event(), threading.Event()
    letting_go = threading.Thread(target=lease.release)

    def late(catalog: MergedCatalog, free: list[SpanRecord]) -> None:
        unheld(catalog, free)
        forgotten.set()
        assert looking.wait(60)

    def looks(reclaim: Reclaim, look: Callable[[], Any]) -> Any:
        looking.set()
        return at_rest(reclaim, look)

    def purged(roots: Collection[bytes]) -> list[int]:
        gone = purge(roots)
        letting_go.start()
        assert forgotten.wait(60)
        return gone

    def unlisted(folder: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("impress.write.reclaim.present", unlisted)
    monkeypatch.setattr("impress.write.reclaim.YIELD_TIMEOUT_S", 0)
    monkeypatch.setattr(MergedCatalog, "unheld", late)
    monkeypatch.setattr(Reclaim, "at_rest", looks)
    monkeypatch.setattr(store.catalog, "purge", purged)
    assert store.purge("hers") == (0, 1)
    letting_go.join(60)
    monkeypatch.undo()
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def test_a_purge_counts_a_span_whose_lease_ends_as_it_counts(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge counted in limbo first: a span that went there before the purge counted in the tree
    was in neither count, and the purge said that nothing was left to erase."""
    store, hers = open_store(GEOMETRY, dram_bytes=0, follow_every_s=0), prompt(64, 1)
    put_prompt(store, hers, wait_s=60, tenant="hers").wait(60)
    leases = [store.lease(hers, tenant="hers")]
    store._home.leaving.quarantine(leases[0].sources[0].held.record.span_id)
    store.flush()
    records, erase_free, erased = Limbo.records, Reclaim.erase_free, threading.Event()

    def erases(reclaim: Reclaim, kept: Sequence[Extent]) -> None:
        erase_free(reclaim, kept)
        erased.set()

    def looks(limbo: Limbo) -> list[SpanRecord]:
        found = records(limbo)
        if erased.is_set() and leases:
            leases.pop().release()
        return found

    def unlisted(folder: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("impress.write.reclaim.present", unlisted)
    monkeypatch.setattr(Reclaim, "erase_free", erases)
    monkeypatch.setattr(Limbo, "records", looks)
    assert store.purge("hers") == (0, 1)
    assert not leases
    monkeypatch.undo()
    store.flush()
    assert row_of(hers) not in everything_in(segments(store.path))
    store.check()


def test_a_purge_reaches_a_store_that_waits_for_its_space(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge knew of a store only once that had its space: one still waiting for it was served."""
    store, hers, his = open_store(GEOMETRY, dram_bytes=0), prompt(256, 1), prompt(256, 2)
    reserve = SsdTier.reserve

    def purged_behind(ssd: SsdTier, n_bytes: int, least: int) -> Slot | None:
        monkeypatch.undo()
        assert elsewhere(lambda: store.purge("hers")) == (0, 0)
        return reserve(ssd, n_bytes, least)

    for tokens, tenant in ((hers, "hers"), (his, "his")):
        monkeypatch.setattr(SsdTier, "reserve", purged_behind)
        stored = put_prompt(store, tokens, wait_s=60, tenant=tenant)
        assert stored.wait(60) == (tenant == "his")
        assert stored.refused == ("purged" if tenant == "hers" else "")
    store.flush()
    assert store.lookup(hers, tenant="hers") == 0
    assert_serves(store, his, 256, tenant="his")
    left = everything_in(store.path)
    assert row_of(hers) not in left and hers[:64].tobytes() not in left
    assert put_prompt(store, hers, wait_s=60, tenant="hers").wait(60)  # begun after it
    store.check()


@pytest.mark.parametrize("behind", [0, 128], ids=["of its own", "behind what is stored"])
def test_a_store_under_way_is_purged_and_one_begun_after_it_is_new(
    open_store: Open, behind: int
) -> None:
    """It became READY; after a purged prefix it failed, and left its rows and all token ids."""
    store, tokens = open_store(GEOMETRY, dram_bytes=0), prompt(256, 1)
    keys, values = kv_of(tokens, GEOMETRY)
    if behind:
        put_prompt(store, tokens[:behind]).wait(60)
    with store.writer(tokens, start=behind, wait_s=60) as writer:
        writer.put(0, behind, keys[0][:, behind:], values[0][:, behind:])
        assert store.purge() == (bool(behind), bool(behind))
        writer.put(1, behind, keys[1][:, behind:], values[1][:, behind:])
    assert not writer.stored.wait(60) and writer.stored.refused == "purged"
    store.flush()
    assert store.lookup(tokens) == 0
    row = keys[0].transpose(1, 0, 2)[200].tobytes()
    assert row not in everything_in(segments(store.path))
    put_prompt(store, prompt(256, 2)).wait(60)
    assert_serves(store, prompt(256, 2), 256)
    store.check()
    store.close()
    compact(store.path / "shards/main/index")
    assert tokens[:64].tobytes() not in everything_in(store.path)


@pytest.mark.parametrize("hers", [14, 5])
def test_no_token_of_a_purged_prompt_is_left_behind_what_others_have_in_the_index(
    open_store: Open, hers: int
) -> None:
    """A value of 2 to 4 KiB has a page of its own, and behind it is what the page had before: LMDB
    uses memory again as it is, and its compacting copy took such pages whole."""
    store = open_store(impress.Geometry(1, 1, 1, 64, "float16"), follow_every_s=0, dram_bytes=0)
    mine = [prompt(64 * hers, seed) for seed in range(20)]
    for seed, tokens in enumerate(mine):
        assert put_prompt(store, tokens, tenant="hers").wait(60)
        assert put_prompt(store, prompt(64 * (8 + seed % 3), 100 + seed), tenant="his").wait(60)
    store.close()
    done = CliRunner().invoke(app, ["purge", "--store", str(store.path), "--tenant", "hers"])
    assert done.exit_code == 0, done.output
    there = (store.path / "shards/main/index/data.mdb").read_bytes()
    fours = {there[at : at + 16] for at in range(len(there))}  # of tokens, wherever they begin
    for tokens in mine:
        assert not [i for i in range(len(tokens) - 4) if tokens[i : i + 4].tobytes() in fours]
    store = open_store(impress.Geometry(1, 1, 1, 64, "float16"))
    assert_serves(store, prompt(64 * 8, 100), 64 * 8, tenant="his")
    store.check()


def test_a_store_begun_while_a_purge_takes_out_what_it_hangs_from_is_purged(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that the span it hangs from had gone bad, and flush failed."""
    store, tokens = open_store(GEOMETRY, dram_bytes=0), prompt(256, 1)
    keys, values = kv_of(tokens, GEOMETRY)
    tenants, writers, purge = ("hers", "his"), [], MergedCatalog.purge
    for tenant in tenants:
        put_prompt(store, tokens[:128], wait_s=60, tenant=tenant).wait(60)

    def begun_before(catalog: MergedCatalog, roots: Collection[bytes]) -> list[int]:
        writers.extend(store.writer(tokens, wait_s=60, tenant=tenant) for tenant in tenants)
        return purge(catalog, roots)

    monkeypatch.setattr(MergedCatalog, "purge", begun_before)
    assert store.purge("hers") == (1, 1)
    for writer, is_kept in zip(writers, (False, True), strict=True):
        with writer:
            for layer in range(2):
                writer.put(layer, 0, keys[layer], values[layer])
        assert writer.stored.wait(60) == is_kept
    store.flush()
    assert writers[0].stored.refused == "purged"
    assert store.stats()["refused"] == {"purged": 1}
    assert store.lookup(tokens, tenant="hers") == 0
    assert_serves(store, tokens, 256, tenant="his")
    assert put_prompt(store, tokens, wait_s=60, tenant="hers").wait(60)  # begun after it
    store.check()


@pytest.mark.parametrize("when", ["while rows are put", "as its header is written"])
def test_what_another_shard_stores_behind_what_is_purged_meanwhile_leaves_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is in no tree: its rows stayed, as did the token ids before it in the log of changes."""
    a, b = (open_store(GEOMETRY, follow_every_s=0, dram_bytes=0) for _ in range(2))
    tokens = prompt(256, 1)
    keys, values = kv_of(tokens, GEOMETRY)
    put_prompt(a, tokens[:128]).wait(60)
    b.follow()
    write, written, gone = Headers.write, threading.Event(), threading.Event()

    def last_look(headers: Headers, draft: Draft, name: str) -> None:
        write(headers, draft, name)
        written.set()
        assert gone.wait(60)

    monkeypatch.setattr(Headers, "write", last_look)
    with b.writer(tokens, start=128, wait_s=60) as writer:
        for layer in range(2):
            writer.put(layer, 128, keys[layer][:, 128:], values[layer][:, 128:])
        if when == "while rows are put":
            a.purge()
            b.follow()
            gone.set()
    if not gone.is_set():
        assert written.wait(60)
        a.purge()
        b.follow()
        gone.set()
    assert not writer.stored.wait(60) and writer.stored.refused.startswith("prefix gone")
    assert written.is_set() == (when != "while rows are put")
    b.flush()
    path = b.path / "shards/1"
    assert keys[0].transpose(1, 0, 2)[200].tobytes() not in everything_in(path / "segments")
    b.check()
    b.close()
    compact(path / "index")
    assert tokens[:64].tobytes() not in everything_in(path)


def test_what_is_noted_to_be_erased_is_left_alone_where_another_span_lies_by_now(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space whose erasure failed is still given out; the next open erases the rest of it."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(512, 1)).wait(60)

        def failing(self: SsdTier, slot: object) -> None:
            raise MediumError("no")

        with monkeypatch.context() as faulty:
            faulty.setattr(SsdTier, "erase", failing)
            with pytest.raises(impress.StoreFailed, match="not all could be overwritten"):
                store.purge()
        put_prompt(store, prompt(128, 2)).wait(60)
        path = store.path
    last = kv_of(prompt(512, 1), geometry)[1][1].transpose(1, 0, 2)[-1].tobytes()
    assert last in everything_in(segments(path))
    with open_store(geometry) as store:
        assert last not in everything_in(segments(path))
        assert_serves(store, prompt(128, 2), 128)
        store.check()


def test_what_a_purge_erased_is_synced_before_it_returns(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut fills holes again that only the page cache knows of."""
    store = open_store(geometry)
    put_prompt(store, prompt(256, 1)).wait(60)
    mark, fdatasync, gone = row_of(prompt(256, 1)), os.fdatasync, []

    def watched(fd: int) -> None:
        fdatasync(fd)
        gone.append(mark not in everything_in(segments(store.path)))

    monkeypatch.setattr(os, "fdatasync", watched)
    assert store.purge() == (1, 0)
    assert any(gone)


@pytest.mark.parametrize("deleted", ["by the purge", "before it"])
def test_segments_that_were_deleted_are_gone_for_good_when_a_purge_returns(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    """Their names were removed in memory only: a power cut brought the segments back, with evicted
    rows that nothing had overwritten."""
    store = open_store(geometry)
    put_prompt(store, prompt(256, 1)).wait(60)
    folder, fsync = segments(store.path), os.fsync
    lasting = before = set(folder.iterdir())  # what a power cut leaves

    def watched(fd: int) -> None:
        nonlocal lasting
        fsync(fd)
        if os.path.samestat(os.fstat(fd), folder.stat()):
            lasting = set(folder.iterdir())

    monkeypatch.setattr(os, "fsync", watched)
    trim = store.ssd.trim
    if deleted == "by the purge":
        monkeypatch.setattr(store.ssd, "trim", lambda: 0)
    assert store.evict(1 << 30)
    monkeypatch.setattr(store.ssd, "trim", trim)
    store.purge()
    assert lasting == set(folder.iterdir()) < before


def test_a_purge_whose_deleted_segments_may_come_back_says_so(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(256, 1)).wait(60)
    folder, fsync = segments(store.path), os.fsync

    def failing(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), folder.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patched, pytest.raises(StoreFailed, match="not what is free"):
        patched.setattr(os, "fsync", failing)
        store.purge()
    store.purge()


def test_the_same_purge_again_finishes_one_that_was_cut_off_before_the_index_was_compacted(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It said that the namespace was not stored here, and left token ids in freed pages."""
    with open_store(geometry, namespace="one") as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
        assert store.purge() == (1, 0)
    index, mark = path / "shards/main/index", prompt(256, 1).tobytes()[:256]
    assert mark in everything_in(index)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "one"])
    assert done.exit_code == 2 and "is not stored here" in done.stderr
    assert mark not in everything_in(index)


def test_a_tenants_purge_that_was_killed_is_finished_by_the_same_again(tmp_path: Path) -> None:
    """Nothing matches any more, and it says so; what was cut off is still erased."""
    path = cut_off(tmp_path, "purge")
    marks = [row_of(prompt(256, 1)), prompt(256, 1).tobytes()[:256]]
    assert all(mark in everything_in(path) for mark in marks)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--tenant", "x"])
    assert done.exit_code == 2 and "nothing of tenant 'x' is stored here" in done.stderr
    assert not any(mark in everything_in(path) for mark in marks)


def test_a_tenant_that_has_nothing_is_no_success(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """vLLM's salt without its prefix, or a forgotten secret, got "0 spans erased" and status 0."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    with open_store(geometry, tenant_secret_file=str(secret)) as store:
        put_prompt(store, prompt(128), tenant="salt:acme").wait(60)
        path = store.path
    mark = row_of(prompt(128))
    keyed = ("--tenant-secret-file", str(secret))
    for args, said in (
        (("--tenant", "acme", *keyed), "--tenant salt:acme"),
        (("--tenant", "salt:acme"), "--tenant-secret-file"),
        (("--tenant", "salt:acme", "--namespace", "test", "--json"), "--tenant-secret-file"),
    ):
        missed = CliRunner().invoke(app, ["purge", "--store", str(path), *args])
        assert missed.exit_code == 2 and missed.stderr.count("\n") == 1, missed.output
        assert said in missed.stderr and not missed.stdout
        assert mark in everything_in(path)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--tenant", "salt:acme", *keyed])
    assert done.exit_code == 0 and "1 span erased" in done.stdout, done.output
    assert mark not in everything_in(path)


def test_an_empty_tenant_is_no_name_for_everything_that_has_none(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """From `--tenant "$T"` with T not set: it erased all of every namespace, and ended with 0."""
    with open_store(geometry, namespace="one") as store:
        put_prompt(store, prompt(128, 1)).wait(60)
        put_prompt(store, prompt(128, 2), tenant="acme").wait(60)
        path = store.path
    purge = ["purge", "--store", str(path), "--tenant", ""]
    refused = CliRunner().invoke(app, purge)
    assert refused.exit_code == 2 and "--namespace" in refused.stderr
    assert row_of(prompt(128, 1)) in everything_in(path)
    assert CliRunner().invoke(app, [*purge, "--namespace", "one"]).exit_code == 0
    left = everything_in(path)
    assert row_of(prompt(128, 1)) not in left and row_of(prompt(128, 2)) in left


def test_an_index_that_was_replaced_goes_though_a_purge_was_killed_before_it_could(
    open_store: Open, geometry: impress.Geometry
) -> None:
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
        before = shutil.copytree(path / "shards/main/index", path.parent / "before")
        store.purge()
    compact(path / "shards/main/index")
    shutil.move(before, path / "shards/main/index.gone")
    with open_store(geometry) as store:
        assert store.lookup(prompt(256, 1)) == 0
        assert prompt(256, 1).tobytes()[:256] not in everything_in(path)


def test_the_removal_of_an_index_that_was_replaced_is_durable(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after "erased" brought it back, with the token ids: the last sync was before the
    removal."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
    there: list[bool] = []
    gone = path / "shards/main/index.gone"

    def synced(folder: Path) -> None:
        if folder == gone.parent:
            there.append(gone.exists())

    monkeypatch.setattr(env, "sync_path", synced)
    compact(path / "shards/main/index")
    assert there and not there[-1]


@pytest.mark.parametrize("fails", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr)
def test_a_compaction_that_fails_leaves_no_half_of_an_index(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    fails: BaseException,
) -> None:  # fmt: skip
    """What a purge had copied until the disk was full stayed there, and took up the last space."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        folder = store.path / "shards/main"
    before = {one.name for one in folder.iterdir()}

    def synced(path: Path) -> None:
        if path.name == "data.mdb":  # after the copy
            raise fails

    with monkeypatch.context() as patch, pytest.raises((StoreFailed, KeyboardInterrupt)):
        patch.setattr(env, "sync_path", synced)
        compact(folder / "index")
    assert {one.name for one in folder.iterdir()} == before
    with open_store(geometry) as store:
        assert_serves(store, prompt(256, 1), 256)


def test_rows_of_every_shard_are_purged_though_one_index_cannot_be_compacted(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard's was not compacted, for want of room, and the others kept their rows."""
    for shard in (0, 1):
        with open_store(geometry, shard=shard, namespace="one") as store:
            put_prompt(store, prompt(256, shard)).wait(60)
            path = store.path
    tried: list[str] = []

    def failing(folder: Path) -> None:
        tried.append(folder.parent.name)
        if len(tried) == 1:
            raise StoreFailed("index: No space left on device")
        compact(folder)

    monkeypatch.setattr("impress.cli.purge.compact", failing)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "one"])
    assert done.exit_code == 2 and "No space left" in done.stderr, done.output
    assert len(set(tried)) == 2
    assert not any(row_of(prompt(256, shard)) in everything_in(path) for shard in (0, 1))


def test_an_index_that_was_set_aside_goes_with_a_purge(
    open_store: Open, geometry: impress.Geometry
) -> None:
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
    rebuild_store(path)
    assert (path / "shards/main/index.old").is_dir()
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "test"])
    assert done.exit_code == 0
    assert prompt(256, 1).tobytes()[:256] not in everything_in(path)


def test_a_purge_that_cannot_remove_an_index_set_aside_does_not_say_erased(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did, and the prompts were still there."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
    rebuild_store(path)
    remove = shutil.rmtree

    def refused(folder: Path, ignore_errors: bool = False, **named: Any) -> None:
        if folder.name != "index.old":
            remove(folder, ignore_errors, **named)
        elif not ignore_errors:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    args = ["purge", "--store", str(path), "--namespace", "test"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and "Permission denied" in done.output
    assert prompt(256, 1).tobytes()[:256] in everything_in(path / "shards/main/index.old")


def test_what_is_purged_is_overwritten_where_no_hole_can_be_made(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have no holes; on those that do, this path was never taken."""
    store, hers, his = open_store(GEOMETRY, repack_every_s=0), prompt(64, 1), prompt(64, 2)
    for tokens, tenant in ((hers, "alice"), (his, "bob")):
        assert put_prompt(store, tokens, tenant=tenant).wait(60)
    (file,) = segments(store.path).iterdir()  # both are in it, so it stays
    assert row_of(hers) in file.read_bytes()
    monkeypatch.setattr("tiers.files.punch", lambda fd, off, n_bytes: False)
    assert store.purge("alice") == (1, 0)
    left = file.read_bytes()
    assert row_of(hers) not in left and hers.tobytes() not in left and row_of(his) in left
    assert_serves(store, his, 64, tenant="bob")
    store.check()


def test_what_was_evicted_is_erased_by_whatever_purge_comes_next(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Its rows lay in free space until another store took it, and no purge reached them."""
    store, tokens = open_store(geometry, repack_every_s=0), (prompt(64, 1), prompt(64, 2))
    for prefix in tokens:
        put_prompt(store, prefix).wait(60)
    store.evict(1)
    (left,) = (prefix for prefix in tokens if store.lookup(prefix))
    (gone,) = (prefix for prefix in tokens if not store.lookup(prefix))
    assert row_of(gone) in everything_in(segments(store.path))
    assert store.purge("nobody") == (0, 0)
    held = everything_in(segments(store.path))
    assert row_of(gone) not in held and row_of(left) in held
    assert_serves(store, left, 64)
    store.check()


def test_what_eviction_leaves_in_clear_is_gone_after_a_purge(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The documents said that eviction wipes headers; it wipes the first page of each, and token
    ids and the namespace's name lie behind that."""
    store = open_store(geometry, repack_every_s=0, namespace="a name of its own")
    tokens = (prompt(64, 1), prompt(64, 2))
    for prefix in tokens:
        put_prompt(store, prefix).wait(60)
    store.evict(1)
    store.flush()
    (gone,) = (prefix for prefix in tokens if not store.lookup(prefix))
    held = everything_in(segments(store.path))
    assert gone.tobytes() in held and held.count(b"a name of its own") == 2
    assert held.count(MAGIC) == 1
    store.purge("nobody")
    held = everything_in(segments(store.path))
    assert gone.tobytes() not in held and held.count(b"a name of its own") == 1
    store.purge()
    assert b"a name of its own" not in everything_in(segments(store.path))


def test_a_store_that_a_kill_cut_off_is_erased_by_whatever_purge_comes_next(tmp_path: Path) -> None:
    """When the index did not name it yet, a purge left it for a rebuild to serve."""
    path, lost = cut_off(tmp_path, "store"), prompt(64, 3)
    marks = [row_of(lost), lost.tobytes()]
    assert all(mark in everything_in(segments(path)) for mark in marks)
    assert rebuild_store(shutil.copytree(path, tmp_path / "copy")).spans == 3
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--tenant", "nobody"])
    assert done.exit_code == 2 and "nothing of tenant 'nobody' is stored here" in done.stderr
    assert not any(mark in everything_in(segments(path)) for mark in marks)
    assert rebuild_store(path).spans == 2


def test_a_purge_reaches_what_was_evicted_or_bad_and_is_held_yet(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It looked only at the tree: spans that had left it earlier became free space unerased."""
    store, tokens = open_store(geometry, repack_every_s=0), (prompt(64, 1), prompt(64, 2))
    for prefix in tokens:
        put_prompt(store, prefix).wait(60)
    with store.lease(tokens[0]) as lease:
        (source,) = lease.sources
        store._home.leaving.quarantine(source.held.record.span_id)
        store.flush()
        assert store.purge() == (1, 1)
    store.flush()
    held = everything_in(segments(store.path))
    assert not any(row_of(prefix) in held for prefix in tokens)
    assert store.ssd.usage().used == 0
    store.check()


def test_what_is_held_at_a_purge_or_under_way_is_erased_after_a_kill_too(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """Erasures are noted from the index: only the dead process knew of spans that were out of it
    already, evicted or bad but still held, and of stores not yet in it."""
    store, bad, begun = open_store(geometry, repack_every_s=0), prompt(64, 1), prompt(64, 2)
    put_prompt(store, bad).wait(60)
    with store.lease(bad) as lease, store.writer(begun) as writer:
        (source,) = lease.sources
        store._home.leaving.quarantine(source.held.record.span_id)
        store.flush()
        for layer in range(geometry.n_layers):
            writer.put(layer, 0, *(rows[layer] for rows in kv_of(begun, geometry)))
        ((draft, _),) = store._admission._drafts.values()
        draft.settle(60)
        assert store.purge() == (0, 1)
        assert len(store.index.to_erase()) == 2
        killed = tmp_path / "killed"
        shutil.copytree(store.path, killed)
    left = everything_in(segments(killed))
    assert row_of(bad) in left and row_of(begun) in left
    impress.PrefixStore.open(killed, geometry, "test", impress.Config(**SMALL)).close()
    left = everything_in(segments(killed))
    assert row_of(bad) not in left and row_of(begun) not in left
    put_prompt(store, prompt(64, 3)).wait(60)
    store.flush()
    assert not store.index.to_erase()  # the process that went on erased them, too
    store.check()


def test_the_command_does_not_say_erased_where_erasing_failed_at_the_end(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that others were reading are erased as the store closes: the result went unchecked."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    path = store.path
    store.close()
    close = Reclaim.close

    def fails(self: Reclaim, *, hangs: bool) -> bool:
        self._counters.add("unerased_spans", 1)
        return close(self, hangs=hangs)

    monkeypatch.setattr(Reclaim, "close", fails)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "test"])
    assert done.exit_code == 2 and "not all could be overwritten" in done.output


def test_a_reader_that_begins_while_readers_are_listed_is_waited_for() -> None:
    """A span that came into limbo after the list was given out while a reader might read it."""
    limbo = Limbo(60.0)
    record = SimpleNamespace(span_id=3)
    limbo.add(record, 7, 10.5)
    free: list[SpanRecord] = []
    limbo.take([], 10.0, free)
    assert free == []
    limbo.take([], 11.0, free)
    assert free == [record]


def test_a_store_that_closes_beside_a_purge_touches_nothing_any_more(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have the shard by then, with spans where ours had free space."""
    monkeypatch.setattr("tiers.ssd.ERASE_BYTES", 256 << 10)
    store, erase, turns = open_store(geometry), SsdTier.erase_free, list[bool]()
    for seed, tenant in ((1, "alice"), (2, "bob")):
        put_prompt(store, prompt(64, seed), tenant=tenant).wait(60)
    closing, ended = threading.Event(), threading.Event()

    def closes() -> None:
        assert closing.wait(60)
        store.close()
        ended.set()

    def erasing(ssd: SsdTier, within: Extent, kept: Sequence[Extent]) -> None:
        if not turns:
            closing.set()
            assert soon(lambda: not store._home.reclaimer._open)  # it now waits for this turn
        turns.append(ended.is_set())
        erase(ssd, within, kept)

    monkeypatch.setattr(SsdTier, "erase_free", erasing)
    thread = threading.Thread(target=closes)
    thread.start()
    with pytest.raises(StoreFailed, match="closed before"):
        store.purge("alice")
    thread.join()
    assert turns == [False]


def test_a_purge_that_cannot_erase_what_is_free_says_so(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    for seed, tenant in ((1, "alice"), (2, "bob")):
        put_prompt(store, prompt(64, seed), tenant=tenant).wait(60)

    def failing(ssd: SsdTier, within: Extent, kept: Sequence[Extent]) -> None:
        raise MediumError("ssd: 00000000.seg: Input/output error")

    monkeypatch.setattr(SsdTier, "erase_free", failing)
    with pytest.raises(StoreFailed, match=r"purged, but not what is free: .*Input/output error"):
        store.purge("alice")
    assert store.lookup(prompt(64, 1), tenant="alice") == 0
    assert_serves(store, prompt(64, 2), 64, tenant="bob")
    store.check()


def test_a_purge_looks_at_all_spans_as_often_for_many_tenants_as_for_few(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each tenant it looked through everybody's spans: in a store with many tenants it took
    hours, and lookups of prompts had to wait meanwhile."""
    store, looks, records = open_store(geometry, repack_every_s=0), list[int](), Catalog.records

    def counted(catalog: Catalog) -> list[SpanRecord]:
        looks.append(1)
        return records(catalog)

    monkeypatch.setattr(Catalog, "records", counted)
    found = []
    for n_tenants in (2, 50):
        for seed in range(n_tenants):
            put_prompt(store, prompt(64, seed), wait_s=60, tenant=f"user {seed}").wait(60)
        looks.clear()
        assert store.purge() == (n_tenants, 0)
        found.append(len(looks))
    assert found[0] == found[1] > 0
    store.check()


def store_ways(store: impress.PrefixStore, n_tenants: int) -> None:
    """Store a prompt for each tenant that goes on in six ways: seven spans of one window."""
    for way in range(7):
        tokens = prompt(128, way)
        tokens[:64] = prompt(64, 7)
        for n in range(n_tenants):
            put_prompt(store, tokens[: 128 if way else 64], wait_s=60, tenant=f"user {n}")
        store.flush()


def test_a_purge_looks_through_the_tree_as_often_for_many_tenants_as_for_few(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each tenant whose prompt went on in many ways it looked through all nodes twice, and all
    the while nobody could look up a prompt."""
    store = open_store(impress.Geometry(1, 1, 1, 8, "float32"), repack_every_s=0, dram_bytes=0)
    looks, scattered, found = list[int](), RadixTree._scattered, []

    def counted(tree: RadixTree) -> tuple[Ids, Ids]:
        looks.append(1)
        return scattered(tree)

    monkeypatch.setattr(RadixTree, "_scattered", counted)
    for n_tenants in (2, 50):
        store_ways(store, n_tenants)
        looks.clear()
        assert store.purge() == (7 * n_tenants, 0)
        found.append(len(looks))
    assert found[0] == found[1] > 0
    store.check()


def test_a_purge_lets_lookups_by_before_it_is_through(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the tree until everything it had to take out was gone."""
    store = open_store(impress.Geometry(1, 1, 1, 8, "float32"), repack_every_s=0, dram_bytes=0)
    store_ways(store, 5)
    withdraw, left = MergedCatalog.withdraw, list[int]()

    def counted(catalog: MergedCatalog, spans: Collection[int]) -> list[int]:
        gone = withdraw(catalog, spans)
        left.append(sum(store.lookup(prompt(64, 7), tenant=f"user {n}") > 0 for n in range(5)))
        return gone

    monkeypatch.setattr(MergedCatalog, "withdraw", counted)
    monkeypatch.setattr("impress.tree.merged.BATCH", 2)
    assert store.purge() == (35, 0)
    assert left[:3] == [3, 1, 0]
    store.check()


def damage_notes(path: Path) -> int:
    """Flip a bit in each note of what is to be erased; return how many there are."""
    with lmdb.open(str(path / "shards/main/index"), map_size=1 << 30, max_dbs=8) as env:
        notes = env.open_db(b"erase", create=False)
        with env.begin(write=True) as txn:
            found = dict(txn.cursor(notes))
            for span, note in found.items():
                txn.put(span, bytes([note[0] ^ 1]) + note[1:], db=notes)
    assert found
    return len(found)


def test_a_rebuild_does_not_bring_back_what_a_damaged_note_is_of(tmp_path: Path) -> None:
    """The note was passed over: what a purge had taken out was served again."""
    path = cut_off(tmp_path, "purge")
    damage_notes(path)
    found = rebuild_store(path)
    assert (found.spans, found.purged, found.notes) == (0, 1, [])
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert store.lookup(prompt(256, 1)) == 0
        assert row_of(prompt(256, 1)) not in everything_in(segments(path))


def test_where_a_note_is_damaged_the_next_open_erases_all_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open erased nothing, and the note stayed for good. It does stay if the erasure fails."""
    path = cut_off(tmp_path, "purge")
    n_notes = damage_notes(path)
    last = kv_of(prompt(256, 1), GEOMETRY)[1][1].transpose(1, 0, 2)[-1].tobytes()

    def failing(ssd: SsdTier, slot: Slot) -> None:
        raise MediumError("ssd: no")

    with monkeypatch.context() as faulty:
        faulty.setattr(SsdTier, "erase", failing)
        with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
            put_prompt(store, prompt(64, 3)).wait(60)
            assert store.counters["unerased_spans"] == len(store.index.to_erase()) == n_notes
    assert last in everything_in(segments(path))
    with impress.PrefixStore.open(path, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert last not in everything_in(segments(path))
        assert store.counters["unerased_spans"] == 0
        put_prompt(store, prompt(64, 4)).wait(60)
        assert not store.index.to_erase()
        for seed in (3, 4):
            assert_serves(store, prompt(64, seed), 64)
        store.check()


def test_the_command_says_erased_where_the_note_of_an_earlier_purge_is_damaged(
    tmp_path: Path,
) -> None:
    """Every later purge found that one not erased, and ended with 2."""
    path = cut_off(tmp_path, "purge")
    damage_notes(path)
    config = impress.Config(**SMALL, shard=1)
    with impress.PrefixStore.open(path, GEOMETRY, "test", config) as store:
        put_prompt(store, prompt(64, 3)).wait(60)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "test"])
    assert done.exit_code == 0, done.output
    assert row_of(prompt(256, 1)) not in everything_in(path)
