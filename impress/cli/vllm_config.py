"""`impress vllm-config`: what to pass to vLLM so that it uses a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from impress.cli.options import DiskGib, Store, store_dir, window_of
from impress.config import MIB, MOST_BYTES, Config, in_full
from impress.engines.vllm import CONNECTOR, CONNECTOR_MODULE
from impress.errors import BadInput
from impress.policy import Paper, Quality

_MOST_MIB = MOST_BYTES // MIB

#: Policies by the name an operator types, spelled as in the connector's settings: each with its
#: usual default, written out so that an operator sees it.
_FLOORS: dict[str, dict[str, Any]] = {
    "exact": {"name": "exact"},
    "paper": {"name": "paper", "keep": Paper().keep},
    "quality": {"name": "quality", "max_missing_mass": Quality().max_missing_mass},
}


def vllm_config(
    store: Store = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="What every request gets: exact, paper, quality.")
    ] = "exact",
    floor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The loosest policy a request may ask for in its kv_transfer_params.",
            show_default="the policy",
        ),
    ] = None,
    dram_mib: Annotated[int, typer.Option(min=0, max=_MOST_MIB, help="DRAM tier, MiB.")] = 1024,
    disk_gib: DiskGib = None,
) -> None:
    """Print a working **--kv-transfer-config** for vLLM: one line of JSON.

    On the CPU: CONFIG=$(impress vllm-config --store DIR) && python -m
    vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config "$CONFIG"

    On CUDA: CONFIG=$(impress vllm-config --store DIR) && VLLM_USE_V2_MODEL_RUNNER=0 vllm serve
    MODEL --attention-backend FLASH_ATTN --no-async-scheduling --kv-transfer-config "$CONFIG"
    (docs/VLLM.md, "On CUDA": not yet run)
    """
    where = in_full(store_dir(store))  # the server may run in another directory
    typer.echo(json.dumps(_config(str(where), policy, floor, dram_mib, disk_gib)))


def _config(
    store: str, policy: str, floor: str | None, dram_mib: int, disk_gib: int | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"dram_bytes": dram_mib * MIB}
    if (window := window_of(Path(store))) != Config().window:
        settings["window"] = window
    if disk_gib is not None:
        settings["disk_bytes"] = disk_gib << 30
    extra: dict[str, Any] = {
        "store": store,
        "policy": _named("--policy", policy),
        "config": settings,
    }
    if floor is not None:
        extra["floor"] = _named("--floor", floor)
        if policy not in ("exact", floor):  # as in the connector, whose settings need torch
            raise BadInput(
                f"--floor {floor} does not allow --policy {policy} to every request: name {policy} "
                "as the floor too, or exact as the policy"
            )
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _named(option: str, policy: str) -> dict[str, Any]:
    if policy not in _FLOORS:
        raise BadInput(f"{option} {policy}: want one of {', '.join(_FLOORS)}")
    return _FLOORS[policy]
