"""The command line, through the real console script: what it prints and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import forks
import numpy as np
import pytest
import typer
from conftest import SERVICE
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
from rich.console import Console
from typer.testing import CliRunner

import impress
import impress.cli.live
import impress.stats
from impress.cli import main
from impress.cli.explained import print_request
from impress.cli.inspect import _live
from impress.cli.main import _said, app
from impress.cli.options import text_of
from impress.terminal import line_of, literal, show
from impress.usage.notes import Note
from impress.write.directory import Shard
from tiers.files import segment_paths


@pytest.fixture
def path(tmp_path):
    return two_prompts(tmp_path / "store")


def test_help_names_every_command_and_the_exit_status():
    done = run("--help")
    assert done.returncode == 0
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    block = readme.partition("## On the command line")[2].partition("`--store DIR`")[0]
    named = set(re.findall(r"^    impress ([\w-]+)", block, re.MULTILINE))
    listed = set(re.findall(r"^[│ ]+([a-z][\w-]+) ", done.stdout, re.MULTILINE))
    assert len(named) == 10 and named <= listed and "Exit status" in done.stdout
    assert run("--version").stdout == f"impress {impress.__version__}\n"
    assert ended([sys.executable, "-m", "impress", "--version"]).stdout == run("--version").stdout


@pytest.mark.parametrize("command", ["rebuild", "repack"])
def test_help_says_what_a_dry_run_needs(command):
    """Help said "change nothing"; a dry run needed the right to write, and wrote lock and index."""
    told = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    told = told.rpartition("--dry-run ")[2].partition(" --json")[0]
    assert "stay" in told and "as for writing: the right to write is needed" in told


@pytest.mark.parametrize("args", [["--help"], ["inspect", "--help"]])
def test_a_terminal_of_no_columns_gets_the_help(args):
    """COLUMNS=0 means an unknown width: nothing was printed, with status 0."""
    done = ended([str(SCRIPT), *args], env={**os.environ, "COLUMNS": "0"})
    assert done.returncode == 0 and "Usage: impress" in done.stdout


@pytest.mark.parametrize(
    "command", ["demo", "run", "inspect", "explain", "verify", "repack", "rebuild", "purge"]
)
def test_help_of_a_command_has_examples_and_its_exit_status(command):
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Exit status" in done.stdout
    assert "Examples" in done.stdout


@pytest.mark.parametrize("command", ["run", "vllm-config"])
def test_help_says_of_what_the_disk_limit_is(command):
    """It seemed to be a limit for the directory, which other processes write to as well."""
    done = run(command, "--help")
    assert done.returncode == 0 and "--disk-gib" in done.stdout
    assert "shard" in done.stdout.partition("--disk-gib")[2]


@pytest.mark.parametrize("args", [["--help"], ["inspect", "--tree"], ["verify"]])
def test_light_commands_import_neither_torch_nor_transformers(path, args):
    if args[0] != "--help":
        args = [*args, "--store", str(path)]
    code = f"""if True:
        import sys
        from impress.cli.main import run
        sys.argv = ["impress", *{args!r}]
        try:
            run()
        except SystemExit as end:
            assert not end.code, end.code
        heavy = {{"torch", "transformers", "tokenizers"}} & set(sys.modules)
        assert not heavy, heavy
    """
    done = ended([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_a_command_is_imported_is_one_line():
    code = """if True:
        import sys

        class Interrupted:
            def find_spec(self, name, *_):
                if name == "impress.cli.main":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupted())
        from impress.cli.entry import run
        assert not {"numpy", "impress.store"} & set(sys.modules), "late to be told of Ctrl-C"
        run()
    """
    done = ended([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (2, "impress: interrupted\n")


def test_every_name_of_the_package_is_there_on_first_use():
    code = """if True:
        import impress
        for name in impress.__all__:
            assert name in dir(impress) and getattr(impress, name).__name__ == name, name
        from impress import *
        assert PrefixStore is impress.store.PrefixStore
        try:
            impress.no_such_name
        except AttributeError as error:
            print(error)
    """
    done = ended([sys.executable, "-c", code])
    assert done.stdout == "module 'impress' has no attribute 'no_such_name'\n", done.stderr


def test_inspect_shows_what_is_stored(path):
    done = run("inspect", "--store", path, "--tree")
    assert done.returncode == 0 and not done.stderr
    for word in ("float32", "512 tokens in 2 spans, 3 tree nodes", "ssd", "a test", "windows 2–4"):
        assert word in done.stdout


def test_inspect_draws_every_node_of_a_long_conversation(tmp_path):
    """Each turn is drawn further right: past the terminal's width nothing was shown or said."""
    turns = 70
    with opened(tmp_path / "store") as store:
        for turn in range(1, turns + 1):
            put(store, list(range(64 * turn)))
    done = run("inspect", "--store", tmp_path / "store", "--tree")
    assert done.returncode == 0 and f"{turns} tree nodes" in done.stdout
    drawn = [line for line in done.stdout.splitlines() if "── windows" in line]
    assert len(drawn) == turns
    assert all(f"· span {n} · 0 leases" in line for n, line in enumerate(drawn, 1))


