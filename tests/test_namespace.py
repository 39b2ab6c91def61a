"""What a namespace sees and what it overlooks: same bits, same digest."""

from __future__ import annotations

import enum
import errno
import functools
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import threading
import types
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import impress
from impress import namespace
from impress.errors import BadInput, Unsupported
from impress.namespace import namespace_of

SIZES = {
    "vocab_size": 600,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "impress" / "weights"


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model"
    tiny().save_pretrained(path)
    return path


def edit_config(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# --- directories ----------------------------------------------------------------------------------


def test_a_directory_has_32_bytes_that_do_not_depend_on_where_it_is(saved, tmp_path):
    digest = namespace_of(saved)
    assert len(digest) == 32
    shutil.copytree(saved, tmp_path / "elsewhere")
    assert namespace_of(str(tmp_path / "elsewhere")) == digest
    assert impress.namespace_of(saved) == digest


def test_another_process_without_torch_finds_the_same(saved):
    code = (
        "import sys; from impress.namespace import namespace_of; "
        f"print(namespace_of({str(saved)!r}).hex(), 'torch' in sys.modules)"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "5", "XDG_CACHE_HOME": str(saved.parent / "another")},
    )
    assert seen.stdout.split() == [namespace_of(saved).hex(), "False"]


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "somebody/else"},
        {"transformers_version": "4.1.0"},
        {"use_cache": False},
        {"eos_token_id": 7},
        {"dtype": None, "torch_dtype": "float32"},
        {"dtype": "torch.float32"},
        {"dtype": None},
    ],
)
def test_volatile_keys_and_spellings_of_the_dtype_are_overlooked(saved, changes):
    before = namespace_of(saved)
    edit_config(saved, **changes)
    assert namespace_of(saved) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"num_attention_heads": 8},
    ],
)
def test_what_decides_the_keys_is_seen(saved, changes):
    before = namespace_of(saved)
    edit_config(saved, **changes)
    assert namespace_of(saved) != before


def test_null_is_not_what_is_absent(saved):
    """Nulls were left out: where the default is not null (YaRN's `truncate`) two models with other
    angles shared a name, and answered from each other's rows."""
    names = set()
    for more in ({}, {"truncate": None}):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}
        edit_config(saved, rope_parameters=yarn)
        names |= {namespace_of(saved), namespace_of(load(saved))}
    assert len(names) == 2


def test_any_tensor_s_change_is_seen(saved):
    before = namespace_of(saved)
    model = load(saved)
    with torch.no_grad():
        model.model.norm.weight[-1] += 1
    model.save_pretrained(saved)
    assert namespace_of(saved) != before


def one_token(model):
    """As a merged adapter that trains single tokens leaves them."""
    model.model.embed_tokens.weight[550] += 1


def rows_inside(model):
    """An attention head's worth of rows in the middle of a large matrix."""
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.nbytes > 2 << 20
    weight.view(-1)[1 << 18 : 1 << 19] += 1


def last_value(model):
    model.model.layers[0].mlp.up_proj.weight[-1, -1] += 1


