"""Stores for the command line to look at, and the console script itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import forks
import numpy as np

import impress

SCRIPT = Path(sys.executable).parent / "impress"
GEOMETRY = impress.Geometry(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, dtype="float32")
CONFIG = impress.Config(segment_bytes=1 << 20, dram_bytes=1 << 20, io_threads=2)
PROMPT = list(range(1000, 1320))  # 5 windows
FORK = PROMPT[:128] + list(range(5000, 5192))  # shares 2 of its 5


def rows_of(n_tokens, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((2, n_tokens, 16), dtype=np.float32) for _ in range(2)]


def opened(path, mode="rw", **settings):
    config = CONFIG.model_copy(update=settings)
    return impress.PrefixStore.open(path, GEOMETRY, "a test", config, mode)


def put(store, tokens):
    assert not store.store(tokens, rows_of(len(tokens)), rows_of(len(tokens), 1)).refused
    store.flush()


def two_prompts(path, **settings):
    """A store with two prompts that share their first two windows; its path."""
    with opened(path, **settings) as store:
        put(store, PROMPT)
        put(store, FORK)
    return path


def run(*args, **options):
    """A command's end. It is a fork (forks.py): what depends on how Python starts is for
    `ended([SCRIPT, …])`."""
    return forks.command([str(SCRIPT), *map(str, args)], **options)


def ended(command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def whole_numbers(done, path):
    """The whole numbers in what a command printed, except those in its store's path: the directory
    pytest gives a test is numbered too, and the 1003rd was once taken for token 1003."""
    said = f"{done.stdout}\n{done.stderr}".replace(str(path), "")
    return {int(number) for number in re.findall(r"(?<!\w)(?<!\d\.)\d+(?!\w|\.\d)", said)}


def run_json(*args):
    done = run(*args, "--json")
    return done, json.loads(done.stdout)


def assert_refused(done, *words):
    """Exit status 2 and a single line on stderr, with these words in it."""
    assert done.returncode == 2, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("impress: "), done.stderr
    for word in words:
        assert word in lines[0]


def records_of(path):
    with opened(path, "r") as store:
        return sorted(store.catalog.records(), key=lambda record: record.span_id)
