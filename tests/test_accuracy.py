"""What `accuracy` makes of its rows, and its own forward pass against the engine's."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import other_weights, wait_for_promotions
from test_engine_hf import attach, prompts, tiny

from experiments import accuracy, accuracy_measure, hashpool, selection, threshold
from experiments.accuracy_figures import all_figures
from experiments.arms import KEPT, SELECTORS, Quantised, arms, probes
from experiments.behind import GivenRows, behind, stored_prefix, stored_rows
from experiments.harness import main
from impress.policy import Exact, Paper, Quality, Recency

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the forward -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("policy", [Exact(), Quality(0.3), Paper(0.25, gate=False), Recency(0.25)])
def test_logits_and_tokens_are_the_engines(tmp_path: Path, family: str, policy: Any) -> None:
    model, ids = tiny(family), prompts(150)
    with attach(model, tmp_path, policy=Quality()) as engine:
        engine.generate(ids[:, :130], max_new_tokens=1)
        engine.flush()
        out = engine.generate(
            ids, max_new_tokens=6, do_sample=False, policy=policy, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        wanted = out.sequences[0, 150:].tolist()
        prompt = ids[0].tolist()
        prefix = stored_prefix(engine.store, prompt, policy)
        with behind(model, engine.store.geometry, prefix, 60, engine.store.buffers) as mine:
            last = mine.feed(prompt[prefix.n_tokens :])[-1]
            assert torch.allclose(last, out.logits[0][0], atol=1e-5)
            assert mine.decode(last, 6) == wanted
            assert mine.agreement(last, wanted) == [True] * 6  # after a rewind: the same again
            other = [*wanted[:3], (wanted[3] + 1) % 199, *wanted[4:]]
            assert mine.agreement(last, other)[:4] == [True, True, True, False]
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0


def test_given_rows_are_attended_to_as_stored_ones(tmp_path: Path) -> None:
    model, ids = tiny("llama"), prompts(150)
    with attach(model, tmp_path) as engine:
        engine.generate(ids[:, :130], max_new_tokens=1)
        engine.flush()
        prompt, store = ids[0].tolist(), engine.store
        logits = []
        for prefix in (stored_prefix(store, prompt, Exact()), stored_rows(store, prompt)):
            assert prefix.n_tokens == 128
            with behind(model, store.geometry, prefix, 30, store.buffers) as mine:
                logits.append(mine.feed(prompt[128:]))
    assert torch.equal(*logits)


# ---- the arms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 80])
def test_quantised_rows_are_within_half_a_step_of_the_stored(bits: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 40, head_dim, generator=draw).half() for _ in range(2))
    rows = Quantised(bits).of(GivenRows([k], [v]), 1)
    for mine, stored in zip(rows.choose(0, k, k, 1.0), (k, v), strict=True):
        assert mine.dtype == stored.dtype and mine.shape == stored.shape
        for at in range(0, head_dim, 32):
            part, back = stored[..., at : at + 32].float(), mine[..., at : at + 32].float()
            step = part.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
            assert ((part - back).abs() <= 0.505 * step + 2e-3 * part.abs()).all()


def test_bytes_of_everything_in_few_bits_count_the_scales() -> None:
    assert Quantised(4).share(128, 2) == pytest.approx(0.28125)
    assert Quantised(8).share(128, 2) == pytest.approx(0.53125)


def test_every_selector_is_there_at_every_share() -> None:
    named = arms()
    assert next(iter(named)) == "exact"
    assert {f"{k}.{s}" for k, s in itertools.product(KEPT, SELECTORS)} <= named.keys()
    assert {"int8", "int4", "quality05"} <= named.keys()
    assert {"heads3-v1", "pages16-v1"} <= set(probes(named))


# ---- the figures -------------------------------------------------------------------------------


def row(group: str, document: int, task: str, right: bool, kl: float) -> dict[str, Any]:
    read = {"agreed": 1.0, "run": 64, "rows": 1.0, "bytes": 1.0, "moved": 1.0, "fell_back": 0.0}
    exact = {"right": True, "chosen": 0, "kl": 0.0, **read}
    some = {**exact, "right": right, "chosen": int(not right), "kl": kl, "bytes": 0.25}
    return {"group": group, "document": document, "task": task, "arms": {"exact": exact, "x": some}}


def test_figures_are_paired_with_exact_and_pooled_over_tasks_and_groups() -> None:
    rows = [row("a", i, task, i % 4 > 0, 0.01 * i) for i in range(40) for task in ("rte", "copa")]
    rows += [row("b", i, "rte", True, 0.0) for i in range(40)]
    figures, lines = all_figures(rows, seed=1)
    assert figures["a.rte.x.accuracy"] == 0.75 and figures["a.rte.x.flips"] == 10
    assert figures["a.rte.x.flips_to_wrong"] == 10 and figures["a.rte.x.flips_to_right"] == 0
    assert figures["a.all.x.n"] == 80 and figures["a.all.x.lost_points"] == 25
    assert figures["all.all.x.accuracy"] == pytest.approx(100 / 120, abs=1e-4)
    assert figures["all.all.x.n"] == 120
    assert figures["a.rte.x.kl"] == pytest.approx(0.195)
    assert figures["a.rte.x.kl_p99"] == pytest.approx(np.percentile(np.arange(40) * 0.01, 99))
    assert figures["a.rte.x.bytes_share"] == 0.25
    assert figures["b.rte.x.lost_points_low"] == figures["b.rte.exact.lost_points_high"] == 0
    low, high = figures["a.rte.x.accuracy_low"], figures["a.rte.x.accuracy_high"]
    assert 0.55 < low < 0.68 and 0.82 < high < 0.92  # 40 documents: a standard error of .068
    assert all(np.isfinite(value) for value in figures.values())
    assert {(line["group"], line["task"]) for line in lines} == {
        ("a", "rte"), ("a", "copa"), ("a", "all"), ("b", "rte"), ("all", "all"),
    }  # fmt: skip


def test_lost_points_have_an_interval_where_no_question_flipped() -> None:
    """int4 of everything was said to lose 0 points, "from 0 to 0", on 34 documents: where 8 % of
    all documents have a flip, one draw of 34 in twenty has none."""
    rows = [row("a", i, task, True, 0.0) for i in range(34) for task in ("rte", "copa")]
    figures, lines = all_figures(rows, seed=1)
    for name in ("a.rte.x", "a.copa.x", "a.all.x"):  # by document, however many questions each has
        assert figures[f"{name}.lost_points_low"] == figures[f"{name}.lost_points"] == 0
        assert figures[f"{name}.lost_points_high"] == pytest.approx(8.434, abs=1e-3)
    assert {line["lost_points_high"] for line in lines if line["arm"] == "exact"} == {0}


def test_who_lost_an_answer_is_known_no_better_than_who_lost_none() -> None:
    """With one flip of 408 the interval ended at 0.7 points, with none at 8.4."""
    rows = [
        row("a", i, task, i + len(task) > 3, 0.0) for i in range(34) for task in ("rte", "copa")
    ]
    figures, _ = all_figures(rows, seed=1)
    assert figures["a.all.x.flips"] == 1
    assert figures["a.all.x.lost_points_high"] == figures["a.copa.x.lost_points_high"] > 8.4


@pytest.mark.parametrize("flip", [None, "wrong", "right"])
def test_a_selection_that_lost_one_is_known_no_better_than_one_that_lost_none(flip: Any) -> None:
    """With one of 504 answers lost, up to .6 points were said to be possible; with none, 1.2."""
    none = np.empty((0, 4))
    found = [
        selection.Outcome(
            i // 2, "rte", not (i == 7 and flip == "wrong"), True, True,
            not (i == 7 and flip == "right"), 0.0, 0.1, 0.2, 0.3, 0.0, none,
        )
        for i in range(504)
    ]  # fmt: skip
    most = selection.figures_of(found, Quality(), 1)["lost_points_high"]
    assert most == selection.most_unseen(252)


def test_of_selections_without_a_flip_the_interval_has_a_width_too() -> None:
    """The report said 0.0 [0.0, 0.0] for a few documents, which nobody can know."""
    none = np.empty((0, 4))
    same = [
        selection.Outcome(i // 2, "rte", True, True, True, True, 0.0, 0.1, 0.2, 0.3, 0.0, none)
        for i in range(20)
    ]
    said = selection.figures_of(same, Quality(), 1)
    assert (said["lost_points"], said["lost_points_low"]) == (0, 0)
    assert said["lost_points_high"] == pytest.approx(100 * (1 - 0.05 ** (1 / 10)), rel=1e-4)
    assert selection.figures_of(same, Exact(), 1)["lost_points_high"] == 0


def test_questions_on_one_document_are_drawn_together() -> None:
    alone = [row("a", i, "rte", i % 2 > 0, 0.0) for i in range(40)]
    together = [row("a", i // 10, "rte", i // 10 % 2 > 0, 0.0) for i in range(40)]

    def width(rows: list[dict[str, Any]]) -> float:
        figures, _ = all_figures(rows, seed=1)
        return figures["a.rte.x.accuracy_high"] - figures["a.rte.x.accuracy_low"]

    assert width(together) > 2 * width(alone)


# ---- the whole ---------------------------------------------------------------------------------


def test_a_run_is_resumed_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(accuracy.accuracy_lookup, "N_DOCUMENTS", {True: 1})
    monkeypatch.setattr(accuracy.accuracy_lookup, "CHECKPOINTS", ("specialised",))
    few = {name: arms((25,))[name] for name in ("exact", "int4", "25.recency", "quality10")}
    monkeypatch.setattr(accuracy, "arms", lambda kept: few)
    report = tmp_path / "accuracy.json"
    args = ["--quick", "--dir", str(tmp_path), "--json", str(report)]
    assert main(accuracy.EXPERIMENT, args) == 0
    first = json.loads(report.read_text())
    assert first["figures"]["specialised.rte.exact.accuracy"] in (0, 1)
    assert first["figures"]["specialised.all.25.recency.rows_share"] == 0.25
    assert first["figures"]["specialised.all.exact.kl"] == 0
    assert 0 < first["figures"]["specialised.all.quality10.bytes_share"] < 1
    # The figures are made again from the cells alone, as when what is said of them has changed.
    monkeypatch.setattr(accuracy.accuracy_lookup, "model_of", None)
    plots = tmp_path / "plots"
    assert main(accuracy.EXPERIMENT, [*args, "--resume", "--plot", str(plots)]) == 0
    assert json.loads(report.read_text())["figures"] == first["figures"]
    assert {file.name for file in plots.iterdir()} == {"accuracy.accuracy.png", "accuracy.kl.png"}
    assert "(0 of 1 cells" in capsys.readouterr().out


def test_other_shares_are_other_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the number of arms told cells apart: `--kept 25 --resume` kept the results of 50."""
    monkeypatch.setattr(accuracy.accuracy_lookup, "N_DOCUMENTS", {True: 1})
    monkeypatch.setattr(accuracy.accuracy_lookup, "CHECKPOINTS", ("specialised",))
    monkeypatch.setattr(
        accuracy, "arms",
        lambda kept: {"exact": Exact(), **{f"{n}.recency": Recency(n / 100) for n in kept}},
    )  # fmt: skip
    args = ["--quick", "--dir", str(tmp_path), "--json", str(tmp_path / "accuracy.json")]
    for kept in ("50", "25"):
        assert main(accuracy.EXPERIMENT, [*args, "--resume", "--kept", kept]) == 0
        figures = json.loads((tmp_path / "accuracy.json").read_text())["figures"]
        assert figures[f"specialised.all.{kept}.recency.rows_share"] == int(kept) / 100
    assert main(accuracy.EXPERIMENT, [*args, "--cells", "nothing"]) == 2
    known = f"specialised, {selection.digest_of('specialised')}, 0"
    assert capsys.readouterr().err.endswith(f"there are: {known}\n")


