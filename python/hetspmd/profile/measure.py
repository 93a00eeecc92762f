"""The whole profile: devices first, all at once; then the collectives, between all devices and between the
fastest ones; then the cluster file.

A third of the budget goes to the devices (all of it on a single one), the rest in equal parts to the groups of
ranks. Every rank calls :func:`measure` and gets the same result. :func:`with_ops` adds the times of a model's ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import yaml

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import Kind
from hetspmd.cluster.curves import COLLECTIVES, Fit, MeasuredFigures, Point, read_measured
from hetspmd.cluster.devices import Device
from hetspmd.cluster.file import Node, read_file
from hetspmd.cost.op_keys import is_parameter_key
from hetspmd.errors import ClusterError, ProfileError
from hetspmd.profile.cases import OpCase
from hetspmd.profile.collective_times import measure_group, measure_issue, measure_lanes
from hetspmd.profile.device import DTYPES, measure_device
from hetspmd.profile.fit import fit_curves, fit_network, hidden
from hetspmd.profile.grouping import Report, devices_of, groups_of, issuing, slowed
from hetspmd.profile.host import device_name, host_identity, usable_memory
from hetspmd.profile.ops import measure_ops
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session
from hetspmd.profile.slowdowns import measure_slowdowns

TIMING: Final = (
    "medians; a sample of a collective is the slowest rank's time after all have met, times what one in a row "
    "takes longer; intervals of the median by order statistics"
)


@dataclass(frozen=True)
class Options:
    """budget     seconds after which measurements are repeated no more
    tolerance  half the interval of a median, as a part of it, at which it is not repeated
    product    whose FLOP/s become the devices': matmul or convolution
    dtypes     in which rates are measured
    optimizer  whose step is measured: adamw, momentum (SGD with it) or sgd"""

    budget: float = 60.0
    tolerance: float = 0.05
    product: str = "matmul"
    dtypes: tuple[str, ...] = DTYPES
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Profile:
    """A cluster and all that was measured of it."""

    cluster: Cluster
    measured: MeasuredFigures

    def to_text(self) -> str:
        """The cluster file's text (YAML)."""
        document = self.cluster.to_dict()
        document["measured"] = _short(self.measured.to_dict())
        text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=1000)
        return "# Written by hetspmd profile. Devices are in rank order.\n" + text

    @classmethod
    def open(cls, path: str) -> Profile:
        """A cluster file and what was measured of it, if anything. Raises ClusterError."""
        root: Node = read_file(path)
        cluster = Cluster.load(path)
        if root.mapping is None or "measured" not in root.mapping:
            return cls(cluster, MeasuredFigures())
        return cls(cluster, read_measured(root.mapping["measured"], cluster.world))

    @classmethod
    def load(cls, path: str) -> Profile:
        """A cluster file with the part ``measured``. Raises ClusterError for any other."""
        profile = cls.open(path)
        if profile.measured == MeasuredFigures():
            raise ClusterError(
                f"{path} has no part measured, so there is nothing to show; hetspmd profile writes one"
            )
        return profile


