"""Traces of requests: bad lines are named, and the replay finds what a store would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import put_prompt
from test_promote import ask

import impress
from experiments import hashpool, trace
from experiments.common import Unable
from experiments.harness import main
from experiments.trace_file import Request, Trace, load, synthetic
from experiments.trace_replay import Replay
from impress.lineage.hashpool import HashPool
from impress.policy import Exact

Open = Callable[..., impress.PrefixStore]

POLICIES = ("importance", "lru", "lfu", "prefix-lru")


def line(ms: int, *blocks: Any, **other: Any) -> str:
    said = {"timestamp": ms, "input_length": 512 * len(blocks), "output_length": 1}
    return json.dumps({**said, "hash_ids": list(blocks), **other})


BAD = {
    '{"timestamp": 3,': "does not parse: Expecting",
    "": "does not parse: Expecting",
    "[" * 100_000: "does not parse: .*decoding a JSON array",
    "[1, 2]": "does not parse: no JSON object",
    '{"timestamp": 30, "input_length": 5, "hash_ids": [1]}': "'output_length' is missing",
    line(30, 1, input_length=-5): "input_length -5 is no whole number",
    line(30, 1, timestamp=True): "timestamp True is no whole number",
    line(30, 1, hash_ids=7): "hash_ids is no list",
    line(30, 1, None, 3): r"has holes: hash_ids\[1\] is None",
    line(30, 1, 1 << 31): r"has holes: hash_ids\[1\] is 2147483648",
    line(30, 1, 2, input_length=1025): "has holes: 2 hash_ids for 1025 tokens, which are 3 blocks",
    line(30, 1, 7, 1): r"has holes: hash_ids\[2\] is 1 again, a prefix of itself",
    line(30): "has holes: 0 hash_ids for 0 tokens",
    line(19, 1): "runs back in time: 19 ms after 20",
}


@pytest.mark.parametrize("bad", BAD, ids=BAD.values())
def test_a_bad_line_is_named_and_the_rest_goes_on(tmp_path: Path, bad: str) -> None:
    path, told = tmp_path / "trace.jsonl", list[str]()
    path.write_text("\n".join([line(10, 1), line(20, 1, 2), bad, line(20, 1, 3)]) + "\n")
    found = load(path, "mine", strict=False, tell=told.append)
    assert [r.blocks.tolist() for r in found.requests] == [[1], [1, 2], [1, 3]]
    (text,) = told
    assert "trace.jsonl line 3: " in text and text.endswith("; left out")
    with pytest.raises(Unable, match=f"trace.jsonl line 3: .*{BAD[bad]}"):
        load(path, "mine", strict=True, tell=told.append)
    assert found.n_bad == 1 and len(told) == 1


def test_what_is_no_trace_at_all_is_one_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\x80\n" * 50)
    told: list[str] = []
    with pytest.raises(Unable, match="no line of it is a request"):
        load(path, "mine", strict=False, tell=told.append)
    assert len(told) == 11 and "50 lines left out" in told[-1]
    assert trace.run(["--quick", "--dir", str(tmp_path), "--trace", str(tmp_path / "not")]) == 2
    assert trace.run(["--dir", str(tmp_path), "--strict", "--trace", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "No such file" in told[0] and "line 1: does not parse" in told[1]


def test_what_a_bad_line_says_is_told_as_it_stands(tmp_path: Path, capsys: Any) -> None:
    """A stray "[/x]" in it was taken for markup: a traceback, though the rest was to go on."""
    path = tmp_path / "of [b]others.jsonl"
    bad = [line(2, 1, timestamp="[/x] :smile:"), line(2, 1, timestamp="y" * 100_000)]
    path.write_text("\n".join([line(1, 1, 2), *bad, line(3, 1, 3)]))
    args = ["--quick", "--cells", "0", "--dir", str(tmp_path), "--trace", str(path)]
    assert trace.run(args) == 0
    said = "".join(capsys.readouterr().out.split())  # where lines end depends on the path
    for told in (
        "line 2: does not parse: timestamp '[/x] :smile:' is no whole number",
        f"line 3: does not parse: timestamp '{'y' * 59}… is no whole number",
        "of [b]others.jsonl: blocks found",
    ):
        assert "".join(told.split()) in said


def made_up(tmp_path: Path, n: int, seed: int = 1) -> Trace:
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(synthetic(n, seed)))
    return load(path, "synthetic", strict=True, tell=print)


def found_without_end(requests: list[Request]) -> list[int]:
    """The model: a block is found if it was ever asked for, and so were all before it."""
    seen: set[int] = set()
    found = []
    for request in requests:
        blocks = request.blocks.tolist()
        found.append(next((i for i, b in enumerate(blocks) if b not in seen), len(blocks)))
        seen.update(blocks)
    return found


def test_a_made_up_trace_comes_again_in_the_format_and_with_prefixes(tmp_path: Path) -> None:
    one, other = made_up(tmp_path, 300), made_up(tmp_path, 300, seed=2)
    assert one.digest == made_up(tmp_path, 300).digest != other.digest
    before: dict[int, int] = {}  # a number stands for all the blocks before it
    for request in one.requests:
        blocks = request.blocks.tolist()
        for above, block in zip([-1, *blocks], blocks, strict=False):
            assert before.setdefault(block, above) == above
    assert sum(found_without_end(one.requests)) > 500


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_keeps_the_accounts_of_a_store(tmp_path: Path, policy: str) -> None:
    requests = made_up(tmp_path, 400).requests
    endless = found_without_end(requests)
    replay = Replay(policy, None, {})
    assert [replay.serve(request) for request in requests] == endless
    replay.check()
    small = Replay(policy, 300, {"hbm": 20, "dram": 60})
    found = []
    for i, request in enumerate(requests):
        found.append(small.serve(request))
        if i % 50 == 0:
            small.check()
    small.check()
    tally = small.tally
    assert tally.evicted and sum(tally.found.values()) == sum(found)
    assert all(tally.found.values())
    assert all(few <= many for few, many in zip(found, endless, strict=True))
    assert 0 < sum(found) < sum(endless)


def test_a_request_larger_than_home_is_refused_and_the_rest_goes_on() -> None:
    replay = Replay("lru", 3, {})
    huge, small = (Request(0, 0, 0, np.arange(n, dtype=np.int32)) for n in (5, 2))
    assert [replay.serve(one) for one in (huge, small, huge, small)] == [0, 0, 2, 2]
    assert replay.tally.refused == 2
    replay.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_replay_finds_what_a_store_finds_where_the_store_has_it(
    open_store: Open, tmp_path: Path, policy: str
) -> None:
    """The same requests through a real store, whose blocks have 16 tokens."""
    requests = [r for r in made_up(tmp_path, 60).requests if len(r.blocks) < 20][:25]
    geometry, n_chunks = impress.Geometry(1, 2, 2, 32, "float32"), 16
    chunk = 2 * 16 * 2 * 32 * 4
    store = open_store(
        geometry, window=16, eviction=policy, io_threads=1, hbm_bytes=n_chunks * chunk,
        hbm_device="cpu", dram_bytes=-(-n_chunks * chunk * 16 // 15) + 4096,
    )  # fmt: skip
    replay = Replay(policy, None, {"hbm": n_chunks, "dram": n_chunks})
    for request in requests:
        tokens = np.repeat(request.blocks, 16)
        n_found = store.lookup(tokens) // 16
        if n_found:
            ask(store, tokens, Exact())
        assert replay.serve(request) == n_found
        if n_found < len(request.blocks):
            put_prompt(store, tokens).wait(60)
    replay.check()
    assert store.stats()["chunks_from"] == replay.tally.found
    assert all(replay.tally.found.values()) and all(store.stats()["evictions"].values())


def test_a_token_without_bytes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(trace.EXPERIMENT, ["--quick", "--token-bytes", "-4", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --token-bytes must be at least 1, got -4\n"


def test_bytes_of_another_model_are_measured_again(tmp_path: Path) -> None:
    """`--resume --token-bytes 1` said 1 in its report, over figures counted at 131,072."""
    file, report = tmp_path / "trace.jsonl", tmp_path / "trace.json"
    file.write_text("".join(f"{line}\n" for line in synthetic(30, 1)))
    args = ["--quick", "--trace", str(file), "--cells", "0", "--dir", str(tmp_path)]
    found = []
    for n_bytes in ("1024", "1"):
        given = ["--token-bytes", n_bytes, "--json", str(report), "--resume"]
        assert main(trace.EXPERIMENT, [*args, *given]) == 0
        (row,) = json.loads(report.read_text())["rows"]
        found.append(row["computed_tib"])
    assert found[0] == 1024 * found[1] > 0


# ---- the hash-table pool's experiment ------------------------------------------------------


def test_a_share_of_the_prompts_comes_again() -> None:
    fresh, again = hashpool.prompts(0.0, 200, 1), hashpool.prompts(1.0, 200, 1)
    assert len({tuple(p) for p in fresh}) == 200
    assert len({tuple(p) for p in again}) <= hashpool.N_FREQUENT
    assert {len(p) for p in (*fresh, *again)} == {hashpool.PROMPT_TOKENS}
    assert hashpool.linear_r2({0.1: 0.2, 0.5: 1.0, 1.0: 2.0}) == pytest.approx(1)


def test_found_blocks_give_the_words_that_computing_gives() -> None:
    model, pool = hashpool._model(), HashPool[hashpool.Block](100)
    tokens = hashpool.prompts(0.0, 1, 5)[0]
    other = tokens.copy()
    other[9] ^= 1  # in its third block
    for prompt, n_found in ((tokens, 0), (tokens, 12), (other, 8), (other, 12)):
        want, _ = hashpool._computed(model, prompt)
        got, found = hashpool._pooled(model, pool, prompt)
        assert found == n_found
        assert np.allclose(got, want, rtol=1e-4, atol=1e-4)
        pool.check()
