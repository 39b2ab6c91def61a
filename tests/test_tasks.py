"""Published tasks: rows become lm-eval's prompts, and what is malformed is named; no download."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import other_weights
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from experiments import accuracy, accuracy_measure
from experiments.accuracy_real import documents_of, query_of, shared_tokens
from experiments.harness import main
from experiments.tasks import FORMATS, Drawn, Rows, draw, load
from experiments.tasks.formats import Item
from impress.errors import BadInput
from impress.policy import Exact

DATA = Path(__file__).parent / "data"
TASKS = ("rte", "copa", "piqa", "openbookqa")


def test_rte_is_asked_as_lm_eval_asks_it() -> None:
    item = load("rte", str(DATA / "rte")).asked[1]
    assert item.context == (
        "Ten climbers reached the top before the storm.\n"
        "Question: Some climbers reached the top. True or False?\nAnswer:"
    )
    assert item.choices == (" True", " False") and item.gold == 0


def test_copa_drops_the_full_stop_and_connects() -> None:
    """A choice continues the sentence, as in lm-eval's convert_choice. It kept its capital, so that
    "because The sun was rising." was scored and shown in shots."""
    rows = load("copa", str(DATA / "copa"))
    assert rows.train[0].context == "My body cast a shadow over the grass because"
    assert rows.train[0].choices == (" the sun was rising.", " the grass was cut.")
    assert rows.asked[0].context == "The man turned on the faucet therefore"
    assert rows.asked[0].gold == 1


def test_piqa_and_openbookqa_read_both_forms(tmp_path: Path) -> None:
    item = load("piqa", str(DATA / "piqa" / "val.jsonl")).asked[0]
    assert item.context == "Question: dresser\nAnswer:"
    assert item.choices[0] == " replace drawer with bobby pin" and item.gold == 1
    published = FORMATS["piqa"].parse(
        {"goal": "dresser", "sol1": "replace drawer with bobby pin",
         "sol2": "finish, woodgrain with  bobby pin", "label": 1}, "row",
    )  # fmt: skip
    assert published == item
    book = load("openbookqa", str(DATA / "openbookqa")).asked[1]
    assert book.context == "Predators eat" and book.choices[2] == " bunnies" and book.gold == 2
    published = FORMATS["openbookqa"].parse(
        {"question_stem": "Predators eat", "answerKey": "C ",
         "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": list("ABCD")}},
        "row",
    )  # fmt: skip
    assert published == book


MALFORMED = [
    ("rte", {"premise": "a", "hypothesis": "b", "label": "maybe"}, "'label'"),
    ("rte", {"hypothesis": "b", "label": 0}, "'premise'"),
    ("rte", {"premise": " ", "hypothesis": "b", "label": 0}, "'premise'"),
    ("copa", {"premise": "a", "question": "why"}, "'question'"),
    ("copa", {"premise": "a", "question": "cause", "choice1": "b", "choice2": 3}, "'choice2'"),
    ("piqa", {"query": "q", "choices": ["a", "b"], "gold": 2}, "'gold'"),
    ("piqa", {"query": "q", "choices": ["a"], "gold": 0}, "'choices'"),
    ("piqa", {"goal": "q", "sol1": "a", "sol2": "b", "label": True}, "'label'"),
    ("piqa", {"query": "half a letter: \ud800", "choices": ["a", "b"], "gold": 0}, "'query'"),
    ("piqa", {"query": "q", "choices": ["a", "\udfff"], "gold": 0}, "'choices'"),
    ("openbookqa", {"query": "q", "choices": "ab", "gold": 0}, "'choices'"),
    ("openbookqa", {"question_stem": "q", "choices": ["a", "b"], "answerKey": "A"}, "'choices'"),
    (
        "openbookqa",
        {"question_stem": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]},
         "answerKey": "C"},
        "'answerKey'",
    ),
    (  # "'answerKey' must be one of ['A', 'B'], got 'A'", it said
        "openbookqa",
        {"question_stem": "q", "choices": {"text": ["a", "b", "c"], "label": ["A", "B"]},
         "answerKey": "A"},
        "'choices'.*3 'text' and 2 'label'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("task", "row", "named"), MALFORMED)
def test_a_malformed_row_is_named_by_file_line_and_field(
    tmp_path: Path, task: str, row: dict[str, Any], named: str
) -> None:
    good = (DATA / task / "val.jsonl").read_text().splitlines()[0]
    file = tmp_path / "val.jsonl"
    file.write_text(f"{good}\n\n{json.dumps(row)}\n")
    with pytest.raises(BadInput, match=named) as caught:
        load(task, str(tmp_path))
    assert f"{file} line 3: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{not json\n", "line 1: not JSON"),
        (b"[1]\n", "got list"),
        (b"\n", "no rows"),  # the error said that "-1" shots could be had
        (b"\n\xff\n", "line 2: not UTF-8 at its byte 0"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_rows_is_named(tmp_path: Path, text: bytes, says: str) -> None:
    file = tmp_path / "val.jsonl"
    file.write_bytes(text)
    with pytest.raises(BadInput, match=says) as caught:
        load("rte", str(file))
    assert str(file) in str(caught.value)


def test_what_is_not_there_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"none in any of val\.jsonl, validation\.jsonl, dev\.jsonl"):
        load("rte", str(tmp_path))
    with pytest.raises(BadInput, match="no such file"):
        load("rte", "/nowhere/rte.jsonl")
    with pytest.raises(BadInput, match="task must be one of rte"):
        load("boolq", str(tmp_path))
    monkeypatch.setattr("experiments.tasks.rows.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install datasets"):
        load("rte", "super_glue")


def test_a_data_set_of_the_hub_is_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def load_dataset(*name: str) -> dict[str, list[dict[str, Any]]]:
        asked.append(name)
        row = {"premise": "a", "hypothesis": "b", "label": 1}
        return {"train": [row, row], "validation": [row, {**row, "label": -1}]}

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("experiments.tasks.rows.find_spec", lambda name: fake)
    with pytest.raises(BadInput, match="super_glue validation row 1: field 'label'"):
        load("rte", "super_glue")
    assert asked == [("super_glue", "rte")]


def test_of_openbookqa_the_split_is_asked_that_the_harness_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its test split has answers, and lm-eval asks that; for the other three tasks, validation."""
    row = {"answerKey": "A", "choices": {"text": ["a", "b"], "label": ["A", "B"]}}
    data = {split: [{**row, "question_stem": split}] for split in ("train", "validation", "test")}
    fake = types.SimpleNamespace(load_dataset=lambda *_name: data)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("experiments.tasks.rows.find_spec", lambda name: fake)
    for split, rows in data.items():
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(rows[0]))
    for found in (load("openbookqa", "openbookqa"), load("openbookqa", str(tmp_path))):
        assert (found.split, found.asked[0].context, found.train[0].context) == (
            "test", "test", "train",
        )  # fmt: skip
    (tmp_path / "test.jsonl").unlink()
    assert load("openbookqa", str(tmp_path)).asked[0].context == "validation"
    good = (DATA / "rte" / "val.jsonl").read_text()
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(good if split == "validation" else "{}")
    (tmp_path / "train.jsonl").unlink()
    assert load("rte", str(tmp_path)).split == "validation"


