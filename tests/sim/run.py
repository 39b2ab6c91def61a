"""Run the simulator by hand: `python tests/sim/run.py --seconds 3600`, or replay `--seed N`."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]

from simulate import LIVES, simulate  # noqa: E402  found by the line above


def main() -> int:
    """0 when every seed held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--seconds", type=float, default=60.0, help="go on for so long")
    parser.add_argument("--from-seed", type=int, default=1)
    parser.add_argument("--lives", type=int, default=LIVES)
    args = parser.parse_args()
    seeds = itertools.count(args.from_seed) if args.seed is None else [args.seed]
    started, n = time.monotonic(), 0
    for seed in seeds:
        if args.seed is None and time.monotonic() - started > args.seconds:
            break
        folder = Path(tempfile.mkdtemp(prefix="impress-sim-"))
        try:
            simulate(folder, seed, args.lives)
        except BaseException:
            print(f"seed {seed} failed: python {sys.argv[0]} --seed {seed} --lives {args.lives}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        n += 1
    print(f"{n} seeds held, {args.lives} lives each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
