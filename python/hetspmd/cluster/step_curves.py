"""Measured training steps of whole models: the part ``steps`` of a cluster file's ``measured:``.

A step of the model's single-device program was run on each kind of device at growing numbers of *rows* (samples of
the batch) until memory ended. The part of a file, for each model its identity
(:func:`hetspmd.cost.measured_steps.identity`), where its inputs have rows, and a curve per kind of device::

    steps:
    - model: 5f0c...                       # 64 hexadecimal digits
      name: examples/bert.py               # what reports call it
      rows: [[input_ids, 0, 1], [labels, 0, 1]]    # input, dim, elements of a row
      optimizer: adamw                     # whose step is part of what was measured
      curves:
      - ranks: [0, 1]
        memory: 8589934592                 # bytes that a step was given
        over: [24, 8712345678]             # rows of the least step that did not fit, and its counted bytes
        # rows, seconds, low, high, samples, measured peak bytes, counted peak bytes
        points:
        - [1, 0.11, 0.108, 0.113, 9, 512345678, 512000000]

``over`` is left out where no step was too large. The last point is then the largest step that was tried, else the
largest that fits. No points with an ``over`` of one row say that not even one row fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hetspmd.cluster.file import Node
from hetspmd.errors import ClusterError

OPTIMIZERS: Final = ("adamw", "momentum", "sgd")
_POINT: Final = ("rows", "seconds", "low", "high", "samples", "peak", "counted")
_IDENTITY: Final = re.compile("[0-9a-f]{64}")
_MOST_DIMS: Final = 64
"""Dims that a tensor of torch has at most."""
_MOST: Final = 2**62
"""Rows and bytes above this are a slip of the pen."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step of ``rows`` rows: the median ``seconds`` of ``samples`` with its interval, the most bytes that it
    was seen to hold (``peak``), and the most that it holds as hetspmd counts (``counted``)."""

    rows: int
    seconds: float
    low: float
    high: float
    samples: int
    peak: int
    counted: int


@dataclass(frozen=True, slots=True)
class StepCurve:
    """The steps of a model on the devices ``ranks``, which are of one kind.

    ranks   ascending
    memory  bytes that a step was given
    points  the steps that fit, ascending in rows
    over    rows of the least step that did not fit, and its counted bytes; None where every step did
    """

    ranks: tuple[int, ...]
    memory: int
    points: tuple[StepPoint, ...]
    over: tuple[int, int] | None = None

    @property
    def limit(self) -> int:
        """The most rows that were seen to fit; 0 where not even one does."""
        return self.points[-1].rows if self.points else 0


RowDim = tuple[str, int, int]
"""An input, by path, a dim of it that grows with the rows, and the elements of a row there."""


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """The curves of one model: its ``identity`` and ``name``, where its inputs have ``rows``, and the ``optimizer``
    whose step was measured with it."""

    identity: str
    name: str
    rows: tuple[RowDim, ...]
    optimizer: str
    curves: tuple[StepCurve, ...]

    def by_rank(self, world: int) -> tuple[StepCurve | None, ...]:
        """The curve of each of ``world`` devices; None where there is none."""
        found = {rank: curve for curve in self.curves for rank in curve.ranks}
        return tuple(found.get(rank) for rank in range(world))


def check_steps(steps: Iterable[ModelSteps], world: int) -> None:
    """Raise ClusterError for a model or a rank that stands twice, for a rank that there is not, and for numbers
    that no measurement gives."""
    seen: set[str] = set()
    for model in steps:
        if not _IDENTITY.fullmatch(model.identity):
            raise ClusterError(
                f"measured steps of {model.name!r}: {model.identity!r} is no identity; write 64 hexadecimal digits"
            )
        if model.identity in seen:
            raise ClusterError(f"measured steps of the model {model.name!r} stand twice; remove one")
        seen.add(model.identity)
        if model.optimizer not in OPTIMIZERS:
            raise ClusterError(f"measured steps of {model.name!r}: there is no optimizer {model.optimizer!r}")
        places = [(path, dim) for path, dim, _ in model.rows]
        if not places or len(set(places)) != len(places):
            raise ClusterError(
                f"measured steps of {model.name!r}: name at least one dim with rows, each once"
            )
        for path, dim, each in model.rows:
            if not (0 <= dim < _MOST_DIMS and 0 < each < _MOST):
                raise ClusterError(
                    f"measured steps of {model.name!r}: {path} has no rows of {each} elements in dim {dim}"
                )
        ranks: set[int] = set()
        for curve in model.curves:
            _check_ranks(model.name, curve.ranks, ranks, world)
            _check_curve(f"measured steps of {model.name!r} on ranks {list(curve.ranks)}", curve)


def _check_ranks(name: str, ranks: Sequence[int], seen: set[int], world: int) -> None:
    if not ranks or list(ranks) != sorted(ranks):
        raise ClusterError(f"measured steps of {name!r}: ranks are {list(ranks)}; list them in order")
    for rank in ranks:
        if not 0 <= rank < world:
            raise ClusterError(f"measured steps of {name!r} on rank {rank}; the cluster has {world} devices")
        if rank in seen:
            raise ClusterError(f"measured steps of {name!r} on rank {rank} stand twice; remove one curve")
        seen.add(rank)


def _check_curve(where: str, curve: StepCurve) -> None:
    if not 0 < curve.memory < _MOST:
        raise ClusterError(f"{where}: memory is {curve.memory} bytes; it must be positive")
    if not curve.points and curve.over is None:
        raise ClusterError(f"{where}: there are no points and no over; profile again")
    before = 0
    for p in curve.points:
        if not before < p.rows < _MOST:
            raise ClusterError(f"{where}: {p.rows} rows after {before}; points ascend in rows")
        if not 0 < p.low <= p.seconds <= p.high < float("inf") or p.samples < 1:
            raise ClusterError(f"{where}: the seconds of {p.rows} rows are not within their interval")
        if not (0 < p.peak < _MOST and 0 < p.counted < _MOST):
            raise ClusterError(f"{where}: the bytes of {p.rows} rows are not positive")
        before = p.rows
    if curve.over is not None and not (before < curve.over[0] < _MOST and 0 < curve.over[1] < _MOST):
        raise ClusterError(
            f"{where}: {curve.over[0]} rows of {curve.over[1]} bytes did not fit, and {before} rows did; "
            "profile again"
        )


def steps_at_ranks(steps: Sequence[ModelSteps], ranks: Sequence[int]) -> tuple[ModelSteps, ...]:
    """The curves of some ranks, which are numbered in the given order."""
    place = {rank: new for new, rank in enumerate(ranks)}
    models = []
    for model in steps:
        curves = [
            replace(curve, ranks=tuple(sorted(place[r] for r in curve.ranks if r in place)))
            for curve in model.curves
        ]
        kept = tuple(curve for curve in curves if curve.ranks)
        if kept:
            models.append(replace(model, curves=kept))
    return tuple(models)


def step_entries(steps: Sequence[ModelSteps]) -> list[dict[str, Any]]:
    """The part ``steps`` as :func:`read_steps` reads it."""
    return [
        {
            "model": model.identity,
            "name": model.name,
            "rows": [list(of) for of in model.rows],
            "optimizer": model.optimizer,
            "curves": [_curve_entry(curve) for curve in model.curves],
        }
        for model in steps
    ]


def _curve_entry(curve: StepCurve) -> dict[str, Any]:
    entry: dict[str, Any] = {"ranks": list(curve.ranks), "memory": curve.memory}
    if curve.over is not None:
        entry["over"] = list(curve.over)
    return entry | {"points": [[getattr(p, name) for name in _POINT] for p in curve.points]}


def read_steps(node: Node, world: int) -> tuple[ModelSteps, ...]:
    """The part ``steps`` of a cluster of ``world`` devices. Raises ClusterError that names the place."""
    keys = ("model", "name", "rows", "optimizer", "curves")
    models = []
    for element in node.elements("steps"):
        entry = element.entries("steps of a model", keys, keys)
        models.append(
            ModelSteps(
                entry["model"].text("model"),
                entry["name"].text("name"),
                tuple(map(_read_rows, entry["rows"].elements("rows"))),
                entry["optimizer"].choice("optimizer", OPTIMIZERS),
                tuple(map(_read_curve, entry["curves"].elements("curves"))),
            )
        )
    try:
        check_steps(models, world)
    except ClusterError as error:
        node.fail(str(error))
    return tuple(models)


def _read_rows(node: Node) -> RowDim:
    row = node.elements("a dim with rows")
    if len(row) != 3:
        node.fail(f"a dim with rows has {len(row)} entries; write input, dim, elements of a row")
    return row[0].text("an input"), row[1].whole("dim", 0), row[2].whole("elements of a row", 1)


def _read_curve(node: Node) -> StepCurve:
    entry = node.entries(
        "a curve of steps", ("ranks", "memory", "over", "points"), ("ranks", "memory", "points")
    )
    over = None
    if "over" in entry:
        numbers = [n.whole("over", 1) for n in entry["over"].elements("over")]
        if len(numbers) != 2:
            entry["over"].fail(f"over has {len(numbers)} numbers; write rows, counted bytes")
        over = numbers[0], numbers[1]
    return StepCurve(
        tuple(r.whole("a rank", 0) for r in entry["ranks"].elements("ranks")),
        entry["memory"].whole("memory", 1),
        tuple(map(_read_point, entry["points"].elements("points"))),
        over,
    )


def _read_point(node: Node) -> StepPoint:
    cells = node.cells("a point", _POINT)
    seconds, low, high = (cells[key].number(key, positive=True) for key in ("seconds", "low", "high"))
    rows, samples, peak, counted = (cells[k].whole(k, 1) for k in ("rows", "samples", "peak", "counted"))
    return StepPoint(rows, seconds, low, high, samples, peak, counted)
