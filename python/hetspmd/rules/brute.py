"""Running one op call in shards on one process: the mechanics below the oracle.

A value of form ``replicated`` is held whole by every rank, ``shard(d)`` as consecutive slices along d
(rank r holds units ``starts[r]..starts[r+1]`` of the factor), ``All-Reduce`` as summands. :func:`shards`
splits a tensor by its form, :func:`execute` makes one rank's local call, :func:`assembled` inverts
``shards``, and :func:`mismatch` compares with the single device: exactly for integers and bools, up to
rounding for floats.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hetspmd.placement import PARTIAL, REPLICATE, Placement, sharded_dim
from hetspmd.rules.rule import Call, Cut, LocalCall, Place, TensorType
from hetspmd.trace.graph import Ref
from hetspmd.trace.values import dtype_name, from_torch, to_torch, torch_op

Outputs: TypeAlias = tuple[Tensor | None, ...]

# Relative to the largest magnitude among the result and its summands.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}


@dataclass(frozen=True)
class ConcreteCall:
    """A concrete call on the single device: its tensors, their results, and the call as a rule sees it."""

    call: Call
    inputs: tuple[Tensor, ...]
    outputs: Outputs
    device: torch.device

    @property
    def tolerance(self) -> float:
        """The relative tolerance that the coarsest floating dtype of the call asks for."""
        tensors = (*self.inputs, *(o for o in self.outputs if o is not None))
        return max((_TOLERANCES[t.dtype] for t in tensors if t.dtype in _TOLERANCES), default=0.0)


def case_of(op: str, args: Sequence[Any], kwargs: dict[str, Any], seed: int = 0) -> ConcreteCall:
    """Run ``op`` on the single device, with the random generator at ``seed``."""
    tensors: list[Tensor] = []

    def abstract(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Ref(len(tensors) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(abstract(v) for v in value)
        return from_torch(value)

    abstract_args = tuple(abstract(a) for a in args)
    abstract_kwargs = {k: abstract(v) for k, v in kwargs.items()}
    device = tensors[0].device if tensors else torch.device("cpu")
    outputs = execute((op, abstract_args, abstract_kwargs), tensors, device, seed)
    call = Call(
        op,
        abstract_args,
        abstract_kwargs,
        tuple(_type(t) for t in tensors),
        tuple(None if o is None else _type(o) for o in outputs),
    )
    return ConcreteCall(call, tuple(tensors), outputs, device)


def with_inputs(case: ConcreteCall, inputs: Sequence[Tensor], seed: int = 0) -> ConcreteCall:
    """The same call on other tensors of the same shapes and dtypes."""
    outputs = execute((case.call.op, case.call.args, dict(case.call.kwargs)), inputs, case.device, seed)
    return ConcreteCall(case.call, tuple(inputs), outputs, case.device)


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), dtype_name(tensor.dtype))


def execute(call: LocalCall, tensors: Sequence[Tensor], device: torch.device, seed: int) -> Outputs:
    """Make a local call: ``Ref(i)`` becomes ``tensors[i]``. What is no tensor in the result becomes None."""
    target, args, kwargs = call
    function = torch_op(target) if isinstance(target, str) else target

    def concrete(value: Any) -> Any:
        if isinstance(value, Ref):
            return tensors[value.id]
        if isinstance(value, (list, tuple)):
            return [concrete(v) for v in value]
        return to_torch(value, device)

    with torch.no_grad(), warnings.catch_warnings(), seeded(seed):
        warnings.simplefilter("ignore")
        result = function(*(concrete(a) for a in args), **{k: concrete(v) for k, v in kwargs.items()})
    flat = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(o if isinstance(o, Tensor) else None for o in flat)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator, and put its state back afterwards."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def splits(size: int) -> tuple[tuple[int, ...], ...]:
    """Unit counts per rank over 1, 2 and 3 ranks: even, uneven, and with empty shards everywhere."""
    half, third = (size + 1) // 2, max(size // 3, 1)
    a = max(size * 4 // 7, 1)
    b = max((size - a) * 2 // 3, 0)
    unit_counts = [
        (a, b, size - a - b),
        (1, size - 2, 1) if size >= 3 else (1, 0, size - 1),
        (size - 2 * third, third, third) if size >= 3 else (1, size - 1, 0),
        (third, 0, size - third),
        (0, half, size - half),
        (half, size - half, 0),
        (0, size, 0),
        (0, 0, size),
        (size,),
        (size - half, half),
        (size, 0),
    ]
    return tuple(dict.fromkeys(unit_counts))


def starts_of(units: Sequence[int]) -> tuple[int, ...]:
    """``(0, u0, u0 + u1, ...)``."""
    out = [0]
    for u in units:
        out.append(out[-1] + u)
    return tuple(out)


def summands(tensor: Tensor, world: int, generator: torch.Generator, whole_on: int | None) -> list[Tensor]:
    """Tensors that add up to ``tensor``: random, or all of it on rank ``whole_on`` and zeros elsewhere."""
    if whole_on is not None:
        return [tensor if r == whole_on else torch.zeros_like(tensor) for r in range(world)]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        finite = tensor[torch.isfinite(tensor)].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
        draws = [
            (torch.randn(tensor.shape, dtype=wide, generator=generator) * max(scale, 1e-3)).to(tensor)
            for _ in range(world - 1)
        ]
    else:
        draws = [torch.randint(0, 4, tensor.shape, generator=generator).to(tensor) for _ in range(world - 1)]
    last = tensor.clone()
    for draw in draws:
        last = last - draw
    return [*draws, last]


def shards(
    tensor: Tensor, place: Place, units: Sequence[int], generator: torch.Generator, whole_on: int | None
) -> list[Tensor]:
    """One local tensor per rank."""
    world = len(units)
    if place is None:
        return [tensor] * world
    if isinstance(place, Cut):
        starts = starts_of(units)
        cut = [
            (start * place.unit, extent * place.unit) for start, extent in zip(starts, units, strict=False)
        ]
        return [tensor.narrow(place.dim, start, extent).clone() for start, extent in cut]
    return summands(tensor, world, generator, whole_on)


def assembled(locals_: Sequence[Tensor], form: Placement) -> Tensor:
    """The reference tensor that local tensors of a form stand for (the first one for replicated)."""
    if form == REPLICATE:
        return locals_[0]
    if form == PARTIAL:
        total = locals_[0].clone()
        for t in locals_[1:]:
            total = total + t
        return total
    return torch.cat(list(locals_), sharded_dim(form))


def mismatch(got: Tensor, want: Tensor, tolerance: float, scale: float = 0.0) -> float | None:
    """None where ``got`` equals ``want`` (NaN equals NaN), else the largest error relative to the magnitude.

    ``scale`` is the largest magnitude of summands that cancel in ``got``. A wrong shape, dtype, NaN or
    infinity counts as an infinite error.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return inf
    if torch.equal(got, want):
        return None
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return inf
    if want.dtype.is_complex:
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    got, want = got.double(), want.double()
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return inf
    if not torch.equal(torch.nan_to_num(got[~finite], nan=0.5), torch.nan_to_num(want[~finite], nan=0.5)):
        return inf
    if not bool(finite.any()):
        return None
    error = float((got[finite] - want[finite]).abs().max())
    magnitude = max(float(want[finite].abs().max()), scale, 1e-3)
    return None if error <= tolerance * magnitude else error / magnitude


def magnitude(tensors: Sequence[Tensor]) -> float:
    """The largest finite magnitude."""
    largest = 0.0
    for t in tensors:
        if t.numel() and (t.dtype.is_floating_point or t.dtype.is_complex):
            largest = max(largest, float(torch.nan_to_num(t.abs().double(), nan=0.0, posinf=0.0).max()))
    return largest
