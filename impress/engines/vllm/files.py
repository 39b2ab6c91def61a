"""Which files, and what beside them, a served model computes by: those that name it, or none.

vLLM loads a directory's weights by rules of its own for each load format. Where it may load others
than those whose digest is in a key, the start is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from impress.engines.vllm.loading import directory_of
from impress.errors import Unsupported
from impress.weights import weight_files

#: Of vLLM's load formats those that read the files by which the model is named.
_LOAD_FORMATS: Final = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral",
)  # fmt: skip
#: Of these, the ones that take every file there is, whatever an index names.
_ALL_FILES: Final = ("runai_streamer",)
#: Of torch.save's files vLLM passes over these (filter_files_not_needed_for_inference).
_NO_WEIGHTS: Final = ("training_args.bin", "optimizer.bin")
#: Of the environment, what has quantized layers round a pass otherwise; and what does so by files.
_ROUNDING: Final = ("VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE")
_REFUSED: Final = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
)  # fmt: skip


def check_files(vllm_config: Any) -> None:
    """Raises Unsupported where vLLM may load other weights than those that name the model, or has
    its config from where no family is named."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _LOAD_FORMATS:
        raise Unsupported(
            f"--load-format {load.load_format} takes weights that do not name the model: drop it"
        )
    directory = directory_of(model, load)
    _check_weights(directory, load.load_format)
    nameless = model.hf_text_config.model_type in ("", "transformer")  # as vLLM then calls it
    if nameless and (directory / "params.json").is_file():
        raise Unsupported(
            f"vLLM took the config of {model.model} from params.json, which names no family: start "
            "it with --config-format hf"
        )


def _check_weights(directory: Path, load_format: str) -> None:
    named = weight_files(directory)
    pattern = f"*{named[0].suffix}" if named[0].suffix == ".bin" else "*.safetensors"
    indexed = (directory / "model.safetensors.index.json").is_file()
    if indexed and load_format not in _ALL_FILES:  # the rest is passed over
        if load_format not in ("auto", "mistral"):
            return
        pattern = "consolidated*.safetensors"  # but for Mistral's own, which come first
    found = {path for path in directory.glob(pattern) if path.name not in _NO_WEIGHTS}
    if others := sorted(found - set(named)):
        raise Unsupported(
            f"{directory} holds {others[0].name} beside {named[0].name}, and which of them vLLM "
            "loads is in no name: move away what is not to be served"
        )


def config_elsewhere(model: Any) -> str:
    """What --hf-config-path names, by content; "" where the config is the model's. Raises."""
    where = model.hf_config_path
    if not where or where == model.model:
        return ""
    try:
        return (Path(where) / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError) as err:
        raise Unsupported(f"--hf-config-path must be a directory with config.json: {err}") from None


def quantization_elsewhere(model: Any) -> str:
    """What the overrides' quantization_config_file holds; "" where they name none. Raises."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    where = overrides.get("quantization_config_file")
    if not where:
        return ""
    try:
        return Path(where).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as err:
        raise Unsupported(f"quantization_config_file must be a file on this disk: {err}") from None


def environment_of(model: Any) -> dict[str, str]:
    """What is set of the environment by which a quantized model rounds. Raises Unsupported."""
    if named := [name for name in _REFUSED if os.environ.get(name)]:
        raise Unsupported(f"no key tells what {named[0]} has layers compute: unset it")
    if not model.quantization:
        return {}
    return {name: os.environ[name] for name in _ROUNDING if name in os.environ}
