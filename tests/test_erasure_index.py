"""What a purge leaves of it in the index: nothing, also after one that was cut off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import everything_in, prompt, put_prompt
from typer.testing import CliRunner

import impress
from impress.cli.main import app

Open = Callable[..., impress.PrefixStore]


def test_a_purge_that_was_killed_between_two_renames_is_finished_by_the_same_again(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """With no segment left there was no shard to be seen: the token ids stayed for good."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
        assert store.purge() == (1, 0)
    index, mark = path / "shards/main/index", prompt(256, 1).tobytes()[:256]
    index.rename(index.with_name("index.gone"))
    assert mark in everything_in(path) and not list(path.rglob("*.seg"))
    with pytest.raises(impress.FormatError, match="a purge of shard main was cut off: repeat it"):
        open_store(geometry, mode="r")
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "test"])
    assert done.exit_code == 2 and "is not stored here" in done.stderr
    assert mark not in everything_in(path)
