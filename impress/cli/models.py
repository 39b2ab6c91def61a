"""Shared by the commands that run a model: loading it from a directory, making its prompts.

Imports torch and Transformers only when called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from impress.errors import BadInput, Unsupported
from impress.terminal import err
from impress.types import Geometry
from tiers.threads import no_more_threads

#: Unless it is told, Transformers asks on the terminal whether to run code that comes with a model.
_HERE: Final = {"local_files_only": True, "trust_remote_code": False}


def check_model_dir(model_dir: Path) -> None:
    """Raises BadInput if a file is missing there, before anything slow is imported."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (model_dir / name).is_file():
            raise BadInput(f"--model {model_dir}: no {name} there; name a local Transformers model")


def engine_module() -> ModuleType:
    """impress.engines.hf. Raises Unsupported, which says what to install."""
    try:
        import torch  # noqa: F401

        from impress.engines import hf
    except ImportError as error:
        raise Unsupported(
            f"running a model needs {error.name or 'torch'}: pip install '.[hf]' in impress's clone"
        ) from None
    return hf


def load_tokenizer(model_dir: Path) -> Any:
    """Load it from this directory only. Raises BadInput, Unsupported if a package is missing."""
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise Unsupported(
            f"a tokenizer needs {error.name or 'transformers'}: "
            "pip install '.[hf]' in impress's clone"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with loading(model_dir, "tokenizer does"):
        try:
            return AutoTokenizer.from_pretrained(str(model_dir), **_HERE)
        except Exception as error:
            if not (name := _broken(model_dir, error)):
                raise
            raise RuntimeError(f"{name}: {error}") from None


def _broken(model_dir: Path, error: Exception) -> str:
    """The tokenizer file that is not JSON, or not what it should be; "" for any other cause."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            json.loads((model_dir / name).read_bytes())
        except OSError:
            continue
        except ValueError:
            return name
    return "tokenizer.json" if type(error) in (KeyError, Exception) else ""  # the latter: from Rust


@contextmanager
def loading(model: object, part: str) -> Iterator[None]:
    """Say in one line what Transformers raises while it loads `part` ("weights do") of a model.

    Raises BadInput, or Unsupported where a package is missing.
    """
    try:
        yield
    except ImportError as error:  # a quantised checkpoint: it names the package
        raise Unsupported(f"--model {model}: {str(error)[:300]}") from None
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise Unsupported(
                f"--model {model}: its code comes with it (auto_map), of which impress runs none"
            ) from None
        raise BadInput(f"--model {model}: {str(error)[:300]}") from None
    except MemoryError:
        raise
    except Exception as error:  # safetensors, pickle; Rust tokenizers raise a bare Exception
        if no_more_threads(error):
            raise
        raise BadInput(
            f"--model {model}: its {part} not load; where the download was cut off, fetch it again "
            f"({str(error)[:200] or type(error).__name__})"
        ) from None


def load(model_dir: Path, dtype: str = "auto") -> tuple[Any, Any]:
    """The model and its tokenizer; from this directory only. `auto`: the dtype it was saved in.

    Raises BadInput where they do not load, Unsupported where a package they need is missing.
    """
    with err.status("loading the model"):
        tokenizer = load_tokenizer(model_dir)
        from transformers import AutoModelForCausalLM

        with loading(model_dir, "weights do"):
            model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=dtype, **_HERE)
    return model.eval(), tokenizer


def query_ids(tokenizer: Any, query: str) -> Sequence[int]:
    """Tokens of a query that follows a text. Raises BadInput where there are none."""
    ids: Sequence[int] = tokenizer(query, add_special_tokens=False)["input_ids"]
    if not ids:
        raise BadInput("--query: empty")
    return ids


def check_length(config: Any, n_tokens: int, n_new: int) -> None:
    """Raises BadInput where a prompt and its answer together are longer than the model takes."""
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and n_tokens + n_new > most:
        fewer = " or lower --max-new-tokens" if n_tokens < most else ""
        raise BadInput(
            f"{n_tokens} tokens of text and question and {n_new} new ones are more than "
            f"the model's {most}; shorten the text{fewer}"
        )


def geometry_in(model_dir: Path, stored: Geometry) -> Geometry:
    """The geometry of a directory's model, without loading its weights.

    In the store's dtype where all else is as stored: a server may load a model in another dtype
    than its config names. Raises Unsupported where impress does not serve the model, BadInput where
    that cannot be told.
    """
    engine_module()
    from transformers import AutoConfig

    from impress.engines.hf_models import check_family, geometry_of

    with loading(model_dir, "config does"):
        config = AutoConfig.from_pretrained(str(model_dir), **_HERE)
    check_family(config)
    geometry = geometry_of(config, stored.dtype)
    return geometry if geometry == stored else geometry_of(config, config.dtype or "float32")
