"""A profile for people, on the terminal: devices, rates, collectives, and how good the fits are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.curves import Fit, Point, Rate
from hetspmd.cluster.op_times import OpFit
from hetspmd.codec.quantities import Kind, quantity_text
from hetspmd.codec.tables import counted, table
from hetspmd.profile.measure import Profile
from hetspmd.profile.show_steps import steps_text

UNITS: dict[str, Kind] = {
    "matmul": "FLOP/s",
    "convolution": "FLOP/s",
    "memory": "bytes/s",
    "launch": "seconds",
    "optimizer": "bytes/s",
}
KEY_CHARACTERS = 90
"""Characters of an op's key in a table, so that most terminals show a row as a line."""
OPS_SHOWN = 12
"""Ops in the table of a kind of device: the longest, on one screen."""


def profile_text(profile: Profile) -> str:
    """Everything that a profile decides, as tables."""
    cluster, measured = profile.cluster, profile.measured
    parts = [f"Cluster of {counted(cluster.world, 'device')}\n" + _indented(str(cluster))]
    if measured.rates:
        rows = [[r.ranks, r.device, r.what, r.dtype, r.text, r.spread, r.samples] for r in rate_rows(profile)]
        header = ["ranks", "device", "measured", "dtype", "median", "interval", "samples"]
        parts.append("Devices\n" + table(header, rows, right=(4, 5, 6)))
    if measured.fits:
        header = [
            "collective", "devices", "above", "latency", "per shard", "s/GB", "x largest", "x exchanged", "R2",
            "error", "points", "tight",
        ]  # fmt: skip
        tolerance = float((measured.about or {}).get("tolerance", 0.05))
        rows = [_fit_row(fit, tolerance) for fit in measured.fits]
        parts.append("Collectives\n" + table(header, rows, right=tuple(range(1, len(header)))))
        parts.append(
            "  above: for tensors of more bytes, up to the next row's\n"
            "  seconds = latency + per shard x shards + bytes x (s/GB + x largest x largest shard's part + "
            "x exchanged x exchanged part)\n"
            "  error: median of |curve - measured| / measured; tight: points whose median is known to "
            f"{100 * tolerance:g} %"
        )
    parts += [_ops_text(cluster, ranks, fits) for ranks, fits in measured.ops]
    parts += [steps_text(cluster, model) for model in measured.steps]
    dropped = (measured.about or {}).get("dropped")
    if dropped:
        parts.append(
            f"  No curve of {dropped}: its times hardly grow with the size, so that its bandwidth is unknown. It "
            "is priced by the network above. Profile again with a larger --budget, on an idle machine."
        )
    if measured.about:
        parts.append("How\n" + "\n".join(f"  {k:<10}  {_about(k, v)}" for k, v in measured.about.items()))
    return "\n\n".join(parts)


def _ops_text(cluster: Cluster, ranks: Sequence[int], fits: Sequence[OpFit]) -> str:
    """The longest ops of a kind of device, and how well the lines fit."""
    longest = sorted(fits, key=lambda f: (-f.time.seconds(1.0), f.time.key))[:OPS_SHOWN]
    rows = [
        [
            _shortened(f.time.key),
            _seconds(f.time.constant),
            _seconds(f.time.slope),
            f"{100 * f.error:.1f} %",
            str(len(f.points)),
        ]
        for f in longest
    ]
    header = ["op", "constant", "x share", "error", "points"]
    errors = [f.error for f in fits if len(f.points) > 1]
    quality = (
        f"; median error {100 * median(errors):.1f} %, worst {100 * max(errors):.0f} %" if errors else ""
    )
    title = f"Ops on {cluster.devices[ranks[0]].name} (ranks {_ranks(ranks)}): {len(fits)} lines{quality}"
    more = f"\n  and {len(fits) - len(longest)} shorter ones" if len(fits) > len(longest) else ""
    note = "\n  seconds = constant + x share; error: of the line at its worst point"
    return f"{title}\n" + table(header, rows, right=(1, 2, 3, 4)) + more + note


def _shortened(key: str) -> str:
    return key if len(key) <= KEY_CHARACTERS else key[: KEY_CHARACTERS - 3] + "..."


class RateRow(NamedTuple):
    """A quantity of one kind of device as text; ``value`` is its median over the ranks (launch: seconds per op)."""

    ranks: str
    device: str
    what: str
    dtype: str
    text: str
    spread: str
    samples: str
    value: float


def rate_rows(profile: Profile) -> list[RateRow]:
    """The rates per kind of device, quantity and dtype, in rank order."""
    devices = profile.cluster.devices
    kinds: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        kinds.setdefault(devices.index(device), []).append(rank)
    rows = []
    for first, kind in kinds.items():
        of_kind = [r for r in profile.measured.rates if r.rank in kind]
        for what, dtype in dict.fromkeys((r.what, r.dtype) for r in of_kind):
            rates = [r for r in of_kind if (r.what, r.dtype) == (what, dtype)]
            value = median(_value(r) for r in rates)
            widest = max((r.high - r.low) / 2 / r.seconds for r in rates)
            text = quantity_text(value, UNITS[what]) + (" per op" if what == "launch" else "")
            spread, samples = f"± {100 * widest:.1f} %", str(min(r.samples for r in rates))
            row = RateRow(_ranks(kind), devices[first].name, what, dtype, text, spread, samples, value)
            rows.append(row)
    return rows


def _value(rate: Rate) -> float:
    return rate.seconds / rate.amount if rate.what == "launch" else rate.per_second


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _fit_row(fit: Fit, tolerance: float) -> list[str]:
    curve = fit.curve
    per_byte = (curve.per_byte, curve.per_largest, curve.per_exchange)
    return [
        KINDS[curve.kind].text,
        str(curve.devices),
        quantity_text(curve.above, "bytes") if curve.above else "-",
        _seconds(curve.latency),
        _seconds(curve.per_shard),
        *(f"{1e9 * p:.4g}" if p else "-" for p in per_byte),
        "-" if fit.r2 is None else f"{fit.r2:.3f}",
        "-" if fit.error is None else f"{100 * fit.error:.1f} %",
        str(len(fit.points)),
        str(sum(1 for p in fit.points if _is_tight(p, tolerance))),
    ]


def _is_tight(point: Point, tolerance: float) -> bool:
    return (point.high - point.low) / 2 <= tolerance * point.seconds


def _seconds(value: float) -> str:
    return "-" if value == 0 else quantity_text(value, "seconds")


def _about(key: str, value: str | float) -> str:
    if isinstance(value, str):
        return value
    if key in ("tolerance", "confidence"):
        return f"{100 * value:g} %"
    return f"{value:g} s" if key in ("budget", "spent") else f"{value:g}"


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
