"""Parameters of fitted probe codecs: when they come, how they are kept, what happens without."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import failing_log, flip_a_bit, prompt, read_limit, said_by_a_child
from test_probes import low_rank_keys
from test_sparse import asked
from typer.testing import CliRunner

import impress
from impress.cache.copies import Copies
from impress.cli.main import app
from impress.policy import Quality
from impress.selection.probes import codec_of
from impress.selection.probes_pca import Pca
from impress.spans import params
from impress.spans.format import ProbeRecord, layout_of
from impress.spans.layout import K, V
from impress.spans.params import NONE, Params, decode_params, digest_of, encode_params
from impress.spans.rows import host_words
from impress.spans.tables import read_header
from impress.upkeep.verify import verify_store
from impress.write import admission, fitting
from impress.write.commit import Committer
from tiers.errors import ReadFailed
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]
SHAPE = impress.Geometry(2, 8, 8, 32, "float16")
POLICY = Quality(0.2, probe="pca25-v1")
N = 256  # tokens per prompt


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one prompt is enough for a fit."""
    monkeypatch.setattr(fitting, "ENOUGH_TOKENS", N)


def rows(seed: int, n: int = N) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    layers = [low_rank_keys(SHAPE, n, 6, 10 * seed + i) * 3 for i in range(2)]
    return layers, [k.flip(-1) for k in layers]


def put(store: impress.PrefixStore, seed: int, *, ends: tuple[int, ...] = (N,)) -> Any:
    """Store one prompt in runs that end at `ends`; its tokens."""
    tokens, (keys, values) = prompt(N, seed), rows(seed)
    for end in ends:
        part = slice(store.lookup(tokens), end)
        store.store(
            tokens[:end], [k[:, part] for k in keys], [v[:, part] for v in values],
            start=part.start,
        ).wait(60)  # fmt: skip
        store.flush()  # a fit ends here
    return tokens


def probes_of(store: impress.PrefixStore) -> list[tuple[str, bytes]]:
    """(codec, digest) of each span, in the order they were stored."""
    records = sorted(store.catalog.records(), key=lambda r: r.span_id)
    return [(p.codec, p.params) for r in records for p in read_header(store.ssd, r).probes]


def bring(store: impress.PrefixStore, tokens: Any, seed: int, policy: Any = POLICY) -> Any:
    """Positions by layer, and the codec each was chosen with; the rows brought are checked."""
    keys, values = rows(seed)
    found, used = [], []
    with store.lease(tokens) as lease, lease.session(policy) as session:
        session.prefetch()
        for layer in range(2):
            query, lse = asked(SHAPE, layer)
            k, v, pos = session.retrieve(layer, query, suffix_lse=lse)
            assert torch.equal(k, keys[layer][:, pos]) and torch.equal(v, values[layer][:, pos])
            found.append(pos.tolist())
        used = [line["probe"] for line in session.report().per_layer]
    assert used[0] == used[1]
    return found, used[0]


