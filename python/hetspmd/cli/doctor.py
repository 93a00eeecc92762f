"""``hetspmd doctor``: what is installed, and whether it fits."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TORCH_RANGE = ((2, 11), (2, 16))
"""Releases of torch that hetspmd is made for: from the first to before the second."""


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    p = commands.add_parser(
        "doctor", parents=[debug], help="show versions and backends; status 1 if they do not fit"
    )
    p.set_defaults(run=run)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _nccl() -> str:
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return ".".join(map(str, version))


def run(options: argparse.Namespace) -> int:
    """Print one line per fact; 1 if training could not work here."""
    import torch
    import torch.distributed as dist

    from hetspmd import _core

    low, high = TORCH_RANGE
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    fits = low <= release < high
    available = dist.is_available()
    backends = [n for n in ("gloo", "nccl") if available and dist.is_backend_available(n)]
    wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    lines = [
        ("hetspmd", _core.version(), True),
        ("python", platform.python_version(), True),
        ("torch", torch.__version__ + ("" if fits else f": hetspmd is made for {wanted}"), fits),
        ("highspy", _version("highspy"), _version("highspy") != "not installed"),
        ("transformers", _version("transformers"), True),
        ("torchvision", _version("torchvision"), True),
        (
            "backends",
            ", ".join(backends) or "none: this build of torch has no torch.distributed",
            bool(backends),
        ),
        ("CPU", f"{torch.get_num_threads()} threads", True),
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            lines.append((f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True))
        lines.append(("NCCL", _nccl(), "nccl" in backends))
    else:
        lines.append(("GPU", "none", True))
    for name, text, good in lines:
        print(f"{'ok ' if good else 'BAD'}  {name:<14}{text}")
    return 0 if all(good for _, _, good in lines) else 1
