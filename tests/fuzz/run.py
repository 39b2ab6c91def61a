"""Fuzz by hand: `python tests/fuzz/run.py --seconds 600`; a failing input is printed, shrunk.

With atheris installed, `--atheris TARGET` lets coverage lead (arguments after it are libFuzzer's).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]

from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from targets import TARGETS  # noqa: E402  found by the line above

_BATCH = 200


def fuzz(name: str, n_examples: int, number: int) -> None:
    """Run one batch of a target. Raises what it finds, with the smallest input that shows it."""
    target, drawn, _ = TARGETS[name]

    @seed(number)
    @settings(
        max_examples=n_examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn)
    def batch(value: object) -> None:
        target(value)

    batch()


def led_by_coverage(name: str, arguments: list[str]) -> None:
    """Fuzz until stopped, led by atheris."""
    import atheris  # type: ignore[import-not-found]

    target, drawn, _ = TARGETS[name]

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def one(value: object) -> None:
        target(value)

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], one.hypothesis.fuzz_one_input)  # type: ignore[attr-defined]
    atheris.Fuzz()


def main() -> int:
    """0 when nothing was found."""
    logging.disable(logging.CRITICAL)  # every input would be logged
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first batch")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only these")
    parser.add_argument("--atheris", choices=TARGETS, metavar="TARGET")
    args, rest = parser.parse_known_args()
    if args.atheris:
        led_by_coverage(args.atheris, rest)
    until, number, n = time.monotonic() + args.seconds, args.seed, 0
    names = args.target or list(TARGETS)
    while time.monotonic() < until:
        for name in names:
            batch = max(1, min(_BATCH, TARGETS[name][2]))
            try:
                fuzz(name, batch, number)
            except BaseException:
                print(f"found by --target {name} --seed {number}")
                raise
            n += batch
        number += 1
    print(f"{n:,} inputs, seeds {args.seed} to {number - 1}: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
