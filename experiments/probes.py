"""How well each probe codec knows which rows matter, and what its records cost.

On the lookup models: recall of the true top tenth of a layer's rows (by the column sums of all
heads on the stored keys, queries of the exact forward; mean over layers and questions), accuracy
when each layer loads the top 2, 5, 10 and 25 % by the codec (heads3: the paper's vote, no gate),
and what `Quality` loads and how many right answers turn wrong with it (not points lost: those that
turn right are not deducted). "keys" ranks by the stored keys: the most a sketch can reach.
The pca codecs are fitted to documents of another split.

For 16 or more heads, and for heads of 64, there is no trained model here: recall only, on SYNTHETIC
keys with the spectrum of the lookup model's, and queries that look at some of them; there the pca
codecs are fitted to every second one of the keys they score, which flatters them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import impress
from experiments.common import Options, Row, console, print_rows, run
from experiments.selection import CHECKPOINTS, N_TOKENS, asked, choice_of, digest_of, model_of
from experiments.selection_forward import Prefix, prefill, walk
from impress.demo.lookup.tasks import Question, document
from impress.engines.hf_models import geometry_of
from impress.policy import Paper, Quality
from impress.selection.choices import n_kept, paper_choice, top_choice, top_k
from impress.selection.identify import Asked, select
from impress.selection.probes import PROBE_HEADS, codec_of, fitted
from impress.selection.quant import Floats
from impress.selection.scores import column_sums, key_scores, true_missing_mass

CODECS: Final = (
    "heads3-v1", "int4-v2", "int3-v2", "int2-v2", "int1-v1", "pca37-v1", "pca25-v1", "pca12-v1",
)  # fmt: skip
KEYS: Final = "keys"
KEEPS: Final = (0.02, 0.05, 0.10, 0.25)
TOP: Final = 0.10
BOUNDS: Final = (0.05, 0.1)
N_DOCUMENTS: Final = {False: 12, True: 1}  # by `quick`
FIT_DOCUMENTS: Final = 4  # of the split `calibration`: 4,096 tokens
ENOUGH: Final = 0.85  # recall below which a codec is not called best
WIDE: Final = ((16, 16, 32), (16, 16, 64), (32, 32, 64), (32, 8, 64))  # heads, KV heads, head_dim
N_WIDE: Final = 2048


@dataclass(slots=True)
class Counted:
    """What came out under one codec. `right` by share kept; the others by bound of Quality."""

    recalls: list[float] = field(default_factory=list)
    right: dict[float, list[bool]] = field(default_factory=lambda: {keep: [] for keep in KEEPS})
    to_wrong: dict[float, list[bool]] = field(default_factory=lambda: {b: [] for b in BOUNDS})
    shares: dict[float, list[float]] = field(default_factory=lambda: {b: [] for b in BOUNDS})
    missing: dict[float, list[float]] = field(default_factory=lambda: {b: [] for b in BOUNDS})


class Sketches:
    """Records of a prefix in every codec, layer by layer; and the stored keys."""

    def __init__(
        self, geometry: impress.Geometry, keys: list[Tensor], fits: dict[str, list[bytes]]
    ) -> None:
        self.geometry, self.keys, self._fits = geometry, keys, fits
        self._records = {
            (name, i): codec_of(name).encode(layer, geometry, self._params(name, i))
            for name in CODECS
            for i, layer in enumerate(keys)
        }

    def _params(self, name: str, layer: int) -> bytes | None:
        return self._fits[name][layer] if name in self._fits else None

    def asked(self, name: str, layer: int, query: Tensor, scaling: float, lse: Tensor) -> Asked:
        """What an identifier is told."""
        return Asked(
            layer, self.keys[layer].shape[1], self.geometry, 64, query, scaling, lse,
            codec_of(name), self._records[name, layer], self._params(name, layer),
        )  # fmt: skip

    def columns(self, name: str, layer: int, query: Tensor, scaling: float, lse: Tensor) -> Floats:
        """Column sums by a codec, or by the keys in float32."""
        if name == KEYS:
            keys = self.keys[layer].float()
            per_kv = len(query) // len(keys)
            return column_sums(lambda r: key_scores(r, keys, scaling, per_kv), query.float(), lse)
        a = self.asked(name, layer, query, scaling, lse)
        codec = codec_of(name)

        def score(rows: Tensor) -> Iterator[Any]:
            return codec.score(a.records, rows, self.geometry, scaling, a.params)

        return column_sums(score, query, lse[:PROBE_HEADS] if name == "heads3-v1" else lse)


def picked(name: str, columns: Floats, n_rows: int, keep: float) -> npt.NDArray[np.int64]:
    """The rows a codec would keep, ascending."""
    if name == "heads3-v1":
        chosen = paper_choice(columns, n_rows, Paper(keep, gate=False), lambda: columns)
    else:
        chosen = top_choice(columns, n_rows, keep)
    n = columns.shape[1]
    return np.arange(n) if chosen.positions is None else chosen.positions


def recall(truth: Floats, name: str, columns: Floats, n_rows: int) -> float:
    """Share of the true top tenth that the codec's top tenth holds."""
    wanted = top_k(truth.sum(axis=0), n_kept(TOP, truth.shape[1]))
    return float(wanted[picked(name, columns, n_rows, TOP)].mean())


