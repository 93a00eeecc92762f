"""Peak memory of a step, measured in two ways that share nothing.

:class:`LiveBytes` adds up the storages of all tensors that exist: each op's results are seen through a dispatch
mode, a storage that dies through a weak reference, one that changes size (FSDP frees its gathered parameters
so) by a wrapper around ``UntypedStorage.resize_``. :class:`ResidentPeak` asks the kernel for the largest resident
set. The first leaves out what is not a tensor (gloo's buffers), the second adds what the allocator keeps.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts within its context; tensors that were made before are counted once an op returns them.

    ``current`` and ``peak`` in bytes. Slow: for steps that are not timed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # a storage may die on another thread

    def __enter__(self) -> LiveBytes:
        original = torch.UntypedStorage.resize_
        counter = self

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            counter._add(storage)
            return result

        self._resize = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]  # torch's
        self._resize.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its ops on local tensors are counted
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
                self._add(leaf.untyped_storage())
        return result

    def reset_peak(self) -> None:
        """Let ``peak`` be the most from now on."""
        self.peak = self.current

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            known = self._references.get(key)
            if known is None or known() is None:
                self._forget(key)
                self._references[key] = weakref.ref(storage, partial(self._dead, key))
            self.current += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self.peak = max(self.peak, self.current)

    def _dead(self, key: int, reference: Any) -> None:
        with self._lock:
            if self._references.get(key) is reference:
                self._forget(key)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)
        self._references.pop(key, None)


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
