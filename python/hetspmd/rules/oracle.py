"""The oracle: are the rows of a rule right, and are all right rows there? By brute force.

For every row of a rule and several uneven splits over 1 to 3 ranks (empty shards and everything on one rank
among them), the inputs of a sample call are split by the row's precondition, each rank makes its local call
(:func:`hetspmd.rules.rule.localize`), the results are put together by the postcondition and compared with the
single device::

    for all splits s:   assemble_post( local_r( split_pre(x, s)_r ) for ranks r )  =  op(x)

``All-Reduce`` inputs are split twice: into random summands, and whole on one rank with zeros elsewhere (which
is how the compiler makes partial out of replicated). Where the op draws random numbers (``rule.random``),
rows without a sharded factor must give what the single device gives from the same seed; of other rows,
shapes, dtypes, determinism and the mean are checked, and that a dropout's output agrees with its mask. Of
uninitialised tensors (``aten.empty`` and its like) only shapes and dtypes are checked.

Rows that hold but that the rule does not have are *missing* (:mod:`hetspmd.rules.missing`). A rule leaves one out
on purpose by naming it in ``OpRule.omitted``: the key is the text ``{pre, pre} {post, post}`` of
:func:`~hetspmd.placement.placement_text`, for instance ``"{shard(0), replicated} {partial}"`` (an output
that is None counts as replicated; ``*`` stands for any text), the value says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

import hetspmd.rules.ops  # noqa: F401  # registers the built-in rules
from hetspmd.errors import RuleError
from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.rules import samples as sample_package
from hetspmd.rules.brute import (
    ConcreteCall,
    Outputs,
    assembled,
    case_of,
    execute,
    magnitude,
    mismatch,
    seeded,
    shards,
    splits,
    starts_of,
    summands,
)
from hetspmd.rules.missing import MissingTriple, missing_rows, without_implied
from hetspmd.rules.registry import op_name, rule_for, rule_function
from hetspmd.rules.rule import OpRule, TensorType, Triple, local_shape, localize
from hetspmd.rules.samples import Sample

_UNINITIALISED = ("empty", "new_empty")
_SIGMAS = 6.0
_SEED = 20


@dataclass(frozen=True)
class WrongTriple:
    """A row of a rule that does not hold on a sample.

    Attributes:
        sample: The sample's place in the list.
        sample_text: The sample's call.
        row: The row.
        split: Units of the sharded factor per device.
        output: The output that is wrong; -1 where the call itself failed.
        error: The largest error relative to the magnitude; infinite for a wrong shape, dtype or exact value.
        reason: What is wrong.
    """

    sample: int
    sample_text: str
    row: str
    split: tuple[int, ...]
    output: int
    error: float
    reason: str

    def __str__(self) -> str:
        where = "the call" if self.output < 0 else f"output {self.output}"
        ranks = f", units per rank {list(self.split)}" if self.split else ""
        sample = f"sample {self.sample}: {self.sample_text}{ranks}"
        return f"wrong: {self.row}\n    {sample}\n    {where}: {self.reason}"


@dataclass(frozen=True)
class OracleReport:
    """What the oracle found for one op; ``print`` shows each row that is wrong or missing.

    Attributes:
        op: The op's name.
        samples: How many sample calls were tried.
        rows_checked: How many rows.
        splits_checked: How many splits of inputs.
        wrong: The rows that do not hold.
        missing: The rows that hold and that the rule lacks.
        skipped: What could not be tested, and why.
    """

    op: str
    samples: int
    rows_checked: int
    splits_checked: int
    wrong: tuple[WrongTriple, ...] = ()
    missing: tuple[MissingTriple, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no row is wrong and none is missing."""
        return not self.wrong and not self.missing

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.wrong)} wrong, {len(self.missing)} missing"
        head = (
            f"{self.op}: {verdict} ({self.samples} samples, {self.rows_checked} rows, "
            f"{self.splits_checked} splits)"
        )
        notes = [f"not tested: {text}" for text in self.skipped]
        return "\n".join([head, *("  " + str(x) for x in (*self.wrong, *self.missing, *notes))])


class _WrongError(Exception):
    """A row failed: output index, relative error, reason."""

    def __init__(self, output: int, error: float, reason: str) -> None:
        super().__init__(reason)
        self.output, self.error, self.reason = output, error, reason