def test_inspect_json_counts_tiers_spans_and_namespaces(path):
    done, found = run_json("inspect", "--store", path, "--tree")
    assert done.returncode == 0
    assert (found["spans"], found["nodes"], found["tokens"]) == (2, 3, 512)
    ssd = found["tiers"]["ssd"]
    owned = sum(r.owned_bytes for r in records_of(path))
    assert ssd["used"] == owned and ssd["used"] + ssd["free"] == ssd["total"]
    (space,) = found["namespaces"]
    assert (space["name"], space["spans"], space["tokens"]) == ("a test", 2, 512)
    assert sorted(n["tokens"] for n in found["tree"]) == [128, 192, 192]
    assert sorted(n["depth"] for n in found["tree"]) == [0, 1, 1]


def test_inspect_counts_windows_that_were_stored_twice_once(tmp_path):
    """Two stores of one beginning, at once: a namespace seemed to have more tokens than it had, and
    the rest was said to have been evicted, though nothing was."""
    path, longer = tmp_path / "store", [*PROMPT, *range(9000, 9064)]
    with opened(path) as store:
        both = [store.writer(PROMPT), store.writer(longer)]  # both begun while nothing is stored
        for writer, n in zip(both, (320, 384), strict=True):
            with writer:
                for layer, rows in enumerate(rows_of(n)):
                    writer.put(layer, 0, rows, rows)
            assert writer.stored.wait(60)
        assert store.stats()["evicted_spans"] == 0
    _, found = run_json("inspect", "--store", path)
    assert (found["spans"], found["tokens"]) == (2, 384)
    assert [space["tokens"] for space in found["namespaces"]] == [384]
    assert found["tiers"]["ssd"]["dead_bytes"] > 0
    shown = " ".join(run("inspect", "--store", path).stdout.split())
    assert "of windows that another span has too, or that were evicted; impress repack" in shown


def test_inspect_counts_what_two_shards_have_both(tmp_path):
    """Spans that one shard's writer had stored before it saw the other's were counted nowhere: half
    of the space seemed to belong to nobody, and that shard to have no spans."""
    path = tmp_path / "store"
    with opened(path, follow_every_s=0) as first, opened(path, follow_every_s=0) as second:
        for store in (first, second):
            put(store, PROMPT)
            put(store, FORK)
    _, found = run_json("inspect", "--store", path)
    ssd, (shown, copies) = found["tiers"]["ssd"], found["shards"]
    assert (shown["spans"], copies["spans"]) == (2, 2)
    assert ssd["dead_bytes"] == copies["repeated"] == copies["used"] > 0
    in_tree = sum(space["bytes"] for space in found["namespaces"])
    assert ssd["used"] == in_tree + ssd["dead_bytes"] and not ssd["behind_bytes"]
    said = " ".join(run("inspect", "--store", path).stdout.split())
    assert "of windows that another span has too" in said and "behind windows" not in said


def test_inspect_does_not_take_what_hangs_in_the_air_for_a_copy(tmp_path):
    """What another shard's writer has evicted the beginning of, no prompt finds; its bytes were
    counted as used, and by nothing else."""
    path, longer = tmp_path / "store", [*PROMPT, *range(9000, 9064)]
    with opened(path, follow_every_s=0) as first, opened(path, follow_every_s=0) as second:
        put(first, PROMPT)
        second.follow()
        put(second, longer)
        assert first.evict(1 << 40) > 0
        first.flush()
        _, found = run_json("inspect", "--store", path)
        said = " ".join(run("inspect", "--store", path).stdout.split())
    ssd, (_, hanging) = found["tiers"]["ssd"], found["shards"]
    assert (found["spans"], hanging["spans"], hanging["windows"]) == (0, 1, 0)
    assert ssd["behind_bytes"] == hanging["behind"] == ssd["used"] > 0 == ssd["dead_bytes"]
    assert "behind windows that are not stored, or cannot be read" in said


def test_inspect_counts_leases_of_the_hottest_prefix(path):
    hot = list(range(64))
    with opened(path) as store:
        put(store, hot)
        for _ in range(3):
            store.lease(hot).release()
    _, found = run_json("inspect", "--store", path)
    assert [(p["tokens"], p["leases"]) for p in found["hottest"]] == [(64, 3), (320, 0), (320, 0)]


def test_inspect_says_whose_leases_it_shows_of_a_span_in_parts(path):
    """The part that nobody had leased showed the other's leases, and the help did not say so."""
    with opened(path) as store:
        for _ in range(3):
            store.lease(FORK).release()
        assert sorted(branch.hits for branch in store.catalog.walk()) == [0, 3, 3]
    _, found = run_json("inspect", "--store", path, "--tree")
    assert [node["leases"] for node in found["tree"]] == [3, 3, 3]
    for command in ("inspect", "explain"):
        assert "most used part" in " ".join(run(command, "--help").stdout.split())


