"""Entries of a cluster file that describe a device, a machine or a network."""

from __future__ import annotations

import math
from typing import Final

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.devices import DEFAULT, LATENCY, LAUNCH, SLOWDOWNS, Device, Network, virtual_device
from hetspmd.cluster.file import Node
from hetspmd.codec.quantities import Kind
from hetspmd.trace.graph import ITEM_SIZES

_ALIASES: Final = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DTYPES: Final = (DEFAULT, *sorted(ITEM_SIZES), *_ALIASES)


def read_device(node: Node, index: int) -> tuple[int, Device]:
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
        *SLOWDOWNS,
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
        None,
        *(_read_slowdown(entry[what], what) if what in entry else {} for what in SLOWDOWNS),
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
    return count, virtual_device(device, accelerators, read_network(entry["inside"], "inside"))


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


def _read_slowdown(node: Node, what: str) -> dict[str, float]:
    if node.mapping is None:
        return {DEFAULT: _slowdown(node, what)}
    return {
        kind: _slowdown(factor, f"{what} of {kind}")
        for kind, factor in node.entries(what, (DEFAULT, *KINDS), ()).items()
    }


def _slowdown(node: Node, what: str) -> float:
    factor = node.number(what)
    if not 1 <= factor < math.inf:
        node.fail(f"{what} is {factor}; it must be finite and at least 1, which is no slowdown")
    return factor


def read_network(node: Node, name: str = "network") -> Network:
    entry = node.entries(name, ("bandwidth", "latency"), ("bandwidth",))
    latency = entry["latency"].quantity("latency", "seconds") if "latency" in entry else LATENCY
    return Network(entry["bandwidth"].quantity("bandwidth", "bytes/s"), latency)
