"""vLLM with a prefix store under it, through its plug-in points: no fork, no patch.

    ImpressConnector   a KV connector: whole prefixes in and out of the store        (connector)
    register           an attention backend that reads chosen rows of a prefix       (attention)

Importing this package imports neither vLLM nor torch; docs/VLLM.md says how to use it.
"""

from __future__ import annotations

#: What `--kv-transfer-config` names; `impress vllm-config` prints the whole of it.
CONNECTOR = "ImpressConnector"
CONNECTOR_MODULE = "impress.engines.vllm.connector"


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    from impress.engines.vllm.attention import register_backend

    register_backend()