def test_inspect_says_how_much_of_a_prompt_is_stored_from_any_kind_of_file(path, tmp_path):
    tokens = FORK[:200] + [7] * 50
    names = ("ids.json", "ids.txt", "ids.npy", "marked.json")
    files = [*(tmp_path / name for name in names), Path("-")]
    files[0].write_text(json.dumps(tokens))
    files[1].write_text("\n".join(map(str, tokens)))
    np.save(files[2], np.array(tokens, dtype=np.int64))
    files[3].write_text(json.dumps(tokens), encoding="utf-8-sig")  # as some editors save it
    for file in files:
        args = ("inspect", "--store", path, "--prefix", file, "--json")
        found = json.loads(run(*args, input=json.dumps(tokens)).stdout)
        (stored,) = found["prefix"]["stored"]
        assert (found["prefix"]["tokens"], stored["tokens"]) == (250, 192)
        assert [(s["span"], s["n_windows"]) for s in stored["spans"]] == [(1, 2), (2, 1)]
    assert "span 2: windows 2 to 2" in run("inspect", "--store", path, "--prefix", files[0]).stdout


@pytest.mark.parametrize("text", ["a b c", "[1, 2", "[-1]", "", "[1.5]", '["x"]', "[true, 1]"])
def test_inspect_refuses_what_is_not_token_ids_in_one_line(path, tmp_path, text):
    (tmp_path / "ids").write_text(text)
    done = run("inspect", "--store", path, "--prefix", tmp_path / "ids")
    assert_refused(done, "ids")
    is_text = "not token ids" in done.stderr
    assert ("for a text: impress explain --model DIR" in done.stderr) is is_text


@pytest.mark.parametrize("ids", [[1 << 64, 5], [1 << 63, -1], [1 << 31]])
def test_ids_too_large_for_numpy_are_named_as_such(path, tmp_path, ids):
    """ "want integers, got object", it said, of integers."""
    for text in (json.dumps(ids), " ".join(map(str, ids))):
        (tmp_path / "ids").write_text(text)
        done = run("inspect", "--store", path, "--prefix", tmp_path / "ids")
        assert "an id is outside 0..2147483647" in done.stderr


@pytest.mark.parametrize(("name", "shown"), [
    ("x\\", "x\\"), ("a[b]c", "a[b]c"), ("[red]", "[red]"), ("two\nlines", r"two\nlines"),
    ("\x1b[31mred", r"\x1b[31mred"), ("Zoë", "Zoë"),
])  # fmt: skip
def test_names_are_shown_as_they_are(name, shown):
    """A final backslash was doubled, so that purge did not find the name; an escape sequence came
    to the terminal of whoever looked at another's store."""
    console = Console(file=io.StringIO(), width=100)
    console.print(literal(name))
    assert console.file.getvalue() == f"{shown}\n"


def test_where_a_lost_prefix_lay_is_shown_as_it_is(capsys):
    """Of a store in a folder called x[red] the colour was missing; x[/a] ended `explain`."""
    request = {"policy": "exact", "why": "asked for", "per_layer": [], "ttft_ms": 1.0}
    print_request({"request": {**request, "lost": "x[red]y[/a]: gone"}, "found": [{"held": []}]})
    assert "was read: x[red]y[/a]: gone; computed instead" in capsys.readouterr().out


def test_labels_of_another_programs_port_are_shown_as_they_are(capsys):
    """They were taken as markup, and could write to the terminal."""
    show(_live({"misses": {"[/a]\x1b[31m": 2}}))
    assert r"[/a]\x1b[31m 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["loop", "n" * 300, "/proc/out.json"])
