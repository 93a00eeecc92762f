"""Devices, machines of several accelerators, and networks, in SI units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.codec.records import LEFT_OUT
from hetspmd.errors import ClusterError
from hetspmd.trace.graph import ITEM_SIZES

DEFAULT: Final = "default"
SLOWDOWNS: Final = ("computing_slowdown", "collective_slowdown")
"""What computing and a collective on its way take from each other, of a device."""
LAUNCH: Final = 5e-6
LATENCY: Final = 50e-6
PASSES: Final = 20
"""Tensors of a parameter's size that a step of AdamW reads or writes, as torch.optim runs it op by op or by
``_foreach`` ops: decay 2, first moment 3, second moment 2 + 3, its root 2, correction 2, epsilon 2, update 4. State
and gradient are of the parameter's dtype; the memory model counts the same two moments
(:data:`hetspmd.cost.memory.OPTIMIZER_BYTES`)."""


@dataclass(frozen=True)
class Device:
    """One device: an accelerator, or a machine of several that counts as one device.

    Attributes:
        name: What reports call it.
        flops: FLOP/s by dtype name; ``default`` holds for dtypes that are not listed.
        memory: Bytes.
        memory_bandwidth: Bytes/s.
        launch: Seconds from one op to the next, however small the op is.
        optimizer: Bytes of parameters that a step of the optimizer updates in a second. By default those of
            AdamW, whose step reads and writes 20 times as many bytes as the parameters have.
        issue: Seconds of the device that it takes to issue a collective and to take in its result.
        issue_bandwidth: Bytes/s that the device copies for a collective.
        computing_slowdown: How many times as long the device computes while a collective is on its way, by the kind
            of the collective; ``default`` holds for kinds that are not listed, and is 1 if it is not there.
        collective_slowdown: How many times as long a collective takes while the device computes, likewise.
        machine: The accelerators of a virtual device (HAP 3), whose figures above are then those of all of
            them together; None for one accelerator.

    Raises:
        ClusterError: A quantity is not positive.
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
    computing_slowdown: Mapping[str, float] = field(default_factory=dict, metadata=LEFT_OUT)
    collective_slowdown: Mapping[str, float] = field(default_factory=dict, metadata=LEFT_OUT)

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
        for what in SLOWDOWNS:
            for kind, factor in getattr(self, what).items():
                if kind != DEFAULT and kind not in KINDS:
                    raise ClusterError(
                        f"device {self.name!r}: {what} of {kind!r}, which is no kind of collectives"
                    )
                if not 1 <= factor < math.inf:
                    raise ClusterError(
                        f"device {self.name!r}: {what} of {kind} is {factor}; it must be finite and at "
                        "least 1, which is no slowdown"
                    )

    def rate(self, dtype: str) -> float:
        """FLOP/s in ``dtype``: its own, else the default, else the least that is listed."""
        rate = self.flops.get(dtype, self.flops.get(DEFAULT))
        return min(self.flops.values()) if rate is None else rate

    def slowdowns(self, kind: str) -> tuple[float, float]:
        """How many times as long the device computes while a collective of this kind is on its way, and how many
        times as long the collective takes while the device computes."""
        computing, carrying = (getattr(self, what) for what in SLOWDOWNS)
        return computing.get(kind, computing.get(DEFAULT, 1.0)), carrying.get(
            kind, carrying.get(DEFAULT, 1.0)
        )

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
    """The network between the devices.

    Attributes:
        bandwidth: Bytes/s of one device's link, in each direction.
        latency: Seconds of a collective.

    Raises:
        ClusterError: A quantity is not positive.
    """

    bandwidth: float
    latency: float = LATENCY

    def __post_init__(self) -> None:
        _positive("network: bandwidth", self.bandwidth)
        _positive("network: latency", self.latency, finite=True)


@dataclass(frozen=True)
class Machine:
    """Several accelerators of one kind that are joined by a network.

    Attributes:
        accelerators: Their number.
        each: One of them.
        inside: The network that joins them.
    """

    accelerators: int
    each: Device
    inside: Network


def virtual_device(each: Device, accelerators: int, inside: Network) -> Device:
    """A machine as one device. Raises ClusterError for fewer than two accelerators."""
    if accelerators < 2 or each.machine is not None:
        raise ClusterError(
            f"a machine of {accelerators} accelerators; it has two or more, which are no machines"
        )
    k = accelerators
    return replace(
        each,
        flops={dtype: k * rate for dtype, rate in each.flops.items()},
        memory=k * each.memory,
        memory_bandwidth=k * each.memory_bandwidth,
        optimizer=1 / (1 / each.update + 2 * (k - 1) / k / inside.bandwidth)
        if math.isfinite(each.update) or math.isfinite(inside.bandwidth)
        else math.inf,
        machine=Machine(k, each, inside),
    )


def _positive(name: str, value: float, *, finite: bool = False) -> None:
    if not value > 0 or (finite and not math.isfinite(value)):
        raise ClusterError(f"{name} is {value}; it must be positive{' and finite' if finite else ''}")
