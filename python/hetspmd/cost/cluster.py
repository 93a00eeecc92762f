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
computes), ``issue_bandwidth`` (infinite: bytes that it copies in a second for that) and ``latency`` (50 us per
collective). ``network`` may be left out for a single device. An entry with ``accelerators: 8`` and ``inside:
{bandwidth: 150GB/s, latency: 5us}`` is a machine with that many accelerators, to each of which the entry's
other figures belong (:mod:`hetspmd.cost.machines`); ``count`` repeats it. ``hetspmd profile`` adds the part
``measured`` (:mod:`hetspmd.cost.measured`), whose curves stand in for ``network`` where collectives are priced,
and whose op times for the devices' rates where ops are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from hetspmd.cost.cluster_file import Node, read_file, read_object, read_text
from hetspmd.cost.measured import Curve, Fit, Measured, at_devices, check_curves, read_measured
from hetspmd.cost.op_times import OpFit, OpTime, OpTimes, at_ranks, check_op_times
from hetspmd.cost.quantities import Kind, quantity_text
from hetspmd.errors import ClusterError
from hetspmd.trace.graph import ITEM_SIZES

DEFAULT: Final = "default"
LAUNCH: Final = 5e-6
LATENCY: Final = 50e-6
MOST: Final = 65536
"""Ranks of a cluster file; more are a slip of the pen."""
PASSES: Final = 20
"""Tensors of a parameter's size that a step of AdamW reads or writes, as torch.optim runs it op by op or by
``_foreach`` ops: decay 2, first moment 3, second moment 2 + 3, its root 2, correction 2, epsilon 2, update 4. State
and gradient are of the parameter's dtype; the memory model counts the same two moments
(:data:`hetspmd.cost.memory.OPTIMIZER_BYTES`)."""
_ALIASES: Final = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NO_OPS: Final[Mapping[str, OpTime]] = {}
_DTYPES: Final = (DEFAULT, *sorted(ITEM_SIZES), *_ALIASES)

__all__ = ["LATENCY", "LAUNCH", "PASSES", "Cluster", "Device", "Machine", "Network"]


@dataclass(frozen=True)
class Device:
    """One device.

    flops             FLOP/s by dtype name; ``default`` holds for dtypes that are not listed
    memory            bytes
    memory_bandwidth  bytes/s
    launch            seconds from one op to the next however small the op is
    issue             seconds of the device that it takes to issue a collective and to take in its result,
    issue_bandwidth   and bytes/s that it copies for one
    optimizer         bytes of parameters that a step of the optimizer updates in a second; None: AdamW's, whose
                      step reads and writes :data:`PASSES` times as many bytes as the parameters have
    machine           None for one accelerator; what a virtual device (HAP 3) consists of, whose figures above are
                      then those of all its accelerators together (:func:`hetspmd.cost.machines.virtual_device`)

    Raises ClusterError for a quantity that is not positive.
    """

    name: str
    flops: Mapping[str, float]
    memory: float = math.inf
    memory_bandwidth: float = math.inf
    launch: float = LAUNCH
    optimizer: float | None = None
    issue: float = 0.0
    issue_bandwidth: float = math.inf
    machine: Machine | None = None

    def __post_init__(self) -> None:
        if not self.flops:
            raise ClusterError(f"device {self.name!r}: flops is empty; write flops={{'default': 12e12}}")
        for dtype, rate in self.flops.items():
            if dtype != DEFAULT and dtype not in ITEM_SIZES:
                raise ClusterError(f"device {self.name!r}: flops of {dtype!r}, which is no dtype")
            _positive(f"device {self.name!r}: flops of {dtype}", rate, finite=True)
        _positive(f"device {self.name!r}: memory", self.memory)
        _positive(f"device {self.name!r}: memory_bandwidth", self.memory_bandwidth)
        _positive(f"device {self.name!r}: launch", self.launch, finite=True)
        if self.optimizer is not None:
            _positive(f"device {self.name!r}: optimizer", self.optimizer)
        _positive(f"device {self.name!r}: issue_bandwidth", self.issue_bandwidth)
        if not 0 <= self.issue < math.inf:
            raise ClusterError(
                f"device {self.name!r}: issue is {self.issue}; it must be finite and not negative"
            )

    def rate(self, dtype: str) -> float:
        """FLOP/s in ``dtype``: its own, else the default, else the least that is listed."""
        found = self.flops.get(dtype, self.flops.get(DEFAULT))
        return min(self.flops.values()) if found is None else found

    @property
    def update(self) -> float:
        """Bytes/s of parameters that a step of the optimizer updates."""
        return self.memory_bandwidth / PASSES if self.optimizer is None else self.optimizer

    @property
    def copying(self) -> float:
        """Seconds for a byte of a tensor whose slices are put in another order to be sent."""
        return 1 / self.issue_bandwidth