def test_a_json_file_that_cannot_be_is_refused_before_the_work(path, tmp_path, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = run("repack", "--store", path, "--json", tmp_path / name)
    assert_refused(done, name)


def array_file(shape):
    """A .npy of 128 bytes that is nothing but a header."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("deep.json", b"[" * 100_000),
        ("huge.npy", array_file(f"({10**15},)")),
        ("cut.npy", array_file("(1,")),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_a_file_that_no_parser_expects_is_one_line_and_2(path, tmp_path, command, name, raw):
    """RecursionError, MemoryError and tokenize.TokenError were each a traceback, and status 1."""
    (tmp_path / name).write_bytes(raw)
    done = run(command, "--store", path, "--prefix", tmp_path / name)
    assert_refused(done, f"{name}: not token ids")


def test_inspect_and_verify_work_while_a_writer_has_the_store_open(path):
    with opened(path) as store:
        put(store, list(range(9000, 9064)))
        assert run_json("inspect", "--store", path)[1]["spans"] == 3
        assert run("verify", "--store", path).returncode == 0
        put(store, list(range(9500, 9564)))


def test_a_segment_that_its_writer_gives_back_meanwhile_is_no_error(path, monkeypatch):
    """One gone between the listing of a folder and the look at its files: "No such file", and 2."""

    def and_one_more(folder):
        return [*segment_paths(folder), folder / "00000099.seg"]

    with opened(path):
        for module in ("tiers.segments", "impress.upkeep.shares", "impress.cli.repack"):
            monkeypatch.setattr(f"{module}.segment_paths", and_one_more)
        for command in ("inspect", "verify"):
            done = CliRunner().invoke(app, [command, "--store", str(path)])
            assert done.exit_code == 0, done.output
        done = CliRunner().invoke(app, ["repack", "--store", str(path)])
        assert done.exit_code == 2 and "is open for writing by process" in done.output


def test_inspect_shows_a_name_as_it_is(tmp_path):
    with impress.PrefixStore.open(tmp_path / "[b]", GEOMETRY, "[/odd] [red]", CONFIG) as store:
        put(store, PROMPT)
    done = run("inspect", "--store", tmp_path / "[b]", "--tree")
    assert done.returncode == 0 and "[b]" in done.stdout
    assert done.stdout.count("[/odd] [red]") == 2


def test_a_long_name_stays_on_its_line(tmp_path):
    """Under a prompt it was broken at the width of the terminal, and without one at 80."""
    name = "organisation/a-model-with-a-long-name:" + "v" * 60
    with impress.PrefixStore.open(tmp_path / "s", GEOMETRY, name, CONFIG) as store:
        put(store, PROMPT)
    shown = run("inspect", "--store", tmp_path / "s", "--prefix", prompt_file(tmp_path)).stdout
    assert f"320 tokens stored (100 %) under {name}, in\n" in shown


def test_a_name_is_shown_as_it_is(tmp_path):
    """Inspect turned "llama:key:1" into a drawing of a key, and purge knew no such name."""
    name, where = "[b]llama[/b]:key:1", tmp_path / "of:key:s"
    with impress.PrefixStore.open(where, GEOMETRY, name, CONFIG) as store:
        put(store, PROMPT)
    shown = run("inspect", "--store", where, "--tree").stdout
    assert shown.count(name) == 2 and str(where) in shown
    assert str(where) in run("verify", "--store", where).stdout
    assert run("purge", "--store", where, "--namespace", name).returncode == 0


def test_a_model_is_purged_by_what_inspect_calls_it(tmp_path):
    """An engine's namespace has no name: purge refused what inspect showed, in text and in JSON."""
    for seed in range(3):
        namespace = bytes([seed]) * 32
        with impress.PrefixStore.open(tmp_path / "s", GEOMETRY, namespace, CONFIG) as store:
            put(store, PROMPT)
    _, found = run_json("inspect", "--store", tmp_path / "s", "--prefix", prompt_file(tmp_path))
    first, second, third = found["namespaces"]
    assert {row["name"] for row in found["prefix"]["stored"]} == {
        row["name"] for row in found["namespaces"]
    }
    shown = run("inspect", "--store", tmp_path / "s").stdout
    purge = ("purge", "--store", tmp_path / "s", "--namespace")
    assert first["name"] in shown and run(*purge, first["name"]).returncode == 0
    assert run(*purge, second["namespace"][:12]).returncode == 0
    assert third["root"][:12] in shown
    assert_refused(run(*purge, third["root"][:12]), "is a root", f"--namespace '{third['name']}'")
    assert_refused(run(*purge, first["name"]), "is not stored here")
    for few in (third["namespace"][:7], f"model {third['namespace'][:4]}"):
        # The error was that it is not stored here.
        assert_refused(run(*purge, few), f"--namespace {few} ", "give at least 8 of its digits")
    for other in (first["namespace"][:7], "model "):
        assert_refused(run(*purge, other), "is not stored here")
    _, left = run_json("inspect", "--store", tmp_path / "s")
    assert left["namespaces"] == [third]


def test_a_purge_by_namespace_takes_no_secret(path, tmp_path):
    """It was read by nobody: whoever gave it, to say whose keys are meant, lost all tenants'."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    said = run("purge", "--store", path, "--namespace", "a test", "--tenant-secret-file", secret)
    assert_refused(said, "--tenant-secret-file goes with --tenant")
    assert len(records_of(path)) > 0


def test_a_purge_counts_what_another_process_may_be_reading(path):
    """Where such a process held the space to the end, "2 spans erased, 0 B" was all it said."""
    owned = sum(record.owned_bytes for record in records_of(path))
    config = CONFIG.model_copy(update={"follow_every_s": 0})
    with impress.PrefixStore.open(path, GEOMETRY, "a test", config, "r"):
        done, found = run_json("purge", "--store", path, "--namespace", "a test")
    assert done.returncode == 0, done.stderr
    assert (found["spans"], found["freed_bytes"]) == (2, owned)


def test_tenants_of_one_model_are_told_apart(tmp_path):
    """Both were shown by the model's name alone, in the tree and for a prompt."""
    with opened(tmp_path / "s") as store:
        put(store, PROMPT)
    ask = ("inspect", "--store", tmp_path / "s", "--tree", "--prefix", prompt_file(tmp_path))
    assert "tokens stored (100 %) under a test, in" in run(*ask).stdout
    with opened(tmp_path / "s") as store:
        rows = rows_of(len(PROMPT)), rows_of(len(PROMPT), 1)
        assert store.store(PROMPT, *rows, tenant="hers").wait(60)
    shown, (_, found) = run(*ask).stdout, run_json(*ask)
    for row in found["namespaces"]:
        called = f"a test {row['root'][:12]}"
        assert f"under {called}, in" in shown and shown.count(called) == 2
    assert {row["name"] for row in found["prefix"]["stored"]} == {"a test"}


def prompt_file(folder):
    (folder / "prompt.json").write_text(json.dumps(PROMPT))
    return folder / "prompt.json"


def test_inspect_asks_a_running_process_for_its_counters(path):
    config = CONFIG.model_copy(update={"metrics_port": 0})
    with impress.PrefixStore.open(path, GEOMETRY, "a test", config) as store:
        store.lease(PROMPT).release()
        store.lease([1] * 64).release()
        port = store.metrics_port
        _, found = run_json("inspect", "--store", path, "--metrics", port)
        shown = run("inspect", "--store", path, "--metrics", port).stdout
    assert found["live"]["hits"] == 1 and found["live"]["misses"] == {"not_stored": 1}
    assert found["tiers"]["dram"]["total"] > 0
    assert "hit tokens" in shown and "not_stored 1" in shown
    assert_refused(run("inspect", "--store", path, "--metrics", port), str(port))


def test_the_metrics_of_another_store_are_refused(path, tmp_path):
    """Two servers on a machine and the wrong port: one store was shown with the other's tiers."""
    other = tmp_path / "other"
    config = CONFIG.model_copy(update={"metrics_port": 0})
    with impress.PrefixStore.open(other, GEOMETRY, "a test", config) as store:
        put(store, PROMPT)
        port = store.metrics_port
        assert run("inspect", "--store", other, "--metrics", port).returncode == 0
        assert_refused(run("inspect", "--store", path, "--metrics", port), str(port), "another")


def test_a_server_that_does_not_say_which_store_it_serves_is_believed(path, monkeypatch):
    """Its version is from before servers said so."""
    monkeypatch.setattr(impress.stats._Collector, "identity", lambda self: iter(()))
    config = CONFIG.model_copy(update={"metrics_port": 0})
    with impress.PrefixStore.open(path, GEOMETRY, "a test", config) as store:
        done, found = run_json("inspect", "--store", path, "--metrics", store.metrics_port)
    assert done.returncode == 0 and found["live"]["hits"] == 0


def test_a_port_that_speaks_another_protocol_is_one_line_and_2(path):
    """The port of an SSH server, say, gave a traceback and status 1, that of a damaged store."""

    def greet():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-x\x1b[31m\r\n")
            while connection.recv(4096):  # until the client is gone
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet, daemon=True)  # no wait for it if nobody connects
        thread.start()
        port = server.getsockname()[1]
        done = run("inspect", "--store", path, "--metrics", port)
        thread.join()
    assert_refused(done, str(port), "no HTTP", "metrics_port")
    assert "\x1b" not in done.stderr


def test_another_programs_metrics_are_no_stores(monkeypatch):
    """Families with a store's names but without its prefix gave a KeyError's traceback."""
    text = 'store_info{version="1"} 1\ntier_used_bytes 3\ntier_used_bytes{tier="a"} NaN\n'
    monkeypatch.setattr(impress.cli.live, "_scrape", lambda port: text)
    with pytest.raises(impress.StoreFailed, match="whatever answers there is not an impress store"):
        impress.cli.live.live_counters(9400, b"")


def test_a_process_too_busy_to_answer_is_not_said_to_be_nobody(monkeypatch):
    """On a loaded machine `inspect --metrics` gave up on a running server after 5 s and said that
    nobody serves metrics there: its advice was wrong."""
    monkeypatch.setattr(impress.cli.live, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(impress.StoreFailed, match=rf"port {port}: no answer within 0.1 s"):
            impress.cli.live.live_counters(port, b"")


def test_inspect_shows_three_tiers_with_and_without_a_running_process(path):
    _, found = run_json("inspect", "--store", path)
    assert list(found["tiers"]) == ["hbm", "dram", "ssd"]
    assert found["tiers"]["hbm"] is None and found["tiers"]["dram"] is None
    assert found["tiers"]["ssd"]["chunks"] == 8 * GEOMETRY.n_layers
    settings = {"metrics_port": 0, "hbm_bytes": 1 << 18, "hbm_device": "cpu"}
    with impress.PrefixStore.open(
        path, GEOMETRY, "a test", CONFIG.model_copy(update=settings)
    ) as store:
        args = ("inspect", "--store", path, "--metrics", store.metrics_port)
        _, found = run_json(*args)
        assert found["tiers"]["hbm"]["total"] == store.stats()["tiers"]["hbm"]["total"] > 0
        assert found["tiers"]["hbm"]["emulated"] and not found["tiers"]["dram"]["emulated"]
        assert [tier["chunks"] for tier in found["tiers"].values()] == [0, 0, 16]
        assert "important_share" not in found["tiers"]["dram"]  # no request has reported yet
        store.history.request([Note(1, 320, 0, 0, 320, np.arange(0, 320, 4))])
        _, found = run_json(*args)
        assert 0 < found["tiers"]["ssd"]["important_share"] < 1
        shown = run(*args).stdout
    assert "hbm (emulated)" in shown


def test_inspect_shows_scores_and_shares_once_requests_have_told(path):
    _, found = run_json("inspect", "--store", path)
    assert found["tiers"]["ssd"]["important_share"] is None
    assert all(p["score"] is None and p["important_share"] is None for p in found["hottest"])
    with opened(path) as store:
        chosen = np.arange(0, 320, 4)
        store.history.request(Note(1, 320, layer, 0, 320, chosen) for layer in (0, 1))
    _, found = run_json("inspect", "--store", path)
    share = found["tiers"]["ssd"]["important_share"]
    assert share == pytest.approx(0.25, abs=1e-3)
    told = {p["tokens"]: p for p in found["hottest"]}[320]
    assert told["score"] == pytest.approx(0.25, abs=1e-2)  # used once, a quarter of its rows
    assert "25%" in run("inspect", "--store", path).stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_store_is_one_line_and_2(tmp_path, command):
    assert_refused(run(command, "--store", tmp_path / "none"), "no store here", "IMPRESS_STORE")
    assert_refused(run(command, "--store", ""), "--store", "empty")  # not the current directory
    (tmp_path / "file").write_text("x")
    assert_refused(run(command, "--store", tmp_path / "file"), "not a directory")


@pytest.mark.parametrize(
    "args",
    ["demo --dir", "demo --json", "repack --json", "purge --tenant-secret-file",
     "inspect --prefix", "explain --prefix", "explain --model"],
)  # fmt: skip
def test_an_option_of_a_path_is_not_of_nothing(args):
    """An empty path meant the current directory: demo filled it, and --json named "."."""
    option, kind = args.split()[1], "directory" if args.endswith(("dir", "model")) else "file"
    assert_refused(run(*args.split(), ""), f"'{option}': it is empty: name a {kind}; see impress")


def test_a_tilde_that_no_shell_has_expanded_is_the_home_directory(path, monkeypatch):
    """As in the output of vllm-config, so that both mean the same store."""
    monkeypatch.setenv("HOME", str(path.parent))
    told = f"~/{path.name}"
    assert run("verify", f"--store={told}").returncode == 0
    monkeypatch.setenv("IMPRESS_STORE", told)
    assert run("verify").returncode == 0
    assert_refused(run("verify", "--store=~no-such-user/s"), "~no-such-user/s", "in full")


@pytest.mark.parametrize("command", [("doctor", "--no-measure"), ("vllm-config",)], ids=str)
def test_a_directory_that_was_deleted_under_a_command_is_said(tmp_path, command):
    """The error was "No such file or directory", without a name."""
    deleted = ["bash", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "", str(SCRIPT)]
    done = ended([*deleted, *command, "--store", "s"], cwd=tmp_path)
    assert_refused(done, "s: the directory this runs in was deleted; go to another")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_newer_format_is_refused(path, command):
    identity = path / "impress.json"
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 99'))
    assert_refused(run(command, "--store", path), "99")


def test_the_default_store_comes_from_the_environment(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IMPRESS_STORE", str(path))
    assert run("verify").returncode == 0
    monkeypatch.setenv("IMPRESS_STORE", str(tmp_path / "none"))
    assert_refused(run("verify"), "none")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["verify", "--bogus"], "No such option: --bogus; see impress verify --help"),
        (["inspect", "--metrics", "x"], "--metrics"),
        (["bogus"], "No such command 'bogus'; see impress --help"),
        (["run"], "Missing option '--model'; see impress run --help"),
        (["inspect", "--store"], "'--store' requires an argument; see impress inspect --help"),
        (["vllm-config", "--policy"], "requires an argument; see impress vllm-config --help"),
        (["--store"], "No such option: --store; see impress --help"),
        (["verify", "extra"], "extra"),
    ],
)
def test_wrong_arguments_are_one_line_and_2(args, said):
    assert_refused(run(*args), said)


