"""A signature's seconds on a device as four numbers: a busy device with the share s takes

    max(fast s, cut s + whole) + start

by the roofline, or by what was measured of the op (:mod:`hetspmd.cost.model` has the formulas). A device that runs
the loop over micro-batches in several turns makes the calls of the loop, and reads what the turns do not divide, in
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device
from hetspmd.cluster.op_times import OpTime
from hetspmd.cost.signatures import Array, Index, Triples
from hetspmd.rules.theory import Theory


def terms_of(
    triples: Triples, theory: Theory, cluster: Cluster, turns: Sequence[int] | None = None
) -> tuple[Array, Array, Array, Array, Index]:
    """The four numbers of each signature on each device, shape (signatures, n), and the devices' kinds. ``turns``:
    in how many each device runs the loop (default: one).

    A measured line is of the roofline's own side: its slope is one of FLOPs where they bind the whole op, else one
    of bytes, and so is what a device runs whole but for its launch (:mod:`hetspmd.ratios.sensitivity` asks).
    """
    sharded = triples.axis < len(theory.axes.axes)
    lone = cluster.world == 1
    columns: dict[tuple[object, ...], int] = {}
    which: list[int] = []
    kind_terms: list[tuple[Array, Array, Array, Array]] = []
    times = (1,) * cluster.world if turns is None else turns
    for device, ops, own in zip(cluster.devices, cluster.ops_by_rank(), times, strict=True):
        key = (
            tuple(sorted(device.flops.items())),
            device.memory_bandwidth,
            device.launch,
            device.update,
            id(ops),
            own,
        )
        if key not in columns:
            columns[key] = len(kind_terms)
            kind_terms.append(_of_device(triples, sharded & (not lone), device, ops, lone, own - 1))
        which.append(columns[key])
    kinds: Index = np.array(which, dtype=np.int64)
    terms = [np.stack([m[part] for m in kind_terms], axis=1)[:, kinds] for part in range(4)]
    return terms[0], terms[1], terms[2], terms[3], kinds


def _of_device(
    t: Triples,
    sharded: npt.NDArray[np.bool_],
    device: Device,
    ops: Mapping[str, OpTime],
    lone: bool,
    more: int,
) -> tuple[Array, Array, Array, Array]:
    # A lone device runs everything whole, whichever row says so: one time, or the search would choose among errors.
    key = t.whole_key if lone else t.key
    rates = np.array([device.rate(dtype) for dtype in t.dtypes])
    bandwidth = np.where(t.updates, device.update, device.memory_bandwidth)
    fast = (t.flops + more * t.flops_each) / rates[t.dtype]
    cut, whole = (t.cut + more * t.cut_each) / bandwidth, (t.whole + more * t.whole_each) / bandwidth
    calls, adding = 1 + more * t.calls_each, (1 + more) * t.added * device.launch
    start = np.where(t.free | ((t.calls_each == 0) & (t.added > 0)), 0.0, device.launch)
    if not ops:
        return fast, cut, whole, start * calls + adding
    # One more place for what has no key.
    lines = [ops.get(k) for k in t.keys]
    constant = np.array([*(0.0 if line is None else line.constant for line in lines), 0.0])
    slope = np.array([*(0.0 if line is None else line.slope for line in lines), 0.0])
    by_flops = fast >= cut + whole
    alone = (constant + slope)[t.whole_key]
    launch = np.minimum(device.launch, alone)
    roofline = np.maximum(fast, cut + whole)
    scale = np.divide(alone - launch, roofline, out=np.zeros_like(alone), where=roofline > 0)
    measured = alone > 0
    fast, cut, whole = (np.where(measured, scale * part, part) for part in (fast, cut, whole))
    start = np.where(measured, np.where(roofline > 0, launch, alone), start)
    # What a device without shares of it runs whole: one number, but for the launch.
    own = (constant + slope)[key]
    line_slope = np.where(sharded, slope[key], own - np.minimum(device.launch, own))
    timed = own > 0
    fast = np.where(timed, np.where(by_flops, line_slope, 0.0), fast)
    cut = np.where(timed, np.where(by_flops, 0.0, line_slope), cut)
    whole = np.where(timed, 0.0, whole)
    start = np.where(timed, np.where(sharded, constant[key], np.minimum(device.launch, own)), start)
    views = t.free & timed
    fast, cut, whole = (np.where(views, 0.0, part) for part in (fast, cut, whole))
    start = np.where(views, own, start)
    return fast, cut, whole, start * calls + adding
