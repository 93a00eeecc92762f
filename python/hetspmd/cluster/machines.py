"""Machines with several accelerators as virtual devices (HAP 3), and the same accelerators side by side.

Each accelerator is a rank. A cluster file names machines::

    devices:
      - {name: node, count: 2, accelerators: 8, flops: 100e12, memory: 80GiB, inside: {bandwidth: 300GB/s}}
    network: {bandwidth: 100Gbit/s, latency: 50us}      # between machines; of one machine's link

A step may run in two ways, of which :func:`hetspmd.compile` keeps the cheaper:

- across *virtual devices*: a program over the machines, each of which divides its part of the batch evenly
  among its accelerators. A machine computes as fast as its k accelerators together. The optimizer's step is
  every accelerator's own, and gradients are summed inside, for which a parameter of E bytes takes 2 (k - 1) / k
  E / b seconds with b the inside bandwidth (HAP 3.2: internal communication counts as computation);
- *flat*: a program over all accelerators. Its collectives are priced by the slowest link that they cross.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network


def has_machines(cluster: Cluster) -> bool:
    """Whether any device is a machine."""
    return any(device.machine is not None for device in cluster.devices)


def device_word(cluster: Cluster) -> str:
    """What a number of one of the cluster's devices counts: ``"machine"``, or ``"rank"`` where there are none."""
    return "machine" if has_machines(cluster) else "rank"


def devices_text(word: str, devices: Sequence[int]) -> str:
    """``rank 3``, or ``machines 0, 1``."""
    return f"{word}{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"


def accelerator(device: Device) -> Device:
    """One accelerator of a device: itself if it is no machine."""
    return device if device.machine is None else device.machine.each


def flat(cluster: Cluster) -> Cluster:
    """The accelerators of all machines side by side, in rank order, on the slowest of their networks."""
    if not has_machines(cluster):
        return cluster
    machines = [d.machine for d in cluster.devices if d.machine is not None]
    networks = [m.inside for m in machines]
    if cluster.world > 1 and cluster.network is not None:
        networks.append(cluster.network)
    slowest = Network(min(n.bandwidth for n in networks), max(n.latency for n in networks))
    each = [
        accelerator(d) for d, k in zip(cluster.devices, cluster.accelerators, strict=True) for _ in range(k)
    ]
    return Cluster(tuple(each), slowest)


def inside_cluster(cluster: Cluster, active: Sequence[int]) -> Cluster:
    """The accelerators of the largest of some devices, the first of them if several are as large, on the network
    inside."""
    counts = [cluster.accelerators[j] for j in active]
    largest = cluster.devices[active[counts.index(max(counts))]]
    machine = largest.machine
    return Cluster((accelerator(largest),) * max(counts), None if machine is None else machine.inside)


def ranks_of(cluster: Cluster, devices: Sequence[int]) -> tuple[int, ...]:
    """The ranks of the accelerators of some devices, in order."""
    wanted = set(devices)
    return tuple(rank for rank, device in enumerate(machine_of(cluster)) if device in wanted)


def machine_of(cluster: Cluster) -> tuple[int, ...]:
    """The device that each rank is an accelerator of."""
    return tuple(j for j, k in enumerate(cluster.accelerators) for _ in range(k))
