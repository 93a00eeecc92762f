"""The bytes of all tensors that exist, counted as they are made and die; and a limit on them.

Each op's results are seen through a dispatch mode, a storage that dies through a weak reference, one that changes
size by a wrapper around ``UntypedStorage.resize_``. With a limit, the op that goes beyond it raises
StepMemoryError: so a process on a CPU meets the end of its device's memory as one on a GPU does, by an error
after which it goes on, and not by the system's killing it.

What is not a tensor (workspaces of kernels, gloo's buffers, what the allocator keeps) is not counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hetspmd.errors import StepMemoryError
from hetspmd.trace.compat.tensors import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts within its context; tensors that were made before are counted once an op returns them.

    ``current`` and ``peak`` in bytes; ``limit``: StepMemoryError is raised beyond so many. Slow: for steps that are
    not timed.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.current = 0
        self.peak = 0
        self.limit = limit
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # a storage may die on another thread

    def __enter__(self) -> LiveBytes:
        counter, original = self, torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            counter.add(storage)
            return result

        self._original = original
        self._put(resize_)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's is untyped
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]  # torch's is untyped
        self._put(self._original)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _tensors(result):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
                self.add(leaf.untyped_storage())
        return result

    @staticmethod
    def _put(resize: Any) -> None:
        """Let all storages have this ``resize_``."""
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # seen until the context ends

    def reset_peak(self) -> None:
        """Let ``peak`` be the most from now on."""
        self.peak = self.current

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size. Raises StepMemoryError where there are more bytes than the limit."""
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
            if self.limit is not None and self.current > self.limit:
                raise StepMemoryError(self.current, self.limit)

    def _dead(self, key: int, reference: Any) -> None:
        with self._lock:
            if self._references.get(key) is reference:
                self._forget(key)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)
        self._references.pop(key, None)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of what an op returned."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
