"""Peak memory of a step, measured in two ways that share nothing.

:class:`LiveBytes` adds up the storages of all tensors that exist (:mod:`hetspmd.profile.live_bytes`; FSDP frees its
gathered parameters by changing the size of theirs). :class:`ResidentPeak` asks the kernel for the largest resident
set. The first leaves out what is not a tensor (gloo's buffers), the second adds what the allocator keeps.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from hetspmd.profile import live_bytes as profile


class LiveBytes(profile.LiveBytes):
    """As that of hetspmd, also of FSDP's tensors, whose ops on local tensors are counted."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class ResidentPeak:
    """The largest resident set since :meth:`reset`, less that when the object was made, in bytes."""

    def __init__(self) -> None:
        self.reset()  # what was freed but not given back would hide what comes
        self._base = _status("VmRSS")

    def reset(self) -> None:
        """Let the peak be the most from now on, without what was freed."""
        _trim()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @property
    def peak(self) -> int:
        return max(0, _status("VmHWM") - self._base)


def available() -> int:
    """Bytes that processes of this machine can still have."""
    return _of_machine("MemAvailable")


def give_back(below: float) -> None:
    """Return what this process's heap holds unused to the system, if less than a part ``below`` of the machine's
    memory is available. What is made and freed leaves holes that what comes next does not fit in."""
    if available() < below * _of_machine("MemTotal"):
        _trim()


def _trim() -> None:
    """Only glibc's heap can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _of_machine(what: str) -> int:
    return _bytes("/proc/meminfo", what)


def _status(what: str) -> int:
    return _bytes("/proc/self/status", what)


def _bytes(file: str, what: str) -> int:
    for line in Path(file).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{file} has no {what}")
