"""One of three ranks of tests/dist/test_own_groups.py; ``python links_worker.py RANK FOLDER``.

Rank 2 goes at once. Rank 0 sends rank 1 what that never receives, on a carrier's thread, and ends the carriers when
its link to rank 2 is closed. Written to stdout by rank 0: whether the thread runs still.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hetspmd.dist import ring
from hetspmd.dist.own_groups import made_group
from hetspmd.dist.process_group import _Ports

RANK, WORLD, FOLDER = int(sys.argv[1]), 3, Path(sys.argv[2])
WAIT = 60.0
"""Seconds that rank 1 does not receive for, at most."""


def is_closed(group: dist.ProcessGroup, source: int) -> bool:
    """Whether the link to a rank is."""
    try:
        dist.irecv(torch.zeros(1), group=group, group_src=source, tag=7)
    except RuntimeError:
        return True
    return False


dist.init_process_group(
    "gloo", init_method=f"file://{FOLDER / 'store'}", rank=RANK, world_size=WORLD, timeout=timedelta(seconds=WAIT)
)
group = made_group(range(WORLD), "gloo")
dist.barrier(group)
if RANK == 2:
    os._exit(0)
end = time.monotonic() + WAIT
if RANK == 1:
    while not (FOLDER / "over").exists() and time.monotonic() < end:
        time.sleep(0.05)
else:
    while not is_closed(group, 2):
        assert time.monotonic() < end
        time.sleep(0.05)
    ports = _Ports(group, RANK, WORLD, 0)
    carrier = ring.Carrier(ports)
    carrier.carry(lambda: ports.send(torch.ones(1 << 22), 1).wait())
    thread = carrier._thread
    assert thread is not None
    ring.end_carriers()
    print(thread.is_alive())
    (FOLDER / "over").touch()
