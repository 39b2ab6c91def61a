"""The console script: imports the commands where Ctrl-C is already reported in one line."""

from __future__ import annotations

import sys


def run() -> None:
    """Entry point. Ends the process; if interrupted, with status 2 and one line on stderr."""
    try:
        from impress.cli import main

        main.run()
    except KeyboardInterrupt:
        print("impress: interrupted", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