def one_value(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.view(-1)[weight.numel() // 3] += 1


@pytest.mark.parametrize("change", [one_token, rows_inside, last_value, one_value])
def test_what_differs_far_from_a_tensor_s_head_is_another_model(tmp_path, change):
    """Only a page in every MiB was looked at: a model with an ablated head, or a few edited rows,
    kept its former name, and answered from the rows of the model it had been."""
    base, other = tmp_path / "base", tmp_path / "other"
    tiny(intermediate_size=10_000, vocab_size=20_000).save_pretrained(base)
    model = load(base)
    assert namespace_of(model) == namespace_of(base)
    with torch.no_grad():
        change(model)
    changed = namespace_of(model)
    model.save_pretrained(other)
    assert len({namespace_of(base), namespace_of(other), changed}) == 3
    assert namespace_of(load(other)) == namespace_of(other)
    nameless = [load(path) for path in (base, other)]
    for one in nameless:
        one.config._name_or_path = ""  # known by its tensors alone
    assert len({namespace_of(one) for one in nameless}) == 2


def test_a_sharded_directory_is_read_through_its_index(tmp_path):
    path = tmp_path / "model"
    tiny().save_pretrained(path, max_shard_size="100KB")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 1
    before = namespace_of(path)
    (path / "stray.safetensors").write_bytes(b"not named by the index")
    assert namespace_of(path) == before
    assert namespace_of(load(path)) == before
    shards[-1].unlink()
    with pytest.raises(BadInput, match=shards[-1].name):
        namespace_of(path)


@pytest.mark.parametrize("shards", ["bin", "safetensors"])
def test_a_single_file_beside_indexed_shards_is_seen(tmp_path, shards):
    """Transformers takes model.safetensors before an index of either kind: a model saved over
    downloaded shards kept their name, and got hits on what they had stored."""
    path = tmp_path / "model"
    tiny().save_pretrained(path, max_shard_size="100KB")
    if shards == "bin":
        index = path / "model.safetensors.index.json"
        index.rename(path / "pytorch_model.bin.index.json")
        named = index.with_name("pytorch_model.bin.index.json")
        named.write_text(named.read_text().replace(".safetensors", ".bin"))
        for shard in path.glob("*.safetensors"):
            shard.rename(shard.with_suffix(".bin"))
    digests = {namespace_of(path)}
    for seed in (1, 2):
        tiny(seed).save_pretrained(tmp_path / str(seed))
        shutil.copy(tmp_path / str(seed) / "model.safetensors", path)
        digests.add(namespace_of(path))
    assert len(digests) == 3


def test_a_single_torch_file_beside_indexed_ones_is_seen(tmp_path):
    """Both engines take it before, or over, the files that the index names."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "a.bin"}}')
    (tmp_path / "a.bin").write_bytes(b"a" * 1000)
    digests = {namespace_of(tmp_path)}
    for what in (b"b", b"c"):
        (tmp_path / "pytorch_model.bin").write_bytes(what * 1000)
        digests.add(namespace_of(tmp_path))
    assert len(digests) == 3


def test_a_setting_of_a_quantization_counts_whatever_it_is_called(tmp_path):
    """A model's own `dtype` is kept beside its config; a quantization's was left out with it."""
    safetensors.torch.save_file({"a": torch.arange(40.0)}, tmp_path / "model.safetensors")
    digests = set()
    for given in ({"dtype": "nvfp4"}, {"dtype": "mxfp4"}, {"dtype": "mxfp4", "scale": None}):
        config = {"model_type": "llama", "dtype": "float32", "quantization_config": given}
        (tmp_path / "config.json").write_text(json.dumps(config))
        digests.add(namespace_of(tmp_path))
    assert len(digests) == 3  # null is not the same as a missing key, whatever its default


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"model.safetensors": "a"}, "0352ec03c3eb38cd"),
        (
            {"a.safetensors": "a", "b.safetensors": "b", "model.safetensors.index.json": ""},
            "a2263fe7d55c514f",
        ),
        ({"model.safetensors": "a", "pytorch_model.bin": "b"}, "0352ec03c3eb38cd"),
        ({"a.bin": "a", "b.bin": "b", "pytorch_model.bin.index.json": ""}, "68b8995e8c1db1ef"),
        ({"pytorch_model.bin": "a", "tokenizer.bin": "b"}, "d611326926a91c48"),
        (
            {"a.safetensors": "a", "other.safetensors": "b", "training.bin": "a"},
            "a2263fe7d55c514f",
        ),
    ],
    ids=["one file", "shards", "both", "shards of torch.save", "torch.save", "no index"],
)
def test_a_directory_keeps_its_name(tmp_path, files, name):
    """Stores go by the name: another one for the same weights would lose all that they hold."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    for file, what in files.items():
        if file.endswith(".json"):
            shards = {one: one for one in files if one != file}
            (tmp_path / file).write_text(json.dumps({"weight_map": shards}))
        elif file.endswith(".safetensors"):
            rows = torch.arange(40.0) + ord(what)
            safetensors.torch.save_file({what: rows}, tmp_path / file)
        else:
            (tmp_path / file).write_bytes(what.encode() * 1000)
    assert namespace_of(tmp_path).hex()[:16] == name


def test_an_old_checkpoint_that_saved_its_angles_is_the_model_it_makes(saved):
    """Transformers ignores them and makes its own: the model in memory had another name, and
    `explain --model` found nothing that it had stored."""
    file = saved / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    assert namespace_of(load(saved)) == namespace_of(saved)


def test_an_adapter_in_the_same_folder_does_not_stand_for_the_models_weights(tmp_path):
    """Transformers loads pytorch_model.bin there, and nothing of it was in the name: a model that
    was trained further found the KV of the model it had been."""
    path = tmp_path / "model"
    tiny().config.save_pretrained(path)
    safetensors.torch.save_file({"a": torch.ones(4)}, path / "adapter_model.safetensors")
    names = set()
    for seed in (1, 2):
        torch.save(tiny(seed=seed).state_dict(), path / "pytorch_model.bin")
        names.add(namespace_of(path))
    assert len(names) == 2


def test_other_weight_formats_are_read_as_files(tmp_path):
    path = tmp_path / "model"
    model = tiny()
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    before = namespace_of(path)
    torch.save(tiny(seed=1).state_dict(), path / "pytorch_model.bin")
    assert namespace_of(path) != before


def test_one_value_deep_in_a_file_of_torch_save_is_seen_by_the_sums_at_its_end(tmp_path):
    model = tiny(vocab_size=4_000)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    before = namespace_of(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[2_000, 0] += 1
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert namespace_of(tmp_path) != before


def test_a_snapshot_s_revision_is_seen(saved, tmp_path):
    paths = [tmp_path / "snapshots" / (digit * 40) for digit in "ab"]
    for path in paths:
        shutil.copytree(saved, path)
    assert len({namespace_of(path) for path in [saved, *paths]}) == 3


def test_cross_engine_leaves_the_engine_out(saved):
    assert namespace_of(saved, cross_engine=True) != namespace_of(saved)
    assert namespace_of(load(saved), cross_engine=True) == namespace_of(saved, cross_engine=True)


def test_a_foreign_module_without_tensors_is_another_model_quantized_or_not(saved):
    """No class of a quantized model was looked at, as its settings tell those of its layers."""
    foreign = type("Mine", (torch.nn.Tanh,), {"__module__": "else.where"})
    layer = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    for settings in (None, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        model = load(saved)
        model.config.quantization_config = settings
        if settings is None:
            del model.config.quantization_config
        plain = namespace_of(model)
        model.model.layers[0].self_attn.q_proj.__class__ = layer
        assert (namespace_of(model) == plain) is (settings is not None)
        other = type(
            "QuantLinear", (torch.nn.Linear,), {"__module__": "auto_round_extension.torch"}
        )
        model.model.layers[0].self_attn.q_proj.__class__ = other
        assert (namespace_of(model) == plain) is (settings is not None)
        model.model.layers[0].self_attn.q_proj.__class__ = torch.nn.Linear
        assert namespace_of(model) == plain
        kept, model.model.layers[0].mlp.act_fn = model.model.layers[0].mlp.act_fn, foreign()
        assert namespace_of(model) != plain
        model.model.layers[0].mlp.act_fn = kept
        # A module with tensors, too: it was taken for a quantizer's, whoever's it was.
        model.model.norm.__class__ = type("Norm", (type(model.model.norm),), {"__module__": "mine"})
        assert namespace_of(model) != plain


class Keeps(torch.nn.Tanh):
    """Of another package, with whatever it is given in plain attributes."""

    def __init__(self, **kept):
        super().__init__()
        vars(self).update(kept)


class Slots:
    """Without a __dict__."""

    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n

    def told(self):
        return self.n


class Weighted(dict):
    """A container with an attribute."""

    def __init__(self, scale, items):
        super().__init__(items)
        self.scale = scale


def keeping(saved, **kept):
    model = load(saved)
    model.model.layers[0].mlp.act_fn = Keeps(**kept)
    return model


def unregistered(weight):
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, weight)
    torch.nn.init.zeros_(module.bias)
    return [module]


@pytest.mark.parametrize("make", [
    float, str, lambda n: {"scale": [n, {"at": (n,)}]}, lambda n: {f"tag {n}", "other"},
    lambda n: torch.full((3,), n), torch.zeros, lambda n: np.full(2, n),
    lambda n: torch.zeros(2, dtype=(torch.float32, torch.float16)[n - 1]),
    unregistered, lambda n: Path(str(n)), lambda n: functools.partial(max, n),
    lambda n: (lambda x: x + n), lambda n: SimpleNamespace(n=n, again=SimpleNamespace),
    lambda n: torch.device("cpu", n), lambda n: object() if n == 1 else threading.Lock(),
    lambda n: (lambda x, y=n: x + y), lambda n: (lambda x, *, y=n: x + y), lambda n: Slots(n).told,
    lambda n: types.MethodType(lambda _, y=n: y, Slots(0)), Slots,
    lambda n: deque([n, torch.ones(n)]), lambda n: np.array([None, n], dtype=object),
    np.random.default_rng, lambda n: re.compile(str(n)),
    lambda n: [Slots(0)] * 2 if n == 1 else [Slots(0), Slots(0)], lambda n: Weighted(n, {"a": 1}),
    lambda n: functools.cache(lambda x, y=n: x + y),
    lambda n: torch.nn.Parameter(torch.ones(2) * n),
])  # fmt: skip
def test_what_a_foreign_module_keeps_is_told_apart_and_made_anew_is_the_same(saved, make):
    one, same, other = (namespace_of(keeping(saved, kept=make(n))) for n in (1, 1, 2))
    assert one == same != other


def test_what_the_model_has_anyway_is_told_by_its_name(saved):
    """A wrapper that refers to the model it is in is no other model each time it runs."""
    model = keeping(saved)
    kept = model.model.layers[0].mlp.act_fn
    vars(kept).update(whole=model, own=[model.lm_head.weight], of=model.config, me=kept)
    vars(kept).update(weak=weakref.ref(model), call=model.lm_head.forward)
    namespace = namespace_of(model)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    assert namespace_of(model) == namespace
    vars(kept)["own"] = [model.model.norm.weight]
    assert namespace_of(model) != namespace


def test_a_large_vector_in_the_config_of_a_model_with_foreign_modules_is_told_in_full(saved):
    """Its text left out all but six numbers, and an object's had an address: another each time."""
    names = set[bytes]()
    for at in (1000, 1000, 2000):
        model = keeping(saved)
        model.config.steer = torch.nn.functional.one_hot(torch.tensor(at), 4096).float()
        model.config.control = Slots(3)
        names.add(namespace_of(model))
    assert len(names) == 2


@pytest.mark.parametrize(("kept", "what"), [
    (torch.empty(2, device="meta"), "a tensor of torch.float32 on meta"),
    (torch.eye(2).to_sparse(), "a tensor of torch.float32 on cpu"),
    ([*range(20_000)], "with others of its kind more than 10,000 values"),
    (torch.zeros(3 << 20), "with others of its kind more than 8,388,608 bytes"),
    (bytearray(b"x" * (9 << 20)), "with others of its kind more than 8,388,608 bytes"),
    (iter([1, 2]).__class__, ""), ((n for n in ()), "a builtins.generator"),
])  # fmt: skip
def test_a_foreign_module_that_keeps_more_than_a_key_can_tell_is_refused(saved, kept, what):
    model = keeping(saved, kept=kept)
    if not what:
        namespace_of(model)
        return
    with pytest.raises(Unsupported, match=rf"act_fn \(.*Keeps\) keeps {what} beside its tensors"):
        namespace_of(model)


def test_what_a_foreign_module_keeps_is_the_same_in_another_process(saved, tmp_path):
    """The address of a generator of numpy's was in the key: no later process found what was
    stored."""
    program = """
import sys, types, numpy, torch, transformers
from pathlib import Path
from impress.namespace import namespace_of
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
kind = type("Mine", (torch.nn.Tanh,), {"__module__": "else.where"})
model.model.layers[0].mlp.act_fn = mine = kind()
mine.kept = [numpy.random.default_rng(0), torch.nn.functional.silu, lambda x: x, object(), mine,
             types.SimpleNamespace(one=torch.ones(2)), print, numpy.sin, torch.relu, {"a", "b"},
             {Path("a"), Path("b"), Path("c")}, {torch.float16, torch.float32}]
print(namespace_of(model).hex())
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program, str(saved)], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout for seed in "12"
    }  # fmt: skip
    assert len(said) == 1


def test_a_users_own_class_of_a_model_is_itself_wherever_it_was_loaded_from(saved, tmp_path):
    kind = type("Mine", (transformers.LlamaForCausalLM,), {"__module__": "mine"})
    shutil.copytree(saved, tmp_path / "moved")
    one, other = (kind.from_pretrained(at).eval() for at in (saved, tmp_path / "moved"))
    other.generation_config.temperature = 0.3
    assert namespace_of(one) == namespace_of(other) != namespace_of(load(saved))
    for name in ("scale", "_scale", "hf_scale"):
        setattr(other, name, 2.0)
        assert namespace_of(one) != namespace_of(other)
        delattr(other, name)
    assert namespace_of(one) == namespace_of(other)


def test_a_model_may_lie_in_a_folder_of_any_name(saved, tmp_path):
    """A name that is not UTF-8 gave a traceback."""
    other = Path(os.fsdecode(bytes(tmp_path) + b"/mod\xffel"))
    shutil.copytree(saved, other)
    assert namespace_of(other) == namespace_of(saved)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "index"])
def test_thousands_of_brackets_are_no_model(saved, file):
    """RecursionError is not a ValueError: there was a traceback."""
    deep = b"[" * 100_000
    if file == "model.safetensors":
        (saved / file).write_bytes(struct.pack("<Q", len(deep)) + deep)
    else:
        name = "model.safetensors.index.json" if file == "index" else file
        (saved / name).write_bytes(deep)
    with pytest.raises(BadInput, match="namespace: "):
        namespace_of(saved)


@pytest.mark.parametrize("broken", ["missing", "config", "weights", "header", "short", "file"])
def test_what_is_no_model_directory_is_bad_input_naming_it(saved, broken):
    weights = saved / "model.safetensors"
    if broken == "missing":
        saved = saved / "nowhere"
    elif broken == "config":
        (saved / "config.json").write_text("{")
    elif broken == "weights":
        weights.unlink()
    elif broken == "header":
        weights.write_bytes(b"\xff" * 100)
    elif broken == "short":
        weights.write_bytes(weights.read_bytes()[:-10])
    else:
        saved = saved / "config.json"
    with pytest.raises(BadInput, match=saved.name):
        namespace_of(saved)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_weights_that_may_not_be_read_are_bad_input(tmp_path, monkeypatch, name):
    """It was the system's own error, of which README says that there is none."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    real = Path.open

    def refused(self, *args, **named):
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **named)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(BadInput, match=f"cannot read .*{name}: Permission denied"):
        namespace_of(tmp_path)


@pytest.mark.parametrize("what", [5, None, b"x", [], "\ud800", "a\0b"], ids=repr)
def test_what_is_neither_path_nor_model_is_bad_input(what):
    """It raised an AttributeError about whatever came in, or the system's ValueError."""
    with pytest.raises(
        BadInput, match=r"^namespace: (want a model's directory or|.* is no path: )"
    ):
        namespace_of(what)


def a_working_directory_that_is_gone(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


def a_directory_of_somebody_elses(monkeypatch, tmp_path):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)


def links_in_a_circle(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("org").symlink_to("org")


@pytest.mark.parametrize(
    "broken", [a_working_directory_that_is_gone, a_directory_of_somebody_elses, links_in_a_circle]
)
def test_a_model_whose_name_cannot_be_looked_up_as_a_path_is_known_by_its_tensors(
    tmp_path, monkeypatch, broken
):
    """A hub's name is looked up in the working directory: where that is gone, or may not be
    searched, attach ended in the system's own error; so did a directory's namespace."""
    model = tiny()
    want = namespace_of(model)
    model.config._name_or_path = "org/name"
    with monkeypatch.context() as scene:
        broken(scene, tmp_path)
        assert namespace_of(model) == want
        with pytest.raises(BadInput, match="org/name"):
            namespace_of("org/name")


@pytest.mark.parametrize("name", ["engine", "dtype"])
def test_names_that_are_no_text_are_bad_input(saved, name):
    with pytest.raises(BadInput, match=f"^namespace: {name} must be a str, got int"):
        namespace_of(saved, **{name: 5})


# --- the cached digest ----------------------------------------------------------------------------


def test_the_weights_digest_is_cached_privately_until_a_file_changes(saved, cache_dir):
    true = namespace_of(saved)
    (entry,) = cache_dir.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "digest": "00" * 32}))
    assert namespace_of(saved) != true  # taken from the cache
    os.utime(saved / "model.safetensors", ns=(1, 1))
    assert namespace_of(saved) == true