class DatasetsError(Exception):
    """An error of `datasets` itself, for rows that are not JSON, say."""


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ConnectionError, DatasetsError])
def test_a_data_set_that_does_not_load_is_named_in_a_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """One that is a script, or has other configurations, was a traceback."""

    def load_dataset(*name: str) -> None:
        raise kind("Dataset scripts are no longer supported, but found piqa.py\nmore of it")

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("experiments.tasks.rows.find_spec", lambda name: fake)
    with pytest.raises(BadInput, match=r"^piqa: Dataset scripts .*piqa.py; or give a folder"):
        load("piqa", "piqa")


def test_datasets_without_what_it_needs_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is found, and cannot be imported: without pyarrow that was a traceback."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("experiments.tasks.rows.find_spec", lambda name: name)
    with pytest.raises(BadInput, match=r"^piqa: no such path, and datasets cannot be imported"):
        load("piqa", "piqa")


# ---- the shared prefix -------------------------------------------------------------------------


def test_shots_come_from_train_and_are_the_same_for_all() -> None:
    rows = load("copa", str(DATA / "copa"))
    drawn = draw(rows, 2, seed=3)
    assert drawn == draw(rows, 2, seed=3)
    assert drawn.shots_from == "train" and drawn.items == rows.asked
    texts = [f"{item.context}{item.choices[item.gold]}\n\n" for item in rows.train]
    assert drawn.prefix in {a + b for a in texts for b in texts}