def test_what_ends_in_a_question_goes_on_with_a_sentence():
    """The line was: Did you mean 'inspect'?; see impress --help."""
    wrong = typer.BadParameter("Did you mean 'inspect'?")
    assert _said(wrong) == "Invalid value: Did you mean 'inspect'? See impress --help"


@pytest.mark.parametrize(
    ("command", "option"),
    [("purge", "tenant"), ("purge", "namespace"), ("run", "query"), ("explain", "query")],
)
def test_text_that_is_no_utf_8_is_one_line_and_2(path, tmp_path, command, option):
    """Hashing it raised UnicodeEncodeError, tokenising it TypeError: a traceback, and status 1."""
    more = [] if command == "purge" else ["--model", tmp_path, "--prefix", path / "impress.json"]
    done = run(command, "--store", path, *more, f"--{option}", os.fsdecode(b"\xff"))
    assert_refused(done, f"--{option}: not UTF-8 text")


def test_a_store_may_lie_where_no_utf_8_leads(tmp_path):
    """LMDB's binding encodes a str path by itself: a traceback, and status 1."""
    odd = two_prompts(tmp_path / os.fsdecode(b"\xff"))
    assert "could not" not in run("rebuild", "--store", odd).stdout  # the old index was asked
    assert run("verify", "--store", odd).returncode == 0
    assert run_json("purge", "--store", odd, "--namespace", "a test")[1]["spans"] == 2
    assert run_json("inspect", "--store", odd)[1]["spans"] == 0


