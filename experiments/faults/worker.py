"""Stores prompts until it is stopped: `python -m experiments.faults.worker DIR FIRST`.

Prints a seed when everything up to it has been flushed, and "kept" with those of the flushed seeds
that were not refused; "refused" lines when the store says no.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from experiments.faults.content import open_store, put
from impress.errors import ImpressError
from impress.write import health


def main() -> int:
    """Run until killed. 0 when told to stop after N prompts."""
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    most = int(sys.argv[3]) if len(sys.argv) > 3 else None
    engine = sys.argv[4] if len(sys.argv) > 4 else "auto"
    if len(sys.argv) > 5:  # seconds: sooner than a server, or a fault strikes once in all prompts
        health.RETRY_S = float(sys.argv[5])  # type: ignore[misc]
    with open_store(folder, io_engine=engine) as store:
        print("open", flush=True)
        fresh: list[int] = []
        for seed in itertools.count(first):
            if most is not None and seed >= first + most:
                return 0
            try:
                stored = put(store, seed)
                if stored.refused:
                    print("refused", stored.refused, flush=True)
                else:
                    fresh.append(seed)
                if seed % 3 == 0:
                    store.flush()
                    print("kept", *fresh)
                    print(seed, flush=True)
                    fresh.clear()
            except ImpressError as err:
                fresh.clear()
                print("refused", err, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