def test_files_of_an_image_are_read_anew(saved, cache_dir, monkeypatch):
    """In an image, times are what its maker set: a model in the place of one with the same sizes
    had the old one's digest."""
    stat_of, fields = Path.stat, ("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")

    def of_an_image(path, **named):
        found = stat_of(path, **named)
        told = {name: getattr(found, name) for name in fields}
        for name in ("st_mtime_ns", "st_ctime_ns"):
            told[name] -= told[name] % 10**9
        return SimpleNamespace(**told)

    monkeypatch.setattr(Path, "stat", of_an_image)
    true = namespace_of(saved)
    assert not cache_dir.exists() or not [*cache_dir.iterdir()]
    assert namespace_of(saved) == true


def test_a_digest_cached_under_other_rules_is_made_again(saved, cache_dir):
    true = namespace_of(saved)
    (entry,) = cache_dir.iterdir()
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({"files": known["files"][1:], "digest": "00" * 32}))
    assert namespace_of(saved) == true


@pytest.mark.parametrize("entry", ["", "[]", "{}", '{"files": 1}', "\x00"])
def test_a_broken_cache_entry_is_harmless(saved, cache_dir, entry):
    true = namespace_of(saved)
    next(cache_dir.iterdir()).write_text(entry)
    assert namespace_of(saved) == true


