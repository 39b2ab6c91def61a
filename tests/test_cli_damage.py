"""What commands say about a store that cannot be read whole, and about unexpected files."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import lmdb
import pytest
from console import (
    CONFIG,
    FORK,
    GEOMETRY,
    PROMPT,
    SCRIPT,
    assert_refused,
    ended,
    opened,
    put,
    records_of,
    rows_of,
    run,
    run_json,
    two_prompts,
)

import impress
import impress.cli.live
from impress.cli import options
from impress.cli.explain import _prompt
from impress.cli.run import _print
from impress.cli.survey import open_for_reading, survey, unread
from impress.report import write_json, write_report
from impress.upkeep.verify import verify_store
from impress.weights import weight_files
from impress.write.strays import strays_of
from tiers.files import segment_paths
from tiers.segments import SEGMENTS


@pytest.fixture
def path(tmp_path):
    return two_prompts(tmp_path / "store")


@pytest.fixture
def half_lost(tmp_path):
    """Two shards: the first has a prompt's first half; the second has all of it, but no index."""
    path = tmp_path / "store"
    with opened(path) as first, opened(path) as second:
        put(first, PROMPT[:128])
        second.follow()
        put(second, PROMPT)
    shutil.rmtree(path / "shards/1/index")
    return path


def ids_of(folder, tokens=PROMPT):
    (folder / "ids.json").write_text(json.dumps(tokens))
    return folder / "ids.json"


def test_a_shard_that_cannot_be_read_is_named(half_lost, tmp_path):
    """Its spans counted as zero and what it held was said to be stored nowhere, with status 0 and
    no word about the shard anywhere."""
    done, found = run_json("inspect", "--store", half_lost)
    assert done.returncode == 0 and found["failed_shards"] == ["1"]
    assert "shard 1 is left out" in done.stderr
    (line,) = [x for x in run("inspect", "--store", half_lost).stdout.splitlines() if "nobody" in x
               and x.startswith("1 ")]  # fmt: skip
    assert "unreadable" in line and " 0 " not in line.partition("nobody")[0]
    assert found["tiers"]["ssd"]["free"] <= found["shards"][0]["total"]  # its bytes are not free
    done = run("explain", "--store", half_lost, "--prefix", ids_of(tmp_path))
    assert "only a part is looked at" in done.stdout and "shard 1" in done.stdout
    done = run("explain", "--store", half_lost, "--prefix", ids_of(tmp_path), "--json", "-")
    assert json.loads(done.stdout)["failed_shards"] == ["1"]


def test_a_damaged_index_is_not_shown_as_an_empty_store(tmp_path):
    """Only a line on stderr told the two apart."""
    path = tmp_path / "store"
    with opened(path) as store:
        put(store, PROMPT)
        store.flush()
        env = store._home.index._env
        spans = store._home.index._dbs["spans"]
        with env.begin(write=True) as txn, txn.cursor(spans) as cursor:
            assert cursor.first()
            key, value = cursor.item()
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=spans)
    _, found = run_json("inspect", "--store", path)
    assert (found["spans"], found["damaged_index_values"]) == (0, 1)
    assert "passed over 1 damaged index value" in run("inspect", "--store", path).stdout


def test_the_index_that_is_damaged_is_named_once(path):
    """Its path was in the line twice: LMDB's own message has it too."""
    index = path / "shards/main/index"
    (index / "data.mdb").write_bytes(b"no index" * 4096)
    done = run("repack", "--store", path, "--dry-run")
    assert done.stderr.startswith(f"impress: index: {index}: MDB_INVALID: "), done


def test_nothing_is_purged_where_a_shard_cannot_be_read(half_lost):
    """The shards before it were purged, and the message about it named only the index."""
    done = run("purge", "--store", half_lost, "--namespace", "a test")
    assert_refused(done, "nothing is purged", "shard 1 cannot be read")
    with opened(half_lost, "r") as store:
        assert store.lookup(PROMPT) == 128


def test_a_shard_that_is_just_being_made_is_no_failure(path):
    (path / "shards/1/segments").mkdir(parents=True)
    with lmdb.open(str(path / "shards/1/index")):
        pass  # its tables come a moment later
    done, found = run_json("inspect", "--store", path)
    assert (done.returncode, done.stderr, found["failed_shards"]) == (0, "", [])


