"""What contiguous virtual KV buffers hold, and what a step of decoding costs in them.

sizes    Yi-34B, as vAttention reckons it: addresses, no memory (arithmetic)
memory   requests that come, grow and go: the engine's buffers with rows really written, beside what
         static reservation, a request's own reservation, paging and concatenation hold (arithmetic)
hit      the engine's time to the first token where a long prefix is read: real
decode   one model decoding over each kind of cache, step by step in turn: all real
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.vbuffers_decode import decode
from experiments.vbuffers_hit import hits
from experiments.vbuffers_memory import N_STEPS, serve
from impress.engines.virtual import Sizes
from impress.types import Geometry

#: One worker's half of it: 60 layers, 4 of 8 KV heads of 128, fp16; 200K tokens, 500 requests.
YI_34B: Final = Geometry(60, 28, 4, 128, "float16")
PAGES: Final = (64 << 10, 256 << 10, 2 << 20)
#: Tokens in the context when decoding begins, by `quick`; figures are for the last.
CONTEXTS: Final = {False: (1024, 4096, 8192), True: (512, 4096)}
ROUNDS: Final = {False: 30, True: 10}


def cells(options: Options) -> list[Cell]:
    quick = options.quick
    sizes = Cell({"part": "sizes"}, _sizes, 0.1)
    memory = [
        Cell(
            {"part": "memory", "page_bytes": page},
            partial(serve, page, N_STEPS[quick], options.seed), N_STEPS[quick] / 100,
        )
        for page in PAGES
    ]  # fmt: skip
    contexts = [
        Cell(
            {"part": "decode", "context": n, "batch": batch},
            partial(decode, n, batch, ROUNDS[quick], options.seed),
            ROUNDS[quick] * (1 + n * batch / 800),
        )
        for n in CONTEXTS[quick] for batch in ((1,) if quick else (1, 4))
        if n * batch <= 1 << 14
    ]  # fmt: skip
    n_tokens, rounds = CONTEXTS[quick][-1], 4 * ROUNDS[quick]
    hit = Cell(
        {"part": "hit"}, partial(hits, options.folder / "hit", n_tokens, rounds, options.seed),
        rounds,
    )  # fmt: skip
    return [sizes, *memory, hit, *contexts]


def _sizes() -> list[Row]:
    sizes = Sizes.of(YI_34B, batch=500, context=200 * 1024, page_bytes=2 << 20)
    return [
        {
            "model": "Yi-34B, TP-2", "buffers": sizes.n_buffers,
            "request_mib": sizes.slot_bytes[0] >> 20, "buffer_gib": sizes.buffer_bytes[0] / 2**30,
            "total_tib": sizes.total_bytes / 2**40, "one_token_mib": sizes.held_bytes(1) >> 20,
        }
    ]  # fmt: skip


def figures(rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
    parts: dict[str, list[Row]] = {"sizes": [], "memory": [], "hit": [], "decode": []}
    for row in rows:
        parts[row["part"]].append(row)
    for part, (title, columns) in _TABLES.items():
        shown = [{name: row[column] for name, column in columns.items()} for row in parts[part]]
        if shown:
            print_rows(title, [row for i, row in enumerate(shown) if row not in shown[:i]])
    said: Figures = {}
    for row in parts["memory"]:
        if row["by"] == "real":
            kib = row["page_bytes"] >> 10
            said[f"bytes_vs_static.{kib}k"] = row["vs_static"]
            said[f"fragmentation.{kib}k"] = row["fragmentation"]
    for row in parts["decode"]:
        for what in ("vs_concat", "cpu_vs_concat", "stalls"):
            name = f"{what}.{row['context']}x{row['batch']}.{row['system']}"
            said[name] = float(row[what])
    for row in parts["hit"]:
        said[f"hit_vs_pooled.{row['n_tokens']}"] = row["ttft_vs_pooled"]
    last = CONTEXTS[options.quick][-1]
    for name, of in (
        ("bytes_vs_static", f"bytes_vs_static.{PAGES[0] >> 10}k"),
        ("decode_vs_concat", f"vs_concat.{last}x1.virtual_64k"),
    ):
        if of in said:
            said[name] = said[of]
    return said, rows


#: Part -> title, and heading of a column -> name in its rows.
_TABLES: Final = {
    "sizes": ("Addresses: arithmetic", {
        "model": "model", "buffers": "buffers", "MiB a request": "request_mib",
        "GiB a buffer": "buffer_gib", "TiB in all": "total_tib", "MiB for a token": "one_token_mib",
    }),
    "memory": ("Memory: virtual real, the others arithmetic", {
        "system": "system", "MiB, mean": "mib_mean", "most": "mib_most", "÷ static": "vs_static",
        "fragmentation": "fragmentation", "resident MiB": "resident_mib", "idle": "idle_share",
        "requests": "requests", "in used slots": "reused",
    }),
    "hit": ("Time to the first token of a hit, all rows from the SSD: real", {
        "tokens": "n_tokens", "pooled ms": "pooled_ms", "virtual ms": "virtual_ms",
        "virtual ÷ pooled": "ttft_vs_pooled", "by CPU": "cpu_vs_pooled", "n": "n",
    }),
    "decode": ("Decoding: real", {
        "tokens": "context", "batch": "batch", "system": "system", "steps/s": "steps_s",
        "÷ concat": "vs_concat", "CPU ms": "cpu_ms", "by CPU": "cpu_vs_concat",
        "stalls": "stalls", "µs each": "stall_us",
        "ahead": "ahead", "differs by": "differs", "n": "n",
    }),
}  # fmt: skip


def draw_memory(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Bytes held by each system, as shares of static reservation."""
    axes = figure.add_subplot()
    held = [row for row in rows if row["part"] == "memory"]
    names, shares = [], []
    for row in held:
        if row["system"] not in names:
            names.append(row["system"])
            shares.append(row["vs_static"])
    axes.bar(names, shares)
    axes.set_ylabel("bytes held ÷ static reservation (mean)")
    axes.tick_params(axis="x", labelsize=8)


def draw_decode(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Steps per second against the tokens in the context."""
    axes = figure.add_subplot()
    decoded = [row for row in rows if row["part"] == "decode" and row["batch"] == 1]
    for name in dict.fromkeys(row["system"] for row in decoded):
        mine = [row for row in decoded if row["system"] == name]
        axes.plot(
            [row["context"] for row in mine], [row["steps_s"] for row in mine], "o-", label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens before")
    axes.set_ylabel("decode steps per second (median)")
    if decoded:
        axes.legend(fontsize=8)


EXPERIMENT: Final = Experiment(
    "vbuffers", "Contiguous virtual KV buffers: memory held, and decoding.", cells, figures,
    {"memory": draw_memory, "decode": draw_decode},
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