def test_a_cache_that_cannot_be_written_is_harmless(saved, tmp_path, monkeypatch):
    true = namespace_of(saved)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert namespace_of(saved) == true


@pytest.mark.parametrize("left_by", ["a full disk", "a kill"])
def test_a_digest_is_cached_though_the_last_time_it_could_not_be(
    saved, cache_dir, monkeypatch, left_by
):
    """In a container a process has the same number at each start: a file that one left half written
    was in the way of all that followed, and each of them read all of the weights."""
    cache_dir.mkdir(parents=True)

    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("impress.weights.json.dump", full if left_by == "a full disk" else killed)
        namespace_of(saved)
    assert len([*cache_dir.iterdir()]) == (left_by == "a kill")
    true = namespace_of(saved)
    (entry,) = cache_dir.iterdir()
    assert entry.suffix == ".json" and namespace_of(saved) == true


def test_a_user_without_a_home_has_no_cache_and_the_same_namespace(saved, monkeypatch):
    """A container's user unknown to the system got a RuntimeError, and no server on the model."""
    true = namespace_of(saved)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert namespace_of(saved) == true


# --- models in memory -----------------------------------------------------------------------------


def test_a_model_loaded_from_a_directory_has_the_directory_s(saved):
    assert namespace_of(load(saved)) == namespace_of(saved)
    assert namespace_of(load(saved, attn_implementation="eager")) == namespace_of(saved)


