"""What a store costs where nothing hits: for engines that read everything, and that choose."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from experiments import zero_hit
from experiments.harness import Disk, Options
from experiments.results_lines import LINES
from experiments.results_table import Reports
from impress.engines import hf

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(policy: str, share: float, hit: int = 0, *, storing: bool = True) -> dict[str, Any]:
    ends = {f"{name}{end}": 1 - share for name in ("ttft_ratio", "throughput_share")
            for end in ("", "_low", "_high")}  # fmt: skip
    return {"hit": hit, "storing": storing, "policy": policy, "share": share, "ttft_ms": 1.0,
            "plain_ttft_ms": 1.0, "before_first_token_ms": 1.0, **ends}  # fmt: skip


def test_an_engine_that_chooses_is_measured_with_what_it_observes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell had the engine's default policy, which observes nothing and has no probes."""
    seen: dict[str, Any] = {}
    observing = hf.observing

    def spy(model: Any, cache: Any) -> Any:
        seen["observed"] = cache.observed is not None
        return observing(model, cache)

    def one(engine: hf.Engine, _model: Any, prompts: list[Any]) -> dict[str, Any]:
        engine.generate(prompts[0], max_new_tokens=1)
        engine.flush()
        seen["probes"] = engine.store.config.probes
        assert engine.last_request is not None and engine.last_request.hit_tokens == 0
        return {}

    monkeypatch.setattr(hf, "observing", spy)
    monkeypatch.setattr(zero_hit, "_compared", one)
    options = Options(
        True, None, None, False, tmp_path, 1, Disk(None, "not measured"), argparse.Namespace(),
        ExitStack(),
    )  # fmt: skip
    found = {}
    for cell in zero_hit.cells(options):
        if cell.params["hit"] == 0 and cell.params["storing"]:
            cell.measure()
            found[cell.params["policy"]] = dict(seen)
    assert found == {
        "exact": {"observed": False, "probes": ()},
        "quality": {"observed": True, "probes": ("int4-v2",)},
    }


def test_figures_of_an_engine_that_chooses_stand_beside_the_others() -> None:
    exact = [measured("exact", 0.1), measured("exact", 0.2, storing=False)]
    said, _ = zero_hit.figures([*exact, measured("quality", 0.5)], None)
    assert said["zero_hit_share"] == 0.2 and said["zero_hit_quality_share"] == 0.5
    assert said["zero_hit_throughput_share"] == 0.9
    assert said["zero_hit_quality_throughput_share"] == 0.5
    assert said["ttft_ratio.0"] == 0.9 and said["ttft_ratio.0_quality"] == 0.5
    deep = {**measured("exact", 0.7), "layers": zero_hit.DEEP}
    said, _ = zero_hit.figures([*exact, deep], None)
    assert said["zero_hit_share"] == 0.2 and said["throughput_share.0"] == 0.9
    assert said["throughput_share.0_32_layers"] == pytest.approx(0.3)
    before = [{k: v for k, v in row.items() if k != "policy"} for row in exact]
    said, _ = zero_hit.figures(before, None)
    assert said["zero_hit_share"] == 0.2 and "zero_hit_quality_share" not in said


def test_tables_take_a_report_of_before_there_were_policies() -> None:
    """Rows that lack a column are left out of a table: all those of an older report would be."""
    from experiments.results_table import _COLUMNS, rows_table

    new, old = measured("quality", 0.5), measured("exact", 0.1)
    del old["policy"]
    lines = rows_table({"rows": [old, new]}, _COLUMNS["zero_hit"]).splitlines()
    assert len(lines) == 4 and "| exact |" in lines[2] and "| quality |" in lines[3]
    report = {"figures": zero_hit.figures([old], None)[0]}
    figures = [ours for line in LINES for ours in line.ours if ours.report == "zero_hit"]
    texts = {ours.figure: Reports({"zero_hit": report}).figure(ours) for ours in figures}
    assert texts["zero_hit_share"] == "10.00%"
    assert texts["zero_hit_quality_share"] == "not yet run"
