"""Measurements made by formula."""

from __future__ import annotations

import random

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.cluster.curves import COLLECTIVES, Curve, Fit, Point, Rate
from hetspmd.cluster.devices import Device
from hetspmd.profile.collective_trials import trials
from hetspmd.profile.fit import fit_curve
from hetspmd.profile.profile_thresholds import THRESHOLDS

SPEEDS = (4e12, 1e12, 4e12, 1e12)
TRUE = {"latency": 8e-5, "per_shard": 3e-5, "per_byte": 2e-10, "per_largest": 9e-10, "per_exchange": 1.1e-9}


def true_curve(kind: Kind, devices: int) -> Curve:
    return Curve(kind, devices, **{term: TRUE[term] * devices for term in KINDS[kind].terms})


def points(curve: Curve, noise: float = 0.0, seed: int = 0) -> list[Point]:
    """Every trial between ``curve.devices`` devices, with lognormal noise."""
    dice = random.Random(seed)
    found = []
    for nbytes in THRESHOLDS.level_bytes:
        for t in trials(nbytes, range(curve.devices)):
            if t.kind == curve.kind:
                exact = curve.seconds(t.nbytes, t.shards, t.largest, t.exchange)
                seconds = exact * dice.lognormvariate(0.0, noise)
                found.append(
                    Point(
                        t.skew, t.nbytes, t.shards, t.largest, t.exchange,
                        seconds, 0.96 * seconds, 1.03 * seconds, 9,
                    )
                )  # fmt: skip
    return found


def fits(devices: int) -> tuple[Fit, ...]:
    return tuple(fit_curve(k, devices, points(true_curve(k, devices), 0.03)) for k in COLLECTIVES)


def rates_of(rank: int, speed: float, jitter: float = 1.0, interval: float = 0.01) -> tuple[Rate, ...]:
    """What a device of ``speed`` FLOP/s measures."""

    def rate(what: str, dtype: str, amount: float, seconds: float) -> Rate:
        s = seconds * jitter
        return Rate(rank, what, dtype, amount, s, s * (1 - interval), s * (1 + interval), 9)

    return (
        rate("launch", "float32", 300.0, 300 * 5e-6),
        rate("matmul", "float32", 1e12, 1e12 / speed),
        rate("convolution", "float32", 1e12, 2e12 / speed),
        rate("memory", "float32", 1e9, 1e10 / speed),
        rate("matmul", "bfloat16", 1e12, 0.25e12 / speed),
    )


def rates() -> tuple[Rate, ...]:
    return tuple(r for rank, speed in enumerate(SPEEDS) for r in rates_of(rank, speed))


def devices() -> tuple[Device, ...]:
    return tuple(
        Device(f"d{int(s / 1e12)}", {"float32": s, "bfloat16": 4 * s}, 2.0**33, s / 10, 5e-6) for s in SPEEDS
    )
