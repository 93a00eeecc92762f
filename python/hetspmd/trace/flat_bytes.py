"""The bytes of a tensor's elements."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor's elements in order, shape (bytes,), on its device; a view where they lie so in
    memory. A conjugate or a negative that torch has put off is taken first: the bytes would be another tensor's."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