def test_more_documents_are_added_to_those_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 252 take hours: fewer give wider intervals, and a longer run goes on from them."""
    monkeypatch.setattr(accuracy.accuracy_lookup, "CHECKPOINTS", ("specialised",))
    monkeypatch.setattr(accuracy, "arms", lambda kept: {"exact": Exact()})
    args = ["--quick", "--dir", str(tmp_path), "--json", str(tmp_path / "accuracy.json")]
    for n, todo in ((1, "1 of 1"), (2, "1 of 2")):
        assert main(accuracy.EXPERIMENT, [*args, "--resume", "--documents", str(n)]) == 0
        assert f"({todo} cells" in capsys.readouterr().out
        rows = json.loads((tmp_path / "accuracy.json").read_text())["rows"]
        assert next(row["n"] for row in rows if row["task"] == "all") == 4 * n


@pytest.mark.parametrize("experiment", [accuracy, threshold, hashpool])
def test_other_weights_of_a_checkpoint_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    experiment: Any,
) -> None:  # fmt: skip
    """`--resume` kept the answers of the old weights, under the digest of the new ones."""
    lookup = tmp_path / "lookup"
    for name in ("specialised", hashpool.CHECKPOINT):
        shutil.copytree(selection.LOOKUP / name, lookup / name)
    monkeypatch.setattr(selection, "LOOKUP", lookup)
    monkeypatch.setattr(accuracy.accuracy_lookup, "N_DOCUMENTS", {True: 1})
    monkeypatch.setattr(accuracy.accuracy_lookup, "CHECKPOINTS", ("specialised",))
    monkeypatch.setattr(accuracy.accuracy_lookup, "N_TOKENS", 256)
    monkeypatch.setattr(accuracy_measure, "N_DECODED", 2)
    monkeypatch.setattr(accuracy, "arms", lambda kept: {"exact": Exact()})
    monkeypatch.setattr(threshold, "ALPHAS", (0.0, 4.0))
    monkeypatch.setattr(hashpool, "N_REQUESTS", {True: 20})

    def measured() -> tuple[int, int]:
        """How many cells were measured, and of how many."""
        args = ["--quick", "--resume", "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]
        assert main(experiment.EXPERIMENT, args) == 0
        found = re.search(r"\((\d+) of (\d+) cells", capsys.readouterr().out)
        assert found is not None
        return int(found[1]), int(found[2])

    n, _ = measured()
    assert n and measured() == (0, n)
    for checkpoint in lookup.iterdir():
        other_weights(checkpoint)
    assert measured() == (n, n)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--task", "rte"], "--task, --data, --shots and --items go with --model"),
        (["--items", "20"], "--task, --data, --shots and --items go with --model"),
        (["--documents", "253"], "--documents wants 1 to 252, got 253"),
        (["--documents", "0"], "--documents wants 1 to 252, got 0"),
        (["--first", "-1"], "--first wants a number from 0 on, got -1"),
        (["--model", "x", "--first", "3"], "--first go with the lookup models"),
        (["--model", "x", "--documents", "3"], "--documents and --first go with the lookup"),
        (["--shots", "5"], "--task, --data, --shots and --items go with --model"),
        (["--model", "somewhere"], "--model needs --task and --data"),
        (["--model", "./gone", "--task", "rte", "--data", "x"], "--model ./gone: no such folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(accuracy.EXPERIMENT, ["--dir", str(tmp_path), *args]) == 2
    assert says in capsys.readouterr().err
