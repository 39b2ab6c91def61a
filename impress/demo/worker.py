"""One step of the demo in a process of its own: `python -m impress.demo.worker STEP DIR SIZE`.

Says what it does in JSON lines on stdout: {"step": text, "done": n, "of": n}, then one
{"result": …}, or {"error": line} and exit status 2.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress.terminal import line_of

if TYPE_CHECKING:
    from impress.demo.reuse import Say


def main() -> None:
    """Run one step; the last line on stdout is its result."""
    # What a library prints, a native one as it loads too, is not a message of ours.
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=messages, flush=True)

    def say(step: str, done: int, of: int) -> None:
        send({"step": step, "done": done, "of": of})

    try:
        step, folder, size = sys.argv[1:]
        result = _run(step, Path(folder), size, say)
    except KeyboardInterrupt:
        raise SystemExit(2) from None
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        send({"error": line})
        raise SystemExit(2) from None
    send({"result": result})


def _run(step: str, folder: Path, size: str, say: Say) -> dict[str, Any]:
    from transformers.utils import logging

    from impress.demo import SIZES, asking, reuse

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    steps = {
        "compute": reuse.compute,
        "answer": reuse.answer,
        "store": asking.store,
        "ask": asking.ask,
        "ask_again": asking.ask_again,
    }
    return steps[step](folder, SIZES[size], say)


if __name__ == "__main__":
    main()
