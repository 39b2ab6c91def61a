"""What `impress demo` runs: documents and a model made on the spot, two processes, one report.

documents.py  the texts and questions          model.py   the tokenizer and the random model
worker.py     what each process does           story.py   starts them, prints what came out
"""

from __future__ import annotations

from typing import Final

#: Of the weights; nothing else is drawn.
SEED: Final = 20250214