def test_an_open_that_is_cut_off_leaves_no_fit_behind(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit began before anybody could close it, and wrote to a shard that was another's."""
    with open_store(SHAPE, probes=("int4-v2",)) as store:
        put(store, 0)
    with monkeypatch.context() as patch:

        def cut_off(*_args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(impress.store, "Admission", cut_off)
        with pytest.raises(KeyboardInterrupt):
            open_store(SHAPE, probes=("pca25-v1",), shard=0)
    assert not [thread for thread in threading.enumerate() if thread.name == "impress-fit"]
    params = store.path / "shards" / "main" / "params"
    assert not params.exists()
    store = open_store(SHAPE, probes=("pca25-v1",), shard=0)
    store.flush()  # fits to what is stored
    assert list(params.iterdir())


def test_a_fit_sees_rows_of_every_importance(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a span whose rows lie by importance it saw the first chunks: none but the most important
    rows, and what it said of the error of all others was drawn from these."""
    fit, seen = Pca.fit, list[Any]()
    monkeypatch.setattr(fitting, "ENOUGH_TOKENS", 2 * 64)
    monkeypatch.setattr(Pca, "fit", lambda codec, keys, g: seen.append(keys) or fit(codec, keys, g))
    store, tokens, (keys, values) = open_store(SHAPE, probes=("pca25-v1",)), prompt(N, 0), rows(0)
    importance = [np.random.default_rng(layer).permutation(N) for layer in range(2)]
    store.store(tokens, keys, values, importance=np.float32(importance)).wait(60)
    store.flush()
    for layer, given in enumerate(seen):
        words = host_words(keys[layer], SHAPE)
        at = [int(np.flatnonzero((words[0] == row).all(axis=1))[0]) for row in given[0]]
        ranks = sorted(importance[layer][at])
        assert len(ranks) == 128 and ranks[0] < 128 and ranks[-1] >= 192
    assert len(seen) == 2


def test_the_fallback_serves_until_enough_is_stored_and_parameters_after(open_store: Open) -> None:
    store = open_store(SHAPE, probes=("pca25-v1",))
    first, second = put(store, 0), put(store, 1)
    (one, none), (two, digest) = probes_of(store)
    assert (one, none) == ("int4-v2", NONE)
    assert two == "pca25-v1" and digest != NONE
    assert bring(store, first, 0)[1] == "int4-v2"
    chosen, used = bring(store, second, 1)
    assert used == "pca25-v1" and 0 < len(chosen[0]) < N
    record = store.path / "shards" / "main" / "params" / digest.hex()
    assert record.stat().st_mode & 0o777 == 0o600
    assert digest_of(record.read_bytes()) == digest
    store.check()
    store.close()
    reopened = open_store(SHAPE, probes=("pca25-v1",))
    assert bring(reopened, second, 1) == (chosen, "pca25-v1")
    put(reopened, 2)
    assert probes_of(reopened)[-1] == ("pca25-v1", digest)  # not fitted twice
    reopened.close()
    assert verify_store(store.path).problems == []


@pytest.mark.parametrize("reason", ["late", "shortage"])
def test_parameters_that_do_not_come_are_a_lost_prefix_and_no_request_that_hangs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """They were read by the request's own thread: on a disk that hangs it waited for ever, and an
    engine's next requests behind it."""
    with open_store(SHAPE, probes=("pca25-v1",)) as store:
        put(store, 0)
        tokens = put(store, 1)
    store = open_store(SHAPE, probes=("pca25-v1",))
    come = threading.Event()
    real = params._read_in

    def read_in(path: Path) -> bytes | None:
        if reason == "shortage":
            raise MemoryError
        assert come.wait(60)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(params, "_read_in", read_in)
        with store.lease(tokens) as lease:
            with pytest.raises(impress.PrefixLost) as lost, read_limit(store, 0.2):
                lease.session(POLICY)
            assert lost.value.reason == reason and store.stats()["lost"] == {reason: 1}
            come.set()
            assert store._pool.idle(60)
    assert bring(store, tokens, 1)[1] == "pca25-v1"


def test_a_prefix_goes_on_with_what_it_began_with(open_store: Open) -> None:
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 0, ends=(64,))
    put(store, 1)
    tokens = put(store, 0, ends=(128, N))
    assert [name for name, _ in probes_of(store)] == ["int4-v2", "int4-v2", "int4-v2", "int4-v2"]
    other = put(store, 2, ends=(64, N))
    assert [name for name, _ in probes_of(store)][-2:] == ["pca25-v1", "pca25-v1"]
    assert bring(store, tokens, 0)[1] == "int4-v2"
    assert bring(store, other, 2)[1] == "pca25-v1"


def test_spans_with_other_parameters_than_their_neighbours_are_read_by_their_keys(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission.Admission, "_before", lambda self, held: ())
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 9)
    put(store, 0, ends=(128,))
    store.close()
    (store.path / "shards" / "main" / "params" / "current.json").unlink()
    monkeypatch.setattr(fitting, "ENOUGH_TOKENS", 64)  # another fit, of other tokens
    again = open_store(SHAPE, probes=("pca25-v1",))
    again.flush()
    tokens = put(again, 0)
    (_, one), (_, other) = probes_of(again)[-2:]
    assert NONE != one != other != NONE
    mixed = bring(again, tokens, 0)
    assert mixed[1] == "int4-v2"
    with again.lease(tokens) as lease, lease.session(POLICY) as session:
        query, lse = asked(SHAPE, 0)
        session.retrieve(0, query, suffix_lse=lse)
        (line,) = session.report().per_layer
        assert sum(line["bytes"].values()) >= N * SHAPE.k_row_bytes  # all keys


@pytest.mark.parametrize("harm", ["damaged", "cut short", "missing"])
def test_parameters_that_cannot_be_trusted_are_not_used(open_store: Open, harm: str) -> None:
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 0)
    tokens = put(store, 1)
    digest = probes_of(store)[-1][1]
    store.close()
    path = store.path / "shards" / "main" / "params" / digest.hex()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(raw if harm == "damaged" else path.read_bytes()[:-8])
    (problem,) = verify_store(store.path).problems
    assert "pca25-v1 parameters" in problem.what and problem.span is not None
    # A reader: by then a writer may have fitted what is missing again, and to the same bytes.
    reopened = open_store(SHAPE, "r", probes=("pca25-v1",))
    chosen, used = bring(reopened, tokens, 1)
    assert used == "int4-v2"
    bare = open_store_beside(store.path, tokens)
    with bare:
        assert bring(bare, tokens, 1, Quality(0.2, probe="int4-v2"))[0] == chosen


