"""Reads and judges prompts: `python -m experiments.faults.reader DIR FIRST N ENGINE LIMIT_S`."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.faults.content import judge, open_store
from impress.errors import FormatError


def main() -> int:
    """Prints "missing SEED …" and "judged MISSED WRONG", or "refused WHY": it does not open."""
    folder, first, n, engine = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        with open_store(folder, io_engine=engine, read_timeout_s=float(sys.argv[5])) as store:
            each = {seed: judge(store, [seed]) for seed in range(first, first + n)}
            store.flush()  # spans that went bad are out of the index, their space is free
            store.check()
    except FormatError as err:
        print("refused", err, flush=True)
        return 0
    print("missing", *(seed for seed, found in each.items() if found.missed))
    print("judged", *(sum(getattr(one, of) for one in each.values()) for of in ("missed", "wrong")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
