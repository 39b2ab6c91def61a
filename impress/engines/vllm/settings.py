"""The operator's settings, and which vLLM configurations can be served; all else is refused.

"kv_connector_extra_config": {
    "store": DIR,                                        required
    "policy": {"name": "exact"},                         what requests get by default
    "floor":  {"name": "quality", "max_missing_mass": .05},  the loosest they may ask for
    "config": {"dram_bytes": …},                         impress.Config
    "store_new": true, "cross_engine": false}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from impress.config import Config, in_full
from impress.engines.hf_chosen import check_policy
from impress.engines.hf_models import check_kind
from impress.engines.vllm import BACKEND, CUDA_BACKEND
from impress.engines.vllm.files import (
    check_files,
    config_elsewhere,
    environment_of,
    quantization_beside,
    quantization_elsewhere,
)
from impress.engines.vllm.loading import check_unchanged, directory_of
from impress.errors import ConfigError, Unsupported
from impress.namespace import namespace_of
from impress.policy import AllHeads, Exact, KeepAll, Paper, Policy, Quality, Random, Recency
from impress.types import DTYPES, Geometry

_POLICIES: dict[str, Any] = {
    "exact": Exact,
    "keep_all": KeepAll,
    "paper": Paper,
    "quality": Quality,
    "all_heads": AllHeads,
    "random": Random,
    "recency": Recency,
}
_DEFAULTS: dict[str, Any] = {
    "store": "",
    "policy": None,
    "floor": None,
    "config": {},
    "store_new": True,
    "cross_engine": False,
}

#: vLLM's own classes of the families (hf_models.FAMILIES).
_CLASSES = (
    "OPTForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "MistralForCausalLM",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's own settings, checked."""

    store: Path
    policy: Policy
    floor: Policy
    config: Config
    store_new: bool
    cross_engine: bool

    @property
    def sparse(self) -> bool:
        """Whether any request may get chosen rows."""
        return not (isinstance(self.policy, Exact) and isinstance(self.floor, Exact))

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """From kv_connector_extra_config. Raises ConfigError naming the key."""
        for key in extra:
            if key not in _DEFAULTS:
                near = difflib.get_close_matches(key, _DEFAULTS, 1, 0.0)[0]
                raise ConfigError(f"vllm: unknown key {key!r}; the nearest known is {near!r}")
        given = {**_DEFAULTS, **extra}
        if not given["store"] or not isinstance(given["store"], str):
            raise ConfigError('vllm: kv_connector_extra_config needs "store": a directory')
        for key in ("store_new", "cross_engine"):
            if not isinstance(given[key], bool):
                raise ConfigError(f"vllm: {key!r} is true or false, got {given[key]!r}")
        if not isinstance(given["config"], Mapping):
            raise ConfigError(
                f"vllm: 'config' is an object of impress.Config's settings, got {given['config']!r}"
            )
        try:
            store = in_full(Path(given["store"]).expanduser())
        except RuntimeError:
            raise ConfigError(f"vllm: store {given['store']!r}: no such user's home") from None
        policy = policy_of(given["policy"] or {"name": "exact"})
        floor = policy_of(given["floor"]) if given["floor"] else policy
        if not at_least(policy, floor):
            raise ConfigError(f"vllm: policy {policy!r} is looser than the floor {floor!r}")
        probes = [p.probe for p in (policy, floor) if p.probe is not None]
        config = Config(**given["config"])
        if config.mode != "auto":
            raise ConfigError(f"vllm: mode {config.mode!r}: here 'policy' and 'floor' say it")
        if not config.follow_every_s:  # hits on what others stored would be lost loads, each time
            raise ConfigError("vllm: follow_every_s 0: a server must follow others: leave it out")
        wanted = dict.fromkeys([*config.probes, *probes])
        return cls(
            store,
            policy,
            floor,
            config.model_copy(update={"probes": tuple(wanted)}),
            given["store_new"],
            given["cross_engine"],
        )


def asked_of(params: Any) -> Any:
    """The policy that a client's kv_transfer_params name, None for none. Raises ConfigError.

    They may hold anything that JSON can.
    """
    ours = params.get("impress") if isinstance(params, Mapping) else params
    if ours is None:
        return None
    if not isinstance(ours, Mapping) or not ours.keys() <= {"policy"}:
        raise ConfigError(
            'vllm: what a request may ask for is {"impress": {"policy": {"name": …}}} in '
            f"kv_transfer_params, got {ours!r}"
        )
    return ours.get("policy")


def policy_of(given: Any) -> Policy:
    """A policy from {"name": …, its settings}. Raises ConfigError or BadInput."""
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or name not in _POLICIES:
        raise ConfigError(
            f'vllm: a policy is {{"name": one of {", ".join(_POLICIES)}}}, got {given!r}'
        )
    kind = _POLICIES[name]
    values = {key: value for key, value in given.items() if key != "name"}
    known = {f.name for f in fields(kind) if f.init} - ({"name"} if kind is Exact else set())
    for key in values:
        if key not in known or kind is Exact:
            raise ConfigError(f"vllm: policy {name} has no setting {key!r}")
    made: Policy = kind(**values)
    return made