def check(
    op: str, samples: Sequence[Sample] | Callable[[], Sequence[Sample]] | None = None, *, missing: bool = True
) -> OracleReport:
    """Test the rule of ``op`` by brute force.

    ``samples`` are ``(args, kwargs)`` of calls with concrete tensors, or a function that returns them; None
    takes the ones that come with hetspmd. ``missing`` also looks for rows that hold and that the rule lacks.
    Dims of three to eight elements, all different, test most; so do several values of each option.

    Raises RuleError if the op has no rule or no samples.
    """
    op = op_name(op)
    if rule_function(op) is None:
        raise RuleError(f"{op} has no rule; register one with @hetspmd.rule({op!r})")
    bundled = sample_package.load()
    if samples is None and op in bundled.untested:
        return OracleReport(op, 0, 0, 0, skipped=(bundled.untested[op],))
    samples = _drawn(op, bundled.samples.get(op) if samples is None else samples)
    shape_only = bundled.shape_only.get(op, ())
    rows_checked = splits_checked = 0
    wrong: list[WrongTriple] = []
    missing_triples: dict[str, MissingTriple] = {}
    skipped: list[str] = []
    for index, (args, kwargs) in enumerate(samples):
        case = case_of(op, args, kwargs, _SEED)
        text = sample_text(case)
        try:
            rule = rule_for(case.call)
        except RuleError as error:
            wrong.append(WrongTriple(index, text, "the rule does not fit the call", (), -1, inf, str(error)))
            continue
        assert rule is not None  # rule_function found one above
        for row in rule.rows(case.call):
            tried, failed = _check_row(case, rule, row, shape_only)
            rows_checked += 1
            splits_checked += tried
            if failed is not None:
                units, failure = failed
                wrong.append(
                    WrongTriple(index, text, str(row), units, failure.output, failure.error, failure.reason)
                )
        if missing:
            if rule.random or uninitialised(op):
                skipped.append("missing rows: the values of the op's result are not determined")
            else:
                rows, notes = missing_rows(case, rule, shape_only, bundled.fixed.get(op, ()))
                for text_, row_ in rows.items():
                    missing_triples.setdefault(text_, MissingTriple(text_, index, text, *row_))
                skipped += notes
    return OracleReport(
        op,
        len(samples),
        rows_checked,
        splits_checked,
        tuple(wrong),
        without_implied(missing_triples.values()),
        tuple(dict.fromkeys(skipped)),
    )


def _check_row(
    case: ConcreteCall, rule: OpRule, row: Triple, shape_only: Sequence[int]
) -> tuple[int, tuple[tuple[int, ...], _WrongError] | None]:
    """How many splits of a row were tried, and the first on which it is wrong, with how; units count only where the
    row cuts something."""
    factor = None if row.factor is None else rule.factors[row.factor]
    tried = 0
    for units in splits(factor.size) if factor is not None else ((0,), (0, 0), (0, 0, 0)):
        tried += 1
        try:
            _check_split(case, rule, row, units, shape_only)
        except _WrongError as failure:
            return tried, (tuple(units) if factor is not None else (), failure)
    return tried, None


def _drawn(op: str, samples: Sequence[Sample] | Callable[[], Sequence[Sample]] | None) -> Sequence[Sample]:
    """The calls to try. Raises RuleError if there are none."""
    if samples is None:
        raise RuleError(f"{op} has no samples; pass samples=[(args, kwargs), ...] to check")
    if callable(samples):
        with seeded(_SEED):
            samples = samples()
    if not samples:
        raise RuleError(f"{op}: the list of samples is empty")
    return samples


def uninitialised(op: str) -> bool:
    """Whether the op's result is uninitialised memory."""
    return op.split(".")[1].startswith(_UNINITIALISED)


def sample_text(case: ConcreteCall) -> str:
    """``aten.mm.default(float64[3, 4], float64[4, 5])``."""

    def text(value: object) -> str:
        if isinstance(value, tuple):
            return "[" + ", ".join(map(text, value)) + "]"
        number = getattr(value, "id", None)
        if isinstance(number, int):
            type_: TensorType = case.call.inputs[number]
            return f"{type_.dtype}{list(type_.shape)}"
        return str(getattr(value, "name", "") or getattr(value, "kind", "")) or repr(value)

    parts = [text(a) for a in case.call.args] + [f"{k}={text(v)}" for k, v in case.call.kwargs.items()]
    return f"{case.call.op}({', '.join(parts)})"


def _check_split(
    case: ConcreteCall, rule: OpRule, row: Triple, units: Sequence[int], shape_only: Sequence[int]
) -> None:
    """Check one row on one split, with every way to split its All-Reduce inputs. Raises _WrongError."""
    partial = PARTIAL in row.pre
    for whole_on in (None, *range(len(units))) if partial else (None,):
        results = _run(case, rule, row, units, whole_on, distinct=False)
        _check_shapes(case, rule, row, units, results)
        if uninitialised(case.call.op):
            continue
        if rule.random and row.factor is not None:
            _check_random(case, rule, row, units, whole_on)
        else:
            _check_values(case, row, results, shape_only)