def test_no_size_is_negative_where_segments_are_short(path):
    """`inspect` said `free -442368 B`, `full 147 %`, and not a word about damage."""
    for segment in segment_paths(path / "shards/main/segments"):
        segment.write_bytes(b"")
    _, found = run_json("inspect", "--store", path)
    ssd = found["tiers"]["ssd"]
    assert ssd["free"] == 0 and ssd["missing"] == ssd["used"] > 0
    assert "lie in no segment: impress verify" in run("inspect", "--store", path).stdout


def test_what_is_missing_is_not_hidden_by_the_room_of_other_segments(tmp_path):
    """Computed from sums, a lost segment was `missing` only as far as the others were full."""
    path = tmp_path / "store"
    with opened(path) as store:
        put(store, list(range(30 * 64)))
        put(store, list(range(9000, 9000 + 4 * 64)))
    first, second = segment_paths(path / "shards/main/segments")
    owned = [extent for record in records_of(path) for extent in (record.meta, *record.parts)]
    lost = sum(extent.length for extent in owned if extent.segment == int(first.stem))
    first.unlink()
    _, found = run_json("inspect", "--store", path)
    ssd = found["tiers"]["ssd"]
    assert ssd["missing"] == found["shards"][0]["missing"] == lost > ssd["used"] - ssd["total"]
    assert second.exists() and ssd["total"] > 0


def test_a_tier_is_not_fuller_than_full_where_some_segments_are_missing(tmp_path):
    """What lay in segments that were deleted was set against the size of the others: the tier was
    "full" to 457 %, and none of it free."""
    path = tmp_path / "store"
    with opened(path) as store:
        for first in range(4):
            put(store, list(range(first * 10_000, first * 10_000 + 30 * 64)))
    *most, last = segment_paths(path / "shards/main/segments")
    for segment in most:
        segment.unlink()
    _, found = run_json("inspect", "--store", path)
    ssd = found["tiers"]["ssd"]
    assert most and ssd["used"] > ssd["total"] == last.stat().st_size
    assert ssd["free"] == ssd["total"] - (ssd["used"] - ssd["missing"]) > 0
    percents = re.findall(r"(\d+) ?%", run("inspect", "--store", path).stdout)
    assert percents and max(map(int, percents)) <= 100


