"""How the environment lets oneDNN round, which computes a CPU's products for torch and vLLM."""

from __future__ import annotations

import os
from typing import Final

#: The older name counts where the newer is not set.
_NAMES: Final = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def fpmath() -> str:
    """The mode by which float32 matrices may be rounded before they are multiplied; "" for none."""
    mode = next((value for name in _NAMES if (value := os.environ.get(name))), "").lower()
    return "" if mode == "strict" else mode
