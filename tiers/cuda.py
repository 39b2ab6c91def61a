"""Whether a CUDA device is there at all: asked of the driver, before anything heavy is imported."""

from __future__ import annotations

import ctypes


def no_device() -> str:
    """Why there is none, in one line; "" where the driver finds one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver finds no device"
    return ""