def test_what_belongs_to_tenants_of_one_model_is_shown_in_one_order(tmp_path):
    """The hash seed decided which prompt was the nearest, and nothing said whose it was."""
    path = tmp_path / "store"
    with opened(path) as store:
        for tenant, tokens in (("a", PROMPT), ("b", FORK)):
            rows = rows_of(len(tokens))
            assert store.store(tokens, rows, rows, tenant=tenant).wait(60)
    ids = ids_of(tmp_path, [7, *PROMPT[1:]])
    seen, said = set(), set()
    for seed in range(4):
        env = {"PYTHONHASHSEED": str(seed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        command = [SCRIPT, "explain", "--store", path, "--prefix", ids, "--json", tmp_path / "json"]
        said.add(ended(command, env=env).stdout)
        seen.add(json.loads((tmp_path / "json").read_text())["found"][0]["root"])
    (root,), (shown,) = seen, said
    assert f"under a test {root[:12]}" in shown


def test_a_prompt_in_a_running_store_is_said_to_be_as_last_saved(path, tmp_path):
    args = ("explain", "--store", path, "--prefix", ids_of(tmp_path))
    assert "as last saved" not in run(*args).stdout
    with opened(path):
        assert "a process writes to the store" in run(*args).stdout


@pytest.mark.parametrize(
    ("text", "is_text"),
    [
        ('[{"word": "no"}]', True),
        ("[]", True),
        ("[true]", True),
        ("[1, 2]", False),
        ("1 2", False),
        ("\ufeff[1, 2]", False),
        ("\ufeffa", True),
    ],
)
def test_beside_a_model_json_is_token_ids_where_all_are_integers(tmp_path, text, is_text):
    """A document of JSON records that `run` had stored got "want integers, got object"."""
    (tmp_path / "prompt").write_text(text)
    assert isinstance(_prompt(tmp_path / "prompt"), str) == is_text


def test_a_policy_that_nothing_would_use_is_refused(path, tmp_path):
    args = ("explain", "--store", path, "--prefix", ids_of(tmp_path), "--policy", "paper")
    assert_refused(run(*args), "--policy", "need --query")


@pytest.mark.parametrize(
    "text", ["impress_tier_used_bytes 5\n", "impress_hits_total NaN\n", "impress_hits_total +Inf\n"]
)
def test_numbers_that_are_none_are_no_stores_metrics(monkeypatch, text):
    """They ended in a traceback."""
    monkeypatch.setattr(impress.cli.live, "_scrape", lambda port: text)
    with pytest.raises(impress.StoreFailed, match="port 9400"):
        impress.cli.live.live_counters(9400, b"")


def test_an_index_of_weights_that_names_no_files_is_one_line(tmp_path):
    """It ended in a traceback about a path made of a number."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(impress.BadInput, match="cannot read"):
        weight_files(tmp_path)


def test_a_link_is_written_through(tmp_path):
    """One such link is /dev/stdout, which a report would have replaced."""
    (tmp_path / "link.json").symlink_to(tmp_path / "report.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}


def test_a_link_to_nowhere_is_said_before_the_work(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "gone/report.json")
    with pytest.raises(impress.BadInput, match="no such folder"):
        options.check_json(link)


def test_an_answer_is_printed_as_it_is(capsys):
    """A Makefile's tabs became spaces."""
    found = {
        "answer": "all:\n\tcc a\rb", "bytes_by_tier": {}, "mode": "exact", "hit_tokens": 0,
        "prompt_tokens": 1, "ttft_ms": 1.0, "stored_tokens": 0, "why": "", "policy": "exact",
        "refused": "", "lost": "", "store": "",
    }  # fmt: skip
    _print(found)
    assert capsys.readouterr().out.startswith("all:\n\tcc a\rb\n")


def test_a_full_disk_leaves_the_report_of_before(tmp_path, monkeypatch):
    """The earlier report was emptied first."""
    report = tmp_path / "report.json"
    report.write_text("{}")

    def full(self, text):
        self.open("w").close()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    for write in (
        lambda: write_json(report, {"a": 1}),
        lambda: write_report(report, {}, []),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
        assert report.read_text() == "{}" and [*tmp_path.iterdir()] == [report]


@pytest.mark.parametrize("what", ["n_layers", "window", "uuid"])
def test_rebuild_does_not_go_by_an_identity_that_no_header_fits(path, what):
    """One bad bit in impress.json, which has no checksum: all headers counted as cut off, or as
    another store's, and an index without spans took the old one's place."""
    identity = path / "impress.json"
    was = identity.read_text()
    found = json.loads(was)
    place = found if what in found else found["geometry"]
    before = place[what]
    place[what] = 2 * before if isinstance(before, int) else before[:-1] + "0123"[before[-1] < "1"]
    identity.write_text(json.dumps(found))
    done = run("rebuild", "--store", path)
    assert_refused(done, "impress.json says", "all 2 headers in shard main say", "else that file")
    identity.unlink()
    assert run("rebuild", "--store", path).returncode == 0
    assert json.loads(identity.read_text()) == json.loads(was)
    with opened(path, "r") as store:
        assert store.lookup(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("command", ["verify", "inspect", "repack", "rebuild", "purge"])
def test_a_shards_folder_that_is_a_link_to_itself_is_one_line(path, command):
    """Python up to 3.12 raised RuntimeError for it: each command ended in a traceback, and no
    server could open the store."""
    loop = path / "shards/2"
    loop.symlink_to(loop)
    with opened(path, shard=0) as store:
        assert store.lookup(PROMPT) == len(PROMPT) and [*store.left_out()] == ["2"]
    named = ["--namespace", "a test"] if command == "purge" else []
    done = run(command, "--store", path, *named)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr
    assert "2 is a link that leads to no folder" in done.stderr + done.stdout


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_nothing_is_purged_where_a_folder_was_renamed_or_copied(path, how):
    """`purge` said "erased" while that folder kept all of it, and a rebuild brought it back."""
    main, other = path / "shards/main", path / "shards/1"
    if how == "renamed":
        main.rename(other)
    else:
        shutil.copytree(main, other)
    files = [*path.glob("shards/*/segments/*.seg"), *path.glob("shards/*/index/data.mdb")]
    held = [file.read_bytes() for file in files]
    done = run("purge", "--store", path, "--namespace", "a test")
    assert_refused(done, "nothing is purged", "of shard 1 are numbered as another folder's")
    assert [file.read_bytes() for file in files] == held
    done, found = run_json("inspect", "--store", path)
    assert done.returncode == 0 and found["failed_shards"] == ["1"]
    assert "only a part is looked at" in run("inspect", "--store", path).stdout
    assert "shard 1" in run("verify", "--store", path).stdout


@pytest.mark.parametrize("how", ["renamed", "copied"])
@pytest.mark.parametrize("name", ["main.bak", "4096"])
def test_a_folder_under_no_shards_name_is_named_and_nothing_is_purged(path, how, name):
    """No command looked there: `purge` said "erased" while all of it lay in the copy, and a store
    whose folder was moved away passed for sound."""
    main, other = path / "shards/main", path / "shards" / name
    if how == "renamed":
        main.rename(other)
        assert name in run("inspect", "--store", path).stderr
        assert_refused(run("rebuild", "--store", path), "no segments", name)
    else:
        shutil.copytree(main, other)
        assert run_json("inspect", "--store", path)[1]["failed_shards"] == [name]
        assert name in run("rebuild", "--store", path, "--dry-run").stdout
    done = run("purge", "--store", path, "--namespace", "a test")
    assert_refused(done, "nothing is purged", f"shards/{name}", "delete it")
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1 and any(name in problem["what"] for problem in found["problems"])
    shutil.rmtree(other)
    if how == "copied":
        assert run("verify", "--store", path).returncode == 0
        assert run("purge", "--store", path, "--namespace", "a test").returncode == 0


def test_what_folders_and_lock_files_are_called_does_not_write_to_the_terminal(path):
    """An escape sequence in them came through: in errors, and in what rebuild notes."""
    with impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG):
        (path / "shards/main/lock").write_text("7\x1b[31mRED")
        for command in ("repack", "rebuild"):
            assert_refused(run(command, "--store", path), r"process 7\x1b[31mRED")
    shutil.copytree(path / "shards/main", path / "shards/a\x1b[31mRED")
    purged = run("purge", "--store", path, "--namespace", "a test")
    assert_refused(purged, "nothing is purged", r"shards/a\x1b[31mRED")
    rebuilt = run("rebuild", "--store", path, "--dry-run")
    assert r"shards/a\x1b[31mRED" in rebuilt.stdout
    assert "\x1b" not in purged.stderr + rebuilt.stdout + rebuilt.stderr


def test_a_folder_beside_the_shards_that_may_not_be_looked_into_is_named(path, monkeypatch):
    """A copy made by root kept everybody else from using `inspect`, `verify` and `explain`."""
    for name in ("main.bak", "lost+found"):
        (path / "shards" / name).mkdir()
    real = Path.iterdir

    def iterdir(folder):
        if {"main.bak", "lost+found"} & {*folder.parts}:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert strays_of(path) == ["main.bak"]
    verdict = verify_store(path)
    assert [p.what for p in verdict.problems if "main.bak" in p.what] and len(verdict.problems) == 1
    with impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG, "r") as store:
        assert unread(store) == ["main.bak"]


def test_a_renamed_folder_is_unsound_also_once_a_writer_has_opened_it(path):
    """Its index has lost the spans by then, and `verify` said "sound" of full segments."""
    (path / "shards/main").rename(path / "shards/1")
    with impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG.model_copy(update={"shard": 1})):
        pass
    done = run("verify", "--store", path)
    assert done.returncode == 1 and "segments, so that nobody is served them" in done.stdout


def test_segments_of_two_folders_in_one_are_moved_and_made_again(path):
    """Renaming it back made the other segments the strange ones: no purge was possible any more."""
    main, other = path / "shards/main", path / "shards/1"
    main.rename(other)
    mine = CONFIG.model_copy(update={"shard": 1})
    with impress.PrefixStore.open(path, GEOMETRY, "a test", mine) as store:
        put(store, [7, *PROMPT[1:]])
    _, found = run_json("inspect", "--store", path)
    assert found["spans"] == 1 and found["failed_shards"] == ["1"]
    other.rename(main)
    done = run("purge", "--store", path, "--namespace", "a test")
    assert_refused(done, "move them to that of their number")
    (strange,) = [file for file in (main / "segments").iterdir() if int(file.stem) >= SEGMENTS]
    (other / "segments").mkdir(parents=True)
    strange.rename(other / "segments" / strange.name)
    assert run("rebuild", "--store", path).returncode == 0
    with opened(path, "r") as store:
        assert store.lookup(PROMPT) == len(PROMPT)
        assert store.lookup([7, *PROMPT[1:]]) == len(PROMPT)
    assert run("purge", "--store", path, "--namespace", "a test").returncode == 0


def test_commands_that_only_look_hold_up_no_writer(tmp_path):
    """While `inspect` was open, a full store refused every prompt: evictions stayed in limbo."""
    path = tmp_path / "store"
    small = CONFIG.model_copy(update={"segment_bytes": 1 << 20, "disk_bytes": 1 << 20})
    with impress.PrefixStore.open(path, GEOMETRY, "a test", small) as store:
        seeds = iter(range(10_000))
        while not store.stats()["evicted_spans"]:
            put(store, [next(seeds), *PROMPT[1:]])
            store.flush()
        reader, _ = open_for_reading(path)
        with reader:
            for _ in range(4):
                tokens, rows = [next(seeds), *PROMPT[1:]], rows_of(len(PROMPT))
                assert store.store(tokens, rows, rows).wait(60)


def test_a_shard_that_may_not_be_listed_is_named(path, monkeypatch, tmp_path):
    """With another user's shard in a shared directory, the whole command failed."""
    with opened(path), impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG) as second:
        put(second, [9, *PROMPT[1:]])
    real = Path.iterdir

    def iterdir(self):
        if self.match("shards/1/*"):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    reader, identity = open_for_reading(path)
    with reader:
        found = survey(reader, identity)
    assert (found["failed_shards"], found["shards"][1]["total"]) == (["1"], 0)
    assert found["tiers"]["ssd"]["missing"] == 0


