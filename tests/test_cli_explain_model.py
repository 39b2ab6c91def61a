"""`impress explain` with a model: whose namespace is asked, and what a request chose."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import impress
from impress.cli.explain import explain
from impress.cli.main import app
from impress.cli.models import loading
from impress.cli.run import run
from impress.engines import hf
from impress.errors import BadInput, StoreFailed, StoreMismatch, Unsupported
from impress.namespace import namespace_of
from impress.terminal import line_of
from impress.write.index import Index

WORDS = [f"w{i}" for i in range(200)]
TEXT = " ".join(WORDS[i * 7 % 200] for i in range(200))  # 3 windows and 8 tokens
CONFIG = impress.Config(segment_bytes=1 << 20, dram_bytes=0, io_threads=2)
PROBED = CONFIG.model_copy(update={"probes": ("int4-v2",)})


def saved_model(folder, n_layers=2, seed=0, dtype=torch.float32):
    """A random Llama and a tokenizer with one token per word."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *WORDS])}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(
        folder
    )
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=n_layers, num_attention_heads=4,
        vocab_size=201, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a model, a text, and a store that has the text with quality's records."""
    folder = tmp_path_factory.mktemp("explain")
    saved_model(folder / "model")
    (folder / "text").write_text(TEXT)
    serve_once(folder / "model", folder / "store", PROBED)
    return folder


