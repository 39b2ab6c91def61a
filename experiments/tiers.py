"""A hit from HBM (emulated in host memory), DRAM and SSD: time to first token, and GB/s.

Two views of the same store code, each exact and under the policies that choose rows:

    engine    a lookup checkpoint in Transformers, prefixes as long as its positions allow: TTFT
    sessions  bare sessions in OPT-6.7B's geometry, fewer layers, synthetic rows: GB/s

One process opens a directory once for each tier, read-only: with no caches (SSD), with DRAM, and
with an HBM tier above it. Caches are warmed by exact requests until a whole request comes from the
tier wanted, and each measured request is checked to have read its rows there. Probe records lie in
DRAM wherever there is any. Cells are interleaved, in another order each round. Logits (engine), and
positions, keys and values (sessions) are compared bit by bit between the tiers.

Floors of the same run: fio on the segment file (sequential, 1 MiB, O_DIRECT), memcpy of a prefix by
as many threads as read it, and a forward of the model whose cache already holds the prefix.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import impress
from experiments.common import Options, Row, print_rows, run, spread
from experiments.tiers_cells import PROBES, SHOWN, Cells, Samples, opened, rotated, warm
from experiments.tiers_sessions import session_rows
from impress.demo.lookup.tasks import document, questions
from impress.engines import hf, hf_models
from impress.engines.hf_modules import CACHE
from impress.policy import Exact, Paper, Policy, Quality

MIB: Final = 1 << 20
POLICIES: Final[dict[str, Policy]] = {"exact": Exact(), "paper": Paper(), "quality": Quality()}
DOCUMENT_TOKENS: Final = 2048  # the checkpoints have 2,304 positions
_LOOKUP: Final = Path(impress.__file__).parent / "demo" / "lookup"


class Answers:
    """The lookup model over a store per tier, on the same documents and questions."""

    def __init__(self, checkpoint: str, n_documents: int) -> None:
        logging.disable_progress_bar()
        path = _LOOKUP / checkpoint
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).eval()
        self.documents = [document("test", i, DOCUMENT_TOKENS) for i in range(n_documents)]
        self.asked = [
            torch.tensor([[*doc.tokens, *questions(doc, ("rte", "copa")[i % 2], 1)[0].tokens]])
            for i, doc in enumerate(self.documents)
        ]
        self.samples: dict[str, Samples] = {}
        self._logits: dict[tuple[str, int], torch.Tensor] = {}

    def store(self, folder: Path) -> int:
        """Compute and store every document once. Returns the bytes stored."""
        config = impress.Config(probes=PROBES, dram_bytes=0, segment_bytes=16 * MIB)
        with hf.attach(self.model, folder, config=config) as engine:
            for doc in self.documents:
                engine.generate(torch.tensor([doc.tokens]), max_new_tokens=1)
            engine.flush()
            return DOCUMENT_TOKENS * len(self.documents) * engine.store.geometry.token_bytes

    def warm(self, engines: dict[str, hf.Engine]) -> None:
        for tier, engine in engines.items():
            for ids in self.asked:

                def request(engine: hf.Engine = engine, ids: torch.Tensor = ids) -> dict[str, int]:
                    engine.generate(ids, max_new_tokens=1, policy=Exact())
                    assert engine.last_request is not None, "it has just returned"
                    return engine.last_request.rows_by_tier

                warm(tier, request)

    def cells(self, engines: dict[str, hf.Engine]) -> Cells:
        """One request each; also the floor, and recomputing the prompt."""
        found: Cells = {}
        for name, policy in POLICIES.items():
            for tier, engine in engines.items():
                found[f"{name}.{tier}"] = self._cell(f"{name}.{tier}", engine, policy, tier)
        for name, cached in (("floor", True), ("recompute", False)):
            found[name] = self._bare(name, cached)
        return found

    def _cell(self, cell: str, engine: hf.Engine, policy: Policy, tier: str) -> Callable[[], None]:
        samples = self.samples[cell] = Samples()

        def request() -> None:
            i = len(samples.ms) % len(self.asked)
            out = engine.generate(
                self.asked[i], max_new_tokens=1, policy=policy, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            done = engine.last_request
            assert done is not None and done.hit_tokens == DOCUMENT_TOKENS, done
            assert set(done.rows_by_tier) == {tier}, f"{cell}: rows from {done.rows_by_tier}"
            self._compare(cell.partition(".")[0], i, out.logits[0][0])
            samples.ms.append(done.ttft_ms)
            samples.moved = sum(done.bytes_by_tier.values())
            samples.rows_share = done.chosen_rows_share

        return request

    def _compare(self, policy: str, i: int, logits: torch.Tensor) -> None:
        first = self._logits.setdefault((policy, i), logits)
        assert torch.equal(first, logits), f"{policy}: the tiers disagree on question {i}"

    def _bare(self, name: str, cached: bool) -> Callable[[], None]:
        """The model alone, to its first logits: with the document in a cache, or without."""
        samples = self.samples[name] = Samples()
        caches: dict[int, Any] = {}

        @torch.no_grad()
        def forward() -> None:
            i = len(samples.ms) % len(self.asked)
            ids, n = self.asked[i], DOCUMENT_TOKENS if cached else 0
            if cached and i not in caches:
                caches[i] = self.model(ids[:, :n], use_cache=True)[CACHE]
            begin = time.perf_counter()
            self.model(ids[:, n:], **{CACHE: caches.get(i)}, use_cache=True, logits_to_keep=1)
            samples.ms.append((time.perf_counter() - begin) * 1e3)
            if cached:
                caches[i].crop(-(ids.shape[1] - n))

        return forward


def engine_rows(options: Options, checkpoint: str = "agreeing") -> list[Row]:
    answers = Answers(checkpoint, 2 if options.quick else 6)
    folder = options.folder / "engine"
    n_bytes = answers.store(folder)
    geometry = hf_models.geometry_of(answers.model.config, answers.model.dtype)
    with opened(folder, geometry, impress.namespace_of(answers.model), n_bytes) as stores:
        engines = {
            tier: hf.attach(answers.model, store, store_new=False) for tier, store in stores.items()
        }
        answers.warm(engines)
        cells = answers.cells(engines)
        rotated(cells, 1, options.seed)
        for samples in answers.samples.values():
            samples.ms.clear()
        rotated(cells, 6 if options.quick else 48, options.seed)
    whole = n_bytes // len(answers.documents)
    return [_engine_row(cell, samples, whole) for cell, samples in answers.samples.items()]


def _engine_row(cell: str, samples: Samples, whole: int) -> Row:
    what, _, tier = cell.partition(".")
    ms = spread(samples.ms)
    read = {"rows": "", "moved": ""}
    if tier:
        share = f"{samples.moved / whole:.0%}"
        read = {"rows": f"{samples.rows_share:.0%}", "moved": share}
    return {
        "figure": cell, "request": what, "from": SHOWN.get(tier, ""), **read,
        "TTFT ms": ms["median"], "least": ms["min"], "most": ms["max"], "n": len(samples.ms),
    }  # fmt: skip


# ---- the run -----------------------------------------------------------------------------------


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    answered = engine_rows(options)
    shown = [{k: v for k, v in row.items() if k != "figure"} for row in answered]
    print_rows(f"TTFT of a hit of {DOCUMENT_TOKENS:,} tokens, lookup model in Transformers", shown)
    read = session_rows(options)
    shown = [{k: v for k, v in row.items() if k != "figure"} for row in read]
    print_rows("Bare sessions, 32 heads x 128, float16", shown)
    figures = {f"{row['figure']}.ttft_ms": row["TTFT ms"] for row in answered}
    for row in read:
        figures[f"{row['figure']}.gbps"] = row["GB/s"]
        if row["ms"] != "":
            figures[f"{row['figure']}.prefix_gbps"] = row["prefix GB/s"]
    return figures, [*answered, *read]


_MEANING: Final[dict[str, Any]] = {
    "hbm": "emulated in host memory: no GPU takes part in any figure",
    "ttft_ms": "from generate() to the first token's logits; median of interleaved requests",
    "gbps": "bytes that moved (probe records and gaps included) / seconds of the whole session, "
    "selection included; every piece's checksum verified, from memory too",
    "prefix_gbps": "bytes of the whole prefix / the same seconds: what loading all would need",
    "floor.ttft_ms": "the model alone, the prefix in its cache",
    "floor.fio.gbps": "the segment file, sequential 1 MiB reads, O_DIRECT",
    "floor.memcpy.gbps": "a prefix's bytes copied by 8 threads",
}


def main() -> int:
    return run(
        "A hit from HBM (emulated), DRAM and SSD.", experiment,
        lambda quick: "40 s" if quick else "4 minutes", definitions=_MEANING,
        torch_threads=torch.get_num_threads(), hbm_emulated=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
