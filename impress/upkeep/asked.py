"""What a rebuild asks the old index, where that can be read."""

from __future__ import annotations

import subprocess
import sys
from typing import Final, NamedTuple

from impress.errors import StoreFailed
from impress.upkeep.scan import Rebuilt
from impress.write.directory import Shard
from impress.write.env import folder_of

#: Prints what an index notes of spans to be erased; only then, as the list counts more, what it
#: says of the day's writes (impress.write.budget), how many spans it names, and the highest id that
#: a header may bear. Run in a process of its own: LMDB answers some damage by ending it.
_ASK: Final = """
import lmdb, os, sys
print("asks", flush=True)
with lmdb.open(os.fsencode(sys.argv[1]), max_dbs=3, readonly=True, lock=False) as env:
    try:
        with env.begin(db=env.open_db(b"erase", create=False)) as txn:
            for span, note in txn.cursor():
                print(span.hex(), note.hex())
    except lmdb.NotFoundError:  # written before there was a list
        pass
    print("wear", flush=True)
    with env.begin(db=env.open_db(b"history", create=False)) as txn:
        print((txn.get(b"wear") or b"").hex(), flush=True)
        last = int.from_bytes((txn.get(b"last") or b"")[:8], "little")
    spans = env.open_db(b"spans", create=False)
    with env.begin() as txn:
        print("spans", txn.stat(spans)["entries"], last)
"""


class Answer(NamedTuple):
    """What an old index said; empty, and 0, where it could not be asked."""

    notes: dict[int, bytes]  # of spans that are to be erased
    wear: bytes = b""  # of the day's writes
    n_spans: int = 0  # that it names
    last: int = 0  # the highest id that it may have given out


def asked(shard: Shard, found: Rebuilt) -> Answer:
    """Ask the old index. Notes in `found` where it cannot be read. Raises StoreFailed."""
    old = folder_of(shard.index)
    if not old.exists():  # one that was set aside knows of no purge since
        found.notes.append(
            f"there is no index of shard {shard.name} to ask what was still to be erased; where a "
            "purge was cut off, purge again"
        )
        return Answer({})
    command = [sys.executable, "-P", "-c", _ASK, str(old)]  # -P: no lmdb.py of the current folder
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("asks\n"):  # that says nothing about the index
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise StoreFailed(f"{old}: could not be asked what is still to be erased: {why}")
    listed, whole, wear = done.stdout.removeprefix("asks\n").partition("wear\n")
    if not whole:
        found.notes.append(
            f"the index of shard {shard.name} could not be asked what was still to be erased; "
            "where a purge was cut off, purge again"
        )
        return Answer({})
    lines = [line.split() for line in listed.splitlines()]
    notes = [line for line in lines if len(line) == 2 and len(line[0]) == 16]
    if len(notes) < len(lines):
        found.notes.append(
            f"the index of shard {shard.name} is damaged where it said what was to be erased; "
            "where a purge was cut off, purge again"
        )
    wear, _, numbers = wear.partition("spans ")
    noted = {int(span, 16): bytes.fromhex(note) for span, note in notes}
    n_spans, last = map(int, numbers.split() or (0, 0))
    return Answer(noted, bytes.fromhex(wear), n_spans, last)