def serve_once(model, store, config=CONFIG):
    """Have the text answered by the model, loaded in float32, and stored."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([[WORDS.index(word) + 1 for word in TEXT.split()]])
    with hf.attach(loaded, store, config=config) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()


def told(here, *, store="store", text="text", model="model", **options):
    explain(
        prefix=here / text, model=here / model, store=here / store, json_file=here / "told.json",
        **options,
    )  # fmt: skip
    return json.loads((here / "told.json").read_text())


def test_a_text_is_looked_up_in_the_models_own_namespace(here, capsys):
    row = told(here)["found"][0]
    assert (row["yours"], row["windows"], row["stop"]["reason"]) == (True, 3, "end of prompt")
    assert list(row["held"][0]["probes"]) == ["int4-v2"]
    shown = capsys.readouterr().out
    assert "(this model's, loaded in float32)" in shown and "no tenant" not in shown


def test_another_model_of_the_same_shape_finds_its_own_namespace_empty(here, capsys):
    saved_model(here / "other", seed=1)
    found = told(here, model="other")["found"]
    assert [(row["yours"], row["windows"]) for row in found] == [(True, 0), (False, 3)]
    assert found[0]["stop"]["reason"] == "not stored"
    shown = capsys.readouterr().out
    assert "miss" in shown and "another namespace" in shown


@pytest.mark.parametrize("command", ["explain", "run"])
def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked_about_it(
    here, tmp_path, command
):
    """Transformers asked on the terminal, amid the JSON, for 15 s each time; a yes ran the code."""
    model = saved_model(tmp_path / "model")
    (model / "my.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "my.MyConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    args = [command, "--store", here / "store", "--model", model, "--prefix", here / "text"]
    args += ["--query", "w1", "--json"] + (["-"] if command == "explain" else [])
    done = CliRunner().invoke(app, [str(arg) for arg in args], input="y\n" * 9)
    assert done.exit_code == 2 and not (tmp_path / "ran").exists()
    assert done.stdout == "" and "of which impress runs none" in done.stderr


@pytest.mark.parametrize("kind", ["bin", "more tensors"])
def test_a_model_that_is_named_by_its_memory_is_not_said_to_be_stored_nowhere(tmp_path, kind):
    """It said "miss: nothing is stored under it", a minute after the engine had stored it."""
    folder = saved_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    else:  # one that Transformers ignores
        save_file(
            {**weights, "more": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"}
        )
    (tmp_path / "text").write_text(TEXT)
    serve_once(folder, tmp_path / "store", CONFIG)
    asked = ["explain", "--model", str(folder), "--prefix", str(tmp_path / "text")]
    done = CliRunner().invoke(app, [*asked, "--store", str(tmp_path / "store")])
    assert "--query TEXT loads it, and tells" in " ".join(done.output.split())
    assert done.exit_code == (2 if kind == "bin" else 0)
    done = CliRunner().invoke(app, [*asked, "--store", str(tmp_path / "store"), "--query", "w1"])
    assert "hit: 3 of 3 windows" in done.output


@pytest.mark.parametrize("how", ["vllm", "tenant", "secret"])
def test_a_miss_says_what_was_assumed_where_the_model_stored_it_under_other_keys(
    here, capsys, how, tmp_path
):
    """The report said "miss, under this model's" of text stored for another engine or tenant."""
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o600)
    keyed = {"tenant_secret_file": str(tmp_path / "secret")} if how == "secret" else {}
    geometry, _ = _of(here)
    name = namespace_of(here / "model", engine="vllm" if how == "vllm" else "transformers")
    ids = [WORDS.index(word) + 1 for word in TEXT.split()]
    rows = [np.zeros((geometry.n_kv_heads, len(ids), geometry.head_dim), np.float32)] * 2
    config = CONFIG.model_copy(update=keyed)
    with impress.PrefixStore.open(tmp_path / "store", geometry, name, config) as store:
        store.store(ids, rows, rows, tenant="someone" if how == "tenant" else "").wait(60)
    found = told(here, store=tmp_path / "store")
    assert found["assumed"] == {
        "weights": "as in its files",
        "engine": "transformers", "tenant": "", "tenant_secret": False, "dtype": "float32",
    }  # fmt: skip
    assert [(row["yours"], row["windows"]) for row in found["found"]] == [(True, 0), (False, 3)]
    shown = capsys.readouterr().out
    assert "as the Transformers engine stores it, for no tenant and without a tenant" in shown


@pytest.mark.parametrize("query", [None, "w1 w2"])
def test_a_model_is_looked_for_in_the_dtype_its_service_loaded_it_in(here, capsys, tmp_path, query):
    """Where its config names another, explain said "never a hit" of a store that was being hit."""
    saved_model(tmp_path / "model", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    serve_once(tmp_path / "model", tmp_path / "store")
    found = told(here, model=tmp_path / "model", store=tmp_path / "store", query=query)
    assert (found["mismatch"], found["assumed"]["dtype"]) == ("", "float32")
    assert (found["found"][0]["yours"], found["found"][0]["windows"]) == (True, 3)
    if query is not None:
        assert found["request"]["hit_tokens"] == 192
    shown = capsys.readouterr().out
    assert "loaded in float32" in shown and "never a hit" not in shown


def test_a_store_of_another_geometry_is_never_a_hit(here, capsys):
    saved_model(here / "deeper", n_layers=3)
    assert "3 layers" in told(here, model="deeper")["mismatch"]
    assert "never a hit" in capsys.readouterr().out
    with pytest.raises(StoreMismatch):
        told(here, model="deeper", query="w1 w2")


@pytest.mark.parametrize("query", [None, "w1"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            transformers.MambaConfig(hidden_size=16, num_hidden_layers=1),
            "model type 'mamba' is not supported",
        ),
        (
            transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2),
            "model type 'gpt2' is not supported",
        ),
        (
            transformers.LlamaConfig(
                hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "RoPE type 'dynamic'",
        ),
    ],
)  # fmt: skip
def test_a_model_that_is_not_served_is_refused_by_name(here, tmp_path, config, said, query):
    """A model whose config has no number of heads was a traceback, any other a plain miss."""
    saved_model(tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=said):
        told(here, model=tmp_path, query=query)


@pytest.mark.parametrize("policy", ["exact", "paper", "quality"])
def test_a_query_shows_each_layer_and_its_totals(here, capsys, policy):
    with impress.PrefixStore.open(here / "store", *_of(here), CONFIG):  # in use: a writer has it
        found = told(here, query="w1 w2 w3", policy=policy)
    request, row = found["request"], found["found"][0]
    assert found["tokens"] == 203 and request["hit_tokens"] == 192
    assert request["mode"] == ("exact" if policy == "exact" else "sparse")
    assert [line["layer"] for line in request["per_layer"]] == [0, 1]
    assert all(sum(line["bytes"].values()) for line in request["per_layer"])
    if policy == "exact":
        assert request["bytes_by_tier"] == {"ssd": row["cost"]["bytes"]}
    shown = capsys.readouterr().out
    assert f"under {policy}" in shown and "TTFT" in shown and "ssd 192" in shown
    assert ("stored without heads3-v1 records" in shown) == (policy == "paper")


def test_token_ids_and_a_query_go_together(here):
    (here / "ids.json").write_text(json.dumps([WORDS.index(word) + 1 for word in TEXT.split()]))
    assert told(here, text="ids.json", query="w1")["request"]["hit_tokens"] == 192


@pytest.mark.parametrize("query", [None, "w1"])
def test_integers_apart_by_white_space_are_token_ids_with_a_model_too(here, capsys, query):
    """As the help says; their digits were tokenised as text, so a stored prompt was a miss."""
    ids = [WORDS.index(word) + 1 for word in TEXT.split()]
    (here / "ids.txt").write_text("\n".join(map(str, ids)) + "\n")
    found = told(here, text="ids.txt", query=query)
    assert (found["read_as"], found["found"][0]["windows"]) == ("token ids", 3)
    assert "read as token ids" in capsys.readouterr().out
    (here / "almost.txt").write_text(f"{ids[0]} w1")
    assert told(here, text="almost.txt", query=query)["read_as"] == "text"
    assert "read as text" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["token ids", "text"])
def test_a_prompt_may_come_from_a_pipe(here, kind):
    """Token ids were read twice: from --prefix /dev/stdin they were then said to be empty, and on a
    named pipe explain waited for somebody to write to it again."""
    seen, behind = os.pipe()
    with os.fdopen(behind, "w") as pipe:
        ids = " ".join(str(WORDS.index(word) + 1) for word in TEXT.split())
        pipe.write(ids if kind == "token ids" else TEXT)
    found = told(here, text=f"/dev/fd/{seen}")
    os.close(seen)
    assert (found["read_as"], found["found"][0]["windows"]) == (kind, 3)


def test_brackets_nested_deeper_than_json_is_read_are_a_text(here, capsys):
    """They ended in a RecursionError: a traceback, and status 1."""
    (here / "deep").write_text("[" * 100_000)
    assert told(here, text="deep")["read_as"] == "text"


def test_a_request_that_misses_says_so(here, capsys):
    (here / "new").write_text(" ".join(reversed(WORDS)))
    request = told(here, text="new", query="w1")["request"]
    assert (request["mode"], request["per_layer"]) == ("recompute", [])
    assert "nothing of the prompt is stored" in capsys.readouterr().out


def test_a_prompt_longer_than_the_model_takes_is_refused(here, tmp_path):
    """The error named --max-new-tokens where no value of it helps, and in explain, without one."""
    (here / "long").write_text(TEXT * 4)
    with pytest.raises(BadInput, match=r"more than the model's 512; shorten the text$"):
        told(here, text="long", query="w1")
    with pytest.raises(BadInput, match=r"more than the model's 512; shorten the text$"):
        run(here / "model", here / "long", "w1", tmp_path / "store")
    with pytest.raises(BadInput, match=r"shorten the text or lower --max-new-tokens$"):
        run(here / "model", here / "text", "w1", tmp_path / "store", max_new_tokens=400)


def test_run_answers_on_a_full_disk_as_its_help_says(here, tmp_path, monkeypatch, capsys):
    """The help had status 2 for it; the answer is right, and why nothing was stored is printed."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run(here / "model", here / "text", "w1", tmp_path / "store", max_new_tokens=1)
    told = capsys.readouterr().out
    assert "0 tokens newly stored" in told and "refused: " in told and "No space left" in told
    answered, could_not = run.__doc__.split("**Exit status**")[1].split("·")
    assert "full disk" in answered and "room" not in could_not