def open_store_beside(path: Path, tokens: Any) -> impress.PrefixStore:
    """The same prompt in a store without records."""
    config = impress.Config(segment_bytes=1 << 20, durable=False)
    store = impress.PrefixStore.open(path.parent / "beside", SHAPE, "test", config)
    put(store, 1)
    return store


def test_parameters_too_large_to_keep_leave_the_fallback(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(params, "MOST_RECORD_BYTES", 100)
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 0)
    put(store, 1)
    assert {name for name, _ in probes_of(store)} == {"int4-v2"}
    assert not (store.path / "shards" / "main" / "params").exists()


def test_a_record_of_parameters_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    layers = (b"one", b"", b"three")
    raw = encode_params(layers)
    assert decode_params(raw) == layers
    for bad in (b"", raw[:-1], raw + b"x", b"x" + raw, raw[:14]):
        assert decode_params(bad) is None
    kept = Params(tmp_path / "params", write=True)
    digest = kept.add(b"n" * 32, "pca25-v1", layers, kept.n_forgets)
    assert digest == digest_of(raw)
    assert Params(tmp_path / "params", write=False).layers(digest) == layers
    assert kept.current(b"n" * 32, "pca25-v1") == digest and kept.current(b"m" * 32, "x") is None
    (tmp_path / "params" / "current.json").write_text("[1]")
    assert Params(tmp_path / "params", write=True).current(b"n" * 32, "pca25-v1") is None


def test_damaged_parameters_are_read_once_and_fitted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request read and hashed them again (101 MB for OPT-6.7B), and as there was a file,
    nothing was fitted again, not even after a restart."""
    layers, namespace = [b"one", b"three"], b"n" * 32
    kept = Params(tmp_path / "params", write=True)
    digest = kept.add(namespace, "pca25-v1", layers, 0)
    assert digest is not None
    raw = bytearray((tmp_path / "params" / digest.hex()).read_bytes())
    raw[-1] ^= 1
    (tmp_path / "params" / digest.hex()).write_bytes(raw)
    again = Params(tmp_path / "params", write=True)
    assert [again.layers(digest) for _ in range(3)] == [None] * 3
    assert caplog.text.count("does not match its name") == 1
    assert again.current(namespace, "pca25-v1") is None  # so a fit is wanted
    assert again.add(namespace, "pca25-v1", layers, 0) == digest
    assert (
        again.layers(digest)
        == tuple(layers)
        == Params(tmp_path / "params", write=False).layers(digest)
    )


def test_purging_a_namespace_takes_what_was_fitted_to_it(open_store: Open) -> None:
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 1)
    folder = store.path / "shards/main/params"
    assert len(list(folder.iterdir())) == 2
    store.purge(tenant="somebody")  # parameters made from all tenants' keys stay
    assert len(list(folder.iterdir())) == 2
    store.purge()
    assert [path.name for path in folder.iterdir()] == ["current.json"]
    put(store, 2)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("where", ["in a fork's child", "after close"])
def test_a_purge_that_is_refused_leaves_what_was_fitted(open_store: Open, where: str) -> None:
    """It said that the store is closed, or another process's, yet erased the parameters."""
    store = open_store(SHAPE, probes=("pca25-v1",))
    put(store, 1)
    folder = store.path / "shards/main/params"

    def kept() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    before = kept()
    assert len(before) == 2
    if where == "after close":
        store.close()
        with pytest.raises(impress.ImpressError, match="the store is closed"):
            store.purge()
    else:
        assert "opened before a fork" in said_by_a_child(store.purge)
    assert kept() == before


