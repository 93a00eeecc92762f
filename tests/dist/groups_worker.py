"""One of three ranks of tests/dist/test_own_groups.py; ``python groups_worker.py RANK STORE BACKEND``.

The ranks make unequally many groups, and in between groups of all of them, hetspmd's and one of the program's.
Written to stdout: the sums over these, and whether that of HAP is the program's own.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hetspmd.dist.own_groups import made_group, own_group

RANK, WORLD, STORE, BACKEND = int(sys.argv[1]), 3, sys.argv[2], sys.argv[3]


def total(group: dist.ProcessGroup | None) -> int:
    """The sum of the numbers of the ranks, from 1 on."""
    tensor = torch.tensor([RANK + 1])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


dist.init_process_group(
    None if BACKEND == "none" else BACKEND,
    init_method=f"file://{STORE}",
    rank=RANK,
    world_size=WORLD,
    timeout=timedelta(seconds=30),
)
if RANK < 2:
    made_group([0, 1], "gloo")  # as a HAP of two ranks
own = own_group(None)
assert own is not None
assert own_group(None) is own
assert own_group(own) is own
again = made_group([2, 1, 0], "gloo")
of_program = dist.new_group([0, 1, 2], use_local_synchronization=True)
alone = dist.new_group([0], use_local_synchronization=True) if RANK == 0 else None
last = made_group([0, 1, 2], "gloo")
print(total(own), total(again), total(of_program), total(last), own is dist.group.WORLD)
# A rank that ends while a group's threads still let go of its last tensors is aborted by torch now and then.
dist.destroy_process_group()
