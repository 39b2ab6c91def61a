"""Where a model's files are, and whether they are still those that vLLM has loaded.

A connector is made once the weights are loaded, and names the model by its files as they are then.
If others took their place in between, the old weights' KV would get the new ones' name. This is
noticed where layers use our attention: nothing else of ours is there before the weights are.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from impress.errors import BadInput, Unsupported
from impress.weights import Stamp, stamp_of

#: (model, revision) -> its directory and files when vLLM began to load it, in this process.
_began: dict[tuple[str, str | None], tuple[Path, Stamp]] = {}
_building: Any = None  # the configuration of the model that was noted last


def begins() -> None:
    """A layer is being built: nothing of the model it belongs to is loaded yet."""
    from vllm.config import get_current_vllm_config_or_none

    global _building
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is None or model is _building:
        return
    _building = model
    with suppress(
        BadInput, Unsupported, OSError
    ):  # not there yet, or not at all: the error comes when it is named
        directory = directory_of(model, config.load_config)
        _began[model.model, model.revision] = directory, stamp_of(directory)


def check_unchanged(model: Any, directory: Path) -> None:
    """Raises Unsupported where the files are not those that vLLM began to load."""
    began = _began.get((model.model, model.revision))
    if began is not None and began != (directory, stamp_of(directory)):
        raise Unsupported(
            f"the files of {model.model} were replaced while vLLM loaded them, and name other "
            "weights than it has: start it again"
        )


def directory_of(model: Any, load: Any) -> Path:
    """Where the model's files are. Raises BadInput, Unsupported."""
    if Path(model.model).is_dir():
        return Path(model.model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in (
        "1",
        "true",
    ):  # vLLM's is then another
        raise Unsupported(
            f"with VLLM_USE_MODELSCOPE {model.model} is not where its name is looked for: give the "
            "directory it was downloaded to"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=load.download_dir,
                local_files_only=True,
            )
        )  # fmt: skip
    except (OSError, ValueError) as err:
        raise BadInput(
            f"namespace: the files of {model.model} are not on this disk: {err}"
        ) from None