def _run(
    case: ConcreteCall,
    rule: OpRule,
    row: Triple,
    units: Sequence[int],
    whole_on: int | None,
    *,
    distinct: bool,
) -> list[Outputs]:
    """The local results of all ranks; ``distinct``: each rank draws its own random numbers."""
    world, starts = len(units), starts_of(units)
    generator = torch.Generator().manual_seed(_SEED)
    factor = None if row.factor is None else rule.factors[row.factor]
    pieces: list[list[Tensor]] = []
    for i, tensor in enumerate(case.inputs):
        if factor is not None:
            pieces.append(shards(tensor, factor.inputs[i], units, generator, whole_on))
        elif row.pre[i] == PARTIAL:
            pieces.append(summands(tensor, world, generator, whole_on))
        else:
            pieces.append([tensor] * world)
    results = []
    for rank in range(world):
        seed = _SEED + rank if distinct else _SEED
        try:
            local = localize(case.call, rule, row, rank, world, starts[rank], starts[rank + 1])
            results.append(execute(local, [p[rank] for p in pieces], case.device, seed))
        except Exception as error:  # a kernel or a rewrite may raise anything; each is a wrong row
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _WrongError(-1, inf, f"rank {rank} raised {type(error).__name__}: {first_line}") from error
    return results


def _check_shapes(
    case: ConcreteCall, rule: OpRule, row: Triple, units: Sequence[int], results: Sequence[Outputs]
) -> None:
    factor = None if row.factor is None else rule.factors[row.factor]
    for rank, outputs in enumerate(results):
        if len(outputs) != len(case.outputs):
            counts = f"{len(outputs)} outputs instead of {len(case.outputs)}"
            raise _WrongError(-1, inf, f"rank {rank} has {counts}")
        for o, (got, want) in enumerate(zip(outputs, case.outputs, strict=True)):
            if want is None:
                if got is not None:
                    raise _WrongError(o, inf, f"rank {rank} has a tensor where the single device has None")
                continue
            place = None if factor is None else factor.outputs[o]
            shape = local_shape(tuple(want.shape), place, units[rank])
            if got is None or tuple(got.shape) != shape or got.dtype != want.dtype:
                description = "None" if got is None else f"{got.dtype} {list(got.shape)}"
                raise _WrongError(
                    o, inf, f"rank {rank} has {description} instead of {want.dtype} {list(shape)}"
                )


def _outputs(results: Sequence[Outputs], o: int) -> list[Tensor]:
    return [t for outputs in results if (t := outputs[o]) is not None]


def _check_values(
    case: ConcreteCall, row: Triple, results: Sequence[Outputs], shape_only: Sequence[int]
) -> None:
    for o, want in enumerate(case.outputs):
        if want is None or o in shape_only:
            continue
        locals_ = _outputs(results, o)
        scale = magnitude(locals_) if row.post[o] == PARTIAL else 0.0
        candidates = locals_ if row.post[o] == REPLICATE else [assembled(locals_, row.post[o])]
        for got in candidates:
            error = mismatch(got, want, case.tolerance, scale)
            if error is not None:
                kind = "values differ" if error == inf else f"largest relative error {error:.3g}"
                raise _WrongError(o, error, f"{kind} after {row}")


def _check_random(
    case: ConcreteCall, rule: OpRule, row: Triple, units: Sequence[int], whole_on: int | None
) -> None:
    """Same seeds, same results; each output's mean within a few standard errors of the single device's."""
    first = _run(case, rule, row, units, whole_on, distinct=True)
    again = _run(case, rule, row, units, whole_on, distinct=True)
    for o, want in enumerate(case.outputs):
        if want is None:
            continue
        locals_ = _outputs(first, o)
        if any(mismatch(a, b, 0.0) is not None for a, b in zip(locals_, _outputs(again, o), strict=True)):
            raise _WrongError(o, inf, "two runs from the same seeds differ")
        if want.numel() < 2:
            continue
        got = assembled(locals_, row.post[o]).double()
        bound = _SIGMAS * float((want.double().var() + got.var()) / want.numel()) ** 0.5
        difference = float((got.mean() - want.double().mean()).abs())
        if difference > bound + 1e-12:
            raise _WrongError(o, difference, f"the mean is off by {difference:.3g}: no chance")
    if case.call.op == "aten.native_dropout.default" and case.call.arg(2, "train") is not False:
        _check_dropout(case, row, first)


def _check_dropout(case: ConcreteCall, row: Triple, results: Sequence[Outputs]) -> None:
    p = float(case.call.arg(1, "p"))
    out, mask = (assembled(_outputs(results, o), row.post[o]) for o in (0, 1))
    want = case.inputs[0] * mask / (1 - p) if p < 1 else torch.zeros_like(out)
    error = mismatch(out, want, case.tolerance)
    if error is not None:
        raise _WrongError(0, error, "the output is not input * mask / (1 - p)")
