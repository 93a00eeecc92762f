"""The memory in which tensors lie, and whether it is still there."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Memory:
    """The memory of a tensor and of its views: equal for all of them, kept alive by none of this."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has none

    def is_free(self) -> bool:
        """Whether no tensor lies in it any more. Nothing else is equal to it afterwards."""
        return bool(self._storage.expired())  # type: ignore[no-untyped-call]  # torch has none

    def __hash__(self) -> int:
        return hash(self._storage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and bool(self._storage == other._storage)