def test_without_a_train_split_shots_are_not_asked() -> None:
    rows = load("piqa", str(DATA / "piqa"))
    drawn = draw(rows, 2, seed=0)
    assert drawn.shots_from == "validation" and len(drawn.items) == 3
    assert not any(item.context in drawn.prefix for item in drawn.items)
    assert len(draw(rows, 2, 0, n_items=1).items) == 1
    with pytest.raises(BadInput, match="has 4 to give"):
        draw(rows, 5, seed=0)
    with pytest.raises(BadInput, match="at least 1"):
        draw(Rows("rte", (), rows.asked), 0, seed=0)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_what_is_about_the_same_thing_as_a_shot_is_not_asked(split: str) -> None:
    """The shot shows the answer: for PIQA with default shots, two were asked that way."""
    items = tuple(
        Item(f"goal {i // 2}, way {i % 2}", ("a", "b"), 0, f"goal {i // 2}") for i in range(12)
    )
    rows = Rows("piqa", items[1:2], items) if split == "train" else Rows("piqa", (), items)
    drawn = draw(rows, 1, seed=3)
    about = drawn.prefix.split(",")[0]
    assert len(drawn.items) == 10 and about not in {item.about for item in drawn.items}
    with pytest.raises(BadInput, match="about something else"):
        draw(Rows("piqa", (), items[:2]), 1, seed=0)


# ---- a model, tiny and random ------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OPT and a byte-level tokenizer trained on the fixtures."""
    folder = tmp_path_factory.mktemp("tiny-opt")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    raw.train([str(file) for file in sorted(DATA.glob("*/*.jsonl"))], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=600, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=64, max_position_embeddings=700, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).half().save_pretrained(folder)
    return folder


pytestmark = pytest.mark.usefixtures("one_thread")


def reference_likelihoods(model: Any, prompt: tuple[int, ...], choices: Any) -> list[float]:
    """lm-eval's own way: prompt and choice in one forward, the choice's tokens summed."""
    scores = []
    for choice in choices:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *choice]])).logits[0].float().log_softmax(-1)
        at = range(len(prompt) - 1, len(prompt) + len(choice) - 1)
        scores.append(sum(float(logits[i, token]) for i, token in zip(at, choice, strict=True)))
    return scores


@pytest.mark.parametrize("task", TASKS)
def test_a_real_run_scores_as_one_forward_of_prompt_and_choice_does(
    tmp_path: Path, model_dir: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[float]] = []
    judge = accuracy_measure._judged

    def listening(scores: list[float], query: Any) -> Any:
        said.append(list(scores))
        return judge(scores, query)

    monkeypatch.setattr(accuracy_measure, "_judged", listening)
    report = tmp_path / "out.json"
    shots, seed = (4 if task == "openbookqa" else 2), 5
    args = ["--model", str(model_dir), "--task", task, "--data", str(DATA / task), "--kept", "25",
            "--shots", str(shots), "--items", "2", "--seed", str(seed), "--dir", str(tmp_path),
            "--json", str(report)]  # fmt: skip
    assert main(accuracy.EXPERIMENT, args) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto").eval()
    drawn = draw(load(task, str(DATA / task)), shots, seed, 2)
    queries = [query_of(tokenizer, drawn, item, task) for item in drawn.items]
    n_arms = len(said) // len(queries)
    for i, query in enumerate(queries):
        want = reference_likelihoods(model, query.prompt, query.choices)
        assert said[i * n_arms] == pytest.approx(want, abs=0.05)  # exact goes first; float16
    figures = json.loads(report.read_text())["figures"]
    where = f"{model_dir.name}.{task}"
    assert figures[f"{where}.exact.kl"] == 0 and figures[f"{where}.exact.agreement64"] == 1
    assert figures[f"{where}.25.random.rows_share"] == pytest.approx(0.25, abs=0.01)
    assert figures[f"{where}.int4.bytes_share"] == pytest.approx(0.3125)  # 16 dimensions per scale
    assert (f"{where}.exact.accuracy_norm" in figures) is (task in ("piqa", "openbookqa"))
    encoded = tokenizer(drawn.prefix)["input_ids"]
    assert len(shared_tokens(queries, encoded)) >= 64
    alone = shared_tokens(queries[:1], encoded)  # all prompts of one question are alike to its end
    assert 64 <= len(alone) <= len(encoded)


