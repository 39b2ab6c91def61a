"""Input that a stranger can hand over: header records, index values, configurations, arguments.

Each target takes one drawn input. Only documented outcomes are allowed: FormatError, ConfigError,
BadInput, exit status 0 to 2. Checksums are recomputed after most mutations, or the code past the
checksum test would never be reached.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st

import impress
from impress.cli.main import run
from impress.config import Config, tenant_secret
from impress.errors import BadInput, ConfigError, FormatError, StoreFailed
from impress.quality import ledgers
from impress.quality.guard import Ledger
from impress.spans.format import (
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    extents_of,
    place_of,
    split_index,
)
from impress.spans.layout import SpanLayout
from impress.spans.records import wrong_record
from impress.tree.eviction import ALL
from impress.tree.merged import MergedCatalog
from impress.types import DTYPES, WINDOWS
from impress.upkeep.rebuild import rebuild_store
from impress.usage import remembered
from impress.write.directory import Shard, read_identity
from impress.write.index import Index
from tiers.base import PAGE, Extent

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))

from make_golden import CONFIG, unpack  # found by the line above

_WORDS = struct.Struct("<HHIQQQ")  # an entry of a header's section table
_FIRST_ENTRY = 216


@cache
def scene() -> Path:
    """A directory with the golden store; gone when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="impress-fuzz-")
    _keep.append(folder)
    return unpack(Path(folder.name))


_keep: list[Any] = []


@cache
def seeds() -> tuple[list[bytes], list[bytes]]:
    """Sound header records and index values, one of each per span."""
    shard = Shard(scene())
    index = Index(shard.index, create=False)
    values = dict(index.spans())
    index.close()
    headers = []
    for span, value in values.items():
        segment, off, length = decode_index(span, split_index(value)[0]).meta
        with (shard.segments / f"{segment:08d}.seg").open("rb") as file:
            file.seek(off)
            headers.append(file.read(length))
    return headers, list(values.values())


# ---- mutations -----------------------------------------------------------------------------------

_BORDERS = [
    0, 1, 2, 3, 15, 16, 63, 64, 255, 4096, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, originals: Callable[[], list[bytes]], most: int) -> bytes:
    """One of the originals with a few fields overwritten, perhaps cut or lengthened."""
    raw = bytearray(draw(st.sampled_from(originals())))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, min(len(raw), most) - 1))
        width = draw(st.sampled_from([1, 2, 4, 8]))
        value = draw(st.one_of(st.sampled_from(_BORDERS), st.integers(0, 2**64 - 1)))
        new = (value & (1 << 8 * width) - 1).to_bytes(width, "little")[: len(raw) - at]
        raw[at : at + len(new)] = new
    cut = draw(st.integers(-64, 64))
    if draw(st.integers(0, 9)) == 0:
        raw = raw[:cut] if cut < 0 else raw + bytes(cut)
    return bytes(raw)


def sealed_header(raw: bytes) -> bytes:
    """`raw` with the checksums of its page and sections recomputed, as far as they can be found."""
    page = bytearray(raw[:PAGE].ljust(PAGE, b"\0"))
    (n_sections,) = struct.unpack_from("<I", page, 200)
    for i in range(min(n_sections, 64)):
        at = _FIRST_ENTRY + i * _WORDS.size
        kind, codec, count, off, length, _ = _WORDS.unpack_from(page, at)
        digest = xxhash.xxh3_64_intdigest(raw[off : off + min(length, len(raw))])
        _WORDS.pack_into(page, at, kind, codec, count, off, length, digest)
    page[-8:] = xxhash.xxh3_64_digest(bytes(page[:-8]))[::-1]
    return bytes(page) + raw[PAGE:]


def sealed_value(raw: bytes) -> bytes:
    """`raw` with its checksum recomputed."""
    return raw[:-8] + xxhash.xxh3_64_digest(raw[:-8])