def test_another_dtype_than_the_directory_s_is_another_namespace(saved):
    digests = {namespace_of(load(saved, dtype=d)) for d in (torch.float16, torch.bfloat16)}
    assert len(digests | {namespace_of(saved)}) == 3
    edit_config(saved, dtype="bfloat16")
    assert namespace_of(saved) in digests


def test_tied_weights_match_although_they_are_saved_once(tmp_path):
    path = tmp_path / "model"
    tiny(tie_word_embeddings=True).save_pretrained(path)
    model = load(path)
    assert namespace_of(model) == namespace_of(path)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert namespace_of(model) != namespace_of(path)  # untied: one may change without the other


def test_a_change_in_memory_is_seen_by_value_name_config_or_dtype(saved):
    def fine_tune(model):
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0, 0] += 1e-3

    def extra_tensor(model):
        model.model.layers[0].mlp.register_parameter("lora_a", torch.nn.Parameter(torch.zeros(3)))

    def fewer_layers(model):
        del model.model.layers[1]

    def one_layer_in_bf16(model):
        model.model.layers[0].to(torch.bfloat16)

    def config(model):
        model.config.rms_norm_eps = 1e-3

    digests = {namespace_of(saved)}
    for change in (fine_tune, extra_tensor, fewer_layers, one_layer_in_bf16, config):
        model = load(saved)
        change(model)
        digests.add(namespace_of(model))
    assert len(digests) == 6


ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear"},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rounded_angles_are_another_model(tmp_path, rope):
    """from_pretrained(dtype=…) keeps RoPE's frequencies float32; .to(dtype) rounds them."""
    path = tmp_path / "model"
    tiny(dtype=torch.bfloat16, rope_parameters={**ROPE, **rope}).bfloat16().save_pretrained(path)
    plain = load(path, dtype=torch.bfloat16)
    assert namespace_of(plain) == namespace_of(path)
    rounded = load(path, dtype=torch.bfloat16).to(torch.bfloat16)
    assert namespace_of(rounded) != namespace_of(plain)
    again = load(path, dtype=torch.bfloat16).to(torch.bfloat16)
    assert namespace_of(again) == namespace_of(rounded)
    wide = load(path, dtype=torch.float32)
    widened = again.to(torch.float32)  # the same weights, and float32 angles that were rounded once
    assert torch.equal(wide.model.embed_tokens.weight, widened.model.embed_tokens.weight)
    assert namespace_of(widened) != namespace_of(wide)


