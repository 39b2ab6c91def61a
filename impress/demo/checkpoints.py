"""The trained checkpoints and their documents, laid out as `impress run` takes them."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any, Final

from impress.demo.lookup.tasks import Document, document
from impress.demo.lookup.tokenizer import decode
from impress.demo.lookup.words import PAD, START, VOCABULARY

#: Length of a document; a power of two, so that all of it is whole windows.
DOCUMENT_TOKENS: Final = 1024
_PACKAGED: Final = Path(__file__).parent / "lookup"


def install(checkpoint: str, folder: Path, n_documents: int) -> None:
    """Put the model with a tokenizer, and the documents as text, under `folder`. Raises OSError.

    The model computes in float32: a processor without units for float16 (the dtype of the saved
    weights) takes four times as long, and recomputing would look that much slower than reading.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_PACKAGED / checkpoint / "model.safetensors", model / "model.safetensors")
    config = json.loads((_PACKAGED / checkpoint / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    make_tokenizer().save_pretrained(model)
    (folder / "documents").mkdir(exist_ok=True)
    for doc in unseen(n_documents):
        text = textwrap.fill(decode(doc.tokens), 100, break_on_hyphens=False)
        (folder / "documents" / f"{doc.index}.txt").write_text(text + "\n", encoding="utf-8")


def unseen(n: int) -> list[Document]:
    """The first n documents of the test split, which no training run has seen. Pure."""
    return [document("test", index, DOCUMENT_TOKENS) for index in range(n)]


def make_tokenizer() -> Any:
    """One id for each word of the closed vocabulary, as impress.demo.lookup.tokenizer has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=START)