def test_white_space_that_ends_a_prompt_is_scored_with_the_choice(model_dir: Path) -> None:
    """lm-eval moves it there: stems of OpenBookQA end in a space, and were cut after it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    item = Item("Predators eat \n", (" lions", " bunnies"), 1, "it")
    query = query_of(tokenizer, Drawn("", (item,), "train"), item, "openbookqa")
    prompt = tokenizer("Predators eat")["input_ids"]
    wanted = [tokenizer(f"Predators eat \n{choice}")["input_ids"] for choice in item.choices]
    assert [*query.prompt] == prompt
    assert [[*choice] for choice in query.choices] == [one[len(prompt) :] for one in wanted]
    assert query.lengths == (5, 7)  # acc_norm uses the choices alone


def with_tokens_around(model_dir: Path, folder: Path, template: str) -> Path:
    """The same model with a tokenizer that adds `<s>` or `</s>` to each text."""
    shutil.copytree(model_dir, folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return folder


def test_a_prompt_begins_as_its_tokenizer_says(tmp_path: Path, model_dir: Path) -> None:
    """OPT's begins every text with a token of its own. lm-eval once left it out, and so
    did these runs: their prompts were none that the engine is ever given."""
    folder = with_tokens_around(model_dir, tmp_path / "bos", "<s> $A")
    plain, begun = (transformers.AutoTokenizer.from_pretrained(one) for one in (model_dir, folder))
    drawn = draw(load("rte", str(DATA / "rte")), 2, 5, 2)
    for item in drawn.items:
        without, query = (query_of(one, drawn, item, "rte") for one in (plain, begun))
        assert query.prompt == (1, *without.prompt)
        assert query.choices == without.choices


def test_a_tokenizer_that_ends_every_text_is_refused(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_tokens_around(model_dir, tmp_path / "eos", "$A </s>")
    args = ["--model", str(folder), "--task", "rte", "--data", str(DATA / "rte"), "--shots", "2",
            "--items", "2", "--dir", str(tmp_path)]  # fmt: skip
    assert main(accuracy.EXPERIMENT, args) != 0
    assert "set add_eos_token to false" in capsys.readouterr().err


def test_another_model_of_the_name_and_other_questions_are_measured_again(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--resume` took a fine-tuned model, in the same directory or one of that name, for the
    earlier one, and one split of a task for the other."""
    other, data = tmp_path / model_dir.name, tmp_path / "copa.jsonl"
    shutil.copytree(model_dir, other)
    rows = (DATA / "copa" / "train.jsonl").read_text().splitlines(keepends=True)
    questions = ["".join(rows[:3]), "".join(rows[1:])]

    def measured(model: Path, text: str) -> str:
        data.write_text(text)
        args = ["--model", str(model), "--task", "copa", "--data", str(data), "--kept", "25",
                "--shots", "2", "--items", "1", "--dir", str(tmp_path), "--resume",
                "--json", str(tmp_path / "out.json")]  # fmt: skip
        assert main(accuracy.EXPERIMENT, args) == 0
        return capsys.readouterr().out

    assert "(1 of 1 cells" in measured(model_dir, questions[0])
    assert "(0 of 1 cells" in measured(model_dir, questions[0])
    assert "(1 of 1 cells" in measured(other, questions[0])
    assert "(1 of 1 cells" in measured(model_dir, questions[1])
    other_weights(other)
    assert "(1 of 1 cells" in measured(other, questions[0])