def test_a_fit_that_ends_after_its_namespace_was_purged_is_not_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge found nothing to forget yet; then parameters fitted to purged keys were written."""
    store = open_store(SHAPE, probes=("pca25-v1",))
    begun, go_on, fit, n = threading.Event(), threading.Event(), Pca.fit, itertools.count(1)

    def waits(*args: Any) -> bytes:
        if next(n) == SHAPE.n_layers:  # the last layer
            begun.set()
            assert go_on.wait(60)
        return fit(*args)

    monkeypatch.setattr(Pca, "fit", waits)
    putting = threading.Thread(target=put, args=(store, 1))
    putting.start()
    assert begun.wait(60)
    assert store.purge() == (1, 0)
    go_on.set()
    putting.join(60)
    folder = store.path / "shards/main/params"
    assert not folder.exists() or not list(folder.iterdir())
    put(store, 2)
    assert len(list(folder.iterdir())) == 2  # the next fit is kept


@pytest.mark.parametrize("name", ["test", "digits"])
def test_purging_a_namespace_whose_spans_are_all_evicted_takes_what_was_fitted_to_it(
    open_store: Open, name: str
) -> None:
    """ "Not stored here", said the command, and its parameters stayed for good."""
    with open_store(SHAPE, probes=("pca25-v1",)) as store:
        put(store, 1)
        store.evict(1 << 30)
        assert not store.catalog.records()
        named = name if name == "test" else store.namespace.hex()[:12]
        purge = ["purge", "--store", str(store.path), "--namespace", named]
    folder = store.path / "shards/main/params"
    assert len(list(folder.iterdir())) == 2
    done = CliRunner().invoke(app, purge)
    assert done.exit_code == 0 and "0 spans erased" in done.stdout, done.output
    assert [path.name for path in folder.iterdir()] == ["current.json"]
    assert CliRunner().invoke(app, purge).exit_code == 2


def in_params(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").readlink().parent.name == "params"


@pytest.mark.parametrize("then", ["purge", "open and purge", "fit"])
def test_a_purge_that_cannot_erase_parameters_says_so_and_the_next_one_does(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It said that all was gone, and the next purge no longer found parameters to erase."""
    store, fsync = open_store(SHAPE, probes=("pca25-v1",)), os.fsync

    def failing(fd: int) -> None:
        if in_params(fd):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    tokens, folder = put(store, 1), store.path / "shards/main/params"
    (kept,) = (path for path in folder.iterdir() if path.name != "current.json")
    with monkeypatch.context() as ill:
        ill.setattr(os, "fsync", failing)
        with pytest.raises(impress.StoreFailed, match=r"params: not erased.*purge again"):
            store.purge()
    assert store.lookup(tokens) == 0 and kept.exists()
    if then == "fit":  # the next record takes its name: the old one is erased first
        put(store, 2)
        assert probes_of(store)[-1] == ("int4-v2", NONE)
        assert len(list(folder.iterdir())) == 2
    else:
        if then == "open and purge":
            store.close()
            store = open_store(SHAPE, probes=("pca25-v1",))
        store.purge()
        assert [path.name for path in folder.iterdir()] == ["current.json"]
    assert not kept.exists()


