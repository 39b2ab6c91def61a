"""The paper's figures, ours beside each, and why they differ: the lines of docs/RESULTS.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Derives a figure from a report; None where the report does not hold it.
Derived = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True, slots=True)
class Ours:
    """A figure of one of our reports, and how it is written."""

    report: str
    figure: str
    form: str = "{:.2f}×"
    label: str = ""
    within: bool = False  # with its interval of 95 %: figures FIGURE_low and _high
    of: Derived | None = None  # for what no figure says: derived from the report


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of the paper's. `how`: ours was measured, emulated or computed."""

    where: str
    what: str
    paper: str
    ours: tuple[Ours, ...]
    how: str
    why: str


_SLICE: Final = "a slice of the layers on a slower disk; compute waits, reads are real"
_AT: Final = "chunks.units.png has all overlaps"
#: The measured overlap with the average order at which figures of `chunks` are taken.
_OVERLAP: Final = Ours("chunks", "overlap", "{:.2f}", "choices overlap the average order by ")
_SMALL: Final = "two small trained models, not OPT"


def _twice(cell: str, varied: str) -> tuple[Ours, ...]:
    """The figure of a cell of `ttft`, and of the same factors in `scale`."""
    return (
        Ours("ttft", f"{varied}.p50_vs_as_h2o_lfu", within=True),
        Ours("scale", f"{cell}.p50_vs_as_h2o_lfu", label="`scale` ", within=True),
    )


def _in_base_cell(report: Mapping[str, Any], system: str) -> Mapping[str, Any]:
    """A system's row of `ttft`'s base cell; empty where there is none."""
    rows = report["rows"]
    return next((r for r in rows if (r.get("cell"), r.get("system")) == ("base", system)), {})


def _map_share(share: str, *, at_papers_disk: bool = False) -> Derived:
    """For IMPRESS in the base cell, a real time's share of an emulated one. With the paper's disk,
    waits and reads from the disk would not be stretched; all else is work of this machine, and
    would take as long as here."""

    def of(report: Mapping[str, Any]) -> float | None:
        row = _in_base_cell(report, "impress")
        if share not in row:
            return None
        if not at_papers_disk:
            return float(row[share])
        ms = row["mean_ms"] * row["dilation"]
        shorter_ms = (row["stated_ms"] + row["ssd_floor_ms"]) * (row["dilation"] - 1)
        return float(row[share] * ms / (ms - shorter_ms))

    return of


def _io_share(report: Mapping[str, Any]) -> float | None:
    """I/O time ÷ time to the first token of AS in the base cell, both medians."""
    row = _in_base_cell(report, "as")
    return float(row["io_ms"] / row["p50_ms"]) if row else None


def _in_row(name: str) -> Derived:
    """The value of `name` in the first row that has it."""

    def of(report: Mapping[str, Any]) -> float | None:
        return next((float(row[name]) for row in report["rows"] if name in row), None)

    return of


