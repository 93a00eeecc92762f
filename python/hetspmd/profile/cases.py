"""Which ops of a model are measured, in which order.

A *case* is a key of :mod:`hetspmd.cost.op_keys`: an instruction alone with one of its triples, or the optimizer's
step on a stored parameter. Cases of one call (its triples) make the same call at the share 1, which is measured
once, under the key of the whole call.

A task is a case at a share. First come all whole calls, then the triples at further ``shares``, each time
those first that take most of the predicted single-device step: the roofline's seconds on the slowest device, times
the number of the model's instructions with that call. So what matters is measured however short the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.cost.op_keys import VIEW_KEY, memory_orders, parameter_key
from hetspmd.cost.signatures import row_keys
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.profile.local_op import Alone, alone
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.rules.rule import TensorType
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import PARAMETER


@dataclass(frozen=True)
class OpCase:
    """What a key stands for.

    whole   the key of the same call, or parameter, run or stored whole
    op      the instruction and the index of the triple; None for a parameter
    stored  the parameter and the dim along which it is stored in shards; None for an op
    units   of the axis that is cut; 1 where none is
    weight  seconds that the model's single-device step is predicted to spend in the call
    """

    key: str
    whole: str
    op: tuple[Alone, int] | None
    stored: tuple[TensorType, int | None] | None
    units: int
    weight: float

    def held(self, share: float) -> int:
        """The units of a device with about this share, at least one."""
        return min(max(round(share * self.units), 1), self.units)


@dataclass(frozen=True)
class Task:
    """A case at the units that a device holds; the result is of ``key`` at ``share``."""

    case: OpCase
    held: int

    @property
    def key(self) -> str:
        """The key under which the result is kept: the whole call's where everything is held."""
        return self.case.whole if self.held == self.case.units else self.case.key

    @property
    def share(self) -> float:
        """The part of the axis that is held."""
        return self.held / self.case.units


def cases_of(theory: Theory, cluster: Cluster) -> dict[str, OpCase]:
    """The cases of a model by key, in the graph's order."""
    graph, orders, keys = theory.graph, memory_orders(theory), row_keys(theory)
    model = CostModel(theory, Cluster(cluster.devices, cluster.network))
    first = model.triples.signature[model.triples.offset[:-1]]
    seconds = model.seconds(first, model.even_shares(np.ones(model.world))).max(axis=1)
    weights: dict[str, float] = {}
    for instruction, of_rows in zip(graph.instructions, keys, strict=True):
        for key in dict.fromkeys(of_rows):
            weights[key] = weights.get(key, 0.0) + float(seconds[instruction.id])
    cases: dict[str, OpCase] = {}
    for instruction, of_rows in zip(graph.instructions, keys, strict=True):
        if all(key in cases for key in of_rows):
            continue
        if instruction.op == PARAMETER:
            tensor = graph.tensors[instruction.outputs[0]]
            type_ = TensorType(tensor.shape, tensor.dtype)
            for row, key in zip(theory.rows[instruction.id], of_rows, strict=True):
                form = row.post[0]
                dim = sharded_dim(form) if is_sharded(form) else None
                units = 1 if dim is None else type_.shape[dim]
                cases.setdefault(
                    key, OpCase(key, parameter_key(type_, None), None, (type_, dim), units, weights[key])
                )
            continue
        if of_rows[0] == VIEW_KEY:
            cases[VIEW_KEY] = OpCase(
                VIEW_KEY, VIEW_KEY, (alone(graph, instruction, orders), 0), None, 1, _views(model, keys)
            )
            continue
        own = alone(graph, instruction, orders)
        small = own.theory
        op = small.graph.instructions[-1].id
        for row, key in zip(theory.rows[instruction.id], of_rows, strict=True):
            index = small.rows[op].index(row)
            axis = small.row_axes[op][index]
            units = 1 if axis is None else small.axes.axes[axis].units
            cases.setdefault(key, OpCase(key, of_rows[0], (own, index), None, units, weights[key]))
    return cases


def _views(model: CostModel, keys: Sequence[tuple[str, ...]]) -> float:
    """Seconds for the views of a step, if each costs what launching an op does."""
    number = sum(VIEW_KEY in of_rows for of_rows in keys)
    return number * max(device.launch for device in model.cluster.devices)


def tasks_of(cases: Sequence[OpCase]) -> list[Task]:
    """What is to be measured, in order."""
    ordered = sorted(cases, key=lambda c: -c.weight)
    tasks: dict[tuple[str, float], Task] = {}
    for share in (1.0, *THRESHOLDS.shares):
        for case in ordered:
            task = Task(case, case.held(share))
            tasks.setdefault((task.key, task.share), task)
    return list(tasks.values())


def together(theories: Sequence[Theory], cluster: Cluster) -> list[OpCase]:
    """The cases of several models, which weigh the same."""
    cases: dict[str, OpCase] = {}
    for theory in theories:
        of_model = cases_of(theory, cluster)
        total = sum(c.weight for c in of_model.values() if c.key == c.whole) or 1.0
        for key, case in of_model.items():
            before = cases[key].weight if key in cases else 0.0
            cases[key] = replace(case, weight=before + case.weight / total)
    return list(cases.values())
