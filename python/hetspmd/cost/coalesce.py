"""How large a bucket of small collectives is (:mod:`hetspmd.program.buckets`), by the cluster's latency.

A collective takes ``fixed + bytes / rate`` seconds. A bucket of :data:`FULL` times ``fixed * rate`` bytes spends
``1 / (FULL + 1)`` of its time on what does not carry anything. A larger one would keep what is ready waiting for
longer than that saves; it never is larger than :data:`LARGEST`, as nothing is gained there any more.

``fixed`` and ``rate`` are those of an all-reduce: its latency, and the seconds that the slowest device takes to
issue it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.curves import Curve
from hetspmd.program.buckets import TINY

FULL: Final = TINY
LARGEST: Final = 32 * 2**20


def bucket_bytes(cluster: Cluster) -> int:
    """The most bytes of a bucket between the devices of a cluster; 0 on a lone device."""
    n = cluster.world
    if n == 1 or cluster.network is None:
        return 0
    terms = KINDS["all_reduce"].formula(n)
    fixed, per_byte = terms.latency * cluster.network.latency, terms.per_byte / cluster.network.bandwidth
    curves: Sequence[Curve] = sorted(
        (c for c in cluster.curves if c.kind == "all_reduce" and c.devices == n), key=lambda c: c.above
    )
    if curves:
        fixed, per_byte = curves[0].latency, curves[-1].per_byte
    fixed += max(d.issue for d in cluster.devices)
    return LARGEST if not per_byte else int(min(FULL * fixed / per_byte, LARGEST))