LINES: Final = (
    Line("text", "I/O as a share of the time to the first token", "51–98 % (existing systems)",
         (Ours("ttft", "", "{:.0%}", "AS ", of=_io_share),), "emulated", _SLICE),
    Line("text", "how alike heads choose", "OPT-6.7B, middle layers: above .95; OPT-30B: .68 at "
         "40 %, .48 at 10 %", (), "–", "no OPT model was run; in timed runs it is a knob of ours"),
    Line("text", "layers whose heads do not agree, and that are loaded whole", "under 20 %",
         (Ours("ttft", "fallback_share", "{:.0%}", "timed runs "),
          Ours("accuracy", "agreeing.all.25.paper.fallback_share", "{:.0%}", "agreeing "),
          Ours("accuracy", "specialised.all.25.paper.fallback_share", "{:.0%}", "specialised "),
          Ours("accuracy", "grouped.all.25.paper.fallback_share", "{:.0%}", "grouped ")),
         "measured", "a knob in the timed runs; the rest are three small trained models"),
    Line("Fig 5a", "rows of loaded 64-token chunks ÷ rows chosen", "2.2× (46 % important)",
         (Ours("chunks", "chunk_amplification_before"),), "computed",
         "25 % are chosen here: 4 is the most there can be (at 46 %: 2.2); how rows cluster is a "
         "knob of ours; pieces are read, so fewer bytes move than this"),
    Line("Fig 5", "bytes moved ÷ bytes chosen, before → after packing", "",
         (Ours("chunks", "amplification_before", label="before "),
          Ours("chunks", "amplification_after", label="after "), _OVERLAP), "measured",
         f"rows of 4 KiB; {_AT}"),
    Line("text", "how many of a request's rows are first in an average order", "over 80 %",
         tuple(Ours("chunks", f"overlap.{name}.paper", "{:.0%}", f"{name} ")
               for name in ("agreeing", "specialised", "grouped")), "measured",
         "the paper's selector without its gate, 25 % kept; the average is of a dozen questions on "
         "a document of 1,024 tokens; small models trained to look facts up, not OPT"),
    Line("Fig 11, 22", "rows read, threshold 1 → 0, RTE and COPA shapes", "4× fewer (PIQA)",
         (Ours("threshold", "agreeing.rows_times_fewer", label="agreeing "),
          Ours("threshold", "specialised.rows_times_fewer", label="specialised ")), "measured",
         f"25 % kept gives at most 4; {_SMALL}"),
    Line("Fig 11, 22", "accuracy lost on the way, points, RTE and COPA shapes",
         "1.6 (79.1 → 77.5 %, PIQA)",
         (Ours("threshold", "agreeing.points_lost", "{:.1f}", "agreeing "),
          Ours("threshold", "specialised.points_lost", "{:.1f}", "specialised "),
          Ours("threshold", "specialised.n", "of {:.0f} questions each")), "measured",
         "diffuse left out: there 25 % without the gate loses 42 and 41 (docs/SELECTION.md); "
         "the specialised model's answer hangs on a head the gate does not see"),
    Line("Fig 15", "accuracy lost by the paper's selector at 25 %, RTE shape", "0.2 % mean",
         (Ours("accuracy", "specialised.rte.25.paper.n", "of {:.0f} questions each"),
          Ours("accuracy", "agreeing.rte.25.paper.lost_points", "{:.1f}", "points agreeing ",
               within=True),
          Ours("accuracy", "specialised.rte.25.paper.lost_points", "{:.1f}", "specialised ",
               within=True)),
         "measured", f"by document; {_SMALL}"),
    Line("text", "accuracy lost by static marking, RTE shape", "up to 5 %",
         (Ours("accuracy", "specialised.rte.25.static_h2o.n", "of {:.0f} questions each"),
          Ours("accuracy", "agreeing.rte.25.static_h2o.lost_points", "{:.1f}", "points agreeing "),
          Ours("accuracy", "specialised.rte.25.static_h2o.lost_points", "{:.1f}", "specialised ")),
         "measured", "25 % kept, by importance: the attention of the document's last 16 tokens, "
         f"not of all of them (H2O); {_SMALL}"),
    Line("Fig 16", "p50 against AS+H2O+LFU", "1.2–2.8×",
         (Ours("ttft", "p50_vs_as_h2o_lfu", within=True),), "emulated", _SLICE),
    Line("Fig 16", "the same, on a GPU", "1.2–2.8×",
         (Ours("ttft_cuda", "p50_vs_as_h2o_lfu", within=True),
          Ours("ttft_cuda", "shape llama-3-8b.p50_vs_as_h2o_lfu", label="Llama-3-8B ",
               within=True)), "measured",
         "two layers on an H200 whose disk reads 1.8 GB/s: recomputing takes a fifth (Llama-3-8B: "
         "a third) of the paper's time"),
    Line("", "mean against AS+H2O+LFU", "not given",
         (Ours("ttft", "mean_vs_as_h2o_lfu", within=True),), "emulated",
         "in a slice of four layers the median request has none that fell back; the mean counts "
         "them all"),
    Line("", "p50, eight requests in a row", "not given",
         (Ours("ttft", "in_a_row 8.p50_vs_as_h2o_lfu", within=True),), "emulated",
         "copies into faster tiers go on beside the next request"),
    Line("", "against recomputing", "above 1 at p99",
         (Ours("ttft", "p50_vs_recompute", label="p50 ", within=True),
          Ours("ttft", "p99_vs_recompute", label="p99 ", within=True)), "emulated",
         f"{_SLICE}; a model of fewer tokens a second, as the paper's seems, would turn p99 round"),
    Line("", "p50 of the paper's against int4 of everything (below 1: int4 wins)", "not compared",
         (Ours("ttft", "p50_vs_as_int4", within=True),), "emulated",
         "the paper has no quantised baseline"),
    Line("", "p50 of our selector against the paper's (above 1: ours is faster)", "",
         (Ours("ttft", "quality_p50_vs_paper", within=True),), "emulated", "it reads a sketch of "
         "all heads and keeps what a bound on the missing mass wants, not a fixed share"),
    Line("", "the chosen mode ÷ the best of recompute, exact and sparse, worst cell", "",
         tuple(Ours("ttft", f"worst{of}_vs_best_of_three", label=f"{of.strip('_') or 'p50'} ")
               for of in ("", "_mean")), "emulated",
         "seventeen systems take turns; the next line is of the mode's own runs"),
    Line("", "the same with nothing but these systems", "",
         tuple(Ours("ttft_modes", f"worst{of}_vs_best_of_three", label=f"{of.strip('_') or 'p50'} ")
               for of in ("", "_mean")), "emulated", "it goes by the mean, and "
         "makes slow requests faster where `exact` is fast at most and slow at some"),
    Line("Fig 17", "I/O time against AS+H2O+LFU", "1.5–3.8× less",
         (Ours("ttft", "io_time_vs_as_h2o_lfu"),
          Ours("ttft_xeon", "io_time_vs_as_h2o_lfu", label="a Xeon ")), "emulated",
         f"a ratio of medians; {_SLICE}; what is left of them beside waits that are stretched"),
    Line("Fig 18", "what identification / reordering / caching add, one after the other, of the "
         "gain by the mean", "60/30/10 (30B RTE), 36/8/56 (13B COPA)",
         tuple(Ours("ablation", f"{model}.{name}.mean_share", "{:.0%}", f"{model} {name} ",
                    within=True)
               for model in ("opt-30b", "opt-13b")
               for name in ("identification", "reordering", "caching")), "emulated",
         "from AS+H2O+LFU to IMPRESS, of which the last step takes LFU's place; it hangs on how "
         "requests look at rows (knobs) and on the cache ratio"),
    Line("Fig 20", "chunks touched, before ÷ after reordering", "1.2×",
         (Ours("chunks", "chunks_times_fewer.64"), _OVERLAP), "computed", _AT),
    Line("Fig 20", "I/O time of a packed sparse read ÷ sequential floor, overlap ≥ .9", "",
         tuple(Ours("chunks", f"io_time_vs_sequential_floor.{kib}", "{:.2f}", f"{kib} KiB ")
               for kib in (1, 4, 16)), "measured", "the worst cell of each row size"),
    Line("Fig 20", "its requests alone, nothing planned or verified ÷ the same floor", "",
         tuple(Ours("chunks", f"disk_alone_vs_sequential_floor.{kib}", "{:.2f}", f"{kib} KiB ")
               for kib in (1, 4, 16)), "measured",
         "sent by eight threads or by one: the quicker"),
    Line("Fig 21", "HBM hit rate by rows, LFU → importance", "68 → 80 %",
         (Ours("hits", "hbm_hit_lfu", "{:.0%}", "LFU "),
          Ours("hits", "hbm_hit_importance", "{:.0%}", "importance ")), "measured",
         "HBM is emulated in host memory; fewer prefixes, other popularity"),
    Line("Fig 23", "chunk size 16–256: chunks touched before ÷ after packing",
         "2.2–2.4× TTFT throughout",
         (*(Ours("chunks", f"chunks_times_fewer.{unit}", label=f"{unit}: ")
            for unit in (16, 64, 256)), _OVERLAP), "computed",
         f"chunks, not time: this store reads pieces whatever the chunk; {_AT}"),
    Line("Fig 24", "400 GB of data, against AS+H2O+LFU", "",
         _twice("10:32:400", "ratio 400"), "emulated", _SLICE),
    Line("Fig 16", "OPT-30B, against AS+H2O+LFU", "1.2–2.8×",
         _twice("opt-30b", "shape opt-30b"), "emulated", _SLICE),
    Line("Fig 25", "Llama (ours: Llama-3-8B, grouped queries), against AS+H2O+LFU",
         "1.7–2.7× (Llama-2)", _twice("llama-3-8b", "shape llama-3-8b"), "emulated",
         "Llama-2 has no grouped queries; heads 0–2 share one KV head in Llama-3"),
    Line("p99, 30B RTE", "ReComp / AS / AS+H2O+LRU / AS+H2O+LFU / IMPRESS",
         "3.9 / 9.3 / 6.6 / 5.9 / 2.95 s",
         tuple(Ours("ttft", f"p99_ms.{name}", "{:.0f} ms", f"{name} ") for name in
               ("recompute", "as", "as_h2o_lru", "as_h2o_lfu", "impress")), "emulated",
         "OPT-6.7B, a slice, in which a layer that falls back weighs more"),
    Line("section 4.4", "mapping list, share of TTFT", "under 2 %",
         (Ours("ttft", "", "{:.2%}", "waited ", of=_map_share("map_share")),
          Ours("ttft", "", "{:.2%}", "computed ", of=_map_share("map_cpu_share")),
          Ours("ttft", "", "{:.1%}", "with a disk of 5 GB/s waited ",
               of=_map_share("map_share", at_papers_disk=True)),
          Ours("ttft", "", "{:.1%}", "computed ",
               of=_map_share("map_cpu_share", at_papers_disk=True)),
          Ours("ttft", "", "{:.2%}", "beside, by threads that copy, ",
               of=_map_share("map_beside_share"))), "emulated",
         "its own time is real and TTFT is stretched: with the paper's disk waits and reads would "
         "be shorter; what is not computed is waiting for the interpreter; what is found "
         "beside is a part of the copies' time, which a request waits for where they end last"),
    Line("section 4.4", "repacking: a pass", "under a minute",
         (Ours("repack", "", "{:.0f}", "spans ", of=_in_row("spans")),
          Ours("repack", "", "{:.0f}", "moved beside requests ", of=_in_row("moved_loaded")),
          Ours("repack", "", "{:.0f} s", "of this machine's clock: ", of=_in_row("running_s")),
          Ours("repack", "", "{:.0f} s", "the rest, without requests, in ",
               of=_in_row("alone_s"))), "emulated",
         "requests follow one another without a pause; each MiB the repacker reads or writes "
         "stands back behind them for up to .25 s"),
    Line("section 4.4", "repacking: p99 of requests meanwhile", "not given",
         (Ours("repack", "repack_p99_slowdown", "{:+.1%}", within=True),), "emulated",
         "compute is a wait; reads and writes are real"),
    Line("", "nothing hits: checks, lookup and mode as a share of TTFT", "",
         (Ours("zero_hit", "zero_hit_share", "{:.2%}", "exact "),
          Ours("zero_hit", "zero_hit_quality_share", "{:.2%}", "quality "),
          Ours("zero_hit", "before_share.0", "{:.2%}", "all before the forward, exact ",
               within=True)), "measured",
         "Transformers on a CPU, the prompt before being stored on the same two cores"),
    Line("", "nothing hits: time to the first token with a store ÷ without", "",
         (Ours("zero_hit", "ttft_ratio.0", "{:.3f}", "storing ", within=True),
          Ours("zero_hit", "ttft_ratio.0_not_storing", "{:.3f}", "not storing ", within=True),
          Ours("zero_hit", "ttft_ratio.0_quality", "{:.3f}", "quality, storing ", within=True)),
         "measured",
         "prompt by prompt; all that is in the way of the first token"),
    Line("", "nothing hits: throughput with a store ÷ without", "",
         (Ours("zero_hit", "throughput_share.0", "{:.2f}", "exact ", within=True),
          Ours("zero_hit", "throughput_share.0_quality", "{:.2f}", "quality ", within=True)),
         "measured",
         "all is stored; packing shares the processor with the model here; a GPU's does not"),
)  # fmt: skip
