"""Which points are measured, how much memory their devices have, and which settings of FSDP2 are tried.

The memory of a device lies between two counted figures:

    least   what FSDP2 holds there at its leanest: even rows, one at a time, recomputation, resharded and reduced in
            each micro-batch
    need    what DDP holds there at its leanest: rows in proportion to speed, one at a time, recomputation

    limit = least + part (need - least)

with :data:`LARGE` as the part of devices at least as fast as the mean, and :data:`SMALL` as that of the others. So
FSDP2 fits everywhere, and DDP nowhere, in however many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean

from emulated.accumulation import Setting
from emulated.spec import ClusterSpec
from versus import points as versus

CLUSTERS: Mapping[str, ClusterSpec] = {name: versus.CLUSTERS[name] for name in ("4:2:1:1", "2:1", "8:1:1:1")}
MODELS = ("ViT", "BERT", "BERT-MoE", "Llama")
SIZE = "fits"
LINK = versus.FASTEST_LINK
COMPILED = versus.COMPILED

LARGE, SMALL = 0.5, 0.25

OWN = 1 << 14
"""Bytes of each device that plans are not given. A process of hetspmd holds them whatever its plan is: coefficients
of the digests by which ranks compare what they have (:mod:`hetspmd.dist.digest`) and results of checks, which no
prediction counts. They are counted here like all else."""

FINAL = 2
"""The settings of FSDP2 that take turns with hetspmd: the fastest of a first turn of all that fit."""

Peaks = tuple[int, ...]
"""Bytes of each rank."""


def limits(least: Sequence[int], need: Sequence[int], speeds: Sequence[float]) -> Peaks:
    """The memory of each device, in bytes. Raises ValueError where DDP needs no more than FSDP2."""
    if any(n <= low for low, n in zip(least, need, strict=True)):
        raise ValueError(f"data parallelism needs {list(need)} bytes, and FSDP2 {list(least)}")
    mean = fmean(speeds)
    parts = [LARGE if speed >= mean else SMALL for speed in speeds]
    return tuple(int(low + p * (n - low)) for low, n, p in zip(least, need, parts, strict=True))


def leanest(rows: Sequence[int]) -> Setting:
    """The setting in which the least is held."""
    return Setting(max(rows), recompute=True, reshard=True, sync_each=True)


def within(peaks: Sequence[int], most: Sequence[int]) -> bool:
    """Whether every rank keeps to its limit."""
    return all(peak <= limit for peak, limit in zip(peaks, most, strict=True))


def halved(rows: Sequence[int]) -> list[int]:
    """The numbers of micro-batches that halving the micro-batch goes through, until it is of one row."""
    most = max(rows)
    return [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]


def hopeless(before: Sequence[int], held: Sequence[int], most: Sequence[int]) -> bool:
    """Whether a rank will not keep to its limit however often the micro-batch is halved.

    What halving saves is halved each time, so that all further ones together save what the last one did, at most.
    """
    ranks = zip(before, held, most, strict=False)
    return any(own - max(0, earlier - own) > limit for earlier, own, limit in ranks)


def fitting(
    rows: Sequence[int], most: Sequence[int], peaks: Callable[[Setting], Peaks]
) -> dict[Setting, Peaks]:
    """The settings that keep to the limits, with what each rank then holds: of each combination of recomputation,
    resharding and reduction the fewest micro-batches by halving.

    A combination that saves less in one of the three is tried from as many micro-batches on as one that saves more
    has needed, and not at all where that does not fit. Halving ends where it is hopeless.
    """
    counts = halved(rows)
    needed: dict[tuple[bool, ...], int | None] = {}
    found: dict[Setting, Peaks] = {}
    for spent in product((False, True), repeat=3):
        leaner = [
            needed[(*spent[:i], False, *spent[i + 1 :])] for i, generous in enumerate(spent) if generous
        ]
        known = [count for count in leaner if count is not None]
        needed[spent] = None
        if len(known) < len(leaner):
            continue
        recompute, reshard, sync_each = (not generous for generous in spent)
        before: Peaks = ()
        for count in counts[counts.index(max(known, default=1)) :]:
            # In one micro-batch it is the same when gradients are reduced.
            setting = Setting(count, recompute, reshard, sync_each or count == 1)
            held = found[setting] if setting in found else peaks(setting)
            if within(held, most):
                needed[spent], found[setting] = count, held
                break
            if hopeless(before, held, most):
                break
            before = held
    return found


def wanted(cluster: str, model: str, only: Sequence[str] | None) -> bool:
    """Whether the names leave a point: of each kind, one of those named, if any is."""
    for name, kind in ((cluster, CLUSTERS), (model, MODELS)):
        named = [n for n in only or () if n in kind]
        if named and name not in named:
            return False
    return True
