"""The files, and what besides them, a served model computes from: those that name it, or none.

vLLM has rules of its own, per load format, for which of a directory's weights it loads. Where these
may be others than those whose digest is in a key, the start is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from impress.engines.rounding import fpmath
from impress.engines.vllm.loading import directory_of
from impress.errors import Unsupported
from impress.weights import weight_files

#: Those of vLLM's load formats that read the files by which the model is named.
_LOAD_FORMATS: Final = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral",
)  # fmt: skip
#: Of these, those that load every file there is, whatever an index names.
_ALL_FILES: Final = ("runai_streamer",)
#: vLLM ignores these of torch.save's files (filter_files_not_needed_for_inference).
_NO_WEIGHTS: Final = ("training_args.bin", "optimizer.bin")
#: Environment variables that make quantized layers round a pass differently.
_ROUNDING: Final = (
    "VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_DISABLED_KERNELS",
    "VLLM_BATCH_INVARIANT", "VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
)  # fmt: skip
#: The same among the kernels' settings: they decide whether activations are quantized.
_KERNELS: Final = ("linear_backend", "linear_backend_per_quant")
#: Endings of the names of files that say how a directory's weights are quantized, if its config
#: does not.
_QUANTIZED: Final = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_UNSET: Final[tuple[Any, ...]] = (None, "auto", {})
#: Environment variable: what float32 matrices are rounded to before they are multiplied.
_PRECISION: Final = "VLLM_FLOAT32_MATMUL_PRECISION"
#: Environment variables that change rounding too, by files: no key tells what layers then compute.
_REFUSED: Final = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
)  # fmt: skip


def check_files(vllm_config: Any) -> None:
    """Raises Unsupported if vLLM may load other weights than those that name the model, or took its
    config from a file that names no family."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _LOAD_FORMATS:
        raise Unsupported(
            f"--load-format {load.load_format} takes weights that do not name the model: drop it"
        )
    if getattr(model, "model_weights", "") not in ("", None, model.model):
        raise Unsupported(
            f"model_weights ({model.model_weights}) are not those that name the model: drop it"
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
    beside = {".bin": ["*.bin"], ".gguf": ["*.pt"]}.get(named[0].suffix, [])  # vLLM may take these
    patterns = ["*.safetensors", *beside]
    indexed = (directory / "model.safetensors.index.json").is_file()
    if indexed and load_format not in _ALL_FILES:  # the rest is passed over
        if load_format not in ("auto", "mistral"):
            return
        patterns = ["consolidated*.safetensors"]  # except Mistral's own, which come first
    every = (path for pattern in patterns for path in directory.glob(pattern))
    found = {path for path in every if path.name not in _NO_WEIGHTS}
    if others := sorted(found - set(named)):
        raise Unsupported(
            f"{directory} holds {others[0].name} beside {named[0].name}, and which of them vLLM "
            "loads is in no name: move away what is not to be served"
        )


def config_elsewhere(model: Any) -> str:
    """Text of the config --hf-config-path names; "" if it is the model's. Raises Unsupported."""
    where = model.hf_config_path
    if not where or where == model.model:
        return ""
    try:
        return (Path(where) / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError) as err:
        raise Unsupported(f"--hf-config-path must be a directory with config.json: {err}") from None


def quantization_elsewhere(model: Any) -> str:
    """Text of the overrides' quantization_config_file; "" if they name none. Raises Unsupported."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    where = overrides.get("quantization_config_file")
    if not where:
        return ""
    try:
        return Path(where).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as err:
        raise Unsupported(f"quantization_config_file must be a file on this disk: {err}") from None


def quantization_beside(model: Any, directory: Path) -> list[tuple[str, str]]:
    """Names and contents of the files beside a config that say how a quantized model's weights are
    to be read. Raises Unsupported."""
    if not model.quantization:
        return []
    found = [path for path in directory.glob("*.json") if path.name.endswith(_QUANTIZED)]
    if model.hf_config_path and model.hf_config_path != model.model:
        found += Path(model.hf_config_path).glob("hf_quant_config.json")
    try:
        return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(found)]
    except (OSError, ValueError) as err:
        raise Unsupported(f"how {model.model} is quantized cannot be read: {err}") from None


def environment_of(vllm_config: Any) -> dict[str, str]:
    """Other settings by which a model rounds. Raises Unsupported."""
    model = vllm_config.model_config
    if named := [name for name in _REFUSED if os.environ.get(name)]:
        raise Unsupported(f"no key tells what {named[0]} has layers compute: unset it")
    found = {}
    precision = os.environ.get(_PRECISION, "").lower()
    if str(model.dtype) == "torch.float32" and precision not in ("", "highest"):
        found[_PRECISION] = precision
    if str(model.dtype) == "torch.float32" and (mode := fpmath()):  # no effect off the CPU
        found["fpmath"] = mode
    if model.quantization:
        from vllm.version import __version__

        # A release may give the same weights other kernels: 0.33 leaves activations in bfloat16
        # on CPUs where 0.32 rounded them to fp8.
        found["vllm"] = __version__
        found.update({name: os.environ[name] for name in _ROUNDING if name in os.environ})
        kernels = {name: getattr(vllm_config.kernel_config, name, None) for name in _KERNELS}
        found.update({k: str(set_to) for k, set_to in kernels.items() if set_to not in _UNSET})
    return found
