"""What measured a line: the names and versions of the device, its driver, torch, NCCL and hetspmd."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping

import torch

from hetspmd import __version__

CPU = "CPU"
"""The name of the device where there is no GPU."""


def described(device: str) -> dict[str, str]:
    """This machine, on whose device of this kind (``cuda``, ``cpu``) the bench runs."""
    found = {
        "device": CPU,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hetspmd": __version__,
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = _driver()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def words(machine: Mapping[str, str]) -> str:
    """A machine in a line of text."""
    if not machine:
        return "not asked"
    return ", ".join((machine["device"], *(f"{k} {v}" for k, v in machine.items() if k != "device")))


def _driver() -> str:
    """The version of the driver, as NVIDIA's tool says it; ``unknown`` without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.split()
    return said[0] if said else "unknown"
