"""A store written by format 1's first release: still read whole, and still written the same."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import impress
import impress.write.directory
from impress.selection import quant
from impress.spans.format import SpanHeader, decode_header, encode_header, encode_index
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.verify import verify_store
from impress.write.directory import Shard, matching_identity
from impress.write.index import Index
from tiers.base import Extent

sys.path.insert(0, str(Path(__file__).parent / "data"))

from make_golden import CONFIG, GEOMETRY, PUTS, Put, build, rows_of, unpack


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return unpack(tmp_path)


def assert_all_served(path: Path) -> None:
    """Every prompt whole, in its namespace and for its tenant, and for nobody else."""
    for put in PUTS:
        with impress.PrefixStore.open(path, GEOMETRY, put.namespace, CONFIG, "r") as store:
            n = put.n // CONFIG.window * CONFIG.window
            assert store.lookup(put.tokens, tenant="bob") == 0
            with store.lease(put.tokens, tenant=put.tenant) as lease, lease.session() as session:
                assert lease.n_tokens == n
                for layer, (keys, values) in enumerate(zip(*rows_of(put), strict=True)):
                    k, v, _ = session.retrieve(layer, None)
                    assert np.array_equal(k.numpy(), keys[:, :n])
                    assert np.array_equal(v.numpy(), values[:, :n])


Raw = tuple[SpanHeader, bytes, bytes, bytes]  # header; as bytes; data space; index value


def spans_of(path: Path) -> list[Raw]:
    """Every span as it lies on the disk, by id."""
    shard = Shard(path)

    def read(extent: Extent) -> bytes:
        raw = (shard.segments / f"{extent.segment:08d}.seg").read_bytes()
        return raw[extent.off : extent.off + extent.length]

    with impress.PrefixStore.open(path, GEOMETRY, "any", CONFIG, "r") as store:
        records = sorted(store.catalog.records(), key=lambda record: record.span_id)
    index = Index(shard.index, create=False)
    values = dict(index.spans())
    index.close()
    found = []
    for record in records:
        raw = read(record.meta)
        header = decode_header(raw, record.meta)
        data = b"".join(map(read, record.parts))
        found.append((header, raw[: len(encode_header(header))], data, values[record.span_id]))
    return found


def test_the_golden_store_is_served_whole(golden: Path) -> None:
    verdict = verify_store(golden)
    assert not verdict.problems and verdict.spans == len(PUTS)
    assert_all_served(golden)
    with impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG) as store:
        store.check()
        assert store.stats()["nodes"] == len(PUTS) + 1  # the split
        added = Put("golden", 9, 64)
        assert store.store(added.tokens, *rows_of(added), wait_s=60).wait(60)
    assert_all_served(golden)


def test_rebuilt_from_its_segments_it_is_the_same(golden: Path) -> None:
    before = spans_of(golden)
    found = rebuild_store(golden)
    assert (found.spans, found.torn, found.damaged, found.foreign) == (len(PUTS), 0, 0, 0)
    assert_all_served(golden)
    for old, new in zip(before, spans_of(golden), strict=True):
        assert (old[1], old[2]) == (new[1], new[2])


def test_what_it_decodes_it_encodes_to_the_same_bytes(golden: Path) -> None:
    for header, raw, _, value in spans_of(golden):
        assert encode_header(header) == raw
        meta = header.record.meta
        stored = replace(header.record, meta=replace_length(meta, value))
        assert encode_index(stored) == value


def replace_length(meta: Extent, value: bytes) -> Extent:
    """The extent reserved for a header, with the length that the index keeps."""
    return Extent(meta.segment, meta.off, int.from_bytes(value[168:176], "little"))


def test_todays_writer_writes_the_same_store(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, row orders, probe records, sums, padding: a drift in any of them is caught here.

    See tests/data/make_golden.py for what to do about it. Where things lie may differ. Of int4's
    records only the scale has another value since then; what they stand for is read as before.
    """
    monkeypatch.setitem(quant._MOST_STEPS, 4, 8.0)
    build(tmp_path / "today")
    for old, new in zip(spans_of(golden), spans_of(tmp_path / "today"), strict=True):
        places = {"meta": old[0].record.meta, "parts": old[0].record.parts}
        moved = replace(new[0], record=replace(new[0].record, **places))
        assert encode_header(moved) == old[1]
        assert new[2] == old[2], "rows, padding or probe records"
        kept = replace_length(old[0].record.meta, old[3])
        assert encode_index(replace(moved.record, meta=kept)) == old[3]