def test_no_arguments_show_the_help():
    done = run()
    assert done.returncode == 2 and "explain" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_store_without_permission_is_one_line_and_2(place, command):
    """It was skipped for root, as which the tests run in a container."""
    path = two_prompts(place / "store")
    path.chmod(0)
    code = f"""if True:
        import os
        from impress.cli.entry import run
        if os.geteuid() == 0:  # as conftest.as_the_service, whose imports a command does without
            os.setgroups([])
            os.setgid({SERVICE})
            os.setuid({SERVICE})
        run()
    """
    done = forks.python(code, command, "--store", str(path), has=forks.LIGHT)
    assert_refused(done, f"{path}", "Permission denied")


@pytest.mark.parametrize("args", [["verify"], ["repack", "--dry-run"]], ids=str)
def test_too_few_addresses_for_the_index_are_one_line_that_names_their_limit(path, args):
    """The line was "Cannot allocate memory", on a machine that had plenty."""
    limited = ["bash", "-c", 'ulimit -v 33554432; exec "$@"', "", str(SCRIPT)]  # KiB: 32 GiB
    done = ended([*limited, *args, "--store", str(path)])
    assert_refused(done, "index: ", "it maps 64 GiB of addresses: raise `ulimit -v`")


@pytest.mark.parametrize("args", [["inspect"], ["inspect", "--json"], ["verify", "--json"]])
def test_a_full_disk_behind_stdout_is_one_line_and_2(path, args):
    with Path("/dev/full").open("w") as full:
        done = run(*args, "--store", path, stdout=full)
    assert_refused(done, "No space left")