@dataclass(frozen=True, slots=True)
class Network:
    """The network between the devices: ``bandwidth`` of one device's link in bytes/s in each direction,
    ``latency`` of a collective in seconds. Raises ClusterError for a quantity that is not positive."""

    bandwidth: float
    latency: float = LATENCY

    def __post_init__(self) -> None:
        _positive("network: bandwidth", self.bandwidth)
        _positive("network: latency", self.latency, finite=True)


@dataclass(frozen=True)
class Machine:
    """``accelerators`` of one kind (``each``), joined by the network ``inside``."""

    accelerators: int
    each: Device
    inside: Network


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order and their network (None only for a single device).

    ``curves`` are measured collectives between at most as many devices; those between exactly as many take the
    place of ``network`` in the cost model. ``ops`` are measured seconds of ops, per kind of device. ``lanes``: how
    many collectives are on their way at a time, the latency of one hidden behind another.
    """

    devices: tuple[Device, ...]
    network: Network | None = None
    curves: tuple[Curve, ...] = ()
    ops: tuple[OpTimes, ...] = ()
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ClusterError(f"lanes is {self.lanes}; it must be 1 or more")
        check_curves(self.curves, len(self.devices))
        check_op_times(self.ops, len(self.devices))
        if not self.devices:
            raise ClusterError("the cluster has no device; list at least one")
        if self.network is None and len(self.devices) > 1:
            raise ClusterError(
                f"the cluster has {len(self.devices)} devices and no network; "
                "add network: {bandwidth: 10Gbit/s, latency: 50us}"
            )

    @property
    def world(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def accelerators(self) -> tuple[int, ...]:
        """The accelerators of each device, 1 for one that is no machine; their sum is the number of ranks."""
        return tuple(1 if d.machine is None else d.machine.accelerators for d in self.devices)

    @property
    def ranks(self) -> int:
        """Number of processes that run on the cluster: one per accelerator."""
        return sum(self.accelerators)

    @property
    def copying(self) -> float:
        """:attr:`Device.copying` of the slowest device."""
        return max(device.copying for device in self.devices)

    def part(self, ranks: Sequence[int]) -> Cluster:
        """The devices of these ranks, in this order, on the same network."""
        if list(ranks) == list(range(self.world)):
            return self
        devices = tuple(self.devices[r] for r in ranks)
        return Cluster(
            devices,
            self.network,
            at_devices(self.curves, len(devices)),
            at_ranks(self.ops, ranks),
            self.lanes,
        )

    def ops_by_rank(self) -> tuple[Mapping[str, OpTime], ...]:
        """The measured op times of each device by key; devices that were measured together share one mapping."""
        found: list[Mapping[str, OpTime]] = [_NO_OPS] * self.world
        for kind in self.ops:
            for rank in kind.ranks:
                found[rank] = kind.by_key
        return tuple(found)

    @classmethod
    def load(cls, spec: Cluster | Mapping[str, Any] | str | os.PathLike[str]) -> Cluster:
        """A cluster from a Cluster, a dict, or the path of a YAML or JSON file.

        Raises ClusterError that names the file, line and column (or the place in the dict), the key, and what
        to write instead.
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
        """A cluster from YAML or JSON text; ``name`` stands in messages. Raises ClusterError."""
        return _read(read_text(text, name))

    def to_dict(self) -> dict[str, Any]:
        """The cluster as ``load`` reads it; equal neighbours share an entry with a count."""
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
            if machine is not None:
                inside = {"bandwidth": machine.inside.bandwidth, "latency": machine.inside.latency}
                entry |= {"accelerators": machine.accelerators, "inside": inside}
            entries.append(entry)
        document: dict[str, Any] = {"devices": entries}
        if self.network is not None:
            document["network"] = {"bandwidth": self.network.bandwidth, "latency": self.network.latency}
        if self.curves or self.ops or self.lanes > 1:
            ops = tuple((kind.ranks, tuple(map(OpFit, kind.times))) for kind in self.ops)
            document["measured"] = Measured(tuple(map(Fit, self.curves)), ops=ops, lanes=self.lanes).to_dict()
        return document

    def to_text(self) -> str:
        """The cluster file's text (YAML); ``Cluster.from_text`` is its inverse."""
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
        if self.curves:
            counts = sorted({c.devices for c in self.curves})
            lines.append(f"measured collectives between {', '.join(map(str, counts))} devices")
        if self.ops:
            counts = [len(kind.times) for kind in self.ops]
            lines.append(f"measured times of {', '.join(map(str, counts))} ops")
        return "\n".join(lines)


