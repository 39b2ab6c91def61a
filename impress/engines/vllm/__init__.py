"""vLLM with a prefix store under it, through its plug-in points: no fork, no patch.

    ImpressConnector   a KV connector: whole prefixes in and out of the store        (connector)
    ChoosingBackend    an attention backend that reads chosen rows of a prefix       (attention;
                       on CUDA ChoosingFlashBackend, attention_cuda: not yet run on a GPU)

Importing this package imports neither vLLM nor torch; docs/VLLM.md says how to use it.
"""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("impress")

#: The connector's name in `--kv-transfer-config`; `impress vllm-config` prints the whole value.
CONNECTOR: Final = "ImpressConnector"
CONNECTOR_MODULE: Final = "impress.engines.vllm.connector"
BACKEND: Final = "impress.engines.vllm.attention.ChoosingBackend"
CUDA_BACKEND: Final = "impress.engines.vllm.attention_cuda.ChoosingFlashBackend"


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes.

    Effects: replaces CPU_ATTN, or on CUDA FLASH_ATTN, with our backend, which does nothing of its
    own until a connector with a sparse policy is at work. A vLLM that keeps them elsewhere is left
    as it is: an error here would end every server of its environment.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as err:
        log.warning("impress: this vLLM takes no attention backend: none chooses rows (%s)", err)
        return
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.FLASH_ATTN, CUDA_BACKEND)