# ---- the lookup models -------------------------------------------------------------------------


def fits_of(model: Any, geometry: impress.Geometry) -> dict[str, list[bytes]]:
    """Parameters of the fitted codecs, by layer."""
    docs = [document("calibration", i, N_TOKENS) for i in range(FIT_DOCUMENTS)]
    prefixes = [prefill(model, doc.tokens)[0] for doc in docs]
    fits = {}
    for name in CODECS:
        codec = fitted(codec_of(name))
        if codec is not None:
            layers = zip(*(prefix.keys for prefix in prefixes), strict=True)
            fits[name] = [codec.fit(torch.cat(layer, dim=1), geometry) for layer in layers]
    return fits


def ask(
    model: Any, prefix: Prefix, sketches: Sketches, q: Question, found: dict[str, Counted]
) -> None:
    """One question, exact and under every codec and share."""
    n, seen = prefix.n_tokens, []

    def exactly(i: int, query: Tensor, scaling: float, lse: Tensor) -> Any:
        seen.append((i, query, scaling, lse))
        return prefix.keys[i], prefix.values[i], None

    exact = choice_of(walk(model, n, q.tokens, exactly), q)
    for layer in seen:
        truth = sketches.columns(KEYS, *layer)
        for name in CODECS:
            found[name].recalls.append(
                recall(truth, name, sketches.columns(name, *layer), len(q.tokens))
            )
    for name, counted in found.items():
        for keep in KEEPS:

            def top(*layer: Any, name: str = name, keep: float = keep) -> Any:
                columns = sketches.columns(name, *layer)
                return _taken(prefix, layer[0], picked(name, columns, len(q.tokens), keep))

            counted.right[keep].append(choice_of(walk(model, n, q.tokens, top), q) == q.answer)
        if name not in (KEYS, "heads3-v1"):
            for bound in BOUNDS:
                chosen = choice_of(
                    walk(model, n, q.tokens, bounded(prefix, sketches, name, bound, counted)), q
                )
                counted.to_wrong[bound].append(exact == q.answer and chosen != q.answer)


def bounded(
    prefix: Prefix, sketches: Sketches, name: str, bound: float, counted: Counted
) -> Callable[..., Any]:
    """The rows that Quality wants by a codec; their cost and the mass they miss are noted."""

    def rows(layer: int, query: Tensor, scaling: float, lse: Tensor) -> Any:
        a = sketches.asked(name, layer, query, scaling, lse)
        chosen = select(Quality(bound, probe=name), a)
        whole = prefix.n_tokens * a.row_bytes
        n_bytes = chosen.n_rows(prefix.n_tokens) * a.row_bytes + a.probe_bytes
        counted.shares[bound].append(n_bytes / whole)
        if chosen.positions is None:
            counted.missing[bound].append(0.0)
            return prefix.keys[layer], prefix.values[layer], None
        left = true_missing_mass(query, sketches.keys[layer], scaling, lse, chosen.positions)
        counted.missing[bound].append(float(left.mean()))
        return _taken(prefix, layer, chosen.positions)

    return rows