@pytest.mark.parametrize("policy", ["exact", "quality"])
def test_run_answers_from_a_store_that_takes_no_writes(here, small_disk, policy):
    """On a read-only file system it had an error in place of the answer, and status 2."""
    serve_once(here / "model", small_disk / "store", PROBED)
    asked = ["run", "--model", here / "model", "--prefix", here / "text", "--query", "w1"]
    asked += ["--store", small_disk / "store", "--max-new-tokens", 1, "--policy", policy]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = CliRunner().invoke(app, [*map(str, asked), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["mode"], found["hit_tokens"]) == ({"quality": "sparse"}.get(policy, policy), 192)
    assert found["stored_tokens"] == 0 and "Read-only file system" in found["refused"]
    missing = [str(arg) for arg in asked[:-6]] + ["--store", str(small_disk / "none")]
    assert CliRunner().invoke(app, missing).exit_code == 2


@pytest.mark.parametrize("what", ["rows", "index"])
def test_run_answers_where_storing_fails_as_its_help_says(
    here, tmp_path, monkeypatch, capsys, what
):
    """Where rows were not numbers, or the disk refused a commit, there was an error in place of the
    answer, and status 2."""
    commit = Index.commit

    def full(index, put, *args, **named):
        if put:
            raise StoreFailed("index: No space left on device")
        return commit(index, put, *args, **named)

    if what == "rows":
        monkeypatch.setattr("impress.write.draft.all_finite", lambda *_: False)
    else:
        monkeypatch.setattr(Index, "commit", full)
    said = {"rows": "NaN or infinite rows", "index": "No space left on device"}[what]
    asked = (here / "model", here / "text", "w1", tmp_path / "store")
    run(*asked, max_new_tokens=1)
    told = capsys.readouterr().out
    assert "recompute" in told and "0 tokens newly stored" in told
    assert said in told.partition("\nrefused: ")[2]
    run(*asked, max_new_tokens=1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["new_tokens"] == 1 and found["stored_tokens"] == 0 and said in found["refused"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "empty"])
def test_weights_whose_download_was_cut_off_are_refused(here, tmp_path, kind):
    """SafetensorError and torch's errors are not OSErrors: they were tracebacks, with status 1."""
    saved_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    if kind != "safetensors":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        weights.unlink()
        weights = tmp_path / "pytorch_model.bin"
        torch.save(model.state_dict(), weights)
    os.truncate(weights, 0 if kind == "empty" else weights.stat().st_size // 2)
    with pytest.raises(BadInput, match="fetch it again"):
        run(tmp_path, here / "text", "w1", tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=str)
def test_a_model_for_which_there_is_no_memory_or_thread_need_not_be_fetched_again(error):
    """Users were told to, for 16 GB, where a container had too little of either."""
    with pytest.raises(type(error)) as raised, loading("model", "weights do"):
        raise error
    assert raised.value is error and "download" not in line_of(error)


def test_a_tokenizer_whose_download_was_cut_off_is_refused(here, tmp_path):
    """The Rust tokenizers raise a bare Exception, which was a traceback, and status 1."""
    saved_model(tmp_path)
    tokenizer, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    os.truncate(tokenizer, tokenizer.stat().st_size // 2)
    # Checkpoints not saved just now have this key; without it Transformers reads the JSON.
    told_by_it = {**json.loads(settings.read_text()), "added_tokens_decoder": {}}
    settings.write_text(json.dumps(told_by_it))
    with pytest.raises(BadInput, match=r"its tokenizer does not load; .* fetch it again"):
        run(tmp_path, here / "text", "w1", tmp_path / "store")
    with pytest.raises(BadInput, match=r"its tokenizer does not load; .* fetch it again"):
        told(here, model=tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", ""), ("tokenizer.json", "{}"), ("tokenizer_config.json", "{")],
)
def test_a_tokenizers_file_that_is_damaged_is_named(here, tmp_path, name, text):
    """The error read "Expecting value: line 1 column 1", or 'added_tokens', and named no file."""
    saved_model(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=rf"its tokenizer does not load; .* \({name}: "):
        told(here, model=tmp_path)


@pytest.mark.parametrize("query", [[], ["--query", "w1"]], ids=["no query", "query"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"layer_types": ["full_attention"]}, "num_hidden_layers"), ({"hidden_size": "x"}, "'x'")],
)
def test_a_config_that_transformers_finds_wrong_is_one_line_and_2(
    here, tmp_path, wrong, said, query
):
    """Transformers' own error class, for a field or two at odds, was a traceback, and status 1."""
    saved_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    args = ("--store", here / "store", "--prefix", here / "text", "--model", tmp_path, *query)
    done = CliRunner().invoke(app, ["explain", *map(str, args)])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done.output
    assert f"--model {tmp_path}: its config does not load" in done.stderr
    assert said in done.stderr


def test_a_checkpoint_whose_quantiser_is_not_installed_is_refused(here, tmp_path):
    """The ImportError that Transformers raises was a traceback, and status 1."""
    saved_model(tmp_path)
    file = tmp_path / "config.json"
    quantised = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "vptq"}}
    file.write_text(json.dumps(quantised))
    with pytest.raises(Unsupported, match="pip install"):
        run(tmp_path, here / "text", "w1", tmp_path / "store")
    with pytest.raises(Unsupported, match="pip install"):
        told(here, model=tmp_path, query="w1")
    assert not (tmp_path / "store").exists()


def test_a_pad_token_in_a_text_is_meant(here, tmp_path):
    """Texts are not padded, but one that holds the pad token was refused as if it were."""
    saved_model(tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token_id": 8}))
    run(tmp_path, here / "text", "w1", tmp_path / "store", max_new_tokens=1)
    assert told(here, model=tmp_path, query="w1", store=tmp_path / "store")["request"]["hit_tokens"]


def _of(here):
    with (here / "store" / "impress.json").open() as file:
        return impress.Geometry(**json.load(file)["geometry"]), "someone else"
