"""The guard on batches: a plan serves the structure, shapes, dtypes and plain values it was made for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetspmd.dist.communicator import Communicator
from hetspmd.errors import BatchMismatchError, DeviceError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.placement import shard
from hetspmd.run.shards import marked
from hetspmd.trace.admissible import argument_names, spoken
from hetspmd.trace.compat.trees import flatten, flatten_with_names, parts_of, spec_from_text
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import leaf_path
from hetspmd.trace.values import dtype_name

_LITERALS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Expected:
    """What a graph takes: the keyword order and spec of its example, and each leaf.

    ``leaves`` are (shape, dtype) of tensors, plain values as they are; ``names`` is how messages call them.
    ``numbers`` names the numbers of the model that follow the batch's tensors.
    """

    keywords: tuple[str, ...]
    spec: Any
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    numbers: tuple[str, ...] = ()

    @property
    def input_names(self) -> list[str]:
        """How messages call what a step takes."""
        return [*(self.names[i] for i in self.inputs), *self.numbers]


def expected(graph: Graph, function: Callable[..., Any] | None = None) -> Expected:
    """The batch that a graph was made for; inputs that are numbers of the model belong to no batch.
    ``function`` is what is called with it: messages take the names of positional arguments from it."""
    spec = spec_from_text(graph.input_spec)
    leaves: list[Any] = [None] * spec.num_leaves
    paths = [""] * spec.num_leaves
    batch = [i for i in graph.inputs if i.leaf >= 0]
    for i in batch:
        tensor = graph.tensors[i.tensor]
        leaves[i.leaf] = (tensor.shape, tensor.dtype)
        paths[i.leaf] = i.path
    for s in graph.statics:
        leaves[s.leaf] = s.value
        paths[s.leaf] = s.path
    args, kwargs = parts_of(leaves, spec)
    arguments = {} if function is None else argument_names(function, args)
    names = tuple(spoken(path, arguments) for path in paths)
    numbers = tuple(i.path for i in graph.inputs if i.leaf < 0)
    return Expected(tuple(kwargs), spec, tuple(leaves), names, tuple(i.leaf for i in batch), numbers)


def match(
    wanted: Expected, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor] | None, str]:
    """The graph's input tensors in its order, or None and how the batch differs."""
    if set(kwargs) != set(wanted.keywords):
        keywords, asked = sorted(kwargs), sorted(wanted.keywords)
        return None, f"keyword arguments {keywords} instead of {asked}"
    leaves, spec = flatten((args, {k: kwargs[k] for k in wanted.keywords}))
    if spec != wanted.spec:
        return None, "another structure of positional arguments or containers"
    for leaf, want, path in zip(leaves, wanted.leaves, wanted.names, strict=True):
        got: Any = leaf
        if isinstance(leaf, torch.Tensor):
            got = (tuple(leaf.shape), dtype_name(leaf.dtype))
        elif not isinstance(leaf, _LITERALS):
            return None, f"{path} is a {type(leaf).__name__}"
        if not _same(got, want):
            return None, f"{path} is {_text(got)}, the plan's {_text(want)}"
    return [leaves[i] for i in wanted.inputs], ""


def refuse_shards(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ShardError for a batch in which a parameter or gradient lies of which this rank holds a part."""
    for leaf in flatten((args, dict(kwargs)))[0]:
        own = marked(leaf) if isinstance(leaf, torch.Tensor) else None
        if own is not None:
            raise own.refusal("the model, which it is given to,", "read")


def refuse_own_rows(
    outputs: Sequence[LocalTensor], called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise BatchMismatchError for a batch of which one tensor has this rank's rows of an output, such as a hidden
    state that is fed back, while others have the rows of the whole batch. ``called`` is what the batch is given to:
    whether the plan has such an argument does not matter, since the first call often goes without."""
    rows = {tuple(o.local_shape): tuple(o.shape) for o in outputs if o.form == shard(0)}
    named = flatten_with_names((args, dict(kwargs)))
    tensors = [(leaf_path(name), leaf) for name, leaf in named if isinstance(leaf, torch.Tensor)]
    for path, leaf in tensors:
        shape = tuple(leaf.shape)
        whole = rows.get(shape, shape)
        if whole != shape and any(other.shape[:1] == whole[:1] for _, other in tensors):
            raise BatchMismatchError(
                f"{spoken(path, argument_names(called, args))} is {_text((shape, dtype_name(leaf.dtype)))}, "
                f"this rank's rows of an output of {list(whole)}; outputs that are divided along dim 0 come back "
                "as this rank's rows, and a batch is whole on every rank: HAP(..., gather_outputs=True) returns "
                "whole outputs, which can be fed back"
            )


def _same(got: Any, want: Any) -> bool:
    """Whether two leaves make the same graph: 0.0 and -0.0 do not, two NaN do."""
    if type(got) is float and type(want) is float:
        return repr(got) == repr(want)
    return type(got) is type(want) and bool(got == want)


def _text(leaf: Any) -> str:
    if isinstance(leaf, tuple):
        shape, dtype = leaf
        return f"{dtype}{list(shape)}"
    return repr(leaf)


def check_tensors(inputs: list[torch.Tensor], paths: list[str], device: torch.device) -> None:
    """Raise DeviceError for a tensor on another device, BatchMismatchError for one that wants a gradient."""
    for tensor, path in zip(inputs, paths, strict=True):
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            raise DeviceError(f"{path} is on {tensor.device}, the model on {device}; move the batch")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise BatchMismatchError(
                f"{path} requires a gradient; HAP computes gradients of parameters only: detach the batch. Its own "
                "gradient is that of a single-device copy, model = hap.full_module() on every rank, or is computed "
                "in the model"
            )


def check_same_batch(
    communicator: Communicator, inputs: Sequence[torch.Tensor], paths: Sequence[str]
) -> None:
    """Raise BatchMismatchError, on every rank, unless all ranks hold the same batch. Blocks.

    Compares checksums, so that a loader that still gives every rank its own rows is refused, not trained on.
    """
    if communicator.world == 1:
        return
    checksums = communicator.exchange([checksum(tensor) for tensor in inputs])
    for rank, sums in enumerate(checksums):
        for path, mine, first in zip(paths, sums, checksums[0], strict=True):
            if mine != first:
                raise BatchMismatchError(
                    f"rank {rank} was given another {path} than rank 0; every rank takes the same global batch "
                    "and HAP uses its own share of it: no DistributedSampler, and the same seed for shuffling"
                )


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's elements in order."""
    return zlib.crc32(flat_bytes(tensor).cpu().numpy().data)
