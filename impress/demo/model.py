"""The first act's model: a Llama with grouped-query attention and random weights, a BPE tokenizer.

Sized so that recomputing 1,500 tokens takes a second or two on two cores. Saved as any
Transformers model is, so `impress run --model` works on it. `load` and `recompute` take any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from transformers import LogitsProcessorList

from impress.demo import SEED
from impress.demo.documents import Document
from impress.engines.hf_modules import CACHE
from impress.engines.hf_output import FirstLogits
from impress.errors import StoreFailed

DOCUMENT_TOKENS: Final = 1500
_VOCABULARY: Final = 4096
#: Three times the usual: attention then really looks at the document, so that a wrong row of it
#: would change the answer (with .02 the heads average, and any document gives the same tokens).
_WEIGHT_STD: Final = 0.06


def make_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer trained on these texts; equal texts give an equal one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def make_model() -> Any:
    """Float32, about 27 million weights, the same ones every time. Sets torch's global seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=_WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def cut(document: Document, tokenizer: Any) -> Document:
    """The document up to the last whole line within DOCUMENT_TOKENS. Pure."""
    encoded = tokenizer(document.text, return_offsets_mapping=True)
    if len(encoded["input_ids"]) <= DOCUMENT_TOKENS:
        return document
    end = encoded["offset_mapping"][DOCUMENT_TOKENS - 1][1]
    return document._replace(text=document.text[: document.text.rindex("\n", 0, end) + 1])


def save(folder: Path, documents: Sequence[Document]) -> list[Document]:
    """Save model and tokenizer in `folder`; return documents cut to size. Raises StoreFailed."""
    from safetensors import SafetensorError

    tokenizer = make_tokenizer([document.text for document in documents])
    try:
        make_model().save_pretrained(folder)
    except SafetensorError as err:  # its own class for a full disk
        raise StoreFailed(f"{folder}: {err}") from None
    tokenizer.save_pretrained(folder)
    return [cut(document, tokenizer) for document in documents]


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as saved, in the dtype saved; nothing is looked for elsewhere."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return model.eval(), tokenizer


def recompute(
    model: Any, ids: torch.Tensor, n_new: int, cache: Any = None
) -> tuple[list[int], float]:
    """(new tokens, ms to the first) of ids [1, n] by the model alone, without the store.

    `cache`, an in-memory one of Transformers, holds the first tokens' rows and gets the others.
    """
    first = FirstLogits(perf_counter())
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=n_new,
        do_sample=False,
        logits_processor=LogitsProcessorList([first]),
    )
    return result[0, ids.shape[1] :].tolist(), first.ttft_ms
