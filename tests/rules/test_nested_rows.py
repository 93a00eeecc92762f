"""Two rows of one instruction at once, by brute force over the samples of all rules: machines of 2, 1 and 3
accelerators with uneven and empty shards, put together again inside and then across, equal the single device."""

from __future__ import annotations

import itertools
from collections import Counter
from math import inf

import pytest
import torch

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.program.lengths import apportion
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
    starts_of,
    summands,
)
from hetspmd.rules.nested import Level, composes, localize_nested
from hetspmd.rules.oracle import sample_text, uninitialised
from hetspmd.rules.registry import rule_for
from hetspmd.rules.rule import OpRule, Triple

ACCELERATORS = (2, 1, 3)


def outer_units(size: int) -> tuple[tuple[int, ...], ...]:
    """Of three machines: one of them empty, and uneven."""
    return ((size - size // 3, 0, size // 3), (size // 4, size - size // 4 - size // 2, size // 2))


def size_of(rule: OpRule, row: Triple) -> int:
    return 0 if row.factor is None else rule.factors[row.factor].size


def split(
    tensor: torch.Tensor, rule: OpRule, row: Triple, i: int, units: tuple[int, ...], dice: torch.Generator
) -> list[torch.Tensor]:
    """An input by a row, to as many parts as there are units."""
    if row.factor is not None:
        return shards(tensor, rule.factors[row.factor].inputs[i], units, dice, None)
    return summands(tensor, len(units), dice, None) if row.pre[i] == PARTIAL else [tensor] * len(units)


def even(units: int, count: int) -> tuple[int, ...]:
    return apportion(units, (1 / count,) * count)


def nested_outputs(
    case: ConcreteCall, rule: OpRule, outer: Triple, inner: Triple, units: tuple[int, ...]
) -> list[Outputs] | None:
    """What each accelerator computes, in rank order; None where the rows do not go together."""
    dice = torch.Generator().manual_seed(3)
    across = [split(t, rule, outer, i, units, dice) for i, t in enumerate(case.inputs)]
    starts = starts_of(units)
    found: list[Outputs] = []
    for machine, count in enumerate(ACCELERATORS):
        held = units[machine] if inner == outer else size_of(rule, inner)
        within = even(held, count)
        parts = [split(a[machine], rule, inner, i, within, dice) for i, a in enumerate(across)]
        low = starts[machine] if inner == outer and inner.factor is not None else 0
        for place in range(count):
            first = low + sum(within[:place])
            levels = (
                Level(outer, (starts[machine], starts[machine + 1])),
                Level(inner, (first, first + within[place])),
            )
            local = localize_nested(case.call, rule, *levels, len(found), sum(ACCELERATORS))
            if local is None:
                return None
            found.append(execute(local, [p[place] for p in parts], case.device, 20))
    return found


def error_of(
    case: ConcreteCall, outer: Triple, inner: Triple, results: list[Outputs], skip: tuple[int, ...]
) -> str:
    """What is wrong, empty if nothing is."""
    for o, want in enumerate(case.outputs):
        if want is None or o in skip:
            continue
        locals_ = [r[o] for r in results]
        if any(t is None for t in locals_):
            return f"output {o} is missing"
        scale = magnitude(locals_) if PARTIAL in (outer.post[o], inner.post[o]) else 0.0
        machines, at = [], 0
        for count in ACCELERATORS:
            of_machine = locals_[at : at + count]
            at += count
            if inner.post[o] == REPLICATE and any(
                mismatch(t, of_machine[0], case.tolerance, scale) is not None for t in of_machine[1:]
            ):
                return f"output {o} differs inside a machine"
            machines.append(assembled(of_machine, inner.post[o]))
        for got in machines if outer.post[o] == REPLICATE else [assembled(machines, outer.post[o])]:
            error = mismatch(got, want, case.tolerance, scale)
            if error is not None:
                return f"output {o} is off by {'everything' if error == inf else error}"
    return ""


def check(op: str) -> tuple[list[str], Counter[str]]:
    """What is wrong with an op's pairs of rows, and how many were tried and refused."""
    bundled = sample_package.load()
    samples = bundled.samples[op]
    if callable(samples):
        with seeded(20):
            samples = samples()
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for args, kwargs in samples:
        case = case_of(op, args, kwargs, 20)
        rule = rule_for(case.call)
        assert rule is not None
        if rule.random or uninitialised(op):
            continue
        rows = rule.rows(case.call)
        for outer, inner in itertools.product(rows, rows):
            # Without a factor the units say nothing; three parts all the same.
            for units in outer_units(size_of(rule, outer)) if outer.factor is not None else ((0, 0, 0),):
                where = f"{sample_text(case)}: {outer} across {list(units)}, {inner} inside"
                try:
                    results = nested_outputs(case, rule, outer, inner, units)
                except Exception as error:  # a kernel may raise anything; each is a wrong pair
                    wrong.append(f"{where}: {type(error).__name__}: {error}")
                    break
                counts["tried"] += 1
                if results is None:
                    counts["refused"] += 1
                    continue
                reason = error_of(case, outer, inner, results, bundled.shape_only.get(op, ()))
                if reason:
                    wrong.append(f"{where}: {reason}")
                    break
    return wrong, counts


OPS = sorted(sample_package.load().samples)
QUICK = {
    "aten.addmm.default", "aten.bmm.default", "aten.convolution.default",
    "aten.embedding.default", "aten.embedding_dense_backward.default", "aten.expand.default", "aten.mean.dim",
    "aten.mm.default", "aten.mul.Tensor", "aten.native_layer_norm.default", "aten.sum.dim_IntList",
    "aten.view.default",
}  # fmt: skip


@pytest.mark.parametrize(
    "op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in OPS]
)
def test_pairs_of_rows(op: str) -> None:
    wrong, _ = check(op)
    assert not wrong, "\n".join(wrong[:5])


def test_both_ends_are_reached() -> None:
    """Most pairs go together; two rewrites that each put a function in the op's place do not."""
    matmul, mean = check("aten.mm.default")[1], check("aten.mean.dim")[1]
    assert matmul["tried"] > 20
    assert not matmul["refused"]
    assert 0 < mean["refused"] < mean["tried"] / 2


def test_rows_that_cannot_be_had_at_once() -> None:
    """Each row of a mean puts a function in the place of the op, which the other one could not divide."""
    shape = (torch.zeros(4, 6), torch.zeros(4, 6))
    call = case_of("aten.mse_loss.default", shape, {}).call
    rule = rule_for(call)
    assert rule is not None
    whole, rows, columns = rule.rows(call)[:3]
    assert composes(call, rule, rows, rows)
    assert composes(call, rule, rows, whole)
    assert composes(call, rule, whole, columns)
    assert not composes(call, rule, rows, columns)
