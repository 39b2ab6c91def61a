"""The documents' examples run as they stand, with a small trained model and one of its texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

import impress
from impress.demo.checkpoints import install, unseen
from impress.demo.lookup.tokenizer import decode
from impress.engines.hf import attach

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("one_thread")


def run(page, number, named):
    """Run one of a page's examples, given the names that it uses and does not make."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(compile(blocks[number], page, "exec", dont_inherit=True), named)
    return named


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    install("specialised", tmp_path, n_documents=1)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "model").rename("path/to/model")
    Path("contract.txt").write_text(decode(unseen(1)[0].tokens))
    return tmp_path


def test_the_readmes_engine_reuses_the_document_and_leaves_the_disk_room(here, capsys):
    """The block that everybody copies had no `disk_bytes`: it would have filled the file system."""
    engine = run("README.md", 0, {})["engine"]
    assert engine.store.config.disk_bytes == 200 << 30
    first, second = re.findall(r"^(\d+) [\d.]+$", capsys.readouterr().out, re.MULTILINE)
    assert (int(first), int(second)) == (0, 1024)


def test_the_readmes_reader_finds_the_document_and_changes_nothing(here):
    """The README said `store_new=False` "only reads", but it made a store at a mistyped path."""
    named = run("README.md", 0, {})
    shards, index = Path("path/to/store/shards"), Path("path/to/store/shards/main/index/data.mdb")
    before = index.read_bytes()
    run("README.md", 1, named)
    assert named["reader"].last_request.hit_tokens == 1024
    assert [path.name for path in shards.iterdir()] == ["main"]
    assert index.read_bytes() == before
    with pytest.raises(impress.FormatError, match="no store here"):
        impress.PrefixStore.open("path/to/stroe", named["geometry"], named["namespace"], mode="r")
    assert not Path("path/to/stroe").exists()


def test_the_readmes_store_gives_back_what_was_stored(here):
    given, keys = [], [torch.randn(8, 200, 128).bfloat16() for _ in range(32)]

    def attend(layer, k, v):
        given.append((layer, torch.equal(k, keys[layer][:, :192]), torch.equal(v, k + k)))

    values = [k + k for k in keys]
    named = {"token_ids": range(200), "keys": keys, "values": values, "attend": attend}
    run("README.md", 2, named)
    assert named["store"].config.disk_bytes == 200 << 30
    assert given == [(layer, True, True) for layer in range(32)]


def test_the_policy_of_the_page_on_selection_is_served(here):
    """Its layers load as much as the page says."""
    policy = run("docs/SELECTION.md", 0, {"__name__": "example"})["Pyramid"]((0.5, 0.25, 0.1, 0.1))
    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    ids = torch.tensor([unseen(1)[0].tokens])
    with attach(model, "path/to/store", policy, config=impress.Config(guard="off")) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.generate(torch.cat([ids, ids[:, :8]], 1), max_new_tokens=1)
        said = engine.last_request
    assert [line["chosen"] for line in said.per_layer] == [512, 256, 103, 103], said.why
