"""From what each rank measured to the cluster's devices.

Ranks are one kind of device if they have the same name, dtypes, and memory within a tenth, and their rates are
those of the first such rank: within a tenth on average, and none farther than a quarter (launches, which are the
host's, a half). Rates that are known so vaguely that the intervals of the two medians overlap count as equal.
Convolutions are compared at one size alone: sizes are four times apart, and on one device the smaller was found to
do a third fewer FLOPs a second. Each number of a kind is the median over its ranks, but the memory the least. So
equal devices stay equal, as the search and the linear program want them, whatever the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hetspmd.cluster.curves import Rate
from hetspmd.cluster.devices import Device
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.slowdowns import Slowdowns, median_of


@dataclass(frozen=True)
class Report:
    """What one rank knows of its device: its kind's ``name``, its ``host``, usable ``memory`` in bytes, rates."""

    name: str
    host: str
    memory: float
    rates: tuple[Rate, ...]

    def device(self, product: str) -> Device:
        """The device; FLOP/s are those of ``product``: matmul or convolution."""
        flops = {r.dtype: r.per_second for r in self.rates if r.what == product}
        memory = next(r for r in self.rates if (r.what, r.dtype) == ("memory", "float32"))
        launch = next(r for r in self.rates if r.what == "launch")
        optimizer = next((r.per_second for r in self.rates if r.what == "optimizer"), None)
        return Device(
            self.name, flops, self.memory, memory.per_second, launch.seconds / launch.amount, optimizer
        )


def devices_of(reports: Sequence[Report], product: str = "matmul") -> tuple[Device, ...]:
    """The devices in rank order, those of a kind equal. Kinds of one name are told apart by letters."""
    raw = [r.device(product) for r in reports]
    kinds: list[list[int]] = []
    for rank, report in enumerate(reports):
        for kind in kinds:
            if _alike(reports[kind[0]], report):
                kind.append(rank)
                break
        else:
            kinds.append([rank])
    merged: dict[int, Device] = {}
    for kind in kinds:
        members = [raw[r] for r in kind]
        namesakes = [k for k in kinds if raw[k[0]].name == members[0].name]
        name = members[0].name + ("" if len(namesakes) == 1 else f"-{_letters(namesakes.index(kind))}")
        device = Device(
            name,
            {t: _rounded(median(d.flops[t] for d in members)) for t in members[0].flops},
            float(int(min(d.memory for d in members) / 2**20) * 2**20) or 1.0,
            _rounded(median(d.memory_bandwidth for d in members)),
            _rounded(median(d.launch for d in members)),
            _rounded(median(rates)) if (rates := [d.optimizer for d in members if d.optimizer]) else None,
        )
        merged |= dict.fromkeys(kind, device)
    return tuple(merged[rank] for rank in range(len(raw)))


def issuing(devices: Sequence[Device], own: Sequence[tuple[float, float]]) -> tuple[Device, ...]:
    """The devices with what issuing a collective takes each, by rank (seconds, and seconds per byte); the medians
    for those of a kind."""
    result = list(devices)
    for kind in kinds_of(devices):
        seconds, per_byte = (_rounded(median(own[r][part] for r in kind)) for part in range(2))
        bandwidth = _rounded(1 / per_byte) if per_byte > 0 else math.inf
        for rank in kind:
            result[rank] = replace(devices[rank], issue=seconds, issue_bandwidth=bandwidth)
    return tuple(result)


def slowed(devices: Sequence[Device], own: Sequence[Slowdowns]) -> tuple[Device, ...]:
    """The devices with what computing and collectives take from each other on each, by rank; the medians for those
    of a kind."""
    result = list(devices)
    for kind in kinds_of(devices):
        factors = median_of([own[r] for r in kind])
        for rank in kind:
            result[rank] = replace(
                devices[rank], computing_slowdown=factors.computing, collective_slowdown=factors.collective
            )
    return tuple(result)


def kinds_of(devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """The ranks of equal devices together, in rank order."""
    kinds: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        kinds.setdefault(list(devices).index(device), []).append(rank)
    return tuple(map(tuple, kinds.values()))


def groups_of(devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks between which collectives are measured, each with the fastest device first.

    All ranks, the two fastest, and the fastest kinds together, which are the subsets that the compiler tries; of
    the last at most ``rank_groups``, evenly spaced.
    """
    order = sorted(range(len(devices)), key=lambda r: (-devices[r].rate("float32"), r))
    ends = [i for i in range(2, len(order)) if i == 2 or devices[order[i]] != devices[order[i - 1]]]
    most = THRESHOLDS.rank_groups
    if len(ends) > most:
        ends = [ends[i * (len(ends) - 1) // (most - 1)] for i in range(most)]
    return tuple(tuple(order[:end]) for end in (len(order), *reversed(ends)) if end > 1)


def _alike(first: Report, other: Report) -> bool:
    ours = {(r.what, r.dtype): r for r in first.rates}
    theirs = {(r.what, r.dtype): r for r in other.rates}
    if first.name != other.name or ours.keys() != theirs.keys() or not _near(first.memory, other.memory):
        return False
    gaps = {
        k: 0.0 if _same(a, theirs[k]) else _gap(a.per_second, theirs[k].per_second) for k, a in ours.items()
    }
    most = {
        k: math.log1p(THRESHOLDS.alike_launch if k[0] == "launch" else THRESHOLDS.alike_rate) for k in gaps
    }
    others = [gap for k, gap in gaps.items() if k[0] != "launch"]
    most_of_all = math.log1p(THRESHOLDS.alike_rates) * len(others)
    return all(gaps[k] <= most[k] for k in gaps) and sum(others) <= most_of_all


def _near(a: float, b: float) -> bool:
    return max(a, b) <= (1 + THRESHOLDS.alike_rates) * min(a, b)


def _gap(a: float, b: float) -> float:
    return abs(math.log(a / b))


def _same(a: Rate, b: Rate) -> bool:
    """Whether the two tell no difference: too vague, or not to be compared."""
    return _overlap(a, b) or (a.what == "convolution" and a.amount != b.amount)


def _overlap(a: Rate, b: Rate) -> bool:
    """Whether the intervals of two medians overlap; the calls may differ in their amounts."""
    return a.amount / a.high <= b.amount / b.low and b.amount / b.high <= a.amount / a.low


def _letters(index: int) -> str:
    """a, b, ..., z, ba, bb, ..."""
    text = ""
    while True:
        text = chr(ord("a") + index % 26) + text
        index //= 26
        if not index:
            return text


def _rounded(value: float) -> float:
    """Four significant digits: more than was measured."""
    return float(f"{value:.4g}")
