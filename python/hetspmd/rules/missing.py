"""Rows that hold but that a rule does not have, found by enumeration.

A candidate names a form for every input: ``replicated``, ``partial``, or ``shard(d)`` of a dim of at
least two elements, all cut dims standing for one factor of n units, where n runs over the divisors of the
greatest common divisor of their extents, largest first. The local call is the plain one (shape arguments
replaced, no rewrite); the forms of the outputs are read off its results. A candidate counts if it holds on
the sample, on redraws of its floating inputs (other signs, other scales) and bool inputs, and on several
splits. Integer inputs stay as given, for they may be indices; an op whose inputs are all integers may have
them as summands. What the rule's rows imply is no news: a row implies a candidate if its precondition is
available from the candidate's and the candidate's postcondition from the row's (by slicing or masking).
The form of an input that is read for its shape or dtype only (redrawing it changes nothing) does not count
where another input does, and a row that leaves every output whole is no candidate, for it shares no work out.

Candidates come in the order of how many inputs are not whole, then by input; :data:`LIMIT` caps them per
sample, and the report says when it struck.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, product
from math import gcd, nan
from typing import Final

import torch
from torch import Tensor

from hetspmd.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    available,
    in_our_words,
    is_sharded,
    placement_text,
    shard,
    sharded_dim,
)
from hetspmd.rules.brute import (
    ConcreteCall,
    Outputs,
    assembled,
    execute,
    magnitude,
    mismatch,
    shards,
    with_inputs,
)
from hetspmd.rules.rule import SUM, Cut, OpRule, Place, Triple, local_shape

LIMIT: Final = 1500
_REDRAWS: Final = 3
_SEED: Final = 7
_GUARD: Final = 256
_POOL: Final = 100_000

# Many kernels take sizes or indices on trust, backward kernels above all: a candidate that breaks them would
# corrupt memory. Their candidates are coherent: whatever is cut, among the first two dims, has one extent,
# and everything of that extent is cut; where there are indices, these too, and along the first dim.
_TRUSTING: Final = (
    "_backward",
    "batch_norm",
    "embedding",
    "flash_attention",
    "grid_sampler",
    "pool",
    "upsample",
    "weight_norm",
)
# And these take them from arguments, so that nothing can be cut without a rewrite.
_SIZES_AS_ARGUMENTS: Final = ("native_group_norm",)

PlacementPair = tuple[tuple[Placement, ...], tuple[Placement, ...]]


@dataclass(frozen=True)
class MissingTriple:
    """A row that holds on a sample and that the rule lacks.

    Attributes:
        text: The row.
        sample: The sample's place in the list.
        sample_text: The sample's call.
        pre: The placement of each input.
        post: The placement of each output.
        units: Units of the dim that is cut; 0 where none is.
    """

    text: str
    sample: int
    sample_text: str
    pre: tuple[Placement, ...]
    post: tuple[Placement, ...]
    units: int

    def __str__(self) -> str:
        cut = f" ({self.units} units)" if self.units else ""
        return f"missing: {self.text}{cut}\n    sample {self.sample}: {self.sample_text}"


def triple_text(pre: Sequence[Placement], post: Sequence[Placement]) -> str:
    """``{shard(0), replicated} {partial}``."""
    return f"{{{', '.join(map(placement_text, pre))}}} {{{', '.join(map(placement_text, post))}}}"


def implies(row: PlacementPair, candidate: PlacementPair, unread: Container[int] = ()) -> bool:
    """Whether ``row`` makes ``candidate`` superfluous; the forms of ``unread`` inputs do not count."""
    needs = zip(candidate[0], row[0], strict=True)
    gives = zip(row[1], candidate[1], strict=True)
    return all(i in unread or available(have, want) for i, (have, want) in enumerate(needs)) and all(
        available(have, want) for have, want in gives
    )


def without_implied(rows: Iterable[MissingTriple]) -> tuple[MissingTriple, ...]:
    """The rows that no other row implies."""
    strongest: list[MissingTriple] = []
    pool = list(rows)
    for i, row in enumerate(pool):
        rivals = (
            other
            for j, other in enumerate(pool)
            if j != i
            and len(other.pre) == len(row.pre)
            and len(other.post) == len(row.post)
            and implies((other.pre, other.post), (row.pre, row.post))
        )
        if not any(rivals):
            strongest.append(row)
    return tuple(strongest)


def missing_rows(
    case: ConcreteCall, rule: OpRule, shape_only: Sequence[int], fixed: Sequence[int]
) -> tuple[dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...], int]], tuple[str, ...]]:
    """Text of each missing row -> (pre, post, units; 0 without a cut), and notes on what was left out."""
    op = case.call.op
    if op.split(".")[1].startswith(_SIZES_AS_ARGUMENTS):
        return {}, ("missing rows: the op takes sizes from its arguments without checking them",)
    triples = [_triple(row, case) for row in rule.rows(case.call)]
    cases = _redraws(case, fixed)
    idle = frozenset(i for i, t in enumerate(case.inputs) if _real(t) and not _matters(case, i))
    unread = idle if len(idle) < len(case.inputs) else frozenset()
    candidates = list(islice(_candidates(case, rule, idle), LIMIT + 1))
    capped = len(candidates) > LIMIT
    notes = (f"missing rows: only the first {LIMIT} candidates were tried",) if capped else ()
    rows: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...], int]] = {}
    asked = sorted(set(rule.shape_args.values()))
    same_pre = {pre for pre, _ in triples} if not asked else set()
    for pre, shaped in candidates[:LIMIT]:
        if pre in same_pre:
            continue
        for units in _unit_counts(case, pre, shaped):
            posts = _posts(cases, rule, pre, shaped, units, shape_only)
            if not posts:
                continue
            for post in posts:
                text = triple_text(pre, post)
                if any(implies(row, (pre, post), unread) for row in triples):
                    continue
                if any(fnmatchcase(text, in_our_words(pattern)) for pattern in rule.omitted):
                    continue
                rows.setdefault(text, (pre, post, units))
            break
    return rows, notes


def _triple(row: Triple, case: ConcreteCall) -> PlacementPair:
    post = tuple(REPLICATE if o is None else f for f, o in zip(row.post, case.outputs, strict=True))
    return row.pre, post


def _candidates(
    case: ConcreteCall, rule: OpRule, idle: frozenset[int]
) -> Iterator[tuple[tuple[Placement, ...], dict[int, Placement]]]:
    """Forms of all inputs, and forms of the outputs whose shape is an argument."""
    integral = all(not _real(t) for t in case.inputs)
    whole: list[list[Placement]] = []
    for i, t in enumerate(case.inputs):
        partial = i not in idle if _real(t) else integral and t.dtype != torch.bool
        whole.append([REPLICATE, PARTIAL] if partial else [REPLICATE])
    shaped = [o for o in sorted(set(rule.shape_args.values())) if case.outputs[o] is not None]
    out_options = [[REPLICATE, *_cuts(result)] for o in shaped if (result := case.outputs[o]) is not None]
    if any(word in case.call.op for word in _TRUSTING):
        pres = _coherent(case, whole)
    else:
        pres = product(*([*w, *_cuts(t)] for w, t in zip(whole, case.inputs, strict=True)))
    ordered = sorted(islice(pres, _POOL), key=lambda pre: sum(f != REPLICATE for f in pre))
    for pre in ordered:
        if all(f == REPLICATE for f in pre):
            continue
        for forms in product(*out_options):
            yield pre, dict(zip(shaped, forms, strict=True))


def _real(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _cuts(tensor: Tensor) -> list[Placement]:
    return [shard(d) for d, extent in enumerate(tensor.shape) if extent >= 2]


def _coherent(case: ConcreteCall, whole: Sequence[list[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """Candidates without a cut, then those that cut one extent, wherever it is."""
    yield from product(*whole)
    indices = [t for t in case.inputs if t.dtype in (torch.int64, torch.int32) and t.dim()]
    limit = 1 if indices else 2
    for extent in sorted({n for t in case.inputs for n in t.shape[:limit] if n >= 2}):
        if any(t.shape[0] != extent for t in indices):
            continue
        options = []
        for w, t in zip(whole, case.inputs, strict=True):
            cuts = [shard(d) for d, n in enumerate(t.shape[:limit]) if n == extent]
            options.append(cuts or w)
        yield from product(*options)


def _matters(case: ConcreteCall, index: int) -> bool:
    """Whether the values of a floating input matter at all."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs = list(case.inputs)
    inputs[index] = _draw(inputs[index], generator)
    try:
        other = with_inputs(case, inputs, _SEED).outputs
    except (RuntimeError, ValueError, IndexError):
        return True
    pairs = zip(case.outputs, other, strict=True)
    return any(a is not None and b is not None and mismatch(a, b, 0.0) is not None for a, b in pairs)


