"""The machine a rank runs on: its identity, its name for a device, and the memory that a rank may use."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def host_name() -> str:
    """The machine's name, for people."""
    return socket.gethostname()


def host_identity() -> str:
    """The same for all ranks that share a machine's memory: the running kernel's own id, else the name."""
    boot_id = _read("/proc/sys/kernel/random/boot_id")
    return host_name() if boot_id is None else boot_id


def device_name(device: torch.device) -> str:
    """A short name of the kind of device, such as ``a100-sxm4-80gb`` or ``cpu``."""
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_properties(device).name.lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "cuda"


def processor_name(device: torch.device) -> str:
    """The name that the machine gives to the device's processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    match = re.search(r"^model name\s*: (.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match is not None else platform.processor() or platform.machine()


def usable_memory(device: torch.device, ranks_on_host: int) -> float:
    """Bytes that one rank may use.

    CUDA: what is free on the device now (``cudaMemGetInfo``). CPU: what is available on the machine, or within
    the control group's limit if that is less, divided by the ranks on the machine.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return _available() / ranks_on_host


def _available() -> float:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    if match is not None:
        available = float(match[1]) * 1024
    else:
        available = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, usage in _CGROUPS:
        most, used = _read(limit), _read(usage)
        if (
            most is not None
            and used is not None
            and most.isdigit()
            and used.isdigit()
            and int(most) > int(used)
        ):
            available = min(available, float(int(most) - int(used)))
    return available


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