def measure(session: Session, options: Options, tick: Callable[[str], None] = lambda what: None) -> Profile:
    """Measure every rank's device and the collectives between them.

    ``tick`` hears what is being measured. Raises ProfileError on every rank if one fails.
    """
    device = session.device
    hosts = session.together("naming the host", host_identity)
    ranks_on_host = Counter(hosts)[hosts[session.rank]]
    memory = session.together("asking for memory", lambda: usable_memory(device, ranks_on_host))
    part = THRESHOLDS.device_part if session.world > 1 else 1.0
    budget = max(part * options.budget - session.elapsed(), 0.0)
    reports = session.together(
        "measuring its device",
        lambda: Report(
            device_name(device),
            hosts[session.rank],
            memory[session.rank],
            measure_device(
                session.rank, device, budget, options.tolerance, options.dtypes, tick, options.optimizer
            ),
        ),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    devices = devices_of(reports, options.product)
    rates = tuple(rate for report in reports for rate in report.rates)
    fits = _collectives(session, devices, options, tick)
    spent = max(session.together("reading the clock", session.elapsed))
    about = _about(session, options, spent, Counter(hosts))
    network = fit_network([f for f in fits if f.curve.devices == session.world]) if fits else None
    points: dict[tuple[Kind, int], list[Point]] = {}
    for fit in fits:
        points.setdefault((fit.curve.kind, fit.curve.devices), []).extend(fit.points)
    dropped = {kind for (kind, _), of_kind in points.items() if hidden(of_kind)}
    fits = tuple(f for f in fits if f.curve.kind not in dropped)
    if dropped:
        about["dropped"] = ", ".join(kind for kind in COLLECTIVES if kind in dropped)
    lanes = measure_lanes(session) if session.world > 1 else 1
    devices = issuing(devices, [(i.seconds, i.per_byte) for i in measure_issue(session)])
    devices = slowed(devices, measure_slowdowns(session, tick))
    cluster = Cluster(devices, network, tuple(f.curve for f in fits), lanes=lanes)
    return Profile(cluster, MeasuredFigures(fits, rates, about, lanes=lanes))


def with_ops(
    session: Session,
    profile: Profile,
    cases: Sequence[OpCase],
    options: Options,
    tick: Callable[[str], None] = lambda what: None,
) -> Profile:
    """The profile with the times of ops, measured for ``options.budget`` seconds; those that it has and that are
    not measured now stay, if they are of the same optimizer.

    Raises ProfileError if the profile is of another number of devices than there are ranks.
    """
    if profile.cluster.world != session.world:
        raise ProfileError(
            f"the cluster has {profile.cluster.world} devices and there are {session.world} ranks; start as many"
        )
    about = dict(profile.measured.about or {})
    report = measure_ops(
        session, profile.cluster, cases, options.budget, options.tolerance, options.optimizer, tick
    )
    same = about.get("optimizer", options.optimizer) == options.optimizer
    before = {rank: fits for ranks, fits in profile.measured.ops for rank in ranks}
    ops = []
    for ranks, fits in report.ops:
        lines = {f.time.key: f for f in before.get(ranks[0], ()) if same or not is_parameter_key(f.time.key)}
        lines |= {f.time.key: f for f in fits}
        ops.append((ranks, tuple(lines[key] for key in sorted(lines))))
    about |= {"optimizer": options.optimizer, "ops": str(report)}
    measured = replace(profile.measured, ops=tuple(kind for kind in ops if kind[1]), about=about)
    return Profile(replace(profile.cluster, ops=measured.op_times), measured)


def _collectives(
    session: Session, devices: tuple[Device, ...], options: Options, tick: Callable[[str], None]
) -> tuple[Fit, ...]:
    groups = groups_of(devices) if session.world > 1 else ()
    fits: list[Fit] = []
    for index, group in enumerate(groups):
        now = max(session.together("reading the clock", session.elapsed))
        deadline = now + max(options.budget - now, 0.0) / (len(groups) - index)
        ranks = sorted(group)
        order = [ranks.index(r) for r in group]
        points = measure_group(session, ranks, order, deadline, options.tolerance, tick)
        for kind in COLLECTIVES:
            fits += fit_curves(kind, len(ranks), [p for k, p in points if k == kind])
    return tuple(
        sorted(fits, key=lambda f: (COLLECTIVES.index(f.curve.kind), f.curve.devices, f.curve.above))
    )


def _about(session: Session, options: Options, spent: float, hosts: Counter[str]) -> dict[str, str | float]:
    cuda = session.device.type == "cuda"
    most = max(hosts.values())
    return {
        "backend": session.backend or "none: one device",
        "torch": "torch " + torch.__version__,
        "threads": torch.get_num_threads(),
        "budget": options.budget,
        "spent": round(spent, 2),
        "tolerance": options.tolerance,
        "confidence": THRESHOLDS.confidence,
        "flops": options.product,
        "optimizer": options.optimizer,
        "memory": "free memory of the GPU"
        if cuda
        else f"available memory of the machine, divided by its ranks (at most {most})",
        "timing": TIMING,
    }


def _short(document: dict[str, Any]) -> dict[str, Any]:
    """The same with four significant digits in points and rates, six in the rest."""

    def shorten(value: Any, digits: int) -> Any:
        if isinstance(value, float):
            return float(f"{value:.{digits}g}")
        if isinstance(value, list):
            return [shorten(v, 4) for v in value]
        if isinstance(value, dict):
            return {k: shorten(v, digits) for k, v in value.items()}
        return value

    shortened: dict[str, Any] = {k: shorten(v, 6) for k, v in document.items()}
    if "curves" in shortened:  # as they were fitted: the file is what plans are made from
        for entry, exact in zip(shortened["curves"], document["curves"], strict=True):
            entry |= {k: v for k, v in exact.items() if k not in ("points", "r2", "error")}
    return shortened