def test_questions_about_one_premise_are_of_one_document(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RTE's questions about one premise counted as independent, and intervals came out narrow."""
    monkeypatch.setattr(accuracy, "arms", lambda kept: {"exact": Exact()})
    data = tmp_path / "rte"
    shutil.copytree(DATA / "rte", data)
    rows = [json.loads(line) for line in (data / "val.jsonl").read_text().splitlines()]
    rows[2]["premise"] = rows[0]["premise"]
    (data / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--model", str(model_dir), "--task", "rte", "--data", str(data), "--shots", "2",
            "--seed", "5", "--dir", str(tmp_path),
            "--json", str(tmp_path / "out.json")]  # fmt: skip
    assert main(accuracy.EXPERIMENT, args) == 0
    (cell,) = map(json.loads, (tmp_path / "out.cells.jsonl").read_text().splitlines())
    assert [row["document"] for row in cell["rows"]] == [0, 1, 0]


ABOUT = [
    ("rte", "premise", {"premise": "It rained.", "hypothesis": "a", "label": 0},
     {"hypothesis": "b"}),
    ("copa", "premise", {"premise": "It rained.", "question": "cause", "choice1": "a",
                         "choice2": "b", "label": 0}, {"question": "effect"}),
    ("piqa", "goal", {"goal": "dry a coat", "sol1": "a", "sol2": "b", "label": 0}, {"sol1": "c"}),
    ("piqa", "query", {"query": "dry a coat", "choices": ["a", "b"], "gold": 0}, {"gold": 1}),
    ("openbookqa", "question_stem",
     {"question_stem": "Rain is", "choices": {"text": ["a", "b"], "label": ["A", "B"]},
      "answerKey": "A"}, {"answerKey": "B"}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "subject", "row", "changes"), ABOUT)
def test_questions_about_the_same_thing_are_of_one_document(
    task: str, subject: str, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    rows = [row, {**row, subject: "another thing"}, {**row, **changes}]
    assert documents_of([FORMATS[task].parse(one, "row") for one in rows]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--model", "/nowhere/opt"], "--model /nowhere/opt: "),
        (["--task", "copa", "--data", str(DATA / "copa"), "--shots", "1"], "under a window"),
        (["--shots", "9"], "the train split has 4 to give"),
        (["--items", "0"], "items: at least 1 is asked, got 0"),
        (["--items", "-1"], "items: at least 1 is asked, got -1"),
        (["--items", "-99"], "items: at least 1 is asked, got -99"),
        (["--data", "/nowhere/rte"], "no such file"),
    ],
)
def test_a_real_run_that_cannot_be_says_why_in_a_line(
    tmp_path: Path, model_dir: Path, change: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    """0 items meant all of them, a negative number as many fewer than all, or a traceback."""
    given = {"--model": str(model_dir), "--task": "rte", "--data": str(DATA / "rte"),
             "--shots": "2", "--dir": str(tmp_path)}  # fmt: skip
    given |= dict(zip(change[::2], change[1::2], strict=True))
    assert main(accuracy.EXPERIMENT, [part for pair in given.items() for part in pair]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_whose_download_was_cut_off_is_named_in_a_line(
    tmp_path: Path, model_dir: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    cut = tmp_path / "model"
    shutil.copytree(model_dir, cut)
    os.truncate(cut / name, (cut / name).stat().st_size // 2)
    argv = ["--model", str(cut), "--task", "rte", "--data", str(DATA / "rte"), "--shots", "2",
            "--dir", str(tmp_path)]  # fmt: skip
    assert main(accuracy.EXPERIMENT, argv) == 2
    err = capsys.readouterr().err
    assert f"--model {cut}: " in err and err.count("\n") == 1


def test_a_prompt_longer_than_the_model_takes_is_refused(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    short = tmp_path / "model"
    short.mkdir()
    for file in model_dir.iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    args = ["--model", str(short), "--task", "rte", "--data", str(DATA / "rte"), "--shots", "3",
            "--dir", str(tmp_path)]  # fmt: skip
    assert main(accuracy.EXPERIMENT, args) == 2
    assert "the model takes 128: ask with fewer --shots" in capsys.readouterr().err
