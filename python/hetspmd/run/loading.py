"""Checkpoints read tensor by tensor: a rank takes its shards of a state dict and holds one whole tensor at a time.

``torch.nn.Module.load_state_dict`` copies each tensor into the parameter of its name. It is given stand-ins that
read theirs when that happens, and let go of it right afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetspmd.dist.doings import Loaded
from hetspmd.lower.local_program import LocalTensor
from hetspmd.run.shard_tensors import plain
from hetspmd.run.shards import ShardMark, marked


class _Unread:
    """This rank's shard of a tensor that nobody has read yet; torch takes it for a tensor."""

    def __init__(self, read: Callable[[], Any], key: str, layout: LocalTensor, loaded: Loaded) -> None:
        self._read, self._key, self._layout, self._loaded = read, key, layout, loaded
        self.shape, self.is_meta = torch.Size(layout.local_shape), False

    def size(self) -> torch.Size:
        return self.shape

    def read(self) -> torch.Tensor:
        """The shard, a view of the whole tensor. Raises RuntimeError if its shape is not the model's."""
        whole = self._read()
        if _is_part(whole, self._key, self._layout):
            return plain([whole])[0]
        if wrong := _misfit(self._key, whole, self._layout):
            raise RuntimeError(wrong)
        self._loaded.add(self._key, whole)
        return self._layout.slice(whole)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = [each.read() if isinstance(each, _Unread) else each for each in args]
        return function(*values, **(kwargs or {}))


def local_state(
    state: Mapping[str, Any], shards: Mapping[str, LocalTensor], loaded: Loaded
) -> dict[str, Any]:
    """What ``load_state_dict`` of the sharded module is given for a single-device ``state``.

    A mapping other than a dict is asked for each parameter once, when it is copied; ``loaded`` is told. Raises
    RuntimeError, before anything is loaded, if tensors of a dict have other shapes than the model's.
    """
    if isinstance(state, dict):
        checks = ((k, _misfit(k, v, shards[k])) for k, v in state.items() if k in shards)
        if wrong := [text for _, text in checks if text]:
            raise RuntimeError("the state dict does not fit the model: " + "; ".join(wrong))
    return {
        key: _Unread(partial(state.__getitem__, key), key, shards[key], loaded)
        if key in shards
        else state[key]
        for key in state
    }


def _is_part(values: Any, key: str, layout: LocalTensor) -> bool:
    """Whether values are this rank's part already: of a copy of a parameter, or an average of it."""
    own = marked(values) if isinstance(values, torch.Tensor) else None
    return own is not None and own.lies_as(ShardMark(key, layout))


def _misfit(key: str, whole: Any, layout: LocalTensor) -> str:
    if not isinstance(whole, torch.Tensor):
        return f"{key} is a {type(whole).__name__}, not a tensor"
    if tuple(whole.shape) != layout.shape and not _is_part(whole, key, layout):
        return f"{key} has shape {list(whole.shape)}, the model's is {list(layout.shape)}"
    return ""
