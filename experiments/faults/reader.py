"""Reads prompts and judges them: `python -m experiments.faults.reader DIR FIRST N ENGINE`."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.faults.content import judge, open_store


def main() -> int:
    """Prints "judged MISSED WRONG"."""
    folder, first, n, engine = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with open_store(folder, io_engine=engine, read_timeout_s=0.5) as store:
        found = judge(store, range(first, first + n))
    print("judged", found.missed, found.wrong, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
