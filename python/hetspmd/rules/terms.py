"""Factors from named dims: what the rules in :mod:`hetspmd.rules.ops` are built with.

Each tensor of a call gets a *term*, one entry per dim: a factor's name, ``(name, unit)`` where ``unit``
elements make one indivisible unit, or None for a dim that is never cut. The places of a factor follow:

- cut where the tensor has a dim of that name,
- whole (None) in an input that lacks it or has extent 1 there (broadcasting),
- SUM in an output that lacks it or has extent 1 there, unless that output's term is None (whole),
- SUM in an input listed as ``added`` when some output is SUM (addmm's bias).

Factors of fewer than two units cannot be cut and are left out; so are those that would sum a bool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from hetspmd.errors import RuleError
from hetspmd.rules.kernels import empty_shards
from hetspmd.rules.rule import SUM, Call, Cut, Factor, Local, LocalCall, Place, TensorType
from hetspmd.trace.graph import DEVICE, DType

Dim: TypeAlias = str | tuple[str, int] | None
Term: TypeAlias = Sequence[Dim] | None

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
COMPLEX = frozenset({"complex128", "complex64", "complex32"})
INTEGER = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"})

WRAPS = "integer summands may wrap around, and their conversion does not"
"""Why an op that converts integers has no row with All-Reduce."""


def wrap(dim: int, ndim: int) -> int:
    """``dim`` counted from the front. Raises RuleError if the tensor has no such dim."""
    extent = max(ndim, 1)
    if not -extent <= dim < extent:
        raise RuleError(f"dim {dim} of a tensor with {ndim} dims")
    return dim % extent


def reduced_dims(dims: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """The dims that a reduction goes over; None and the empty list mean all."""
    if dims is None or dims == ():
        return frozenset(range(ndim))
    dim_list = (dims,) if isinstance(dims, int) else dims
    return frozenset(wrap(d, ndim) for d in dim_list) if ndim else frozenset()


def dim_names(ndim: int, prefix: str = "d") -> tuple[str, ...]:
    """``d0, d1, ...``."""
    return tuple(f"{prefix}{i}" for i in range(ndim))


def broadcast_term(term: Sequence[Dim], type_: TensorType) -> Term:
    """The term of a tensor that is broadcast, aligned at the right, to one with ``term``."""
    if type_.ndim > len(term):
        raise RuleError(f"shape {list(type_.shape)} does not broadcast to {len(term)} dims")
    return tuple(term[len(term) - type_.ndim :])


def broadcast_shape(types: Iterable[TensorType]) -> tuple[int, ...]:
    """The shape to which tensors broadcast that are known to do so."""
    shapes = [t.shape for t in types]
    ndim = max(map(len, shapes))
    columns = zip(*((1,) * (ndim - len(s)) + s for s in shapes), strict=True)
    return tuple(next((e for e in column if e != 1), 1) for column in columns)


def term_factors(
    call: Call, inputs: Sequence[Term], outputs: Sequence[Term], *, added: Collection[int] = ()
) -> tuple[Factor, ...]:
    """The factors that the terms name, in order of first appearance.

    Raises RuleError if the terms do not fit the call's shapes.
    """
    if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
        raise RuleError(
            f"{call.op}: terms for {len(inputs)} inputs and {len(outputs)} outputs, "
            f"the call has {len(call.inputs)} and {len(call.outputs)}"
        )
    sizes: dict[str, int] = {}
    for term, type_ in (*zip(inputs, call.inputs, strict=True), *zip(outputs, call.outputs, strict=True)):
        if term is None or type_ is None:
            continue
        if len(term) != type_.ndim:
            raise RuleError(f"{call.op}: {len(term)} dims named, the tensor has shape {list(type_.shape)}")
        for dim, extent in zip(term, type_.shape, strict=True):
            if dim is None:
                continue
            name, unit = _split(dim)
            if extent == 1:
                sizes.setdefault(name, 1)
            elif extent % unit or sizes.get(name, 1) not in (1, extent // unit):
                raise RuleError(f"{call.op}: factor {name} has {sizes.get(name)} units and {extent}/{unit}")
            else:
                sizes[name] = extent // unit
    factors = []
    for name, size in sizes.items():
        if size < 2:
            continue
        outs = tuple(_place(name, t, x, SUM) for t, x in zip(outputs, call.outputs, strict=True))
        if any(
            p is SUM and x is not None and x.dtype == "bool" for p, x in zip(outs, call.outputs, strict=True)
        ):
            continue
        lacking: Place = SUM if SUM in outs else None
        ins = tuple(
            _place(name, t, x, lacking if i in added else None)
            for i, (t, x) in enumerate(zip(inputs, call.inputs, strict=True))
        )
        factors.append(Factor(name, size, ins, outs))
    return tuple(factors)


def _split(dim: str | tuple[str, int]) -> tuple[str, int]:
    return (dim, 1) if isinstance(dim, str) else dim


def _place(name: str, term: Term, type_: TensorType | None, lacking: Place) -> Place:
    if term is None or type_ is None:
        return None
    for i, dim in enumerate(term):
        if dim is not None and _split(dim)[0] == name and type_.shape[i] != 1:
            return Cut(i, _split(dim)[1])
    return lacking


def linear_sets(call: Call, groups: Iterable[Iterable[int | None]]) -> tuple[frozenset[int], ...]:
    """Those of the groups of input indices for which the dtypes make the op's arithmetic linear.

    None entries (an optional tensor that is absent) drop out. Floating and complex numbers may mix; integers
    wrap around, so there input and output dtypes must be equal; bool is never linear.
    """
    outs = [t.dtype for t in call.outputs if t is not None]
    sets: dict[frozenset[int], None] = {}
    for group in groups:
        indices = frozenset(i for i in group if i is not None)
        if indices and all(_linear_dtype(call.inputs[i].dtype, out) for i in indices for out in outs):
            sets[indices] = None
    return tuple(sets)


def _linear_dtype(source: str, target: str) -> bool:
    real = FLOATING | COMPLEX
    return (source in real and target in real) or (source in INTEGER and source == target)


def zero_outputs(local: Local) -> LocalCall:
    """The call of a device without units where an op refuses empty shards: zeros, None where it returns none.

    Right only if every output is cut, a sum, or never read.
    """
    dtypes = tuple(None if t is None else DType(t.dtype) for t in local.call.outputs)
    return empty_shards, (local.output_shapes, dtypes, DEVICE), {}