def test_help_into_a_full_disk_is_one_line_and_2():
    with Path("/dev/full").open("w") as full:
        assert_refused(run("inspect", "--help", stdout=full), "No space left")


@pytest.mark.parametrize("args", [["verify", "--store", "none"], ["verify", "--none"]])
def test_a_full_disk_behind_stderr_makes_it_no_finding(args):
    """A line that could not be written gave status 1, as if verify had found something wrong."""
    done = ended(["sh", "-c", f"{SCRIPT} {' '.join(args)} 2>/dev/full"])
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("args", [["inspect"], ["--help"], ["verify", "--help"], ["--version"], []])
def test_a_reader_that_has_seen_enough_is_no_finding(path, args, monkeypatch):
    """Status 1 would say that something is wrong with the store."""
    monkeypatch.setenv("IMPRESS_STORE", str(path))
    seen, behind = os.pipe()
    os.close(seen)
    with os.fdopen(behind, "w") as pipe:
        done = run(*args, stdout=pipe)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_closed_stdout_is_no_matter(path):
    done = ended(["sh", "-c", f"{SCRIPT} inspect --store {path} >&-"])
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_of_a_store_takes_the_place_of_a_closed_output(path):
    """The index got the number of the closed stderr: anything a library writes to that number would
    have gone into it. And errors went to stdout, beside the JSON or in its place."""
    done = ended(["sh", "-c", f"{SCRIPT} inspect --json --store {path}/none 2>&-"])
    assert (done.returncode, done.stdout) == (2, "")
    (segment,) = Shard(path).segments.glob("*.seg")
    segment.unlink()
    os.mkfifo(segment)  # blocks the reads
    command = ["sh", "-c", f"exec {SCRIPT} verify --store {path} <&- >&- 2>&-"]
    with subprocess.Popen(command) as process:
        behind = os.open(segment, os.O_WRONLY)  # blocks until it is opened for reading
        fds = Path(f"/proc/{process.pid}/fd")
        held = [str((fds / number).readlink()) for number in "012"]
        process.kill()
    os.close(behind)
    assert held == ["/dev/null"] * 3


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("args", [["inspect", "--tree"], ["inspect", "--help"]])
def test_a_stdout_that_cannot_spell_a_dash_gets_the_rest(path, encoding, args):
    """At "·" or "–" there was a UnicodeEncodeError: a traceback, and status 1."""
    command = [str(SCRIPT), *args, *([] if "--help" in args else ["--store", str(path)])]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = ended(command, env=env, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("?" in done.stdout) and ("important" in done.stdout)


def on_a_terminal(columns, *args):
    """(status, output) on a terminal of so many columns."""
    terminal, behind = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    with subprocess.Popen([str(SCRIPT), *args], stdout=behind, env=environment) as process:
        os.close(behind)
        shown = drained(terminal).decode()
    os.close(terminal)
    return process.returncode, shown


def test_a_narrow_terminal_gets_every_cell(path):
    status, shown = on_a_terminal(30, "inspect", "--store", str(path))
    assert status == 0
    assert "…" not in shown and "Hottest prefixes" in shown and "a test" in shown
    assert "\x1b[3" not in shown  # no colour


@pytest.mark.parametrize("args", [["repack", "--dry-run"], ["verify"]], ids=str)
def test_a_narrow_terminal_gets_every_digit_of_a_span(tmp_path, args):
    """Ids in shards other than the first have 13 digits or more: they ended in "…"."""
    config = CONFIG.model_copy(update={"shard": 1})
    with impress.PrefixStore.open(tmp_path, GEOMETRY, "a test", config) as store:
        worth = np.ones((GEOMETRY.n_layers, len(PROMPT)), dtype=np.float32)
        store.store(PROMPT, rows_of(320), rows_of(320, 1), importance=worth).wait(60)
        (record,) = store.catalog.records()
    if args == ["verify"]:
        segment = Shard(tmp_path, 1).segments / f"{record.meta.segment:08d}.seg"
        with segment.open("r+b") as file:
            file.seek(record.meta.off)
            file.write(b"damaged")
    status, shown = on_a_terminal(30, *args, "--store", str(tmp_path))
    assert status == (1 if args == ["verify"] else 0), shown
    assert str(record.span_id) in shown and "…" not in shown


def test_ctrl_c_during_verify_is_one_line_and_2(path):
    """A segment that is a pipe holds the reads up for ever; a terminal shows that they began."""
    for segment in Shard(path).segments.glob("*.seg"):
        segment.unlink()
        os.mkfifo(segment)
    terminal, behind = pty.openpty()
    # A shell's background jobs ignore Ctrl-C, and so would processes that tests start in one.
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), "verify", "--store", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=behind, text=True) as process:
        os.close(behind)
        shown = os.read(terminal, 4096)  # the progress bar
        process.send_signal(signal.SIGINT)
        shown += drained(terminal)
        assert process.wait(60) == 2
        assert process.stdout.read() == ""
    os.close(terminal)
    text = shown.decode()
    assert "impress: interrupted" in text.splitlines()[-1] and "Traceback" not in text