def _draw(tensor: Tensor, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return torch.randn(tensor.shape, dtype=wide, generator=generator).to(tensor)


def _unit_counts(
    case: ConcreteCall, pre: Sequence[Placement], shaped: dict[int, Placement]
) -> tuple[int, ...]:
    """Numbers of units to try, largest first; (0,) where nothing is cut."""
    extents = [t.shape[sharded_dim(f)] for t, f in zip(case.inputs, pre, strict=True) if is_sharded(f)]
    for o, form in shaped.items():
        tensor = case.outputs[o]
        if is_sharded(form) and tensor is not None:
            extents.append(tensor.shape[sharded_dim(form)])
    if not extents:
        return (0,)
    common = gcd(*extents)
    return tuple(n for n in range(common, 1, -1) if common % n == 0)


def _redraws(case: ConcreteCall, fixed: Sequence[int]) -> list[ConcreteCall]:
    """The case and the same call on other values, so that only structural truths survive."""
    cases = [case]
    generator = torch.Generator().manual_seed(_SEED)
    for round_ in range(_REDRAWS):
        inputs = []
        for i, t in enumerate(case.inputs):
            if i in fixed:
                inputs.append(t)
            elif _real(t):
                draw = _draw(t, generator)
                inputs.append(draw.abs().to(t) + 0.1 if round_ == 2 else draw * (0.3, 8.0)[round_])
            elif t.dtype == torch.bool:
                inputs.append(torch.rand(t.shape, generator=generator) < 0.5)
            else:
                inputs.append(t)
        try:
            cases.append(with_inputs(case, inputs, _SEED))
        except (RuntimeError, ValueError, IndexError):
            continue  # values outside the op's domain, such as probabilities
    return cases


def _posts(
    cases: Sequence[ConcreteCall],
    rule: OpRule,
    pre: tuple[Placement, ...],
    shaped: dict[int, Placement],
    units: int,
    shape_only: Sequence[int],
) -> list[tuple[Placement, ...]]:
    """All postconditions that hold on every case and split; empty if some output has none."""
    common_forms: list[set[Placement]] | None = None
    for split in _test_splits(units):
        for number, case in enumerate(cases):
            forms = _forms_once(case, rule, pre, shaped, units, split, shape_only, _SEED + number)
            common_forms = (
                forms if common_forms is None else [a & b for a, b in zip(common_forms, forms, strict=True)]
            )
            if not all(common_forms):
                return []
    assert common_forms is not None
    if all(REPLICATE in forms for forms in common_forms):
        return []
    choices = [[REPLICATE] if REPLICATE in forms else sorted(forms) for forms in common_forms]
    for o, form in shaped.items():
        choices[o] = [f for f in choices[o] if f == form or not is_sharded(form)]
    return [tuple(post) for post in product(*choices)]


def _test_splits(units: int) -> list[tuple[int, ...]]:
    """Splits without empty shards (these hold by construction, or the kernel decides)."""
    if units == 0:
        return [(0, 0, 0), (0, 0)]
    if units == 2:
        return [(1, 1)]
    if units == 3:
        return [(1, 1, 1), (1, 2), (2, 1)]
    return [(units - 2, 1, 1), (1, units - 1), (1, 1, units - 2)]


def _forms_once(
    case: ConcreteCall,
    rule: OpRule,
    pre: tuple[Placement, ...],
    shaped: dict[int, Placement],
    units: int,
    split: tuple[int, ...],
    shape_only: Sequence[int],
    seed: int,
) -> list[set[Placement]]:
    """For each output, the forms that hold on this split (every form for one that nobody needs)."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        [_guarded(s) for s in shards(t, _place(f, t, units), split, generator, None)]
        for t, f in zip(case.inputs, pre, strict=True)
    ]
    results: list[Outputs] = []
    try:
        for rank, extent in enumerate(split):
            args, kwargs = list(case.call.args), dict(case.call.kwargs)
            for key, output in rule.shape_args.items():
                whole = case.outputs[output]
                assert whole is not None
                place = _place(shaped[output], whole, units)
                shape = local_shape(tuple(whole.shape), place, extent)
                if isinstance(key, str):
                    kwargs[key] = shape
                elif key < len(args):
                    args[key] = shape
            local = [p[rank] for p in pieces]
            results.append(execute((case.call.op, tuple(args), kwargs), local, case.device, _SEED))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, ZeroDivisionError):
        return [set() for _ in case.outputs]
    return [_holding(case, results, o, units, split, o in shape_only) for o in range(len(case.outputs))]


def _guarded(tensor: Tensor) -> Tensor:
    """The tensor inside a buffer of NaN, so that a kernel that reads past its end is found out."""
    if not _real(tensor) or tensor.numel() == 0:
        return tensor
    n = tensor.numel()
    buffer = torch.full((n + 2 * _GUARD,), nan, dtype=tensor.dtype, device=tensor.device)
    inner = buffer[_GUARD : _GUARD + n].view(tensor.shape)
    inner.copy_(tensor)
    return inner


def _place(form: Placement, tensor: Tensor, units: int) -> Place:
    if is_sharded(form):
        return Cut(sharded_dim(form), tensor.shape[sharded_dim(form)] // units)
    return SUM if form == PARTIAL else None


def _holding(
    case: ConcreteCall, results: Sequence[Outputs], o: int, units: int, split: Sequence[int], unneeded: bool
) -> set[Placement]:
    want = case.outputs[o]
    if want is None:
        return {REPLICATE}
    got = [t for outputs in results if o < len(outputs) and (t := outputs[o]) is not None]
    if len(got) != len(results):
        return set()
    holding: set[Placement] = set()
    if unneeded or all(mismatch(t, want, case.tolerance) is None for t in got):
        return {REPLICATE} if unneeded else {REPLICATE, *_weaker(want)}
    if want.dtype != torch.bool and all(t.shape == want.shape and t.dtype == want.dtype for t in got):
        total = assembled(got, PARTIAL)
        if mismatch(total, want, case.tolerance, magnitude(got)) is None:
            holding.add(PARTIAL)
    for d, extent in enumerate(want.shape):
        if units and extent >= 2 and extent % units == 0:
            cut = Cut(d, extent // units)
            fits = (
                tuple(t.shape) == local_shape(tuple(want.shape), cut, split[r]) and t.dtype == want.dtype
                for r, t in enumerate(got)
            )
            if all(fits) and mismatch(assembled(got, shard(d)), want, case.tolerance) is None:
                holding.add(shard(d))
    return holding


def _weaker(tensor: Tensor) -> set[Placement]:
    """The placements that follow from a replicated tensor by slicing or masking."""
    sums = set() if tensor.dtype == torch.bool else {PARTIAL}
    return {shard(d) for d in range(tensor.dim())} | sums