def _taken(prefix: Prefix, layer: int, positions: npt.NDArray[np.int64]) -> Any:
    at = torch.from_numpy(np.array(positions))
    return prefix.keys[layer][:, at], prefix.values[layer][:, at], at


def looked_up(checkpoint: str, n_documents: int) -> list[Row]:
    """A row for each codec on one checkpoint."""
    model = model_of(checkpoint)
    geometry = geometry_of(model.config, model.dtype)
    fits = fits_of(model, geometry)
    found = {name: Counted() for name in (*CODECS, KEYS)}
    for index in range(n_documents):
        doc = document("test", index, N_TOKENS)
        prefix, _ = prefill(model, doc.tokens)
        sketches = Sketches(geometry, prefix.keys, fits)
        for q in asked(doc):
            ask(model, prefix, sketches, q, found)
    return [_row(checkpoint, name, geometry, counted) for name, counted in found.items()]


def _share(name: str, geometry: impress.Geometry) -> float:
    """Probe bytes as a share of the rows they stand for, K and V."""
    row_bytes = geometry.k_row_bytes + geometry.v_row_bytes
    n_bytes = geometry.k_row_bytes if name == KEYS else codec_of(name).probe_bytes(geometry)
    return n_bytes / row_bytes


def _row(checkpoint: str, name: str, geometry: impress.Geometry, counted: Counted) -> Row:
    row: Row = {
        "model": checkpoint, "codec": name, "probe share": _share(name, geometry),
        "recall": float(np.mean(counted.recalls)) if counted.recalls else 1.0,
    }  # fmt: skip
    for keep, right in counted.right.items():
        row[f"right at {keep:.0%}"] = float(np.mean(right))
    for bound in BOUNDS:
        flips = counted.to_wrong[bound]
        some = bool(flips)
        row[f"to wrong at {bound:g}"] = 100 * float(np.mean(flips)) if some else ""
        row[f"bytes at {bound:g}"] = float(np.mean(counted.shares[bound])) if some else ""
        row[f"missing at {bound:g}"] = float(np.mean(counted.missing[bound])) if some else ""
    return row


# ---- wider shapes ------------------------------------------------------------------------------


def spectrum_of(checkpoint: str) -> Floats:
    """Eigenvalues of a lookup model's keys of all heads in layer 1, largest first."""
    model = model_of(checkpoint)
    prefix, _ = prefill(model, document("calibration", 0, N_TOKENS).tokens)
    keys = prefix.keys[1].float().transpose(0, 1).reshape(N_TOKENS, -1).numpy()
    values = np.linalg.eigvalsh(np.cov(keys.T))[::-1].astype(np.float32)
    return np.maximum(values, 0)