@pytest.mark.parametrize("source", ["from_pretrained", "in memory"])
def test_angles_that_the_config_does_not_make_are_another_model(saved, source):
    def made():
        return load(saved) if source == "from_pretrained" else tiny()

    model = made()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert namespace_of(model) != namespace_of(made())


def test_a_model_without_files_is_known_by_its_tensors(saved):
    assert namespace_of(tiny()) == namespace_of(tiny())
    assert len({namespace_of(m) for m in (tiny(), tiny(seed=1), tiny().bfloat16())}) == 3
    assert namespace_of(tiny()) != namespace_of(saved)


def test_the_directory_may_be_gone_or_hold_another_model(saved):
    model = load(saved)
    true = namespace_of(model)
    tiny(seed=1).save_pretrained(saved)
    replaced = namespace_of(model)
    assert replaced not in (true, namespace_of(saved))
    shutil.rmtree(saved)
    assert namespace_of(model) == replaced


def test_a_directory_whose_config_has_become_wrong_does_not_name_the_model(saved):
    """Transformers' own class of error came out of `namespace_of`, and so out of attach."""
    model = load(saved)
    true = namespace_of(model)
    edit_config(saved, layer_types=["full_attention"])  # the model has two
    wrong = namespace_of(model)
    assert wrong != true
    shutil.rmtree(saved)
    assert namespace_of(model) == wrong


