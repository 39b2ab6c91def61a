"""Request traces in Mooncake's format: one JSON object a line, no text, blocks by number.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` in ms; `hash_ids` one number for each 512 tokens of the prompt, the last perhaps fewer.
A number stands for its block and all before it: equal ones are equal prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from experiments.common import Unable

BLOCK_TOKENS: Final = 512
#: Bad lines that are reported one by one.
_TOLD: Final = 10
#: Characters of a bad value that are shown.
_SHOWN: Final = 60
_COUNTS: Final = ("timestamp", "input_length", "output_length")


class Request(NamedTuple):
    """One line. Lengths in tokens; `blocks` int32, one number for each block of the prompt."""

    timestamp_ms: int
    n_input: int
    n_output: int
    blocks: npt.NDArray[np.int32]


class Trace(NamedTuple):
    """`source`: where it is from, to be named beside every figure. `digest`: the file's bytes'."""

    source: str
    digest: str
    requests: list[Request]
    n_bad: int


class BadLine(Exception):
    """Why a line is left out."""


def load(path: Path, source: str, *, strict: bool, tell: Callable[[str], None]) -> Trace:
    """Read a trace. A line that does not parse, runs back in time or has holes is reported by its
    number and left out; with `strict` the reading ends there.

    Raises Unable in that case, where the file cannot be read, and where no line is left.
    """
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise Unable(f"--trace {path}: {err.strerror}") from None
    requests: list[Request] = []
    n_bad = 0
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            requests.append(_request(line, requests[-1].timestamp_ms if requests else 0))
        except BadLine as why:
            if strict:
                raise Unable(
                    f"{path} line {number}: {why}; without --strict it is left out"
                ) from None
            n_bad += 1
            if n_bad <= _TOLD:
                tell(f"{path} line {number}: {why}; left out")
    if n_bad > _TOLD:
        tell(f"{path}: {n_bad} lines left out, the first {_TOLD} of them named above")
    if not requests:
        raise Unable(f"{path}: no line of it is a request in Mooncake's format")
    return Trace(source, blake2b(raw, digest_size=8).hexdigest(), requests, n_bad)


def _request(line: bytes, now_ms: int) -> Request:
    """Raises BadLine. `now_ms`: the timestamp of the line before."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as err:  # the latter: thousands of brackets
        raise BadLine(f"does not parse: {err}") from None
    if not isinstance(said, dict):
        raise BadLine("does not parse: no JSON object")
    missing = [name for name in (*_COUNTS, "hash_ids") if name not in said]
    if missing:
        raise BadLine(f"does not parse: {missing[0]!r} is missing")
    for name in _COUNTS:
        if not _is_count(said[name]):
            raise BadLine(
                f"does not parse: {name} {_short(said[name])} is no whole number from 0 on"
            )
    ids = said["hash_ids"]
    if not isinstance(ids, list):
        raise BadLine("does not parse: hash_ids is no list")
    holes = [at for at, block in enumerate(ids) if not _is_count(block) or block >= 1 << 31]
    if holes:
        raise BadLine(f"has holes: hash_ids[{holes[0]}] is {_short(ids[holes[0]])}")
    n_blocks = -(-said["input_length"] // BLOCK_TOKENS)
    if not ids or len(ids) != n_blocks:
        raise BadLine(
            f"has holes: {len(ids)} hash_ids for {said['input_length']} tokens, which are "
            f"{n_blocks} blocks"
        )
    if len(set(ids)) < n_blocks:
        twice = next(at for at, block in enumerate(ids) if block in ids[:at])
        raise BadLine(f"has holes: hash_ids[{twice}] is {ids[twice]} again, a prefix of itself")
    if said["timestamp"] < now_ms:
        raise BadLine(f"runs back in time: {said['timestamp']} ms after {now_ms}")
    blocks = np.array(ids, dtype=np.int32)
    return Request(said["timestamp"], said["input_length"], said["output_length"], blocks)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def synthetic(n: int, seed: int) -> Iterator[str]:
    """n lines of made-up conversations, in this format. Pure.

    Each begins with one of a few system prompts, and every turn repeats all that was said before.
    Turns of different conversations interleave; their number and length are geometric.
    """
    rng = np.random.default_rng(seed)
    numbers: dict[tuple[int, ...], int] = {}  # a prefix as segments' names -> its block's number
    talks: list[tuple[list[int], int]] = []  # names of blocks so far, tokens so far
    now_ms, fresh = 0, 1 << 20
    for _ in range(n):
        now_ms += int(rng.exponential(300))
        if not talks or rng.random() < 0.3:
            system = int(rng.zipf(1.5)) % 8
            names = [system * 16 + i for i in range(1 + system % 4)]
            talks.append((names, len(names) * BLOCK_TOKENS))
        at = int(rng.integers(max(0, len(talks) - 200), len(talks)))
        names, n_tokens = talks[at]
        n_tokens += int(rng.geometric(1 / 1500))
        whole = n_tokens // BLOCK_TOKENS
        names = names + list(range(fresh, fresh + whole - len(names)))
        fresh += whole
        talks[at] = (names, n_tokens)
        asked = names + (
            [fresh] if n_tokens % BLOCK_TOKENS else []
        )  # the partial block, never repeated
        fresh += 1
        line = {
            "timestamp": now_ms, "input_length": n_tokens,
            "output_length": int(rng.geometric(1 / 300)), "hash_ids": _numbered(asked, numbers),
        }  # fmt: skip
        yield json.dumps(line)


def _numbered(names: Iterable[int], numbers: dict[tuple[int, ...], int]) -> list[int]:
    """Number blocks in order of first use, one number per prefix."""
    path: tuple[int, ...] = ()
    ids: list[int] = []
    for name in names:
        path = (ids[-1] if ids else -1, name)  # the number before stands for all before
        ids.append(numbers.setdefault(path, len(numbers)))
    return ids