def synthetic(shape: tuple[int, int, int], spectrum: Floats, seed: int) -> tuple[Tensor, Tensor]:
    """Keys [kv heads, n, dim] of that spectrum, stretched to as many dimensions, in float16; and
    queries whose heads each look at eight tokens of their own and eight that all share."""
    n_heads, n_kv, dim = shape
    rng = np.random.default_rng(seed)
    dims = n_kv * dim
    at = np.linspace(0, len(spectrum) - 1, dims)
    spread = np.sqrt(np.interp(at, np.arange(len(spectrum)), spectrum))
    axes = np.linalg.qr(rng.normal(size=(dims, dims)))[0]
    keys = ((rng.normal(size=(N_WIDE, dims)) * spread) @ axes).reshape(N_WIDE, n_kv, dim)
    shared = rng.choice(N_WIDE, 8, replace=False)
    query = np.empty((n_heads, 16, dim))
    for head in range(n_heads):
        seen = np.concatenate([shared, rng.choice(N_WIDE, 8, replace=False)])
        of_head = keys[:, head * n_kv // n_heads]
        wanted = of_head[rng.choice(seen, 16)]
        noise = rng.normal(size=(16, dim)) * wanted.std()
        query[head] = wanted + noise
        score = query[head] @ of_head.T  # as sharp as a lookup: scores of deviation 3
        query[head] *= 3.0 / score.std()
    return (
        torch.from_numpy(keys).half().transpose(0, 1).contiguous(), torch.from_numpy(query).half()
    )  # fmt: skip


def widened(spectrum: Floats, seed: int, n_draws: int) -> list[Row]:
    """Recall by codec on each wide shape."""
    rows: list[Row] = []
    for shape in WIDE:
        geometry = impress.Geometry(1, *shape, "float16")
        recalls: dict[str, list[float]] = {name: [] for name in CODECS}
        for draw in range(n_draws):
            keys, query = synthetic(shape, spectrum, seed + draw)
            fits = {name: [c.fit(keys[:, ::2], geometry)] for name in CODECS
                    if (c := fitted(codec_of(name))) is not None}  # fmt: skip
            sketches = Sketches(geometry, [keys], fits)
            layer = (0, query, 1.0, torch.full(query.shape[:2], -30.0))
            truth = sketches.columns(KEYS, *layer)
            for name in CODECS:
                recalls[name].append(recall(truth, name, sketches.columns(name, *layer), 16))
        rows += [
            {"model": "SYNTHETIC {}/{} x {}".format(*shape), "codec": name,
             "probe share": _share(name, geometry), "recall": float(np.mean(each))}
            for name, each in recalls.items()
        ]  # fmt: skip
    return rows


# ---- the run -----------------------------------------------------------------------------------


def best_of(rows: list[Row]) -> tuple[str, float, float]:
    """Of the codecs with enough recall, the one with the most per byte: name, recall, bytes."""

    def mean(name: str, what: str) -> float:
        return float(np.mean([row[what] for row in rows if row["codec"] == name]))

    means = {name: (mean(name, "recall"), mean(name, "probe share")) for name in CODECS}
    enough = {name: m for name, m in means.items() if m[0] >= ENOUGH} or means
    name = max(enough, key=lambda name: enough[name][0] / enough[name][1])
    return (name, *means[name])


_TABLES: Final = {
    "recall of the top tenth, and accuracy at shares kept": (
        "codec", "probe share", "recall", *(f"right at {keep:.0%}" for keep in KEEPS),
    ),
    "Quality by bound: flips to wrong in points, bytes read, true missing mass": (
        "codec",
        *(f"{what} at {b:g}" for b in BOUNDS for what in ("to wrong", "bytes", "missing")),
    ),
}  # fmt: skip


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    torch.set_num_threads(1)
    trained: list[Row] = []
    for checkpoint in CHECKPOINTS:
        trained += looked_up(checkpoint, N_DOCUMENTS[options.quick])
        console.print(f"{checkpoint}: weights {digest_of(checkpoint)}")
        for title, columns in _TABLES.items():
            some = [row for row in trained if row["model"] == checkpoint]
            print_rows(f"{checkpoint}: {title}", [{c: row[c] for c in columns} for row in some])
    wide = widened(spectrum_of(CHECKPOINTS[0]), options.seed, 2 if options.quick else 8)
    print_rows("SYNTHETIC keys, heads/KV heads x head_dim", wide)
    name, best, n_bytes = best_of(trained)
    console.print(f"most recall a byte, of those with at least {ENOUGH}: {name}")
    mean = {c: float(np.mean([r["recall"] for r in trained if r["codec"] == c])) for c in CODECS}
    figures = {
        "recall_heads3": mean["heads3-v1"], "recall_int4": mean["int4-v2"], "recall_best": best,
        "bytes_best": n_bytes,
    }  # fmt: skip
    for row in (*trained, *wide):
        where = f"{row['model'].replace(' ', '_')}.{row['codec']}"
        figures |= {f"{where}.{what.replace(' ', '_')}": value for what, value in row.items()
                    if isinstance(value, float)}  # fmt: skip
    return figures, [*trained, *wide]


if __name__ == "__main__":
    sys.exit(
        run(
            "Recall and accuracy by probe codec.",
            experiment,
            lambda quick: "a minute" if quick else "10 minutes on one core",
            weights={checkpoint: digest_of(checkpoint) for checkpoint in CHECKPOINTS},
        )
    )