@pytest.mark.parametrize("left", ["others", "none"])
def test_files_replaced_while_they_are_read_do_not_name_the_model_of_before(
    saved, monkeypatch, left
):
    """A download came between comparing and naming: what the old weights then stored was hit by the
    new ones."""
    model, compare = load(saved), namespace._is_of

    def replaced_behind(*given):
        same = compare(*given)
        if left == "others":
            tiny(seed=1).save_pretrained(saved)
        else:
            shutil.rmtree(saved)
        return same

    monkeypatch.setattr(namespace, "_is_of", replaced_behind)
    found = namespace_of(model)
    monkeypatch.undo()
    assert found == namespace_of(model)  # by its tensors: the files are another model's
    if left == "others":
        assert found != namespace_of(saved)


def the_model(model):
    return torch.compile(model, backend="eager")


def a_block(model):
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    return model


def its_angles(model):
    model.model.rotary_emb = torch.compile(model.model.rotary_emb, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [the_model, a_block, its_angles])
@pytest.mark.parametrize("rounded", [False, True], ids=["plain", "rounded angles"])
def test_a_compiled_model_is_the_one_that_was_compiled(saved, compiled, rounded):
    """torch's wrapper is in its tensors' names: it found nothing that the plain model stored."""
    for make in (tiny, lambda: load(saved)):
        model = make()
        if rounded:
            model.model.rotary_emb.to(torch.bfloat16)
        before = namespace_of(model)
        assert namespace_of(compiled(model)) == before