def test_an_older_format_is_set_aside_in_one_line_and_the_store_serves_on(
    golden: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, name in ((2, "set-aside-format-1"), (3, "set-aside-format-2")):
        monkeypatch.setattr(impress.write.directory, "VERSION", version)  # a release to come
        with pytest.raises(impress.FormatError, match="older than this version reads") as refused:
            impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG, "r")
        assert "\n" not in str(refused.value)
        assert not (golden / name).exists()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "impress"):
            store = impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG)
        with store:
            (said,) = [record.getMessage() for record in caplog.records]
            assert f"format {version - 1}" in said and name in said and "\n" not in said
            assert store.lookup(PUTS[0].tokens) == 0
            store.store(PUTS[0].tokens, *rows_of(PUTS[0]), wait_s=60)
            store.flush()
            assert store.lookup(PUTS[0].tokens) == 80
        assert list((golden / name / "main/segments").glob("*.seg"))
    assert not verify_store(golden).problems


def test_nothing_set_aside_before_is_overwritten(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (golden / "set-aside-format-1").mkdir()
    monkeypatch.setattr(impress.write.directory, "VERSION", 2)
    impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG).close()
    assert (golden / "set-aside-format-1-0/main/segments").is_dir()


def test_a_crash_while_setting_aside_is_made_good_by_the_next_open(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (golden / "shards").rename(golden / "set-aside-format-1")
    monkeypatch.setattr(impress.write.directory, "VERSION", 2)
    with impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG) as store:
        assert store.lookup(PUTS[0].tokens) == 0
    assert json.loads((golden / "impress.json").read_text())["format"] == 2


def test_two_that_set_an_older_store_aside_at_once_begin_one(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wrote its own identity over the first's, whose spans were foreign from then on: a
    rebuild left them out."""
    monkeypatch.setattr(impress.write.directory, "VERSION", 2)
    upgrade = partial(matching_identity, golden, GEOMETRY, CONFIG.window, create=True)
    loads, second = json.loads, []

    def another_comes(said: str) -> Any:
        monkeypatch.setattr(json, "loads", loads)
        second.append(upgrade())
        return loads(said)

    monkeypatch.setattr(json, "loads", another_comes)
    first = upgrade()
    said = bytes.fromhex(json.loads((golden / "impress.json").read_text())["uuid"])
    assert [first.uuid, *(one.uuid for one in second)] == [said, said]
    assert [path.name for path in golden.glob("set-aside*")] == ["set-aside-format-1"]


def test_an_older_store_that_is_being_written_is_left_alone(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impress.write.directory, "VERSION", 2)
    shard = Shard(golden)
    shard.lock()
    with pytest.raises(impress.StoreLocked):
        impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG)
    shard.unlock()
    assert (golden / "shards").is_dir()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        '{"format": "1"}',
        '{"format": 0}',
        '{"format": true}',
        '{"format": 1}',
        "[" * 100_000,
        "\0",
    ],
)
def test_an_identity_that_is_none_is_refused(golden: Path, text: str) -> None:
    (golden / "impress.json").write_text(text)
    for mode in ("r", "rw"):
        with pytest.raises(impress.FormatError, match="not a store's identity"):
            impress.PrefixStore.open(golden, GEOMETRY, "golden", CONFIG, mode)
    assert (golden / "shards").is_dir()