def sealed_little(raw: bytes) -> bytes:
    """The same for values whose checksum is a little-endian number."""
    return raw[:-8] + xxhash.xxh3_64_digest(raw[:-8])[::-1]


@cache
def histories() -> list[bytes]:
    """Sound values: one for a span nobody asked for, one for a span that was asked for."""
    empty = remembered.Remembered.empty(2, 3, 16)
    used = empty.copy()
    used.halves[:] = np.linspace(0, 1, used.halves.size).reshape(used.halves.shape)
    used.seen[:], used.uses[:], used.ticks[:] = 1, 2.5, 7
    return [remembered.encode(empty), remembered.encode(used)]


@cache
def sound_ledgers() -> list[bytes]:
    """A fresh ledger, and one that has weighed answers."""
    fresh, old = Ledger(0.05, 20), Ledger(0.05, 20, "trusted", 900, 50)
    old.recent.extend([False] * 20)
    return [ledgers.encode(ledgers.Entry(name, one)) for name, one in (("a", fresh), ("é", old))]


# ---- targets -------------------------------------------------------------------------------------


def taken(refusal: type[impress.ImpressError], call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call on a stranger's input; None if it refuses that input, in one line."""
    try:
        return call(*args)
    except refusal as err:
        assert str(err).strip() and len(str(err).splitlines()) == 1, repr(err)
        return None


def header(drawn: tuple[bytes, bool]) -> None:
    """A header record decodes to something that can be laid out and judged, or is a FormatError."""
    raw, seal = drawn
    raw = sealed_header(raw) if seal else raw
    found = taken(FormatError, decode_header, raw, Extent(0, 0, PAGE))
    if found is None:
        return
    record = found.record
    SpanLayout.of(
        found.geometry, record.window, record.n_windows,
        [probe.window_bytes(record.window) for probe in found.probes],
    )  # fmt: skip
    wrong_record(record, found.geometry, record.window)
    assert decode_header(encode_header(found), record.meta).record == record


def segment(drawn: tuple[bytes, int]) -> None:
    """A segment with a strange header in it is scanned to the end; the other headers are found,
    unless the strange one claims their bytes."""
    raw, which = drawn
    path = scene()
    value = seeds()[1][which % len(seeds()[1])]
    meta = decode_index(1, split_index(value)[0]).meta
    file = Shard(path).segments / f"{meta.segment:08d}.seg"
    before = file.read_bytes()
    after = bytearray(before)
    strange = sealed_header(raw)[: meta.length]
    after[meta.off : meta.off + len(strange)] = strange
    file.write_bytes(after)
    try:
        # StoreFailed: a rebuild takes a read past the file's end for a failing disk.
        found = taken(StoreFailed, lambda: rebuild_store(path, dry_run=True))
        if found is not None:
            assert found.spans + found.superseded >= len(seeds()[1]) - 1
            assert found.torn + found.damaged + found.foreign <= 1
    finally:
        file.write_bytes(before)


def index_values(drawn: list[tuple[int, bytes, bool]]) -> None:
    """Index values make a sound tree, whatever they are; those that do not decode are left out."""
    values = []
    for span, raw, seal in drawn:
        value = sealed_value(raw) if seal else raw
        values.append((span, value))
        split = taken(FormatError, split_index, value, CONFIG.window)
        if split is None:
            continue
        kept, labels = split
        place_of(kept), extents_of(kept)
        record = decode_index(span, kept, labels)
        assert decode_index(span, *split_index(encode_index(record))) == record
    catalog = MergedCatalog(CONFIG.window, ALL)
    if taken(FormatError, catalog.load, iter(values), {}) is None:
        return
    catalog.check()
    for record in catalog.records():
        catalog.lookup(record.root, b"")


def history(drawn: tuple[bytes, bool]) -> None:
    """A span's history decodes to arrays that can be encoded again, or is a FormatError."""
    raw, seal = drawn
    value = sealed_little(raw) if seal else raw
    remembered.head_of(value)
    known = taken(FormatError, remembered.decode, value)
    if known is None:
        return
    with np.errstate(all="ignore"):
        again = remembered.decode(remembered.encode(known))
        assert again.halves.tobytes() == known.halves.tobytes()


def ledger(drawn: tuple[bytes, bool]) -> None:
    """A ledger decodes to one that can be shown and can go on deciding, or to None."""
    raw, seal = drawn
    entry = ledgers.decode(sealed_little(raw) if seal else raw)
    if entry is not None:
        ledgers.shown(bytes(40), entry)
        entry.ledger.decide(0.01, b"key")


def identity(drawn: bytes) -> None:
    """impress.json reads as an identity, or is a FormatError."""
    folder = scene().parent / "identity"
    folder.mkdir(exist_ok=True)
    (folder / "impress.json").write_bytes(drawn)
    found = taken(FormatError, read_identity, folder)
    if found is not None:
        assert isinstance(found.geometry, impress.Geometry)
        assert found.window in WINDOWS and len(found.uuid) == 16


def config(drawn: bytes) -> None:
    """A TOML file reads as a configuration, or is a ConfigError in one line."""
    file = scene().parent / "config.toml"
    file.write_bytes(drawn)
    taken(ConfigError, lambda: tenant_secret(Config.load(file)))


def arguments(drawn: tuple[list[str], bytes]) -> None:
    """The command line ends with 0, 1 or 2, and says why on stderr."""
    args, prompt = drawn
    here, was, env = Path.cwd(), sys.argv, os.environ.get("IMPRESS_STORE")
    out, err = io.StringIO(), io.StringIO()
    os.environ["IMPRESS_STORE"] = str(scene())
    os.chdir(scene().parent)
    Path("prompt").write_bytes(prompt)
    sys.argv = ["impress", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
    except SystemExit as end:
        status = end.code or 0
        assert status in (0, 1, 2), status
        if status == 2 and args:  # said once, on the last line
            said = err.getvalue().splitlines()
            assert said and [line for line in said if line.startswith("impress: ")] == said[-1:]
    finally:
        os.chdir(here)
        sys.argv = was
        os.environ.pop("IMPRESS_STORE")
        if env is not None:
            os.environ["IMPRESS_STORE"] = env


def tokens(drawn: Any) -> None:
    """Token ids are accepted, or are BadInput."""
    from impress.blockhash import as_tokens, labels_of

    taken(BadInput, lambda: labels_of(as_tokens(drawn), 16))


# ---- what is drawn -------------------------------------------------------------------------------

_TEXT = st.text(max_size=12)
_VALUES = st.recursive(
    st.one_of(
        st.booleans(), st.integers(-(2**70), 2**70), st.floats(), _TEXT, st.sampled_from(_BORDERS)
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return (
            '"' + "".join(f"\\U{ord(c):08x}" for c in value if not 0xD800 <= ord(c) < 0xE000) + '"'
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def _table(values: dict[str, Any]) -> bytes:
    return "\n".join(f"{_toml(key)} = {_toml(value)}" for key, value in values.items()).encode()


_KEYS = st.sampled_from([*Config.model_fields, "windows", "dram", ""]) | _TEXT
_CONFIGS = st.dictionaries(_KEYS, _VALUES, max_size=4).map(_table) | st.binary(max_size=80)
_SIZES = st.integers(1, 2**16 - 1)
_SOUND = st.fixed_dictionaries(
    {
        "format": st.just(1), "uuid": st.binary(min_size=16, max_size=16).map(bytes.hex),
        "window": st.sampled_from(WINDOWS),
        "geometry": st.fixed_dictionaries(
            {
                "n_layers": _SIZES, "n_heads": st.sampled_from([8, 32]),
                "n_kv_heads": st.sampled_from([1, 4, 8]), "head_dim": _SIZES,
                "dtype": st.sampled_from([*DTYPES]), "v_head_dim": st.none() | _SIZES,
            }
        ),
    }
)  # fmt: skip


@st.composite
def _identities(draw: st.DrawFn) -> bytes:
    """A sound identity in which up to two fields are dropped, added or have another value."""
    whole = draw(_SOUND)
    for _ in range(draw(st.integers(0, 2))):
        geometry = whole.get("geometry")
        within = draw(st.booleans()) and isinstance(geometry, dict)
        place: dict[str, Any] = geometry if within else whole
        key = draw(st.sampled_from([*place, "", "more"]))
        if draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = draw(_VALUES)
    return json.dumps(whole).encode()


_COMMANDS = [
    "inspect", "explain", "verify", "rebuild", "purge", "repack", "doctor", "run", "vllm-config",
]  # fmt: skip
_OPTIONS = [
    "--store", "--tree", "--prefix", "--metrics", "--json", "--query", "--model", "--policy",
    "--dry-run", "--namespace", "--tenant", "--no-measure", "--help", "-h", "--version",
    "--max-missing-mass", "--max-new-tokens", "--tenant-secret-file", "--disk-gib", "--dram-mib",
    "--floor", "--keep", "prompt", "golden_v1", "/nonexistent", "nothing", "-1", "0", "70000",
    "1e309", "nan", "golden", "another", "alice", "paper", "quality", "exact", "--", "-", "", "=",
    "\0", "\n", "é",
]  # fmt: skip
_PROMPTS = st.binary(max_size=40) | st.lists(_VALUES, max_size=6).map(lambda v: repr(v).encode())
_PROMPTS |= st.sampled_from(
    [b"1 2 3", b"[1, 2]", b"[" * 5000, b"\x93NUMPY\x01\x00v\x00{", b"9" * 5000]
)


@st.composite
def _lines(draw: st.DrawFn) -> list[str]:
    """A command line that writes nothing outside its scene and measures no disk."""
    command = draw(st.sampled_from(_COMMANDS))
    rest = draw(st.lists(st.sampled_from(_OPTIONS) | _TEXT, max_size=5))
    if command == "doctor":
        rest.append("--no-measure")
    args = [command, *rest]
    if "--purge" in rest or command in ("purge", "repack"):
        args.append("--surplus")  # parsed to the end, and refused: the scene is shared
    if command == "rebuild":
        args.append("--dry-run")
    return args if draw(st.integers(0, 9)) else rest


def _lists(
    originals: Callable[[], list[bytes]],
) -> st.SearchStrategy[list[tuple[int, bytes, bool]]]:
    ids = st.integers(0, 12) | st.integers(0, 2**64 - 1)
    one = st.tuples(ids, mutated(originals, 400), st.integers(0, 4).map(bool))
    return st.lists(one, max_size=6)


def _headers() -> list[bytes]:
    return seeds()[0]


def _values() -> list[bytes]:
    return seeds()[1]


def _objects(values: list[Any]) -> Any:
    return np.array(values, dtype=object)


#: Name -> (target, what is drawn for it, how many draws in the short run).
TARGETS: dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any], int]] = {
    "header": (header, st.tuples(mutated(_headers, 480), st.integers(0, 9).map(bool)), 300),
    "sections": (header, st.tuples(mutated(_headers, 12288), st.just(True)), 150),
    "segment": (segment, st.tuples(mutated(_headers, 480), st.integers(0, 9)), 15),
    "index_values": (index_values, _lists(_values), 150),
    "history": (history, st.tuples(mutated(histories, 48), st.integers(0, 4).map(bool)), 150),
    "ledger": (ledger, st.tuples(mutated(sound_ledgers, 400), st.integers(0, 4).map(bool)), 150),
    "identity": (identity, st.binary(max_size=60) | _identities(), 200),
    "config": (config, _CONFIGS, 200),
    "arguments": (arguments, st.tuples(_lines(), _PROMPTS), 60),
    "tokens": (tokens, _VALUES | st.lists(_VALUES, max_size=5).map(_objects), 150),
}  # fmt: skip
