"""Whether a CUDA device is there at all: asked of the driver, before anything heavy is imported."""

from __future__ import annotations

import ctypes
from typing import Final

#: The driver's error where it finds no device.
_NO_DEVICE: Final = 100
#: What to do about errors that come although there is a device.
_TO_DO: Final = {
    3: "where this process was forked from one that used CUDA, start it by spawn",
    802: "start the fabric manager (nvidia-fabricmanager)",
    803: "libcuda.so.1 is of another version than the kernel's module: reboot, or load that anew",
    999: "see dmesg; the module nvidia_uvm may have to be loaded",
}


def no_device() -> str:
    """Why no device can be used, in one line; "" where the driver finds one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    error: int = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error in (0, _NO_DEVICE):
        return "" if count.value else "the CUDA driver finds no device"
    return f"the CUDA driver fails with error {error}: {_TO_DO.get(error, 'see nvidia-smi')}"