def at_least(asked: Policy, floor: Policy) -> bool:
    """Whether a policy is certainly no looser than the floor. Pure.

    Exact and KeepAll are as strict as any; within one kind, more rows or a lower bound are. A
    larger cap, or none, is not: rows may fit in it where the floor's leaves no room, so that all
    are loaded; nor is, under a cap, another order of what goes first. Nor are more rows with
    Paper's gate: heads that differ in which quarter they want, so that a layer falls back to all
    rows, may agree on the half.
    """
    if isinstance(asked, Exact | KeepAll):
        return True
    if isinstance(asked, Quality) and isinstance(floor, Quality):
        alike = asked.per == floor.per and (
            asked.per == "mean" or asked.max_missing_mass == floor.max_missing_mass
        )
        free = asked.max_bytes == floor.max_bytes and (floor.max_bytes is None or alike)
        same = asked.probe == floor.probe and (asked.per == floor.per or asked.per == "head")
        return same and free and asked.max_missing_mass <= floor.max_missing_mass
    if isinstance(asked, Paper) and isinstance(floor, Paper):
        gate = asked.gate or not floor.gate
        same = asked.alpha == floor.alpha and asked.fallback == floor.fallback
        more = asked.keep in (floor.keep, 1.0) if floor.gate else asked.keep >= floor.keep
        return gate and same and more
    if type(asked) is type(floor) and isinstance(asked, AllHeads | Random | Recency):
        assert isinstance(floor, AllHeads | Random | Recency)
        return asked.keep >= floor.keep
    return False


# ---- what vLLM was configured to do --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A model as vLLM serves it: what the store holds of it, and under which name."""

    geometry: Geometry
    namespace: bytes
    layer_names: tuple[str, ...]  # of the attention layers, in order
    block_size: int  # tokens
    lora: str  # how every adapter is applied
    mixes_adapters: bool  # into what it computes without one