def test_forgotten_parameters_are_overwritten_on_the_disk_however_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record smaller than a buffer was overwritten only after its fsync."""
    kept, fsync, synced = Params(tmp_path / "params", write=True), os.fsync, []
    digest = kept.add(b"n" * 32, "pca25-v1", (b"basis",), 0)
    assert digest is not None

    def noting(fd: int) -> None:
        if in_params(fd):
            synced.append(Path(f"/proc/self/fd/{fd}").read_bytes())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    kept.forget([b"n" * 32])
    assert len(synced) == 2 and not any(synced[0]) and synced[0]  # the other: current.json


def test_parameters_that_two_namespaces_share_go_with_the_last_of_them(tmp_path: Path) -> None:
    """The same keys make the same basis, in one file: purging the first namespace took it from the
    second, whose records then had none, and for which none was fitted until a restart."""
    one, two, codec = b"1" * 32, b"2" * 32, "pca25-v1"
    folder = tmp_path / "params"
    kept = Params(folder, write=True)
    digest = kept.add(one, codec, (b"basis",), 0)
    assert digest is not None and kept.add(two, codec, (b"basis",), 0) == digest
    kept.forget([one])
    for seen in (kept, Params(folder, write=False)):
        assert seen.current(one, codec) is None
        assert seen.current(two, codec) == digest and seen.layers(digest) == (b"basis",)
    kept.add(one, codec, (b"basis",), kept.n_forgets)
    other = kept.add(two, codec, (b"another basis",), kept.n_forgets)  # leaves the first one's
    assert other is not None and Params(folder, write=False).layers(digest) == (b"basis",)
    kept.forget([one])
    kept.forget([two])
    assert kept.current(two, codec) is None
    assert not any(b"basis" in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize("cut_off", ["add", "forget"])
def test_parameters_that_a_crash_leaves_are_found_by_the_next_purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    """With a crash between a record and its name in current.json, nothing told whose it was."""
    folder, n = tmp_path / "params", itertools.count(1)
    kept, write = Params(folder, write=True), params.write_whole
    if cut_off == "forget":
        kept.add(b"n" * 32, "pca25-v1", (b"basis",), 0)

    def dies(path: Path, raw: bytes) -> None:
        if cut_off == "add" and next(n) == 2:  # as a draft that has yet to get its name
            path.with_name(f".{path.name}.1.2").write_bytes(raw)
        elif cut_off == "add":
            return write(path, raw)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(params, "write_whole", dies)
        if cut_off == "add":
            kept.add(b"n" * 32, "pca25-v1", (b"basis",), 0)
        else:
            kept.forget([b"n" * 32])
    again = Params(folder, write=True)
    assert again.current(b"n" * 32, "pca25-v1") is None
    assert again.namespaces() == {b"n" * 32}
    again.forget([b"n" * 32])
    assert not any(b"basis" in path.read_bytes() for path in folder.iterdir())
    assert not Params(folder, write=False).namespaces()
    assert again.add(b"n" * 32, "pca25-v1", (b"basis",), again.n_forgets)


@pytest.mark.parametrize("harm", ["cut short", "another digest", "brackets", "missing"])
def test_a_purge_takes_parameters_that_a_damaged_list_names_no_more(
    tmp_path: Path, harm: str
) -> None:
    """The purge erased none of them and said so, and the next list left them out for good."""
    folder = tmp_path / "params"
    digest = Params(folder, write=True).add(b"n" * 32, "pca25-v1", (b"basis",), 0)
    assert digest is not None
    said = folder / "current.json"
    text = said.read_text()
    changed = {
        "cut short": text[:-9], "another digest": text.replace(digest.hex(), "00" * 32),
        "brackets": "[" * 100_000, "missing": None,
    }[harm]  # fmt: skip
    said.unlink()
    if changed is not None:
        said.write_text(changed)
    Params(folder, write=True).forget([b"n" * 32])
    assert not any(b"basis" in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize("call", ["add", "forget"])
def test_a_list_of_parameters_that_cannot_be_read_for_a_moment_loses_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The next list lacked a namespace's name, and its record went with another's purge."""
    folder, codec = tmp_path / "params", "pca25-v1"
    digest = Params(folder, write=True).add(b"1" * 32, codec, (b"basis",), 0)

    def refused(path: Path, *args: Any, **named: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        kept = Params(folder, write=True)
        if call == "forget":
            with pytest.raises(impress.StoreFailed, match="Too many open files; purge again"):
                kept.forget([b"2" * 32])
    if call == "add":
        assert kept.add(b"2" * 32, codec, (b"other",), kept.n_forgets)
    kept.forget([b"2" * 32])
    again = Params(folder, write=True)
    assert again.current(b"1" * 32, codec) == digest and again.layers(digest) == (b"basis",)


def test_a_purge_that_cannot_list_parameters_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Params(tmp_path / "params", write=True)
    kept.add(b"n" * 32, "pca25-v1", (b"basis",), 0)

    def refused(_folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(impress.StoreFailed, match="purge again"):
        patch.setattr(Path, "iterdir", refused)
        kept.forget([b"n" * 32])
    kept.forget([b"n" * 32])
    assert not any(b"basis" in path.read_bytes() for path in (tmp_path / "params").iterdir())


def test_verify_finds_the_parameters_that_another_shards_span_goes_on_with(
    open_store: Open,
) -> None:
    """Reading looks in every shard; verify looked in one, and called them missing."""
    a, b = (open_store(SHAPE, probes=("pca25-v1",), follow_every_s=0, shard=n) for n in (0, 1))
    put(a, 0)
    put(a, 1, ends=(128,))
    b.follow()
    put(b, 1)
    digest = probes_of(a)[-1][1]
    assert digest != NONE and probes_of(b)[-1] == ("pca25-v1", digest)
    assert not (b.path / "shards/1/params" / digest.hex()).exists()
    assert verify_store(a.path).problems == []
    (a.path / "shards/main/params" / digest.hex()).unlink()
    assert [p.what.split()[0] for p in verify_store(a.path).problems] == ["pca25-v1"] * 2


@pytest.mark.parametrize("why", ["too large", "its write fails"])
def test_parameters_that_cannot_be_kept_are_fitted_once(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Each time as much again had been stored, all of it was fitted again, for nothing. Then a disk
    that was full when the fit ended kept it from all that came until a restart."""
    fit, fitted = Pca.fit, []
    monkeypatch.setattr(Pca, "fit", lambda *args: fitted.append(1) or fit(*args))
    tried = list[int]()
    store = open_store(SHAPE, probes=("pca25-v1",))
    with monkeypatch.context() as patch:
        if why == "too large":
            patch.setattr(params, "MOST_RECORD_BYTES", 100)
        else:

            def full(*_: object) -> None:
                tried.append(1)
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(params, "check_room", full)
        for seed in range(4):
            put(store, seed)
    assert len(fitted) == SHAPE.n_layers
    assert len(tried) == (why != "too large")  # and then left alone for a while
    monkeypatch.setattr(store._admission.fitter, "_again_s", 0.0)
    assert {name for name, _ in probes_of(store)} == {"int4-v2"}
    if why == "too large":
        store.close()
        store = open_store(SHAPE, probes=("pca25-v1",))
        store.flush()
    else:
        put(store, 4)
        assert len(fitted) == SHAPE.n_layers
    put(store, 5)
    assert probes_of(store)[-1][0] == "pca25-v1"


def test_all_parameters_together_are_bounded_on_disk_and_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, layers = Params(tmp_path / "params", write=True), (bytes(100),)
    digests = [kept.add(bytes([i]) * 32, "pca25-v1", (bytes([i]) * 100,), 0) for i in range(3)]
    monkeypatch.setattr(params, "MOST_BYTES", 150)
    assert None not in digests
    assert kept.add(b"n" * 32, "pca25-v1", layers, 0) is None
    again = Params(tmp_path / "params", write=True)
    for digest in digests:
        assert again.layers(digest) is not None
    assert [again.known(digest) is None for digest in digests] == [True, True, False]


def test_where_no_thread_can_be_had_stores_are_ready_and_the_next_fit_makes_good(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer failed instead: stores that it had finished were reported as failed, and
    neither flush nor close came to an end."""
    store, start = open_store(SHAPE, probes=("pca25-v1",)), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "impress-fit":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        put(store, 0)
        store.flush()
    assert probes_of(store)[-1][0] == "int4-v2"
    put(store, 1)
    put(store, 2)
    assert probes_of(store)[-1][0] == "pca25-v1"
    store.close()


def test_all_fits_run_on_one_thread_that_ends_with_the_store(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left open, until the store closed, the queue that its thread had read with."""
    fit, threads = Pca.fit, []
    monkeypatch.setattr(
        Pca, "fit", lambda *args: threads.append(threading.current_thread()) or fit(*args)
    )
    store = open_store(SHAPE, probes=("pca25-v1",))
    for seed in range(3):
        put(store, seed)
        store.purge()
    assert len(threads) == 3 * SHAPE.n_layers and len(set(threads)) == 1
    store.close()
    assert not threads[0].is_alive()


@pytest.mark.parametrize("at", ["a read", "its last step"])
def test_a_fit_that_outlasts_close_keeps_its_files_and_writes_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Its queue was destroyed under its read; its parameters went into another process's shard."""
    go_on, stuck, closed = threading.Event(), queue.SimpleQueue[threading.Thread](), []
    read, fit, close, n = SsdTier.read, Pca.fit, SsdTier.close, itertools.count(1)

    def wait() -> None:
        stuck.put(threading.current_thread())
        assert go_on.wait(60)

    def reads(*args: Any) -> None:
        if at == "a read" and threading.current_thread().name == "impress-fit":
            wait()
        read(*args)

    def fits(*args: Any) -> bytes:
        if at == "its last step" and next(n) == SHAPE.n_layers:
            wait()
        return fit(*args)

    monkeypatch.setattr(SsdTier, "read", reads)
    monkeypatch.setattr(Pca, "fit", fits)
    monkeypatch.setattr(SsdTier, "close", lambda ssd: closed.append(1) or close(ssd))
    store = open_store(SHAPE, probes=("pca25-v1",), read_timeout_s=0.05)
    keys, values = rows(1)
    store.store(prompt(N, 1), keys, values).wait(60)
    fitter = stuck.get(timeout=60)
    store.close()
    assert not closed
    go_on.set()
    fitter.join(60)
    assert not fitter.is_alive() and not (store.path / "shards/main/params").exists()
    close(store.ssd)


@pytest.mark.parametrize("names", [
    ("int4-v2", "pca25-v1", "heads3-v1"), ("pca37-v1", "pca25-v1", "heads3-v1"),
])  # fmt: skip
def test_records_from_before_a_fit_have_a_cache_too(names: tuple[str, ...]) -> None:
    """Two codecs fall back to one, and the records of the third are a plane lower: those of what
    was stored first, which go on like that for ever, were read from the disk by each request."""
    codecs = [codec_of(name) for name in names]
    copies = Copies(impress.Config(dram_bytes=256 << 20), SHAPE, 64, codecs)
    for n_records in (2, 3):
        records = [ProbeRecord(c.name, c.group, c.probe_bytes(SHAPE), NONE) for c in codecs]
        layout = layout_of(SHAPE, 64, 1, records[-n_records:])
        size = layout.planes[V + n_records].chunk_bytes
        assert (V + n_records, size) in copies.probes


@pytest.mark.parametrize("harm", ["header", "keys"])
def test_a_damaged_span_that_nobody_reads_keeps_no_namespace_from_being_fitted(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """A fit took the spans that were stored first and gave up at one that did not read back. If no
    request came to that span, it stayed the first: every fit failed, with the same warning."""
    store = open_store(SHAPE, probes=("pca25-v1",))
    with monkeypatch.context() as held_off:
        held_off.setattr(fitting, "ENOUGH_TOKENS", 1 << 30)
        put(store, 0)
        put(store, 1)
    first, _ = sorted(store.catalog.records(), key=lambda record: record.span_id)
    if harm == "header":
        flip_a_bit(store.path, first.meta, 200)
    else:  # of the second layer: the first is fitted by then
        layout = read_header(store.ssd, first).layout
        flip_a_bit(store.path, first.parts[0], layout.chunk_off(1, K, 0))
    put(store, 2, ends=(64,))
    put(store, 3)
    last = max(store.catalog.records(), key=lambda record: record.span_id)
    assert [probe.codec for probe in read_header(store.ssd, last).probes] == ["pca25-v1"]


@pytest.mark.parametrize("lacked", ["files", "memory", "a purge of another namespace came between"])
def test_a_fit_that_came_to_nothing_is_made_with_the_next_store(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, lacked: str
) -> None:
    """Such a fit reset the count of tokens: it took as many again as a fit wants."""
    store, read, fit = open_store(SHAPE, probes=("pca25-v1",)), SsdTier.read, Pca.fit

    def reads(*args: Any) -> None:
        if threading.current_thread().name == "impress-fit":
            raise ReadFailed("shortage", "ssd: no more files")
        read(*args)

    def fits(*args: Any) -> bytes:
        if lacked == "memory":
            raise MemoryError
        store.purge(namespaces=[b"n" * 32])
        return fit(*args)

    with monkeypatch.context() as patch:
        if lacked == "files":
            patch.setattr(SsdTier, "read", reads)
        else:
            patch.setattr(Pca, "fit", fits)
        put(store, 0)
    put(store, 1, ends=(64,))
    put(store, 2)
    assert probes_of(store)[-1][0] == "pca25-v1"


def test_who_waits_for_a_fit_is_let_go_when_the_store_closes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store closed after a fit was asked for and before it began, its thread ended and told
    nobody: a flush in another thread waited to its time limit, 150 s."""
    go_on, run = threading.Event(), threading.Thread.run

    def held_back(thread: threading.Thread) -> None:
        assert thread.name != "impress-fit" or go_on.wait(60)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", held_back)
    store = open_store(SHAPE, probes=("pca25-v1",))
    keys, values = rows(0)
    store.store(prompt(N), keys, values).wait(60)
    fitter = store._admission.fitter
    waiting = threading.Thread(target=fitter.wait, args=(60,), daemon=True)
    waiting.start()
    assert not fitter.close(0)
    go_on.set()
    assert fitter.close(60)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_flush_leaves_a_fit_what_is_left_of_its_time(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its two waits got all of the time: a flush took up to twice as long as allowed."""
    store, barrier = open_store(SHAPE, probes=("pca25-v1",)), Committer.barrier
    clock, waited = [100.0], list[float]()

    def takes_40_s(committer: Committer, timeout_s: float) -> bool:
        clock[0] += 40
        return barrier(committer, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr("impress.store.monotonic", lambda: clock[0])
        patch.setattr(Committer, "barrier", takes_40_s)
        patch.setattr(fitting.Fitter, "wait", lambda _, timeout_s: waited.append(timeout_s))
        for limit_s in (100, 40, 30):
            store.flush(limit_s)
    assert waited == [60, 0, 0]


@pytest.mark.parametrize("ends", ["given up", "dropped", "failed"])
def test_only_what_is_ready_counts_towards_a_fit(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Stores that were given up, that another made first or that failed counted too: a fit began
    that found too little."""
    looked: list[int] = []
    real = fitting.read_header
    monkeypatch.setattr(fitting, "read_header", lambda *a: looked.append(1) or real(*a))
    store = open_store(SHAPE, probes=("pca25-v1",))
    monkeypatch.setattr(fitting, "ENOUGH_TOKENS", 2 * N)
    keys, values = rows(0)
    if ends == "failed":
        keys = [k * float("nan") for k in keys]
    with store.writer(prompt(N)) as late:
        for layer in range(0 if ends == "given up" else 2):
            late.put(layer, 0, keys[layer], values[layer])
        put(store, 0 if ends == "dropped" else 1)
    if ends == "failed":
        with pytest.raises(impress.StoreFailed, match="NaN"):
            store.flush()
    store.flush()
    assert not looked
    put(store, 2)
    assert looked
    put(store, 3)
    assert probes_of(store)[-1][0] == "pca25-v1"


def test_a_fit_that_found_too_little_goes_on_counting(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what it was to be fitted to was evicted, and the rest no longer counted."""
    store = open_store(SHAPE, probes=("pca25-v1",))
    monkeypatch.setattr(fitting, "ENOUGH_TOKENS", 2 * N)
    put(store, 0)
    store.evict(1 << 30)
    for seed in range(1, 4):
        put(store, seed)
    assert probes_of(store)[-1][0] == "pca25-v1"


def test_the_thread_of_fits_outlives_what_it_cannot_say(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log handler that raised ended it, with a fit marked as under way for good: every flush from
    then on waited to its time limit."""
    store, (keys, values) = open_store(SHAPE, probes=("pca25-v1",)), rows(0)

    def fails(*_: Any) -> bytes:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch, failing_log():
        patch.setattr(Pca, "fit", fails)
        store.store(prompt(N), keys, values).wait(60)
        flushing = threading.Thread(target=store.flush, daemon=True)
        flushing.start()
        flushing.join(30)
        assert not flushing.is_alive()
    put(store, 1)
    put(store, 2)
    assert probes_of(store)[-1][0] == "pca25-v1"
