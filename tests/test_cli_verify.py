"""`impress verify`: what it finds in a store that was damaged on purpose."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager

import lmdb
import pytest
from conftest import flip_a_bit
from console import FORK, PROMPT, opened, put, records_of, run, run_json, two_prompts, whole_numbers
from typer.testing import CliRunner

from impress.cli.main import app
from impress.errors import StoreFailed
from impress.upkeep import hanging
from impress.upkeep import verify as verifying
from impress.upkeep.verify import verify_store
from impress.write.directory import GONE, Shard
from tiers.ssd import SsdTier


@pytest.fixture
def path(tmp_path):
    return two_prompts(tmp_path / "store")


@contextmanager
def index_values(path):
    """Span id -> index value, to be changed in place; written back at the end."""
    with lmdb.open(str(Shard(path).index), map_size=64 << 30, max_dbs=8) as env:
        db = env.open_db(b"spans")
        with env.begin(write=True) as txn:
            values = {int.from_bytes(k, "big"): bytearray(v) for k, v in txn.cursor(db)}
            yield values
            for span, value in values.items():
                txn.put(span.to_bytes(8, "big"), bytes(value), db=db)


def test_verify_of_a_sound_store_ends_with_0(path):
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 0
    assert (found["sound"], found["spans"], found["problems"]) == (True, 2, [])
    assert found["pieces"] == sum(2 * 2 * r.n_windows * 2 for r in records_of(path))
    assert "sound" in run("verify", "--store", path).stdout


def test_verify_names_span_and_segment_of_a_flipped_byte(path):
    record = records_of(path)[1]
    flip_a_bit(path, record.parts[0], off=8192 + 5)
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1 and not found["sound"]
    (problem,) = found["problems"]
    assert (problem["span"], problem["segment"]) == (record.span_id, record.parts[0].segment)
    assert (
        "1 piece does not match its checksum" in problem["what"]
        and f"byte {record.parts[0].off + 8192}" in problem["what"]
    )
    assert "1 problem " in run("verify", "--store", path).stdout


@pytest.mark.parametrize("off", [0, 20, 4096 + 3])
def test_verify_lists_a_damaged_header_and_still_reads_the_rest(path, off):
    flip_a_bit(path, records_of(path)[0].meta, off)
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1
    assert [(p["span"], "header" in p["what"]) for p in found["problems"]] == [(1, True)]
    assert found["pieces"] > 0


def test_verify_lists_a_damaged_index_value_and_what_hung_from_it(path):
    with index_values(path) as values:
        values[1][30] ^= 1
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1
    assert [p["span"] for p in found["problems"]] == [1, 2]
    assert "checksum" in found["problems"][0]["what"]
    assert "never found" in found["problems"][1]["what"]


def test_verify_lists_two_spans_in_one_place(path):
    with index_values(path) as values:
        values[9] = values[2]
    _, found = run_json("verify", "--store", path)
    assert any("is also span" in p["what"] for p in found["problems"])


def test_verify_lists_a_segment_that_is_gone(path):
    for segment in Shard(path).segments.glob("*.seg"):
        segment.unlink()
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1
    assert [p["span"] for p in found["problems"]] == [1, 2]


def test_verify_says_that_the_index_is_gone_or_no_index(path):
    data = Shard(path).index / "data.mdb"
    data.write_bytes(b"\x55" * 8192)
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1 and "index" in found["problems"][0]["what"]
    for file in Shard(path).index.iterdir():
        file.unlink()
    Shard(path).index.rmdir()
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1 and "missing" in found["problems"][0]["what"]


def test_verify_skips_spans_that_a_writer_evicts_meanwhile(path):
    with opened(path) as store:

        def evict(done, of):
            if not done:
                store.evict(1 << 40)
                put(store, list(range(7000, 7320)))

        verdict = verify_store(path, evict)
    assert verdict.problems == [] and verdict.gone == 2


def test_verify_does_not_take_an_index_that_goes_bad_for_evictions(path):
    """Nothing is reported about a span that the index no longer names. When the whole index was
    gone, no problem was reported either, and damaged spans passed for sound."""
    flip_a_bit(path, records_of(path)[1].parts[0], off=8192 + 5)

    def goes(done, of):
        if not done:
            Shard(path).index.rename(path / "elsewhere")

    problems = [problem.what for problem in verify_store(path, goes).problems]
    assert len(problems) == 2 and any("missing" in what for what in problems)


def test_verify_does_not_miss_an_index_that_a_purge_is_putting_in_place(path, monkeypatch):
    """Between the purge's two renames there is no index: a sound store's was reported missing."""
    index, n_reads = Shard(path).index, itertools.count()
    gone = index.with_name(GONE)

    def between_renames(shard):
        if next(n_reads):
            return hanging.index_values(shard)
        index.rename(gone)
        try:
            return hanging.index_values(shard)
        finally:
            gone.rename(index)

    monkeypatch.setattr("impress.upkeep.verify.index_values", between_renames)
    verdict = verify_store(path)
    assert (verdict.problems, verdict.spans) == ([], 2) and next(n_reads) > 1


def test_verify_prints_no_tokens(path):
    flip_a_bit(path, records_of(path)[0].parts[0])
    flip_a_bit(path, records_of(path)[1].meta, 20)
    done = run("verify", "--store", path, "--json")
    assert whole_numbers(done, path).isdisjoint({*PROMPT, *FORK})


@pytest.mark.parametrize("command", ["verify", "explain"])
def test_a_command_reads_on_threads_that_it_need_not_wait_for(path, tmp_path, monkeypatch, command):
    """It read headers on its own: where the disk hung it stood still, and a signal that came at the
    end of a read made it wait for a read that had ended, until a second signal."""
    read, threads = SsdTier.read, set()

    def noted(*args):
        threads.add(threading.current_thread())
        return read(*args)

    monkeypatch.setattr(SsdTier, "read", noted)
    (tmp_path / "ids").write_text(" ".join(map(str, PROMPT)))
    more = ["--prefix", str(tmp_path / "ids")] if command == "explain" else []
    assert CliRunner().invoke(app, [command, "--store", str(path), *more]).exit_code == 0
    assert threads and threading.main_thread() not in threads


def test_a_header_that_does_not_come_ends_a_verify(path, monkeypatch):
    come = threading.Event()
    monkeypatch.setattr(verifying, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(SsdTier, "read", lambda *args: come.wait(60))
    try:
        with pytest.raises(StoreFailed, match="a read took more than"):
            verify_store(path)
    finally:
        come.set()