def served(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Served:
    """Checks a vLLM configuration. Raises Unsupported or ConfigError naming what to change."""
    _check_features(vllm_config, settings)
    spec, names = _one_group(kv_cache_config)
    model = vllm_config.model_config
    config = model.hf_text_config
    check_files(vllm_config)  # first: the config in Mistral's own files tells no family
    check_kind(config)
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.dtype != model.dtype or dtype not in DTYPES:
        raise Unsupported(
            f"a KV cache of {dtype} for a model in {model.dtype} is not supported: "
            "drop --kv-cache-dtype"
        )
    if config.num_hidden_layers != len(names):
        raise Unsupported(f"{len(names)} KV layers for {config.num_hidden_layers} of the model")
    geometry = Geometry(
        len(names), config.num_attention_heads, spec.num_kv_heads, spec.head_size, dtype
    )
    for policy in (settings.policy, settings.floor):
        check_policy(policy, geometry, settings.config.window)
    namespace = _namespace(vllm_config, settings, dtype)
    lora = _lora(vllm_config.lora_config)
    mixes = vllm_config.lora_config is not None and _mixes_adapters(vllm_config)
    return Served(geometry, namespace, names, spec.block_size, lora, mixes)


def _mixes_adapters(vllm_config: Any) -> bool:
    """Whether vLLM's kernels apply an adapter to requests that name none: on the CPU they number
    such a token -1, and until 0.33 took the last adapter they held for it."""
    if vllm_config.device_config.device_type != "cpu":
        return False
    import torch
    from vllm.lora.ops.torch_ops import bgmv_expand

    adapters, out = torch.stack([torch.zeros(4, 2), torch.ones(4, 2)]), torch.zeros(1, 4)
    bgmv_expand(torch.ones(1, 2), adapters, out, torch.tensor([-1]))
    return bool(out.any())


def _check_features(vllm_config: Any, settings: Settings) -> None:
    parallel = vllm_config.parallel_config
    for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context"):
        if getattr(parallel, f"{kind}_parallel_size", 1) != 1:
            flag = f"--{kind.replace('_', '-')}-parallel-size"
            raise Unsupported(f"{flag} above 1 is not tested and so refused: use 1")
    if vllm_config.scheduler_config.async_scheduling:
        raise Unsupported("a lost load cannot be taken back then: start with --no-async-scheduling")
    if vllm_config.use_v2_model_runner:  # what vLLM takes on CUDA unless it is told not to
        raise Unsupported(
            "vLLM's model runner V2 goes on behind rows whose load was lost, and answers wrongly: "
            "start with VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('vllm: set "kv_load_failure_policy": "recompute" beside kv_connector')
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError('vllm: set "kv_role": "kv_both"; to only read, "store_new": false')
    if vllm_config.speculative_config is not None:
        raise Unsupported("speculative decoding is not supported: drop --speculative-config")
    if vllm_config.model_config.runner_type != "generate":
        raise Unsupported("only text generation is supported: use --runner generate")
    if vllm_config.model_config.model_class_overrides:
        raise Unsupported(
            "--model-class-overrides is not supported, no key tells what another class computes: "
            "drop it"
        )
    if settings.store_new:
        _check_ids()
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise Unsupported(f"vLLM on {device} is not supported: use the CPU or CUDA")
    if device == "cuda":
        _check_graphs(vllm_config.compilation_config)
    if settings.sparse:
        _check_backend(device)


def _check_ids() -> None:
    """Raises Unsupported if an id may come again while a request that had it is being stored: vLLM
    still has that request then, and asserts that it has not."""
    from vllm import envs

    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise Unsupported(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION lets an id come again while a request that had "
            'it is being stored, which would end vLLM: unset it (to only read, "store_new": false)'
        )


def _check_graphs(compilation: Any) -> None:
    """Raises Unsupported where attention would be in a CUDA graph: it waits for rows, in Python."""
    mode = compilation.cudagraph_mode
    if mode.has_full_cudagraphs():
        raise Unsupported(
            f"CUDA graphs of mode {mode.name} hold the attention, which waits for rows: start with "
            """--compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
        )


def _check_backend(device: str) -> None:
    """Raises Unsupported unless vLLM's attention is ours, which chooses rows."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    cuda = device == "cuda"
    kind = AttentionBackendEnum.FLASH_ATTN if cuda else AttentionBackendEnum.CPU_ATTN
    path = kind.get_path()
    if path != (CUDA_BACKEND if cuda else BACKEND):
        raise Unsupported(
            f"sparse policies need the attention backend of impress, and vLLM has {path}: install "
            "impress in vLLM's environment and let VLLM_PLUGINS name it, or use policy exact"
        )


def _one_group(kv_cache_config: Any) -> tuple[Any, tuple[str, ...]]:
    """The spec and layers of the only KV cache group. Raises Unsupported for hybrid models."""
    from vllm.model_executor.models.utils import extract_layer_index

    groups = kv_cache_config.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec if groups else None
    if len(groups) != 1 or type(spec).__name__ != "FullAttentionSpec":
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise Unsupported(
            f"hybrid models and sliding windows are not supported (KV caches: {kinds}): "
            "serve this model without impress"
        )
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        raise Unsupported("sliding windows are not supported: --disable-sliding-window")
    names = sorted(groups[0].layer_names, key=extract_layer_index)
    return spec, tuple(names)


def _namespace(vllm_config: Any, settings: Settings, dtype: str) -> bytes:
    """The namespace of the model's files, as this configuration computes with them."""
    model = vllm_config.model_config
    directory = directory_of(model, vllm_config.load_config)
    changes = {
        "quantization": model.quantization,
        "quantization_config": model.quantization_config,
        "hf_config": config_elsewhere(model),
        "hf_overrides": model.hf_overrides if not callable(model.hf_overrides) else None,
        "quantization_config_file": quantization_elsewhere(model),
        "environment": (environment := environment_of(vllm_config)),
        "quantization_files": quantization_beside(model, directory),
    }
    if callable(model.hf_overrides):
        raise Unsupported("hf_overrides as a function cannot be named in a key: pass a dict")
    made = {key: value for key, value in changes.items() if value}
    if made and settings.cross_engine:
        said = [key for key in made if key != "environment"]
        said += ["ONEDNN_DEFAULT_FPMATH_MODE" if k == "fpmath" else k for k in environment]
        raise ConfigError(f"vllm: cross_engine does not go with {', '.join(said)}")
    engine = _family(model) + (json.dumps(made, sort_keys=True, default=str) if made else "")
    named = namespace_of(directory, cross_engine=settings.cross_engine, engine=engine, dtype=dtype)
    check_unchanged(model, directory)  # after namespace_of: what it has read of them counts
    return named


def _family(model: Any) -> str:
    """vLLM's engine family, with the class that computes if it is not vLLM's own for the type.

    `--model-impl transformers` rounds differently. Raises Unsupported for code that no key tells.
    """
    remote = model.trust_remote_code and getattr(model.hf_config, "auto_map", None)
    if remote and model.using_transformers_backend():
        raise Unsupported(
            "no key tells what the code that came with the model's files computes: drop "
            "--trust-remote-code"
        )
    used: str = model.architecture
    return "vllm" if used in _CLASSES else f"vllm {used}"


def _lora(config: Any) -> str:
    """Those of a server's LoRA settings that decide what an adapter computes; "" for none."""
    if config is None:
        return ""
    modules = config.target_modules  # an empty list is not None, which is all
    modules = None if modules is None else sorted(set(modules))
    return json.dumps([modules, str(config.lora_dtype)])
