"""The cluster: devices in rank order and the network between them, in SI units.

A cluster file (YAML or JSON)::

    devices:                       # rank order; count repeats a device
      - {name: v100, count: 2, flops: 12e12, memory: 16GiB, memory_bandwidth: 800GB/s}
      - {name: p100, count: 2, flops: {float32: 7.5e12, float16: 15e12}, memory: 12GiB}
    network: {bandwidth: 10.4Gbit/s, latency: 50us}

``flops`` is a number or a number per dtype (``default`` for the others). Optional: ``name``, ``count`` (1),
``memory`` (unlimited), ``memory_bandwidth`` (infinite: every op is bound by its FLOPs), ``launch`` (5 us per
op), ``optimizer`` (bytes of parameters that an optimizer's step updates in a second: ``memory_bandwidth`` /
20), ``issue`` (0 s: what a collective takes of the device that issues it, where that is the processor that
computes), ``issue_bandwidth`` (infinite: bytes that it copies in a second for that), ``computing_slowdown`` (1:
how many times as long the device computes while a collective is on its way, or that per kind of collective, as
``{all_reduce: 1.2}``), ``collective_slowdown`` (1: how many times as long a collective takes while the device
computes) and ``latency`` (50 us per collective). ``network`` may be left out for a single device. An entry with
``accelerators: 8`` and ``inside: {bandwidth: 150GB/s, latency: 5us}`` is a machine with that many accelerators,
to each of which the entry's other figures belong (:mod:`hetspmd.cluster.machines`); ``count`` repeats it.
``hetspmd profile`` adds the part ``measured`` (:mod:`hetspmd.cluster.curves`), whose curves stand in for
``network`` where collectives are priced, and whose op times for the devices' rates where ops are. Measured
steps of whole models (:mod:`hetspmd.cluster.step_curves`) correct both seconds and bytes of those models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import yaml

from hetspmd.cluster.curves import Curve, Fit, MeasuredFigures, at_devices, check_curves, read_measured
from hetspmd.cluster.devices import DEFAULT, SLOWDOWNS, Device, Network
from hetspmd.cluster.entries import read_device, read_network
from hetspmd.cluster.file import Node, read_file, read_object, read_text
from hetspmd.cluster.op_times import OpFit, OpTime, OpTimes, at_ranks, check_op_times
from hetspmd.cluster.step_curves import ModelSteps, check_steps, steps_at_ranks
from hetspmd.codec.quantities import quantity_text
from hetspmd.codec.records import LEFT_OUT
from hetspmd.errors import ClusterError

MOST: Final = 65536
"""Ranks of a cluster file; more are a slip of the pen."""
_SLOWED: Final = ("beside a collective devices compute", "beside computing collectives take")
"""What is slowed down, in words, of each of :data:`SLOWDOWNS`."""
_NO_OPS: Final[Mapping[str, OpTime]] = {}


@dataclass(frozen=True)
class Cluster:
    """The devices in rank order and the network between them, in SI units.

    Attributes:
        devices: In rank order. A machine with several accelerators is one device here.
        network: The network between the devices; None only for a single device.
        curves: Measured collectives between at most as many devices. Those between exactly as many take the
            place of ``network`` in the cost model.
        ops: Measured seconds of ops, per kind of device.
        lanes: How many collectives are on their way at a time, the latency of one hidden behind another.
        steps: Measured training steps of whole models, per model and kind of device.

    Raises:
        ClusterError: The parts do not fit each other.
    """

    devices: tuple[Device, ...]
    network: Network | None = None
    curves: tuple[Curve, ...] = ()
    ops: tuple[OpTimes, ...] = ()
    lanes: int = 1
    steps: tuple[ModelSteps, ...] = field(default=(), metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ClusterError(f"lanes is {self.lanes}; it must be 1 or more")
        check_curves(self.curves, len(self.devices))
        check_op_times(self.ops, len(self.devices))
        check_steps(self.steps, len(self.devices))
        if not self.devices:
            raise ClusterError("the cluster has no device; list at least one")
        if self.network is None and len(self.devices) > 1:
            raise ClusterError(
                f"the cluster has {len(self.devices)} devices and no network; "
                "add network: {bandwidth: 10Gbit/s, latency: 50us}"
            )

    @property
    def world(self) -> int:
        """Number of devices; a machine counts as one."""
        return len(self.devices)

    @property
    def accelerators(self) -> tuple[int, ...]:
        """The number of accelerators of each device, 1 for a device that is no machine. The sum is
        :attr:`ranks`.
        """
        return tuple(1 if d.machine is None else d.machine.accelerators for d in self.devices)

    @property
    def ranks(self) -> int:
        """Number of processes that run on the cluster, one per accelerator."""
        return sum(self.accelerators)

    @cached_property
    def copying(self) -> float:
        """Seconds per byte that the slowest device needs to reorder slices before they are sent."""
        return max(device.copying for device in self.devices)

    def part(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of the devices with these ranks, in this order, on the same network."""
        if list(ranks) == list(range(self.world)):
            return self
        devices = tuple(self.devices[r] for r in ranks)
        return Cluster(
            devices,
            self.network,
            at_devices(self.curves, len(devices)),
            at_ranks(self.ops, ranks),
            self.lanes,
            steps_at_ranks(self.steps, ranks),
        )

    def ops_by_rank(self) -> tuple[Mapping[str, OpTime], ...]:
        """For each device the measured op times by key; devices that were measured together share one mapping."""
        by_rank: list[Mapping[str, OpTime]] = [_NO_OPS] * self.world
        for kind in self.ops:
            for rank in kind.ranks:
                by_rank[rank] = kind.by_key
        return tuple(by_rank)

    @classmethod
    def load(cls, spec: Cluster | Mapping[str, Any] | str | os.PathLike[str]) -> Cluster:
        """A cluster from a Cluster, a dict, or the path of a YAML or JSON file.

        Raises:
            ClusterError: The description is malformed. The message names the file, line and column (or the
                place in the dict), the key, and what to write instead.
        """
        if isinstance(spec, Cluster):
            return spec
        if isinstance(spec, Mapping):
            return _read(read_object(spec))
        if isinstance(spec, (str, os.PathLike)):
            return _read(read_file(spec))
        raise ClusterError(
            f"a cluster is a dict, the path of a file, or a hetspmd.Cluster; got a {type(spec).__name__}"
        )

    @classmethod
    def from_text(cls, text: str, name: str = "<cluster>") -> Cluster:
        """A cluster from YAML or JSON text.

        Args:
            text: The content of a cluster file.
            name: What messages call it.

        Raises:
            ClusterError: The text describes no cluster.
        """
        return _read(read_text(text, name))

    def to_dict(self) -> dict[str, Any]:
        """The cluster as :meth:`load` reads it; equal neighbours share an entry with a count."""
        entries: list[dict[str, Any]] = []
        previous: Device | None = None
        for device in self.devices:
            if device == previous:
                entries[-1]["count"] += 1
                continue
            previous = device
            machine = device.machine
            device = device if machine is None else machine.each
            entry: dict[str, Any] = {"name": device.name, "count": 1, "flops": _plain(device.flops)}
            if math.isfinite(device.memory):
                entry["memory"] = device.memory
            if math.isfinite(device.memory_bandwidth):
                entry["memory_bandwidth"] = device.memory_bandwidth
            entry["launch"] = device.launch
            if device.optimizer is not None and math.isfinite(device.optimizer):
                entry["optimizer"] = device.optimizer
            if device.issue:
                entry["issue"] = device.issue
            if math.isfinite(device.issue_bandwidth):
                entry["issue_bandwidth"] = device.issue_bandwidth
            for what in SLOWDOWNS:
                if factors := getattr(device, what):
                    entry[what] = _plain(factors)
            if machine is not None:
                inside = {"bandwidth": machine.inside.bandwidth, "latency": machine.inside.latency}
                entry |= {"accelerators": machine.accelerators, "inside": inside}
            entries.append(entry)
        document: dict[str, Any] = {"devices": entries}
        if self.network is not None:
            document["network"] = {"bandwidth": self.network.bandwidth, "latency": self.network.latency}
        if self.curves or self.ops or self.lanes > 1 or self.steps:
            ops = tuple((kind.ranks, tuple(map(OpFit, kind.times))) for kind in self.ops)
            document["measured"] = MeasuredFigures(
                tuple(map(Fit, self.curves)), ops=ops, lanes=self.lanes, steps=self.steps
            ).to_dict()
        return document

    def _slowest(self, what: str) -> tuple[float, str, str]:
        """The largest factor of a slowdown, the kind of collectives and the name of the device that have it."""
        entries = [(f, kind, d.name) for d in self.devices for kind, f in getattr(d, what).items()]
        return max(entries, key=lambda entry: entry[0], default=(1.0, DEFAULT, ""))

    def to_text(self) -> str:
        """The text of the cluster file (YAML). :meth:`from_text` is its inverse."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    def __str__(self) -> str:
        rows = [("ranks", "device", "FLOP/s", "memory", "bandwidth", "launch")]
        rank = 0
        for entry in self.to_dict()["devices"]:
            device, last = self.devices[rank], rank + entry["count"] - 1
            rows.append(
                (
                    str(rank) if last == rank else f"{rank}-{last}",
                    device.name
                    if device.machine is None
                    else f"{device.name} ({device.machine.accelerators})",
                    ", ".join(
                        quantity_text(v, "FLOP/s") + ("" if k == DEFAULT else f" ({k})")
                        for k, v in sorted(device.flops.items())
                    ),
                    quantity_text(device.memory, "bytes"),
                    quantity_text(device.memory_bandwidth, "bytes/s"),
                    quantity_text(device.launch, "seconds"),
                )
            )
            rank = last + 1
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.network is not None:
            lines.append(
                f"network  {quantity_text(self.network.bandwidth, 'bytes/s')}, "
                f"{quantity_text(self.network.latency, 'seconds')} per collective"
            )
        lines += [
            f"{who} up to {most:.2f} times as long ({device}, {kind.replace('_', '-')})"
            for what, who in zip(SLOWDOWNS, _SLOWED, strict=True)
            for most, kind, device in [self._slowest(what)]
            if most > 1
        ]
        if self.curves:
            counts = sorted({c.devices for c in self.curves})
            lines.append(f"measured collectives between {', '.join(map(str, counts))} devices")
        if self.ops:
            counts = [len(kind.times) for kind in self.ops]
            lines.append(f"measured times of {', '.join(map(str, counts))} ops")
        if self.steps:
            lines.append(f"measured steps of {', '.join(model.name for model in self.steps)}")
        return "\n".join(lines)


def _plain(flops: Mapping[str, float]) -> Any:
    if list(flops) == [DEFAULT]:
        return flops[DEFAULT]
    return {k: flops[k] for k in sorted(flops)}


def _read(root: Node) -> Cluster:
    top = root.entries("the cluster", ("devices", "network", "measured"), ("devices",))
    devices: list[Device] = []
    ranks = 0
    for index, entry in enumerate(top["devices"].items("devices")):
        count, device = read_device(entry, index)
        ranks += count * (1 if device.machine is None else device.machine.accelerators)
        if ranks > MOST:
            entry.fail(f"up to device {index} there are {ranks} ranks; a cluster has at most {MOST}")
        devices.extend([device] * count)
    if "measured" in top and any(d.machine is not None for d in devices):
        top["measured"].fail(
            "measured figures belong to single accelerators, and an entry has several; list each accelerator by "
            "itself, or remove the part measured"
        )
    measured = read_measured(top["measured"], len(devices)) if "measured" in top else MeasuredFigures()
    if "network" in top:
        network = read_network(top["network"])
        return Cluster(
            tuple(devices), network, measured.curves, measured.op_times, measured.lanes, measured.steps
        )
    if len(devices) > 1:
        root.fail(
            f"the cluster lacks the key 'network', which {len(devices)} devices need; "
            "add network: {bandwidth: 10Gbit/s, latency: 50us}"
        )
    return Cluster(tuple(devices), ops=measured.op_times, steps=measured.steps)
