"""One step of the demo in a process of its own: `python -m impress.demo.worker STEP DIR SIZE`.

Says what it does in JSON lines on stdout: {"step": text, "done": n, "of": n}, then one
{"result": …}, or {"error": line} and exit status 2.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from transformers.utils import logging

from impress.demo import SIZES, asking, reuse
from impress.terminal import line_of

STEPS: Final = {
    "compute": reuse.compute,
    "answer": reuse.answer,
    "store": asking.store,
    "ask": asking.ask,
    "ask_again": asking.ask_again,
}


def _say(step: str, done: int, of: int) -> None:
    _send({"step": step, "done": done, "of": of})


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def main() -> None:
    """Run one step; the last line on stdout is its result."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    step, folder, size = sys.argv[1:]
    try:
        with redirect_stdout(sys.stderr):  # what a library prints is not a message of ours
            result = STEPS[step](Path(folder), SIZES[size], _say)
    except KeyboardInterrupt:
        raise SystemExit(2) from None
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        _send({"error": line})
        raise SystemExit(2) from None
    _send({"result": result})


if __name__ == "__main__":
    main()
