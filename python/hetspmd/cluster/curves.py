"""Measured collectives: the ``measured:`` part of a cluster file, and the curves that the cost model uses.

A curve gives the seconds of one collective in one implementation between ``n`` devices. For a tensor of E
bytes whose shards are k in number, the largest holding the part M of it, and of which an all-to-all exchanges
the part X (:class:`hetspmd.cost.model.MoveForm`),

    seconds = latency + per_shard k + E (per_byte + per_largest M + per_exchange X)

so that for a given tensor the seconds are linear in k, M and X, as the ratios' linear program needs. Nothing is
negative. A collective may have several curves between the same devices, each for tensors of more than ``above``
bytes (another algorithm, larger than a cache): that of the greatest ``above`` below E holds. Between two measured
device counts the numbers are interpolated linearly in n (exact for the ring's ``(n - 1) M E / b``). The part of a
file::

    measured:
      version: 1
      about: {backend: gloo, budget: 60.0, ...}            # optional: how it was measured
      rates:                                               # optional: what each rank measured of its device
      - {rank: 0, what: matmul, dtype: float32, amount: 2.7e8, seconds: 0.021, low: 0.02, high: 0.022, samples: 9}
      curves:
      - kind: all_gather
        devices: 4
        above: 3.0e6                                       # bytes; 0 where left out
        latency: 1.1e-4                                    # s
        per_byte: 2.0e-10                                  # s per byte of the whole tensor; 0 where left out
        per_largest: 9.0e-10                               # the same, times M
        r2: 0.99                                           # optional, as are error and points
        error: 0.04
        points:                                            # skew, E, k, M, X, seconds, low, high, samples
        - [even, 4096, 4, 0.25, 0, 1.2e-4, 1.1e-4, 1.3e-4, 12]
      lanes: 2                                             # collectives on their way at a time; 1 where left out
      ops: [...]                                           # optional: seconds of ops (hetspmd.cluster.op_times)
      steps: [...]                                         # optional: whole steps (hetspmd.cluster.step_curves)

:func:`Cluster.load <hetspmd.cluster.cluster.Cluster.load>` keeps curves, op times and steps;
``hetspmd profile --show`` reads all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from hetspmd.cluster.collective_kinds import KINDS, Kind, Terms
from hetspmd.cluster.file import Node
from hetspmd.cluster.op_times import OpFits, OpTimes, op_entries, read_ops
from hetspmd.cluster.step_curves import ModelSteps, read_steps, step_entries
from hetspmd.errors import ClusterError

VERSION: Final = 1
COLLECTIVES: Final[tuple[Kind, ...]] = tuple(name for name, kind in KINDS.items() if kind.terms)
"""The kinds that are measured."""
RATES: Final = ("matmul", "convolution", "memory", "launch", "optimizer")
TERMS: Final = Terms._fields
ABOUT: Final = (
    "backend", "torch", "budget", "spent", "tolerance", "confidence", "threads", "memory", "flops", "timing",
    "dropped", "optimizer", "ops", "steps",
)  # fmt: skip
_POINT: Final = ("skew", "bytes", "shards", "largest", "exchange", "seconds", "low", "high", "samples")


@dataclass(frozen=True, slots=True)
class Curve:
    """A collective between ``devices`` devices of a tensor of more than ``above`` bytes.

    ``latency`` and ``per_shard`` are in seconds, the other terms in seconds per byte of the whole tensor. Raises
    ClusterError for a negative number, a term that the collective does not have, and a curve that is 0.
    """

    kind: Kind
    devices: int
    latency: float = 0.0
    per_shard: float = 0.0
    per_byte: float = 0.0
    per_largest: float = 0.0
    per_exchange: float = 0.0
    above: float = 0.0

    def __post_init__(self) -> None:
        where = f"measured curve of {self.kind!r} between {self.devices} devices"
        if self.kind not in KINDS or not KINDS[self.kind].terms or self.devices < 2:
            raise ClusterError(f"{where}: no such collective; profile again")
        numbers = {term: getattr(self, term) for term in TERMS}
        for term, number in numbers.items():
            if not 0 <= number < float("inf"):
                raise ClusterError(f"{where}: {term} is {number}; it must be finite and not negative")
            if number and term not in KINDS[self.kind].terms:
                raise ClusterError(f"{where}: {term} has no meaning there; it must be 0")
        if not 0 <= self.above < float("inf"):
            raise ClusterError(f"{where}: above is {self.above}; it must be finite and not negative")
        if not any(numbers.values()):
            raise ClusterError(f"{where}: every term is 0; profile again")

    def seconds(self, nbytes: float, shards: int, largest: float, exchange: float) -> float:
        """Seconds for a whole tensor of ``nbytes`` bytes, k ``shards``, parts M and X of it."""
        per_byte = self.per_byte + self.per_largest * largest + self.per_exchange * exchange
        return self.latency + self.per_shard * shards + nbytes * per_byte


@dataclass(frozen=True, slots=True)
class Point:
    """One measured case of a collective: median ``seconds`` of ``samples``, and the interval of the median."""

    skew: str
    nbytes: int
    shards: int
    largest: float
    exchange: float
    seconds: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and what it was fitted to.

    r2     1 - sum(ln(p / t)^2) / sum(ln(m / t)^2), p the curve and m the geometric mean of the times t
    error  median of |p - t| / t
    points what it was fitted to; r2 and error are None where a file does not say
    """

    curve: Curve
    r2: float | None = None
    error: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Rate:
    """What a rank measured of its device: ``amount`` FLOPs (matmul, convolution), bytes (memory), ops (launch) or
    bytes of parameters (a step of the optimizer) take ``seconds`` in the median of ``samples``."""

    rank: int
    what: str
    dtype: str
    amount: float
    seconds: float
    low: float
    high: float
    samples: int

    @property
    def per_second(self) -> float:
        """FLOP/s, bytes/s or ops/s."""
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """All of a file's ``measured:`` part."""

    fits: tuple[Fit, ...] = ()
    rates: tuple[Rate, ...] = ()
    about: Mapping[str, str | float] | None = None
    ops: OpFits = ()
    lanes: int = 1
    steps: tuple[ModelSteps, ...] = ()

    @property
    def curves(self) -> tuple[Curve, ...]:
        """The curves, which the cost model uses."""
        return tuple(fit.curve for fit in self.fits)

    @property
    def op_times(self) -> tuple[OpTimes, ...]:
        """The op times, which the cost model uses."""
        return tuple(OpTimes(ranks, tuple(f.time for f in fits)) for ranks, fits in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """The part as :func:`read_measured` reads it."""
        document: dict[str, Any] = {"version": VERSION}
        if self.about:
            document["about"] = dict(self.about)
        if self.rates:
            document["rates"] = [{f.name: getattr(r, f.name) for f in fields(r)} for r in self.rates]
        if self.fits:
            document["curves"] = [_fit_entry(fit) for fit in self.fits]
        if self.lanes > 1:
            document["lanes"] = self.lanes
        if self.ops:
            document["ops"] = op_entries(self.ops)
        if self.steps:
            document["steps"] = step_entries(self.steps)
        return document


def at_devices(curves: Sequence[Curve], devices: int) -> tuple[Curve, ...]:
    """The curves of at most ``devices`` devices; one of exactly as many is interpolated if it was not measured.

    A collective that was measured between more devices only, or between fewer only, gets none.
    """
    usable_curves: list[Curve] = []
    for kind in COLLECTIVES:
        by_count: dict[int, list[Curve]] = {}
        for curve in sorted((c for c in curves if c.kind == kind), key=lambda c: (c.devices, c.above)):
            by_count.setdefault(curve.devices, []).append(curve)
        upto = [n for n in by_count if n <= devices]
        more = [n for n in by_count if n > devices]
        usable_curves += [c for n in upto for c in by_count[n]]
        if upto and more and upto[-1] < devices:
            low, high = by_count[upto[-1]], by_count[more[0]]
            starts = sorted({c.above for c in (*low, *high)})
            usable_curves += [_between(_holding(low, at), _holding(high, at), devices, at) for at in starts]
    return tuple(usable_curves)


def curve_for(curves: Sequence[Curve], nbytes: float) -> Curve:
    """The curve of those of one collective between the same devices, by ``above``, that holds at ``nbytes``."""
    return next((c for c in reversed(curves) if c.above < nbytes), curves[0])


def _holding(curves: Sequence[Curve], above: float) -> Curve:
    """The curve that holds just above ``above``."""
    return next(c for c in reversed(curves) if c.above <= above)


def check_curves(curves: Iterable[Curve], world: int) -> None:
    """Raise ClusterError for two curves of the same case, none from 0 bytes, or more devices than there are."""
    seen: dict[tuple[str, int], list[float]] = {}
    for curve in curves:
        if curve.devices > world:
            raise ClusterError(
                f"{curve.kind} was measured between {curve.devices} devices, the cluster has {world}; profile "
                "again, or remove the part measured"
            )
        starts = seen.setdefault((curve.kind, curve.devices), [])
        if curve.above in starts:
            raise ClusterError(
                f"{curve.kind} between {curve.devices} devices stands twice in the part measured; remove one"
            )
        starts.append(curve.above)
    for (kind, devices), starts in seen.items():
        if 0 not in starts:
            raise ClusterError(
                f"{kind} between {devices} devices has no curve for tensors up to {min(starts):g} bytes; profile "
                "again"
            )


def _between(low: Curve, high: Curve, devices: int, above: float) -> Curve:
    part = (devices - low.devices) / (high.devices - low.devices)
    numbers = {term: (1 - part) * getattr(low, term) + part * getattr(high, term) for term in TERMS}
    return Curve(low.kind, devices, above=above, **numbers)


def _fit_entry(fit: Fit) -> dict[str, Any]:
    curve = fit.curve
    entry: dict[str, Any] = {"kind": curve.kind, "devices": curve.devices}
    entry |= {"above": curve.above} if curve.above else {}
    entry["latency"] = curve.latency
    entry |= {term: getattr(curve, term) for term in TERMS[1:] if getattr(curve, term)}
    entry |= {key: value for key, value in (("r2", fit.r2), ("error", fit.error)) if value is not None}
    if fit.points:
        entry["points"] = [[getattr(p, f.name) for f in fields(p)] for p in fit.points]
    return entry


def read_measured(node: Node, world: int) -> MeasuredFigures:
    """The part ``measured`` of a cluster of ``world`` devices.

    Raises ClusterError that names the place: another version, unknown keys, numbers that cannot be, a collective
    without a curve between all devices.
    """
    if node.mapping is not None and "version" in node.mapping:
        version = node.mapping["version"]
        if isinstance(version.scalar, bool) or version.scalar not in (VERSION, str(VERSION)):
            version.fail(
                f"the part measured is of version {version.scalar}; this release reads {VERSION}: profile again"
            )
    top = node.entries(
        "measured", ("version", "about", "rates", "curves", "lanes", "ops", "steps"), ("version",)
    )
    about: dict[str, str | float] = {}
    if "about" in top:
        for key, value in top["about"].entries("about", ABOUT, ()).items():
            about[key] = _text_or_number(value, key)
    rates = tuple(_read_rate(n, world) for n in top["rates"].elements("rates")) if "rates" in top else ()
    fits = [_read_fit(n) for n in top["curves"].elements("curves")] if "curves" in top else []
    fits.sort(key=lambda f: (COLLECTIVES.index(f.curve.kind), f.curve.devices, f.curve.above))
    try:
        check_curves((f.curve for f in fits), world)
    except ClusterError as error:
        top["curves"].fail(str(error))
    whole = {f.curve.kind for f in fits if f.curve.devices == world}
    for fit in fits:
        if fit.curve.kind not in whole:
            top["curves"].fail(
                f"{fit.curve.kind} has no curve between all {world} devices; profile again, or remove the part "
                "measured"
            )
    ops = read_ops(top["ops"], world) if "ops" in top else ()
    lanes = top["lanes"].whole("lanes", 1) if "lanes" in top else 1
    steps = read_steps(top["steps"], world) if "steps" in top else ()
    return MeasuredFigures(tuple(fits), rates, about or None, ops, lanes, steps)


def _read_rate(node: Node, world: int) -> Rate:
    keys = tuple(f.name for f in fields(Rate))
    entry = node.entries("a rate", keys, keys)
    rank = entry["rank"].whole("rank", 0)
    if rank >= world:
        entry["rank"].fail(f"rank is {rank}; the cluster has {world} devices")
    amount, seconds, low, high = (
        entry[key].number(key, positive=True) for key in ("amount", "seconds", "low", "high")
    )
    what, dtype = entry["what"].choice("what", RATES), entry["dtype"].text("dtype")
    return Rate(rank, what, dtype, amount, seconds, low, high, entry["samples"].whole("samples", 1))


def _read_fit(node: Node) -> Fit:
    entry = node.entries(
        "a curve",
        ("kind", "devices", "above", *TERMS, "r2", "error", "points"),
        ("kind", "devices", "latency"),
    )
    numbers = {key: entry[key].number(key) for key in (*TERMS, "above") if key in entry}
    kind = cast("Kind", entry["kind"].choice("kind", COLLECTIVES))
    try:
        curve = Curve(kind, entry["devices"].whole("devices", 2), **numbers)
    except ClusterError as error:
        node.fail(str(error))
    return Fit(
        curve,
        entry["r2"].number("r2", negative=True) if "r2" in entry else None,
        entry["error"].number("error") if "error" in entry else None,
        tuple(map(_read_point, entry["points"].elements("points"))) if "points" in entry else (),
    )


def _read_point(node: Node) -> Point:
    cells = node.cells("a point", _POINT)
    seconds, low, high = (cells[key].number(key, positive=True) for key in ("seconds", "low", "high"))
    return Point(
        cells["skew"].text("skew"),
        cells["bytes"].whole("bytes", 1),
        cells["shards"].whole("shards", 1),
        cells["largest"].number("largest"),
        cells["exchange"].number("exchange"),
        seconds,
        low,
        high,
        cells["samples"].whole("samples", 1),
    )


def _text_or_number(node: Node, key: str) -> str | float:
    if isinstance(node.scalar, (int, float)):
        return node.number(key, negative=True)
    text = node.text(key)
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