def drained(terminal):
    """Everything a terminal gives until its last writer is gone, which Linux calls an I/O error."""
    shown = b""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            shown += part
    return shown


def test_run_refuses_in_one_line_what_is_not_there(tmp_path):
    text = tmp_path / "text"
    text.write_text("a long text")
    args = ["run", "--model", tmp_path, "--query", "what?", "--store", tmp_path / "store"]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for options, said in (
        (("--policy", "fast"), "exact, paper or quality"),
        (("--policy", "paper", "--keep", "1.5"), "(0, 1]"),
        (("--policy", "quality", "--max-missing-mass", "-1"), "max_missing_mass"),
        (("--keep", "0.5"), "--keep goes with --policy paper"),
    ):
        assert_refused(run(*args, "--prefix", text, *options), said)
    (tmp_path / "config.json").unlink()
    assert_refused(run(*args, "--prefix", text), "config.json")
    assert_refused(run(*args, "--prefix", tmp_path / "none"), "No such file")
    text.write_bytes(b"\xff\xfe\xff")
    assert_refused(run(*args, "--prefix", text), "UTF-8")
    assert run("run", "--model", tmp_path).returncode == 2
    assert not (tmp_path / "store").exists()


def test_run_without_torch_says_what_to_install(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "text").write_text("a long text")
    code = f"""if True:
        import sys
        sys.modules["torch"] = None
        from impress.cli.main import run
        sys.argv = ["impress", "run", "--model", {str(tmp_path)!r}, "--query", "what?",
                    "--prefix", {str(tmp_path / "text")!r}]
        run()
    """
    done = ended([sys.executable, "-c", code])
    assert_refused(done, "pip install '.[hf]' in impress's clone")


def test_the_demo_without_what_it_needs_says_what_to_install(tmp_path):
    """`pip install .` brings no packaging either: asking for versions was a traceback."""
    code = """if True:
        import sys
        sys.modules |= dict.fromkeys(("torch", "transformers", "packaging"))
        from impress.cli.main import run
        sys.argv = ["impress", "demo"]
        run()
    """
    done = ended([sys.executable, "-c", code], cwd=tmp_path)
    assert_refused(done, "needs torch", "pip install '.[hf]' in impress's clone")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_importing_the_engine_without_its_packages_says_what_to_install(missing):
    """The README begins with this import, and the error said only that there is no such module."""
    code = f"import sys; sys.modules[{missing!r}] = None; import impress.engines.hf"
    done = ended([sys.executable, "-c", code])
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: impress.engines.hf needs {missing}: "
        "pip install '.[hf]' in impress's clone"
    )


def test_a_text_is_the_same_prompt_from_a_file_and_from_stdin(tmp_path):
    """Line ends were changed as a file was read: KV that a program had stored for the same text was
    no hit, and explain named a token in which they differ."""
    file, raw = tmp_path / "prompt.txt", "one\r\ntwo\rthree\nß"
    file.write_bytes(raw.encode())
    assert text_of(file) == raw


def test_a_table_ends_where_nobody_reads_on(path, monkeypatch):
    """With a row per span and a million spans, gigabytes were laid out for a table, at the end."""
    monkeypatch.setattr("impress.terminal.MOST_LINES", 1)
    for namespace in ("one more", "another"):
        with impress.PrefixStore.open(path, GEOMETRY, namespace, CONFIG) as other:
            put(other, PROMPT)
    said = CliRunner().invoke(app, ["inspect", "--store", str(path), "--tree"]).stdout
    assert "… and 2 more roots: --json lists all" in said and "more nodes: --json" in said


def test_what_nobody_expected_is_no_finding(monkeypatch, capsys):
    """An unexpected error had status 1, verify's for a damaged store: an alert went off."""
    monkeypatch.setattr("impress.cli.main.app", lambda **_: 1 / 0)
    with pytest.raises(SystemExit) as end:
        main.run()
    assert end.value.code == 2 and "ZeroDivisionError" in capsys.readouterr().err


def test_memory_that_is_not_there_is_said_in_a_line():
    assert line_of(MemoryError()) == "not enough memory"
