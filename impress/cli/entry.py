"""The console script: it imports the commands where Ctrl-C meanwhile is one line already."""

from __future__ import annotations

import sys


def run() -> None:
    """Entry point. Ends the process; 2 and one line on stderr where it was interrupted."""
    try:
        from impress.cli import main

        main.run()
    except KeyboardInterrupt:
        print("impress: interrupted", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