class Kind(str, enum.Enum):  # noqa: UP042  # as PEFT's are
    FOURIERFT = "FOURIERFT"
    CAUSAL_LM = "CAUSAL_LM"


@dataclass
class AdapterConfig:
    """Like PEFT's one for FourierFT; `norms` stands for a field with settings of its own."""

    peft_type: str = Kind.FOURIERFT
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False
    auto_mapping: dict[str, str] | None = None
    runtime_config: object = field(default_factory=object)
    target_modules: object = field(default_factory=lambda: {"q_proj", "k_proj", "v_proj"})
    n_frequency: int = 1000
    scaling: float = 150.0
    random_loc_seed: int = 777
    n_frequency_pattern: dict[str, int] = field(default_factory=lambda: {"q_proj": 500, "up": 9})
    norms: object = None


@dataclass
class Norms:
    ifft2_norm: str = "backward"


def adapted(**changes):
    """A model with a layer of PEFT's; whatever the changes, every tensor is the same."""
    model = tiny()
    body = {"__module__": "peft.tuners.fourierft.layer"}
    kind = type("FourierFTLinear", (torch.nn.Linear,), body)
    model.model.layers[0].self_attn.q_proj.__class__ = kind
    model.peft_config = {"default": AdapterConfig(**{"norms": Norms(), **changes})}
    return model


@pytest.mark.parametrize(
    "change",
    [
        *({"scaling": 100.0}, {"random_loc_seed": 778}, {"norms": Norms("ortho")}),
        *({"n_frequency_pattern": {"q_proj": 501, "up": 9}}, {"target_modules": {"q_proj"}}),
    ],
)
def test_adapters_that_differ_in_their_settings_alone_are_two_models(change):
    """Where a FourierFT adapter's frequencies lie comes from a seed, which is in no tensor: two
    such adapters found each other's prefixes."""
    assert namespace_of(adapted(**change)) != namespace_of(adapted())


def test_an_adapter_keeps_its_name_wherever_and_however_it_is_loaded():
    same = {
        "peft_type": "FOURIERFT", "task_type": Kind.CAUSAL_LM, "base_model_name_or_path": "x",
        "revision": "main", "inference_mode": True, "auto_mapping": {"a": "b"},
        "target_modules": {"v_proj", "k_proj", "q_proj"},
        "n_frequency_pattern": {"up": 9, "q_proj": 500},
    }  # fmt: skip
    assert namespace_of(adapted(**same)) == namespace_of(adapted())


def test_settings_without_a_layer_of_the_adapter_name_nothing():
    """As unload() may leave them."""
    model = tiny()
    model.peft_config = {"default": AdapterConfig()}
    assert namespace_of(model) == namespace_of(tiny())


@pytest.mark.filterwarnings("ignore:.*deprecated")  # but there
def test_a_model_that_torch_quantised_is_refused_by_the_name_of_what_holds_it():
    model = torch.ao.quantization.quantize_dynamic(tiny(), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(Unsupported, match=r"_packed_params.* is quantised by torch"):
        namespace_of(model)


class Scaled(torch.Tensor):
    """Like torchao's quantised weights: a tensor with no values of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return Scaled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"no {func}")


def test_weights_that_hold_tensors_of_their_own_are_refused_in_one_line():
    """A traceback said that an operator was not implemented."""
    model = tiny()
    weight = model.model.layers[0].self_attn.k_proj.weight
    wrapped = torch.nn.Parameter(Scaled(weight.detach()), requires_grad=False)
    model.model.layers[0].self_attn.k_proj.weight = wrapped
    with pytest.raises(Unsupported, match=r"k_proj.weight is quantised by torch, or divided"):
        namespace_of(model)


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(Unsupported, match="meta"):
        namespace_of(model)