def test_verify_and_rebuild_name_a_folder_that_was_renamed(path):
    """`verify`: `sound`, though nobody was served it; `rebuild`: "that do not read back whole"."""
    main, other = path / "shards/main", path / "shards/1"
    main.rename(other)
    done, found = run_json("verify", "--store", path)
    assert done.returncode == 1 and not found["sound"]
    (problem,) = found["problems"]
    assert "2 spans are numbered as another folder's" in problem["what"]
    done, found = run_json("rebuild", "--store", path, "--dry-run")
    assert found["torn"] == 0 and any("2 headers in shard 1" in note for note in found["notes"])
    other.rename(main)
    assert run("verify", "--store", path).returncode == 0


@pytest.mark.parametrize(
    "harm",
    [{"window": 16.0}, {"window": None}, {"window": "64"}, {"window": 6}, {"uuid": ""},
     {"uuid": "00"}],
    ids=["float", "none", "text", "no size of a window", "no uuid", "a short uuid"],
)  # fmt: skip
def test_an_identity_with_a_field_of_another_kind_is_no_identity(path, harm):
    """`verify` and `rebuild` ended in a traceback or called every span damaged: "window 16, the
    store's is 16". Later the error did not say what to do."""
    identity = path / "impress.json"
    was = identity.read_text()
    identity.write_text(json.dumps({**json.loads(was), **harm}))
    advice = "move it away, then impress rebuild"
    for command in ("verify", "inspect", "rebuild"):
        done = run(command, "--store", path)
        assert_refused(done, "not a store's identity", advice, *harm)
    with pytest.raises(impress.FormatError, match="not a store's identity"):
        opened(path)
    identity.rename(path / "impress.json.bad")
    assert run("rebuild", "--store", path).returncode == 0
    assert json.loads(identity.read_text()) == json.loads(was)
    with opened(path) as store:
        assert store.lookup(PROMPT) == len(PROMPT) and store.lookup(FORK) == len(FORK)


def test_a_dry_run_of_a_rebuild_says_what_would_be_made(path):
    """It said that the identity had been made again, but there was none."""
    (path / "impress.json").unlink()
    done = run("rebuild", "--store", path, "--dry-run")
    assert "impress.json was missing: would be made again" in done.stdout, done
    assert not (path / "impress.json").exists()
    assert "impress.json was missing: made again" in run("rebuild", "--store", path).stdout


def test_an_identity_is_made_again_from_what_most_headers_say(path, tmp_path):
    """It was made from the highest-numbered one, in a shard copied here from another store."""
    with opened(tmp_path / "other") as main, opened(tmp_path / "other") as second:
        put(main, FORK)
        put(second, PROMPT)
    shutil.copytree(tmp_path / "other/shards/1", path / "shards/1")
    was = (path / "impress.json").read_text()
    done = run("rebuild", "--store", path)
    assert done.returncode == 1 and "move the folder away" in done.stdout
    (path / "impress.json").unlink()
    assert run("rebuild", "--store", path).returncode == 1
    assert json.loads((path / "impress.json").read_text()) == json.loads(was)
    with opened(path, "r") as store:
        assert store.lookup(PROMPT) == len(PROMPT)