def _positive(name: str, value: float, *, finite: bool = False) -> None:
    if not value > 0 or (finite and not math.isfinite(value)):
        raise ClusterError(f"{name} is {value}; it must be positive{' and finite' if finite else ''}")


def _plain(flops: Mapping[str, float]) -> Any:
    if list(flops) == [DEFAULT]:
        return flops[DEFAULT]
    return {k: flops[k] for k in sorted(flops)}


def _read(root: Node) -> Cluster:
    top = root.entries("the cluster", ("devices", "network", "measured"), ("devices",))
    devices: list[Device] = []
    ranks = 0
    for index, entry in enumerate(top["devices"].items("devices")):
        count, device = _read_device(entry, index)
        ranks += count * (1 if device.machine is None else device.machine.accelerators)
        if ranks > MOST:
            entry.fail(f"up to device {index} there are {ranks} ranks; a cluster has at most {MOST}")
        devices.extend([device] * count)
    if "measured" in top and any(d.machine is not None for d in devices):
        top["measured"].fail(
            "measured figures belong to single accelerators, and an entry has several; list each accelerator by "
            "itself, or remove the part measured"
        )
    measured = read_measured(top["measured"], len(devices)) if "measured" in top else Measured()
    if "network" in top:
        network = _read_network(top["network"])
        return Cluster(tuple(devices), network, measured.curves, measured.op_times, measured.lanes)
    if len(devices) > 1:
        root.fail(
            f"the cluster lacks the key 'network', which {len(devices)} devices need; "
            "add network: {bandwidth: 10Gbit/s, latency: 50us}"
        )
    return Cluster(tuple(devices), ops=measured.op_times)


def _read_device(node: Node, index: int) -> tuple[int, Device]:
    what = f"device {index}"
    keys = (
        "name",
        "count",
        "flops",
        "memory",
        "memory_bandwidth",
        "launch",
        "optimizer",
        "issue",
        "issue_bandwidth",
        "accelerators",
        "inside",
    )
    entry = node.entries(what, keys, ("flops",))

    def quantity(key: str, kind: Kind, default: float) -> float:
        return entry[key].quantity(key, kind) if key in entry else default

    device = Device(
        entry["name"].text("name") if "name" in entry else f"device{index}",
        _read_flops(entry["flops"]),
        quantity("memory", "bytes", math.inf),
        quantity("memory_bandwidth", "bytes/s", math.inf),
        quantity("launch", "seconds", LAUNCH),
        quantity("optimizer", "bytes/s", math.inf) if "optimizer" in entry else None,
        quantity("issue", "seconds", 0.0),
        quantity("issue_bandwidth", "bytes/s", math.inf),
    )
    count = entry["count"].count("count") if "count" in entry else 1
    accelerators = entry["accelerators"].count("accelerators") if "accelerators" in entry else 1
    if "inside" in entry and accelerators == 1:
        entry["inside"].fail("inside joins several accelerators, and there is one; write accelerators: 8")
    if accelerators == 1:
        return count, device
    if "inside" not in entry:
        node.fail(
            f"{what} has {accelerators} accelerators and lacks the key 'inside'; "
            "add inside: {bandwidth: 150GB/s, latency: 5us}"
        )
    from hetspmd.cost.machines import virtual_device  # it needs what is defined here

    return count, virtual_device(device, accelerators, _read_network(entry["inside"], "inside"))


def _read_flops(node: Node) -> dict[str, float]:
    if node.mapping is None:
        return {DEFAULT: node.quantity("flops", "FLOP/s")}
    entries = node.entries("flops", _DTYPES, ())
    if not entries:
        node.fail("flops is empty; write a number of FLOP/s, or one per dtype as {float32: 12e12}")
    rates: dict[str, float] = {}
    for key, value in entries.items():
        dtype = _ALIASES.get(key, key)
        if dtype in rates:
            value.fail(f"flops of {dtype} stands twice; remove one")
        rates[dtype] = value.quantity(f"flops of {key}", "FLOP/s")
    return rates


def _read_network(node: Node, name: str = "network") -> Network:
    entry = node.entries(name, ("bandwidth", "latency"), ("bandwidth",))
    latency = entry["latency"].quantity("latency", "seconds") if "latency" in entry else LATENCY
    return Network(entry["bandwidth"].quantity("bandwidth", "bytes/s"), latency)
